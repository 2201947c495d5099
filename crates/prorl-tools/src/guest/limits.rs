//! Limits that the kernel holds the programs of tasks to, and not the guest.

use std::os::unix::fs::MetadataExt as _;

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
        let processes = self.processes.map(|tasks| tasks.saturating_add(own_processes()));
        [
            processes.map(|most| limit(libc::RLIMIT_NPROC, most, most)),
            self.open_files.map(|most| limit(libc::RLIMIT_NOFILE, most.min(OPEN_FILES), most)),
            self.file_bytes.map(|most| limit(libc::RLIMIT_FSIZE, most, most)),
        ]
    }

    /// Tells whether hardly another process can be started. A bomb goes up and down a little.
    pub(super) fn is_full(&self) -> bool {
        // All but the guest.
        self.processes.is_some_and(|most| procs::count().saturating_sub(1) as u64 >= most - most / 4)
    }

    /// Tells whether so many processes are a large part of those that there can be.
    pub(super) fn is_crowd(&self, n_processes: usize) -> bool {
        self.processes.is_some_and(|most| n_processes as u64 > most / 16)
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
    fn what_is_not_limited_is_not_told() {
        assert!(TaskLimits::default().of_child().iter().all(Option::is_none));
        let limits = TaskLimits { open_files: Some(10_000), file_bytes: Some(7), processes: None }.of_child();
        let told: Vec<_> = limits.iter().flatten().map(|(_, limit)| (limit.rlim_cur, limit.rlim_max)).collect();
        assert_eq!(told, [(4096, 10_000), (7, 7)]);
    }
}
