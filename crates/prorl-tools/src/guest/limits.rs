//! Limits that the kernel holds the programs of tasks to, and not the guest.

use std::{
    fs::File,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    sync::{Mutex, PoisonError},
};

use nix::sys::resource::{Resource as NixResource, getrlimit};

use super::procs;

/// Soft limit of open files, where the hard one is higher: more makes some programs slow, and a program can raise its own.
const OPEN_FILES: u64 = 4096;

/// Most processes that may count for the guest.
const MAX_OWN: u64 = 64;

/// Limits of every program that is started for a task, and of what it starts. Nothing is no limit of ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskLimits {
    /// Processes and threads of all tasks together, as the kernel counts those of one user in one user namespace. The guest's
    /// own count too, so it adds what it has when it starts a program.
    pub processes: Option<u64>,
    /// Files that one program may have open.
    pub open_files: Option<u64>,
    /// Size of one file, in bytes. The guest writes no larger one either when it is asked to.
    pub file_bytes: Option<u64>,
}

/// A limit as the kernel is told it.
pub(super) type Limit = (Resource, libc::rlimit);

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

impl TaskLimits {
    /// Returns what a program is to get that is started now.
    pub(super) fn of_child(&self) -> [Option<Limit>; 3] {
        let limit = |resource, soft, hard| (resource, libc::rlimit { rlim_cur: soft, rlim_max: hard });
        // Less than the guest may have: see there why.
        let most = getrlimit(NixResource::RLIMIT_NOFILE).map_or(OPEN_FILES, |(_, hard)| hard - hard / 4);
        let open_files = self.open_files.map_or(most, |asked| asked.min(most));
        let processes = self.processes.map(|tasks| tasks.saturating_add(own_processes()));
        [
            processes.map(|most| limit(libc::RLIMIT_NPROC, most, most)),
            Some(limit(libc::RLIMIT_NOFILE, open_files.min(OPEN_FILES), open_files)),
            self.file_bytes.map(|most| limit(libc::RLIMIT_FSIZE, most, most)),
        ]
    }

    /// Tells whether so many processes are a large part of those that there can be.
    pub(super) fn is_crowd(&self, n_processes: usize) -> bool {
        self.processes.is_some_and(|most| n_processes as u64 > most / 16)
    }
}

/// Knows whether hardly another process can be started, mostly without counting them.
#[derive(Debug)]
pub(super) struct Room {
    /// At how many processes that is so. A bomb goes up and down a little.
    full: Option<u64>,
    /// `/proc/loadavg`, whose last word is the number that was given to a process or thread last, in this pid namespace.
    load: Option<File>,
    /// How many processes there were when they were counted, and that number then.
    seen: Mutex<Option<(u64, u64)>>,
}

impl Room {
    pub(super) fn new(limits: TaskLimits) -> Self {
        let full = limits.processes.map(|most| most - most / 4);
        Self { full, load: File::open("/proc/loadavg").ok(), seen: Mutex::default() }
    }

    /// Tells whether hardly another process can be started.
    pub(super) fn is_full(&self) -> bool {
        let Some(full) = self.full else { return false };
        let last = self.last_number();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // Each that has come since has had a number. They begin anew at the end, now and then.
        if let Some(((had, then), last)) = seen.zip(last)
            && last.checked_sub(then).is_some_and(|given_out| had.saturating_add(given_out) < full)
        {
            return false;
        }
        let n_processes = procs::count().saturating_sub(1) as u64; // all but the guest
        *seen = last.map(|last| (n_processes, last));
        n_processes >= full
    }

    fn last_number(&self) -> Option<u64> {
        let mut buffer = [0; 128];
        let n_read = self.load.as_ref()?.read_at(&mut buffer, 0).ok()?;
        std::str::from_utf8(buffer.get(..n_read)?).ok()?.split_whitespace().last()?.parse().ok()
    }
}

/// Returns how many processes and threads count for the guest: its threads, and the process outside that waits for it.
fn own_processes() -> u64 {
    // A folder has two links besides those of the folders in it.
    let n_threads = std::fs::metadata("/proc/self/task").map_or(1, |folder| folder.nlink().saturating_sub(2));
    (n_threads + 1).min(MAX_OWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_counted() {
        let before = own_processes();
        let (started, has_started) = std::sync::mpsc::channel();
        let (end, has_to_end) = std::sync::mpsc::channel::<()>();
        let more = std::thread::spawn(move || {
            started.send(()).unwrap();
            has_to_end.recv().unwrap_err()
        });
        has_started.recv().unwrap();
        let counted = own_processes();
        drop(end);
        more.join().unwrap();
        // Tests run beside this one, in threads that come and go.
        assert!(before >= 2 && counted >= 3, "{before} {counted}");
    }

    #[test]
    fn room_is_known_without_counting_until_many_may_have_come() {
        let room = |full| Room::new(TaskLimits { processes: Some(full), ..TaskLimits::default() });
        assert!(room(1).is_full(), "this process is not the only one");
        assert!(!Room::new(TaskLimits::default()).is_full());
        let large = room(1 << 40);
        assert!(!large.is_full());
        let (n_counted, then) = large.seen.lock().unwrap().unwrap();
        assert!(n_counted > 0 && then > 0);
        *large.seen.lock().unwrap() = Some((0, then)); // as a count would not leave it
        assert!(!large.is_full());
        assert_eq!(large.seen.lock().unwrap().unwrap(), (0, then));
        *large.seen.lock().unwrap() = Some((1 << 40, then));
        assert!(!large.is_full(), "they are counted again");
        assert!(large.seen.lock().unwrap().unwrap().0 < 1 << 40);
    }

    #[test]
    fn what_is_not_limited_is_not_told() {
        let told = |limits: TaskLimits| {
            let limits = limits.of_child();
            limits.iter().flatten().map(|(_, limit)| (limit.rlim_cur, limit.rlim_max)).collect::<Vec<_>>()
        };
        let (_, hard) = getrlimit(NixResource::RLIMIT_NOFILE).unwrap();
        let most = hard - hard / 4;
        assert_eq!(told(TaskLimits::default()), [(most.min(4096), most)], "fewer open files than the guest");
        let asked = TaskLimits { open_files: Some(200), file_bytes: Some(7), processes: None };
        assert_eq!(told(asked), [(200, 200), (7, 7)]);
    }
}
