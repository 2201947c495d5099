//! How many processes and threads a sandbox has.
//!
//! The kernel refuses more than the limit by itself, and nobody would know why a program failed; so it is told. With a range of
//! user ids each has a count of its own in the kernel, and there those that are too many are killed.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    log::{Log, Spell},
    machine::News,
    status::Status,
    table::{GUEST, Table},
};
use crate::Exceeded;

/// How long there must have been fewer for the next time to be told.
const PAUSE: Duration = Duration::from_secs(1);

/// How often in a row those are killed that are too many. Each time reaches what those have started that the time before did
/// not; what is left then is found by the next look.
const PASSES: usize = 3;

/// The part of the limit from which on there are many.
const MANY: usize = 4;

#[derive(Debug)]
pub(super) struct Pids {
    limit: u32,
    /// Whether the kernel counts for each user alone.
    has_range: bool,
    /// How many there were, and which number was given out last by then.
    seen: Option<(u32, u32)>,
    spell: Spell,
    buffer: Vec<u8>,
}

impl Pids {
    pub(super) fn new(limit: u32, has_range: bool) -> Self {
        Self { limit, has_range, seen: None, spell: Spell::default(), buffer: Vec::new() }
    }

    /// Tells whether the processes need to be looked at: whether the numbers that were given out since are enough for there to be
    /// too many.
    pub(super) fn wants_look(&self, news: &News) -> bool {
        let (Some((had, then)), Some(last)) = (self.seen, news.last_number) else { return true };
        // Numbers begin anew at the end, now and then.
        last.checked_sub(then).is_none_or(|given_out| had.saturating_add(given_out) >= self.limit)
    }

    /// Tells whether so many processes, of an unknown number of threads each, are worth a look.
    pub(super) fn are_many(&self, n_processes: usize) -> bool {
        n_processes.saturating_mul(MANY) >= usize::try_from(self.limit).unwrap_or(usize::MAX)
    }

    /// Looks at all processes, which were listed after `news`.
    pub(super) fn look(&mut self, now: Instant, news: &News, table: &Table, all: &[(u32, Status)], log: &Log) {
        let n_tasks = all.iter().fold(0_u32, |sum, (_, status)| sum.saturating_add(status.threads));
        // The guest's own count for the kernel, and so does the process outside that waits for it.
        let of_guest = table.guest(&mut self.buffer).map_or(1, |status| status.threads) + 1;
        let counted = n_tasks.saturating_add(of_guest);
        self.seen = news.last_number.map(|last| (counted, last));
        let is_reached = if self.has_range {
            n_tasks > self.limit
        } else {
            // What tasks are held to has the guest's threads on top, as many as there were when they were started.
            counted >= self.limit && self.newest(table, all).is_none_or(|most| counted >= most)
        };
        let tells = self.spell.tells(is_reached, now, PAUSE);
        let killed = if is_reached && self.has_range { self.kill(table, all) } else { 0 };
        if tells {
            log.note(Exceeded::Pids { limit: self.limit, killed });
        }
    }

    /// Returns at how many processes the kernel refuses those that start others, as the newest of them shows.
    fn newest(&mut self, table: &Table, all: &[(u32, Status)]) -> Option<u32> {
        let newest = all.iter().map(|(pid, _)| *pid).max()?;
        table.most_processes(newest, &mut self.buffer)
    }

    /// Kills everything but what the guest itself has started: what keeps starting others cannot be told from what it starts.
    fn kill(&mut self, table: &Table, all: &[(u32, Status)]) -> u32 {
        self.seen = None;
        let shells = shells(table, all.iter().map(|(pid, _)| *pid), GUEST, &mut self.buffer);
        let mut n_killed = 0_u32;
        for _ in 0..PASSES {
            match table.kill_all(|pid| !shells.contains(&pid)) {
                0 => break,
                n_more => n_killed = n_killed.saturating_add(n_more),
            }
        }
        n_killed
    }
}

/// How many shells and interpreters a sandbox has at most, with some to spare.
const MOST_SHELLS: usize = 4;

/// Returns the first processes that the guest has started as leaders of sessions: the shell and the interpreter that tools talk
/// to. What has lost its parent, and come to the guest since, has mostly no session of its own or a later number. `guest` is the
/// guest's number in this `/proc`.
pub(super) fn shells(table: &Table, pids: impl Iterator<Item = u32>, guest: u32, buffer: &mut Vec<u8>) -> Vec<u32> {
    let mut pids: Vec<u32> = pids.collect();
    pids.sort_unstable();
    let is_shell =
        |pid: &u32| table.stat(*pid, buffer).is_some_and(|stat| stat.parent == guest && stat.session == *pid);
    pids.into_iter().filter(is_shell).take(MOST_SHELLS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_needs_to_be_seen_until_as_many_numbers_were_given_out() {
        let mut pids = Pids::new(100, false);
        let news = |last_number| News { last_number, ..News::default() };
        assert!(pids.wants_look(&news(Some(5))), "nothing is known yet");
        pids.seen = Some((60, 1000));
        assert!(!pids.wants_look(&news(Some(1039))));
        assert!(pids.wants_look(&news(Some(1040))));
        assert!(pids.wants_look(&news(Some(7))), "they began anew");
        assert!(pids.wants_look(&news(None)), "nothing is told");
    }
}
