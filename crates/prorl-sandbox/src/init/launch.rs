//! The owner of a launcher: the process that starts Apptainer, hears what it has to say, and leaves nothing of it.
//!
//! A launcher starts helpers (for FUSE) that outlive it when it is killed, and its own children with it. So the owner is the
//! reaper of them all, in a session of its own, and ends last. It waits for whichever comes first: the launcher's end, a
//! helper's, the channel's, or that of the sandbox's life. The guest in the image knows by a pipe that its owner lives.

use std::{
    convert::Infallible,
    fs,
    io::{self, PipeReader, PipeWriter, Read as _, pipe},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::Path,
    process::{self, Child, Command, Stdio},
    time::Duration,
};

use nix::{
    sys::{
        prctl::{set_child_subreaper, set_dumpable, set_name},
        signal::{Signal, kill},
        socket::{Shutdown, shutdown},
        stat::umask,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{AccessFlags, Pid, access, chdir, geteuid, setsid},
};
use prorl_core::hello::StartFailure;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{PidfdFlags, pidfd_open},
};

use super::{At, PLAIN_UMASK, become_user, clock::Clock, rlimits, words::Words};
use crate::{
    setup::{LAUNCHED_MARK, Launch, step},
    sys,
};

/// How long a launcher whose guest has ended may take to clean up by itself.
const CLEAN_UP: Duration = Duration::from_millis(1500);

/// How long it may take to clean up when it was asked to.
const ASKED: Duration = Duration::from_millis(700);

/// How long what the launcher has left may take to end by itself, and then to do so when asked.
const LEFT: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(300)];

/// What a process that serves files by FUSE has open.
const FUSE: &str = "/dev/fuse";

/// How long the kernel may take to end what was killed.
const KILLED: Duration = Duration::from_secs(5);

/// Leads the launcher's session, starts it with the channel as its standard input, and never returns while anything of it
/// is left. When the sandbox has stood, this process ends here.
///
/// # Errors
/// When the launcher did not get as far as the guest: its last words. The caller should tell the host and end.
pub fn launch(channel: &OwnedFd, order: &Launch) -> Result<Infallible, StartFailure> {
    sys::close_all_but(channel.as_fd()).at("close descriptors", "")?;
    set_name(c"prorl-owner").at("set name", "")?;
    umask(PLAIN_UMASK);
    setsid().at("lead a session", "")?;
    rlimits::forbid_cores().at("limit core dumps", "")?;
    rlimits::offer_first().at("be the first to end", "")?;
    if let Some(user) = order.become_user {
        become_user(user)?;
    }
    if geteuid().is_root() {
        return Err(Errno::PERM).at(step::BECOME_USER, "root"); // root inside would be root outside
    }
    pass(&order.folder)?;
    set_dumpable(false).at("become undumpable", "")?;
    set_child_subreaper(true).at("adopt orphans", "")?;
    sys::reset_signals().at("reset signals", "")?;
    chdir("/").at("enter", "/")?; // a launcher may show the folder that it is started in
    let mut owner = Owner::start(channel, order)?;
    let end = owner.wait(order.max_life);
    owner.wind_up(end);
    if owner.is_up {
        process::exit(0);
    }
    Err(StartFailure { step: step::LAUNCH.to_owned(), target: owner.last_words(end), errno: 0 })
}

/// Sees whether this user may pass through a folder, and names the topmost above it that is closed. A launcher would not.
fn pass(folder: &Path) -> Result<(), StartFailure> {
    let mut above: Vec<_> = folder.ancestors().collect();
    above.reverse();
    for path in above {
        access(path, AccessFlags::X_OK).at(step::PASS_FOLDER, &path.to_string_lossy())?;
    }
    Ok(())
}

/// Why the waiting is over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The launcher has ended.
    Launcher,
    /// A helper has ended that serves the image: what is in it can no more be read, and what tasks make of that means nothing.
    Helper,
    /// The host is gone, or has hung up, or gives up waiting.
    Host,
    /// The sandbox has lived long enough, or the owner itself cannot go on.
    Life,
}

struct Owner<'a> {
    channel: &'a OwnedFd,
    launcher: Child,
    handle: OwnedFd,
    words: Words,
    /// What the guest in the image answers on. It sees this end close when the owner dies, and ends.
    line: PipeReader,
    /// Whether it has.
    is_up: bool,
    /// Handles of what serves the image's files, once it has.
    helpers: Vec<OwnedFd>,
}

