//! A process that is told apart from every later one of the same number.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::kill,
        stat::fstat,
        statfs::{FsType, fstatfs},
        time::TimeValLike as _,
    },
    time::{ClockId, clock_gettime},
    unistd::geteuid,
};
use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};

/// Clock ticks per second in `/proc`; the kernel shows 100 to user space on every processor that the guest is built for.
pub(crate) const TICKS_PER_SECOND: u64 = 100;

/// A clock tick in nanoseconds.
const NANOS_PER_TICK: u128 = 1_000_000_000 / TICKS_PER_SECOND as u128;

/// The file system of handles that have an inode each, as in `linux/magic.h`; before Linux 6.9 all shared one of another.
const PIDFS: FsType = FsType(0x5049_4446);

/// A process by its number and what else is known of it, which together mean one process until the machine boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Its number in this pid namespace.
    pub(crate) pid: u32,
    /// Clock ticks from boot to its start. A number is only given out again after all others were, so that no two processes
    /// of one number start in one tick. Nothing for a process that `/proc` hides from this user (see [`Stat::of`]).
    pub(crate) started: Option<u64>,
    /// Inode number of its handles. The kernel gives each process one of its own, and tells it to everyone; nothing before
    /// Linux 6.9.
    pub(crate) inode: Option<u64>,
}

/// What `/proc` says of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Number of its parent.
    #[cfg(feature = "host")]
    pub(crate) parent: u32,
    /// Number of the process that leads its session.
    pub(crate) session: u32,
    /// Clock ticks from boot to its start.
    pub(crate) started: u64,
}

impl Stat {
    /// Reads what `/proc` says of a process, a dead one too until it is reaped.
    ///
    /// # Errors
    /// Where `/proc` is mounted with `hidepid`, an ordinary user is told the same of a process that is gone and of one that
    /// lives and is not dumpable, as most of a sandbox are; see [`is_silent`].
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let line = fs::read(format!("/proc/{pid}/stat"))?;
        Self::parse(&line).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no process status"))
    }

    fn parse(line: &[u8]) -> Option<Self> {
        // The name in brackets may hold anything, brackets and blanks too; numbers follow the last bracket.
        let end = line.iter().rposition(|byte| *byte == b')')?;
        let fields: Vec<_> = std::str::from_utf8(&line[end + 1..]).ok()?.split_ascii_whitespace().collect();
        // One that is just being reaped has neither any more, and the kernel tells -1.
        let number = |idx: usize| match *fields.get(idx)? {
            "-1" => Some(0),
            text => text.parse().ok(),
        };
        Some(Self {
            #[cfg(feature = "host")]
            parent: number(1)?,
            session: number(3)?,
            started: fields.get(19)?.parse().ok()?,
        })
    }
}

/// What has a process's number now.
#[derive(Debug)]
enum Found {
    /// Another process, or none.
    Gone,
    /// A living process of which nothing can be told.
    Hidden(Handle),
    /// The process itself.
    It(Handle),
}

impl Process {
    /// Identifies the process that has this number now, or `None` where there is none.
    #[cfg(feature = "host")]
    pub(crate) fn of(pid: u32) -> io::Result<Option<Self>> {
        let Some(handle) = Handle::of(pid)? else { return Ok(None) };
        let started = match Stat::of(pid) {
            Ok(stat) => Some(stat.started),
            Err(error) if !is_silent(&error) => return Err(error),
            Err(_) if handle.has_ended() => return Ok(None),
            Err(_) => None,
        };
        Ok(Some(Self { pid, started, inode: handle.inode() }))
    }

    fn find(self) -> io::Result<Found> {
        let Some(handle) = Handle::of(self.pid)? else { return Ok(Found::Gone) };
        // If the recorded process has the number now, it had it when the handle was opened too.
        let started = match Stat::of(self.pid) {
            Ok(stat) => Some(stat.started),
            Err(error) if is_silent(&error) => None,
            Err(error) => return Err(error),
        };
        let agrees = [(self.started, started), (self.inode, handle.inode())].map(|(then, now)| Some(then? == now?));
        Ok(match (agrees.contains(&Some(false)), agrees.contains(&Some(true))) {
            (true, _) => Found::Gone,
            (false, true) => Found::It(handle),
            (false, false) if handle.has_ended() || is_foreign(self.pid) => Found::Gone,
            (false, false) => Found::Hidden(handle),
        })
    }

    /// Tells whether it is known to be there, running or not yet reaped: its number, its session's if it leads one, and its
    /// user namespace can mean nothing else as long as it is.
    pub(crate) fn is_there(self) -> bool {
        matches!(self.find(), Ok(Found::It(_)))
    }

