//! `prorl verify`: checks every trace of a results file.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context;
use prorl_llm::verify::{VerifyStats, verify_json};

use crate::output;

/// Arguments of `prorl verify`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Results, one JSON object a line.
    file: PathBuf,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// Sums over a file.
#[derive(Default, serde::Serialize)]
pub(crate) struct Totals {
    results: usize,
    pub(crate) traces: usize,
    turns: usize,
    sampled_tokens: usize,
    fed_tokens: usize,
}

impl Totals {
    /// Adds a result that holds its promises.
    pub(crate) fn add(&mut self, stats: &VerifyStats) {
        self.results += 1;
        self.traces += stats.n_traces;
        self.turns += stats.n_turns;
        self.sampled_tokens += stats.n_sampled;
        self.fed_tokens += stats.n_ids - stats.n_sampled;
    }
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let name = args.file.display();
    let file = File::open(&args.file).with_context(|| format!("failed to open {name}"))?;
    let mut totals = Totals::default();
    for (idx, line) in BufReader::new(file).lines().enumerate() {
        let line = line.with_context(|| format!("failed to read {name} line {}", idx + 1))?;
        if line.trim().is_empty() {
            continue;
        }
        let stats = match verify_json(line.as_bytes()) {
            Ok(stats) => stats,
            Err(broken) => {
                let problem = format!("{}{broken}", job_of(&line));
                if args.json {
                    output::say(serde_json::json!({"ok": false, "line": idx + 1, "problem": problem}));
                }
                output::note(format_args!("{name} line {}: {problem}", idx + 1));
                return Ok(ExitCode::FAILURE);
            }
        };
        totals.add(&stats);
    }
    if totals.results == 0 {
        output::note(format_args!("{name} holds no result"));
        return Ok(ExitCode::FAILURE);
    }
    if args.json {
        output::say(serde_json::json!({"ok": true, "totals": totals}));
    } else {
        output::say(format_args!(
            "{name}: {} results, {} traces, {} turns, {} sampled and {} fed tokens, every promise holds",
            totals.results, totals.traces, totals.turns, totals.sampled_tokens, totals.fed_tokens
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Names the job of a line, as far as the line has one.
fn job_of(line: &str) -> String {
    let value: Option<serde_json::Value> = serde_json::from_str(line).ok();
    let job_id = value.as_ref().and_then(|value| value.get("job_id")).and_then(serde_json::Value::as_str);
    job_id.map(|job_id| format!("job {job_id}: ")).unwrap_or_default()
}
