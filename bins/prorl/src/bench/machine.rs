//! What a figure depends on besides the program.

use std::{fs, path::PathBuf, thread::available_parallelism};

use nix::unistd::{User, geteuid};
use serde::Serialize;

/// The machine, as far as figures depend on it.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    cores: usize,
    kernel: String,
    memory_bytes: Option<u64>,
    /// Whether prorl was started by root; its sandboxes, and the bare tools, run as an ordinary user all the same.
    root: bool,
    /// Unoptimised builds are several times slower where it is our own code that takes the time.
    optimised: bool,
    load_before: Option<[f64; 3]>,
    load_after: Option<[f64; 3]>,
}

impl Machine {
    /// Looks before anything is measured.
    pub(super) fn before() -> Self {
        Self {
            cores: available_parallelism().map_or(1, usize::from),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            memory_bytes: meminfo("MemTotal"),
            root: geteuid().is_root(),
            optimised: !cfg!(debug_assertions),
            load_before: load(),
            load_after: None,
        }
    }

    /// Looks once more when all is measured.
    pub(super) fn after(&mut self) {
        self.load_after = load();
    }
}

/// Averages of runnable processes over 1, 5 and 15 minutes.
fn load() -> Option<[f64; 3]> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    let mut words = text.split_whitespace().map_while(|word| word.parse().ok());
    Some([words.next()?, words.next()?, words.next()?])
}

/// How long all processors have done something, and how long there have been any, in the kernel's ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticks {
    busy: u64,
    all: u64,
}

impl Ticks {
    pub(super) fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Reads the line of all processors: user, nice, system, idle, waiting for disks, interrupts, soft ones, stolen. What
    /// follows is part of the first two.
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<u64> = line.split_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
        let all = ticks.iter().sum();
        let idle: u64 = ticks.get(3..5)?.iter().sum();
        Some(Self { busy: all - idle, all })
    }

    /// Returns which part of the time from here on was in use.
    pub(super) fn busy_until(&self, later: &Self) -> Option<f64> {
        let all = later.all.checked_sub(self.all).filter(|all| *all > 0)?;
        Some(later.busy.saturating_sub(self.busy) as f64 / all as f64)
    }
}

/// Bytes of a line of `/proc/meminfo`.
pub(super) fn meminfo(name: &str) -> Option<u64> {
    kibibytes(&fs::read_to_string("/proc/meminfo").ok()?, name)
}

/// Bytes of the line `name: N kB` in one of the kernel's tables.
pub(super) fn kibibytes(table: &str, name: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
}

/// The user that bare tools run as: whom the sandboxes of a runtime belong to.
pub(super) fn sandbox_user() -> Option<(u32, u32)> {
    if !geteuid().is_root() {
        return None;
    }
    let nobody = User::from_name("nobody").ok().flatten();
    Some(nobody.map_or((65534, 65534), |user| (user.uid.as_raw(), user.gid.as_raw())))
}

/// Looks for a program along PATH.
pub(super) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_table_is_read_by_its_whole_name() {
        let table = "Pss_Dirty:   1 kB\nPss:        12 kB\nOdd: 3\n";
        assert_eq!(kibibytes(table, "Pss"), Some(12 * 1024));
        assert_eq!((kibibytes(table, "Odd"), kibibytes(table, "Ps")), (None, None));
    }

    #[test]
    fn what_waits_is_not_busy() {
        let before = Ticks::parse("cpu  10 0 10 70 10 0 0 0 5 0\ncpu0 1 1 1 1\n").unwrap();
        assert_eq!(before, Ticks { busy: 20, all: 100 });
        let after = Ticks { busy: 50, all: 200 };
        assert_eq!((before.busy_until(&after), after.busy_until(&before)), (Some(0.3), None));
        assert!(Ticks::parse("cpu0 1 2 3 4 5").is_none() && Ticks::parse("cpu  1 2").is_none());
    }
}
