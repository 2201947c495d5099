//! What `/proc` knows of the processes in the sandbox.

use std::{
    collections::HashSet,
    fs,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{poll::PollFlags, sys::signal::Signal, unistd::Pid};

use super::{
    clock::{after, now},
    sys,
    wait::wait,
};

/// How long killed processes are waited for. One that takes longer hangs in the kernel, and no one can end it.
const DYING_MS: u64 = 500;

/// One process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its number.
    pub(super) pid: i32,
    /// Its parent's.
    pub(super) parent: i32,
    /// Its session's.
    pub(super) session: i32,
    /// When it started, in clock ticks since the machine did.
    pub(super) started: u64,
    /// Whether it has ended and only waits to be collected.
    pub(super) zombie: bool,
    /// Whether it is stopped.
    pub(super) stopped: bool,
}

/// Reads one line of `/proc/PID/stat`. The name in brackets may hold anything, brackets and spaces too.
fn parse(stat: &str) -> Option<Entry> {
    let (pid, _) = stat.split_once(" (")?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    Some(Entry {
        pid: pid.parse().ok()?,
        zombie: matches!(*fields.first()?, "Z" | "X"),
        stopped: matches!(*fields.first()?, "T" | "t"),
        parent: fields.get(1)?.parse().ok()?,
        session: fields.get(3)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
    })
}

/// Returns the processes that can be seen.
pub(super) fn all() -> Vec<Entry> {
    let Ok(folder) = fs::read_dir("/proc") else { return Vec::new() };
    folder
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit))
        .filter_map(|entry| parse(&fs::read_to_string(entry.path().join("stat")).ok()?))
        .collect()
}

/// Returns when a process started, in clock ticks since the machine did.
pub(super) fn started(pid: Pid) -> Option<u64> {
    Some(entry(pid.as_raw())?.started)
}

/// Returns the processes below `root`, and those of its session, without itself.
pub(super) fn below(root: i32) -> Vec<Entry> {
    let all = all();
    let mut family = HashSet::from([root]);
    loop {
        let n_known = family.len();
        family.extend(
            all.iter()
                .filter(|one| family.contains(&one.parent) || one.session == root)
                .map(|one| one.pid)
                .collect::<Vec<_>>(),
        );
        if family.len() == n_known {
            break;
        }
    }
    all.into_iter().filter(|one| one.pid != root && family.contains(&one.pid)).collect()
}

/// Returns the processes below `root` that started at `since` or later and have not ended.
pub(super) fn living_below(root: i32, since: u64) -> Vec<Entry> {
    below(root).into_iter().filter(|one| !one.zombie && one.started >= since).collect()
}

/// Kills the processes below `root` that started at `since` or later, until none is left to be seen. Returns how many there were.
///
/// Bounded, since a process may start others faster than they are found; a namespace's end is the last word.
pub(super) fn kill_below(root: i32, since: u64) -> usize {
    let mut n_killed = 0;
    for round in 0..16 {
        // Those that are new since the last round were started by others that were not killed in time. A process that is stopped
        // starts none, and still counts: so they come to stand at the sandbox's limit at the latest.
        if round > 0 {
            stop(root, since);
        }
        let targets = living_below(root, since);
        if targets.is_empty() {
            break;
        }
        n_killed += targets.len();
        kill(&targets);
    }
    n_killed
}

/// Stops the processes below `root` that started at `since` or later, until all are.
///
/// A list may lack what those on it have started before they stopped; the next one has it.
fn stop(root: i32, since: u64) {
    let until = after(now(), DYING_MS);
    let mut n_quiet = 0;
    while n_quiet < 2 && now() < until {
        let running: Vec<Entry> = living_below(root, since).into_iter().filter(|one| !one.stopped).collect();
        n_quiet = if running.is_empty() { n_quiet + 1 } else { 0 };
        for handle in running.iter().filter_map(open) {
            // One that has just ended starts nothing either.
            let _sent = sys::signal_process(handle.as_fd(), Signal::SIGSTOP);
        }
    }
}

/// Returns how many processes there are, zombies included.
pub(super) fn count() -> usize {
    let Ok(folder) = fs::read_dir("/proc") else { return 0 };
    folder
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit))
        .count()
}

/// Kills processes and waits until they have ended, so that nobody sees one that was said to be gone.
pub(super) fn kill(targets: &[Entry]) {
    let ends: Vec<OwnedFd> = targets.iter().filter_map(open).collect();
    for end in &ends {
        // One that has just ended is what was wanted.
        let _sent = sys::signal_process(end.as_fd(), Signal::SIGKILL);
    }
    let until = after(now(), DYING_MS);
    for end in ends {
        wait([Some((end.as_fd(), PollFlags::POLLIN))], Some(until));
    }
}

