//! A bash session: a terminal, the shell in it, and the calls that come for it.
//!
//! One thread sleeps until the host, the terminal, the shell's marks or its end have something, or a limit passes.

use std::{io, os::fd::AsFd, path::PathBuf, sync::Arc};

use nix::poll::PollFlags;

use super::{
    capture::Capture,
    clock::{Instant, after, now},
    post::{Mail, Mailbox},
    pty::{END, Pty, TURN_BYTES},
    serve::Shared,
    shell::{Shell, Told},
    wait::{earlier, wait},
};
use crate::wire::{Answer, Bash, BashAnswer, BashEnd, ExitStatus, Interrupt, Op, Request};

/// Bytes kept of the beginning and of the end of an output.
const HEAD_BYTES: usize = 64 * 1024;
const TAIL_BYTES: usize = 64 * 1024;

/// After its limit a command is interrupted twice, then its processes are killed, in the end the shell, this far apart.
const STEP_MS: u64 = 500;

/// After so long without output a command is looked at: whether it waits for input. If it does not, again after twice as long.
const LOOK_MS: u64 = 2000;

/// How soon it is looked at when the shell can no longer tell its end.
const HURRY_MS: u64 = 50;

/// Serves a session for as long as the guest lives.
pub(super) fn run(shared: Arc<Shared>, mailbox: Arc<Mailbox>) {
    let mut session = Session {
        shared,
        mailbox,
        pty: None,
        shell: None,
        cwd: None,
        capture: Capture::new(HEAD_BYTES, TAIL_BYTES),
        last_output: now(),
        is_running: false,
        untold: None,
        why_killed: None,
        call: None,
        input: Vec::new(),
    };
    loop {
        session.turn();
    }
}

struct Session {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    pty: Option<Pty>,
    shell: Option<Shell>,
    /// The shell's folder when it was last seen.
    cwd: Option<PathBuf>,
    capture: Capture,
    last_output: Instant,
    /// Whether the shell has a command.
    is_running: bool,
    /// How a command ended while no call waited for it.
    untold: Option<Ended>,
    /// Why we have killed the shell, where that was not for a limit.
    why_killed: Option<&'static str>,
    /// The call that waits.
    call: Option<Call>,
    /// What is typed and not yet taken.
    input: Vec<u8>,
}

/// How a command ended by itself, and why the shell is gone if it is.
struct Ended {
    status: i32,
    restarted: Option<String>,
}

struct Call {
    id: u64,
    limit_ms: u64,
    until: Instant,
    silence_ms: u64,
    begun: Instant,
    /// When the command is looked at.
    look: Instant,
    stop: Option<Stop>,
}

/// A command being ended.
struct Stop {
    was_cancelled: bool,
    n_steps: u32,
    next: Instant,
    by: Interrupt,
    wanted_input: bool,
}

impl Stop {
    fn new(was_cancelled: bool, wanted_input: bool) -> Self {
        Self { was_cancelled, n_steps: 0, next: now(), by: Interrupt::Signal, wanted_input }
    }
}

fn keep(capture: &mut Capture, bytes: &[u8]) {
    capture.push(bytes);
}

impl Session {
    /// Waits for something and deals with it.
    fn turn(&mut self) {
        let until = self.next_time();
        let read = |ready: bool| if ready { PollFlags::POLLIN } else { PollFlags::empty() };
        let terminal = if self.input.is_empty() { read(true) } else { PollFlags::POLLIN | PollFlags::POLLOUT };
        let shell = self.shell.as_ref();
        let [has_mail, has_terminal, has_mark, has_ended] = wait(
            [
                Some((self.mailbox.as_fd(), read(true))),
                self.pty.as_ref().map(|pty| (pty.as_fd(), terminal)),
                shell.and_then(Shell::marks).map(|marks| (marks, read(true))),
                shell.map(|shell| (shell.ended(), read(true))),
            ],
            until,
        );
        if has_terminal {
            self.on_terminal();
        }
        if has_mark {
            self.on_mark();
        }
        if has_ended {
            self.on_shell_end();
        }
        if has_mail {
            for mail in self.mailbox.take() {
                match mail {
                    Mail::Request(Request { id, timeout_ms, op: Op::Bash(bash) }) => {
                        self.on_call(id, timeout_ms, &bash);
                    }
                    Mail::Request(Request { id, .. }) => self.shared.post.failed(id, "this is a bash session"),
                    Mail::Cancel(id) => self.on_cancel(id),
                    // Sent for no request of this kind.
                    Mail::Steer(_) => {}
                }
            }
        }
        self.on_time();
    }

