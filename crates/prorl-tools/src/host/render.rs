//! What the agent reads: the output, then what is to be said about it in brackets.

use std::time::Duration;

use crate::wire::{BashAnswer, BashEnd, Captured, CellEnd, Interrupt, IpythonAnswer};

use super::toolbox::ToolResult;

/// Characters that an agent reads of one call of `execute_bash` or `execute_ipython_cell` when nothing else is said, notes in
/// brackets included: some ten thousand tokens.
///
/// Of a longer output it reads the beginning and the end, with a count of the bytes left out between. The client's answers
/// ([`Captured`]) hold more.
pub const RESULT_CHARS: usize = 30_000;

/// More than what tells how many bytes are left out.
const OMITTED_CHARS: usize = 100;

/// Puts an output before the notes about it, cut so that both have `limit` characters at most.
fn before_notes(output: &Captured, notes: &str, limit: usize) -> String {
    let mut text = clip(output, limit.saturating_sub(notes.chars().count() + 1));
    if !text.is_empty() && !notes.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(notes);
    text
}

/// Returns an output as text of at most `limit` characters, cut between characters and not within one.
fn clip(output: &Captured, limit: usize) -> String {
    let whole = output.bytes();
    let (head, tail) = match output.omitted() {
        0 if widths(&whole).count() <= limit => return String::from_utf8_lossy(&whole).into_owned(),
        0 => (&whole, &whole),
        _ => (&output.head.0, &output.tail.0),
    };
    let half = limit.saturating_sub(OMITTED_CHARS) / 2;
    let head = &head[..widths(head).take(half).sum()];
    let n_before = widths(tail).count().saturating_sub(half);
    let tail = &tail[widths(tail).take(n_before).sum()..];
    let omitted = output.total.saturating_sub((head.len() + tail.len()) as u64);
    format!(
        "{}\n[... {omitted} of {} bytes left out ...]\n{}",
        String::from_utf8_lossy(head),
        output.total,
        String::from_utf8_lossy(tail)
    )
}

/// Returns how many bytes each character of a text has; bytes that are no text count as they are shown, as one character.
fn widths(bytes: &[u8]) -> impl Iterator<Item = usize> {
    bytes.utf8_chunks().flat_map(|chunk| {
        let invalid = Some(chunk.invalid().len()).filter(|width| *width > 0);
        chunk.valid().chars().map(char::len_utf8).chain(invalid)
    })
}

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

pub(super) fn bash(answer: &BashAnswer, limit: usize) -> ToolResult {
    if let BashEnd::Refused(reason) = &answer.end {
        return ToolResult::error(reason.clone());
    }
    let mut text = String::new();
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
        note(
            &mut text,
            &format!("{reason} A new shell was started in the same directory; variables and functions are reset."),
        );
    }
    if let Some(cwd) = &answer.cwd {
        note(&mut text, &format!("Current working directory: {cwd}"));
    }
    ToolResult { is_error, ..ToolResult::text(before_notes(&answer.output, &text, limit)) }
}

pub(super) fn ipython(answer: &IpythonAnswer, limit: usize) -> ToolResult {
    if let CellEnd::Refused(reason) = &answer.end {
        return ToolResult::error(reason.clone());
    }
    let mut text = String::new();
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
    let mut text = before_notes(&answer.output, &text, limit);
    if text.is_empty() {
        "[The cell ran without output.]".clone_into(&mut text);
    }
    ToolResult { is_error, ..ToolResult::text(text) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::Bytes;

    fn bash_text(output: Captured) -> String {
        let cwd = Some("/workspace".to_owned());
        bash(&BashAnswer { output, end: BashEnd::Exited(0), restarted: None, cwd }, RESULT_CHARS).content.text()
    }

    #[test]
    fn a_result_has_its_limit_whatever_is_printed() {
        let notes = "\n[The command completed with exit code 0.]\n[Current working directory: /workspace]";
        for piece in ["#", "\u{e9}", "\u{1f600}"] {
            // As much as fits is shown whole, and one more is not.
            let fits = RESULT_CHARS - notes.chars().count();
            let text = |n: usize| {
                let bytes = piece.repeat(n).into_bytes();
                bash_text(Captured { total: bytes.len() as u64, head: Bytes(bytes), tail: Bytes::default() })
            };
            assert_eq!(text(fits), format!("{}{notes}", piece.repeat(fits)));
            for n in [fits + 1, 100_000] {
                let text = text(n);
                assert!(text.chars().count() <= RESULT_CHARS && text.chars().count() > RESULT_CHARS - 100);
                assert!(text.starts_with(piece) && text.ends_with(&format!("{piece}{notes}")));
                let (shown, total) = (text.matches(piece).count() * piece.len(), n * piece.len());
                let told = format!("[... {} of {total} bytes left out ...]", total - shown);
                assert!(text.contains(&told), "{told}");
            }
        }
    }

    #[test]
    fn what_the_guest_left_out_is_counted_in() {
        let piece = |byte: u8| Bytes(vec![byte; 64 * 1024]);
        let output = Captured { head: piece(b'a'), tail: piece(b'z'), total: 10_000_000 };
        let answer = IpythonAnswer { output, end: CellEnd::Ok, restarted: None };
        let text = ipython(&answer, RESULT_CHARS).content.text();
        assert!(text.starts_with("aaa") && text.ends_with("zzz") && text.chars().count() <= RESULT_CHARS);
        let shown = text.matches(['a', 'z']).count();
        assert!(
            text.contains(&format!(" {} of 10000000 bytes left out ", 10_000_000 - shown)),
            "{}",
            &text[14_900..15_100]
        );
    }

    proptest! {
        #[test]
        fn a_cut_output_is_its_two_ends(
            bytes in proptest::collection::vec(prop_oneof![Just(b'a'), Just(0xc3), Just(0xa9), any::<u8>()], 0..2000),
            limit in 0_usize..1000,
        ) {
            let output = Captured { total: bytes.len() as u64, head: Bytes(bytes.clone()), tail: Bytes::default() };
            let text = clip(&output, limit);
            let whole = String::from_utf8_lossy(&bytes);
            if whole.chars().count() <= limit {
                prop_assert_eq!(text, whole);
            } else {
                prop_assert!(text.chars().count() <= limit.max(OMITTED_CHARS));
                let half = limit.saturating_sub(OMITTED_CHARS) / 2;
                let head: String = whole.chars().take(half).collect();
                let tail: String = whole.chars().skip(whole.chars().count() - half).collect();
                prop_assert!(text.starts_with(&head) && text.ends_with(&tail));
            }
        }
    }
}
