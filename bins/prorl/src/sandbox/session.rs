//! A command in a sandbox, joined to this process's own input and outputs.
//!
//! What comes is read only when the command takes it, and what the command says is taken only when it can be written, so that
//! nothing piles up here.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use nix::{
    errno::Errno,
    libc::{self, SIGINT},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use prorl_tools::host::{AttachSpec, Input, Output, ToolClient};
use tokio::task::spawn_blocking;

use super::{
    signals::{Event, Signals},
    terminal::{self, Raw},
};

/// Bytes of input read at once.
const PIECE_BYTES: usize = 64 * 1024;

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// With the command, in a shell's words.
    Exited(i32),
    /// By a signal to this process.
    Signal(i32),
    /// By the limit.
    TimedOut,
}

/// Runs a command until it ends, or this process is asked to.
///
/// # Errors
/// When there is no such command, the sandbox dies, or the output cannot be written.
pub(super) async fn run(
    client: &ToolClient,
    spec: &AttachSpec,
    limit: Duration,
    signals: &mut Signals,
) -> anyhow::Result<End> {
    let mut attached = tokio::select! {
        attached = client.attach(spec, limit) => attached?,
        signal = signals.end() => return Ok(End::Signal(signal)),
    };
    let has_terminal = spec.terminal.is_some();
    let raw = if has_terminal { Raw::enter()? } else { None };
    let (input, stdout, stderr) = (attached.stdin.take(), attached.stdout.take(), attached.stderr.take());
    let mut feeding = pin!(feed(input));
    let mut is_fed = false;
    let attached = &attached;
    let mut ending = pin!(async {
        let output = async {
            drain(stdout, io::stdout().as_fd()).await.context("standard output cannot be written")?;
            if has_terminal { Ok(()) } else { close_stdout() }
        };
        let error = async { drain(stderr, io::stderr().as_fd()).await.context("standard error cannot be written") };
        let end = async { attached.wait().await.map_err(anyhow::Error::from) };
        let ((), (), end) = tokio::try_join!(output, error, end)?;
        anyhow::Ok(if end.timed_out { End::TimedOut } else { End::Exited(end.status.code()) })
    });
    let mut is_interrupted = false;
    loop {
        tokio::select! {
            end = &mut ending => return end,
            () = &mut feeding, if !is_fed => is_fed = true,
            event = signals.next() => match event {
                Event::End(signal) => return Ok(End::Signal(signal)),
                // Asked twice, it does not wait for what the command makes of it.
                Event::Interrupt if is_interrupted => return Ok(End::Signal(SIGINT)),
                Event::Interrupt => {
                    is_interrupted = true;
                    attached.signal(SIGINT);
                }
                Event::Resized => {
                    if let Some(size) = terminal::size().filter(|_| has_terminal) {
                        attached.resize(size);
                    }
                }
                Event::Continued => {
                    if let Some(raw) = &raw {
                        raw.again()?;
                    }
                }
            }
        }
    }
}

/// Passes standard input on until it or the command's ends.
async fn feed(input: Option<Input>) {
    let Some(mut input) = input else { return };
    loop {
        match spawn_blocking(read).await.map_err(io::Error::other).flatten() {
            Ok(piece) if piece.is_empty() => return,
            Ok(piece) => {
                if input.write(&piece).await.is_err() {
                    return; // the end of the command says the rest
                }
            }
            Err(error) => return tracing::warn!(%error, "standard input cannot be read and ends here"),
        }
    }
}

/// Writes what comes until it ends or nobody reads it any more, which the command is then told by the end of its pipe.
async fn drain(output: Option<Output>, to: BorrowedFd<'_>) -> io::Result<()> {
    let Some(mut output) = output else { return Ok(()) };
    let to = Arc::new(to.try_clone_to_owned()?);
    while let Some(piece) = output.next().await {
        let to = Arc::clone(&to);
        match spawn_blocking(move || write(to.as_fd(), &piece)).await.map_err(io::Error::other).flatten() {
            // The second is what a terminal says that was hung up.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPIPE | libc::EIO)) => return Ok(()),
            written => written?,
        }
    }
    Ok(())
}

/// Lets go of standard output, so that who reads it sees the end as soon as the command has let go of its own.
fn close_stdout() -> anyhow::Result<()> {
    let nowhere = File::options().write(true).open("/dev/null").context("/dev/null cannot be opened")?;
    nix::unistd::dup2_stdout(nowhere).context("standard output cannot be closed")
}

/// Reads what there is of standard input, waiting for something; nothing at its end.
fn read() -> io::Result<Vec<u8>> {
    let stdin = io::stdin();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match nix::unistd::read(&stdin, &mut piece) {
            Ok(n) => {
                piece.truncate(n);
                return Ok(piece);
            }
            Err(error) => retry(stdin.as_fd(), PollFlags::POLLIN, error)?,
        }
    }
}

fn write(to: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        match nix::unistd::write(to, rest) {
            Ok(n) => rest = &rest[n..],
            Err(error) => retry(to, PollFlags::POLLOUT, error)?,
        }
    }
    Ok(())
}

/// Waits where a call did not: whoever started this program may share the file with it and have made it so.
fn retry(fd: BorrowedFd<'_>, ready: PollFlags, error: Errno) -> io::Result<()> {
    match error {
        Errno::EINTR => Ok(()),
        Errno::EAGAIN => Ok(poll(&mut [PollFd::new(fd, ready)], PollTimeout::NONE).map(drop)?),
        error => Err(error.into()),
    }
}
