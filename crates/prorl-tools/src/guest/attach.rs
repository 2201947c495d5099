//! A program whose streams are attached: through pipes, or in a terminal that it controls.
//!
//! Nothing is kept of what goes through but a window of input. Output is read from the program only as far as the host has
//! given credit for, so that a host that does not read holds up the program as a full pipe would, and nobody else.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::Stdio,
    sync::Arc,
};

use nix::{
    fcntl::OFlag,
    poll::PollFlags,
    sys::signal::{Signal, kill},
    unistd::{Pid, pipe2, tcgetpgrp},
};

use super::{
    clock::{after, now},
    exec::{command, end},
    feed::{self, Feed},
    post::{Mail, Mailbox, Post},
    pty,
    reaper::Process,
    serve::Shared,
    sys,
    wait::{Read, earlier, read, set_nonblocking, wait},
};
use crate::wire::{Answer, Attach, AttachAnswer, GuestFrame, Request, Steer, Stream, WindowSize};

/// Bytes of one frame of output.
const PIECE_BYTES: usize = 64 * 1024;

/// At least what a terminal's queues can hold of what was written before the program ended.
const QUEUE_BYTES: usize = 64 * 1024;

/// Serves one program from its start to its end.
pub(super) fn run(shared: &Arc<Shared>, mailbox: &Mailbox, id: u64, timeout_ms: u64, spec: &Attach) {
    let begun = now();
    let mut attached = match Attached::start(shared, spec) {
        Ok(attached) => attached,
        Err(err) => {
            let program = spec.argv.first().map_or("nothing", String::as_str);
            return shared.post.failed(id, format!("cannot run {program}: {err}"));
        }
    };
    let post = &shared.post;
    post.send(&GuestFrame::Credit { id, bytes: feed::WINDOW_BYTES });
    let mut until = Some(after(begun, timeout_ms));
    let mut timed_out = false;
    let mut ended = None;
    let mut buffer = vec![0; PIECE_BYTES];
    let status = loop {
        let [has_mail, may_write, has_out, has_err, has_ended] = wait(
            [
                Some((mailbox.as_fd(), PollFlags::POLLIN)),
                attached.feed.wanted(),
                attached.taps[0].wanted(),
                attached.taps[1].wanted(),
                ended.is_none().then(|| (attached.process.ended(), PollFlags::POLLIN)),
            ],
            earlier(until, attached.feed.due()),
        );
        let mut is_cancelled = false;
        if has_mail {
            for mail in mailbox.take() {
                match mail {
                    Mail::Steer(steer) => attached.steer(steer),
                    Mail::Cancel(_) => is_cancelled = true,
                    Mail::Request(Request { id, .. }) => post.failed(id, "this thread has another request"),
                }
            }
        }
        if is_cancelled {
            // Nobody reads any more, so nothing may wait for that.
            attached.taps.iter_mut().for_each(|tap| tap.from = None);
        }
        let passed = until.is_some_and(|until| until <= now());
        if (is_cancelled || passed) && ended.is_none() {
            timed_out |= passed;
            until = None;
            end(&attached.process);
        }
        if may_write {
            attached.feed.pump(post, id);
        }
        attached.feed.type_end();
        for (tap, has_output) in attached.taps.iter_mut().zip([has_out, has_err]) {
            if has_output {
                tap.pump(post, id, &mut buffer);
            }
        }
        if has_ended && ended.is_none() {
            ended = attached.process.status();
            if ended.is_some() {
                until = None;
                attached.has_ended();
            }
        }
        if let Some(status) = ended {
            attached.taps.iter_mut().for_each(|tap| tap.finish(post, id, &mut buffer));
            if attached.taps.iter().all(|tap| tap.from.is_none()) {
                break status;
            }
        }
    };
    post.done(id, Answer::Attach(AttachAnswer { status, timed_out }));
}

/// One of the program's outputs.
struct Tap {
    stream: Stream,
    from: Option<OwnedFd>,
    /// Bytes that the host still takes.
    credit: u64,
    /// Bytes that may still come.
    left: usize,
}

impl Tap {
    fn new(stream: Stream, from: Option<OwnedFd>, credit: u64) -> Self {
        Self { stream, from, credit, left: usize::MAX }
    }

    /// Returns what to wait for, if the host takes anything.
    fn wanted(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        self.from.as_ref().filter(|_| self.credit > 0).map(|from| (from.as_fd(), PollFlags::POLLIN))
    }

    /// Sends on one piece. Tells whether there was one.
    fn pump(&mut self, post: &Post, id: u64, buffer: &mut [u8]) -> bool {
        let Some(from) = &self.from else { return false };
        let most = buffer.len().min(self.left).min(usize::try_from(self.credit).unwrap_or(usize::MAX));
        match read(from, &mut buffer[..most]) {
            Read::Bytes(n) => {
                post.output(id, self.stream, &buffer[..n]);
                self.credit -= n as u64;
                self.left -= n;
                true
            }
            Read::Nothing => false,
            Read::Closed => {
                self.close(post, id);
                false
            }
        }
    }

