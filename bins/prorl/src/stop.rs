//! TERM and INT.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

/// Waits for the first TERM or INT.
pub(crate) struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Takes the signals over from the system's default.
    pub(crate) fn take() -> anyhow::Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be handled")?;
        let interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be handled")?;
        Ok(Self { terminate, interrupt })
    }

    /// Waits for the next one; returns its name.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
