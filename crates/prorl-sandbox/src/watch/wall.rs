//! The time that a sandbox's processes have.

use std::time::Duration;

use tokio::time::Instant;

use super::{log::Log, table::Table};
use crate::Exceeded;

/// How often what was started meanwhile is ended.
const AGAIN: Duration = Duration::from_millis(100);

/// How often while there is something.
const SOON: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Wall {
    limit: Duration,
    end: Instant,
    is_told: bool,
}

impl Wall {
    pub(super) fn new(limit: Duration, now: Instant) -> Option<Self> {
        // One that is beyond all time is none.
        Some(Self { limit, end: now.checked_add(limit)?, is_told: false })
    }

    /// Ends everything once it is time, and returns how long it can wait.
    pub(super) fn look(&mut self, now: Instant, table: &Table, log: &Log) -> Duration {
        if now < self.end {
            return self.end.duration_since(now);
        }
        if !self.is_told {
            self.is_told = true;
            log.note(Exceeded::Wall { limit: self.limit });
        }
        if table.kill_all(|_pid| true) > 0 { SOON } else { AGAIN }
    }
}
