//! A Python session: one interpreter that runs cells in process and keeps its state.
//!
//! The interpreter runs our driver and is told cells over a socket. Its standard output and error are one pipe that the guest
//! reads, so that what C code and child processes print is caught too, in order. At the end of a cell the driver flushes and
//! answers; what was written before that is in the pipe by then, and exactly that much is read. What a cell shows that is more
//! than text comes over the socket and has its place among what was printed in the same way.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    sync::Arc,
};

use nix::{errno::Errno, fcntl::OFlag, poll::PollFlags, sys::signal::Signal, unistd::pipe2};
use serde::{Deserialize, Serialize};

use super::{
    capture::Capture,
    clock::{Instant, after, now},
    post::{Mail, Mailbox},
    procs,
    quiet::quiet,
    reaper::Process,
    serve::Shared,
    sys,
    wait::{Read, read, set_nonblocking, wait},
};
use crate::wire::{Answer, Captured, CellEnd, ExitStatus, Interrupt, Ipython, IpythonAnswer, Op, Request};

/// One program: each file needs those before it.
const DRIVER: &str = concat!(
    include_str!("driver/channel.py"),
    include_str!("driver/show.py"),
    include_str!("driver/plain.py"),
    include_str!("driver/ipython.py"),
    include_str!("driver/serve.py"),
);

/// The driver's descriptor for its channel.
const CHANNEL_FD: i32 = 60;

/// Descriptors on their way to the interpreter are numbered from here.
const PASSED_FD: i32 = 100;

/// Bytes kept of the beginning and of the end of an output.
const HEAD_BYTES: usize = 64 * 1024;
const TAIL_BYTES: usize = 64 * 1024;

/// Bytes read before looking at what else there is.
const TURN_BYTES: usize = 1024 * 1024;

/// How long after an interrupt the interpreter is killed.
const KILL_MS: u64 = 2000;

/// An interpreter that takes longer to start is killed, for the next call to find a new one.
const START_MS: u64 = 60_000;

/// The longest message that the driver sends; a longer one is not from it.
const MESSAGE_BYTES: usize = 4 * 1024 * 1024 - 64 * 1024;

/// What the host takes of one cell beside text. A guest that sends more is taken for broken.
const MAX_PARTS: usize = 32;
const MAX_PARTS_BYTES: usize = 8 * 1024 * 1024;

/// The types of parts.
const MIMES: [&str; 5] = ["image/png", "image/jpeg", "image/svg+xml", "text/html", "text/markdown"];

/// The first byte of a message: a JSON object, or a part.
const JSON: u8 = 0;
const PART: u8 = 1;

/// Serves a session for as long as the guest lives.
pub(super) fn run(shared: Arc<Shared>, mailbox: Arc<Mailbox>) {
    let mut session =
        Session { shared, mailbox, interpreter: None, capture: Capture::new(HEAD_BYTES, TAIL_BYTES), call: None };
    loop {
        session.turn();
    }
}

struct Session {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    interpreter: Option<Interpreter>,
    capture: Capture,
    call: Option<Call>,
}

struct Call {
    id: u64,
    /// The cell, until the interpreter is ready for it.
    cell: Option<Ipython>,
    limit_ms: u64,
    until: Instant,
    stop: Option<Stop>,
    n_parts: usize,
    n_part_bytes: usize,
}

/// A cell being ended.
struct Stop {
    was_cancelled: bool,
    /// When an interrupt will have had its time.
    kill_at: Option<Instant>,
    by: Interrupt,
}

struct Interpreter {
    process: Process,
    output: Option<OwnedFd>,
    channel: Option<UnixStream>,
    received: Vec<u8>,
    /// What the driver has not taken yet.
    unsent: Vec<u8>,
    is_ready: bool,
    started: Instant,
}

#[derive(Serialize)]
struct Cell<'a> {
    id: u64,
    code: &'a str,
    color: bool,
}

/// Says that a part has come.
#[derive(Serialize)]
struct Taken {
    taken: bool,
}

/// What the driver says.
#[derive(Deserialize)]
#[serde(untagged)]
enum Message {
    Ready {
        #[serde(rename = "ready")]
        _flavour: String,
    },
    End {
        id: u64,
        end: String,
    },
    #[serde(skip)]
    Part {
        head: PartHead,
        data: Vec<u8>,
    },
}

