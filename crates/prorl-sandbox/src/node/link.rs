//! The server's line to its keeper.

use std::{
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::{net::UnixStream, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::FlockArg,
    poll::{PollFd, PollFlags, poll},
    sys::socket::{MsgFlags, send},
};
use parking_lot::Mutex;
use prorl_core::frame;

use super::{
    attend::{Server, attend},
    folder,
    process::Handle,
    wire::{Kept, Problem, Refusal, Request},
};
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
pub(super) struct Link {
    line: Mutex<UnixStream>,
    folder: PathBuf,
    keeper: Option<Handle>,
}

impl Link {
    /// Starts a keeper, and returns the line to it.
    pub(super) fn start(guest: &Path, keep: Keep) -> Result<Self, SandboxError> {
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
            Kept::Made { name, pid } => {
                line.set_nonblocking(true).map_err(at_channel)?;
                Ok(Self { line: Mutex::new(line), folder: dir.join(name), keeper: Handle::of(pid).ok().flatten() })
            }
            Kept::Refused(refusal) => Err(refusal.into()),
        }
    }

    /// Returns the keeper's folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Asks the keeper to see to the end of a sandbox. One that is too busy does not hear of it; instead of one that was killed,
    /// a thread of this process does it.
    pub(super) fn ask(&self, request: &Request) {
        let Ok(bytes) = frame::encode(request) else { return };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let mut line = self.line.lock();
        if send(line.as_raw_fd(), &bytes, flags) == Err(Errno::EPIPE) && self.stand_in(&mut line) {
            let _ = send(line.as_raw_fd(), &bytes, flags);
        }
    }

    /// Hangs up, and waits a moment for the keeper's end. Tells whether it came.
    pub(super) fn close(&self) -> bool {
        let mut line = self.line.lock();
        // What a killed one was asked for is still to be done.
        if has_hung_up(&line, 0) && !self.stand_in(&mut line) {
            return true;
        }
        let _ = line.shutdown(Shutdown::Write);
        if let Some(keeper) = &self.keeper {
            keeper.resume(); // somebody may have stopped it
        }
        has_hung_up(&line, END_LIMIT_MS)
    }

    /// Lets a thread do the work of a keeper that was killed, at the other end of a new line.
    fn stand_in(&self, line: &mut UnixStream) -> bool {
        let folder = self.folder.clone();
        let started = UnixStream::pair().and_then(|(ours, theirs)| {
            ours.set_nonblocking(true)?;
            let work = move || {
                let lock = folder::lock(&folder, FlockArg::LockSharedNonblock);
                let lock = lock.and_then(|lock| lock.ok_or_else(|| io::Error::other("somebody else has locked it")));
                let done = lock.and_then(|lock| attend(&folder, Server::new(theirs), lock, None));
                if let Err(error) = done {
                    tracing::warn!(folder = %folder.display(), %error, "what is left cannot be removed");
                }
            };
            thread::Builder::new().name("prorl-keeper".to_owned()).spawn(work)?;
            Ok(ours)
        });
        match started {
            Ok(ours) => {
                *line = ours;
                tracing::warn!(folder = %self.folder.display(), "a node's keeper was killed; a thread stands in for it");
                true
            }
            Err(error) => {
                tracing::warn!(folder = %self.folder.display(), %error, "nothing can stand in for a killed keeper");
                false
            }
        }
    }
}

/// Tells whether the other end is closed, or is before so many milliseconds are over. Nothing is ever sent from there.
fn has_hung_up(line: &UnixStream, limit_ms: u16) -> bool {
    let mut fds = [PollFd::new(line.as_fd(), PollFlags::empty())];
    loop {
        match poll(&mut fds, limit_ms) {
            Err(Errno::EINTR) => {}
            Ok(n_told) => return n_told > 0,
            Err(_) => return false,
        }
    }
}

fn spawn(guest: &Path, channel: UnixStream) -> Result<Child, SandboxError> {
    // A bare name would be looked for along PATH.
    let program = std::path::absolute(guest).map_err(|source| SandboxError::at("find guest", source))?;
    Command::new(program)
        .arg0("prorl-keeper")
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
        let elsewhere = "name another folder (--run-dir or TMPDIR)";
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
