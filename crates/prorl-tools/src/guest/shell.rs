//! One bash, and how commands get in and their ends come out.
//!
//! The shell reads its script from a pipe, two lines for each command. The first sources a file of the guest's, whose text is an
//! `eval` of the command in quotes: at top level, so that `declare` is global and `break` has no loop of ours to leave; in a
//! sourced file, so that `return` is harmless. The second line, read only when the command has ended, writes a mark to a
//! socket: a word that is fresh for each command, the exit code, and the shell's flags. The kernel adds the writer's process
//! id. So a mark counts only from the shell itself; the command's children do not even have the socket, which is closed
//! around the `eval`.
//!
//! The shell is interactive (`-i`) and reads a script, which together mean: no prompts and no line editor, messages without
//! line numbers, aliases, and an unset variable under `set -u` does not end it. Job control, history and `!` are turned off.
//!
//! An interrupt must end the whole command and not only what runs at the moment. The trap returns from the innermost function
//! or sourced file, and has each command after it return as well (`DEBUG`), until the script's own level is reached. bash
//! passes over an interrupt when its child does not die of it; so when a limit has passed it gets another signal with the
//! same trap (`RTMAX`), whose trap runs as soon as the child is gone, however it went.

use std::{
    cell::Cell,
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
    fcntl::{FcntlArg, OFlag, fcntl, openat},
    poll::PollFlags,
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{Signal, kill},
        socket::{
            AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixCredentials, recvmsg, setsockopt,
            socketpair, sockopt,
        },
        stat::{Mode, fchmod},
    },
    unistd::{Pid, pipe2},
};

use super::{
    clock::{Instant, now},
    procs,
    pty::{Pty, TURN_BYTES},
    reaper::Process,
    serve::Shared,
    sys,
    wait::wait,
};
use crate::wire::ExitStatus;

/// The shell's descriptors for its script (until it has opened it), its marks, and the text of the command.
const SCRIPT_FD: RawFd = 60;
const MARK_FD: RawFd = 61;
const TEXT_FD: RawFd = 62;

/// Descriptors on their way to the shell are numbered from here, above the numbers that they get there.
const PASSED_FD: RawFd = 100;

/// Exit code of a shell that cannot write its mark.
const NO_MARK: i32 = 97;

/// Messages looked at before looking at what else there is. A command can get at the marks' socket (and no further) and fill it
/// without end.
const TURN_MESSAGES: usize = 64;

/// Returns from whatever runs until the script's own level is reached, where there is nothing to return from.
const ABORT: &str = r#"\builtin trap '\builtin trap "\builtin return 130 2>/dev/null || \builtin trap - DEBUG" DEBUG; \builtin return 130 2>/dev/null || \builtin trap - DEBUG' INT RTMAX"#;

/// Has bash forget that a signal came: one whose trap has returned stays counted, and would end every `wait` from then on. What is
/// counted no more is one whose trap runs to its end.
const FORGET: &str = r"\builtin trap : INT RTMAX; \builtin kill -RTMAX $$; \builtin kill -INT $$";

/// The end of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Its exit code.
    pub(super) status: i32,
    /// The shell's flags (`$-`).
    flags: String,
}

/// A running bash.
#[derive(Debug)]
pub(super) struct Shell {
    process: Process,
    script: File,
    text: File,
    marks: OwnedFd,
    marks_closed: bool,
    word: String,
    last: Mark,
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
        // Nobody opens it for writing by way of the shell's descriptors.
        fchmod(&text, Mode::S_IRUSR)?;
        let text_out = OwnedFd::from(File::open(format!("/proc/self/fd/{}", text.as_raw_fd()))?);
        let passed = [(script_out, SCRIPT_FD), (marks_out, MARK_FD), (text_out, TEXT_FD)]
            .into_iter()
            .map(|(fd, number)| Ok((sys::duplicate_above(fd.as_fd(), PASSED_FD)?, number)))
            .collect::<io::Result<Vec<_>>>()?;

