//! What a sandbox may use, and what is told when it wants more.

use std::{fmt, fs, time::Duration};

use nix::sys::{
    resource::{Resource, getrlimit},
    sysinfo::sysinfo,
};

use crate::{SandboxError, cpus};

/// Less memory or disk than this is a number in another unit.
pub(crate) const LEAST_MEMORY: u64 = 1 << 20;

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
    /// [`SandboxError::Invalid`] for the first that cannot be held, by its name: `limits.memory_bytes`. Its reason says what was
    /// expected and what came, in words for those who know the limit by another name; bytes are told in mebibytes.
    pub fn check(&self) -> Result<(), SandboxError> {
        if let Some(cpus) = self.cpus {
            let most = u32::try_from(cpus::allowed().len()).unwrap_or(u32::MAX);
            // No range holds what is no number.
            if !(LEAST_CPUS..=f64::from(most)).contains(&cpus) {
                let range = format!("{LEAST_CPUS} to {most} (the processors that may be used here)");
                return Err(invalid("limits.cpus", &range, Number(cpus)));
            }
        }
        let hard = |resource| getrlimit(resource).map_or(u64::MAX, |(_, hard)| hard);
        check_bytes("limits.memory_bytes", self.memory_bytes, LEAST_MEMORY, memory_total(), "this machine's memory")?;
        check_count("limits.pids", self.pids.map(u64::from), 1, most_pids(), "kernel.pid_max")?;
        // The guest keeps a quarter, so that a program that opens all it can does not stop it.
        let open_files = hard(Resource::RLIMIT_NOFILE);
        let open_files = open_files - open_files / 4;
        let whose = "three quarters of what `ulimit -Hn` says here";
        check_count("limits.open_files", self.open_files, LEAST_OPEN_FILES, open_files, whose)?;
        check_bytes("limits.file_bytes", self.file_bytes, 1, hard(Resource::RLIMIT_FSIZE), "`ulimit -Hf` here")?;
        match self.wall {
            Some(Duration::ZERO) => Err(invalid("limits.wall", "more than 0 s", "0 s")),
            _ => Ok(()),
        }
    }
}

/// Checks a number, where there is one. `whose` says what the most is.
fn check_count(what: &'static str, limit: Option<u64>, least: u64, most: u64, whose: &str) -> Result<(), SandboxError> {
    match limit {
        Some(limit) if !(least..=most).contains(&limit) => {
            Err(invalid(what, &format!("{least} to {most} ({whose})"), limit))
        }
        Some(_) | None => Ok(()),
    }
}

/// Checks a size, where there is one. `whose` says what the most is.
pub(crate) fn check_bytes(
    what: &'static str,
    limit: Option<u64>,
    least: u64,
    most: u64,
    whose: &str,
) -> Result<(), SandboxError> {
    match limit {
        Some(limit) if !(least..=most).contains(&limit) => {
            let least = Size(least);
            let range = match most {
                u64::MAX => format!("{least} or more"),
                // In whole mebibytes, which is what people ask for.
                most => format!("{least} to {} MiB ({whose})", most >> 20),
            };
            Err(invalid(what, &range, Size(limit)))
        }
        Some(_) | None => Ok(()),
    }
}

fn invalid(what: &'static str, expected: &str, found: impl fmt::Display) -> SandboxError {
    SandboxError::Invalid { what, reason: format!("expected {expected}, found {found}") }
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
            Self::MemoryAndDisk { limit_bytes, killed } => {
                let killed = processes(*killed);
                write!(f, "limit {} of memory and disk together exceeded, {killed} killed", Size(*limit_bytes))
            }
            Self::Pids { limit, killed: 0 } => {
                write!(f, "process limit {limit} reached, no more processes or threads could be started")
            }
            Self::Pids { limit, killed } => {
                write!(f, "process limit {limit} exceeded, {} killed", processes(*killed))
            }
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
            Self::Others { count: 1 } => f.write_str("limits exceeded once more"),
            Self::Others { count } => write!(f, "limits exceeded {count} more times"),
        }
    }
}

