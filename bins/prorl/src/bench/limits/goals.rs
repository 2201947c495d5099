//! What the figures are meant to be.

use super::{cost, neighbours, overshoot, watchdog};
use crate::bench::goals::{Goal, Goals};

pub(super) fn of(
    cost: &cost::Figures,
    watchdog: Option<&watchdog::Figures>,
    overshoot: Option<&overshoot::Figures>,
    neighbours: &neighbours::Figures,
) -> Goals {
    let watchdog = watchdog.map(|figures| figures.percent_for_20);
    let overshoot = overshoot.and_then(overshoot::Figures::most_by_limit);
    let all = [
        ("start_more_ms".to_owned(), Goal::at_most(1.0, cost.start_more_ms)),
        ("call_with_by_without".to_owned(), Goal::at_most(1.05, cost.call_with_by_without)),
        ("watchdog_percent_for_20".to_owned(), Goal::at_most(0.3, watchdog)),
        ("overshoot_peak_by_limit".to_owned(), Goal::at_most(1.5, overshoot)),
    ];
    let p95 =
        |beside: &neighbours::Beside| (format!("{}_p95_by_alone", beside.hog), Goal::at_most(1.1, beside.p95_by_alone));
    Goals::new(all.into_iter().chain(neighbours.beside.iter().map(p95)))
}