impl<'a> Owner<'a> {
    fn start(channel: &'a OwnedFd, order: &Launch) -> Result<Self, StartFailure> {
        let Some((program, args)) = order.argv.split_first() else {
            return Err(Errno::INVAL).at(step::EXECUTE_LAUNCHER, "");
        };
        let name = program.to_string_lossy();
        let (words_in, words_out) = pipe().at("make pipe", "")?;
        let (line_in, line_out) = pipe().at("make pipe", "")?;
        let mut launcher =
            spawn(channel, program, args, order, line_out, words_out).at(step::EXECUTE_LAUNCHER, &name)?;
        // The number is the child's until it is waited for, which only `wind_up` does.
        let pid = i32::try_from(launcher.id()).ok().and_then(rustix::process::Pid::from_raw);
        let handle = pid.ok_or(Errno::SRCH).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        match handle {
            Ok(handle) => Ok(Self {
                channel,
                launcher,
                handle,
                words: Words::new(words_in),
                line: line_in,
                is_up: false,
                helpers: Vec::new(),
            }),
            Err(error) => {
                let _ = launcher.kill();
                let _ = launcher.wait();
                Err(error).at("watch launcher", &name)
            }
        }
    }

    fn wait(&mut self, max_life: Duration) -> End {
        let life = Clock::start(max_life);
        let mut line_is_open = true;
        loop {
            // The channel's bytes are the guest's. That it is closed is always told; that it is half closed means that the host
            // waits no longer for a hello, but would hear what there is to say.
            let host = if self.is_up { PollFlags::empty() } else { PollFlags::RDHUP };
            let mut fds = vec![PollFd::new(&self.handle, PollFlags::IN), PollFd::new(self.channel, host)];
            let words_idx = push(&mut fds, self.words.pipe());
            let line_idx = push(&mut fds, (line_is_open && !self.is_up).then(|| self.line.as_fd()));
            let first_helper_idx = fds.len();
            fds.extend(self.helpers.iter().map(|helper| PollFd::new(helper, PollFlags::IN)));
            match poll(&mut fds, Some(&life.timespec())) {
                Err(Errno::INTR) => continue,
                Err(_) => return End::Life,
                Ok(_) => {}
            }
            let has_news = |idx: Option<usize>| idx.is_some_and(|idx| !fds[idx].revents().is_empty());
            let (launcher_ended, host_ended) = (has_news(Some(0)), has_news(Some(1)));
            let (word, answer) = (has_news(words_idx), has_news(line_idx));
            let helper_ended = fds[first_helper_idx..].iter().any(|fd| !fd.revents().is_empty());
            if word {
                self.words.listen();
            }
            if answer {
                let mut bytes = [0; 64];
                let n_read = self.line.read(&mut bytes).unwrap_or_default();
                self.is_up = bytes[..n_read].contains(&LAUNCHED_MARK);
                line_is_open = n_read > 0;
                if self.is_up {
                    self.helpers = fuse_servers();
                }
                continue; // what else there is comes again
            }
            if launcher_ended {
                return End::Launcher;
            }
            if helper_ended {
                return End::Helper;
            }
            if host_ended {
                return End::Host;
            }
            if life.is_over() {
                return End::Life;
            }
        }
    }

    /// Ends the launcher and everything that it has left. Returns when none is there, or when the kernel cannot end one.
    fn wind_up(&mut self, end: End) {
        if self.is_up {
            // The guest sees the end of its channel and ends everything in the image.
            let _ = shutdown(self.channel.as_raw_fd(), Shutdown::Both);
        }
        let patience = if self.is_up { CLEAN_UP } else { Duration::ZERO };
        if end != End::Launcher && !self.launcher_ends(patience) {
            self.signal_launcher(Signal::SIGTERM);
            if !self.launcher_ends(ASKED) {
                self.signal_launcher(Signal::SIGKILL);
            }
        }
        end_rest(LEFT, |patience| self.children_end(patience));
    }

