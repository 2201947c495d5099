//! A sandbox that stands, and what is held until nothing of it is left.

mod processes;

use std::{
    any::Any,
    mem,
    net::{Ipv4Addr, TcpListener},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use prorl_core::{SandboxHandle, hello::Hello};
use tokio::net::UnixStream;

pub(crate) use self::processes::Processes;
use crate::{
    Exceeded, Image, SandboxError, SandboxSpec,
    cpus::Share,
    freeze::Freezable,
    store::Layer,
    watch::{Log, Watched},
};

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
///
/// It belongs to the process that started it. A copy that a forked process has is nobody's: dropping it there does nothing,
/// and nothing else is to be done with it.
#[derive(Debug)]
pub struct Sandbox {
    facts: Facts,
    channel: Option<UnixStream>,
    pub(crate) processes: Processes,
    /// What it stands on and is held to, until nothing of it is left.
    held: Mutex<Option<Held>>,
    /// What it wanted more of than it may have.
    log: Arc<Log>,
    proxy: Option<TcpListener>,
    /// What it can be frozen by, until it ends.
    pub(crate) freezable: Mutex<Option<Freezable>>,
    /// Whether it was ever meant to be.
    pub(crate) is_freezable: bool,
}

/// What is let go of with the last process.
#[derive(Debug)]
pub(crate) struct Held {
    #[expect(dead_code, reason = "held for its drop")]
    pub(crate) ground: Ground,
    pub(crate) watched: Watched,
    /// The processors that it runs on, if it is limited to some.
    #[expect(dead_code, reason = "held for its drop")]
    pub(crate) processors: Option<Share>,
}

/// An image and layers that a store may remove when nobody holds them.
#[derive(Debug)]
pub(crate) struct Ground {
    _image: Image,
    _layers: Vec<Layer>,
}

impl Ground {
    pub(crate) fn of(spec: &SandboxSpec) -> Self {
        Self { _image: spec.image.clone(), _layers: spec.layers.clone() }
    }
}

impl Sandbox {
    pub(crate) fn new(
        facts: Facts,
        channel: UnixStream,
        processes: Processes,
        held: Held,
        proxy: Option<TcpListener>,
        freezable: Option<Freezable>,
    ) -> Self {
        let is_freezable = freezable.is_some();
        let log = Arc::clone(held.watched.log());
        let (held, freezable) = (Mutex::new(Some(held)), Mutex::new(freezable));
        Self { facts, channel: Some(channel), processes, held, log, proxy, freezable, is_freezable }
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

    /// Gives out the socket that listens inside at [`proxy_port`](SandboxSpec::proxy_port); once, and nothing where none was asked
    /// for. Whatever connects to it inside is accepted here.
    pub fn take_proxy(&mut self) -> Option<TcpListener> {
        self.proxy.take()
    }

    /// Returns which limits were exceeded since this was last asked, in order: to be told with the result of what ran
    /// meanwhile. The same thing that goes on is told again only after a while.
    pub fn take_exceeded(&self) -> Vec<Exceeded> {
        self.take_exceeded_after("")
    }

    /// As [`take_exceeded`](Self::take_exceeded), after programs have written `output`. A program that is refused a process or a
    /// thread mostly says so and ends, and then nothing else shows any more that the limit was reached.
    pub fn take_exceeded_after(&self, output: &str) -> Vec<Exceeded> {
        let mut exceeded = self.log.take(output);
        for of_group in self.processes.take_exceeded() {
            if !exceeded.contains(&of_group) {
                exceeded.push(of_group);
            }
        }
        exceeded
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
        drop(self.freezable.lock().take());
        self.processes.shutdown(grace).await?;
        drop(self.held.lock().take());
        Ok(())
    }

    /// Waits until nothing of the sandbox runs any more, whatever ended it.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn wait_dead(&self) {
        self.processes.gone().await;
        drop(self.freezable.lock().take());
        drop(self.held.lock().take());
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if !self.processes.is_ours() {
            // As with the handle of a process.
            mem::forget(self.channel.take());
        }
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
