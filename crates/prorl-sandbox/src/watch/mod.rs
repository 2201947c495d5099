//! The watchdog of a node: what the kernel does not limit by itself is looked at often, and acted on.
//!
//! One thread serves all sandboxes of a node, and leaves what takes long to two others. A [`Post`] is its knowledge of one of them, with a part for each limit; what all
//! of them need to know of the machine is read once for a round. That is what makes idle sandboxes cheap: as long as the whole
//! machine has not handed out as much memory, as many processes or as much of its processors as one sandbox may still
//! take, nothing in that sandbox needs to be read.

mod cpus;
mod disk;
mod hidden;
mod log;
mod machine;
mod maps;
mod memory;
mod pids;
mod post;
mod scheduling;
mod shmem;
mod status;
mod survey;
mod table;
mod thread;
mod wall;

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
    time::Duration,
};

use parking_lot::Mutex;

pub(crate) use self::log::Log;
use self::{post::Post, thread::Shared};
use crate::{Limits, SandboxError, node::Maker};

/// Looks after the sandboxes of a node, in threads that there are from the first of them on.
#[derive(Debug)]
pub(crate) struct Watcher {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    maker: Maker,
}

impl Default for Watcher {
    fn default() -> Self {
        Self { shared: Arc::default(), threads: Mutex::default(), maker: Maker::this() }
    }
}

impl Watcher {
    /// Looks after a sandbox until what this returns is dropped.
    ///
    /// # Errors
    /// When there can be no more threads or open files.
    pub(crate) fn watch(&self, subject: Subject) -> Result<Watched, SandboxError> {
        let at = |source: io::Error| SandboxError::at("watch sandbox", source);
        let mut threads = self.threads.lock();
        for (name, pace) in &thread::THREADS[threads.len()..] {
            let shared = Arc::clone(&self.shared);
            self.shared.begin();
            let spawned = std::thread::Builder::new().name((*name).to_owned()).spawn(move || shared.run(*pace));
            threads.push(spawned.inspect_err(|_| self.shared.end()).map_err(at)?);
        }
        drop(threads);
        let post = Post::new(subject).map_err(at)?;
        let log = Arc::clone(post.log());
        Ok(Watched { id: self.shared.add(post), log, shared: Arc::clone(&self.shared), maker: Maker::this() })
    }

    /// Returns the processor time that its threads have taken so far.
    pub(crate) fn cpu_time(&self) -> Duration {
        Duration::from_nanos(self.shared.cpu_nanos.load(Ordering::Relaxed))
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // The threads are the maker's alone, and in a forked process their lock may be held for ever.
        if !self.maker.is_here() {
            return;
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        if !threads.is_empty() && self.shared.close() {
            for thread in threads {
                // One that panicked has ended too.
                let _ = thread.join();
            }
        }
    }
}

/// A sandbox as its watchdog sees it.
#[derive(Debug)]
pub(crate) struct Subject {
    /// Its `/proc`.
    pub(crate) proc: OwnedFd,
    /// The file system of its writable layer.
    pub(crate) layer: OwnedFd,
    /// That of its `/tmp`.
    pub(crate) tmp: OwnedFd,
    /// What it may use.
    pub(crate) limits: Limits,
    /// The number of its process 1 in this process's pid namespace.
    pub(crate) guest: u32,
    /// Whether it has a range of user ids, each of which the kernel counts processes for alone.
    pub(crate) has_range: bool,
}

/// That a sandbox is looked after. Dropped, it is no longer.
#[derive(Debug)]
pub(crate) struct Watched {
    id: u64,
    log: Arc<Log>,
    shared: Arc<Shared>,
    maker: Maker,
}

impl Watched {
    /// Returns what is noted of the sandbox.
    pub(crate) fn log(&self) -> &Arc<Log> {
        &self.log
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // As with the watcher.
        if self.maker.is_here() {
            self.shared.remove(self.id);
        }
    }
}