    fn next_time(&self) -> Option<Instant> {
        let call = self.call.as_ref()?;
        match &call.stop {
            Some(stop) => Some(stop.next),
            None => earlier(Some(call.until.min(call.look)), self.silent_at(call)),
        }
    }

    /// Returns when a call will have waited long enough for output.
    fn silent_at(&self, call: &Call) -> Option<Instant> {
        (call.silence_ms > 0).then(|| after(call.begun.max(self.last_output), call.silence_ms))
    }

    fn on_terminal(&mut self) {
        let Some(pty) = &self.pty else { return };
        if pty.drain(TURN_BYTES, |bytes| keep(&mut self.capture, bytes)) {
            self.last_output = now();
        }
        if !self.input.is_empty() {
            let n = pty.type_in(&self.input);
            self.input.drain(..n);
        }
    }

    fn on_mark(&mut self) {
        let (Some(shell), Some(pty)) = (&mut self.shell, &self.pty) else { return };
        match shell.take_told() {
            Some(Told::Ended(status)) => {
                // What works in the background is deaf to an interrupt. A few such processes are left to live, a crowd is not.
                if let Some(stop) = self.call.as_mut().and_then(|call| call.stop.as_mut())
                    && self.shared.terms.limits.is_crowd(shell.count_command())
                {
                    stop.by = Interrupt::Kill;
                    shell.kill_command();
                }
                pty.fence(|bytes| keep(&mut self.capture, bytes));
                self.cwd = shell.cwd().or(self.cwd.take());
                self.command_ended(Ended { status, restarted: None });
            }
            Some(Told::Broken) => {
                self.give_up("A command has replaced a builtin that the shell needs, so it was ended.");
            }
            None if shell.marks().is_none() => {
                let soon = after(now(), HURRY_MS);
                self.call.iter_mut().for_each(|call| call.look = soon);
            }
            None => {}
        }
    }

    /// Kills a shell that cannot go on.
    fn give_up(&mut self, why: &'static str) {
        let Some(shell) = &self.shell else { return };
        self.cwd = shell.cwd().or(self.cwd.take());
        self.why_killed = Some(why);
        shell.kill();
    }

    fn on_shell_end(&mut self) {
        let Some((shell, status)) = self.shell.as_ref().and_then(|shell| Some((shell, shell.status()?))) else {
            return;
        };
        let by_failure = if shell.ends_by_failure() { " while `set -e` was on" } else { "" };
        let reason = match (self.why_killed.take(), status) {
            (Some(why), _) => why.to_owned(),
            (None, ExitStatus::Code(code @ 1..)) => format!("The shell ended with exit code {code}{by_failure}."),
            (None, ExitStatus::Code(code)) => format!("The shell ended with exit code {code}."),
            (None, ExitStatus::Signal(signal)) => format!("The shell was killed by signal {signal}."),
        };
        if let Some(pty) = &self.pty {
            pty.fence(|bytes| keep(&mut self.capture, bytes));
        }
        self.shell = None;
        // Where the next one will be.
        if !self.cwd.as_ref().is_some_and(|cwd| cwd.is_dir()) {
            self.cwd = std::env::current_dir().ok();
        }
        self.command_ended(Ended { status: status.code(), restarted: Some(reason) });
    }

    fn command_ended(&mut self, ended: Ended) {
        let was_running = std::mem::take(&mut self.is_running);
        self.input.clear();
        match self.call.take() {
            Some(call) => {
                let end = match &call.stop {
                    None => BashEnd::Exited(ended.status),
                    Some(Stop { was_cancelled: true, .. }) => BashEnd::Cancelled,
                    Some(Stop { by, wanted_input, .. }) => {
                        BashEnd::LimitPassed { limit_ms: call.limit_ms, by: *by, wanted_input: *wanted_input }
                    }
                };
                self.answer(call.id, end, ended.restarted);
            }
            None if was_running || ended.restarted.is_some() => self.untold = Some(ended),
            None => {}
        }
    }

