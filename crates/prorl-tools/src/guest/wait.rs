//! One `poll` over what a thread waits for, and reading without waiting.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::clock::{Instant, now};

/// Waits until one of the descriptors is ready for what it is wanted for, or until `until`. Tells which are.
///
/// A hang-up or an error counts as ready, since the next call on the descriptor says which it is.
pub(super) fn wait<const N: usize>(
    wanted: [Option<(BorrowedFd<'_>, PollFlags)>; N],
    until: Option<Instant>,
) -> [bool; N] {
    let mut fds: Vec<PollFd<'_>> = wanted.iter().flatten().map(|(fd, flags)| PollFd::new(*fd, *flags)).collect();
    let timeout = until.map_or(PollTimeout::NONE, |until| {
        // Rounded up, so that it has really passed afterwards.
        let left = until.saturating_duration_since(now()) + Duration::from_micros(999);
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
    });
    // An interruption is as good as a timeout: the caller looks at its clock and comes back. Nothing else goes wrong but by somebody's
    // doing, and a guest that cannot wait would only turn round and round.
    match poll(&mut fds, timeout) {
        Ok(_) | Err(Errno::EINTR | Errno::ENOMEM) => {}
        Err(errno) => panic!("the guest cannot wait: {errno}"),
    }
    let mut polled = fds.iter();
    wanted.map(|one| one.is_some() && polled.next().and_then(PollFd::any).unwrap_or(false))
}

/// Makes reads and writes through this description return at once.
///
/// # Errors
/// When the descriptor is not open.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// What a read found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// This many bytes.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// Nothing any more.
    Closed,
}

/// Reads without waiting, from a descriptor that was [made so](set_nonblocking).
pub(super) fn read(fd: impl AsFd, buffer: &mut [u8]) -> Read {
    loop {
        match nix::unistd::read(&fd, buffer) {
            Ok(0) => return Read::Closed,
            Ok(n) => return Read::Bytes(n),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return Read::Nothing,
            Err(_gone) => return Read::Closed,
        }
    }
}

/// Returns the earlier of two points in time that may not be.
pub(super) fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
