//! What limits cost whoever keeps to them.

use std::time::Duration;

use prorl_sandbox::Limits;
use serde::Serialize;
use tokio::time::Instant;

use super::{
    Args,
    live::{ALL, Ground, bash},
};
use crate::{
    bench::figures::{Spread, middle, ratio},
    output,
};

/// Rounds that are not counted: they warm caches up.
const WARM_UPS: u32 = 3;

/// A sandbox with all limits on beside one without any.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// From the call to the hello.
    start: Pair,
    /// The middle one of the differences between neighbours, which may be below nothing.
    pub(super) start_more_ms: Option<f64>,
    /// An `echo` in the session's shell.
    call: Pair,
    /// The p50 of a call with limits by that of one without.
    pub(super) call_with_by_without: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Pair {
    with: Option<Spread>,
    without: Option<Spread>,
}

/// Times with and without limits, each pair taken one right after the other.
#[derive(Default)]
struct Pairs {
    with: Vec<Duration>,
    without: Vec<Duration>,
}

impl Pairs {
    /// Returns the middle one of what limits added, in milliseconds.
    fn middle_more_ms(&self) -> Option<f64> {
        let pairs = self.with.iter().zip(&self.without);
        middle(pairs.map(|(with, without)| (with.as_secs_f64() - without.as_secs_f64()) * 1e3).collect())
    }

    fn spreads(self) -> Pair {
        Pair { with: Spread::of(self.with), without: Spread::of(self.without) }
    }
}

/// Who goes first in a round: each as often as the other, so that being second is no one's part.
fn turns(round: u32) -> [bool; 2] {
    let limited_first = round.is_multiple_of(2);
    [limited_first, !limited_first]
}

pub(super) async fn measure(args: &Args, ground: &Ground) -> anyhow::Result<Figures> {
    let bar = output::progress(u64::from(args.n), "starts");
    let mut starts = Pairs::default();
    for round in 0..args.n + WARM_UPS {
        for is_limited in turns(round) {
            let begun = Instant::now();
            let live = ground.start(if is_limited { ALL } else { Limits::NONE }).await?;
            let took = begun.elapsed();
            live.end().await?;
            if round >= WARM_UPS {
                if is_limited { &mut starts.with } else { &mut starts.without }.push(took);
            }
        }
        if round >= WARM_UPS {
            bar.inc(1);
        }
    }
    bar.finish_and_clear();

    let bar = output::progress(u64::from(args.calls), "calls");
    let (limited, free) = (ground.start(ALL).await?, ground.start(Limits::NONE).await?);
    let mut calls = Pairs::default();
    for round in 0..args.calls + WARM_UPS {
        for is_limited in turns(round) {
            let took = bash(if is_limited { &limited.tools } else { &free.tools }, "echo called").await?;
            if round >= WARM_UPS {
                if is_limited { &mut calls.with } else { &mut calls.without }.push(took);
            }
        }
        if round >= WARM_UPS {
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    limited.end().await?;
    free.end().await?;

    let start_more_ms = starts.middle_more_ms();
    let call = calls.spreads();
    let p50 = |spread: &Option<Spread>| spread.as_ref().map(|spread| spread.p50_ms);
    let call_with_by_without = ratio(p50(&call.with), p50(&call.without));
    Ok(Figures { start: starts.spreads(), start_more_ms, call, call_with_by_without })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_limits_add_is_the_middle_difference_of_pairs() {
        let millis = |all: &[u64]| all.iter().copied().map(Duration::from_millis).collect();
        let pairs = Pairs { with: millis(&[12, 40, 21]), without: millis(&[10, 10, 22]) };
        assert_eq!(pairs.middle_more_ms(), Some(2.0));
        assert_eq!(Pairs { with: millis(&[1]), without: millis(&[3]) }.middle_more_ms(), Some(-2.0));
        assert_eq!(Pairs::default().middle_more_ms(), None);
    }

    #[test]
    fn each_goes_first_as_often_as_the_other() {
        assert_eq!((turns(0), turns(1)), ([true, false], [false, true]));
    }
}
