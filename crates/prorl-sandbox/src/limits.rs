//! What a sandbox may use, and what is told when it wants more.

use std::{fmt, fs, time::Duration};

use nix::sys::{
    resource::{Resource, getrlimit},
    sysinfo::sysinfo,
};

use crate::{SandboxError, cpus};

/// Less memory than this is a number in another unit.
const LEAST_MEMORY: u64 = 1 << 20;

/// What programs need to be started at all: their libraries, and a terminal.
const LEAST_OPEN_FILES: u64 = 64;

/// The kernel measures no smaller part of a processor.
const LEAST_CPUS: f64 = 0.01;

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

    /// Checks each of them alone, and against what this machine has and this process may use: a limit that is never reached would
    /// be no limit.
    ///
    /// # Errors
    /// [`SandboxError::Invalid`] for the first that cannot be held, by its name: `limits.memory_bytes`.
    pub fn check(&self) -> Result<(), SandboxError> {
        let invalid = |what, reason| Err(SandboxError::Invalid { what, reason });
        if let Some(cpus) = self.cpus {
            let what = "limits.cpus";
            if !cpus.is_finite() || cpus <= 0.0 {
                return invalid(what, format!("{cpus} is no number of processors"));
            }
            if cpus < LEAST_CPUS {
                return invalid(what, format!("{cpus} is below {LEAST_CPUS}"));
            }
            let n_allowed = cpus::allowed().len();
            if u32::try_from(n_allowed).is_ok_and(|n_allowed| cpus > f64::from(n_allowed)) {
                return invalid(what, format!("{cpus} is more than this machine's {n_allowed} processors"));
            }
        }
        let hard = |resource| getrlimit(resource).map_or(u64::MAX, |(_, hard)| hard);
        let counts = [
            ("limits.memory_bytes", self.memory_bytes, LEAST_MEMORY, memory_total(), "this machine's memory"),
            ("limits.pids", self.pids.map(u64::from), 1, most_pids(), "this machine's kernel.pid_max"),
            (
                "limits.open_files",
                self.open_files,
                LEAST_OPEN_FILES,
                hard(Resource::RLIMIT_NOFILE),
                "this process's own limit (ulimit -Hn)",
            ),
            (
                "limits.file_bytes",
                self.file_bytes,
                1,
                hard(Resource::RLIMIT_FSIZE),
                "this process's own limit (ulimit -Hf)",
            ),
        ];
        for (what, limit, least, most, whose) in counts {
            match limit {
                Some(limit) if limit < least => return invalid(what, format!("{limit} is below {least}")),
                Some(limit) if limit > most => return invalid(what, format!("{limit} is more than {whose}, {most}")),
                Some(_) | None => {}
            }
        }
        match self.wall {
            Some(Duration::ZERO) => invalid("limits.wall", "zero".to_owned()),
            _ => Ok(()),
        }
    }
}

/// Returns this machine's memory in bytes.
pub(crate) fn memory_total() -> u64 {
    sysinfo().map_or(u64::MAX, |info| info.ram_total())
}

fn most_pids() -> u64 {
    let most = fs::read_to_string("/proc/sys/kernel/pid_max");
    most.ok().and_then(|most| most.trim().parse().ok()).unwrap_or(u64::MAX)
}

impl Default for Limits {
    /// Returns limits that no task comes near which is not broken: 4 GiB of memory, or all of a machine that has less, and 1024
    /// processes.
    fn default() -> Self {
        Self { memory_bytes: Some(memory_total().min(4 << 30)), pids: Some(1024), ..Self::NONE }
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
    /// Memory, what is written to the disk, and what the kernel itself holds for both were more than the sandbox's control group
    /// may have, and the kernel killed.
    MemoryAndDisk {
        /// The limit of all of that together, in bytes.
        limit_bytes: u64,
        /// How many processes were killed.
        killed: u32,
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
    /// More happened than is kept.
    Others {
        /// How often a limit was exceeded beside what is told.
        count: u32,
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
            Self::MemoryAndDisk { limit_bytes, killed } => write!(
                f,
                "limit {} of memory and disk together exceeded, {killed} {} killed",
                Size(*limit_bytes),
                if *killed == 1 { "process" } else { "processes" }
            ),
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
            Self::Others { count } => write!(f, "limits exceeded {count} more times"),
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

    fn refusal(limits: Limits) -> String {
        limits.check().unwrap_err().to_string()
    }

    #[test]
    fn a_limit_that_cannot_be_held_is_refused_by_its_name() {
        for cpus in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-9] {
            let told = refusal(Limits { cpus: Some(cpus), ..Limits::NONE });
            assert!(told.starts_with("invalid limits.cpus: "), "{told}");
        }
        let zeroes = [
            (Limits { memory_bytes: Some(0), ..Limits::NONE }, "memory_bytes"),
            (Limits { pids: Some(0), ..Limits::NONE }, "pids"),
            (Limits { open_files: Some(0), ..Limits::NONE }, "open_files"),
            (Limits { file_bytes: Some(0), ..Limits::NONE }, "file_bytes"),
            (Limits { wall: Some(Duration::ZERO), ..Limits::NONE }, "wall"),
        ];
        for (limits, name) in zeroes {
            let told = refusal(limits);
            assert!(told.starts_with(&format!("invalid limits.{name}: ")), "{told}");
        }
    }

    #[test]
    fn a_limit_above_the_machine_is_refused() {
        let n_allowed = cpus::allowed().len();
        let told = refusal(Limits { cpus: Some(100_000.0), ..Limits::NONE });
        assert_eq!(told, format!("invalid limits.cpus: 100000 is more than this machine's {n_allowed} processors"));
        let told = refusal(Limits { memory_bytes: Some(u64::MAX), ..Limits::NONE });
        assert!(told.contains("is more than this machine's memory"), "{told}");
        let told = refusal(Limits { pids: Some(u32::MAX), ..Limits::NONE });
        assert!(told.contains("kernel.pid_max"), "{told}");
        let most = getrlimit(Resource::RLIMIT_NOFILE).unwrap().1;
        if most < u64::MAX {
            let told = refusal(Limits { open_files: Some(most + 1), ..Limits::NONE });
            assert!(told.contains("ulimit -Hn"), "{told}");
        }
    }

    #[test]
    fn what_can_be_held_is_taken() {
        Limits::default().check().unwrap();
        let (cpus, memory_bytes) = (Some(cpus::allowed().len() as f64), Some(memory_total()));
        let wall = Some(Duration::MAX);
        Limits { cpus, memory_bytes, pids: Some(1), open_files: Some(64), file_bytes: Some(1), wall }.check().unwrap();
    }

    #[test]
    fn what_happened_is_told_as_it_happened() {
        let memory = Exceeded::Memory { limit_bytes: 512 << 20, name: "python3".to_owned(), pid: 37 };
        assert_eq!(memory.to_string(), "memory limit 512 MiB exceeded by python3 (pid 37), killed");
        let both = Exceeded::MemoryAndDisk { limit_bytes: 1 << 30, killed: 1 };
        assert_eq!(both.to_string(), "limit 1024 MiB of memory and disk together exceeded, 1 process killed");
        let wall = Exceeded::Wall { limit: Duration::from_millis(1500) };
        assert_eq!(wall.to_string(), "wall time limit 1.5 s exceeded, all processes killed");
        assert_eq!([Size(1536 << 10), Size(3)].map(|size| size.to_string()), ["1536 KiB", "3 bytes"]);
    }
}
