//! Time for processes without tokio.

use std::time::Duration;

use nix::{
    poll::PollTimeout,
    sys::time::TimeValLike as _,
    time::{ClockId, clock_gettime},
};
use rustix::event::Timespec;

/// The longest single wait: `poll` takes milliseconds, up to 24 days of them.
const LONGEST_WAIT: Duration = Duration::from_hours(24);

/// A span of time that has begun.
pub(super) struct Clock {
    begun: Duration,
    span: Duration,
}

impl Clock {
    /// Starts it.
    pub(super) fn start(span: Duration) -> Self {
        Self { begun: now(), span }
    }

    /// Returns how long a wait for its end may be; a long span takes several.
    pub(super) fn left(&self) -> PollTimeout {
        // One more, because a wait is cut to whole milliseconds.
        let left = self.rest().min(LONGEST_WAIT);
        let wait = if left.is_zero() { left } else { left + Duration::from_millis(1) };
        wait.try_into().unwrap_or(PollTimeout::MAX)
    }

    /// Returns the same for those calls that take it otherwise.
    pub(super) fn timespec(&self) -> Timespec {
        Timespec::try_from(self.rest().min(LONGEST_WAIT)).unwrap_or_default()
    }

    /// Tells whether it is over.
    pub(super) fn is_over(&self) -> bool {
        self.rest().is_zero()
    }

    fn rest(&self) -> Duration {
        self.span.saturating_sub(now().saturating_sub(self.begun))
    }
}

/// Time since the machine's start. The clock is there on every Linux, and one that failed would only cut waits short.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(Duration::MAX, |time| Duration::from_nanos(u64::try_from(time.num_nanoseconds()).unwrap_or_default()))
}
