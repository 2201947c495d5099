//! A program with pipes: no shell, no terminal.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
};

use nix::{errno::Errno, fcntl::OFlag, poll::PollFlags, sys::signal::Signal, unistd::pipe2};

use super::{
    capture::Capture,
    clock::{after, now},
    post::{Mail, Mailbox},
    procs,
    reaper::Process,
    serve::Shared,
    wait::{Read, read, set_nonblocking, wait},
};
use crate::wire::{Answer, Exec, ExecAnswer, Rest, Stream};

/// Bytes of the end of each output that fit in an answer, which is one frame.
const TAIL_BYTES: usize = 1024 * 1024;

/// Bytes read after the end at most, of what children that live on keep writing.
const DRAIN_BYTES: usize = 1024 * 1024;

/// One of the two outputs.
struct Output {
    stream: Stream,
    pipe: Option<OwnedFd>,
    capture: Capture,
}

impl Output {
    /// Reads what is there, `limit` bytes or a little more at most, and sends on what belongs to the beginning.
    fn drain(&mut self, shared: &Shared, id: u64, limit: usize) {
        let mut buffer = vec![0; 64 * 1024];
        let mut n_read = 0;
        while let Some(pipe) = &self.pipe {
            match read(pipe, &mut buffer) {
                Read::Bytes(n) => {
                    shared.post.output(id, self.stream, self.capture.push(&buffer[..n]));
                    n_read += n;
                }
                Read::Closed => self.pipe = None,
                Read::Nothing => return,
            }
            if n_read >= limit {
                return;
            }
        }
    }

    fn rest(&mut self) -> Rest {
        let captured = self.capture.take();
        Rest { tail: captured.tail, total: captured.total }
    }
}

pub(super) fn run(shared: &Arc<Shared>, mailbox: &Mailbox, id: u64, timeout_ms: u64, exec: &Exec) {
    let begun = now();
    let limit = usize::try_from(exec.output_limit).unwrap_or(usize::MAX);
    let (process, stdin, outputs) = match start(shared, exec) {
        Ok(started) => started,
        Err(err) => {
            return shared
                .post
                .failed(id, format!("cannot run {}: {err}", exec.argv.first().map_or("nothing", String::as_str)));
        }
    };
    let tail = (limit / 2).min(TAIL_BYTES);
    let mut stdin = Some(stdin);
    let mut input = exec.stdin.0.as_slice();
    let [stdout, stderr] = outputs;
    let output = |stream, pipe| Output { stream, pipe: Some(pipe), capture: Capture::new(limit - tail, tail) };
    let mut stdout = output(Stream::Stdout, stdout);
    let mut stderr = output(Stream::Stderr, stderr);
    let mut until = Some(after(begun, timeout_ms));
    let mut timed_out = false;
    let status = loop {
        if input.is_empty() {
            stdin = None;
        }
        let [has_mail, may_write, has_out, has_err, has_ended] = wait(
            [
                Some((mailbox.as_fd(), PollFlags::POLLIN)),
                stdin.as_ref().map(|pipe| (pipe.as_fd(), PollFlags::POLLOUT)),
                stdout.pipe.as_ref().map(|pipe| (pipe.as_fd(), PollFlags::POLLIN)),
                stderr.pipe.as_ref().map(|pipe| (pipe.as_fd(), PollFlags::POLLIN)),
                Some((process.ended(), PollFlags::POLLIN)),
            ],
            until,
        );
        let cancelled = has_mail && mailbox.take().iter().any(|mail| matches!(mail, Mail::Cancel(_)));
        let passed = until.is_some_and(|until| until <= now());
        if cancelled || passed {
            timed_out |= passed;
            until = None;
            end(&process);
        }
        if may_write && let Some(pipe) = &stdin {
            match nix::unistd::write(pipe, input) {
                Ok(n) => input = &input[n..],
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                // It does not want to read the rest.
                Err(_closed) => input = &[],
            }
        }
        if has_out {
            stdout.drain(shared, id, DRAIN_BYTES);
        }
        if has_err {
            stderr.drain(shared, id, DRAIN_BYTES);
        }
        if has_ended && let Some(status) = process.status() {
            break status;
        }
    };
    // The end of the program counts, not the end of its pipes: a child in the background may hold those for ever.
    stdout.drain(shared, id, DRAIN_BYTES);
    stderr.drain(shared, id, DRAIN_BYTES);
    let answer = ExecAnswer { status, timed_out, stdout: stdout.rest(), stderr: stderr.rest() };
    shared.post.done(id, Answer::Exec(answer));
}

/// Kills the program and everything below it, also what has left its process group.
pub(super) fn end(process: &Process) {
    let root = process.pid().as_raw();
    // Seen before their parent is gone, since orphans can no longer be told to be its.
    let family = procs::below(root);
    process.signal_group(Signal::SIGKILL);
    procs::kill(&family);
    procs::kill_below(root, 0);
}

/// Returns a command that runs a program with these arguments, variables and folder.
///
/// # Errors
/// When there is no program, or the folder cannot be entered.
pub(super) fn command(argv: &[String], env: &[(String, String)], cwd: Option<&str>) -> io::Result<Command> {
    let (program, arguments) = argv.split_first().ok_or_else(|| io::Error::other("the command is empty"))?;
    let mut command = Command::new(program);
    command.args(arguments).envs(env.iter().map(|(name, value)| (name, value)));
    if let Some(cwd) = cwd {
        // A missing folder would look like a missing program later.
        fs::metadata(Path::new(cwd).join("."))
            .map_err(|err| io::Error::new(err.kind(), format!("cannot enter {cwd}: {err}")))?;
        command.current_dir(cwd);
    }
    Ok(command)
}

fn start(shared: &Arc<Shared>, exec: &Exec) -> io::Result<(Process, OwnedFd, [OwnedFd; 2])> {
    let (stdin, our_stdin) = pipe2(OFlag::O_CLOEXEC)?;
    let (our_stdout, stdout) = pipe2(OFlag::O_CLOEXEC)?;
    let (our_stderr, stderr) = pipe2(OFlag::O_CLOEXEC)?;
    for ours in [&our_stdin, &our_stdout, &our_stderr] {
        set_nonblocking(ours.as_fd())?;
    }
    let mut command = command(&exec.argv, &exec.env, exec.cwd.as_deref())?;
    command.stdin(Stdio::from(stdin)).stdout(Stdio::from(stdout)).stderr(Stdio::from(stderr));
    let process = shared.reaper.spawn(&mut command, &Vec::new(), false)?;
    Ok((process, our_stdin, [our_stdout, our_stderr]))
}
