//! How threads are made to give way to everybody else, and how that is undone.
//!
//! By two means, as either alone is not enough. Where the kernel groups processes by session (`sched_autogroup_enabled`), groups
//! share the processors however many threads each has, and what a thread is within its group changes nothing for another group;
//! there a group's weight is lowered. Elsewhere threads are made `SCHED_IDLE`, and run when no other wants to; those that
//! they start are too. The first can be undone by anybody. The second can only be undone by root: for an ordinary user only threads
//! that were seen wanting to run are made idle, and never the main thread of a shell that tools talk to.

use std::{collections::BTreeMap, sync::OnceLock};

use rustix::{
    fs::{Mode, OFlags, open},
    thread::{CapabilitySet, capabilities},
};

use super::{
    pids::shells,
    status::Stat,
    table::{Process, Table},
};
use crate::sys;

/// The file of a process that its session's weight is set by, as a nice value.
const AUTOGROUP: &str = "autogroup";
const USUAL: u8 = 0;

/// How many processes of one sandbox are gone through at most.
const MOST: usize = 8192;

/// How far a sandbox has to give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Excess {
    /// No thread too many, and none that rests.
    NoRest,
    /// A few threads too many, as compiling with one process more than there are processors is: a session has a tenth of the usual
    /// weight, and gets on beside busy ones.
    Some,
    /// Many times too many. A session has the least weight that there is, which is still more than nothing.
    Gross,
}

impl Excess {
    fn nice(self) -> u8 {
        match self {
            Self::NoRest | Self::Some => 10,
            Self::Gross => 19,
        }
    }
}

/// A process that wants to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hungry {
    pub(super) pid: u32,
    pub(super) session: u32,
}

#[derive(Debug)]
pub(super) struct Scheduling {
    /// Process 1 as this process's own `/proc` shows it: threads are named by the numbers that they have there.
    guest: Option<Process>,
    /// Whether threads were made idle.
    is_idle: bool,
    /// The sessions whose weight was lowered, by their numbers inside, and how far.
    sessions: BTreeMap<u32, Excess>,
}

impl Scheduling {
    pub(super) fn new(guest: Option<Process>) -> Self {
        Self { guest, is_idle: false, sessions: BTreeMap::new() }
    }

    pub(super) fn is_slowed(&self) -> bool {
        self.is_idle || !self.sessions.is_empty()
    }

    /// Makes the processes that want to run give way, and all others too where that can be undone.
    pub(super) fn slow(&mut self, excess: Excess, table: &Table, hungry: &[Hungry], buffer: &mut Vec<u8>) {
        for Hungry { pid, session } in hungry {
            // An ordinary user can do this ten times a second. What is refused now is done at a later look.
            if self.sessions.get(session).is_none_or(|so_far| *so_far < excess)
                && let Some(process) = Process::open(table, *pid)
                && process.write(AUTOGROUP, &excess.nice().to_string()).is_ok()
            {
                self.sessions.insert(*session, excess);
            }
        }
        if excess == Excess::NoRest {
            return;
        }
        self.is_idle = true;
        let can_undo = can_undo();
        self.each_thread(buffer, |thread, stat, is_shell| {
            if can_undo || (stat.wants_to_run() && !is_shell) {
                // It may be gone.
                let _ = sys::set_idle(thread, true);
            }
        });
    }

    /// Undoes it. What was not undone is tried again when this is called again, until nothing is slowed.
    pub(super) fn restore(&mut self, table: &Table, buffer: &mut Vec<u8>) {
        if std::mem::take(&mut self.is_idle) && can_undo() {
            self.each_thread(buffer, |thread, _, _| {
                let _ = sys::set_idle(thread, false);
            });
        }
        if self.sessions.is_empty() {
            return;
        }
        let mut members: Vec<(u32, u32)> = Vec::new();
        for pid in table.pids() {
            if let Some(stat) = table.stat(pid, buffer) {
                members.push((pid, stat.session));
            }
        }
        self.sessions.retain(|session, _| {
            let mut of_session = members.iter().filter(|(_, of)| of == session);
            // One that nobody is in any more is gone; one of the guest's own can be reached through it.
            let guest = (*session == 1).then_some(1);
            let mut is_there = false;
            let is_undone = of_session.by_ref().map(|(pid, _)| *pid).chain(guest).any(|pid| {
                Process::open(table, pid).is_some_and(|process| {
                    is_there = true;
                    process.write(AUTOGROUP, &USUAL.to_string()).is_ok()
                })
            });
            is_there && !is_undone
        });
    }

    /// Goes through every thread of the sandbox but the guest's own. Says its number here, how it runs, and whether it is the first
    /// thread of a shell.
    fn each_thread(&self, buffer: &mut Vec<u8>, mut visit: impl FnMut(u32, &Stat, bool)) {
        let Some(guest) = &self.guest else { return };
        let Some(number) = guest.number(buffer) else { return };
        let Ok(proc) = open("/proc", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) else {
            return;
        };
        let host = Table::new(proc);
        let mut left: Vec<(u32, u32)> = guest.children(buffer).into_iter().map(|child| (child, number)).collect();
        let shells = shells(&host, left.iter().map(|(pid, _)| *pid), number, buffer);
        let mut n_left = MOST;
        while let Some((pid, parent)) = left.pop()
            && n_left > 0
        {
            n_left -= 1;
            let Some(process) = Process::open(&host, pid) else { continue };
            // The number may have come to mean another process since it was listed.
            if process.stat(buffer).is_none_or(|stat| stat.parent != parent) {
                continue;
            }
            for thread in process.threads() {
                if let Some(stat) = process.thread_stat(thread, buffer) {
                    visit(thread, &stat, thread == pid && shells.contains(&pid));
                }
            }
            left.extend(process.children(buffer).into_iter().map(|child| (child, pid)));
        }
    }
}

/// Tells whether this process may take back from threads of others that they are idle.
fn can_undo() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        if !capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_NICE)) {
            return false;
        }
        // The right counts in the first user namespace only, and this may be another. So a thread that ends anyway tries it.
        let trial = || {
            let me = nix::unistd::gettid().as_raw().unsigned_abs();
            sys::set_idle(me, true).is_ok() && sys::set_idle(me, false).is_ok()
        };
        std::thread::Builder::new().spawn(trial).is_ok_and(|thread| thread.join().unwrap_or(false))
    })
}