    fn answer(&mut self, id: u64, end: BashEnd, restarted: Option<String>) {
        let output = self.capture.take();
        let (mut background, mut output_elsewhere) = (Vec::new(), None);
        if let (Some(shell), Some(pty)) = (&mut self.shell, &self.pty) {
            if let BashEnd::Running { .. } = &end {
                self.cwd = shell.cwd().or(self.cwd.take());
            } else {
                background = shell.left();
                output_elsewhere = if output.total == 0 { shell.output_elsewhere(pty) } else { None };
            }
        }
        let cwd = self.cwd.as_ref().map(|cwd| cwd.to_string_lossy().into_owned());
        let answer = BashAnswer { output, end, restarted, cwd, background, output_elsewhere };
        self.shared.post.done(id, Answer::Bash(answer));
    }

    fn refuse(&self, id: u64, reason: impl Into<String>) {
        let answer = BashAnswer {
            output: crate::wire::Captured::default(),
            end: BashEnd::Refused(reason.into()),
            restarted: None,
            cwd: None,
            background: Vec::new(),
            output_elsewhere: None,
        };
        self.shared.post.done(id, Answer::Bash(answer));
    }

    fn on_call(&mut self, id: u64, timeout_ms: u64, bash: &Bash) {
        if self.call.is_some() {
            return self.refuse(id, "Another call waits for this shell; one call at a time.");
        }
        if bash.command.contains('\0') {
            return self.refuse(id, "The command contains a NUL character, which bash cannot take.");
        }
        let begun = now();
        let call = Call {
            id,
            limit_ms: timeout_ms,
            until: after(begun, timeout_ms),
            silence_ms: bash.silence_ms,
            begun,
            look: after(begun, LOOK_MS),
            stop: None,
        };
        if bash.is_input { self.on_input(call, &bash.command) } else { self.on_command(call, &bash.command) }
    }

    fn on_input(&mut self, call: Call, text: &str) {
        if let Some(ended) = self.untold.take() {
            // It ended before it could be typed into; its end is the answer.
            return self.answer(call.id, BashEnd::Exited(ended.status), ended.restarted);
        }
        if !self.is_running {
            return self.refuse(
                call.id,
                "No command is running, so there is nothing to send input to. Call without is_input.",
            );
        }
        match text {
            "" => {}
            "C-c" => {
                self.input.push(3);
                if let (Some(shell), Some(pty)) = (&self.shell, &self.pty) {
                    shell.expect_interrupt();
                    self.input.extend(shell.is_reading(pty).then_some(END));
                }
            }
            "C-z" => {
                return self.refuse(
                    call.id,
                    "C-z is not supported: this shell has no job control, so the command could not be resumed. Use C-c to \
                     interrupt it.",
                );
            }
            key if control_key(key).is_some() => self.input.extend(control_key(key)),
            line => {
                self.input.extend_from_slice(line.as_bytes());
                self.input.push(b'\n');
            }
        }
        self.call = Some(call);
    }

    fn on_command(&mut self, call: Call, command: &str) {
        if self.is_running {
            return self.refuse(
                call.id,
                "A command is still running in this shell. Call with is_input true: an empty command to wait for it, a text \
                 to type in, C-c to interrupt it.",
            );
        }
        let earlier = self.untold.take();
        if let Some(ended) = &earlier {
            let note = format!("[The earlier command completed with exit code {}.]\n", ended.status);
            self.capture.push(note.as_bytes());
        }
        // In a sandbox that is full the shell could start nothing, and so could not even be told to end what fills it.
        if self.shared.room.is_full()
            && let Some(n_killed) = self.shell.as_ref().map(Shell::kill_left).filter(|n_killed| *n_killed > 0)
        {
            let note = format!(
                "[The sandbox was full: {n_killed} processes that earlier commands had left running were killed.]\n"
            );
            self.capture.push(note.as_bytes());
        }
        match self.begin(command, call.until) {
            Ok(()) => {
                self.is_running = true;
                self.call = Some(call);
                if let Some(reason) = earlier.and_then(|ended| ended.restarted) {
                    self.capture.push(format!("[{reason} This is a new shell.]\n").as_bytes());
                }
            }
            Err(err) => self.refuse(call.id, format!("The sandbox cannot run bash: {err}.")),
        }
    }