/// Returns a handle of a process, unless it has ended and its number means another by now.
fn open(target: &Entry) -> Option<OwnedFd> {
    // Opened first: what the number means after that, the handle means too, or its process has ended.
    let handle = sys::process_end(target.pid).ok()?;
    (started(Pid::from_raw(target.pid)) == Some(target.started)).then_some(handle)
}

/// A system call that a thread is in: its number and arguments.
type Call = (libc::c_long, [u64; 6]);

/// Reads `/proc/PID/syscall`: "NUMBER ARGUMENT.." in decimal and hexadecimal, or "running".
fn parse_call(text: &str) -> Option<Call> {
    let mut fields = text.split_whitespace();
    let number = fields.next()?.parse().ok()?;
    let mut arguments = [0; 6];
    for argument in &mut arguments {
        *argument = u64::from_str_radix(fields.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some((number, arguments))
}

/// Returns the system calls that the threads of a process wait in.
fn calls(pid: i32) -> Vec<Call> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    threads
        .flatten()
        .filter_map(|thread| parse_call(&fs::read_to_string(thread.path().join("syscall")).ok()?))
        .collect()
}

/// Returns what a descriptor of a process leads to.
fn target(pid: i32, fd: u64) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()
}

/// Returns the descriptor that a call reads from.
fn read_by((number, arguments): Call) -> Option<u64> {
    [libc::SYS_read, libc::SYS_readv].contains(&number).then_some(arguments[0])
}

/// Tells whether a process waits in a `read` of the file of this name.
pub(super) fn reads_from(pid: i32, name: &str) -> bool {
    calls(pid).into_iter().filter_map(read_by).any(|fd| target(pid, fd).is_some_and(|target| target == Path::new(name)))
}

/// Tells whether a process waits to read from its terminal, which has this path.
///
/// It is in a `read` of it. Or it waits without limit for one of several descriptors to be readable and has the terminal: which
/// are those cannot be seen, but where it has taken line editing over from the kernel (`is_raw`) that is one of them.
pub(super) fn waits_for(pid: i32, terminal: Option<&Path>, is_raw: bool) -> bool {
    let is_terminal = |fd| {
        target(pid, fd).is_some_and(|target| target == Path::new("/dev/tty") || Some(target.as_path()) == terminal)
    };
    let calls = calls(pid);
    calls.iter().copied().filter_map(read_by).any(is_terminal)
        || is_raw && calls.into_iter().any(waits_without_limit) && descriptors(pid).into_iter().any(is_terminal)
}

/// Tells whether a call waits for descriptors until one is ready.
fn waits_without_limit((number, arguments): Call) -> bool {
    const NEVER: u64 = 0xffff_ffff; // -1, of which the upper half may be anything
    let is_never = |argument: u64| argument & NEVER == NEVER;
    match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll => is_never(arguments[2]),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_select => arguments[4] == 0,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait => is_never(arguments[3]),
        libc::SYS_ppoll => arguments[2] == 0,
        libc::SYS_pselect6 => arguments[4] == 0,
        libc::SYS_epoll_pwait => is_never(arguments[3]),
        _ => false,
    }
}

/// Returns the numbers of a process's descriptors.
fn descriptors(pid: i32) -> Vec<u64> {
    let Ok(folder) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Returns a process's entry.
pub(super) fn entry(pid: i32) -> Option<Entry> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Returns a process's name.
pub(super) fn name(pid: i32) -> Option<String> {
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    Some(String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use nix::sys::signal;

    use super::*;

    #[test]
    fn a_name_with_brackets_and_spaces_is_no_trap() {
        let stat = "42 (a) b (c) S 7 42 41 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 100 200";
        let entry = parse(stat).unwrap();
        assert_eq!(entry, Entry { pid: 42, parent: 7, session: 41, started: 12345, zombie: false, stopped: false });
        assert_eq!(parse("garbage"), None);
    }

    #[test]
    fn a_number_that_means_another_process_by_now_is_not_killed() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let entry = all().into_iter().find(|entry| entry.pid == pid).unwrap();
        kill(&[Entry { started: entry.started - 1, ..entry }]);
        // A signal that was sent is there at once; the one sent after it then tells that it was not.
        signal::kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));

        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        kill(&[all().into_iter().find(|entry| entry.pid == pid).unwrap()]);
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn this_process_is_seen() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(all().iter().any(|entry| entry.pid == own));
        assert!(started(Pid::this()).is_some());
    }
}