    /// Takes a handle of it, or `None` when it is gone, whoever has its number now.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] when its number is that of a process which may be it or another.
    pub(crate) fn open(self) -> io::Result<Option<Handle>> {
        match self.find()? {
            Found::Gone => Ok(None),
            Found::It(handle) => Ok(Some(handle)),
            Found::Hidden(_) => {
                let why =
                    format!("process {} may be another than was written down: /proc hides it (hidepid)", self.pid);
                Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
            }
        }
    }

    /// Takes a handle to wait by, or `None` when it is gone. It may be that of another process, if nothing can be told of the one
    /// that has its number.
    pub(crate) fn watch(self) -> io::Result<Option<Handle>> {
        match self.find()? {
            Found::Gone => Ok(None),
            Found::It(handle) | Found::Hidden(handle) => Ok(Some(handle)),
        }
    }
}

/// A handle of a process, which never comes to mean another one.
#[derive(Debug)]
pub(crate) struct Handle(OwnedFd);

impl Handle {
    /// Takes a handle of the process that has this number now, or `None` where there is none.
    pub(crate) fn of(pid: u32) -> io::Result<Option<Self>> {
        let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(handle) => Ok(Some(Self(handle))),
            // The last two: it is the number of a thread.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the inode number that is this process's alone, if the kernel gives out such.
    fn inode(&self) -> Option<u64> {
        let is_own = fstatfs(&self.0).is_ok_and(|of| of.filesystem_type() == PIDFS);
        if is_own { fstat(&self.0).ok().map(|stat| stat.st_ino) } else { None }
    }

    /// Kills it. One that is dead already, or that this user may not kill, is left to whoever waits for it.
    pub(crate) fn kill(&self) {
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }

    /// Lets it run on if it was stopped.
    #[cfg(feature = "host")]
    pub(crate) fn resume(&self) {
        let _ = pidfd_send_signal(&self.0, Signal::CONT);
    }

    /// Tells whether it runs no more; it may not have been reaped yet.
    pub(crate) fn has_ended(&self) -> bool {
        has_ended(self.0.as_fd())
    }

    /// Returns the descriptor, which is readable once the process has ended.
    #[cfg(feature = "host")]
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.0
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Tells whether the process of a handle runs no more.
pub(crate) fn has_ended(handle: BorrowedFd<'_>) -> bool {
    matches!(poll(&mut [PollFd::new(handle, PollFlags::POLLIN)], PollTimeout::ZERO), Ok(1..))
}

/// Tells whether an error of reading `/proc/PID` says that no process has that number, or that it is hidden from this user.
pub(crate) fn is_silent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH | libc::EACCES | libc::EPERM))
}

/// Tells whether a process is one that this user may not even signal, as it may every process of its own sandboxes. Root is
/// not asked: its sandboxes are other users', and it may lack the right.
fn is_foreign(pid: u32) -> bool {
    let refused = i32::try_from(pid).map(|pid| kill(nix::unistd::Pid::from_raw(pid), None));
    refused == Ok(Err(nix::errno::Errno::EPERM)) && !geteuid().is_root()
}

/// Tells whether a process descends from an unreaped child of this one that adopts whatever loses its parent below it.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] when `/proc` hides one between them, or one has just ended.
#[cfg(feature = "host")]
pub(crate) fn descends(mut pid: u32, from: u32) -> io::Result<bool> {
    // As deep as pid namespaces can be nested, and as many again.
    for _ in 0..64 {
        let parent = match Stat::of(pid) {
            Err(error) if is_silent(&error) => {
                let why = format!("the parent of process {pid} is not known: /proc hides it (hidepid)");
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
            stat => stat?.parent,
        };
        if parent == from || parent <= 1 {
            return Ok(parent == from);
        }
        pid = parent;
    }
    Ok(false)
}

/// Returns the clock ticks from boot to now, as they count in the start of processes. `/proc/uptime` may be a container's.
pub(crate) fn now() -> io::Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME)?;
    let time = Duration::from_nanos(u64::try_from(time.num_nanoseconds()).unwrap_or_default());
    Ok(u64::try_from(time.as_nanos() / NANOS_PER_TICK).unwrap_or(u64::MAX))
}

/// The process that made a thing which is to be ended once. One that is forked from it gets a copy of the thing, and is to end
/// nothing when it drops that.
#[cfg(feature = "host")]
#[derive(Debug)]
pub(crate) struct Maker(u32);