    fn signal_launcher(&self, signal: Signal) {
        // Not reaped yet, so the number is still its own.
        if let Ok(pid) = i32::try_from(self.launcher.id()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Waits for the launcher's end, listening meanwhile: one that cannot write does not end.
    fn launcher_ends(&mut self, patience: Duration) -> bool {
        let clock = Clock::start(patience);
        loop {
            let mut fds = vec![PollFd::new(&self.handle, PollFlags::IN)];
            let words_idx = push(&mut fds, self.words.pipe());
            let polled = poll(&mut fds, Some(&clock.timespec()));
            let [ended, word] = [Some(0), words_idx].map(|idx| idx.is_some_and(|idx| !fds[idx].revents().is_empty()));
            if word && polled.is_ok() {
                self.words.listen();
            }
            if (ended && polled.is_ok()) || (polled != Err(Errno::INTR) && clock.is_over()) {
                return ended;
            }
        }
    }

    /// Reaps children, and waits for the end of those that live; tells whether none is left.
    fn children_end(&mut self, patience: Duration) -> bool {
        let clock = Clock::start(patience);
        loop {
            self.words.listen_to_the_end();
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Err(nix::errno::Errno::ECHILD) => return true,
                Ok(WaitStatus::StillAlive) => {}
                Ok(_) | Err(_) => continue,
            }
            if clock.is_over() {
                return false;
            }
            let pids = children().into_iter().filter_map(|pid| rustix::process::Pid::from_raw(pid.as_raw()));
            let handles: Vec<OwnedFd> = pids.filter_map(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()).collect();
            let mut fds: Vec<_> = handles.iter().map(|handle| PollFd::new(handle, PollFlags::IN)).collect();
            let _ = poll(&mut fds, Some(&clock.timespec()));
        }
    }

    /// What the launcher said last, or how it ended when it said nothing.
    fn last_words(&self, end: End) -> String {
        let words = self.words.last();
        match (words.is_empty(), end) {
            (false, _) => words,
            (true, End::Launcher) => "it ended without a word".to_owned(),
            (true, End::Helper | End::Host | End::Life) => String::new(),
        }
    }
}

/// Adds a descriptor that may be there to those that are waited for, and returns its place.
fn push<'a>(fds: &mut Vec<PollFd<'a>>, fd: Option<BorrowedFd<'a>>) -> Option<usize> {
    fds.push(PollFd::from_borrowed_fd(fd?, PollFlags::IN));
    Some(fds.len() - 1)
}

fn spawn(
    channel: &OwnedFd,
    program: &std::ffi::OsStr,
    args: &[std::ffi::OsString],
    order: &Launch,
    line: PipeWriter,
    words: PipeWriter,
) -> io::Result<Child> {
    Command::new(program)
        .args(args)
        .env_clear()
        .envs(order.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::from(channel.try_clone()?))
        .stdout(line)
        .stderr(words)
        .spawn()
}

/// Ends every child that is left: waits for them to end by themselves and then when asked, as long as `left` says, and kills.
/// `children_end` waits until no child is left, or for so long, and tells which.
pub(super) fn end_rest(left: [Duration; 2], mut children_end: impl FnMut(Duration) -> bool) {
    for (patience, signal) in [(left[0], Signal::SIGTERM), (left[1], Signal::SIGKILL)] {
        if children_end(patience) {
            return;
        }
        signal_all(signal);
    }
    // Each child that dies may leave another one to us.
    let killed = Clock::start(KILLED);
    while !killed.is_over() && !children_end(left[0]) {
        signal_all(Signal::SIGKILL);
    }
}

/// Signals every child. One that has just ended does not mind.
fn signal_all(signal: Signal) {
    for child in children() {
        let _ = kill(child, signal);
    }
}

/// Returns the living and the unreaped children of this process, which are nobody else's until it reaps them.
pub(super) fn children() -> Vec<Pid> {
    children_of(process::id()).into_iter().filter_map(|pid| i32::try_from(pid).ok().map(Pid::from_raw)).collect()
}

/// Returns handles of the processes below this one that serve a file system by FUSE. What is in another pid namespace, as the
/// guest and its tasks are, is none of the launcher's.
fn fuse_servers() -> Vec<OwnedFd> {
    let pid_namespace = |pid: u32| fs::metadata(format!("/proc/{pid}/ns/pid")).ok().map(|meta| meta.ino());
    let own = pid_namespace(process::id());
    let mut found = Vec::new();
    let mut left = children_of(process::id());
    while let Some(pid) = left.pop() {
        if pid_namespace(pid) != own {
            continue;
        }
        left.extend(children_of(pid));
        // First the handle: what is read afterwards is this process's, or nothing of ours has that number any more.
        let number = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        let handle = number.and_then(|number| pidfd_open(number, PidfdFlags::empty()).ok());
        let mut files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let is_fuse = |file: fs::DirEntry| fs::read_link(file.path()).is_ok_and(|to| to == Path::new(FUSE));
        if files.any(is_fuse) {
            found.extend(handle);
        }
    }
    found
}

/// Returns the children of a process, whichever of its threads has started them.
fn children_of(parent: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let lists: io::Result<String> = tasks.map(|task| fs::read_to_string(task.path().join("children"))).collect();
    let list = lists.unwrap_or_else(|_kernel_without_lists| search_children(parent));
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Finds the children of a process among all.
fn search_children(parent: u32) -> String {
    let parent = parent.to_string();
    let mut found = String::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // The name in brackets, which may hold anything, is followed by the state and the parent.
        let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace());
        if fields.and_then(|mut fields| fields.nth(1)) == Some(&parent) {
            found.push_str(&entry.file_name().to_string_lossy());
            found.push(' ');
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_found_with_and_without_the_kernels_list() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let (searched, listed) = (search_children(process::id()), children_of(process::id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(searched.split_whitespace().any(|pid| pid == child.id().to_string()), "{searched}");
        assert!(listed.contains(&child.id()), "{listed:?}");
    }
}
