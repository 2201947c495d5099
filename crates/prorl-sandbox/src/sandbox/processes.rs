//! The processes of a sandbox, from the first on until nothing of them is left.

use std::{
    fs, io, mem,
    net::Shutdown,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{fs::MetadataExt as _, net::UnixStream as StdStream},
    },
    path::PathBuf,
    time::Duration,
};

use parking_lot::Mutex;
use prorl_core::hello::Hello;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, pidfd_send_signal, waitid,
};
use tokio::{io::unix::AsyncFd, process::Child, runtime::Handle as Runtime, time::timeout};

use crate::{
    Exceeded, SandboxError,
    cgroup::Group,
    node::{Claim, Handle, Maker, Process, Reach, descends, has_ended},
    start::Kind,
    sys,
};

/// How long the kernel may take to empty a namespace whose process 1 was killed.
const REAP: Duration = Duration::from_secs(5);

/// The processes of one sandbox, owned from the moment that the first exists.
///
/// The *outer* process is our child; it waits outside the pid namespace and reaps the *inner* one, process 1 inside. So the
/// outer process is ended by way of the inner one wherever that is known, or the inner one would stay a zombie of
/// whatever process adopts it.
#[derive(Debug)]
pub(crate) struct Processes {
    /// What is written down of the sandbox, and where its files are.
    claim: Claim,
    kind: Kind,
    outer_pid: u32,
    child: Mutex<Child>,
    outer: Watch,
    inner: Option<Watch>,
    /// Our end of the channel once more, to shut it down when the other handle was given away.
    line: StdStream,
    maker: Maker,
}

impl Processes {
    /// Takes ownership of a fresh child, which has not been told yet what to do.
    pub(crate) fn new(claim: Claim, kind: Kind, mut child: Child, line: StdStream) -> Result<Self, SandboxError> {
        let outer_pid = child.id().unwrap_or_default();
        // The number is the child's until it is waited for, which nobody has done yet.
        let opened = Handle::of(outer_pid).and_then(|handle| handle.ok_or(io::Error::from_raw_os_error(libc::ESRCH)));
        let watched = opened.and_then(Watch::new);
        match watched.and_then(|outer| claim.spawned(outer_pid, kind.reach).map(|()| outer)) {
            Ok(outer) => {
                let (child, maker) = (Mutex::new(child), Maker::this());
                Ok(Self { claim, kind, outer_pid, child, outer, inner: None, line, maker })
            }
            Err(source) => {
                // Without a handle it cannot be owned. Killed here, it is reaped by the runtime's orphan queue.
                let _ = child.start_kill();
                Err(SandboxError::at("watch guest", source))
            }
        }
    }

    pub(crate) fn id(&self) -> &str {
        self.claim.id()
    }

    /// Tells whether this process has made them, and is no copy of the one that did.
    pub(super) fn is_ours(&self) -> bool {
        self.maker.is_here()
    }

    /// Returns which limits their control group has seen exceeded since this was last asked.
    pub(super) fn take_exceeded(&self) -> Vec<Exceeded> {
        self.claim.group().map(Group::take_exceeded).unwrap_or_default()
    }

    /// Returns the sandbox's own folder if it has one.
    pub(crate) fn run_dir(&self) -> Option<PathBuf> {
        self.claim.made_run_dir()
    }

    /// Tells whether process 1 or the outer process runs no more.
    pub(crate) fn is_over(&self) -> bool {
        self.outer.has_ended() || self.inner.as_ref().is_none_or(Watch::has_ended)
    }

    pub(crate) fn outer_pid(&self) -> u32 {
        self.outer_pid
    }

    /// Takes a handle of the inner process, which the hello came from, and writes it down. `Err(None)`: it is dead already.
    pub(crate) fn adopt(&mut self, hello: &Hello) -> Result<(), Option<SandboxError>> {
        let at = |source| Some(SandboxError::at("watch process 1", source));
        let handle = Handle::of(hello.host_pid).map_err(at)?.ok_or(None)?;
        let inner = Process::of(hello.host_pid).map_err(at)?.ok_or(None)?;
        let is_ours = match self.kind.reach {
            // The outer process keeps that number taken until it reaps, which is the last thing it does. So an outer process
            // alive after all this means that it has been the right number.
            Reach::PidNamespace => Ok(true),
            // Another one reaps it, and the owner lives on: then the number may have come to mean a later process, which
            // does not descend from this owner.
            Reach::Session => descends(hello.host_pid, self.outer_pid),
        };
        if self.outer.has_ended() || handle.has_ended() || !is_ours.map_err(at)? {
            return Err(None);
        }
        self.inner = Some(Watch::new(handle).map_err(at)?);
        let own = fs::metadata("/proc/self/ns/user").map_err(at)?.ino();
        let namespaces = namespaces(hello.user_namespace, hello.launcher_namespace, own).map_err(at)?;
        self.claim.stands(inner, namespaces).map_err(|source| Some(SandboxError::at("write down sandbox", source)))
    }

