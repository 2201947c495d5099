//! Holds an implementation to the cases.

use std::{collections::BTreeSet, time::Duration};

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use tokio::time::Instant;

use super::case::{Call, Case, Content, Expect, File, Need, State, Suite};

/// Characters of an output that a verdict shows.
const SHOWN_CHARS: usize = 200;

/// An implementation of tools.
#[async_trait]
pub trait Subject: Send + Sync {
    /// Returns its name, for reports.
    fn name(&self) -> &str;

    /// Begins a session: a shell, an interpreter or an editor that knows of no other.
    ///
    /// # Errors
    /// When it has no such tool, or cannot begin.
    async fn open(&self, suite: Suite) -> Result<Box<dyn Session>, Unopened>;
}

/// Why there is no session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unopened {
    /// It is not installed, or has no such tool.
    #[error("absent: {0}")]
    Absent(String),
    /// It is there and does not begin.
    #[error("{0}")]
    Broken(String),
}

/// A session of an implementation.
#[async_trait]
pub trait Session: Send {
    /// Returns what it cannot do by its nature.
    fn lacks(&self) -> BTreeSet<Need> {
        BTreeSet::new()
    }

    /// Returns the version of what is held to the cases, if it says.
    fn version(&self) -> Option<String> {
        None
    }

    /// Returns the folder that it begins in.
    fn folder(&self) -> &str;

    /// Calls its tool.
    ///
    /// # Errors
    /// When no answer came, in words.
    async fn call(&mut self, call: &Call) -> Result<Seen, String>;

    /// Makes a file in its folder.
    ///
    /// # Errors
    /// When that cannot be done, in words.
    async fn put(&mut self, file: &File) -> Result<(), String>;

    /// Looks at a path from its folder.
    ///
    /// # Errors
    /// When that cannot be done, in words.
    async fn look(&mut self, path: &str) -> Result<Found, String>;

    /// Ends it with all that it has started.
    async fn close(self: Box<Self>) {}
}

/// What came back of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// What the agent reads of what was printed.
    pub output: String,
    /// Bytes that were printed, where the implementation says; the output's otherwise.
    pub bytes: Option<u64>,
    /// The exit code, if there is one.
    pub code: Option<i32>,
    /// How it came back.
    pub state: State,
    /// The shell's folder, if it says.
    pub cwd: Option<String>,
    /// Whether it is said to wait for input.
    pub waits: bool,
    /// Types of what is more than text, in order.
    pub parts: Vec<String>,
}

/// What was found at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is.
    pub content: Content,
    /// Its permissions, if it is there.
    pub mode: u32,
}

/// What became of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everything was as it must be.
    Passed,
    /// The first thing that was not.
    Failed(String),
    /// The implementation has nothing that the case could be about.
    Unsupported,
    /// The implementation is not there.
    Absent(String),
}

/// A case and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The suite.
    pub suite: Suite,
    /// The case's name.
    pub case: String,
    /// What became of it.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
}

/// How cases are run.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Cases that are run at once, each in a session of its own.
    pub at_once: usize,
}

/// Holds an implementation to the cases of a suite, and tells each outcome as it comes; returns all, in the order of the cases.
///
/// # Cancel safety
/// Sessions that are open are dropped.
pub async fn run(
    subject: &dyn Subject,
    suite: Suite,
    cases: &[Case],
    shape: Shape,
    mut tell: impl FnMut(&Outcome),
) -> (Option<String>, Vec<Outcome>) {
    let verdict = match subject.open(suite).await {
        Ok(session) => {
            let version = session.version();
            session.close().await;
            let mut outcomes = Vec::with_capacity(cases.len());
            let mut running =
                stream::iter(cases).map(|case| judge(subject, suite, case)).buffered(shape.at_once.max(1));
            while let Some(outcome) = running.next().await {
                tell(&outcome);
                outcomes.push(outcome);
            }
            return (version, outcomes);
        }
        Err(Unopened::Absent(reason)) => Verdict::Absent(reason),
        Err(Unopened::Broken(reason)) => Verdict::Failed(reason),
    };
    let one = |case: &Case| Outcome { suite, case: case.name.clone(), verdict: verdict.clone(), took: Duration::ZERO };
    (None, cases.iter().map(one).inspect(|outcome| tell(outcome)).collect())
}

