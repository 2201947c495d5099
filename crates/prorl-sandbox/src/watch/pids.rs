//! How many processes and threads a sandbox has.
//!
//! The kernel refuses more than the limit by itself, and nobody would know why a program failed; so it is told. With a range of
//! user ids each has a count of its own in the kernel, and there those that are too many are killed. So is a bomb: a sandbox that is
//! full of processes which all want to run.

use std::{collections::HashSet, time::Duration};

use tokio::time::Instant;

use super::{
    log::{Log, Spell},
    machine::{self, News},
    status::Status,
    table::{GUEST, Table},
    thread::LONGEST,
};
use crate::Exceeded;

/// How long there must have been fewer for the next time to be told.
const PAUSE: Duration = Duration::from_secs(1);

/// How long a sandbox may be full of processes that all want to run.
const MOMENT: Duration = Duration::from_millis(40);

/// How often to look meanwhile.
const OFTEN: Duration = Duration::from_millis(20);

/// How soon to look again on a machine that starts very many processes, one of which may be a bomb.
const RESTLESS: Duration = Duration::from_millis(25);

/// How many processes a millisecond are very many.
const VERY_MANY: u128 = 2;

/// The fewest that are a crowd.
const LEAST_CROWD: usize = 16;

/// How often in a row those are stopped that are too many. Each time reaches what those have started that the time before did
/// not; what is left then is found by the next look.
const PASSES: usize = 8;

/// More processes and threads than there are in a sandbox that has just started.
const AT_FIRST: u32 = 16;

/// The part of the limit from which on there are many.
const MANY: usize = 4;

/// What programs say whose process or thread the kernel has refused: the system's own words, shells, Python, Java and Go.
const REFUSED: [&str; 8] = [
    "Resource temporarily unavailable",
    "annot fork",
    "an't fork",
    "[Errno 11]",
    "EAGAIN",
    "can't start new thread",
    "unable to create native thread",
    "failed to create new OS thread",
];

#[derive(Debug)]
pub(super) struct Pids {
    limit: u32,
    /// Whether the kernel counts for each user alone.
    has_range: bool,
    /// How many there were, and which number was given out last by then.
    seen: Option<(u32, u32)>,
    /// How many there can have been at once before that, and since somebody asked.
    most: u32,
    /// Since when half of them want to run and no more can be started.
    crowded: Option<Instant>,
    /// When the machine was last asked, and which number had been given out last.
    heard: Option<(Instant, u32)>,
    is_restless: bool,
    spell: Spell,
    buffer: Vec<u8>,
}

impl Pids {
    pub(super) fn new(limit: u32, has_range: bool) -> Self {
        let seen = machine::last_number().map(|last| (AT_FIRST, last));
        Self {
            limit,
            has_range,
            seen,
            most: 0,
            crowded: None,
            heard: None,
            is_restless: false,
            spell: Spell::default(),
            buffer: Vec::new(),
        }
    }

    /// Tells whether the processes need to be looked at: whether the numbers that were given out since are enough for there to be
    /// too many.
    pub(super) fn wants_look(&self, news: &News) -> bool {
        self.bound(news.last_number) >= self.limit
    }

    /// Learns how many the machine starts, and returns how long the next look can wait.
    pub(super) fn wait(&mut self, now: Instant, news: &News) -> Duration {
        if let (Some((then, before)), Some(last)) = (self.heard, news.last_number) {
            let millis = now.saturating_duration_since(then).as_millis().max(1);
            self.is_restless = u128::from(last.saturating_sub(before)) > millis.saturating_mul(VERY_MANY);
        }
        self.heard = news.last_number.map(|last| (now, last));
        match (self.crowded, self.is_restless) {
            (Some(_), _) => OFTEN,
            (None, true) => RESTLESS,
            (None, false) => LONGEST,
        }
    }

    /// Tells whether the sandbox is full of processes that want to run.
    pub(super) fn is_crowded(&self) -> bool {
        self.crowded.is_some()
    }

    /// Returns how many there can have been at once since they were last looked at.
    fn bound(&self, last_number: Option<u32>) -> u32 {
        let (Some((had, then)), Some(last)) = (self.seen, last_number) else { return u32::MAX };
        // Numbers begin anew at the end, now and then.
        last.checked_sub(then).map_or(u32::MAX, |given_out| had.saturating_add(given_out))
    }

    /// Tells of the limit when a program has said that it was refused one, and when there can have been as many since this was last
    /// called. Mostly there are fewer again by then, because that program has ended.
    pub(super) fn hear(&mut self, said: &str, now: Instant, log: &Log) {
        let is_refusal = REFUSED.iter().any(|words| said.contains(words));
        if is_refusal
            && (self.most >= self.limit || self.bound(machine::last_number()) >= self.limit)
            && self.spell.tells(true, now, PAUSE)
        {
            log.note(Exceeded::Pids { limit: self.limit, killed: 0 });
        }
        self.most = 0;
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
        self.most = self.most.max(self.bound(news.last_number));
        self.seen = news.last_number.map(|last| (counted, last));
        let is_reached = if self.has_range {
            n_tasks > self.limit
        } else {
            // What tasks are held to has the guest's threads on top, as many as there were when they were started.
            counted >= self.limit && self.newest(table, all).is_none_or(|most| counted >= most)
        };
        let is_bomb = is_reached && self.is_bomb(now, table, all);
        if !is_reached {
            self.crowded = None;
        }
        let tells = self.spell.tells(is_reached, now, PAUSE);
        let killed = if is_bomb || (is_reached && self.has_range) { self.kill(is_bomb, table, all) } else { 0 };
        if tells || is_bomb {
            log.note(Exceeded::Pids { limit: self.limit, killed });
        }
    }

