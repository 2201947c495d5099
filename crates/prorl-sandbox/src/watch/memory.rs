//! The memory that a sandbox's processes have together: what is no file's on a disk, and the tables of pages.
//!
//! Three bounds, each dearer and closer than the one before. What a sandbox was last seen with, and all that the machine has
//! handed out since: that costs nothing. What `status` tells of each process: pages that are shared count for each of those
//! that share them. The share of each process as the kernel divides pages: exact, and it takes as long as walking through all of
//! them, so it is found out in turns. Only by the last one, or by a single process that has more than the limit alone, is anything
//! killed.
//!
//! Shared memory may be in no process: its pages stay when those that mapped them give them up. It is looked for when the machine has
//! got more shared memory than files account for.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::{
    log::Log,
    machine::{self, News},
    status::Status,
    survey::{Found, Survey, Wanted},
    table::{Process, Table},
    thread::LONGEST,
};
use crate::Exceeded;

/// Nothing takes memory faster, in bytes per second.
const SPEED: u64 = 10_000_000_000;

/// What a look may take by itself.
const LOOK: Duration = Duration::from_millis(1);

/// What part of the limit the machine may have handed out since a look, before the next one.
const VAGUE: u64 = 4;

/// How soon to look again at what is being killed.
const SOON: Duration = Duration::from_millis(1);

/// How soon to go on with dividing pages. Others have their turn.
const NEXT_TURN: Duration = Duration::from_millis(5);

/// How long a killed process may take to give up its memory. One that waits for a device takes longer, and takes nothing more.
const DYING: Duration = Duration::from_secs(10);

/// How far the sizes of two processes may differ that have the same memory, in bytes: they are not read at one time.
const NEARLY: u64 = 1 << 20;

/// How long a process that was started by `vfork` may have its parent's memory, and not count. It has it until it executes a
/// program.
const MOMENT: Duration = Duration::from_millis(250);

/// How much longer than dividing pages took the next time can wait, as long as there was not too much. A single process that has too
/// much needs no division.
const DIVIDING: u32 = 4;

/// How much time there is for a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// Others wait.
    Quick,
    /// Only those wait that are slow too.
    Slow,
}

/// The processes of a sandbox, and who is told of them.
#[derive(Clone, Copy)]
pub(super) struct Processes<'a> {
    pub(super) table: &'a Table,
    pub(super) all: &'a [(u32, Status)],
    pub(super) log: &'a Log,
}

#[derive(Debug)]
pub(super) struct Memory {
    limit: u64,
    /// How far a count that the kernel keeps may be off, in bytes.
    lag: u64,
    /// What the sandbox had at most when it was last looked at, and what the machine had handed out by then if it tells.
    seen: Option<(u64, Option<u64>)>,
    /// Processes that have been killed and may not have given up their memory yet, and since when.
    dying: Vec<(u32, Process, Instant)>,
    /// Whether the last look found too much, and the next one is to confirm it.
    is_suspect: bool,
    /// Processes that looked like ones just started by `vfork`, and since when.
    twins: HashMap<u32, Instant>,
    survey: Survey,
    /// When pages may be divided again.
    rested: Option<Instant>,
    buffer: Vec<u8>,
}

impl Memory {
    pub(super) fn new(limit: u64) -> Self {
        let lag = machine::lag();
        Self {
            limit,
            lag,
            seen: None,
            dying: Vec::new(),
            is_suspect: false,
            twins: HashMap::new(),
            survey: Survey::new(limit),
            rested: None,
            buffer: Vec::new(),
        }
    }

    /// Tells whether the processes need to be looked at.
    pub(super) fn wants_look(&mut self, news: &News) -> bool {
        self.survey.note(news);
        // Looked at before it has to be, it need not be looked at often.
        let is_vague = |bound: u64| {
            let had = self.seen.map_or(0, |(had, _)| had);
            bound >= self.limit || bound.saturating_sub(had) >= self.limit / VAGUE
        };
        self.is_urgent() || self.survey.is_due(news) || self.bound(news).is_none_or(is_vague)
    }

