//! What the figures are meant to be.

use serde::{Serialize, Serializer};

use super::{cost, neighbours, overshoot, watchdog};

/// A figure beside what it may be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Goal {
    at_most: f64,
    found: Option<f64>,
    /// Nothing where nothing was found.
    is_met: Option<bool>,
}

impl Goal {
    fn new(at_most: f64, found: Option<f64>) -> Self {
        Self { at_most, found, is_met: found.map(|found| found <= at_most) }
    }
}

/// All of them, each with its name.
#[derive(Debug)]
pub(super) struct Goals(Vec<(String, Goal)>);

impl Goals {
    pub(super) fn of(
        cost: &cost::Figures,
        watchdog: Option<&watchdog::Figures>,
        overshoot: Option<&overshoot::Figures>,
        neighbours: &neighbours::Figures,
    ) -> Self {
        let watchdog = watchdog.map(|figures| figures.percent_for_20);
        let overshoot = overshoot.and_then(overshoot::Figures::most_by_limit);
        let mut all = vec![
            ("start_more_ms".to_owned(), Goal::new(1.0, cost.start_more_ms)),
            ("call_with_by_without".to_owned(), Goal::new(1.05, cost.call_with_by_without)),
            ("watchdog_percent_for_20".to_owned(), Goal::new(0.3, watchdog)),
            ("overshoot_peak_by_limit".to_owned(), Goal::new(1.5, overshoot)),
        ];
        let p95 =
            |beside: &neighbours::Beside| (format!("{}_p95_by_alone", beside.hog), Goal::new(1.1, beside.p95_by_alone));
        all.extend(neighbours.beside.iter().map(p95));
        Self(all)
    }

    /// Says of each whether it is met.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(name, Goal { at_most, found, is_met })| {
            let found = found.map_or_else(|| "not measured".to_owned(), |found| found.to_string());
            let verdict = match is_met {
                Some(true) => "met",
                Some(false) => "missed",
                None => "open",
            };
            format!("goal {verdict}: {name} at most {at_most}: {found}")
        })
    }
}

impl Serialize for Goals {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, goal)| (name, goal)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_without_a_figure_is_neither_met_nor_missed() {
        assert_eq!(Goal::new(1.1, Some(1.1)).is_met, Some(true));
        assert_eq!(Goal::new(1.1, Some(1.2)).is_met, Some(false));
        assert_eq!(Goal::new(1.1, None).is_met, None);
        let goals = [("a", Some(1.0)), ("b", Some(2.0)), ("c", None)];
        let goals = Goals(goals.map(|(name, found)| (name.to_owned(), Goal::new(1.1, found))).into());
        let said = goals.lines().collect::<Vec<_>>().join("\n");
        assert_eq!(
            said,
            "goal met: a at most 1.1: 1\ngoal missed: b at most 1.1: 2\ngoal open: c at most 1.1: not measured"
        );
        assert_eq!(serde_json::to_value(&goals).unwrap()["b"]["is_met"], false);
    }
}
