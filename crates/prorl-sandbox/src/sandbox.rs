use std::{
    any::Any,
    io,
    net::{Ipv4Addr, Shutdown},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream as StdStream,
    },
    path::PathBuf,
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use prorl_core::{SandboxHandle, hello::Hello};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, pidfd_send_signal, waitid,
};
use tokio::{io::unix::AsyncFd, net::UnixStream, process::Child, time::timeout};

use crate::{
    SandboxError,
    node::{Claim, Reach},
    start::Kind,
    sys,
};

/// How long the kernel may take to empty a namespace whose process 1 was killed.
const REAP: Duration = Duration::from_secs(5);

/// What is known of a sandbox that stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Name of the runtime that made it.
    pub runtime: &'static str,
    /// What the guest said: its process id, namespaces, user and programs.
    pub hello: Hello,
    /// Process id of the guest's outer process, a child of this process in a process group of its own.
    pub outer_pid: u32,
    /// How long its start took, from its place among the starting to its hello.
    pub start_time: Duration,
    /// Its own address, where it shares the host's network: unique on this machine until nothing of the sandbox is left.
    pub loopback: Option<Ipv4Addr>,
    /// Its own folder on the host, if it needed one. It is removed with the sandbox.
    pub run_dir: Option<PathBuf>,
}

/// A sandbox that stands. Dropping it kills everything inside without waiting; [`shutdown`](Self::shutdown) waits and proves.
#[derive(Debug)]
pub struct Sandbox {
    facts: Facts,
    channel: Option<UnixStream>,
    processes: Processes,
}

impl Sandbox {
    pub(crate) fn new(facts: Facts, channel: UnixStream, processes: Processes) -> Self {
        Self { facts, channel: Some(channel), processes }
    }

    /// Returns the sandbox's name, unique on this node while this process lives.
    pub fn id(&self) -> &str {
        self.processes.id()
    }

    /// Returns what is known of it.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Gives out the open channel to the guest, positioned after its hello; once.
    ///
    /// Closing it does not end the sandbox, because the sandbox keeps a handle of its own to shut it down by.
    pub fn take_channel(&mut self) -> Option<UnixStream> {
        self.channel.take()
    }

    /// Closes the channel, at whose end the guest ends everything inside; kills after `grace`; returns when the kernel
    /// has said that nothing is left in the pid namespace. Calling it twice, or at once, is harmless.
    ///
    /// # Errors
    /// [`SandboxError::Left`] when something survives a kill, such as a process in an uninterruptible wait.
    ///
    /// # Cancel safety
    /// A dropped call has closed the channel, which is enough for the guest to end; the sandbox can be shut down again.
    pub async fn shutdown(&self, grace: Duration) -> Result<(), SandboxError> {
        self.processes.shutdown(grace).await
    }

    /// Waits until nothing of the sandbox runs any more, whatever ended it.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn wait_dead(&self) {
        self.processes.gone().await;
    }
}

#[async_trait]
impl SandboxHandle for Sandbox {
    fn name(&self) -> &str {
        self.id()
    }

