//! What an attached program reads: bytes of the host's, and their end.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use nix::{errno::Errno, poll::PollFlags};

use super::{
    clock::{Instant, now},
    post::Post,
    pty::{self, Keys},
    wait::wait,
};
use crate::wire::{GuestFrame, Stream};

/// Bytes of input that the host may send ahead of the program.
pub(super) const WINDOW_BYTES: u64 = 256 * 1024;

/// Between two looks at whether a terminal has been read empty: the first pause, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// The input of a program.
#[derive(Default)]
pub(super) struct Feed {
    to: Option<OwnedFd>,
    /// What the host has sent and the program has not taken.
    bytes: VecDeque<u8>,
    /// Whether nothing comes after that.
    is_ending: bool,
    /// Types the end, where there is a terminal.
    typist: Option<Typist>,
    /// Bytes taken that the host has not been given credit for.
    owed: u64,
}

impl Feed {
    /// Returns the input that goes through a pipe.
    pub(super) fn pipe(to: OwnedFd) -> Self {
        Self { to: Some(to), ..Self::default() }
    }

    /// Returns the input that is typed at a terminal, given its master's and its slave's end.
    pub(super) fn terminal(master: OwnedFd, slave: OwnedFd) -> Self {
        Self { to: Some(master), typist: Some(Typist::new(slave)), ..Self::default() }
    }

    /// Returns what to wait for, if there is something to write.
    pub(super) fn wanted(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        self.to.as_ref().filter(|_| !self.bytes.is_empty()).map(|to| (to.as_fd(), PollFlags::POLLOUT))
    }

    /// Returns when to [type the end](Self::type_end), if it is to be typed.
    pub(super) fn due(&self) -> Option<Instant> {
        self.typist.as_ref().filter(|_| self.is_ending && self.bytes.is_empty()).map(|typist| typist.due)
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        if let Some(last) = bytes.last().filter(|_| self.to.is_some() && !self.is_ending) {
            self.bytes.extend(bytes);
            if let Some(typist) = &mut self.typist {
                typist.is_inside_line = *last != b'\n';
            }
        }
    }

    /// Lets the program see the end once it has taken what there is.
    pub(super) fn end(&mut self) {
        self.is_ending = true;
        self.has_written();
    }

    /// Types the end at a terminal from which everything has been read.
    pub(super) fn type_end(&mut self) {
        if self.due().is_some_and(|due| due <= now()) {
            self.bytes.extend(self.typist.as_mut().and_then(Typist::key));
        }
    }

    /// Writes what the program takes now.
    pub(super) fn pump(&mut self, post: &Post, id: u64) {
        let Some(to) = &self.to else { return };
        match nix::unistd::write(to, self.bytes.as_slices().0) {
            Ok(n) => {
                self.bytes.drain(..n);
                self.owed += n as u64;
            }
            Err(Errno::EAGAIN | Errno::EINTR) => return,
            Err(_closed) => {
                *self = Self::default();
                return post.send(&GuestFrame::Closed { id, stream: Stream::Stdin });
            }
        }
        self.has_written();
        if self.to.is_some() && self.owed >= WINDOW_BYTES / 4 {
            post.send(&GuestFrame::Credit { id, bytes: std::mem::take(&mut self.owed) });
        }
    }

    fn has_written(&mut self) {
        if self.typist.is_none() && self.bytes.is_empty() && self.is_ending {
            self.to = None;
        }
    }
}

/// Types the end of the input.
///
/// The end of a pipe is there for everyone who reads, at any time. A typed one is read once and may get lost: a program that
/// takes the line editing over from the kernel finds a NUL in its place, or throws away what was typed before, and one that
/// has given it back would find the character itself as data. So it is typed when nothing is left to read, and again as often
/// as that is so while the program lives. Nothing tells when a terminal has been read empty, so it is looked at.
struct Typist {
    slave: OwnedFd,
    /// Whether the last byte of the input ended no line.
    is_inside_line: bool,
    /// Whether there was nothing to read at the last look.
    was_empty: bool,
    due: Instant,
    pause: Duration,
}

impl Typist {
    fn new(slave: OwnedFd) -> Self {
        Self { slave, is_inside_line: false, was_empty: false, due: now(), pause: PAUSES.0 }
    }

    /// Returns what is to be typed now, if anything is, and when it is to be asked again.
    fn key(&mut self) -> Option<u8> {
        self.due = now().checked_add(self.pause)?;
        self.pause = (self.pause * 2).min(PAUSES.1);
        let [has_some] = wait([Some((self.slave.as_fd(), PollFlags::POLLIN))], Some(now()));
        let was_empty = std::mem::replace(&mut self.was_empty, !has_some);
        match pty::keys(&self.slave) {
            _ if has_some => None,
            // It may have read a line just now and be about to start a program that is no line editor.
            Keys { is_canonical: false, .. } if !was_empty => None,
            // A line editor takes the end for one at the beginning of a line only.
            Keys { is_canonical: false, .. } if self.is_inside_line => {
                self.is_inside_line = false;
                Some(b'\n')
            }
            // Inside a line of the kernel's it hands over what was typed of it, and is the end when typed again.
            Keys { end, .. } => Some(end),
        }
    }
}
