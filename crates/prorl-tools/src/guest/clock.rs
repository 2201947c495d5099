//! The guest's clock. There is no tokio in a guest, so no clock of its own to pause either.

use std::time::Duration;

/// A point in time that never goes back.
#[expect(clippy::disallowed_types, reason = "the guest runs without tokio")]
pub(super) type Instant = std::time::Instant;

/// Returns now.
pub(super) fn now() -> Instant {
    Instant::now()
}

/// Returns the point `millis` from `start`; a hundred years where that is more than the clock can hold.
pub(super) fn after(start: Instant, millis: u64) -> Instant {
    const CENTURY: Duration = Duration::from_hours(100 * 365 * 24);
    start.checked_add(Duration::from_millis(millis).min(CENTURY)).unwrap_or(start)
}
