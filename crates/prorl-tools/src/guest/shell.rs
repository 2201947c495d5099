//! One bash, and how commands get in and their ends come out.
//!
//! What it reads, and what it answers, is in [`script`]. The kernel adds the writer's process id to what comes through the marks'
//! socket, so that a mark counts only from the shell itself. The programs that a command starts do not even have the socket.
//!
//! The shell is interactive (`-i`) and reads a script, which together mean: no prompts and no line editor, messages without
//! line numbers, aliases, and an unset variable under `set -u` does not end it. Job control, history and `!` are turned off.
//!
//! An interrupt must end the whole command and not only what runs at the moment. A trap has each command that comes return, until
//! the script's own level is reached. When a limit has passed the shell gets a signal of our own besides (`RTMAX`), which does the
//! same. A `read` of the shell's own goes on after a trap; so it is given an end of its input.

use std::{
    cell::Cell,
    ffi::OsString,
    fs::File,
    io::{self, IoSliceMut, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use nix::{
    cmsg_space,
    fcntl::{FcntlArg, OFlag, fcntl, open, openat, readlinkat},
    poll::PollFlags,
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{Signal, kill},
        socket::{
            AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixCredentials, recvmsg, setsockopt,
            socketpair, sockopt,
        },
        stat::{Mode, fchmod, fstat},
    },
    unistd::{Pid, pipe2},
};

use super::{
    clock::{Instant, after, now},
    left::Left,
    procs,
    pty::{self, Pty, TURN_BYTES},
    quiet::quiet,
    reaper::Process,
    script::{self, Message, State},
    serve::Shared,
    sys,
    wait::wait,
};
use crate::wire::{Background, ExitStatus};

/// Descriptors on their way to the shell are numbered from here, above the numbers that they get there.
const PASSED_FD: RawFd = 100;

/// Messages looked at before looking at what else there is. A command can get at the marks' socket (and no further) and fill it
/// without end.
const TURN_MESSAGES: usize = 64;

/// How long the shell's outputs may still be where its mark went.
const MARKING_MS: u64 = 20;

/// Bytes kept of what the shell says of its traps.
const SAID_BYTES: usize = 64 * 1024;

/// The text of a command that is longer is not kept until the next.
const KEPT_BYTES: u64 = 64 * 1024;

/// What the shell tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// The command has ended with this exit code.
    Ended(i32),
    /// It can write no marks any more.
    Broken,
}

/// A running bash.
#[derive(Debug)]
pub(super) struct Shell {
    process: Process,
    /// Its folder in `/proc`.
    own: Option<OwnedFd>,
    left: Left,
    script: File,
    text: File,
    text_bytes: u64,
    marks: OwnedFd,
    marks_closed: bool,
    /// What the shell's end of the marks' socket is called.
    marks_link: OsString,
    word: String,
    last: State,
    /// What came from the shell and was no mark, since the command began.
    said: Vec<u8>,
    /// Whether a command may have set traps.
    has_traps: bool,
    /// Whether a command may have sent the shell's output elsewhere.
    has_exec: bool,
    /// When the command began, in clock ticks since the machine started.
    command_started: u64,
    /// Whether it was interrupted since.
    was_interrupted: Cell<bool>,
}

