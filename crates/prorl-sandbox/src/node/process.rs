//! A process that is told apart from every later one of the same number.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// Clock ticks per second in `/proc`; the kernel shows 100 to user space on every processor that the guest is built for.
pub(crate) const TICKS_PER_SECOND: u64 = 100;

/// A process by its number and the moment at which it started, which together mean one process until the machine boots.
///
/// A number is only given out again after all others were, so that no two processes of one number start in one tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Its number in this pid namespace.
    pub(crate) pid: u32,
    /// Clock ticks from boot to its start.
    pub(crate) started: u64,
}

/// What `/proc` says of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Number of the process that leads its session.
    pub(crate) session: u32,
    /// Clock ticks from boot to its start.
    pub(crate) started: u64,
}

impl Stat {
    /// Reads what `/proc` says of a process, a dead one too until it is reaped.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let line = fs::read(format!("/proc/{pid}/stat"))?;
        Self::parse(&line).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no process status"))
    }

    fn parse(line: &[u8]) -> Option<Self> {
        // The name in brackets may hold anything, brackets and blanks too; numbers follow the last bracket.
        let end = line.iter().rposition(|byte| *byte == b')')?;
        let mut fields = std::str::from_utf8(&line[end + 1..]).ok()?.split_ascii_whitespace();
        let session = fields.nth(3)?.parse().ok()?;
        let started = fields.nth(15)?.parse().ok()?;
        Some(Self { session, started })
    }
}

impl Process {
    /// Identifies the process that has this number now.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, started: Stat::of(pid)?.started })
    }

    /// Tells whether it is there, running or not yet reaped: its number, its session's if it leads one, and its user namespace
    /// can mean nothing else as long as it is.
    pub(crate) fn is_there(self) -> bool {
        Stat::of(self.pid).is_ok_and(|stat| stat.started == self.started)
    }

    /// Takes a handle of it, or `None` when it is gone, whoever has its number now.
    pub(crate) fn open(self) -> io::Result<Option<Handle>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let handle = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(handle) => handle,
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // If the recorded process has the number now, it had it when the handle was opened too.
        match Stat::of(self.pid) {
            Ok(stat) if stat.started == self.started => Ok(Some(Handle(handle))),
            Ok(_) => Ok(None),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A handle of a process, which never comes to mean another one.
#[derive(Debug)]
pub(crate) struct Handle(OwnedFd);

impl Handle {
    /// Kills it. One that is dead already, or that this user may not kill, is left to whoever waits for it.
    pub(crate) fn kill(&self) {
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }

    /// Tells whether it runs no more; it may not have been reaped yet.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
    }

    /// Returns the descriptor, which is readable once the process has ended.
    #[cfg(feature = "host")]
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.0
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Tells whether an error of reading `/proc/PID` says that no process has that number.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Returns the clock ticks from boot to now, as they count in the start of processes.
pub(crate) fn now() -> io::Result<u64> {
    let uptime = fs::read_to_string("/proc/uptime")?;
    parse_uptime(&uptime).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no time in /proc/uptime"))
}

fn parse_uptime(uptime: &str) -> Option<u64> {
    let (seconds, hundredths) = uptime.split_ascii_whitespace().next()?.split_once('.')?;
    Some(seconds.parse::<u64>().ok()? * TICKS_PER_SECOND + hundredths.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_brackets_and_blanks_hides_nothing() {
        let line = b"42 (a) b (\xff 1 2 3) S 7 8 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 1 2\n";
        assert_eq!(Stat::parse(line), Some(Stat { session: 9, started: 4711 }));
        assert_eq!(Stat::parse(b"42 (a) S 7 8 9"), None);
        assert_eq!(Stat::parse(b""), None);
    }

    #[test]
    fn time_counts_as_starts_do() {
        assert_eq!(parse_uptime("12.34 56.78\n"), Some(1234));
        let me = Process::of(std::process::id()).unwrap();
        let now = now().unwrap();
        assert!(me.started <= now && now - me.started < 3600 * TICKS_PER_SECOND, "{me:?} {now}");
    }

    #[test]
    fn a_process_is_itself_only() {
        let me = Process::of(std::process::id()).unwrap();
        assert!(!me.open().unwrap().unwrap().has_ended());
        let namesake = Process { started: me.started - 1, ..me };
        assert!(namesake.open().unwrap().is_none());
        assert!(!namesake.is_there());
        for pid in [0, u32::MAX, 1 << 30] {
            assert!(Process { pid, started: 1 }.open().unwrap().is_none(), "{pid}");
        }
    }
}
