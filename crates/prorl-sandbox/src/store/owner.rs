//! Whose something in a store is.

use std::{fmt, fs, io, os::unix::fs::MetadataExt as _};

use serde::{Deserialize, Serialize};

use crate::node::{Process, has_ended};

/// A process, and the machine, boot and pid namespace in which its number means it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    /// Name of the machine.
    pub(super) host: String,
    boot_id: String,
    pid_namespace: u64,
    process: Process,
}

impl Owner {
    /// Identifies this process.
    pub(super) fn this() -> io::Result<Self> {
        let process = Process::of(std::process::id())?;
        Ok(Self {
            host: nix::unistd::gethostname()?.to_string_lossy().into_owned(),
            boot_id: fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
            pid_namespace: fs::metadata("/proc/self/ns/pid")?.ino(),
            process: process.ok_or(io::Error::from_raw_os_error(libc::ESRCH))?,
        })
    }

    /// Tells whether it lives, as `me` sees it, or `None` where `me` cannot see it: its number is another machine's.
    pub(super) fn lives(&self, me: &Self) -> Option<bool> {
        let is_near = (&self.host, &self.boot_id, self.pid_namespace) == (&me.host, &me.boot_id, me.pid_namespace);
        if !is_near {
            return None;
        }
        match self.process.watch() {
            // One that has not been reaped yet holds nothing any more.
            Ok(handle) => Some(handle.is_some_and(|handle| !has_ended(std::os::fd::AsFd::as_fd(&handle)))),
            Err(_) => None,
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on {}", self.process.pid, self.host)
    }
}