impl Shell {
    /// Starts a bash in a terminal, in `cwd` or else the guest's own folder, and waits until it takes commands.
    ///
    /// # Errors
    /// When it cannot be started or does not come up until `until`.
    pub(super) fn start(shared: &Arc<Shared>, pty: &Pty, cwd: Option<&Path>, until: Instant) -> io::Result<Self> {
        let bash = shared.programs.bash.as_deref().ok_or_else(|| io::Error::other("it has no bash"))?;
        let (script_out, script) = pipe2(OFlag::O_CLOEXEC)?;
        let (marks, marks_out) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        )?;
        setsockopt(&marks, sockopt::PassCred, &true)?;
        // The shell's end waits when the socket is full; the flag is each end's own.
        let flags = OFlag::from_bits_retain(fcntl(&marks_out, FcntlArg::F_GETFL)?);
        fcntl(&marks_out, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
        let text = text_file(shared.terms.scratch.as_ref())?;
        let text_out = read_only(&text)?;
        let tail = text_file(shared.terms.scratch.as_ref())?;
        nix::unistd::write(&tail, script::MARK.as_bytes())?;
        let marks_link = OsString::from(format!("socket:[{}]", fstat(&marks_out)?.st_ino));
        let passed = [script_out, marks_out, text_out, read_only(&tail)?]
            .into_iter()
            .zip(script::GIVEN)
            .map(|(fd, number)| Ok((sys::duplicate_above(fd.as_fd(), PASSED_FD)?, number)))
            .collect::<io::Result<Vec<_>>>()?;

        let mut command = Command::new(bash);
        command.args(["--noprofile", "--norc", "-i", "+m"]).arg(format!("/proc/self/fd/{}", script::GIVEN[0]));
        quiet(&mut command);
        // Otherwise it would load the user's history.
        command.env("HISTFILE", "");
        command.stdin(Stdio::from(pty.slave()?)).stdout(Stdio::from(pty.slave()?)).stderr(Stdio::from(pty.slave()?));
        if let Some(folder) = cwd.filter(|folder| folder.is_dir()) {
            command.current_dir(folder);
        }
        let process = shared.reaper.spawn(&mut command, &passed, true)?;
        let own =
            open(format!("/proc/{}", process.pid()).as_str(), OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).ok();
        let mut shell = Self {
            left: Left::of(process.pid().as_raw()),
            process,
            own,
            script: File::from(script),
            text: File::from(text),
            text_bytes: 0,
            marks,
            marks_closed: false,
            marks_link,
            word: String::new(),
            last: State::default(),
            said: Vec::new(),
            has_traps: false,
            has_exec: false,
            command_started: 0,
            was_interrupted: Cell::new(false),
        };
        shell.command_started = procs::started(shell.process.pid()).unwrap_or(0);
        shell.feed(&script::set_up())?;
        shell.come_up(pty, until)?;
        // Nobody opens it any more by way of the shell's descriptors.
        fchmod(&shell.script, Mode::empty())?;
        Ok(shell)
    }

    /// Waits for the first mark. What bash says on the way, about a terminal that it does not like, is nobody's output.
    fn come_up(&mut self, pty: &Pty, until: Instant) -> io::Result<()> {
        loop {
            if self.take_told().is_some() {
                pty.fence(|_| ());
                return Ok(());
            }
            if let Some(status) = self.process.status() {
                return Err(io::Error::other(format!("bash ended with code {} as it started", status.code())));
            }
            if now() >= until {
                self.kill();
                return Err(io::Error::other("bash did not come up within the limit of the call"));
            }
            pty.drain(TURN_BYTES, |_| ());
            wait(
                [
                    self.marks().map(|marks| (marks, PollFlags::POLLIN)),
                    Some((self.process.ended(), PollFlags::POLLIN)),
                    Some((pty.as_fd(), PollFlags::POLLIN)),
                ],
                Some(until),
            );
        }
    }

    /// Begins a command.
    ///
    /// # Errors
    /// When the shell is gone.
    pub(super) fn begin(&mut self, command: &str) -> io::Result<()> {
        // What it has said after the mark is complete, or comes with the next one.
        while self.receive().is_some() {}
        self.take_traps();
        self.has_traps |= ["trap", "source", ". "].iter().any(|word| command.contains(word));
        self.has_exec |= command.contains("exec");
        let text = self.last.text(command, self.was_interrupted.take());
        self.text.write_all_at(text.as_bytes(), 0)?;
        let n_bytes = text.len() as u64;
        if n_bytes < std::mem::replace(&mut self.text_bytes, n_bytes) {
            self.text.set_len(n_bytes)?;
        }
        self.command_started = sys::boot_ticks();
        self.feed(&script::run())
    }

    /// Has the shell run a line and then write a mark.
    fn feed(&mut self, line: &str) -> io::Result<()> {
        self.word = sys::word();
        // Far less than a pipe holds, so it never waits.
        self.script.write_all([line, &script::mark(&self.word, self.has_traps)].concat().as_bytes())
    }

