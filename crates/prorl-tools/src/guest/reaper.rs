//! Collects ended processes: a guest is process 1 of its sandbox, or stands in for it, so every orphan comes to it.
//!
//! One thread waits for any child. The end of a process that was started here goes to its owner; the end of a stranger is
//! forgotten. A process is collected only under the lock under which it is registered and signalled, so that an owner never
//! misses an end, and never signals a number that has come to mean another process.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd},
    process::Command,
    sync::Arc,
    thread,
};

use nix::{
    errno::Errno,
    sys::{
        eventfd::{EfdFlags, EventFd},
        signal::{Signal, kill},
    },
    unistd::Pid,
};
use parking_lot::{Condvar, Mutex};

use super::{
    limits::TaskLimits,
    sys::{self, Passed},
};
use crate::wire::ExitStatus;

/// Starts and collects processes.
#[derive(Debug)]
pub(super) struct Reaper {
    registry: Mutex<Registry>,
    spawned: Condvar,
    limits: TaskLimits,
}

#[derive(Debug, Default)]
struct Registry {
    owners: HashMap<Pid, Arc<Slot>>,
    n_spawned: u64,
}

/// Where the end of one process is put.
#[derive(Debug)]
struct Slot {
    status: Mutex<Option<ExitStatus>>,
    ended: EventFd,
}

/// A process that was started here and leads a session of its own.
///
/// Dropping it forgets it; it is collected all the same.
#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    slot: Arc<Slot>,
    reaper: Arc<Reaper>,
}

impl Reaper {
    /// Starts the thread, which runs as long as the guest. `limits` are those of what it will start.
    ///
    /// # Errors
    /// When there can be no more threads.
    pub(super) fn start(limits: TaskLimits) -> io::Result<Arc<Self>> {
        let reaper = Arc::new(Self { registry: Mutex::default(), spawned: Condvar::new(), limits });
        let own = Arc::clone(&reaper);
        thread::Builder::new().name("reaper".to_owned()).spawn(move || own.run())?;
        Ok(reaper)
    }

    fn run(&self) {
        loop {
            let n_seen = self.registry.lock().n_spawned;
            match sys::wait_for_any() {
                Ok(pid) => self.collect(pid),
                // No child is left, so no orphan can come either, until something is started.
                Err(Errno::ECHILD) => {
                    let mut registry = self.registry.lock();
                    self.spawned.wait_while(&mut registry, |registry| registry.n_spawned == n_seen);
                }
                Err(Errno::EINTR) => {}
                Err(error) => panic!("a guest that cannot wait for its children is none: {error}"),
            }
        }
    }

    fn collect(&self, pid: Pid) {
        let mut registry = self.registry.lock();
        // A program that could not be started is collected by who tried.
        let Some(status) = sys::collect(pid) else { return };
        if let Some(slot) = registry.owners.remove(&pid) {
            *slot.status.lock() = Some(status);
            // It fails only when its counter is full.
            let _counted = slot.ended.write(1);
        }
    }

    /// Starts a program as [`sys::spawn`] does.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn spawn(
        self: &Arc<Self>,
        command: &mut Command,
        passed: &Passed,
        terminal: bool,
    ) -> io::Result<Process> {
        let ended = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let slot = Arc::new(Slot { status: Mutex::new(None), ended });
        let mut registry = self.registry.lock();
        let child = sys::spawn(command, passed, terminal, &self.limits)?;
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("process numbers fit in an i32"));
        registry.owners.insert(pid, Arc::clone(&slot));
        registry.n_spawned += 1;
        self.spawned.notify_all();
        Ok(Process { pid, slot, reaper: Arc::clone(self) })
    }
}

impl Process {
    /// Returns its number, which is its session's and process group's too.
    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns how it ended, once it has.
    pub(super) fn status(&self) -> Option<ExitStatus> {
        *self.slot.status.lock()
    }

    /// Returns a descriptor that is readable from its end on.
    pub(super) fn ended(&self) -> BorrowedFd<'_> {
        self.slot.ended.as_fd()
    }

    /// Sends the process alone the signal at which a shell of ours gives up its command.
    pub(super) fn signal_abort(&self) {
        let registry = self.reaper.registry.lock();
        if registry.owners.contains_key(&self.pid) {
            sys::send_last_signal(self.pid.as_raw());
        }
    }

    /// Signals its process group while the process is there; afterwards its number may be another's.
    pub(super) fn signal_group(&self, signal: Signal) {
        let registry = self.reaper.registry.lock();
        if registry.owners.contains_key(&self.pid) {
            // A group that has just emptied is what was wanted.
            let _sent = kill(Pid::from_raw(-self.pid.as_raw()), signal);
        }
    }
}