    /// Resolves when nothing of the sandbox is left, processes and files, and the outer process is reaped.
    pub(crate) async fn gone(&self) {
        self.outer.ended().await;
        // It ends last, so that whatever is in the group still has lost its owner.
        if let Some(group) = self.claim.group() {
            group.kill();
        }
        if self.kind.reach == Reach::Session && !self.claim.is_settled() && self.outer_was_killed() {
            self.sweep().await;
        }
        // It dies with an outer process that is killed, but later.
        if let Some(inner) = &self.inner {
            inner.ended().await;
        }
        self.try_reap();
        if let (Some(group), false) = (self.claim.group(), self.claim.is_settled()) {
            // Where that cannot be waited for, the node's keeper removes it.
            let _ = group.emptied().await;
        }
        self.claim.settle();
    }

    /// Tells whether the outer process, which has ended, did not end by itself: then it has not reaped what it owned.
    fn outer_was_killed(&self) -> bool {
        match self.status() {
            Ok(status) => status.is_some_and(|status| !status.exited()),
            // A process that ignores SIGCHLD leaves its children to the kernel, and is not told how they end.
            Err(_) => true,
        }
    }

    /// Returns the outer process's status if it has ended. It stays there to be reaped, and so its number, and that of its
    /// session and group, stays its own. An error means that it was reaped.
    fn status(&self) -> rustix::io::Result<Option<WaitIdStatus>> {
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::PidFd(self.outer.fd().as_fd()), how)
    }

    /// Kills what an outer process that was killed has left beside the pid namespace, until nothing is found.
    async fn sweep(&self) {
        loop {
            let killed = match self.claim.kill_rest() {
                Ok(killed) => killed,
                Err(error) => {
                    tracing::warn!(id = self.id(), %error, "rest of a sandbox was left to the node's keeper");
                    return;
                }
            };
            let Ok(watched) = killed.into_iter().map(Watch::new).collect::<io::Result<Vec<_>>>() else { return };
            if watched.is_empty() {
                return;
            }
            for process in watched {
                process.ended().await;
            }
        }
    }

    pub(crate) async fn shutdown(&self, grace: Duration) -> Result<(), SandboxError> {
        self.hang_up();
        if timeout(grace, self.gone()).await.is_ok() {
            return Ok(());
        }
        tracing::debug!(id = self.id(), ?grace, "sandbox outlived its grace");
        self.kill_inner();
        // A helper that serves the image and answers no more can keep it from dying; then its owner has to end that first.
        if let (Some(inner), Reach::PidNamespace) = (&self.inner, self.kind.reach) {
            timeout(REAP, inner.ended()).await.map_err(|_elapsed| self.left("process 1"))?;
        }
        if timeout(self.kind.collapse, self.gone()).await.is_ok() {
            return Ok(());
        }
        self.kill_outer();
        timeout(REAP, self.gone()).await.map_err(|_elapsed| self.left("outer process"))
    }

    fn left(&self, which: &str) -> SandboxError {
        SandboxError::Left { what: format!("{which} of {} (child {}) survives SIGKILL", self.id(), self.outer_pid) }
    }

    /// Ends a start that came to nothing, and returns the outer process's last words: its exit status.
    pub(crate) async fn collapse(&self) -> String {
        self.hang_up();
        if timeout(self.kind.collapse, self.gone()).await.is_err() {
            self.kill_outer();
            if timeout(REAP, self.gone()).await.is_err() {
                return "unkillable".to_owned();
            }
        }
        match self.child.lock().try_wait() {
            Ok(Some(status)) => status.to_string(),
            Ok(None) | Err(_) => "status unknown".to_owned(),
        }
    }

    /// Closes the channel for every handle of our end.
    fn hang_up(&self) {
        // Fails only when it is closed already.
        let _ = self.line.shutdown(Shutdown::Both);
    }

    fn kill_inner(&self) {
        if let Some(inner) = &self.inner {
            let _ = pidfd_send_signal(inner.fd(), Signal::KILL);
        }
    }

    /// Kills the outer process and whatever else is in its group, such as the children of a program that is no guest.
    fn kill_outer(&self) {
        if let Some(group) = self.claim.group() {
            group.kill();
        }
        let child = self.child.lock();
        // Unreaped, it keeps its number, which is its group's too; the lock keeps it unreaped, unless the kernel reaps for a
        // process that ignores SIGCHLD. So it goes last.
        if let (Some(pid), Ok(_)) = (child.id(), self.status())
            && let Some(group) = pid.try_into().ok().and_then(Pid::from_raw)
        {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = pidfd_send_signal(self.outer.fd(), Signal::KILL);
    }

    /// Reaps the outer process if it has ended.
    fn try_reap(&self) -> bool {
        matches!(self.child.lock().try_wait(), Ok(Some(_)))
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            return;
        }
        self.hang_up();
        if self.inner.is_some() {
            self.kill_inner(); // the outer one reaps it and ends; tokio's orphan queue reaps that
        } else if self.kind.reach == Reach::PidNamespace && !self.try_reap() {
            self.kill_outer(); // its parent-death signal takes the inner one along
        }
        // The owner of a launcher ends it in order, which takes no longer than a moment, and the node's keeper sees to that.
    }
}

