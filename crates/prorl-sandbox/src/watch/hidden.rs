//! Shared memory that may be in no process: how much of it a sandbox holds.
//!
//! Where this user may ask the kernel, each object tells what it has. Elsewhere three things bound it: what has come to the
//! machine since the sandbox had no such objects, how large its objects were seen to be, and how many pages its processes were given.

use std::{
    collections::{HashMap, HashSet},
    sync::LazyLock,
};

use nix::unistd::{SysconfVar, sysconf};

use super::{machine::News, maps::Id};

/// What part of the limit may come to the machine before it is looked for.
const PART: u64 = 8;

/// What may come whatever the limit is, in bytes.
const LEAST: u64 = 4 << 20;

/// More objects than this are not seen each before it is trimmed, in a sandbox that trims them.
const FEW: usize = 64;

/// How many faults may be lost between reading two processes.
const SLACK: u64 = 256;

/// What a fault brings at most: a page, or a huge one where the machine makes shared memory of them; in bytes.
static OF_FAULT: LazyLock<u64> = LazyLock::new(|| {
    let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|bytes| bytes.try_into().ok()).unwrap_or(4096);
    if huge.is_empty() || huge.contains("[never]") || huge.contains("[deny]") { page } else { HUGE }
});

/// The size of a huge page, where that is not told.
const HUGE: u64 = 2 << 20;

#[derive(Debug)]
pub(super) struct Hidden {
    /// How much may come to the machine until the next look, in bytes.
    due: u64,
    /// What the machine had when the sandbox was last looked at, or less.
    seen: Option<u64>,
    /// Whether to look again, whatever came.
    is_due: bool,
    /// What it had when the sandbox held nothing, or less.
    none: Option<u64>,
    /// What processes had been given then.
    faults_then: u64,
    /// What they have been given at most, and whether some have taken their count with them unseen.
    faults: u64,
    is_lost: bool,
    /// How large each object was seen to be.
    ends: HashMap<Id, u64>,
    /// Whether one was seen to be smaller than before.
    is_trimmed: bool,
}