    fn take_traps(&mut self) {
        let traps = script::traps(&std::mem::take(&mut self.said));
        if !traps.is_empty() {
            self.has_traps = true;
            self.last.traps = traps;
        }
    }

    /// Returns what the shell tells of the command that was begun, once it does. Whatever else was sent is dropped.
    ///
    /// It looks at a bounded number of messages; there may be more, and then [`marks`](Self::marks) is still readable.
    pub(super) fn take_told(&mut self) -> Option<Told> {
        for _message in 0..TURN_MESSAGES {
            match self.receive()? {
                Message::Mark(status, flags) => {
                    // A mark counts once.
                    self.word.clear();
                    self.last = State { status, flags, traps: Vec::new() };
                    self.take_traps();
                    // It was read as a whole before it ran.
                    if self.text_bytes > KEPT_BYTES && self.text.set_len(0).is_ok() {
                        self.text_bytes = 0;
                    }
                    return Some(Told::Ended(status));
                }
                Message::Broken => return Some(Told::Broken),
                Message::Other => {}
            }
        }
        None
    }

    /// Receives a message, from whomever. Nothing if there is none now.
    fn receive(&mut self) -> Option<Message> {
        let mut buffer = [0; 4096];
        let mut iov = [IoSliceMut::new(&mut buffer)];
        let mut space = cmsg_space!(UnixCredentials);
        let received = loop {
            match recvmsg::<()>(self.marks.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::MSG_DONTWAIT) {
                Ok(received) => break received,
                Err(nix::errno::Errno::EINTR) => {}
                Err(_nothing) => return None,
            }
        };
        let n = received.bytes;
        let sender = received.cmsgs().ok().and_then(|mut messages| {
            messages.find_map(|message| match message {
                ControlMessageOwned::ScmCredentials(sender) => Some(sender.pid()),
                _ => None,
            })
        });
        // An empty message and an end look alike; only one of them goes on for ever.
        if n == 0 && sender.is_none_or(|pid| pid == 0) {
            self.marks_closed = true;
            return None;
        }
        if sender != Some(self.process.pid().as_raw()) {
            return Some(Message::Other);
        }
        let message = script::message(&buffer[..n], &self.word);
        if message == Message::Other && self.said.len() < SAID_BYTES {
            self.said.extend_from_slice(&buffer[..n]);
        }
        Some(message)
    }