    /// Tells whether there may be too much, and it is just being found out or ended.
    pub(super) fn is_urgent(&self) -> bool {
        self.is_suspect || !self.dying.is_empty() || self.survey.is_under_way()
    }

    /// Returns how long the next look can wait.
    pub(super) fn wait(&self, news: &News) -> Duration {
        if self.is_suspect || !self.dying.is_empty() {
            return SOON;
        }
        if self.survey.is_under_way() {
            return NEXT_TURN;
        }
        wait(self.limit, self.bound(news).or(self.seen.map(|(had, _)| had)).unwrap_or(0))
    }

    /// Returns what the sandbox has at most now.
    fn bound(&self, news: &News) -> Option<u64> {
        let (had, then) = self.seen?;
        Some(had.saturating_add(news.handed_out?.saturating_sub(then?)))
    }

    /// Looks at all processes, which were listed after `news`, and kills some if they have too much. What takes long is done only if
    /// there is time; returns false if there should be.
    pub(super) fn look(&mut self, now: Instant, news: &News, pace: Pace, processes: &Processes<'_>) -> bool {
        let Processes { table, all, log } = *processes;
        let buffer = &mut self.buffer;
        self.dying.retain(|(_, process, since)| {
            let is_there = !process.is_reaped() && process.status(buffer).is_some_and(|status| status.runs());
            is_there && now.saturating_duration_since(*since) < DYING
        });
        let counted = |pid: u32| !self.dying.iter().any(|(dying, ..)| *dying == pid);
        let mut living: Vec<_> = all.iter().filter(|(pid, _)| counted(*pid)).collect();
        living.sort_unstable_by_key(|(_, status)| std::cmp::Reverse(status.most()));
        self.survey.keep(&living);
        // Pages that one process has are all different ones.
        if let Some((pid, first)) = living.first()
            && first.most() > self.limit.saturating_add(self.lag)
        {
            self.kill(now, *pid, table, log);
            return true;
        }
        let most = self.most(news, &living);
        let wanted = if most > self.limit { Wanted::Shares } else { Wanted::Objects };
        if wanted == Wanted::Objects && !self.survey.is_due(news) {
            self.survey.end_round();
            self.is_fine(most, news);
            return true;
        }
        if self.rested.is_some_and(|rested| now < rested) {
            return true;
        }
        if pace == Pace::Quick {
            return false;
        }
        let twins = self.twins(now, table, &living);
        living.retain(|(pid, _)| !twins.contains(pid));
        match self.survey.turn(news, table, &living, wanted) {
            Found::Part => {}
            Found::TooMuch => self.has_too_much(now, news, table, log),
            Found::Fine => {
                self.rest(now);
                let most = self.most(news, &living);
                if most <= self.limit {
                    self.is_fine(most, news);
                }
            }
            Found::Has(total, then) => {
                self.rest(now);
                self.is_fine(total, &then);
            }
        }
        true
    }

    /// Returns what processes have together at most, by what is cheap to know.
    fn most(&self, news: &News, living: &[&(u32, Status)]) -> u64 {
        let (own, shared) = living.iter().fold((0_u64, 0_u64), |(own, shared), (_, status)| {
            (own.saturating_add(status.private).saturating_add(self.lag), shared.saturating_add(status.shared))
        });
        own.saturating_add(shared.max(self.survey.hidden(news)))
    }

    /// Ends a round of the survey and rests from it.
    fn rest(&mut self, now: Instant) {
        self.rested = Some(now + now.elapsed() + (self.survey.end_round() * DIVIDING).min(LONGEST));
    }

    fn is_fine(&mut self, had: u64, news: &News) {
        self.is_suspect = false;
        self.seen = Some((had, news.handed_out));
    }

    fn has_too_much(&mut self, now: Instant, news: &News, table: &Table, log: &Log) {
        self.rested = None;
        // A process that has just been started by `vfork` counts twice for the moment that it takes to execute another program.
        if !std::mem::replace(&mut self.is_suspect, true) {
            self.survey.end_round();
            return;
        }
        // What a process gives up when it ends is its share at most: the next one has to go too if that is not enough.
        for pid in self.survey.greediest(news) {
            if self.survey.total(news) <= self.limit {
                break;
            }
            self.survey.forget(pid);
            self.kill(now, pid, table, log);
        }
        self.survey.end_round();
    }

