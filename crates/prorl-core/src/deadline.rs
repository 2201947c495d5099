//! The deadline tree: job → stage → LLM or tool call → kill grace → clean-up.
//!
//! Time is counted on a clock of the job's own that stands still while the job waits in a queue, so a [`Deadline`] is a
//! point on that clock and no calendar or system time is read here. The tree has one rule: a child never ends after its
//! parent. It is kept by construction, since [`Deadline::child`] is the only way down.

use std::time::Duration;

/// The point on a job's counted clock at which some work must have ended.
///
/// ```
/// use std::time::Duration;
/// use prorl_core::Deadline;
///
/// let job = Deadline::after(Duration::ZERO, Duration::from_secs(300));
/// let now = Duration::from_secs(290);
/// let tool_call = job.child(now, Some(Duration::from_secs(120)));
/// assert_eq!(tool_call.remaining(now), Duration::from_secs(10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Duration);

impl Deadline {
    /// Returns the deadline `limit` after `now` on the counted clock; the root of a tree.
    #[must_use]
    pub fn after(now: Duration, limit: Duration) -> Self {
        Self(now.saturating_add(limit))
    }

    /// Returns the deadline of a part of this work: `limit` from `now`, or this one when that is earlier or no limit is given.
    #[must_use]
    pub fn child(self, now: Duration, limit: Option<Duration>) -> Self {
        limit.map_or(self, |limit| self.min(Self::after(now, limit)))
    }

    /// Returns the same deadline with `reserve` kept free before it, for a kill grace or clean-up; never before `now`.
    #[must_use]
    pub fn reserve(self, now: Duration, reserve: Duration) -> Self {
        Self(self.0.saturating_sub(reserve).max(now.min(self.0)))
    }

    /// Returns the time left at `now`; zero once it has passed.
    #[must_use]
    pub fn remaining(self, now: Duration) -> Duration {
        self.0.saturating_sub(now)
    }

    /// Tells whether the deadline has passed at `now`.
    #[must_use]
    pub fn is_past(self, now: Duration) -> bool {
        now >= self.0
    }

    /// Returns the point on the counted clock.
    #[must_use]
    pub fn at(self) -> Duration {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_descendant_outlives_an_ancestor(
            root in 0_u64..10_000,
            steps in proptest::collection::vec((0_u64..5_000, proptest::option::of(0_u64..20_000), 0_u64..500), 1..12),
        ) {
            let ms = Duration::from_millis;
            let mut deadline = Deadline::after(Duration::ZERO, ms(root));
            let mut now = Duration::ZERO;
            for (passed, limit, reserve) in steps {
                now += ms(passed);
                let child = deadline.child(now, limit.map(ms)).reserve(now, ms(reserve));
                prop_assert!(child <= deadline);
                prop_assert!(child.remaining(now) <= deadline.remaining(now));
                if let Some(limit) = limit {
                    prop_assert!(child.remaining(now) <= ms(limit));
                }
                deadline = child;
            }
        }
    }

    #[test]
    fn a_child_without_a_limit_has_its_parents() {
        let parent = Deadline::after(Duration::from_secs(1), Duration::from_secs(2));
        assert_eq!(parent.child(Duration::from_secs(2), None), parent);
        assert!(parent.is_past(Duration::from_secs(3)));
    }
}