/// Returns a guest's user namespace and its launcher's, which have to be the sandbox's alone.
fn namespaces(of_guest: u64, of_launcher: Option<u64>, own: u64) -> io::Result<Vec<u64>> {
    let namespaces: Vec<_> = std::iter::once(of_guest).chain(of_launcher).collect();
    // Whatever runs in them is to end with the sandbox.
    if namespaces.contains(&own) {
        return Err(io::Error::other("it shares this process's user namespace: its launcher has made none"));
    }
    Ok(namespaces)
}

/// A process's handle, registered with the reactor of a tokio runtime.
#[derive(Debug)]
struct Watch {
    /// There until the drop.
    handle: Option<AsyncFd<OwnedFd>>,
    maker: Maker,
}

impl Watch {
    fn new(handle: Handle) -> io::Result<Self> {
        Ok(Self { handle: Some(sys::watch(handle.into_fd())?), maker: Maker::this() })
    }

    fn registered(&self) -> &AsyncFd<OwnedFd> {
        self.handle.as_ref().expect("it is there until the drop")
    }

    fn fd(&self) -> &OwnedFd {
        self.registered().get_ref()
    }

    fn has_ended(&self) -> bool {
        has_ended(self.fd().as_fd())
    }

    /// Resolves when the process has ended: its handle is readable then, and stays so.
    async fn ended(&self) {
        if let Ok(mut ready) = self.registered().readable().await {
            return ready.retain_ready();
        }
        // The tokio runtime that it was registered with is gone; the caller's may be another.
        if Runtime::try_current().is_ok() {
            let again = self.fd().try_clone().and_then(sys::watch);
            if let Ok(again) = again
                && let Ok(mut ready) = again.readable().await
            {
                return ready.retain_ready();
            }
        }
        // The caller's runtime is going away, and the caller with it.
        std::future::pending::<()>().await;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            // A forked process shares the reactor's table with the maker, and would take the handle out of it.
            mem::forget(self.handle.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader},
        process::Stdio,
    };

    use prorl_core::hello::PROTOCOL;
    use tokio::process::Command;

    use super::*;
    use crate::{Node, NodeConfig};

    #[tokio::test]
    async fn a_process_that_is_not_the_owners_is_not_adopted() {
        let dir = tempfile::tempdir().unwrap();
        let guest = prorl_guest::Guest::install().unwrap();
        let config = NodeConfig { dir: dir.path().join("nodes"), ..NodeConfig::new(guest.path()) };
        let claim = Node::open(config).unwrap().claim("singularity").unwrap();
        let kind = Kind { name: "singularity", reach: Reach::Session, collapse: Duration::from_secs(1) };
        let mut stranger = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let (told, words) = io::pipe().unwrap();
        let mut owner = Command::new("setsid");
        owner.args(["sh", "-c", "sleep 1000 & echo $!; exec >&-; wait"]).stdout(words).stdin(Stdio::null());
        let child = owner.spawn().unwrap();
        drop(owner);
        let mut line = String::new();
        BufReader::new(told).read_line(&mut line).unwrap();
        let (ours, _theirs) = StdStream::pair().unwrap();
        let mut processes = Processes::new(claim, kind, child, ours).unwrap();
        let hello = |host_pid| Hello {
            protocol: PROTOCOL,
            version: String::new(),
            host_pid,
            pid_namespace: 1,
            user_namespace: 2,
            launcher_namespace: Some(3),
            uid: 1,
            fakeroot: None,
            bash: None,
            python: None,
        };
        assert!(matches!(processes.adopt(&hello(stranger.id())), Err(None)));
        assert!(processes.inner.is_none());
        processes.adopt(&hello(line.trim().parse().unwrap())).unwrap();
        processes.shutdown(Duration::ZERO).await.unwrap();
        assert!(stranger.try_wait().unwrap().is_none());
        stranger.kill().unwrap();
        stranger.wait().unwrap();
    }

    #[test]
    fn the_user_namespace_of_this_process_is_no_sandboxs() {
        assert_eq!(namespaces(5, Some(6), 4).unwrap(), [5, 6]);
        assert_eq!(namespaces(5, None, 4).unwrap(), [5]);
        for (of_guest, of_launcher) in [(5, Some(4)), (4, Some(4)), (4, None)] {
            assert!(namespaces(of_guest, of_launcher, 4).unwrap_err().to_string().contains("made none"));
        }
    }
}
