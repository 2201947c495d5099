//! What happens to this process while a command runs.

use std::fs;

use anyhow::Context;
use nix::libc::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGWINCH};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// To end the sandbox; with the signal's number.
    End(i32),
    /// To interrupt the command.
    Interrupt,
    /// To look at the size of the terminal.
    Resized,
    /// This process goes on after it was stopped; a shell may have changed the terminal meanwhile.
    Continued,
}

/// The signals that a session listens to, taken over from the system's default; but those that this process was started to
/// ignore, as by `nohup` or in the background of a script, stay ignored.
pub(super) struct Signals {
    terminate: Option<Signal>,
    hang_up: Option<Signal>,
    quit: Option<Signal>,
    interrupt: Option<Signal>,
    window: Option<Signal>,
    continued: Option<Signal>,
}

impl Signals {
    pub(super) fn take() -> anyhow::Result<Self> {
        let ignored = ignored();
        let take = |number: i32| {
            if ignored >> (number - 1) & 1 == 1 {
                return Ok(None);
            }
            signal(SignalKind::from_raw(number)).map(Some).with_context(|| format!("signal {number} cannot be handled"))
        };
        Ok(Self {
            terminate: take(SIGTERM)?,
            hang_up: take(SIGHUP)?,
            quit: take(SIGQUIT)?,
            interrupt: take(SIGINT)?,
            window: take(SIGWINCH)?,
            continued: take(SIGCONT)?,
        })
    }

    /// Waits for the next one.
    pub(super) async fn next(&mut self) -> Event {
        tokio::select! {
            () = received(&mut self.terminate) => Event::End(SIGTERM),
            () = received(&mut self.hang_up) => Event::End(SIGHUP),
            () = received(&mut self.quit) => Event::End(SIGQUIT),
            () = received(&mut self.interrupt) => Event::Interrupt,
            () = received(&mut self.window) => Event::Resized,
            () = received(&mut self.continued) => Event::Continued,
        }
    }

    /// Waits for one that ends a sandbox without a command; returns its number.
    pub(super) async fn end(&mut self) -> i32 {
        loop {
            match self.next().await {
                Event::End(number) => return number,
                Event::Interrupt => return SIGINT,
                Event::Resized | Event::Continued => {}
            }
        }
    }
}

/// Resolves when a signal comes; never for one that is ignored.
async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

/// Returns the signals that this process ignores, one bit each; none where the kernel does not say.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