    /// Sends on what the program has left behind, as far as the host takes it.
    fn finish(&mut self, post: &Post, id: u64, buffer: &mut [u8]) {
        while self.from.is_some() && self.credit > 0 {
            // Before a read finds nothing, the kernel has brought in everything that was written to a terminal.
            if self.left == 0 || !self.pump(post, id, buffer) {
                self.close(post, id);
            }
        }
    }

    fn close(&mut self, post: &Post, id: u64) {
        if self.from.take().is_some() {
            post.send(&GuestFrame::Closed { id, stream: self.stream });
        }
    }
}

/// The terminal of a program.
struct Terminal {
    master: OwnedFd,
    /// Held while the program runs, so that it may close the terminal and open it again.
    slave: Option<OwnedFd>,
}

struct Attached {
    process: Process,
    terminal: Option<Terminal>,
    feed: Feed,
    taps: [Tap; 2],
}

impl Attached {
    fn start(shared: &Arc<Shared>, spec: &Attach) -> io::Result<Self> {
        let mut command = command(&spec.argv, &spec.env, spec.cwd.as_deref())?;
        let tap = |stream, from| Tap::new(stream, from, spec.window);
        if let Some(size) = spec.terminal {
            let (master, slave) = pty::open_plain(size)?;
            command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave.try_clone()?);
            let feed = Feed::terminal(master.try_clone()?, slave.try_clone()?);
            let taps = [tap(Stream::Stdout, Some(master.try_clone()?)), tap(Stream::Stderr, None)];
            let process = shared.reaper.spawn(&mut command, &Vec::new(), true)?;
            return Ok(Self { process, terminal: Some(Terminal { master, slave: Some(slave) }), feed, taps });
        }
        let (stdin, our_stdin) = pipe2(OFlag::O_CLOEXEC)?;
        let (our_stdout, stdout) = pipe2(OFlag::O_CLOEXEC)?;
        let (our_stderr, stderr) = pipe2(OFlag::O_CLOEXEC)?;
        for ours in [&our_stdin, &our_stdout, &our_stderr] {
            set_nonblocking(ours.as_fd())?;
        }
        command.stdin(Stdio::from(stdin)).stdout(Stdio::from(stdout)).stderr(Stdio::from(stderr));
        let process = shared.reaper.spawn(&mut command, &Vec::new(), false)?;
        let taps = [tap(Stream::Stdout, Some(our_stdout)), tap(Stream::Stderr, Some(our_stderr))];
        Ok(Self { process, terminal: None, feed: Feed::pipe(our_stdin), taps })
    }

    fn steer(&mut self, steer: Steer) {
        match steer {
            Steer::Input(bytes) => self.feed.push(&bytes.0),
            Steer::Close(Stream::Stdin) => self.feed.end(),
            Steer::Close(stream) => self.hang_up(stream),
            Steer::Credit { stream, bytes } => {
                for tap in self.taps.iter_mut().filter(|tap| tap.stream == stream) {
                    tap.credit = tap.credit.saturating_add(bytes);
                }
            }
            Steer::Resize(WindowSize { rows, columns }) => {
                if let Some(terminal) = &self.terminal {
                    // It fails only for what is no terminal.
                    let _set = sys::set_window(terminal.master.as_fd(), rows, columns);
                }
            }
            Steer::Signal(number) => {
                // One that has no name is none that a program waits for.
                if let Ok(signal) = Signal::try_from(number) {
                    self.signal(signal);
                }
            }
        }
    }

    /// Closes an output that nobody reads. With all of its ends a terminal is hung up.
    fn hang_up(&mut self, stream: Stream) {
        for tap in self.taps.iter_mut().filter(|tap| tap.stream == stream) {
            tap.from = None;
        }
        if stream == Stream::Stdout && self.terminal.take().is_some() {
            self.feed = Feed::default();
        }
    }

    fn signal(&self, signal: Signal) {
        let foreground = self.terminal.as_ref().and_then(|terminal| tcgetpgrp(&terminal.master).ok());
        match foreground.filter(|group| group.as_raw() > 1 && *group != self.process.pid()) {
            // A group that has just emptied is what was wanted.
            Some(group) => drop(kill(Pid::from_raw(-group.as_raw()), signal)),
            None => self.process.signal_group(signal),
        }
    }

    /// Bounds what may still come, now that the program has ended: a child in the background may write for ever.
    fn has_ended(&mut self) {
        self.feed = Feed::default();
        for tap in &mut self.taps {
            let in_pipe = |from: &OwnedFd| sys::readable_bytes(from.as_fd()).unwrap_or(0);
            tap.left = match &self.terminal {
                Some(_) => QUEUE_BYTES,
                None => tap.from.as_ref().map_or(0, in_pipe),
            };
        }
        if let Some(terminal) = &mut self.terminal {
            terminal.slave = None;
        }
    }
}
