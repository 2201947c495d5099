//! Ends what is left of a recorded sandbox, and nothing else.
//!
//! Every process is proven to be the sandbox's before it is killed, because numbers are given out again: those of processes,
//! and sooner those of namespaces. The proofs are these.
//!
//! - The outer process and process 1 are known by number and start. Process 1 takes its whole pid namespace with it.
//! - While the recorded outer process is there, its session is the sandbox's. After it, those members are which started
//!   between it and the hello: at the hello it was alive, so that its number was nobody else's session, and a process is in
//!   the session that it was born into unless it leads one.
//! - While the recorded process 1 is there, its user namespaces are the sandbox's, unless they are this process's own, or a
//!   process is in one that is older than the outer process: then the launcher has made none of its own.
//!
//! Where `/proc` hides processes from this user (hidepid) and the kernel gives them no inodes, some cannot be proven. They are
//! waited for, and never killed.
//!
//! No process is ever found by its name, its arguments or its environment.

use std::{fs, io, os::unix::fs::MetadataExt};

use super::{
    process::{Handle, Process, Stat, is_silent},
    record::{Reach, Record},
};

/// Every process that was there at one moment.
#[derive(Debug)]
pub(crate) struct Snapshot(Vec<(u32, Stat)>);

impl Snapshot {
    /// Looks at all of `/proc`.
    pub(crate) fn take() -> io::Result<Self> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            match Stat::of(pid) {
                Ok(stat) => found.push((pid, stat)),
                // Gone, or hidden from this user (hidepid), whose sandboxes' helpers are not.
                Err(error) if is_silent(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self(found))
    }
}

/// Kills what is proven to be left of a sandbox and returns handles of what was killed, to wait by. To be called again until it
/// finds nothing: what proves the others is killed only after a look that found no others, since one of them may have
/// started another after it was looked for.
///
/// # Errors
/// When this process may open no more files, or cannot read `/proc`. Some may have been killed then, and the call repeated.
/// [`io::ErrorKind::PermissionDenied`] when what is left cannot be proven, which is not changed by a repetition.
pub(crate) fn kill(record: &Record) -> io::Result<Vec<Handle>> {
    let Some((outer, reach)) = record.spawned else { return Ok(Vec::new()) };
    let inner = record.standing.as_ref().map(|standing| standing.inner);
    let mut found = Vec::new();
    if reach == Reach::Session {
        found = helpers(record, outer, inner)?;
        found.retain(|handle| !handle.has_ended());
    }
    if found.is_empty() {
        let mut hidden = None;
        for process in inner.into_iter().chain([outer]) {
            match process.open() {
                // The other one may take it along.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => hidden = Some(error),
                opened => found.extend(opened?),
            }
        }
        found.retain(|handle| !handle.has_ended());
        if let (true, Some(error)) = (found.is_empty(), hidden) {
            return Err(error);
        }
    }
    for handle in &found {
        handle.kill();
    }
    Ok(found)
}

/// Finds the processes beside the pid namespace.
fn helpers(record: &Record, outer: Process, inner: Option<Process>) -> io::Result<Vec<Handle>> {
    let snapshot = Snapshot::take()?;
    let mut namespaces = record.standing.as_ref().map_or_else(Vec::new, |standing| standing.user_namespaces.clone());
    let own = fs::metadata("/proc/self/ns/user")?.ino();
    namespaces.retain(|inode| *inode != own);
    let mut by_session = Vec::new();
    let mut by_namespace = Vec::new();
    for (pid, stat) in snapshot.0 {
        let namespace = if namespaces.is_empty() { None } else { user_namespace(pid) };
        // Without a start of the outer process nothing is known to be younger.
        if outer.started.is_none_or(|started| stat.started < started) {
            namespaces.retain(|inode| Some(*inode) != namespace);
            continue;
        }
        let process = Process { pid, started: Some(stat.started), inode: None };
        let is_main = |main: Process| main.pid == pid && main.started.is_none_or(|started| started == stat.started);
        if is_main(outer) || inner.is_some_and(is_main) {
            continue;
        }
        if stat.session == outer.pid {
            by_session.extend(seen(process)?.map(|handle| (stat.started, handle)));
        } else if let Some(namespace) = namespace.filter(|inode| namespaces.contains(inode)) {
            by_namespace.extend(seen(process)?.map(|handle| (namespace, handle)));
        }
    }
    // Asked after the looking: what is there now was there all the time.
    if !outer.is_there() {
        let hello = record.standing.as_ref().map(|standing| standing.at);
        by_session.retain(|(started, _)| hello.is_some_and(|hello| *started <= hello));
    }
    if !inner.is_some_and(Process::is_there) {
        by_namespace.clear();
    }
    // A namespace may have turned out to be older after some of it were found.
    by_namespace.retain(|(namespace, _)| namespaces.contains(namespace));
    Ok(by_session.into_iter().chain(by_namespace).map(|(_, handle)| handle).collect())
}