    fn begin(&mut self, command: &str, until: Instant) -> io::Result<()> {
        if self.pty.is_none() {
            self.pty = Some(Pty::open()?);
        }
        let Some(pty) = &self.pty else { return Ok(()) };
        if self.shell.is_none() {
            pty.reset();
            match Shell::start(&self.shared, pty, self.cwd.as_deref(), until) {
                Ok(shell) => self.shell = Some(shell),
                Err(err) => {
                    // Whatever was wrong may be the terminal's fault; the next call has a new one.
                    self.pty = None;
                    return Err(err);
                }
            }
        }
        pty.forget_input();
        self.shell.as_mut().map_or(Ok(()), |shell| shell.begin(command))
    }

    fn on_cancel(&mut self, id: u64) {
        if let Some(call) = self.call.as_mut().filter(|call| call.id == id && call.stop.is_none()) {
            call.stop = Some(Stop::new(true, false));
        }
    }

    fn on_time(&mut self) {
        let Some(call) = &self.call else { return };
        let present = now();
        if call.stop.is_none() {
            if present >= call.until {
                let stop = Stop::new(false, self.wants_input());
                self.cwd = self.shell.as_ref().and_then(Shell::cwd).or(self.cwd.take());
                self.call = self.call.take().map(|call| Call { stop: Some(stop), ..call });
            } else if self.silent_at(call).is_some_and(|silent_at| present >= silent_at) {
                let wants_input = self.wants_input();
                return self.leave_running(present, wants_input);
            } else if present >= call.look {
                return self.look(present);
            }
        }
        if let (Some(stop), Some(shell), Some(pty)) =
            (self.call.as_mut().and_then(|call| call.stop.as_mut()), &self.shell, &self.pty)
            && present >= stop.next
        {
            match stop.n_steps {
                0 | 1 => shell.interrupt(pty),
                2 => {
                    stop.by = Interrupt::Kill;
                    shell.kill_command();
                    shell.interrupt(pty);
                }
                _ => {
                    stop.by = Interrupt::Restart;
                    shell.kill();
                }
            }
            stop.n_steps += 1;
            stop.next = after(present, STEP_MS);
        }
    }
    fn wants_input(&self) -> bool {
        self.shell.as_ref().zip(self.pty.as_ref()).is_some_and(|(shell, pty)| shell.wants_input(pty))
    }

    /// Looks at a command that has been silent.
    fn look(&mut self, present: Instant) {
        if self.shell.as_ref().is_some_and(Shell::is_lost) {
            self.give_up("A command has taken away what the shell needs to go on, so it was ended.");
        }
        let silent_since = self.call.as_ref().map_or(present, |call| call.begun.max(self.last_output));
        let enough = after(silent_since, LOOK_MS);
        if present >= enough && self.wants_input() {
            return self.leave_running(present, true);
        }
        let next = if present < enough { enough } else { present + (present - silent_since) };
        self.call.iter_mut().for_each(|call| call.look = next);
    }

    /// Answers that the command is still running.
    fn leave_running(&mut self, present: Instant, wants_input: bool) {
        let Some(call) = self.call.take() else { return };
        let silent = present.saturating_duration_since(call.begun.max(self.last_output));
        let silent_ms = u64::try_from(silent.as_millis()).unwrap_or(u64::MAX);
        self.answer(call.id, BashEnd::Running { silent_ms, wants_input }, None);
    }
}

/// Returns what a terminal gets for a key with control: `C-d`, or `C-\\`.
fn control_key(name: &str) -> Option<u8> {
    match name.strip_prefix("C-")?.as_bytes() {
        [key @ (b'a'..=b'z' | b'A'..=b'Z' | b'\\')] => Some(key & 0x1f),
        _ => None,
    }
}