fn processes(number: u32) -> String {
    if number == 1 { "1 process".to_owned() } else { format!("{number} processes") }
}

/// A number of bytes in the largest unit that it is a whole number of, mebibytes at most.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes % (1 << 20) == 0 => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes % (1 << 10) == 0 => write!(f, "{} KiB", bytes >> 10),
            1 => f.write_str("1 byte"),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}

/// A number without hundreds of zeros.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(number) = *self;
        let is_plain = number == 0.0 || !number.is_finite() || (1e-6..1e15).contains(&number.abs());
        if is_plain { write!(f, "{number}") } else { write!(f, "{number:e}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(limits: Limits) -> String {
        limits.check().unwrap_err().to_string()
    }

    #[test]
    fn a_limit_that_cannot_be_held_is_refused_with_what_was_expected_and_what_came() {
        let n_allowed = cpus::allowed().len();
        for (cpus, found) in [
            (0.0, "0"),
            (-1.0, "-1"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (1e-9, "1e-9"),
            (0.005, "0.005"),
            (100_000.0, "100000"),
            (1e300, "1e300"),
        ] {
            let told = refusal(Limits { cpus: Some(cpus), ..Limits::NONE });
            let expected = format!("0.01 to {n_allowed} (the processors that may be used here)");
            assert_eq!(told, format!("invalid limits.cpus: expected {expected}, found {found}"));
        }
        let memory = format!("1 MiB to {} MiB (this machine's memory)", memory_total() >> 20);
        for (bytes, found) in [(0, "0 MiB"), (5, "5 bytes"), (1 << 60, "1099511627776 MiB")] {
            let told = refusal(Limits { memory_bytes: Some(bytes), ..Limits::NONE });
            assert_eq!(told, format!("invalid limits.memory_bytes: expected {memory}, found {found}"));
        }
        let pids = format!("1 to {} (kernel.pid_max)", most_pids());
        for number in [0, u32::MAX] {
            let told = refusal(Limits { pids: Some(number), ..Limits::NONE });
            assert_eq!(told, format!("invalid limits.pids: expected {pids}, found {number}"));
        }
        let most = getrlimit(Resource::RLIMIT_NOFILE).unwrap().1;
        let open_files = format!("64 to {} (three quarters of what `ulimit -Hn` says here)", most - most / 4);
        for number in [0, 63, most, u64::MAX] {
            let told = refusal(Limits { open_files: Some(number), ..Limits::NONE });
            assert_eq!(told, format!("invalid limits.open_files: expected {open_files}, found {number}"));
        }
        let told = refusal(Limits { file_bytes: Some(0), ..Limits::NONE });
        assert!(
            told.starts_with("invalid limits.file_bytes: expected 1 byte ") && told.ends_with("found 0 MiB"),
            "{told}"
        );
        let told = refusal(Limits { wall: Some(Duration::ZERO), ..Limits::NONE });
        assert_eq!(told, "invalid limits.wall: expected more than 0 s, found 0 s");
    }

    #[test]
    fn sizes_without_a_bound_are_told_without_one() {
        let told = |most| check_bytes("x", Some(0), 1, most, "y").unwrap_err().to_string();
        assert_eq!(told(u64::MAX), "invalid x: expected 1 byte or more, found 0 MiB");
        assert_eq!(told((3 << 20) + 5), "invalid x: expected 1 byte to 3 MiB (y), found 0 MiB");
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
        let told = [1, 2].map(|killed| Exceeded::Pids { limit: 9, killed }.to_string());
        assert_eq!(
            told,
            ["process limit 9 exceeded, 1 process killed", "process limit 9 exceeded, 2 processes killed"]
        );
        assert_eq!(Exceeded::Others { count: 1 }.to_string(), "limits exceeded once more");
        let wall = Exceeded::Wall { limit: Duration::from_millis(1500) };
        assert_eq!(wall.to_string(), "wall time limit 1.5 s exceeded, all processes killed");
        assert_eq!([Size(1536 << 10), Size(3)].map(|size| size.to_string()), ["1536 KiB", "3 bytes"]);
    }
}
