//! Who passes what.

use std::fmt::Write as _;

use serde::Serialize;

use super::{
    case::Suite,
    run::{Outcome, Verdict},
};

/// What became of a case, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// Everything was as it must be.
    Passed,
    /// Something was not.
    Failed,
    /// It has nothing that the case could be about.
    Unsupported,
    /// It is not there.
    Absent,
}

impl Mark {
    fn of(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Passed => Self::Passed,
            Verdict::Failed(_) => Self::Failed,
            Verdict::Unsupported => Self::Unsupported,
            Verdict::Absent(_) => Self::Absent,
        }
    }

    fn sign(self) -> &'static str {
        match self {
            Self::Passed => "yes",
            Self::Failed => "**no**",
            Self::Unsupported => "n/a",
            Self::Absent => "",
        }
    }
}

/// What an implementation did with the cases.
#[derive(Debug, Serialize)]
pub struct Results {
    /// Its name.
    pub name: String,
    /// Its version, if it says.
    pub version: Option<String>,
    /// Why it was not held to anything, or to one of the suites.
    pub absent: Option<String>,
    /// Each case that it was held to.
    pub cases: Vec<Line>,
}

/// A case of an implementation.
#[derive(Debug, Serialize)]
pub struct Line {
    /// The suite.
    pub suite: Suite,
    /// The case.
    pub case: String,
    /// What became of it.
    pub mark: Mark,
    /// What was wrong, if something was.
    pub reason: Option<String>,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
}

impl Results {
    /// Sums up outcomes of an implementation.
    pub fn of(name: impl Into<String>, version: Option<String>, outcomes: Vec<Outcome>) -> Self {
        let mut absent = None;
        let mut cases = Vec::with_capacity(outcomes.len());
        for Outcome { suite, case, verdict, took } in outcomes {
            let mark = Mark::of(&verdict);
            match verdict {
                Verdict::Absent(reason) => absent = Some(reason),
                verdict => {
                    let reason = if let Verdict::Failed(reason) = verdict { Some(reason) } else { None };
                    let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
                    cases.push(Line { suite, case, mark, reason, took_ms });
                }
            }
        }
        Self { name: name.into(), version, absent, cases }
    }

    /// Returns how many cases of a suite came out like this.
    pub fn count(&self, suite: Suite, mark: Mark) -> usize {
        self.cases.iter().filter(|line| line.suite == suite && line.mark == mark).count()
    }

    fn mark(&self, suite: Suite, case: &str) -> Mark {
        let is_it = |line: &&Line| line.suite == suite && line.case == case;
        self.cases.iter().find(is_it).map_or(Mark::Absent, |line| line.mark)
    }

    /// Returns passed of those that could be, or nothing where it has no such tool.
    fn sum(&self, suite: Suite) -> String {
        let n = |mark| self.count(suite, mark);
        match n(Mark::Passed) + n(Mark::Failed) {
            0 => String::new(),
            of => format!("{} of {of}", n(Mark::Passed)),
        }
    }
}

/// Results of several implementations side by side.
#[derive(Debug, Serialize)]
pub struct Report {
    /// One after the other; ours first.
    pub subjects: Vec<Results>,
}

impl Report {
    /// Returns a table in Markdown: a line for each suite, and one for each case.
    pub fn markdown(&self) -> String {
        let held: Vec<&Results> = self.subjects.iter().filter(|one| !one.cases.is_empty()).collect();
        let mut text = String::from("| case | what is promised |");
        for one in &held {
            let version = one.version.as_deref().map(|version| format!(" {version}")).unwrap_or_default();
            let _written = write!(text, " {}{version} |", one.name);
        }
        text.push_str("\n| --- | --- |");
        text.push_str(&" --- |".repeat(held.len()));
        text.push('\n');
        for suite in Suite::ALL {
            let cases = suite.cases();
            if !held.iter().any(|one| one.cases.iter().any(|line| line.suite == suite)) {
                continue;
            }
            let _written = write!(text, "| **{}** | {} cases |", suite.name(), cases.len());
            for one in &held {
                let _written = write!(text, " {} |", one.sum(suite));
            }
            text.push('\n');
            for case in &cases {
                let _written = write!(text, "| {} | {} |", case.name, case.about);
                for one in &held {
                    let _written = write!(text, " {} |", one.mark(suite, &case.name).sign());
                }
                text.push('\n');
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_table_has_a_column_for_each_that_was_held_to_something() {
        let outcome = |case: &str, verdict| Outcome {
            suite: Suite::Bash,
            case: case.to_owned(),
            verdict,
            took: Duration::from_millis(3),
        };
        let ours = vec![outcome("echo", Verdict::Passed), outcome("no-newline", Verdict::Failed("odd".to_owned()))];
        let theirs = vec![outcome("echo", Verdict::Unsupported)];
        let gone = vec![outcome("echo", Verdict::Absent("not installed".to_owned()))];
        let report = Report {
            subjects: vec![
                Results::of("ours", None, ours),
                Results::of("theirs", Some("1.2".to_owned()), theirs),
                Results::of("gone", None, gone),
            ],
        };
        let table = report.markdown();
        let mut lines = table.lines();
        assert_eq!(lines.next(), Some("| case | what is promised | ours | theirs 1.2 |"));
        assert_eq!(lines.next(), Some("| --- | --- | --- | --- |"));
        assert!(lines.next().unwrap().ends_with(" cases | 1 of 2 |  |"), "{table}");
        assert!(table.contains(" | yes | n/a |\n") && table.contains(" | **no** |  |\n"), "{table}");
        assert!(!table.contains("ipython"), "{table}");
        assert_eq!(report.subjects[2].absent.as_deref(), Some("not installed"));
        assert_eq!(serde_json::to_value(&report).unwrap()["subjects"][0]["cases"][1]["reason"], "odd");
    }
}
