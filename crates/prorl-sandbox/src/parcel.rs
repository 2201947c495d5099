//! Open files that are handed from one process to another, along with bytes.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The most descriptors that one parcel holds.
pub(crate) const MAX_FILES: usize = 6;

/// Sends bytes with copies of open files, at most [`MAX_FILES`]; returns how many of the bytes went along.
pub(crate) fn send(channel: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(sendmsg(channel, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

#[cfg(feature = "init")]
pub(crate) use guest::receive;

#[cfg(feature = "init")]
mod guest {
    use std::{
        io::{self, IoSliceMut},
        mem::MaybeUninit,
        os::fd::{AsFd, OwnedFd},
    };

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

    use super::MAX_FILES;

    /// Takes one byte and the `N` open files that came with it. Does not return before there is one.
    pub(crate) fn receive<const N: usize>(channel: impl AsFd) -> io::Result<[OwnedFd; N]> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let received = recvmsg(channel, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(sent) = message {
                files.extend(sent);
            }
        }
        files.try_into().map_err(|_other_number| io::ErrorKind::InvalidData.into())
    }
}