/// Takes a handle of a process that was seen a moment ago; nothing of one that has ended or hidden itself since.
fn seen(process: Process) -> io::Result<Option<Handle>> {
    match process.open() {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        opened => opened,
    }
}

/// Returns the inode number of a process's user namespace, as far as this user may know it.
fn user_namespace(pid: u32) -> Option<u64> {
    fs::metadata(format!("/proc/{pid}/ns/user")).ok().map(|meta| meta.ino())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Child, ChildStdout, Command, Stdio},
    };

    use super::*;
    use crate::node::{process::now, record::Standing};

    /// A shell with a helper; both end with the test.
    struct Shell {
        child: Child,
        helper: Process,
        lines: BufReader<ChildStdout>,
    }

    impl Shell {
        /// Starts a shell through `wrapper`. The helper is its child and waits; the shell waits for it.
        fn start(wrapper: &[&str]) -> Self {
            let script = "sleep 1000 & echo $!; wait; echo waited; exec sleep 1000";
            let mut words = wrapper.iter().copied().chain(["sh", "-c", script]);
            let mut command = Command::new(words.next().unwrap());
            let mut child = command.args(words).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap());
            let mut line = String::new();
            lines.read_line(&mut line).unwrap();
            let helper = line.trim().parse().ok().and_then(|pid| Process::of(pid).unwrap());
            let helper = helper.unwrap_or_else(|| panic!("{wrapper:?} started no helper: {line:?}"));
            Self { child, helper, lines }
        }

        fn process(&self) -> Process {
            Process::of(self.child.id()).unwrap().unwrap()
        }

        fn helper_lives(&self) -> bool {
            self.helper.open().unwrap().is_some_and(|handle| !handle.has_ended())
        }
    }

    impl Drop for Shell {
        fn drop(&mut self) {
            if let Ok(Some(helper)) = self.helper.open() {
                helper.kill();
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
            let _ = &self.lines;
        }
    }

    fn wait(killed: Vec<Handle>) {
        for handle in killed {
            let mut fds = [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(&handle), nix::poll::PollFlags::POLLIN)];
            assert_eq!(crate::sys::poll_patiently(&mut fds, 5000), 1, "{handle:?} survives");
        }
    }

    fn session(outer: Process) -> Record {
        Record { spawned: Some((outer, Reach::Session)), standing: None, group: None }
    }

    /// A number that no process has had at its recorded start.
    fn dead(process: Process) -> Process {
        Process { started: started(process, -1), ..process }
    }

    /// The start of a process, moved by some ticks.
    fn started(process: Process, by: i64) -> Option<u64> {
        process.started.map(|started| started.saturating_add_signed(by))
    }

    #[test]
    fn nothing_is_killed_for_a_record_that_names_nobody() {
        assert!(kill(&Record::default()).unwrap().is_empty());
    }

    #[test]
    fn a_later_process_of_the_number_is_not_killed() {
        let shell = Shell::start(&["setsid"]);
        let standing = Standing { inner: dead(shell.helper), at: 0, user_namespaces: Vec::new() };
        for reach in [Reach::PidNamespace, Reach::Session] {
            let spawned = Some((dead(shell.process()), reach));
            let record = Record { spawned, standing: Some(standing.clone()), group: None };
            assert!(kill(&record).unwrap().is_empty(), "{reach:?}");
        }
        assert!(shell.helper_lives());
    }

    #[test]
    fn the_session_goes_with_its_outer_process() {
        let shell = Shell::start(&["setsid"]);
        let record = session(shell.process());
        let killed = kill(&record).unwrap();
        assert_eq!(killed.len(), 1);
        wait(killed);
        assert!(!shell.helper_lives());
        // The one that proves the others goes last; the shell waits for its helper and may have ended by itself.
        wait(kill(&record).unwrap());
        assert!(kill(&record).unwrap().is_empty());
        assert!(shell.process().open().unwrap().is_none_or(|handle| handle.has_ended()));
    }

    #[test]
    fn a_session_of_an_outer_process_that_is_not_reaped_is_proven() {
        let mut shell = Shell::start(&["setsid"]);
        let record = session(shell.process());
        shell.child.kill().unwrap();
        wait(vec![shell.process().open().unwrap().unwrap()]);
        wait(kill(&record).unwrap());
        assert!(!shell.helper_lives());
    }

    #[test]
    fn without_its_outer_process_a_session_is_proven_by_the_time() {
        let mut shell = Shell::start(&["setsid"]);
        let outer = shell.process();
        shell.child.kill().unwrap();
        shell.child.wait().unwrap();
        // It never said hello, so that the session may be anybody's by now.
        assert!(kill(&session(outer)).unwrap().is_empty());
        let stands_at = |at| Record {
            standing: Some(Standing { inner: dead(outer), at, user_namespaces: Vec::new() }),
            ..session(outer)
        };
        assert!(kill(&stands_at(started(shell.helper, -1).unwrap())).unwrap().is_empty(), "started after the hello");
        let younger = Process { started: started(shell.helper, 1), ..outer };
        let record = Record { spawned: Some((younger, Reach::Session)), ..stands_at(now().unwrap()) };
        assert!(kill(&record).unwrap().is_empty(), "started before the outer process");
        assert!(shell.helper_lives());
        wait(kill(&stands_at(now().unwrap())).unwrap());
        assert!(!shell.helper_lives());
    }

    #[test]
    fn a_namespace_of_this_process_proves_nothing() {
        // As when a launcher makes none: the shell has left every session, and would be the sandbox's by its namespace.
        let (shell, other) = (Shell::start(&["setsid"]), Shell::start(&["setsid"]));
        let own = user_namespace(std::process::id()).unwrap();
        let outer = Process { pid: 1 << 30, started: started(shell.process(), 0), inode: None };
        let standing = Standing { inner: shell.process(), at: now().unwrap(), user_namespaces: vec![own] };
        let record = Record { standing: Some(standing), ..session(outer) };
        let killed = kill(&record).unwrap();
        assert_eq!(killed.len(), 1, "process 1 alone");
        wait(killed);
        assert!(shell.helper_lives() && other.helper_lives());
    }

    #[test]
    fn what_cannot_be_proven_is_not_killed_and_not_said_to_be_gone() {
        let shell = Shell::start(&["setsid"]);
        let unknown = Process { started: None, inode: None, ..shell.process() };
        for reach in [Reach::PidNamespace, Reach::Session] {
            let record = Record { spawned: Some((unknown, reach)), standing: None, group: None };
            assert_eq!(kill(&record).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            // One that is known goes all the same.
            let inner = Shell::start(&["setsid"]);
            let standing = Standing { inner: inner.process(), at: now().unwrap(), user_namespaces: Vec::new() };
            wait(kill(&Record { standing: Some(standing), ..record }).unwrap());
        }
        assert!(shell.helper_lives());
    }

    #[test]
    fn a_namespace_is_proven_by_process_1_alone() {
        let allowed = Command::new("unshare").args(["-U", "true"]).stderr(Stdio::null()).status();
        if !allowed.is_ok_and(|status| status.success()) {
            crate::node::tests::skip("a_namespace_is_proven_by_process_1_alone", "no user namespaces for this user");
            return;
        }
        // The helper has left every session that could be named, but is in the user namespace.
        let shell = Shell::start(&["unshare", "-U", "setsid", "sh", "-c", "sleep 0.1; exec \"$@\"", "sh"]);
        let namespace = user_namespace(shell.child.id()).unwrap();
        assert_ne!(namespace, user_namespace(std::process::id()).unwrap());
        let mut ended = Command::new("true").spawn().unwrap();
        let outer = Process { pid: ended.id(), started: started(shell.process(), 0), inode: None };
        ended.wait().unwrap();
        let record = |inner| Record {
            standing: Some(Standing { inner, at: now().unwrap(), user_namespaces: vec![namespace] }),
            ..session(outer)
        };
        // A process in the namespace is older than the outer process.
        let (younger, other) = (Process { started: started(shell.helper, 0), ..outer }, Shell::start(&[]));
        let shared = Record { spawned: Some((younger, Reach::Session)), ..record(other.process()) };
        assert_eq!(kill(&shared).unwrap().len(), 1, "process 1 alone");
        assert!(shell.helper_lives());
        // Another process has the recorded number of the namespace: process 1 is gone.
        assert!(kill(&record(dead(shell.process()))).unwrap().is_empty());
        assert!(shell.helper_lives());
        wait(kill(&record(shell.process())).unwrap());
        assert!(!shell.helper_lives());
    }
}
