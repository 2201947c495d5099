//! A pseudo-terminal as seen from its master's side.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::PollFlags,
    pty::{grantpt, posix_openpt, unlockpt},
    sys::termios::{
        FlowArg, FlushArg, InputFlags, LocalFlags, OutputFlags, SetArg, SpecialCharacterIndices, Termios, tcflow,
        tcflush, tcgetattr, tcsetattr,
    },
};

use super::{
    clock::{after, now},
    sys,
    wait::{Read, read, set_nonblocking, wait},
};
use crate::wire::WindowSize;

/// More than a terminal's queues hold between a writer and us, so that reading this much after a point in time has read all
/// that was written before it. (Two queues of 4 and 8 KiB.)
const QUEUE_BYTES: usize = 64 * 1024;

/// Bytes read from a terminal before looking at what else there is.
pub(super) const TURN_BYTES: usize = 256 * 1024;

/// How long a fence waits for its sentinel. Only a terminal that is held up by what runs in it comes near.
const FENCE_MS: u64 = 2000;

/// How the slave's end is opened.
const PEER: i32 = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;

/// Opens the master's end of a new terminal; reads and writes never wait.
fn open_master() -> io::Result<OwnedFd> {
    let pty = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    grantpt(&pty)?;
    unlockpt(&pty)?;
    let master = pty.as_fd().try_clone_to_owned()?;
    set_nonblocking(master.as_fd())?;
    Ok(master)
}

/// Opens a terminal as a person sits at one, with echo, line editing and job control; returns its master's and its slave's end.
///
/// # Errors
/// When there is no `/dev/ptmx` or no terminal left.
pub(super) fn open_plain(size: WindowSize) -> io::Result<(OwnedFd, OwnedFd)> {
    let master = open_master()?;
    let slave = sys::open_peer(master.as_fd(), PEER)?;
    let mut settings = tcgetattr(&slave)?;
    // So that erasing takes a whole character away, as the sandbox's locale has them.
    settings.input_flags.insert(InputFlags::IUTF8);
    tcsetattr(&slave, SetArg::TCSANOW, &settings)?;
    sys::set_window(master.as_fd(), size.rows, size.columns)?;
    Ok((master, slave))
}

/// What a terminal makes of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    /// Whether the kernel edits lines, and not the program that reads.
    pub(super) is_canonical: bool,
    /// The key that ends the input.
    pub(super) end: u8,
}

/// Returns what a terminal makes of keys; what is usual where it does not say.
pub(super) fn keys(terminal: &OwnedFd) -> Keys {
    const USUAL: Keys = Keys { is_canonical: true, end: 4 }; // C-d
    tcgetattr(terminal).map_or(USUAL, |settings| Keys {
        is_canonical: settings.local_flags.contains(LocalFlags::ICANON),
        end: settings.control_chars[SpecialCharacterIndices::VEOF as usize],
    })
}

/// The terminal of a session; it outlives the shells that run in it.
#[derive(Debug)]
pub(super) struct Pty {
    master: OwnedFd,
    /// The slave's end for us: never waits.
    own_slave: OwnedFd,
    /// The slave's end that shells get.
    shell_slave: OwnedFd,
    /// The path by which processes know it.
    path: Option<PathBuf>,
    settings: Termios,
}

/// What the terminal of a session takes for the end of input: C-d.
pub(super) const END: u8 = 4;

/// The window that a session's terminal says it has.
const WINDOW: WindowSize = WindowSize { rows: 24, columns: 120 };

impl Pty {
    /// Opens a terminal whose output comes as it was written, which edits and interprets input lines, and which echoes
    /// nothing: the agent knows what it typed.
    ///
    /// # Errors
    /// When there is no `/dev/ptmx` or no terminal left.
    pub(super) fn open() -> io::Result<Self> {
        let master = open_master()?;
        let shell_slave = sys::open_peer(master.as_fd(), PEER)?;
        let own_slave = sys::open_peer(master.as_fd(), PEER | libc::O_NONBLOCK)?;
        let mut settings = tcgetattr(&own_slave)?;
        settings.output_flags.remove(OutputFlags::OPOST);
        settings.input_flags.remove(InputFlags::IXON | InputFlags::IMAXBEL);
        settings.local_flags.remove(LocalFlags::ECHO | LocalFlags::ECHONL | LocalFlags::ECHOCTL);
        // An interrupt must not throw away output that was written before it.
        settings.local_flags.insert(LocalFlags::ICANON | LocalFlags::ISIG | LocalFlags::NOFLSH);
        // Without job control nothing would wake up a command that was stopped.
        settings.control_chars[SpecialCharacterIndices::VSUSP as usize] = libc::_POSIX_VDISABLE;
        tcsetattr(&own_slave, SetArg::TCSANOW, &settings)?;
        sys::set_window(master.as_fd(), WINDOW.rows, WINDOW.columns)?;
        let path = std::fs::read_link(format!("/proc/self/fd/{}", own_slave.as_raw_fd())).ok();
        Ok(Self { master, own_slave, shell_slave, path, settings })
    }

