//! One sandbox and all its limits.

use std::{io, sync::Arc, time::Duration};

use rustix::fs::{Mode, OFlags, openat};
use tokio::time::Instant;

use super::{
    Subject,
    cpus::Cpus,
    disk::{Disk, Files},
    log::Log,
    machine::News,
    memory::{Memory, Pace, Processes},
    pids::Pids,
    table::{Process, Table},
    thread::LONGEST,
    wall::Wall,
};

/// How often the disk is looked at; it also is whenever somebody asks.
const DISK: Duration = Duration::from_secs(1);

/// How much longer than listing all processes took the next list can wait, if only their number is to be known.
const REST: u32 = 20;

/// How much longer than listing very many processes took the next look can wait, while there is no need for it.
const TURN: u32 = 2;

/// A look that takes longer than this would keep others waiting.
const LONG: Duration = Duration::from_millis(2);

/// What is known of a sandbox.
#[derive(Debug)]
pub(super) struct Post {
    table: Arc<Table>,
    log: Arc<Log>,
    files: Files,
    memory: Option<Memory>,
    cpus: Cpus,
    wall: Option<Wall>,
    next_disk: Instant,
    next_pids: Instant,
    /// Whether the last look took long.
    is_slow: bool,
    buffer: Vec<u8>,
}

impl Post {
    pub(super) fn new(subject: Subject) -> io::Result<Self> {
        let Subject { proc, layer, tmp, limits, guest, has_range } = subject;
        let now = Instant::now();
        // Processes may be hidden from this user in its own `/proc`; then it is done without.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let guest = rustix::fs::open("/proc", flags, Mode::empty()).ok().and_then(|proc| Process::open(proc, guest));
        // Opened again, because the sandbox shares the position of what it has sent.
        let table = Arc::new(Table::new(openat(&proc, ".", flags, Mode::empty())?));
        let files = Files::new(layer, tmp);
        let pids = limits.pids.map(|limit| Pids::new(limit, has_range));
        Ok(Self {
            log: Arc::new(Log::new(Disk::new(files.clone()), pids, Arc::clone(&table))),
            table,
            files,
            memory: limits.memory_bytes.map(Memory::new),
            cpus: Cpus::new(limits.cpus, guest),
            wall: limits.wall.and_then(|limit| Wall::new(limit, now)),
            next_disk: now + DISK,
            next_pids: now,
            is_slow: false,
            buffer: Vec::new(),
        })
    }

    pub(super) fn log(&self) -> &Arc<Log> {
        &self.log
    }

    /// Returns the file systems that it may write to.
    pub(super) fn files(&self) -> &Files {
        &self.files
    }

    /// Returns how long the first look can wait.
    pub(super) fn first_wait(&self) -> Duration {
        self.wait(&News::default())
    }

    /// Looks at the sandbox, as far as it needs to be after `news` of the machine, and returns how long the next look can wait. Nothing
    /// if this one has to be gone on with where there is time for it.
    pub(super) fn look(&mut self, now: Instant, news: &News, pace: Pace) -> Option<Duration> {
        if self.is_slow && pace == Pace::Quick {
            return None;
        }
        let wall = self.wall.as_mut().map(|wall| wall.look(now, &self.table, &self.log));
        let for_memory = self.memory.as_mut().is_some_and(|memory| memory.wants_look(news));
        let for_pids = now >= self.next_pids && self.log.pids().is_some_and(|pids| pids.wants_look(news));
        let mut turn = Duration::ZERO;
        let mut is_done = true;
        if for_memory || for_pids {
            let mut all = Vec::new();
            for pid in self.table.pids() {
                if let Some(status) = self.table.status(pid, &mut self.buffer) {
                    all.push((pid, status));
                }
            }
            let took = now.elapsed();
            if took > LONG && !self.memory.as_ref().is_some_and(Memory::is_urgent) {
                turn = took * TURN;
            }
            if for_memory && let Some(memory) = &mut self.memory {
                let processes = Processes { table: &self.table, all: &all, log: &self.log };
                is_done = memory.look(now, news, pace, &processes);
            }
            if for_pids && let Some(mut pids) = self.log.pids() {
                pids.look(now, news, &self.table, &all, &self.log);
                self.next_pids = now + now.elapsed() * if pids.is_crowded() { TURN } else { REST };
            }
        }
        self.cpus.look(now, news, &self.table, &self.log);
        if now >= self.next_disk {
            self.log.look_at_disk(now);
            self.next_disk = now + DISK;
        }
        self.is_slow = now.elapsed() > LONG;
        let for_pids = self.log.pids().map_or(LONGEST, |mut pids| pids.wait(now, news));
        is_done.then(|| self.wait(news).min(for_pids).min(wall.unwrap_or(LONGEST)).max(turn))
    }

    fn wait(&self, news: &News) -> Duration {
        self.memory.as_ref().map_or(LONGEST, |memory| memory.wait(news))
    }
}
