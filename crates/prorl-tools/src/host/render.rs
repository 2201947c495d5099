//! What the agent reads: the output, then what is to be said about it in brackets.

use std::time::Duration;

use crate::wire::{BashAnswer, BashEnd, CellEnd, Interrupt, IpythonAnswer};

use super::toolbox::ToolResult;

/// Appends a bracketed line, beginning on a line of its own.
fn note(text: &mut String, note: &str) {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push('[');
    text.push_str(note);
    text.push(']');
}

fn seconds(millis: u64) -> String {
    match millis {
        1000 => "1 second".to_owned(),
        _ => format!("{} seconds", Duration::from_millis(millis).as_secs_f64()),
    }
}

fn took(by: Interrupt, what: &str) -> String {
    match by {
        Interrupt::Signal => "It was interrupted.".to_owned(),
        Interrupt::Kill => "It did not end on an interrupt, so its processes were killed.".to_owned(),
        Interrupt::Restart => format!("It did not end on an interrupt, so the {what} was killed."),
    }
}

pub(super) fn bash(answer: &BashAnswer) -> ToolResult {
    if let BashEnd::Refused(reason) = &answer.end {
        return ToolResult::error(reason.clone());
    }
    let mut text = answer.output.text();
    let mut is_error = false;
    match &answer.end {
        BashEnd::Exited(code) => note(&mut text, &format!("The command completed with exit code {code}.")),
        BashEnd::Running { silent_ms, wants_input } => {
            let waits = if *wants_input { " and seems to wait for input" } else { "" };
            note(
                &mut text,
                &format!(
                    "The command has printed nothing for {}{waits}. It is still running. Call again with is_input true: \
                     an empty command to wait, a text to type in, C-c to interrupt it.",
                    seconds(*silent_ms)
                ),
            );
        }
        BashEnd::LimitPassed { limit_ms, by } => {
            is_error = true;
            note(&mut text, &format!("The command timed out after {}. {}", seconds(*limit_ms), took(*by, "shell")));
        }
        BashEnd::Cancelled => note(&mut text, "The command was cancelled."),
        BashEnd::Refused(_) => {}
    }
    if let Some(reason) = &answer.restarted {
        note_line(
            &mut text,
            &format!("{reason} A new shell was started in the same directory; variables and functions are reset."),
        );
    }
    if let Some(cwd) = &answer.cwd {
        note_line(&mut text, &format!("Current working directory: {cwd}"));
    }
    ToolResult { is_error, ..ToolResult::text(text) }
}

fn note_line(text: &mut String, line: &str) {
    text.push('\n');
    note(text, line);
}

pub(super) fn ipython(answer: &IpythonAnswer) -> ToolResult {
    if let CellEnd::Refused(reason) = &answer.end {
        return ToolResult::error(reason.clone());
    }
    let mut text = answer.output.text();
    let mut is_error = false;
    match &answer.end {
        CellEnd::LimitPassed { limit_ms, by } => {
            is_error = true;
            note(&mut text, &format!("The cell timed out after {}. {}", seconds(*limit_ms), took(*by, "interpreter")));
        }
        CellEnd::Cancelled => note(&mut text, "The cell was cancelled."),
        CellEnd::Ok | CellEnd::Raised | CellEnd::Died | CellEnd::Refused(_) => {}
    }
    if let Some(reason) = &answer.restarted {
        is_error = true;
        note(
            &mut text,
            &format!("{reason} A new interpreter starts with the next cell; variables and imports are gone."),
        );
    }
    if text.is_empty() {
        "[The cell ran without output.]".clone_into(&mut text);
    }
    ToolResult { is_error, ..ToolResult::text(text) }
}