    /// Returns the slave's end for a shell's standard descriptors.
    ///
    /// # Errors
    /// When there can be no more descriptors.
    pub(super) fn slave(&self) -> io::Result<OwnedFd> {
        self.shell_slave.try_clone()
    }

    /// Returns the path by which processes know it.
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Tells whether what reads from it edits lines itself, as editors and interpreters do.
    pub(super) fn is_raw(&self) -> bool {
        tcgetattr(&self.own_slave).is_ok_and(|settings| !settings.local_flags.contains(LocalFlags::ICANON))
    }

    /// Undoes what a command did to the terminal: settings, its window, a held-up output, and reads that do not wait.
    pub(super) fn reset(&self) {
        if tcgetattr(&self.own_slave).is_ok_and(|settings| settings != self.settings) {
            // Nothing to be done if it fails: the fence is bounded.
            let _set = tcsetattr(&self.own_slave, SetArg::TCSANOW, &self.settings);
        }
        // Nothing happens where it has this size.
        let _set = sys::set_window(self.master.as_fd(), WINDOW.rows, WINDOW.columns);
        let _released = tcflow(&self.own_slave, FlowArg::TCOON);
        if let Ok(flags) = fcntl(&self.shell_slave, FcntlArg::F_GETFL) {
            let flags = OFlag::from_bits_retain(flags);
            if flags.contains(OFlag::O_NONBLOCK) {
                let _set = fcntl(&self.shell_slave, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK));
            }
        }
    }

    /// Forgets what was typed and not read.
    pub(super) fn forget_input(&self) {
        let _flushed = tcflush(&self.own_slave, FlushArg::TCIFLUSH);
    }

    /// Returns the process group in the foreground.
    pub(super) fn foreground(&self) -> Option<nix::unistd::Pid> {
        nix::unistd::tcgetpgrp(&self.master).ok().filter(|group| group.as_raw() > 1)
    }

    /// Reads what is there, `limit` bytes or a little more at most. Tells whether there was something.
    pub(super) fn drain(&self, limit: usize, mut take: impl FnMut(&[u8])) -> bool {
        let mut buffer = [0; 8192];
        let mut n_read = 0;
        while n_read < limit {
            let Read::Bytes(n) = read(&self.master, &mut buffer) else { break };
            take(&buffer[..n]);
            n_read += n;
        }
        n_read > 0
    }

    /// Types as much as the terminal takes now; returns how much.
    pub(super) fn type_in(&self, bytes: &[u8]) -> usize {
        nix::unistd::write(&self.master, bytes).unwrap_or(0)
    }

    /// Reads everything that was written before this call.
    ///
    /// What a process has written may still be on its way through the kernel's queues, and nothing tells when it has come. So
    /// a random word is written after it and read up to. Where a process in the background writes without pause, the word may
    /// not get in, or be torn; then reading as much as the queues can hold proves the same.
    pub(super) fn fence(&self, mut take: impl FnMut(&[u8])) {
        self.reset();
        let word = sys::word();
        let word = word.as_bytes();
        let mut unwritten = word;
        let mut seen: Vec<u8> = Vec::new();
        let give_up = after(now(), FENCE_MS);
        let mut buffer = [0; 8192];
        while seen.len() < QUEUE_BYTES {
            let mut is_full = false;
            match nix::unistd::write(&self.own_slave, unwritten) {
                Ok(n) => unwritten = &unwritten[n..],
                Err(Errno::EAGAIN) => is_full = true,
                Err(Errno::EINTR) => {}
                Err(_gone) => break,
            }
            match read(&self.master, &mut buffer) {
                Read::Bytes(n) => {
                    let from = seen.len().saturating_sub(word.len() - 1);
                    seen.extend_from_slice(&buffer[..n]);
                    if let Some(at) = seen[from..].windows(word.len()).position(|window| window == word) {
                        take(&seen[..from + at]);
                        take(&seen[from + at + word.len()..]);
                        return;
                    }
                }
                Read::Closed => break,
                Read::Nothing if now() >= give_up => break,
                Read::Nothing => {
                    // Full without anything to read: a writer holds the terminal at this moment, and lets go by itself.
                    let until = if is_full { after(now(), 1).min(give_up) } else { give_up };
                    wait([Some((self.master.as_fd(), PollFlags::POLLIN))], Some(until));
                }
            }
        }
        take(&seen);
    }
}

impl AsFd for Pty {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.master.as_fd()
    }
}