        let mut command = Command::new(bash);
        command.args(["--noprofile", "--norc", "-i", "+m"]).arg(format!("/proc/self/fd/{SCRIPT_FD}"));
        quiet(&mut command);
        // Otherwise it would load the user's history.
        command.env("HISTFILE", "");
        command.stdin(Stdio::from(pty.slave()?)).stdout(Stdio::from(pty.slave()?)).stderr(Stdio::from(pty.slave()?));
        if let Some(folder) = cwd.filter(|folder| folder.is_dir()) {
            command.current_dir(folder);
        }
        let process = shared.reaper.spawn(&mut command, &passed, true)?;
        let mut shell = Self {
            process,
            script: File::from(script),
            text: File::from(text),
            marks,
            marks_closed: false,
            word: String::new(),
            last: Mark { status: 0, flags: String::new() },
            command_started: 0,
            was_interrupted: Cell::new(false),
        };
        shell.command_started = procs::started(shell.process.pid()).unwrap_or(0);
        let set_up = format!(
            "\\builtin set +mH +o history; \\builtin history -c; \\builtin unset HISTFILE; BASH_ARGV0=bash; \\exec {SCRIPT_FD}<&-"
        );
        shell.feed(&set_up)?;
        shell.come_up(pty, until)?;
        // Nobody opens it any more by way of the shell's descriptors.
        fchmod(&shell.script, Mode::empty())?;
        Ok(shell)
    }

    /// Waits for the first mark. What bash says on the way, about a terminal that it does not like, is nobody's output.
    fn come_up(&mut self, pty: &Pty, until: Instant) -> io::Result<()> {
        loop {
            if self.take_mark().is_some() {
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
        let Mark { status, flags } = &self.last;
        let forget = if self.was_interrupted.take() { FORGET } else { "" };
        let mut text = format!("{forget}\n{ABORT}\n");
        // `$?` of the last command, which the mark has covered. Under `set -e` it could end the shell.
        if *status != 0 && !flags.contains('e') {
            let restore = format!("__prorl() {{ \\builtin unset -f __prorl; \\builtin return {status}; }}; __prorl\n");
            text.push_str(&restore);
        }
        // Tracing was turned off for the mark.
        let tracing: String = flags.chars().filter(|flag| "xv".contains(*flag)).collect();
        let command =
            if tracing.is_empty() { command.to_owned() } else { format!("\\builtin set -{tracing}\n{command}") };
        let eval = format!("\\builtin eval {} {MARK_FD}>&- {TEXT_FD}<&-\n", quote(&command));
        text.push_str(&eval);
        self.text.set_len(0)?;
        self.text.write_all_at(text.as_bytes(), 0)?;
        self.command_started = sys::boot_ticks();
        self.feed(&format!("\\builtin . /proc/self/fd/{TEXT_FD}"))
    }

    /// Has the shell run a line and then write a mark.
    fn feed(&mut self, line: &str) -> io::Result<()> {
        self.word = sys::nonce();
        // Both outputs go to the socket, so that a traced shell prints nothing of this to the terminal.
        let mark = format!(
            "{{ \\builtin printf '%s %s %s\\n' {} \"$?\" \"$-\"; \\builtin set +xv; }} >&{MARK_FD} 2>&{MARK_FD} || \\builtin exit {NO_MARK}",
            self.word
        );
        // Far less than a pipe holds, so it never waits.
        self.script.write_all(format!("{line}\n{mark}\n").as_bytes())
    }

    /// Returns the mark of the command that was begun, once the shell has written it. Whatever else was sent is dropped.
    ///
    /// It looks at a bounded number of messages; there may be more, and then [`marks`](Self::marks) is still readable.
    pub(super) fn take_mark(&mut self) -> Option<Mark> {
        let mut buffer = [0; 512];
        for _message in 0..TURN_MESSAGES {
            let mut iov = [IoSliceMut::new(&mut buffer)];
            let mut space = cmsg_space!(UnixCredentials);
            let received =
                match recvmsg::<()>(self.marks.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::MSG_DONTWAIT) {
                    Ok(received) => received,
                    Err(nix::errno::Errno::EINTR) => continue,
                    Err(_nothing) => return None,
                };
            let n = received.bytes;
            let sender = received.cmsgs().ok().and_then(|mut messages| {
                messages.find_map(|message| match message {
                    ControlMessageOwned::ScmCredentials(sender) => Some(sender.pid()),
                    _ => None,
                })
            });
            if n == 0 {
                // An empty message and an end look alike; only one of them goes on for ever.
                if sender.is_none_or(|pid| pid == 0) {
                    self.marks_closed = true;
                    return None;
                }
                continue;
            }
            if sender != Some(self.process.pid().as_raw()) {
                continue;
            }
            if let Some(mark) = parse_mark(&buffer[..n], &self.word) {
                // A mark counts once.
                self.word.clear();
                self.last = mark.clone();
                // It was read as a whole before it ran, and there is no need to keep it.
                let _emptied = self.text.set_len(0);
                return Some(mark);
            }
        }
        None
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
        std::fs::read_link(format!("/proc/{}/cwd", self.process.pid())).ok()
    }

    /// Interrupts what is in the foreground, and the shell, whatever state the terminal is in.
    pub(super) fn interrupt(&self, pty: &Pty) {
        self.was_interrupted.set(true);
        self.process.signal_abort();
        if let Some(group) = pty.foreground().filter(|group| *group != self.process.pid()) {
            let _sent = kill(Pid::from_raw(-group.as_raw()), Signal::SIGINT);
            let _sent = kill(Pid::from_raw(-group.as_raw()), Signal::SIGCONT);
        }
        self.process.signal_group(Signal::SIGINT);
        // A stopped command would keep the signal for later.
        self.process.signal_group(Signal::SIGCONT);
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

    /// Kills the shell and what is in its process group or was started by the command.
    pub(super) fn kill(&self) {
        self.kill_command();
        self.process.signal_group(Signal::SIGKILL);
    }

    /// Tells whether the shell or a process below it waits to read from the terminal.
    pub(super) fn wants_input(&self, pty: &Pty) -> bool {
        let Some(terminal) = pty.path() else { return false };
        let root = self.process.pid().as_raw();
        std::iter::once(root)
            .chain(procs::below(root).into_iter().map(|one| one.pid))
            .any(|pid| procs::reads_from(pid, &terminal))
    }
}

/// Sets the variables without which programs on a terminal open a pager or an editor and wait for a person.
pub(super) fn quiet(command: &mut Command) {
    for (name, value) in
        [("PAGER", "cat"), ("GIT_PAGER", "cat"), ("MANPAGER", "cat"), ("EDITOR", "true"), ("GIT_EDITOR", "true")]
    {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
}

/// Makes a file without a name, in `folder` if there is one.
fn text_file(folder: Option<&OwnedFd>) -> nix::Result<OwnedFd> {
    match folder {
        Some(folder) => openat(folder, c".", OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::S_IRUSR),
        None => memfd_create(c"command", MFdFlags::MFD_CLOEXEC),
    }
}

/// Quotes a word for bash.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn parse_mark(message: &[u8], word: &str) -> Option<Mark> {
    let mut fields = std::str::from_utf8(message).ok()?.strip_suffix('\n')?.split(' ');
    let (Some(first), Some(status), flags, None) = (fields.next(), fields.next(), fields.next(), fields.next()) else {
        return None;
    };
    if word.is_empty() || first != word {
        return None;
    }
    Some(Mark { status: status.parse().ok()?, flags: flags.unwrap_or_default().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_the_word_a_code_and_flags() {
        let mark = |text: &str| parse_mark(text.as_bytes(), "abc");
        assert_eq!(mark("abc 7 hiB\n"), Some(Mark { status: 7, flags: "hiB".to_owned() }));
        for wrong in [
            "abc 7 hiB",
            "abd 7 hiB\n",
            "abc seven h\n",
            "abc\n",
            "abc 7 h 8\n",
            "x abc 7 h\n",
            "\n",
            "abc 7 h\nabc 7 h\n",
        ] {
            assert_eq!(mark(wrong), None, "{wrong:?}");
        }
        assert_eq!(parse_mark(b" 7 h\n", ""), None);
    }

    #[test]
    fn a_quoted_word_stays_one_word() {
        assert_eq!(quote("it's $HOME"), r"'it'\''s $HOME'");
    }
}
