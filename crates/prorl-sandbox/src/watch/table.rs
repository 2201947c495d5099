//! The processes of a sandbox as its own `/proc` shows them. Everything in it is the sandbox's to choose: names, numbers, and
//! what has ended between two looks.

use std::{
    collections::HashSet,
    ffi::CStr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, Dir, DirEntry, Mode, OFlags, openat, statat},
    io::{Errno, read},
    process::{Signal, pidfd_send_signal},
};

use super::{
    maps::{Object, read_objects},
    status::{Share, Stat, Status, number, parse_most_processes},
};

/// Process 1, which is the guest.
pub(super) const GUEST: u32 = 1;

/// No file that is read here is longer, but for one of a process with very many groups.
const MOST: usize = 1 << 20;

/// A sandbox's `/proc`.
#[derive(Debug)]
pub(super) struct Table {
    proc: OwnedFd,
}

/// A process by its folder in `/proc`, which never comes to mean another one. Nothing can be read from it any more once the
/// process is reaped.
#[derive(Debug)]
pub(super) struct Process {
    folder: OwnedFd,
}

impl Table {
    pub(super) fn new(proc: OwnedFd) -> Self {
        Self { proc }
    }

    /// Returns the numbers of all processes but the guest.
    pub(super) fn pids(&self) -> Vec<u32> {
        let Ok(dir) = Dir::read_from(&self.proc) else { return Vec::new() };
        after_files(dir).filter_map(number_of).filter(|pid| *pid != GUEST).collect()
    }

    /// Returns what the guest is like.
    pub(super) fn guest(&self, buffer: &mut Vec<u8>) -> Option<Status> {
        self.status(GUEST, buffer)
    }

    /// Returns what a process is like, or nothing if it is gone.
    pub(super) fn status(&self, pid: u32, buffer: &mut Vec<u8>) -> Option<Status> {
        read_at(self.proc.as_fd(), &format!("{pid}/status"), buffer).ok()?;
        let status = Status::parse(buffer)?;
        // The leader of threads may have ended before them, and then nothing is told of their memory at its place.
        if status.has_memory || status.threads < 2 {
            return Some(status);
        }
        Process::open(self, pid)?.living_thread(buffer).map(|(_, of_thread)| Status { name: status.name, ..of_thread })
    }

    /// Returns how a process runs, or nothing if it is gone.
    pub(super) fn stat(&self, pid: u32, buffer: &mut Vec<u8>) -> Option<Stat> {
        read_at(self.proc.as_fd(), &format!("{pid}/stat"), buffer).ok()?;
        Stat::parse(buffer)
    }

    /// Returns how many processes the kernel lets a process's user have before it refuses to start one for it.
    pub(super) fn most_processes(&self, pid: u32, buffer: &mut Vec<u8>) -> Option<u32> {
        read_at(self.proc.as_fd(), &format!("{pid}/limits"), buffer).ok()?;
        parse_most_processes(buffer)
    }

    /// Returns the time that a process's first thread has had a processor or waited for one, in nanoseconds. It is cheaper than all
    /// else that can be read of a process.
    pub(super) fn first_thread_time(&self, pid: u32, buffer: &mut Vec<u8>) -> Option<u64> {
        read_at(self.proc.as_fd(), &format!("{pid}/schedstat"), buffer).ok()?;
        let mut times = std::str::from_utf8(buffer).ok()?.split_ascii_whitespace().map(str::parse);
        let (ran, waited): (u64, u64) = (times.next()?.ok()?, times.next()?.ok()?);
        // A kernel that does not count tells 0.
        Some(ran.saturating_add(waited)).filter(|time| *time > 0)
    }

    /// Stops all processes that are chosen and were not stopped before, and returns how many there were. What is stopped starts no others.
    pub(super) fn stop_all(&self, stopped: &mut HashSet<u32>, which: impl Fn(u32) -> bool) -> usize {
        let before = stopped.len();
        for pid in self.pids().into_iter().filter(|pid| which(*pid)) {
            if !stopped.contains(&pid)
                && let Some(process) = Process::open(self, pid)
                && pidfd_send_signal(&process.folder, Signal::STOP).is_ok()
            {
                stopped.insert(pid);
            }
        }
        stopped.len() - before
    }

