//! Every promise of the conformance suite, kept by a real guest.

use std::collections::BTreeSet;

use async_trait::async_trait;
use prorl_tools::conformance::{Mark, Ours, Results, Session, Shape, Subject, Suite, Unopened, run};

use crate::guest::Guest;

/// Cases at once: most of their time they wait for a limit to pass.
const SHAPE: Shape = Shape { at_once: 6 };

/// What is known not to be as it must be.
const KNOWN: &[(Suite, &str)] = &[];

/// This crate's tools, with a guest for each case.
struct Tools;

#[async_trait]
impl Subject for Tools {
    fn name(&self) -> &'static str {
        "prorl"
    }

    async fn open(&self, _suite: Suite) -> Result<Box<dyn Session>, Unopened> {
        let (client, folder, around) = Guest::start().await.apart();
        Ok(Box::new(Ours::new(client, folder, around)))
    }
}

async fn keeps_its_promises(suite: Suite) {
    let (_, outcomes) = run(&Tools, suite, &suite.cases(), SHAPE, |_| ()).await;
    let results = Results::of("prorl", None, outcomes);
    let failed: BTreeSet<&str> =
        results.cases.iter().filter(|line| line.mark == Mark::Failed).map(|line| line.case.as_str()).collect();
    let known: BTreeSet<&str> = KNOWN.iter().filter(|known| known.0 == suite).map(|known| known.1).collect();
    let report: Vec<_> = results.cases.iter().filter_map(|line| Some((&line.case, line.reason.as_ref()?))).collect();
    assert_eq!(failed, known, "{report:#?}");
}

#[tokio::test]
async fn bash_keeps_its_promises() {
    keeps_its_promises(Suite::Bash).await;
}

#[tokio::test]
async fn ipython_keeps_its_promises() {
    keeps_its_promises(Suite::Ipython).await;
}

#[tokio::test]
async fn the_editor_keeps_its_promises() {
    keeps_its_promises(Suite::Editor).await;
}

/// The table that the README shows is of these cases, and tells of ours what the tests above do.
#[test]
fn the_readme_shows_the_cases_that_there_are() {
    let readme = include_str!("../../README.md");
    let table = readme.split_once("--markdown`. -->").unwrap().1.split_once("<!-- end -->").unwrap().0;
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| **"))
        .skip(2)
        .map(|line| line.split('|').map(str::trim).skip(1).take(3).collect())
        .collect();
    let all: Vec<_> =
        Suite::ALL.iter().flat_map(|suite| suite.cases().into_iter().map(|case| (*suite, case))).collect();
    assert_eq!(rows.len(), all.len());
    for (row, (suite, case)) in rows.iter().zip(&all) {
        assert_eq!(row[..2], [case.name.as_str(), case.about.as_str()]);
        let is_known = KNOWN.contains(&(*suite, case.name.as_str()));
        assert_eq!(row[2] == "yes", !is_known, "{}", case.name);
    }
}
