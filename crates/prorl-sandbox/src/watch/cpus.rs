//! How many of a sandbox's threads want to run, beside how many processors there are for them.
//!
//! More than that for more than a moment, and they are made to give way to everybody else until it is over. Whoever works without a
//! rest, with no more threads than allowed, gives way too, to those that need a moment now and then; that changes nothing on a
//! machine where nobody else wants to run, and is not told.

use std::{collections::HashMap, num::NonZeroUsize, thread::available_parallelism, time::Duration};

use tokio::time::Instant;

use super::{
    log::{Log, Spell},
    machine::News,
    scheduling::{Excess, Hungry, Scheduling},
    table::{Process, Table},
};
use crate::Exceeded;

/// How often threads are counted. A little less than how often a sandbox is looked at.
const EVERY: Duration = Duration::from_millis(90);

/// How often it is looked for who works without a rest.
const SELDOM: Duration = Duration::from_millis(290);

/// What part of its processors' time somebody uses who works without a rest.
const NO_REST: f64 = 0.5;

/// A tick of the clock that the kernel counts the time of processes by. It tells all programs this one, whatever its own is.
const TICK: Duration = Duration::from_millis(10);

/// How long there may be too many.
const MOMENT: Duration = Duration::from_millis(200);

/// How many times as many as there are processors are far too many.
const GROSS: u32 = 4;

/// How long there must have been no more than allowed for it to be over.
const OVER: Duration = Duration::from_secs(1);

/// How long it must have been over for the next time to be told.
const PAUSE: Duration = Duration::from_secs(10);

/// How much longer than counting took the next count can wait: before the threads were made to give way, and since.
const REST: [u32; 2] = [20, 50];

/// A process when it was last looked at.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// The time of its first thread, if the kernel tells.
    time: Option<u64>,
    /// The time of all its threads, in ticks.
    ticks: u64,
    /// The same with that of the children that it has waited for.
    ticks_of_all: u64,
    threads: u32,
    wants_to_run: bool,
}

/// What was found.
#[derive(Debug, Default)]
struct Count {
    /// How many threads run or want to, if there are more than processors for them.
    n_running: u32,
    /// The processes that do.
    hungry: Vec<Hungry>,
    /// What part of its processors' time was used since the last count.
    used: f64,
}

#[derive(Debug)]
pub(super) struct Cpus {
    limit: f64,
    n_processors: u32,
    /// What each process was like when it was last looked at.
    seen: HashMap<u32, Seen>,
    /// When that was.
    counted: Option<Instant>,
    /// How many threads there were then, and which number was given out last by then.
    n_threads: Option<u32>,
    last_number: Option<u32>,
    next: Option<Instant>,
    next_seldom: Option<Instant>,
    /// Since when it works without a rest.
    restless: Option<Instant>,
    /// Since when, and until when so far, too many want to run.
    since: Option<Instant>,
    last: Option<Instant>,
    spell: Spell,
    scheduling: Scheduling,
    buffer: Vec<u8>,
}

