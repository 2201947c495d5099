//! How times become figures.

use std::time::Duration;

use serde::Serialize;

/// The spread of a number of times.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Spread {
    /// How many times there are.
    pub(super) n: usize,
    /// The time that half of them do not pass.
    pub(super) p50_ms: f64,
    /// The time that 19 of 20 do not pass.
    pub(super) p95_ms: f64,
    /// The time that 99 of 100 do not pass.
    pub(super) p99_ms: f64,
    min_ms: f64,
    max_ms: f64,
}

impl Spread {
    /// Sums up times; `None` of none.
    pub(super) fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1).copied().map(millis);
        Some(Self {
            n: times.len(),
            p50_ms: at(50)?,
            p95_ms: at(95)?,
            p99_ms: at(99)?,
            min_ms: at(0)?,
            max_ms: at(100)?,
        })
    }
}

/// Returns a time in milliseconds, to the microsecond.
pub(super) fn millis(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1e3)
}

/// Returns how many times as large the first is; `None` where there is nothing to compare with.
pub(super) fn ratio(ours: Option<f64>, theirs: Option<f64>) -> Option<f64> {
    let (ours, theirs) = ours.zip(theirs)?;
    (theirs > 0.0).then(|| rounded(ours / theirs))
}

/// Returns the middle one of some values, or the mean of the two in the middle, to three places; `None` of none.
pub(super) fn middle(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = values[(values.len() - 1) / 2];
    Some(rounded(f64::midpoint(lower, upper)))
}

/// Returns a figure to three places.
pub(super) fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_time_that_was_measured() {
        let spread = |range: std::ops::Range<u64>| Spread::of(range.rev().map(Duration::from_millis).collect());
        let hundred = Spread { n: 100, p50_ms: 50.0, p95_ms: 95.0, p99_ms: 99.0, min_ms: 1.0, max_ms: 100.0 };
        assert_eq!(spread(1..101), Some(hundred));
        let three = Spread { n: 3, p50_ms: 2.0, p95_ms: 3.0, p99_ms: 3.0, min_ms: 1.0, max_ms: 3.0 };
        assert_eq!(spread(1..4), Some(three));
        assert_eq!(
            spread(7..8),
            Some(Spread { n: 1, p50_ms: 7.0, p95_ms: 7.0, p99_ms: 7.0, min_ms: 7.0, max_ms: 7.0 })
        );
        assert_eq!(spread(0..0), None);
    }

    #[test]
    fn the_middle_is_between_the_two_in_the_middle() {
        assert_eq!(middle(vec![9.0, -1.0, 2.0]), Some(2.0));
        assert_eq!(middle(vec![4.0, 1.0, 100.0, 3.0]), Some(3.5));
        assert_eq!((middle(vec![1.0]), middle(Vec::new())), (Some(1.0), None));
    }

    #[test]
    fn nothing_is_compared_with_nothing() {
        assert_eq!(ratio(Some(3.0), Some(2.0)), Some(1.5));
        assert_eq!((ratio(Some(3.0), None), ratio(None, Some(2.0)), ratio(Some(3.0), Some(0.0))), (None, None, None));
    }
}
