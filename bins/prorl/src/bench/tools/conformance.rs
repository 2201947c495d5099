//! `prorl bench tools --conformance`: who keeps which promises.

use std::{path::Path, process::ExitCode, sync::Arc};

use anyhow::{Context, ensure};
use async_trait::async_trait;
use prorl_sandbox::{Image, Runtime, SandboxSpec};
use prorl_tools::{
    conformance::{Adapter, BashC, Case, Mark, Ours, Report, Results, Session, Shape, Subject, Suite, Unopened, run},
    host::ToolClient,
};

use crate::{
    bench::{report::tell, runtimes::Runtimes},
    output,
};

/// Where tools begin in a sandbox.
const WORKSPACE: &str = "/workspace";

/// Arguments of the conformance suite.
#[derive(clap::Args)]
pub(super) struct Held {
    /// Program to hold to the cases as well, `NAME=COMMAND` or `COMMAND`, which speaks the protocol of adapters; may be given again.
    #[arg(long, value_name = "COMMAND", requires = "conformance")]
    adapter: Vec<String>,
    /// Suite to hold them to; may be given again [default: each].
    #[arg(long, value_name = "NAME", requires = "conformance", value_parser = suite)]
    suite: Vec<Suite>,
    /// Case to hold them to, by its name; may be given again [default: each].
    #[arg(long, value_name = "NAME", requires = "conformance")]
    case: Vec<String>,
    /// Sessions at once.
    #[arg(long, default_value_t = 4, value_name = "N", requires = "conformance")]
    at_once: usize,
    /// Print a table in Markdown.
    #[arg(long, requires = "conformance", conflicts_with = "json")]
    markdown: bool,
}

fn suite(name: &str) -> Result<Suite, String> {
    Suite::ALL.into_iter().find(|suite| suite.name() == name).ok_or_else(|| {
        let names = Suite::ALL.map(Suite::name).join(", ");
        format!("there is no such suite; there are {names}")
    })
}