/// Holds an implementation to one case, in a session of its own.
pub async fn judge(subject: &dyn Subject, suite: Suite, case: &Case) -> Outcome {
    let begun = Instant::now();
    let verdict = match subject.open(suite).await {
        Ok(session) if !case.needs.is_disjoint(&session.lacks()) => {
            session.close().await;
            Verdict::Unsupported
        }
        Ok(mut session) => {
            let verdict = steps(session.as_mut(), case).await.err().unwrap_or(Verdict::Passed);
            session.close().await;
            verdict
        }
        Err(Unopened::Absent(reason)) => Verdict::Absent(reason),
        Err(Unopened::Broken(reason)) => Verdict::Failed(reason),
    };
    Outcome { suite, case: case.name.clone(), verdict, took: begun.elapsed() }
}

/// Goes through the steps of a case to the first that is not as it must be.
async fn steps(session: &mut dyn Session, case: &Case) -> Result<(), Verdict> {
    let folder = session.folder().to_owned();
    for file in &case.files {
        session.put(file).await.map_err(|reason| Verdict::Failed(format!("{}: {reason}", file.path)))?;
    }
    for (idx, step) in case.steps.iter().enumerate() {
        for repetition in 0..step.times {
            let failed = |reason: String| {
                let again = if step.times > 1 { format!(", repetition {repetition}") } else { String::new() };
                Verdict::Failed(format!("step {}{again}: {reason}", idx + 1))
            };
            let expect = step.expect(repetition, &folder);
            let begun = Instant::now();
            let seen = session.call(&step.call(repetition, &folder)).await.map_err(failed)?;
            let took = begun.elapsed();
            if seen.state == State::Unsupported {
                return Err(Verdict::Unsupported);
            }
            expect.met_by(&seen, took).map_err(failed)?;
            for file in &expect.leaves {
                let found = session.look(&file.path).await.map_err(failed)?;
                file.met_by(&found).map_err(failed)?;
            }
        }
    }
    Ok(())
}

impl Expect {
    /// Compares what came with what must come.
    fn met_by(&self, seen: &Seen, took: Duration) -> Result<(), String> {
        let got = plain(&seen.output);
        if !self.states.contains(&seen.state) {
            return Err(format!("is {:?}, not {:?}: {}", seen.state, self.states, shown(&got)));
        }
        if let Some(output) = &self.output
            && plain(output) != got
        {
            return Err(format!("printed {}, not {}", shown(&got), shown(output)));
        }
        let mut rest = got.as_str();
        for text in &self.has {
            match rest.split_once(text.as_str()) {
                Some((_, after)) => rest = after,
                None => return Err(format!("printed {}, without {} in its place", shown(&got), shown(text))),
            }
        }
        if let Some(text) = self.lacks.iter().find(|text| got.contains(text.as_str())) {
            return Err(format!("printed {}, with {}", shown(&got), shown(text)));
        }
        if let Some(text) = self.starts.as_ref().filter(|text| !got.starts_with(text.as_str())) {
            return Err(format!("printed {}, which does not begin with {}", shown(&got), shown(text)));
        }
        if let Some(text) = self.ends.as_ref().filter(|text| !got.ends_with(text.as_str())) {
            return Err(format!("printed .. {:?}, which does not end with {}", end(&got), shown(text)));
        }
        if let Some(bytes) = self.bytes {
            // Without a count there is the output, which may have lost a newline.
            let n_bytes = seen.bytes.unwrap_or(got.len() as u64);
            if n_bytes != bytes && (seen.bytes.is_some() || n_bytes + 1 != bytes) {
                return Err(format!("tells of {n_bytes} bytes, not of {bytes}"));
            }
        }
        if let Some(at_most) = self.at_most.filter(|at_most| seen.output.len() > *at_most) {
            return Err(format!("holds {} bytes, more than {at_most}", seen.output.len()));
        }
        if self.code.is_some() && self.code != seen.code {
            return Err(format!("has the code {:?}, not {:?}: {}", seen.code, self.code, shown(&got)));
        }
        if let Some(waits) = self.waits.filter(|waits| *waits != seen.waits) {
            let said = if waits { "is not said" } else { "is said" };
            return Err(format!("{said} to wait for input"));
        }
        if self.cwd.is_some() && self.cwd != seen.cwd {
            return Err(format!("is in {:?}, not in {:?}", seen.cwd, self.cwd));
        }
        if let Some(parts) = self.parts.as_ref().filter(|parts| **parts != seen.parts) {
            return Err(format!("shows {:?}, not {parts:?}", seen.parts));
        }
        if let Some(within) = self.within.filter(|within| took > *within) {
            return Err(format!("took {took:.1?}, longer than {within:?}"));
        }
        Ok(())
    }
}