#[derive(Deserialize)]
struct PartHead {
    /// The cell.
    id: u64,
    mime: String,
}

impl Message {
    /// Reads one; what is none comes from a cell that writes to the driver's socket, and is passed over.
    fn parse(body: &[u8]) -> Option<Self> {
        match body.split_first()? {
            (&JSON, json) => serde_json::from_slice(json).ok(),
            (&PART, rest) => {
                let (len, rest) = rest.split_first_chunk::<4>()?;
                let (head, data) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
                let head = serde_json::from_slice(head).ok()?;
                Some(Self::Part { head, data: data.to_vec() })
            }
            _ => None,
        }
    }
}

impl Interpreter {
    fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let python = shared.programs.python.as_ref().ok_or_else(|| io::Error::other("it has no python3"))?;
        let (channel, theirs) = UnixStream::pair()?;
        let (output, stdout) = pipe2(OFlag::O_CLOEXEC)?;
        set_nonblocking(output.as_fd())?;
        channel.set_nonblocking(true)?;
        let mut command = Command::new(&python.path);
        command.args(["-u", "-c", DRIVER]);
        quiet(&mut command);
        command.stdin(Stdio::null()).stderr(Stdio::from(stdout.try_clone()?)).stdout(Stdio::from(stdout));
        let passed = vec![(sys::duplicate_above(theirs.as_fd(), PASSED_FD)?, CHANNEL_FD)];
        let process = shared.reaper.spawn(&mut command, &passed, false)?;
        Ok(Self {
            process,
            output: Some(output),
            channel: Some(channel),
            received: Vec::new(),
            unsent: Vec::new(),
            is_ready: false,
            started: now(),
        })
    }

    /// Puts a message where [`flush`](Self::flush) takes it from.
    fn put(&mut self, message: &impl Serialize) -> io::Result<()> {
        let body = serde_json::to_vec(message)?;
        let len = u32::try_from(body.len()).map_err(io::Error::other)?;
        self.unsent.extend([&len.to_le_bytes()[..], &body].concat());
        Ok(())
    }

    /// Sends as much as the driver takes now. One that was stopped takes nothing more, and the cell's limit passes meanwhile.
    fn flush(&mut self) {
        let Some(channel) = self.channel.as_ref().filter(|_| !self.unsent.is_empty()) else { return };
        match nix::unistd::write(channel, &self.unsent) {
            Ok(n) => drop(self.unsent.drain(..n)),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            // A driver that is gone is told by its end, which comes at once.
            Err(_gone) => self.unsent.clear(),
        }
    }

    /// Returns its channel and what it is waited for.
    fn wanted(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let write = if self.unsent.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
        self.channel.as_ref().map(|channel| (channel.as_fd(), PollFlags::POLLIN | write))
    }

    /// Reads what the driver said.
    fn receive(&mut self) -> Vec<Message> {
        let mut buffer = vec![0; 64 * 1024];
        match self.channel.as_ref().map(|channel| read(channel, &mut buffer)) {
            Some(Read::Bytes(n)) => self.received.extend_from_slice(&buffer[..n]),
            Some(Read::Nothing) => {}
            // Its end tells the rest.
            Some(Read::Closed) | None => self.channel = None,
        }
        let mut messages = Vec::new();
        while let Some(header) = self.received.first_chunk::<4>() {
            let end = 4 + u32::from_le_bytes(*header) as usize;
            if end > MESSAGE_BYTES {
                self.channel = None;
                break;
            }
            let Some(body) = self.received.get(4..end) else { break };
            messages.extend(Message::parse(body));
            self.received.drain(..end);
        }
        if self.received.is_empty() {
            // An image's memory is not kept for the rest of the session.
            self.received = Vec::new();
        }
        messages
    }

    /// Reads what has been printed, `limit` bytes at most.
    fn drain(&mut self, limit: usize, capture: &mut Capture) {
        let mut buffer = vec![0; 64 * 1024];
        let mut left = limit;
        while let Some(output) = self.output.as_ref().filter(|_| left > 0) {
            let n_wanted = left.min(buffer.len());
            match read(output, &mut buffer[..n_wanted]) {
                Read::Bytes(n) => {
                    capture.push(&buffer[..n]);
                    left -= n;
                }
                Read::Nothing => return,
                Read::Closed => self.output = None,
            }
        }
    }

    /// Reads what has been printed up to now, however fast threads and children go on.
    fn drain_present(&mut self, capture: &mut Capture) {
        let n = self.output.as_ref().and_then(|output| sys::readable_bytes(output.as_fd()).ok()).unwrap_or(0);
        self.drain(n, capture);
    }

    /// Kills the interpreter and everything below it.
    fn kill(&self) {
        let pid = self.process.pid().as_raw();
        // First what is below it, which cannot be told to be so any more when it is gone. It is stopped meanwhile, or it could
        // start others as fast as they are found.
        self.process.signal_group(Signal::SIGSTOP);
        procs::kill_below(pid, 0);
        self.process.signal_group(Signal::SIGKILL);
        // What it started in between.
        procs::kill_below(pid, 0);
    }
}