    /// Returns a descriptor that is readable when there may be a mark; none once marks can no longer come.
    pub(super) fn marks(&self) -> Option<BorrowedFd<'_>> {
        (!self.marks_closed).then(|| self.marks.as_fd())
    }

    /// Returns a descriptor that is readable once the shell has ended.
    pub(super) fn ended(&self) -> BorrowedFd<'_> {
        self.process.ended()
    }

    /// Returns how the shell ended, once it has.
    pub(super) fn status(&self) -> Option<ExitStatus> {
        self.process.status()
    }

    /// Returns its folder.
    pub(super) fn cwd(&self) -> Option<PathBuf> {
        self.link("cwd").map(PathBuf::from)
    }

    /// Returns where its standard output or error goes, if that is not the terminal.
    ///
    /// Right after its mark they may still go to the socket for those. To wait for the end of that is not worth it unless a
    /// command has had the word by which they are sent elsewhere.
    pub(super) fn output_elsewhere(&self, pty: &Pty) -> Option<String> {
        if !self.has_exec {
            return None;
        }
        let until = after(now(), MARKING_MS);
        while self.link("fd/1").is_some_and(|target| target == self.marks_link) {
            if now() >= until {
                return None;
            }
            std::thread::yield_now();
        }
        ["fd/1", "fd/2"].into_iter().find_map(|output| {
            let target = self.link(output);
            let is_terminal =
                target.as_ref().is_some_and(|target| target == "/dev/tty" || Some(Path::new(target)) == pty.path());
            (!is_terminal)
                .then(|| target.map_or_else(|| "nowhere".to_owned(), |target| target.to_string_lossy().into_owned()))
        })
    }

    fn link(&self, name: &str) -> Option<OsString> {
        readlinkat(self.own.as_ref()?, name).ok()
    }

    /// Interrupts what is in the foreground, and the shell, whatever state the terminal is in.
    pub(super) fn interrupt(&self, pty: &Pty) {
        self.expect_interrupt();
        let is_reading = self.is_reading(pty);
        self.process.signal_abort();
        if let Some(group) = pty.foreground().filter(|group| *group != self.process.pid()) {
            let _sent = kill(Pid::from_raw(-group.as_raw()), Signal::SIGINT);
            let _sent = kill(Pid::from_raw(-group.as_raw()), Signal::SIGCONT);
        }
        // One signal is enough for a shell that reads itself; the trap of another would run into that of the first.
        if !is_reading {
            self.process.signal_group(Signal::SIGINT);
        }
        // A stopped command would keep the signal for later.
        self.process.signal_group(Signal::SIGCONT);
        if is_reading {
            pty.type_in(&[pty::END]);
        }
    }

    /// Tells whether the shell itself waits to read from the terminal.
    pub(super) fn is_reading(&self, pty: &Pty) -> bool {
        procs::waits_for(self.process.pid().as_raw(), pty.path(), false)
    }

    /// Kills the processes that the command has started.
    pub(super) fn kill_command(&self) {
        procs::kill_below(self.process.pid().as_raw(), self.command_started);
    }

    /// Returns how many processes the command has started that are there.
    pub(super) fn count_command(&self) -> usize {
        procs::living_below(self.process.pid().as_raw(), self.command_started).len()
    }

    /// Kills what earlier commands have left, and returns how many processes that were.
    pub(super) fn kill_left(&self) -> usize {
        procs::kill_below(self.process.pid().as_raw(), 0)
    }

    /// Tells whether a failure would end it, as its flags were before the command.
    pub(super) fn ends_by_failure(&self) -> bool {
        self.last.flags.contains('e')
    }

    /// Kills the shell and what is in its process group or was started by the command.
    pub(super) fn kill(&self) {
        self.kill_command();
        self.process.signal_group(Signal::SIGKILL);
    }

    /// Tells whether the shell or a process below it waits to read from the terminal.
    pub(super) fn wants_input(&self, pty: &Pty) -> bool {
        let root = self.process.pid().as_raw();
        let is_raw = pty.is_raw();
        let waits = |pid| procs::waits_for(pid, pty.path(), is_raw);
        waits(root) || procs::below(root).into_iter().any(|one| one.session == root && waits(one.pid))
    }

    /// Tells whether it waits for the next line of its script though it has told no end: a command has taken away what it needs
    /// for that.
    pub(super) fn is_lost(&self) -> bool {
        let is_empty = |fd: BorrowedFd<'_>| sys::readable_bytes(fd).is_ok_and(|n_bytes| n_bytes == 0);
        let Ok(script) = fstat(&self.script) else { return false };
        is_empty(self.script.as_fd())
            && procs::reads_from(self.process.pid().as_raw(), &format!("pipe:[{}]", script.st_ino))
            // It may have told in between.
            && is_empty(self.marks.as_fd())
    }

    /// Returns what it has left running and was not told of before.
    pub(super) fn left(&mut self) -> Vec<Background> {
        self.left.fresh(self.command_started)
    }

    /// Says that the command is interrupted by way of the terminal.
    pub(super) fn expect_interrupt(&self) {
        self.was_interrupted.set(true);
    }
}

/// Makes a file without a name, in `folder` if there is one.
fn text_file(folder: Option<&OwnedFd>) -> nix::Result<OwnedFd> {
    match folder {
        Some(folder) => openat(folder, c".", OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::S_IRUSR),
        None => memfd_create(c"command", MFdFlags::MFD_CLOEXEC),
    }
}

/// Opens a file anew for reading, and keeps others from opening it for writing by way of that.
fn read_only(file: &OwnedFd) -> io::Result<OwnedFd> {
    fchmod(file, Mode::S_IRUSR)?;
    Ok(OwnedFd::from(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?))
}