impl File {
    fn met_by(&self, found: &Found) -> Result<(), String> {
        if self.content != found.content {
            let told = |content: &Content| match content {
                Content::Bytes(bytes) => format!("\"{}\"", bytes[..bytes.len().min(SHOWN_CHARS)].escape_ascii()),
                other => format!("{other:?}"),
            };
            return Err(format!("{} is {}, not {}", self.path, told(&found.content), told(&self.content)));
        }
        match self.mode {
            Some(mode) if mode != found.mode => {
                Err(format!("{} has the mode {:o}, not {mode:o}", self.path, found.mode))
            }
            _ => Ok(()),
        }
    }
}

/// Drops newlines at the end, and the carriage returns that a terminal puts before each.
fn plain(output: &str) -> String {
    output.replace("\r\n", "\n").trim_end_matches('\n').to_owned()
}

fn shown(text: &str) -> String {
    let cut: String = text.chars().take(SHOWN_CHARS).collect();
    if cut.len() < text.len() { format!("{cut:?}..") } else { format!("{cut:?}") }
}

fn end(text: &str) -> &str {
    let from = text.char_indices().rev().take(SHOWN_CHARS).last().map_or(0, |(idx, _)| idx);
    &text[from..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(output: &str) -> Seen {
        let (output, parts) = (output.to_owned(), Vec::new());
        Seen { output, bytes: None, code: Some(0), state: State::Done, cwd: None, waits: false, parts }
    }

    fn met(expect: Expect, seen: &Seen) -> Result<(), String> {
        Expect { states: vec![State::Done], ..expect }.met_by(seen, Duration::from_secs(1))
    }

    #[test]
    fn what_differs_is_told() {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let got = seen("one\r\ntwo\n\n");
        met(Expect { output: Some("one\ntwo\n".to_owned()), ..Expect::default() }, &got).unwrap();
        met(Expect { has: texts(&["one", "two"]), bytes: Some(8), ..Expect::default() }, &got).unwrap();
        for (wrong, told) in [
            (Expect { output: Some("one".to_owned()), ..Expect::default() }, r#"printed "one\ntwo", not "one""#),
            (Expect { has: texts(&["two", "one"]), ..Expect::default() }, r#"without "one" in its place"#),
            (Expect { lacks: texts(&["tw"]), ..Expect::default() }, r#"with "tw""#),
            (Expect { starts: Some("two".to_owned()), ..Expect::default() }, "does not begin"),
            (Expect { ends: Some("one".to_owned()), ..Expect::default() }, "does not end"),
            (Expect { bytes: Some(5), ..Expect::default() }, "tells of 7 bytes, not of 5"),
            (Expect { at_most: Some(3), ..Expect::default() }, "more than 3"),
            (Expect { code: Some(1), ..Expect::default() }, "has the code Some(0), not Some(1)"),
            (Expect { waits: Some(true), ..Expect::default() }, "is not said to wait"),
            (Expect { cwd: Some("/".to_owned()), ..Expect::default() }, "is in None"),
            (Expect { parts: Some(texts(&["image/png"])), ..Expect::default() }, "shows []"),
            (Expect { within: Some(Duration::from_millis(999)), ..Expect::default() }, "took 1.0s"),
        ] {
            let reason = met(wrong, &got).unwrap_err();
            assert!(reason.contains(told), "{reason}");
        }
        let reason = met(Expect::default(), &Seen { state: State::Reset, ..got }).unwrap_err();
        assert!(reason.starts_with("is Reset, not [Done]"), "{reason}");
    }
}