    /// Returns children that still have their parent's own memory, which the kernel does not divide among them: those that were
    /// started by `vfork`, until they execute a program. One for each parent, which waits meanwhile.
    fn twins(&mut self, now: Instant, table: &Table, living: &[&(u32, Status)]) -> Vec<u32> {
        let by_pid: HashMap<u32, &Status> = living.iter().map(|(pid, status)| (*pid, status)).collect();
        let mut found = HashMap::new();
        for (pid, status) in living {
            let Some(parent) = by_pid.get(&status.parent) else { continue };
            let is_alike = status.addresses == parent.addresses && status.most().abs_diff(parent.most()) <= NEARLY;
            let mut waits =
                || Process::open(table, status.parent).is_some_and(|it| it.has_waiting_thread(&mut self.buffer));
            if is_alike && !found.contains_key(&status.parent) {
                found.insert(status.parent, waits().then_some(*pid));
            }
        }
        // One that stays is no such child, whatever it looks like.
        let since = std::mem::take(&mut self.twins);
        self.twins = found.into_values().flatten().map(|pid| (pid, since.get(&pid).copied().unwrap_or(now))).collect();
        let is_new = |since: Instant| now.saturating_duration_since(since) < MOMENT;
        self.twins.iter().filter(|(_, since)| is_new(**since)).map(|(pid, _)| *pid).collect()
    }

    fn kill(&mut self, now: Instant, pid: u32, table: &Table, log: &Log) {
        self.seen = None;
        // What is read through the folder is told of the process that is killed through it, whoever had the number before.
        let Some(process) = Process::open(table, pid) else { return };
        let Some(status) = process.status(&mut self.buffer).filter(Status::runs) else { return };
        log.note(Exceeded::Memory { limit_bytes: self.limit, name: status.name, pid });
        if let Err(error) = process.kill() {
            tracing::warn!(pid, %error, "process that has too much memory was not killed");
        }
        self.dying.push((pid, process, now));
    }
}

/// Returns how long what has so many bytes now can grow before it has one and a half times the limit, but for the time that a look
/// takes.
fn wait(limit: u64, has: u64) -> Duration {
    let room = limit.saturating_add(limit / 2).saturating_sub(has);
    let nanos = u128::from(room) * 1_000_000_000 / u128::from(SPEED);
    let wait = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
    wait.saturating_sub(LOOK).clamp(SOON, LONGEST)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A limit below which no look could come in time.
    const LEAST: u64 = 64 << 20;

    proptest! {
        #[test]
        fn nothing_grows_to_one_and_a_half_times_its_limit_unseen(limit in LEAST..1 << 45, has: u64) {
            let has = has % limit;
            let wait = wait(limit, has);
            prop_assert!(wait <= LONGEST);
            let grown = u128::from(SPEED) * (wait + LOOK).as_nanos() / 1_000_000_000;
            prop_assert!(u128::from(has) + grown <= u128::from(limit) * 3 / 2, "{has} grows by {grown} in {wait:?}");
        }
    }

    #[test]
    fn nothing_needs_to_be_seen_until_the_machine_has_handed_out_the_rest() {
        let mut memory = Memory::new(1000);
        let news = |handed_out| News { handed_out, shared: Some(0), ..News::default() };
        assert!(memory.wants_look(&news(Some(5))), "nothing is known yet");
        memory.is_fine(600, &news(Some(5)));
        assert!(!memory.wants_look(&news(Some(254))));
        assert!(memory.wants_look(&news(Some(255))), "a quarter of the limit may have come");
        memory.is_fine(900, &news(Some(5)));
        assert!(!memory.wants_look(&news(Some(104))));
        assert!(memory.wants_look(&news(Some(105))), "the rest may have come");
        assert!(memory.wants_look(&news(None)), "nothing is told");
        let hidden = News { shared: Some(LEAST), ..news(Some(104)) };
        assert!(memory.wants_look(&hidden), "it may be hidden");
    }
}