impl Hidden {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            due: (limit / PART).max(LEAST),
            seen: None,
            is_due: false,
            none: None,
            faults_then: 0,
            faults: 0,
            is_lost: false,
            ends: HashMap::new(),
            is_trimmed: false,
        }
    }

    /// Takes note of what the machine has.
    pub(super) fn note(&mut self, news: &News) {
        let Some(now) = news.shared else { return };
        for before in [&mut self.seen, &mut self.none] {
            *before = Some(before.map_or(now, |before| before.min(now)));
        }
    }

    /// Tells whether so much has come that objects need to be looked at.
    pub(super) fn is_due(&self, news: &News) -> bool {
        self.is_due || news.shared.zip(self.seen).is_none_or(|(now, seen)| now.saturating_sub(seen) >= self.due)
    }

    /// Has objects looked for, whatever has come: those are gone that were known, and others may hold the same.
    pub(super) fn look_again(&mut self) {
        self.is_due = true;
    }

    /// Takes note of how often all processes have been given a page, those included that are waited for.
    pub(super) fn note_faults(&mut self, faults: u64) {
        self.is_lost |= faults.saturating_add(SLACK) < self.faults;
        self.faults = self.faults.max(faults);
    }

    /// Takes note of how large an object is in a process.
    pub(super) fn note_object(&mut self, id: Id, end: u64) {
        let most = self.ends.entry(id).or_insert(end);
        self.is_trimmed |= end < *most;
        *most = end.max(*most);
    }

    /// Ends a look at all processes, which began after `news`; these are all objects that there are.
    pub(super) fn is_looked_at(&mut self, news: &News, objects: &HashSet<Id>) {
        self.seen = news.shared;
        self.is_due = false;
        self.ends.retain(|id, _| objects.contains(id));
        if objects.is_empty() {
            self.none = news.shared;
            self.faults_then = self.faults;
            self.is_lost = false;
            self.is_trimmed = false;
        }
    }

    /// Returns what objects have together at most that do not tell it.
    pub(super) fn most(&self, news: &News, silent: impl Iterator<Item = Id>) -> u64 {
        let (mut n_silent, mut ends) = (0, 0_u64);
        for id in silent {
            n_silent += 1;
            ends = ends.saturating_add(self.ends.get(&id).copied().unwrap_or(u64::MAX));
        }
        if n_silent == 0 {
            return 0;
        }
        let come = news.shared.zip(self.none).map_or(u64::MAX, |(now, none)| now.saturating_sub(none));
        let given = self.faults.saturating_sub(self.faults_then).saturating_mul(*OF_FAULT);
        let ends = if n_silent > FEW && self.is_trimmed { u64::MAX } else { ends };
        come.min(ends).min(if self.is_lost { u64::MAX } else { given })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn news(mib: u64) -> News {
        News { shared: Some(mib * MIB), ..News::default() }
    }

    fn object(inode: u64, mib: u64) -> (Id, u64) {
        ((1, inode), mib * MIB)
    }

    /// What is known after one look, at which processes had been given `faults` pages in all.
    fn with(objects: &[(Id, u64)], faults: u64) -> Hidden {
        let mut hidden = Hidden::new(64 * MIB);
        hidden.note(&news(100));
        hidden.note_faults(1000);
        hidden.is_looked_at(&news(100), &HashSet::new());
        hidden.note_faults(faults);
        for (id, end) in objects {
            hidden.note_object(*id, *end);
        }
        hidden
    }

    fn most(hidden: &Hidden, mib: u64, objects: &[(Id, u64)]) -> u64 {
        hidden.most(&news(mib), objects.iter().map(|(id, _)| *id)) / MIB
    }

    #[test]
    fn nothing_is_looked_for_until_enough_has_come() {
        let mut hidden = with(&[], 1000);
        assert!(!hidden.is_due(&news(107)));
        assert!(hidden.is_due(&news(108)));
        hidden.note(&news(60));
        assert!(hidden.is_due(&news(68)), "what others give up makes no room");
        assert!(hidden.is_due(&News::default()), "nothing is told");
        hidden.is_looked_at(&news(60), &HashSet::new());
        assert!(!hidden.is_due(&news(60)));
        hidden.look_again();
        hidden.note(&news(60));
        assert!(hidden.is_due(&news(60)));
    }

    #[test]
    fn what_is_hidden_has_come_and_fits_and_was_given() {
        let one = [object(1, 300)];
        let hidden = with(&one, 1000 + 200 * 256);
        assert_eq!(most(&hidden, 150, &one), 50, "no more has come");
        assert_eq!(most(&hidden, 900, &one), 200, "no more was given");
        assert_eq!(most(&with(&one, 1 << 30), 900, &one), 300, "no more fits");
        assert_eq!(most(&hidden, 900, &[]), 0);
    }

    #[test]
    fn a_trimmed_object_is_as_large_as_it_was() {
        let mut hidden = with(&[object(1, 300)], 1 << 30);
        hidden.note_object((1, 1), MIB);
        assert_eq!(most(&hidden, 900, &[object(1, 1)]), 300);
        let many: Vec<_> = (0..100).map(|inode| object(inode, 2)).collect();
        let mut hidden = with(&many, 1 << 30);
        assert_eq!(most(&hidden, 900, &many), 200);
        hidden.note_object((1, 1), MIB);
        assert_eq!(most(&hidden, 900, &many), 800, "some may have been trimmed unseen");
        assert_eq!(most(&hidden, 900, &many[..20]), 40, "but not of a few");
    }

    #[test]
    fn counts_that_nobody_has_any_more_bound_nothing() {
        let one = [object(1, 300)];
        let mut hidden = with(&one, 2000);
        assert_eq!(most(&hidden, 900, &one), 3);
        hidden.note_faults(1000);
        assert_eq!(most(&hidden, 900, &one), 300);
    }
}