    async fn close(&self, grace: Duration) -> Result<(), String> {
        self.shutdown(grace).await.map_err(|error| error.to_string())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

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
    outer: AsyncFd<OwnedFd>,
    inner: Option<AsyncFd<OwnedFd>>,
    /// Our end of the channel once more, to shut it down when the other handle was given away.
    line: StdStream,
}

impl Processes {
    /// Takes ownership of a fresh child, which has not been told yet what to do.
    pub(crate) fn new(claim: Claim, kind: Kind, mut child: Child, line: StdStream) -> Result<Self, SandboxError> {
        let outer_pid = child.id().unwrap_or_default();
        // The number is the child's until it is waited for, which nobody has done yet.
        let watched = open(outer_pid).and_then(sys::watch);
        match watched.and_then(|outer| claim.spawned(outer_pid, kind.reach).map(|()| outer)) {
            Ok(outer) => Ok(Self { claim, kind, outer_pid, child: Mutex::new(child), outer, inner: None, line }),
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

    /// Returns the sandbox's own folder if it has one.
    pub(crate) fn run_dir(&self) -> Option<PathBuf> {
        self.claim.made_run_dir()
    }

    pub(crate) fn outer_pid(&self) -> u32 {
        self.outer_pid
    }

    /// Takes a handle of the inner process, which the hello came from, and writes it down. `Err(None)`: it is dead already.
    pub(crate) fn adopt(&mut self, hello: &Hello) -> Result<(), Option<SandboxError>> {
        let handle = match open(hello.host_pid) {
            Ok(handle) => handle,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(None),
            Err(error) => return Err(Some(SandboxError::at("watch process 1", error))),
        };
        // The outer process keeps that number taken until it reaps, which is the last thing it does. As numbers are
        // handed out in a cycle, an outer process alive after the open means that the handle is the right one.
        if self.try_reap() {
            return Err(None);
        }
        self.inner = Some(sys::watch(handle).map_err(|source| SandboxError::at("watch process 1", source))?);
        let namespaces = std::iter::once(hello.user_namespace).chain(hello.launcher_namespace).collect();
        self.claim
            .stands(hello.host_pid, namespaces)
            .map_err(|source| Some(SandboxError::at("write down sandbox", source)))
    }

    /// Resolves when nothing of the sandbox is left, processes and files, and the outer process is reaped.
    pub(crate) async fn gone(&self) {
        ended(&self.outer).await;
        if self.kind.reach == Reach::Session && self.outer_was_killed() {
            self.sweep().await;
        }
        // It dies with an outer process that is killed, but later.
        if let Some(inner) = &self.inner {
            ended(inner).await;
        }
        self.try_reap();
        self.claim.settle();
    }

    /// Tells whether the outer process, which has ended, did not end by itself: then it has not reaped what it owned. Its
    /// status stays there to be reaped, and so its number, and that of its session, stays its own.
    fn outer_was_killed(&self) -> bool {
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(self.outer.get_ref().as_fd()), how);
        // An error means that it was reaped, which is done after this.
        matches!(status, Ok(Some(status)) if !status.exited())
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
            let Ok(watched) =
                killed.into_iter().map(|handle| sys::watch(handle.into_fd())).collect::<io::Result<Vec<_>>>()
            else {
                return;
            };
            if watched.is_empty() {
                return;
            }
            for process in watched {
                ended(&process).await;
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
            timeout(REAP, ended(inner)).await.map_err(|_elapsed| self.left("process 1"))?;
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
            let _ = pidfd_send_signal(inner.get_ref(), Signal::KILL);
        }
    }

    /// Kills the outer process and whatever else is in its group, such as the children of a program that is no guest.
    fn kill_outer(&self) {
        let _ = pidfd_send_signal(self.outer.get_ref(), Signal::KILL);
        let child = self.child.lock();
        // Unreaped, it keeps its number, which is its group's too; the lock keeps it unreaped.
        if let Some(group) = child.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?)) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    /// Reaps the outer process if it has ended.
    fn try_reap(&self) -> bool {
        matches!(self.child.lock().try_wait(), Ok(Some(_)))
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.hang_up();
        if self.inner.is_some() {
            self.kill_inner(); // the outer one reaps it and ends; tokio's orphan queue reaps that
        } else if self.kind.reach == Reach::PidNamespace && !self.try_reap() {
            self.kill_outer(); // its parent-death signal takes the inner one along
        }
        // The owner of a launcher ends it in order, which takes no longer than a moment, and the node's keeper sees to that.
    }
}

fn open(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Resolves when the process has ended: its handle is readable then, and stays so.
async fn ended(handle: &AsyncFd<OwnedFd>) {
    match handle.readable().await {
        Ok(mut ready) => ready.retain_ready(),
        // The tokio runtime is going away, and the caller with it.
        Err(_) => std::future::pending().await,
    }
}