    /// Kills every process but the guest that `which` names, and returns how many there were.
    pub(super) fn kill_all(&self, which: impl Fn(u32) -> bool) -> u32 {
        let mut buffer = Vec::new();
        let mut n_killed = 0;
        for pid in self.pids().into_iter().filter(|pid| which(*pid)) {
            let Some(process) = Process::open(self, pid) else { continue };
            // One that is dead but not reaped, or dying, would be killed again and again.
            if process.status(&mut buffer).is_some_and(|status| status.runs()) && process.kill().is_ok() {
                n_killed += 1;
            }
        }
        n_killed
    }
}

impl AsFd for Table {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.proc.as_fd()
    }
}

impl Process {
    /// Opens the process that has this number in a `/proc`.
    pub(super) fn open(proc: impl AsFd, pid: u32) -> Option<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(proc, pid.to_string(), flags, Mode::empty()).ok()?;
        Some(Self { folder })
    }

    pub(super) fn status(&self, buffer: &mut Vec<u8>) -> Option<Status> {
        read_at(self.folder.as_fd(), "status", buffer).ok()?;
        Status::parse(buffer)
    }

    /// Returns its number in this `/proc`.
    pub(super) fn number(&self, buffer: &mut Vec<u8>) -> Option<u32> {
        read_at(self.folder.as_fd(), "stat", buffer).ok()?;
        u32::try_from(number(buffer)?).ok()
    }

    pub(super) fn stat(&self, buffer: &mut Vec<u8>) -> Option<Stat> {
        read_at(self.folder.as_fd(), "stat", buffer).ok()?;
        Stat::parse(buffer)
    }

    /// Returns the numbers of its threads.
    pub(super) fn threads(&self) -> Vec<u32> {
        numbers(self.folder.as_fd(), c"task")
    }

    /// Returns how one of its threads runs.
    pub(super) fn thread_stat(&self, thread: u32, buffer: &mut Vec<u8>) -> Option<Stat> {
        read_at(self.folder.as_fd(), &format!("task/{thread}/stat"), buffer).ok()?;
        Stat::parse(buffer)
    }

    /// Returns the numbers of its children, as far as this kernel lists them.
    pub(super) fn children(&self, buffer: &mut Vec<u8>) -> Vec<u32> {
        let mut found = Vec::new();
        for thread in self.threads() {
            if read_at(self.folder.as_fd(), &format!("task/{thread}/children"), buffer).is_ok() {
                let text = String::from_utf8_lossy(buffer);
                found.extend(text.split_ascii_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
            }
        }
        found
    }

    /// Returns what memory it has that is its own, each page divided among those that share it; in bytes. Nothing where this user
    /// may not know, or when it is gone.
    pub(super) fn share(&self, buffer: &mut Vec<u8>) -> Option<Share> {
        let read = read_at(self.folder.as_fd(), "smaps_rollup", buffer);
        if read.is_err() {
            let (thread, _) = self.living_thread(buffer)?;
            read_at(self.folder.as_fd(), &format!("task/{thread}/smaps_rollup"), buffer).ok()?;
        }
        Share::parse(buffer)
    }

    /// Calls `found` with each object that it maps of shared memory that is no file's, until that returns false. Fails where this
    /// user may not know.
    pub(super) fn objects(
        &self,
        buffer: &mut Vec<u8>,
        mut found: impl FnMut(Object) -> bool,
    ) -> rustix::io::Result<()> {
        let mut is_empty = true;
        read_objects(self.folder.as_fd(), "maps", |object| {
            is_empty = false;
            found(object)
        })?;
        // Where the first thread has ended, the list is empty; all threads have the same.
        if is_empty
            && let Some((thread, _)) = self
                .status(buffer)
                .filter(|status| !status.has_memory && status.threads > 1)
                .and_then(|_| self.living_thread(buffer))
        {
            return read_objects(self.folder.as_fd(), &format!("task/{thread}/maps"), found);
        }
        Ok(())
    }

    /// Tells whether one of its threads waits for something that it cannot be interrupted at, such as a child by `vfork`.
    pub(super) fn has_waiting_thread(&self, buffer: &mut Vec<u8>) -> bool {
        self.threads().into_iter().any(|thread| self.thread_stat(thread, buffer).is_some_and(|stat| stat.state == b'D'))
    }

    /// Returns a thread that has not ended, of a process whose first one has.
    fn living_thread(&self, buffer: &mut Vec<u8>) -> Option<(u32, Status)> {
        self.threads().into_iter().find_map(|thread| {
            read_at(self.folder.as_fd(), &format!("task/{thread}/status"), buffer).ok()?;
            let status = Status::parse(buffer).filter(|status| status.has_memory)?;
            Some((thread, status))
        })
    }

    /// Writes to one of its files.
    pub(super) fn write(&self, file: &str, text: &str) -> rustix::io::Result<()> {
        let fd = openat(&self.folder, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(fd, text.as_bytes()).map(drop)
    }

    /// Kills it and all its threads.
    pub(super) fn kill(&self) -> rustix::io::Result<()> {
        pidfd_send_signal(&self.folder, Signal::KILL)
    }

    /// Tells whether it has been reaped.
    pub(super) fn is_reaped(&self) -> bool {
        matches!(statat(&self.folder, "status", AtFlags::empty()), Err(Errno::SRCH | Errno::NOENT))
    }
}

/// Returns the numbers that entries of a folder are named by.
fn numbers(parent: BorrowedFd<'_>, folder: &CStr) -> Vec<u32> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(dir) = openat(parent, folder, flags, Mode::empty()).and_then(Dir::new) else { return Vec::new() };
    dir.filter_map(number_of).collect()
}

fn number_of(entry: rustix::io::Result<DirEntry>) -> Option<u32> {
    entry.ok()?.file_name().to_str().ok()?.parse().ok()
}

/// Where the processes begin in a `/proc`, as its entries are counted: what comes before are the files of the kernel, of which there
/// are many.
const FIRST_PROCESS: u64 = 256;

/// Returns the entries of a `/proc`, without most of those that are no processes where this kernel counts them as all did so far.
fn after_files(mut dir: Dir) -> impl Iterator<Item = rustix::io::Result<DirEntry>> {
    let first = dir.seek(FIRST_PROCESS.cast_signed()).ok().and_then(|()| dir.next());
    // The link to whoever reads goes before all processes. Where it does not, they are read from the start.
    let is_as_ever = matches!(&first, Some(Ok(entry)) if entry.file_name() == c"self");
    if !is_as_ever {
        dir.rewind();
    }
    dir
}

/// Reads a file whole. One that the kernel makes in one piece ends with what fills less than is asked for.
fn read_at(folder: BorrowedFd<'_>, path: &str, buffer: &mut Vec<u8>) -> rustix::io::Result<()> {
    const STEP: usize = 4096;
    let file = openat(folder, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let is_in_pieces = path.ends_with("children");
    buffer.clear();
    loop {
        let filled = buffer.len();
        buffer.resize(filled + STEP, 0);
        let n_read = loop {
            match read(&file, &mut buffer[filled..]) {
                Err(Errno::INTR) => {}
                done => break done?,
            }
        };
        buffer.truncate(filled + n_read);
        if n_read == 0 || (n_read < STEP && !is_in_pieces) || buffer.len() >= MOST {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_seen_and_killed_by_their_folder() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let proc = rustix::fs::open("/proc", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let (table, mut buffer) = (Table::new(proc), Vec::new());
        assert!(table.pids().contains(&child.id()));
        let process = Process::open(&table, child.id()).unwrap();
        assert_eq!(process.stat(&mut buffer).unwrap().parent, std::process::id());
        assert!(process.share(&mut buffer).unwrap().all() > 0);
        let me = Process::open(&table, std::process::id()).unwrap();
        assert!(me.children(&mut buffer).contains(&child.id()));
        assert!(!process.is_reaped());
        process.kill().unwrap();
        child.wait().unwrap();
        assert!(process.is_reaped() && process.status(&mut buffer).is_none());
        assert_eq!(process.kill(), Err(Errno::SRCH));
    }
}
