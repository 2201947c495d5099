//! What `prorl bench` tells, as JSON or as a table of the same.

use std::{process::ExitCode, time::Duration};

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;
use serde_json::Value;

use super::{
    bare::{Run, Tool},
    figures::Spread,
    goals::Goals,
    machine::Machine,
    memory::Memory,
};
use crate::{output, stop::Signals};

/// Tells why there is no figure where there is none.
pub(super) fn present<T>(what: &str, figures: anyhow::Result<T>) -> Option<T> {
    figures.inspect_err(|reason| output::note(format_args!("note: {what} is null: {reason:#}"))).ok()
}

/// Waits for a report and tells it, with its goals; a signal ends it.
pub(super) async fn finish<R: Serialize>(
    measuring: impl Future<Output = anyhow::Result<R>>,
    goals: impl FnOnce(&R) -> &Goals,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::take()?;
    if cfg!(debug_assertions) {
        output::note("note: this build is not optimised; figures of a release build are better");
    }
    let report = tokio::select! {
        report = measuring => report?,
        // What runs is dropped, and what is dropped is killed, whatever it is up to.
        signal = signals.next() => anyhow::bail!("ended by {signal}"),
    };
    for line in goals(&report).lines() {
        output::note(line);
    }
    tell(&report, json)?;
    Ok(ExitCode::SUCCESS)
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) prorl: &'static str,
    pub(super) machine: Machine,
    pub(super) image: String,
    pub(super) namespace: Figures,
    pub(super) bwrap: Option<BareFigures>,
    /// Our p50 from the start to the hello, by bubblewrap's to its program's first output.
    pub(super) namespace_start_by_bwrap: Option<f64>,
    pub(super) singularity: Option<Figures>,
    pub(super) apptainer: Option<BareFigures>,
    /// Our p50 from the start to the hello, by Apptainer's to its program's first output.
    pub(super) singularity_start_by_apptainer: Option<f64>,
}

/// Figures of one runtime.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// From the call to the guest's hello, one at a time.
    pub(super) start: Option<Spread>,
    /// From the call to the proof that nothing is left.
    pub(super) shutdown: Option<Spread>,
    /// Memory of a sandbox that is alone and idle.
    pub(super) alone: Option<Memory>,
    pub(super) burst: Option<Burst>,
    pub(super) alive: Option<Alive>,
}

/// Sandboxes started at the same moment.
#[derive(Debug, Serialize)]
pub(super) struct Burst {
    pub(super) n: usize,
    pub(super) failed: usize,
    /// Until the last hello.
    pub(super) total_ms: f64,
    /// Of each, from that moment to its hello, waiting for a place to start included.
    pub(super) start: Option<Spread>,
    /// Of each, from its place among the starting to its hello.
    pub(super) admitted_start: Option<Spread>,
}

/// Sandboxes alive at once.
#[derive(Debug, Serialize)]
pub(super) struct Alive {
    pub(super) n: usize,
    pub(super) failed: usize,
    pub(super) answered: usize,
    /// Until all of them, asked at the same moment, had run a program and told its end.
    pub(super) answers_total_ms: f64,
    /// Of each, from that moment to its answer.
    pub(super) answer: Option<Spread>,
    /// Mean of some of them after their answers.
    pub(super) memory_each: Option<Memory>,
    /// What the machine's available memory lost by them, shared by their number: the kernel's own use is in it, and whatever
    /// else happened on the machine.
    pub(super) available_lost_bytes_each: Option<i64>,
    /// Until all of them, ended at the same moment, were proven gone.
    pub(super) shutdown_total_ms: f64,
}

/// Figures of a bare tool that runs the guest for its version.
#[derive(Debug, Serialize)]
pub(super) struct BareFigures {
    pub(super) version: String,
    /// To the first byte of output.
    pub(super) start: Option<Spread>,
    /// To the end of the tool.
    pub(super) whole: Option<Spread>,
}

impl BareFigures {
    /// Sums up the runs of a tool.
    pub(super) fn of(tool: Tool, runs: &[Run]) -> Self {
        let spread = |pick: fn(&Run) -> Duration| Spread::of(runs.iter().map(pick).collect());
        Self { version: tool.version, start: spread(|run| run.start), whole: spread(|run| run.whole) }
    }
}

/// Tells a report: to a program, or to a person.
pub(super) fn tell(report: &impl Serialize, is_for_programs: bool) -> anyhow::Result<()> {
    let report = serde_json::to_value(report)?;
    if is_for_programs {
        output::say(report);
    } else {
        output::say(table(&report));
    }
    Ok(())
}

/// Shows a report with one line for each value, by its path in the JSON.
fn table(report: &Value) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    let mut lines = Vec::new();
    flatten(report, "", &mut lines);
    table.add_rows(lines);
    if let Some(values) = table.column_mut(1) {
        values.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn flatten(value: &Value, path: &str, lines: &mut Vec<[String; 2]>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                flatten(value, &format!("{path}{dot}{name}"), lines);
            }
        }
        Value::Array(values) if !values.is_empty() => {
            for (idx, value) in values.iter().enumerate() {
                flatten(value, &format!("{path}[{idx}]"), lines);
            }
        }
        Value::Null => lines.push([path.to_owned(), "-".to_owned()]),
        Value::String(text) => lines.push([path.to_owned(), text.clone()]),
        value => lines.push([path.to_owned(), value.to_string()]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_value() {
        let mut lines = Vec::new();
        let report = serde_json::json!({
            "a": {"b_ms": 1.5, "c": null}, "d": "text", "e": [{"f": 1}, {"f": 2}], "g": [3], "h": []
        });
        flatten(&report, "", &mut lines);
        let expected = [
            ["a.b_ms", "1.5"],
            ["a.c", "-"],
            ["d", "text"],
            ["e[0].f", "1"],
            ["e[1].f", "2"],
            ["g[0]", "3"],
            ["h", "[]"],
        ];
        assert_eq!(lines, expected.map(|line| line.map(str::to_owned)));
    }
}