#[cfg(feature = "host")]
impl Maker {
    /// Names this process.
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// Tells whether this process is the maker.
    pub(crate) fn is_here(&self) -> bool {
        std::process::id() == self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> Process {
        Process::of(std::process::id()).unwrap().unwrap()
    }

    #[test]
    fn a_name_of_brackets_and_blanks_hides_nothing() {
        let line = b"42 (a) b (\xff 1 2 3) S 7 8 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 1 2\n";
        assert_eq!(Stat::parse(line), Some(Stat { parent: 7, session: 9, started: 4711 }));
        let reaped = b"42 (a) X 0 -1 -1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 0 0 18446744073709551615 0";
        assert_eq!(Stat::parse(reaped), Some(Stat { parent: 0, session: 0, started: 4711 }));
        assert_eq!(Stat::parse(b"42 (a) S 7 8 9"), None);
        assert_eq!(Stat::parse(b""), None);
    }

    #[test]
    fn time_counts_as_starts_do() {
        let (before, mut child) = (now().unwrap(), std::process::Command::new("sleep").arg("1000").spawn().unwrap());
        let started = Stat::of(child.id()).unwrap().started;
        let after = now().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(before <= started && started <= after, "{before} {started} {after}");
    }

    /// Tells a copy of this program that its `/proc/uptime` is a container's.
    const CONTAINED: &str = "PRORL_TEST_CONTAINED";

    #[test]
    fn time_is_not_a_containers() {
        let test = "node::process::tests::time_is_not_a_containers";
        if std::env::var_os(CONTAINED).is_some() {
            assert_eq!(fs::read_to_string("/proc/uptime").unwrap(), "1.00 1.00\n");
            assert!(me().started.unwrap() <= now().unwrap());
            return;
        }
        let uptime = tempfile::NamedTempFile::new().unwrap();
        fs::write(uptime.path(), "1.00 1.00\n").unwrap();
        let contained = |script: &str| {
            let mut command = std::process::Command::new("unshare");
            command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]).arg(uptime.path());
            command.arg(std::env::current_exe().unwrap()).args(["--exact", test]).env(CONTAINED, "1").output().unwrap()
        };
        if !contained("mount --bind \"$1\" /proc/uptime").status.success() {
            return crate::node::tests::skip(test, "this user may not make mounts of its own");
        }
        let output = contained("mount --bind \"$1\" /proc/uptime && shift && exec \"$@\"");
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }

    #[test]
    fn a_process_is_itself_only() {
        let me = me();
        assert!(!me.open().unwrap().unwrap().has_ended() && me.is_there());
        let namesake = Process { started: me.started.map(|started| started - 1), ..me };
        assert!(namesake.open().unwrap().is_none() && namesake.watch().unwrap().is_none());
        assert!(!namesake.is_there());
        for pid in [0, u32::MAX, 1 << 30] {
            assert!(Process { pid, started: Some(1), inode: None }.open().unwrap().is_none(), "{pid}");
        }
        // The number of a thread names no process.
        let thread = std::thread::spawn(|| Process::of(nix::unistd::gettid().as_raw().unsigned_abs()).unwrap());
        assert_eq!(thread.join().unwrap(), None);
    }

    #[test]
    fn a_process_is_known_by_its_start_or_its_inode() {
        let me = me();
        assert!(Process { inode: None, ..me }.is_there());
        if let Some(inode) = me.inode {
            assert!(Process { started: None, ..me }.is_there());
            assert!(!Process { started: None, inode: Some(inode + 1), ..me }.is_there());
            assert!(!Process { inode: Some(inode + 1), ..me }.is_there());
        }
    }

    #[test]
    fn of_whom_nothing_is_known_is_neither_dead_nor_proven() {
        let unknown = Process { started: None, inode: None, ..me() };
        assert!(!unknown.is_there());
        assert_eq!(unknown.open().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(!unknown.watch().unwrap().unwrap().has_ended());
        if !geteuid().is_root() {
            assert!(Process { pid: 1, ..unknown }.watch().unwrap().is_none(), "process 1 is root's");
        }
    }

    #[test]
    fn descent_is_told_over_several_generations() {
        let me = std::process::id();
        let script = "sh -c 'sleep 1000 & echo $!; wait' & wait";
        let mut child =
            std::process::Command::new("sh").args(["-c", script]).stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
        let youngest = line.trim().parse().unwrap();
        let told = [descends(youngest, me), descends(youngest, child.id()), descends(child.id(), youngest)];
        Handle::of(youngest).unwrap().unwrap().kill(); // the shells wait for it
        child.wait().unwrap();
        assert_eq!(told.map(Result::unwrap), [true, true, false]);
    }
}
