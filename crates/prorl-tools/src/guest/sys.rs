//! The system calls for which nix has no safe function.
#![expect(unsafe_code, reason = "fork hooks and three ioctls; everything else goes through nix")]

use std::{
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Child, Command},
};

use nix::{errno::Errno, sys::signal::Signal, unistd::Pid};

use super::limits::TaskLimits;
use crate::wire::ExitStatus;

/// Descriptors that a child gets besides its standard ones, as (ours, its number).
///
/// Ours must be numbered above every number that is given, or one would overwrite another.
pub(super) type Passed = Vec<(OwnedFd, RawFd)>;

/// Starts a program that leads a session of its own, with default signal handlers, the limits of tasks, and no descriptor of ours
/// but its standard ones and `passed`. With `terminal` its standard input becomes its controlling terminal.
///
/// # Errors
/// When it cannot be started.
pub(super) fn spawn(command: &mut Command, passed: &Passed, terminal: bool, limits: &TaskLimits) -> io::Result<Child> {
    let limits = limits.of_child();
    let passed: Vec<(RawFd, RawFd)> = passed.iter().map(|(from, to)| (from.as_raw_fd(), *to)).collect();
    let prepare = move || {
        // SAFETY: each of these calls is async-signal-safe (that for limits is a bare system call) and takes plain numbers, or a
        // pointer to what outlives it.
        unsafe {
            if libc::setsid() < 0 || (terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0) {
                return Err(io::Error::last_os_error());
            }
            // The kernel's own call, since the C library refuses the signals that it keeps for itself, and an ignored one is
            // inherited all the same. The two that cannot be changed fail, which is right.
            let default = [0_usize; 4];
            for signal in 1..=64 {
                libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null::<usize>(), 8_usize);
            }
            // Ours are close-on-exec already. This covers what was inherited; a kernel without the call has only the former.
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
            for (from, to) in &passed {
                if libc::dup2(*from, *to) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            // After that, as the numbers may be above the limit.
            for (resource, limit) in limits.iter().flatten() {
                if libc::setrlimit(*resource, limit) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
        }
        Ok(())
    };
    // SAFETY: the hook runs in the forked child before exec, where only async-signal-safe calls are sound. It makes only such
    // calls, allocates nothing (an error of the system is a number) and takes no lock.
    unsafe { command.pre_exec(prepare) }.spawn()
}

/// Opens the other end of a pseudo-terminal, without a path, so that it works where `/dev/pts` is not mounted.
///
/// # Errors
/// When the kernel is older than 4.13, among others.
pub(super) fn open_peer(master: BorrowedFd<'_>, flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: the request takes a number of flags and returns a new descriptor, or -1.
    let fd = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets the size of a terminal.
///
/// # Errors
/// When it is none.
pub(super) fn set_window(terminal: BorrowedFd<'_>, rows: u16, columns: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the request reads a winsize, which lives until the call returns.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns how many bytes can be read at once.
///
/// # Errors
/// When the descriptor has no such count.
pub(super) fn readable_bytes(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: the request writes an int, which lives until the call returns.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut count) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(usize::try_from(count).unwrap_or(0)) }
}

/// Returns 11 letters and digits that nobody can guess.
///
/// # Panics
/// When the kernel has no random numbers, which Linux always has once it runs programs.
pub(super) fn word() -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut bytes = [0_u8; 11];
    // SAFETY: the call writes at most as many bytes as the buffer has.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(usize::try_from(n), Ok(bytes.len()), "the kernel gives so few random bytes at once");
    bytes.iter().map(|byte| char::from(LETTERS[usize::from(byte & 63)])).collect()
}

/// Returns the same open description under a new number, `lowest` or above, that is closed on exec.
///
/// # Errors
/// When there can be no more descriptors.
pub(super) fn duplicate_above(fd: BorrowedFd<'_>, lowest: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two numbers and returns a new descriptor, or -1.
    let fd = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, lowest) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the time since the machine started in hundredths of a second, the clock ticks in which `/proc` tells when
/// processes started.
pub(super) fn boot_ticks() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes a timespec, which lives until it returns.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    u64::try_from(time.tv_sec * 100 + time.tv_nsec / 10_000_000).unwrap_or(0)
}

/// Waits until a child has ended, whichever, and returns its number. It stays to be [collected](collect).
///
/// # Errors
/// When there is no child, or the wait was interrupted.
pub(super) fn wait_for_any() -> Result<Pid, Errno> {
    // SAFETY: all bytes of a siginfo_t may be zero.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes a siginfo_t, which lives until it returns.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOWAIT) };
    Errno::result(result)?;
    // SAFETY: the call has succeeded, so this is about a child.
    Ok(Pid::from_raw(unsafe { info.si_pid() }))
}

/// Collects a child that has ended and returns how; nothing if it has not, or is no child. nix has no name for half of the signals
/// that a process can end by, and would never collect it.
pub(super) fn collect(pid: Pid) -> Option<ExitStatus> {
    let mut status: libc::c_int = 0;
    // SAFETY: the call writes an int, which lives until it returns.
    let collected = unsafe { libc::waitpid(pid.as_raw(), &raw mut status, libc::WNOHANG) };
    if collected != pid.as_raw() {
        return None;
    }
    Some(if libc::WIFSIGNALED(status) {
        ExitStatus::Signal(libc::WTERMSIG(status))
    } else {
        ExitStatus::Code(libc::WEXITSTATUS(status))
    })
}

/// Sends a process the last of the real-time signals, which nix has no name for. One that is gone needs none.
pub(super) fn send_last_signal(pid: i32) {
    // SAFETY: the call takes two numbers.
    unsafe { libc::kill(pid, libc::SIGRTMAX()) };
}

/// Returns a descriptor that is readable once a process has ended.
///
/// # Errors
/// When it already has, or the kernel is older than 5.3.
pub(super) fn process_end(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two numbers and returns a new descriptor, closed on exec, or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just made this descriptor and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Signals the process that a handle of [`process_end`] means, whatever its number has come to mean.
///
/// # Errors
/// When it has ended.
pub(super) fn signal_process(process: BorrowedFd<'_>, signal: Signal) -> io::Result<()> {
    // SAFETY: the call takes numbers, and no pointer where that for details is null.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            signal as libc::c_int,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