impl Session {
    fn turn(&mut self) {
        let until = self.call.as_ref().and_then(|call| match &call.stop {
            Some(stop) => stop.kill_at,
            None => Some(call.until),
        });
        let interpreter = self.interpreter.as_ref();
        let [has_mail, has_output, has_message, has_ended] = wait(
            [
                Some((self.mailbox.as_fd(), PollFlags::POLLIN)),
                interpreter.and_then(|one| one.output.as_ref()).map(|fd| (fd.as_fd(), PollFlags::POLLIN)),
                interpreter.and_then(Interpreter::wanted),
                interpreter.map(|one| (one.process.ended(), PollFlags::POLLIN)),
            ],
            until,
        );
        if let Some(interpreter) = &mut self.interpreter {
            if has_output {
                interpreter.drain(TURN_BYTES, &mut self.capture);
            }
            if has_message {
                interpreter.flush();
                for message in interpreter.receive() {
                    self.on_message(message);
                }
            }
        }
        if has_ended {
            self.on_end();
        }
        if has_mail {
            for mail in self.mailbox.take() {
                match mail {
                    Mail::Request(Request { id, timeout_ms, op: Op::Ipython(cell) }) => {
                        self.on_call(id, timeout_ms, cell);
                    }
                    Mail::Request(Request { id, .. }) => self.shared.post.failed(id, "this is a Python session"),
                    Mail::Cancel(id) => self.on_cancel(id),
                    // Sent for no request of this kind.
                    Mail::Steer(_) => {}
                }
            }
        }
        self.on_time();
    }

    fn on_call(&mut self, id: u64, timeout_ms: u64, cell: Ipython) {
        if self.call.is_some() {
            return self.refuse(id, "Another call waits for this interpreter; one call at a time.");
        }
        if self.interpreter.is_none() {
            match Interpreter::start(&self.shared) {
                Ok(interpreter) => self.interpreter = Some(interpreter),
                Err(err) => return self.refuse(id, format!("The sandbox cannot run Python: {err}.")),
            }
        }
        let until = after(now(), timeout_ms);
        let cell = Some(cell);
        self.call = Some(Call { id, cell, limit_ms: timeout_ms, until, stop: None, n_parts: 0, n_part_bytes: 0 });
        self.send_cell();
    }

    /// Sends the cell that waits, if the interpreter is ready for it.
    fn send_cell(&mut self) {
        let (Some(call), Some(interpreter)) = (&mut self.call, &mut self.interpreter) else { return };
        if interpreter.is_ready
            && let Some(Ipython { code, color, .. }) = call.cell.take()
        {
            let id = call.id;
            match interpreter.put(&Cell { id, code: &code, color }) {
                Ok(()) => interpreter.flush(),
                Err(err) => {
                    self.call = None;
                    self.refuse(id, format!("The cell cannot be sent: {err}."));
                }
            }
        }
    }

    fn on_message(&mut self, message: Message) {
        let Some(interpreter) = &mut self.interpreter else { return };
        match message {
            Message::Ready { .. } => {
                interpreter.is_ready = true;
                self.send_cell();
            }
            Message::End { id, end } if self.call.as_ref().is_some_and(|call| call.id == id) => {
                interpreter.drain_present(&mut self.capture);
                self.cell_ended(if end == "ok" { CellEnd::Ok } else { CellEnd::Raised }, None);
            }
            Message::Part { head, data } => {
                interpreter.drain_present(&mut self.capture);
                // The cell waits for this, so that nothing that it prints later is among what was just read.
                if interpreter.put(&Taken { taken: true }).is_ok() {
                    interpreter.flush();
                }
                self.on_part(&head, &data);
            }
            Message::End { .. } => {}
        }
    }

