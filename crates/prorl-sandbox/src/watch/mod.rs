//! The watchdog of a node: what the kernel does not limit by itself is looked at often, and acted on.

use std::{os::fd::OwnedFd, sync::Arc};

use parking_lot::Mutex;

use crate::{Exceeded, Limits, SandboxError};

/// Looks after the sandboxes of a node.
#[derive(Debug, Default)]
pub(crate) struct Watcher {}

impl Watcher {
    /// Looks after a sandbox until what this returns is dropped.
    ///
    /// # Errors
    /// When there can be no more threads.
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "it is about to")]
    pub(crate) fn watch(&self, _subject: Subject) -> Result<Watched, SandboxError> {
        Ok(Watched { log: Arc::default() })
    }
}

/// A sandbox as its watchdog sees it.
#[derive(Debug)]
#[expect(dead_code, reason = "it is about to be")]
pub(crate) struct Subject {
    /// Its `/proc`.
    pub(crate) proc: OwnedFd,
    /// The file system of its writable layer.
    pub(crate) layer: OwnedFd,
    /// That of its `/tmp`.
    pub(crate) tmp: OwnedFd,
    /// What it may use.
    pub(crate) limits: Limits,
}

/// That a sandbox is looked after. Dropped, it is no longer.
#[derive(Debug)]
pub(crate) struct Watched {
    log: Arc<Log>,
}

impl Watched {
    /// Returns what is noted of the sandbox.
    pub(crate) fn log(&self) -> &Arc<Log> {
        &self.log
    }
}

/// What a sandbox wanted more of than it may have, until somebody asks.
#[derive(Debug, Default)]
pub(crate) struct Log {
    entries: Mutex<Vec<Exceeded>>,
}

impl Log {
    pub(crate) fn take(&self) -> Vec<Exceeded> {
        std::mem::take(&mut self.entries.lock())
    }
}
