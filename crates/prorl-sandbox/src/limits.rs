//! What a sandbox may use, and what is told when it wants more.

use std::{fmt, time::Duration};

/// What a sandbox may use beside its disk ([`SandboxSpec::layer_bytes`](crate::SandboxSpec::layer_bytes),
/// [`tmp_bytes`](crate::SandboxSpec::tmp_bytes)) and its life ([`max_life`](crate::SandboxSpec::max_life)). Nothing is no
/// limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Memory of all its processes together, in bytes. What is written to its disk is not part of this.
    pub memory_bytes: Option<u64>,
    /// Processes and threads together, without the guest's own.
    pub pids: Option<u32>,
    /// Processors. A part of one counts as a whole where control groups are not delegated.
    pub cpus: Option<f64>,
    /// Files that one process may have open.
    pub open_files: Option<u64>,
    /// Size of one file, in bytes.
    pub file_bytes: Option<u64>,
    /// How long its processes may run, from its start on. It stands after that, and whatever is started is ended.
    pub wall: Option<Duration>,
}

impl Limits {
    /// No limit at all.
    pub const NONE: Self =
        Self { memory_bytes: None, pids: None, cpus: None, open_files: None, file_bytes: None, wall: None };
}

impl Default for Limits {
    /// Returns limits that no task comes near which is not broken: 4 GiB of memory, 1024 processes.
    fn default() -> Self {
        Self { memory_bytes: Some(4 << 30), pids: Some(1024), ..Self::NONE }
    }
}

/// A limit that was exceeded, and what was done about it. As text it is what an agent reads.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Exceeded {
    /// All processes together had more memory than the limit.
    Memory {
        /// The limit, in bytes.
        limit_bytes: u64,
        /// The name of the process that was killed, as its own `comm` tells.
        name: String,
        /// Its number inside.
        pid: u32,
    },
    /// There were as many processes and threads as the limit allows, so that no more could be started.
    Pids {
        /// The limit.
        limit: u32,
        /// How many were killed, where refusing more was not enough.
        killed: u32,
    },
    /// More threads wanted to run, for longer than a moment, than there are processors for them. They run when nobody else
    /// wants to.
    Cpus {
        /// The limit, or the number of processors where there is none.
        limit: f64,
        /// How many threads wanted to run.
        threads: u32,
    },
    /// A part of the disk is full.
    Disk {
        /// Which part.
        place: DiskPlace,
        /// Its size, in bytes.
        limit_bytes: u64,
    },
    /// The time of its processes is over, and they were killed.
    Wall {
        /// The limit.
        limit: Duration,
    },
}

/// A part of a sandbox's disk with a size of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskPlace {
    /// The writable layer: everything but the others.
    Layer,
    /// `/tmp`.
    Tmp,
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory { limit_bytes, name, pid } => {
                write!(f, "memory limit {} exceeded by {name} (pid {pid}), killed", Size(*limit_bytes))
            }
            Self::Pids { limit, killed: 0 } => {
                write!(f, "process limit {limit} reached, no more processes or threads could be started")
            }
            Self::Pids { limit, killed } => write!(f, "process limit {limit} exceeded, {killed} processes killed"),
            Self::Cpus { limit, threads } => {
                write!(f, "cpu limit {limit} exceeded by {threads} running threads, slowed")
            }
            Self::Disk { place: DiskPlace::Layer, limit_bytes } => {
                write!(f, "disk limit {} reached, nothing more can be written", Size(*limit_bytes))
            }
            Self::Disk { place: DiskPlace::Tmp, limit_bytes } => {
                write!(f, "disk limit {} of /tmp reached, nothing more can be written there", Size(*limit_bytes))
            }
            Self::Wall { limit } => {
                write!(f, "wall time limit {} s exceeded, all processes killed", limit.as_secs_f64())
            }
        }
    }
}

/// A number of bytes in the largest unit that it is a whole number of, mebibytes at most.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes % (1 << 20) == 0 => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes % (1 << 10) == 0 => write!(f, "{} KiB", bytes >> 10),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_is_told_as_it_happened() {
        let memory = Exceeded::Memory { limit_bytes: 512 << 20, name: "python3".to_owned(), pid: 37 };
        assert_eq!(memory.to_string(), "memory limit 512 MiB exceeded by python3 (pid 37), killed");
        let wall = Exceeded::Wall { limit: Duration::from_millis(1500) };
        assert_eq!(wall.to_string(), "wall time limit 1.5 s exceeded, all processes killed");
        assert_eq!([Size(1536 << 10), Size(3)].map(|size| size.to_string()), ["1536 KiB", "3 bytes"]);
    }
}