    /// Hands on what a cell has shown, as much as the host takes.
    fn on_part(&mut self, PartHead { id, mime }: &PartHead, data: &[u8]) {
        let is_known = MIMES.contains(&mime.as_str());
        let Some(call) = self.call.as_mut().filter(|call| is_known && call.id == *id) else { return };
        call.n_parts += 1;
        call.n_part_bytes += data.len();
        if call.n_parts <= MAX_PARTS && call.n_part_bytes <= MAX_PARTS_BYTES {
            return self.shared.post.shown(*id, self.capture.total(), mime, data);
        }
        // Later ones that would still fit are left out as well, so that what is there is the beginning.
        call.n_part_bytes = call.n_part_bytes.max(MAX_PARTS_BYTES + 1);
        let line = format!("[{mime}, {} bytes: the cell has shown too much before]\n", data.len());
        self.capture.push(line.as_bytes());
    }

    fn on_end(&mut self) {
        let Some(mut interpreter) = self.interpreter.take() else { return };
        let Some(status) = interpreter.process.status() else {
            self.interpreter = Some(interpreter);
            return;
        };
        interpreter.drain_present(&mut self.capture);
        let reason = match status {
            ExitStatus::Code(code) => format!("The interpreter ended with exit code {code}."),
            ExitStatus::Signal(signal) => format!("The interpreter was killed by signal {signal}."),
        };
        if self.call.is_some() {
            self.cell_ended(CellEnd::Died, Some(reason));
        } else {
            self.capture.push(format!("[{reason} This is a new one; variables and imports are gone.]\n").as_bytes());
        }
    }

    fn cell_ended(&mut self, end: CellEnd, restarted: Option<String>) {
        let Some(call) = self.call.take() else { return };
        let end = match call.stop {
            None => end,
            Some(Stop { was_cancelled: true, .. }) => CellEnd::Cancelled,
            Some(stop) => CellEnd::LimitPassed { limit_ms: call.limit_ms, by: stop.by },
        };
        let answer = IpythonAnswer { output: self.capture.take(), end, restarted };
        self.shared.post.done(call.id, Answer::Ipython(answer));
    }

    fn refuse(&self, id: u64, reason: impl Into<String>) {
        let answer =
            IpythonAnswer { output: Captured::default(), end: CellEnd::Refused(reason.into()), restarted: None };
        self.shared.post.done(id, Answer::Ipython(answer));
    }

    fn on_cancel(&mut self, id: u64) {
        if self.call.as_ref().is_some_and(|call| call.id == id && call.stop.is_none()) {
            self.stop(true);
        }
    }

    /// Begins to end the cell.
    fn stop(&mut self, was_cancelled: bool) {
        let (Some(call), Some(interpreter)) = (&mut self.call, &self.interpreter) else { return };
        if call.cell.is_some() {
            // It is still starting and has not seen the cell. It goes on, so that the next call finds it ready.
            if now() >= after(interpreter.started, START_MS) {
                interpreter.kill();
            }
            let id = call.id;
            self.call = None;
            return self.refuse(id, "The interpreter is still starting, and the cell was not run. Call again.");
        }
        interpreter.process.signal_group(Signal::SIGINT);
        // A stopped child would keep the signal for later.
        interpreter.process.signal_group(Signal::SIGCONT);
        call.stop = Some(Stop { was_cancelled, kill_at: Some(after(now(), KILL_MS)), by: Interrupt::Signal });
    }

    fn on_time(&mut self) {
        let Some(call) = &mut self.call else { return };
        let present = now();
        match &mut call.stop {
            None if present >= call.until => self.stop(false),
            Some(stop) if stop.kill_at.is_some_and(|kill_at| present >= kill_at) => {
                stop.by = Interrupt::Restart;
                stop.kill_at = None;
                if let Some(interpreter) = &self.interpreter {
                    interpreter.kill();
                }
            }
            _ => {}
        }
    }
}