pub(super) async fn main(args: &Held, is_for_programs: bool) -> anyhow::Result<ExitCode> {
    let suites = if args.suite.is_empty() { Suite::ALL.to_vec() } else { args.suite.clone() };
    let cases = cases(&suites, &args.case)?;
    let runtimes = Runtimes::make()?;
    let spec = runtimes.spec(Image::Host);
    let mut subjects: Vec<Box<dyn Subject>> =
        vec![Box::new(Tools { runtime: runtimes.namespace, spec }), Box::new(BashC)];
    for words in &args.adapter {
        subjects.push(Box::new(adapter(words)?));
    }
    let mut report = Report { subjects: Vec::new() };
    for subject in &subjects {
        report.subjects.push(hold(subject.as_ref(), &cases, Shape { at_once: args.at_once }).await);
    }
    for results in &report.subjects {
        if let Some(reason) = results.absent.as_ref().filter(|_| results.cases.is_empty()) {
            output::note(format_args!("note: {} is left out: {reason}", results.name));
        }
        for line in results.cases.iter().filter(|line| line.mark == Mark::Failed) {
            let reason = line.reason.as_deref().unwrap_or_default();
            output::note(format_args!("{}: {} {}: {reason}", results.name, line.suite.name(), line.case));
        }
    }
    if args.markdown || !is_for_programs {
        output::say(report.markdown().trim_end());
    } else {
        tell(&report, true)?;
    }
    // What others do is told and no failure; ours is a promise.
    let is_kept = report.subjects[0].cases.iter().all(|line| line.mark == Mark::Passed);
    Ok(if is_kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the cases of suites, or those of them that are named.
fn cases(suites: &[Suite], names: &[String]) -> anyhow::Result<Vec<(Suite, Vec<Case>)>> {
    let mut chosen = Vec::new();
    for suite in suites {
        let mut cases = suite.cases();
        cases.retain(|case| names.is_empty() || names.contains(&case.name));
        chosen.push((*suite, cases));
    }
    let all: Vec<&str> = chosen.iter().flat_map(|(_, cases)| cases.iter().map(|case| case.name.as_str())).collect();
    for name in names {
        ensure!(all.contains(&name.as_str()), "there is no case {name}");
    }
    Ok(chosen)
}

async fn hold(subject: &dyn Subject, cases: &[(Suite, Vec<Case>)], shape: Shape) -> Results {
    let n = cases.iter().map(|(_, cases)| cases.len() as u64).sum();
    let bar = output::progress(n, "cases");
    bar.set_message(subject.name().to_owned());
    let (mut version, mut outcomes) = (None, Vec::new());
    for (suite, cases) in cases.iter().filter(|(_, cases)| !cases.is_empty()) {
        let (said, more) = run(subject, *suite, cases, shape, |_| bar.inc(1)).await;
        version = version.or(said);
        outcomes.extend(more);
    }
    bar.finish_and_clear();
    Results::of(subject.name(), version, outcomes)
}

/// Reads an adapter: its name, or else that of its last word's file, and its words.
fn adapter(text: &str) -> anyhow::Result<Adapter> {
    let (name, command) = match text.split_once('=') {
        Some((name, command)) if !name.contains('/') => (Some(name), command),
        _ => (None, text),
    };
    let words: Vec<String> = command.split_whitespace().map(from_here).collect();
    let last = words.last().context("an adapter is a command")?;
    let stem = Path::new(last).file_stem().map(|stem| stem.to_string_lossy().into_owned());
    Ok(Adapter::new(name.map_or_else(|| stem.unwrap_or_default(), str::to_owned), words))
}

/// Returns a word of a command as it is, or the whole path of the file here that it names: an adapter works in another folder.
fn from_here(word: &str) -> String {
    let is_path = word.contains('/') && Path::new(word).exists();
    let whole = if is_path { std::path::absolute(word).ok() } else { None };
    whole.map_or_else(|| word.to_owned(), |whole| whole.to_string_lossy().into_owned())
}

/// The tools of this program, with a sandbox for each case.
struct Tools {
    runtime: Arc<dyn Runtime>,
    spec: SandboxSpec,
}

#[async_trait]
impl Subject for Tools {
    fn name(&self) -> &'static str {
        "prorl"
    }

    async fn open(&self, _suite: Suite) -> Result<Box<dyn Session>, Unopened> {
        let broken = |reason: &dyn std::fmt::Display| Unopened::Broken(reason.to_string());
        let mut sandbox = self.runtime.start(&self.spec).await.map_err(|err| broken(&err))?;
        let channel = sandbox.take_channel().ok_or_else(|| broken(&"the channel is there after a start"))?;
        Ok(Box::new(Ours::new(ToolClient::new(channel), WORKSPACE, sandbox)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_named_after_its_file() {
        for (text, name) in [
            ("python3 conformance/adapters/tmux.py", "tmux"),
            ("tmux loop=python3 a/b.py", "tmux loop"),
            ("/a/b=c/d.py", "d"),
        ] {
            assert_eq!(adapter(text).unwrap().name(), name);
        }
        assert!(adapter("  ").is_err());
        assert_eq!((from_here("python3"), from_here("no/such")), ("python3".to_owned(), "no/such".to_owned()));
        assert!(Path::new(&from_here("./src")).is_absolute());
    }

    #[test]
    fn a_case_that_there_is_not_is_an_error() {
        let chosen = cases(&[Suite::Bash, Suite::Editor], &["echo".to_owned()]).unwrap();
        assert_eq!(chosen.iter().map(|(_, cases)| cases.len()).collect::<Vec<_>>(), [1, 0]);
        assert!(cases(&[Suite::Editor], &["echo".to_owned()]).is_err());
        assert!(suite("zsh").unwrap_err().ends_with("bash, ipython, editor"));
    }
}
