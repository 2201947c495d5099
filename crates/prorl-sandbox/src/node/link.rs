//! The server's line to its keeper.

use std::{
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::socket::{MsgFlags, send},
};
use prorl_core::frame;

use super::wire::{Kept, Problem, Refusal, Request};
use crate::{
    SandboxError,
    setup::{Keep, Order},
};

/// How long a keeper may take to make its folder, which is a matter of milliseconds on a disk that answers.
const START_LIMIT: Duration = Duration::from_secs(20);

/// How long the last user of a node waits for the keeper to end, in milliseconds.
const END_LIMIT_MS: u16 = 1000;

/// A keeper's answer is small; a program that announces more is no guest of ours.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

/// The line to a keeper that has made its folder. Closing it is how the keeper learns that there is nothing to keep.
#[derive(Debug)]
pub(super) struct Link(UnixStream);

impl Link {
    /// Starts a keeper; returns the line to it and its folder.
    pub(super) fn start(guest: &Path, keep: Keep) -> Result<(Self, PathBuf), SandboxError> {
        let dir = keep.dir.clone();
        let order = frame::encode(&Order::Keep(keep))
            .map_err(|error| SandboxError::at("order a keeper", io::Error::other(error)))?;
        let at_channel = |source| SandboxError::at("create channel to keeper", source);
        let (mut line, theirs) = UnixStream::pair().map_err(at_channel)?;
        line.set_read_timeout(Some(START_LIMIT)).map_err(at_channel)?;
        let mut child = spawn(guest, theirs)?;
        // One that cannot take its order has a reason to tell, or has ended.
        let _ = line.write_all(&order);
        let answer = read_answer(&mut line);
        if answer.is_err() {
            let _ = child.kill();
        }
        // What was started ends as soon as it has started the keeper, which is nobody's child. Where this process leaves
        // its children to the kernel there is nothing to wait for.
        let _ = child.wait();
        match answer? {
            Kept::Folder(name) => {
                line.set_nonblocking(true).map_err(at_channel)?;
                Ok((Self(line), dir.join(name)))
            }
            Kept::Refused(refusal) => Err(refusal.into()),
        }
    }

    /// Asks the keeper to see to the end of a sandbox. One that is gone or too busy does not hear of it.
    pub(super) fn ask(&self, request: &Request) {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        // A frame this short is sent whole or not at all, so that several threads may send.
        if let Ok(bytes) = frame::encode(request) {
            let _ = send(self.0.as_raw_fd(), &bytes, flags);
        }
    }

    /// Hangs up, and waits a moment for the keeper's end. Tells whether it came.
    pub(super) fn close(&self) -> bool {
        if self.0.shutdown(Shutdown::Write).is_err() {
            return true; // its end is closed
        }
        // Nothing is ever sent from there, so that whatever is told is the end.
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::empty())];
        loop {
            match poll(&mut fds, END_LIMIT_MS) {
                Err(nix::errno::Errno::EINTR) => {}
                Ok(1..) => return true,
                Ok(_) | Err(_) => return false,
            }
        }
    }
}

fn spawn(guest: &Path, channel: UnixStream) -> Result<Child, SandboxError> {
    // A bare name would be looked for along PATH.
    let program = std::path::absolute(guest).map_err(|source| SandboxError::at("find guest", source))?;
    Command::new(program)
        .env_clear()
        .stdin(Stdio::from(OwnedFd::from(channel)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|source| SandboxError::Spawn { path: guest.to_owned(), source })
}

fn read_answer(line: &mut UnixStream) -> Result<Kept, SandboxError> {
    let broken = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => SandboxError::NotReady { waited: START_LIMIT, output: String::new() },
        _ => SandboxError::Ended { how: "asked to be a keeper".to_owned() },
    };
    let foreign = |reason: String| SandboxError::Protocol { reason };
    let mut header = [0; frame::HEADER_BYTES];
    line.read_exact(&mut header).map_err(broken)?;
    let len = frame::body_len(header).map_err(|error| foreign(error.to_string()))?;
    if len > MAX_ANSWER_BYTES {
        return Err(foreign(format!("keeper's answer of {len} bytes")));
    }
    let mut body = vec![0; len];
    line.read_exact(&mut body).map_err(broken)?;
    frame::decode(&body).map_err(|error| foreign(error.to_string()))
}

impl From<Refusal> for SandboxError {
    fn from(Refusal { problem, path, errno }: Refusal) -> Self {
        let source = if errno == 0 { io::Error::other("refused") } else { io::Error::from_raw_os_error(errno) };
        let elsewhere = "name another folder (TMPDIR)";
        let (problem, advice) = match problem {
            Problem::NoFolder => ("is a link or a file".to_owned(), format!("remove it, or {elsewhere}")),
            Problem::Owner(uid) => (format!("belongs to user {uid}"), elsewhere.to_owned()),
            Problem::Open(mode) => (
                format!("can be written by others (mode {mode:o})"),
                format!("take that right away (chmod go-w), or {elsewhere}"),
            ),
            Problem::Call => match errno {
                libc::ENOSPC | libc::EDQUOT => ("has no space left".to_owned(), format!("make room, or {elsewhere}")),
                libc::EACCES | libc::EPERM | libc::EROFS => {
                    ("cannot be written by this user".to_owned(), elsewhere.to_owned())
                }
                libc::ENOENT | libc::ENOTDIR => {
                    ("has no folder to be made in".to_owned(), format!("make that folder, or {elsewhere}"))
                }
                _ => ("cannot be made or written".to_owned(), elsewhere.to_owned()),
            },
        };
        Self::Folder { path: path.into(), problem, advice, source }
    }
}
