//! What figures are meant to be.

use serde::{Serialize, Serializer};

/// A figure beside what it may be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Goal {
    #[serde(skip_serializing_if = "Option::is_none")]
    at_most: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at_least: Option<f64>,
    found: Option<f64>,
    /// Nothing where nothing was found.
    is_met: Option<bool>,
}

impl Goal {
    pub(super) fn at_most(bound: f64, found: Option<f64>) -> Self {
        Self { at_most: Some(bound), at_least: None, found, is_met: found.map(|found| found <= bound) }
    }

    pub(super) fn at_least(bound: f64, found: Option<f64>) -> Self {
        Self { at_most: None, at_least: Some(bound), found, is_met: found.map(|found| found >= bound) }
    }
}

/// All of a report, each with its name.
#[derive(Debug)]
pub(super) struct Goals(Vec<(String, Goal)>);

impl Goals {
    pub(super) fn new(goals: impl IntoIterator<Item = (String, Goal)>) -> Self {
        Self(goals.into_iter().collect())
    }

    /// Says of each whether it is met.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(name, Goal { at_most, at_least, found, is_met })| {
            let found = found.map_or_else(|| "not measured".to_owned(), |found| found.to_string());
            let verdict = match is_met {
                Some(true) => "met",
                Some(false) => "missed",
                None => "open",
            };
            let bound = at_most.map(|bound| format!("at most {bound}"));
            let bound = bound.or(at_least.map(|bound| format!("at least {bound}"))).unwrap_or_default();
            format!("goal {verdict}: {name} {bound}: {found}")
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
        assert_eq!(Goal::at_most(1.1, Some(1.1)).is_met, Some(true));
        assert_eq!(Goal::at_most(1.1, Some(1.2)).is_met, Some(false));
        assert_eq!(Goal::at_most(1.1, None).is_met, None);
        assert_eq!(Goal::at_least(8.0, Some(8.0)).is_met, Some(true));
        assert_eq!(Goal::at_least(8.0, Some(7.9)).is_met, Some(false));
        let goals = [("a", Some(1.0)), ("b", Some(2.0)), ("c", None)];
        let goals = goals.map(|(name, found)| (name.to_owned(), Goal::at_most(1.1, found)));
        let goals = Goals::new(goals.into_iter().chain([("d".to_owned(), Goal::at_least(3.0, Some(2.5)))]));
        let said = goals.lines().collect::<Vec<_>>().join("\n");
        assert_eq!(
            said,
            "goal met: a at most 1.1: 1\ngoal missed: b at most 1.1: 2\ngoal open: c at most 1.1: not measured\n\
             goal missed: d at least 3: 2.5"
        );
        let told = serde_json::to_value(&goals).unwrap();
        assert_eq!((&told["b"]["is_met"], &told["b"]["at_most"]), (&false.into(), &1.1.into()));
        assert!(told["b"].get("at_least").is_none(), "{told}");
    }
}
