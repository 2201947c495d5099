//! What is noted of a sandbox until somebody asks.

use std::{sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::{
    disk::Disk,
    machine::{self, News},
    pids::Pids,
    table::Table,
};
use crate::Exceeded;

/// What is kept; of more only the number is told.
const MOST: usize = 64;

/// What a sandbox wanted more of than it may have, until somebody asks.
#[derive(Debug)]
pub(crate) struct Log {
    notes: Mutex<Notes>,
    disk: Disk,
    pids: Option<Mutex<Pids>>,
    table: Arc<Table>,
}

#[derive(Debug, Default)]
struct Notes {
    kept: Vec<Exceeded>,
    n_left_out: u32,
}

impl Log {
    pub(super) fn new(disk: Disk, pids: Option<Pids>, table: Arc<Table>) -> Self {
        Self { notes: Mutex::default(), disk, pids: pids.map(Mutex::new), table }
    }

    /// Returns what was noted since this was last called, in order. What programs have `said` meanwhile tells of more.
    pub(crate) fn take(&self, said: &str) -> Vec<Exceeded> {
        let now = Instant::now();
        self.look_at_disk(now);
        if let Some(mut pids) = self.pids() {
            self.look_at_many(now, &mut pids);
            pids.hear(said, now, self);
        }
        let Notes { mut kept, n_left_out } = std::mem::take(&mut *self.notes.lock());
        if n_left_out > 0 {
            kept.push(Exceeded::Others { count: n_left_out });
        }
        kept
    }

    pub(super) fn note(&self, exceeded: Exceeded) {
        let mut notes = self.notes.lock();
        if notes.kept.len() < MOST {
            notes.kept.push(exceeded);
        } else {
            notes.n_left_out = notes.n_left_out.saturating_add(1);
        }
    }

    /// Returns how many processes there are, for whoever looks at them.
    pub(super) fn pids(&self) -> Option<MutexGuard<'_, Pids>> {
        self.pids.as_ref().map(Mutex::lock)
    }

    /// Looks at the processes now, if there are many: what has just filled the sandbox is told with the call that did it.
    fn look_at_many(&self, now: Instant, pids: &mut Pids) {
        let numbers = self.table.pids();
        if !pids.are_many(numbers.len()) {
            return;
        }
        let news = News { last_number: machine::last_number(), ..News::default() };
        let mut buffer = Vec::new();
        let status = |pid| Some((pid, self.table.status(pid, &mut buffer)?));
        let all: Vec<_> = numbers.into_iter().filter_map(status).collect();
        pids.look(now, &news, &self.table, &all, self);
    }

    /// Notes what is full of the disk.
    pub(super) fn look_at_disk(&self, now: Instant) {
        for full in self.disk.look(now) {
            self.note(full);
        }
    }
}

/// Something that begins, goes on and ends, and is told of once.
#[derive(Debug, Default)]
pub(super) struct Spell {
    is_told: bool,
    /// When it was last seen going on, once it was told.
    last: Option<Instant>,
}

impl Spell {
    /// Returns whether to tell of it now. A new one that begins within `pause` of the last is the same still.
    pub(super) fn tells(&mut self, goes_on: bool, now: Instant, pause: Duration) -> bool {
        if !goes_on {
            self.is_told &= self.last.is_some_and(|last| now.saturating_duration_since(last) < pause);
            return false;
        }
        let is_new = !self.is_told;
        self.is_told = true;
        self.last = Some(now);
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spell_is_told_once_and_the_next_one_again() {
        let (mut spell, start, pause) = (Spell::default(), Instant::now(), Duration::from_secs(1));
        let mut tells = |goes_on, millis| spell.tells(goes_on, start + Duration::from_millis(millis), pause);
        assert!(!tells(false, 0));
        assert!(tells(true, 100));
        assert!(!tells(true, 200) && !tells(true, 900));
        assert!(!tells(false, 1000) && !tells(true, 1100), "it was hardly over");
        assert!(!tells(false, 2200) && tells(true, 2300));
    }
}