impl Cpus {
    /// `guest` is the folder of process 1 in this process's own `/proc`.
    pub(super) fn new(limit: Option<f64>, guest: Option<Process>) -> Self {
        let available = available_parallelism().map_or(1, NonZeroUsize::get);
        let limit = limit.unwrap_or(available as f64);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a cast saturates, and so may this"
        )]
        let n_processors = limit.ceil() as u32;
        Self {
            limit,
            n_processors: n_processors.max(1),
            seen: HashMap::new(),
            counted: None,
            n_threads: None,
            last_number: None,
            next: None,
            next_seldom: None,
            restless: None,
            since: None,
            last: None,
            spell: Spell::default(),
            scheduling: Scheduling::new(guest),
            buffer: Vec::new(),
        }
    }

    /// Looks at what wants to run, if the machine is busy enough for there to be too much of it.
    pub(super) fn look(&mut self, now: Instant, news: &News, table: &Table, log: &Log) {
        if self.next.is_some_and(|next| now < next) {
            return;
        }
        let is_slowed = self.scheduling.is_slowed();
        let is_possible = self.is_possible(news);
        // The thread that looks runs too.
        let runs = news.running.is_none_or(|running| running > 1);
        let is_time = self.restless.is_some() || self.next_seldom.is_none_or(|next| now >= next);
        if !(is_possible || is_slowed || runs && is_time) {
            self.since = None;
            return;
        }
        let Count { n_running, hungry, used } = if runs { self.count(now, table) } else { Count::default() };
        self.next_seldom = Some(now + SELDOM);
        self.last_number = news.last_number;
        let restless = if used >= NO_REST { Some(*self.restless.get_or_insert(now)) } else { None };
        self.restless = restless;
        if n_running > self.n_processors {
            self.last = Some(now);
            let since = *self.since.get_or_insert(now);
            if now.saturating_duration_since(since) >= MOMENT {
                if self.spell.tells(true, now, PAUSE) {
                    log.note(Exceeded::Cpus { limit: self.limit, threads: n_running });
                }
                let is_gross = n_running > self.n_processors.saturating_mul(GROSS);
                let excess = if is_gross { Excess::Gross } else { Excess::Some };
                self.scheduling.slow(excess, table, &hungry, &mut self.buffer);
            }
        } else if restless.is_some_and(|since| now.saturating_duration_since(since) >= MOMENT) {
            self.last = Some(now);
            self.scheduling.slow(Excess::NoRest, table, &hungry, &mut self.buffer);
        } else if !is_slowed {
            self.since = None;
        } else if self.last.is_none_or(|last| now.saturating_duration_since(last) >= OVER) {
            self.scheduling.restore(table, &mut self.buffer);
            self.since = None;
            self.spell.tells(false, now, PAUSE);
        }
        let rest = REST[usize::from(self.scheduling.is_slowed())];
        self.next = Some(now + EVERY.max(now.elapsed() * rest));
    }

    /// Tells whether there can be too many: whether as many run on the whole machine, and there are as many in the sandbox with all that
    /// were started since.
    fn is_possible(&self, news: &News) -> bool {
        // The thread that looks runs too.
        let is_busy = news.running.is_none_or(|running| running.saturating_sub(1) > self.n_processors);
        let started = || news.last_number?.checked_sub(self.last_number?);
        let n_most = self.n_threads.zip(started()).map(|(had, started)| had.saturating_add(started));
        is_busy && n_most.is_none_or(|n_most| n_most > self.n_processors)
    }

    /// Counts the threads that run or want to, and names their processes.
    fn count(&mut self, now: Instant, table: &Table) -> Count {
        let before = std::mem::take(&mut self.seen);
        let since = self.counted.replace(now);
        // Of those that have ended since, whoever waited for them has the time.
        let sum =
            |seen: &HashMap<u32, Seen>| seen.values().fold(0_u64, |sum, seen| sum.saturating_add(seen.ticks_of_all));
        let mut running = Vec::new();
        for pid in table.pids() {
            let time = table.first_thread_time(pid, &mut self.buffer);
            let last = before.get(&pid).copied();
            // What has one thread, and that slept and has not run since, is as it was.
            let is_same = |last: &Seen| last.threads == 1 && !last.wants_to_run && time.is_some() && last.time == time;
            if let Some(last) = last.filter(is_same) {
                self.seen.insert(pid, last);
                continue;
            }
            let Some(stat) = table.stat(pid, &mut self.buffer) else { continue };
            let (ticks, threads, wants_to_run) = (stat.ticks, stat.threads, stat.wants_to_run());
            let ticks_of_all = ticks.saturating_add(stat.ticks_of_children);
            self.seen.insert(pid, Seen { time, ticks, ticks_of_all, threads, wants_to_run });
            // The time of several threads is counted in ticks; the first of them may sleep.
            let has_run = last.is_none_or(|last| last.ticks != stat.ticks || last.time != time);
            if wants_to_run || (stat.threads > 1 && has_run) {
                running.push((pid, stat));
            }
        }
        let n_threads = self.seen.values().fold(0_u32, |sum, seen| sum.saturating_add(seen.threads));
        self.n_threads = Some(n_threads);
        // Of the first time there is nothing to compare with.
        let elapsed = since.map_or(Duration::MAX, |since| now.saturating_duration_since(since));
        let n_ticks = sum(&self.seen).saturating_sub(sum(&before));
        let used = TICK.as_secs_f64() * n_ticks as f64 / (elapsed.as_secs_f64() * f64::from(self.n_processors));
        let (mut n_running, mut hungry) = (0_u32, Vec::new());
        for (pid, stat) in running {
            let are_enough = n_threads > self.n_processors && stat.threads > 1;
            let n_own = if are_enough { self.count_threads(table, pid) } else { 1 };
            if n_own > 0 {
                n_running = n_running.saturating_add(n_own);
                hungry.push(Hungry { pid, session: stat.session });
            }
        }
        let n_running = if n_threads > self.n_processors { n_running } else { 0 };
        Count { n_running, hungry, used }
    }

    fn count_threads(&mut self, table: &Table, pid: u32) -> u32 {
        let Some(process) = Process::open(table, pid) else { return 0 };
        let wants = |thread| process.thread_stat(thread, &mut self.buffer).is_some_and(|stat| stat.wants_to_run());
        u32::try_from(process.threads().into_iter().map(wants).filter(|wants| *wants).count()).unwrap_or(u32::MAX)
    }
}