    /// Tells whether half of all that there can be want to run, and have for more than a moment: they start others as fast as they
    /// can, and each that is refused costs the machine almost as much as one that is not.
    fn is_bomb(&mut self, now: Instant, table: &Table, all: &[(u32, Status)]) -> bool {
        let wants_to_run = |pid| table.stat(pid, &mut self.buffer).is_some_and(|stat| stat.wants_to_run());
        let n_running = all.iter().map(|(pid, _)| *pid).map(wants_to_run).filter(|wants| *wants).count();
        let is_crowd = n_running >= LEAST_CROWD && n_running.saturating_mul(2) >= all.len();
        if !is_crowd {
            self.crowded = None;
            return false;
        }
        let since = *self.crowded.get_or_insert(now);
        if now.saturating_duration_since(since) < MOMENT {
            return false;
        }
        self.crowded = None;
        true
    }

    /// Returns at how many processes the kernel refuses those that start others, as the newest of them shows.
    fn newest(&mut self, table: &Table, all: &[(u32, Status)]) -> Option<u32> {
        let newest = all.iter().map(|(pid, _)| *pid).max()?;
        table.most_processes(newest, &mut self.buffer)
    }

    /// Kills everything but what the guest itself has started: what keeps starting others cannot be told from what it starts.
    /// In a bomb a shell that wants to run is part of it: one that has only started it waits.
    fn kill(&mut self, is_bomb: bool, table: &Table, all: &[(u32, Status)]) -> u32 {
        self.seen = None;
        let mut shells = shells(table, all.iter().map(|(pid, _)| *pid), GUEST, &mut self.buffer);
        if is_bomb {
            shells.retain(|pid| table.stat(*pid, &mut self.buffer).is_none_or(|stat| !stat.wants_to_run()));
        }
        let mut stopped = HashSet::new();
        let is_one = |pid: u32| !shells.contains(&pid);
        // Dead ones would make room for others.
        for _ in 0..PASSES {
            if table.stop_all(&mut stopped, is_one) == 0 {
                break;
            }
        }
        table.kill_all(is_one)
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
    use std::{fs::File, sync::Arc};

    use super::*;
    use crate::watch::disk::{Disk, Files};

    #[test]
    fn nothing_needs_to_be_seen_until_as_many_numbers_were_given_out() {
        let mut pids = Pids::new(100, false);
        let news = |last_number| News { last_number, ..News::default() };
        pids.seen = None;
        assert!(pids.wants_look(&news(Some(5))), "nothing is known");
        pids.seen = Some((60, 1000));
        assert!(!pids.wants_look(&news(Some(1039))));
        assert!(pids.wants_look(&news(Some(1040))));
        assert!(pids.wants_look(&news(Some(7))), "they began anew");
        assert!(pids.wants_look(&news(None)), "nothing is told");
    }

    #[test]
    fn a_machine_that_starts_many_is_looked_at_soon() {
        let mut pids = Pids::new(100, false);
        let start = Instant::now();
        let mut wait = |millis, last| {
            let news = News { last_number: Some(last), ..News::default() };
            pids.wait(start + Duration::from_millis(millis), &news)
        };
        assert_eq!(wait(0, 1000), LONGEST, "nothing is known yet");
        assert_eq!(wait(100, 1100), LONGEST);
        assert_eq!(wait(200, 1400), RESTLESS);
        assert_eq!(wait(225, 1400), LONGEST);
        assert_eq!(wait(325, 5), LONGEST, "they began anew");
    }

    #[test]
    fn a_refusal_is_believed_where_there_can_have_been_so_many() {
        let proc = File::open("/proc").unwrap();
        let table = Arc::new(Table::new(proc.into()));
        let layer = || File::open("/").unwrap().into();
        let log = Log::new(Disk::new(Files::new(layer(), layer())), None, table);
        let refused = "bash: fork: retry: Resource temporarily unavailable";
        let heard = |seen, most, said| {
            let mut pids = Pids { seen, most, ..Pids::new(100, false) };
            pids.hear(said, Instant::now(), &log);
            assert_eq!(pids.most, 0);
            log.take("").contains(&Exceeded::Pids { limit: 100, killed: 0 })
        };
        let few = Some((10, machine::last_number().unwrap()));
        assert!(heard(few, 100, refused) && heard(None, 0, "sh: 1: Cannot fork"));
        assert!(heard(few, 100, "RuntimeError: can't start new thread"));
        assert!(!heard(few, 100, "all is well"));
        let far = Some((0, machine::last_number().unwrap()));
        let is_idle = |far: Option<(u32, u32)>| machine::last_number().unwrap() < far.unwrap().1 + 100;
        assert!(!heard(far, 99, refused) || !is_idle(far), "there never were so many");
    }
}
