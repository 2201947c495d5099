//! The last lines that a program has said, fit for an error message.

use std::collections::VecDeque;

/// How many lines are kept.
const MAX_LINES: usize = 40;

/// How many of them may be reasons.
const MAX_REASONS: usize = 10;

/// How much of a line is kept, in bytes.
const MAX_LINE_BYTES: usize = 500;

/// How lines begin by which a program says why it fails.
const REASONS: [&str; 2] = ["FATAL", "ERROR"];

/// How lines begin in which a shell says what it executes, up to a space.
const TRACE: char = '+';

/// Keeps the last lines of what it is given, but for what a shell executes.
#[derive(Debug, Default)]
pub(super) struct Tail {
    /// Lines that say why it fails.
    reasons: VecDeque<String>,
    /// All others.
    lines: VecDeque<String>,
    line: Vec<u8>,
}

impl Tail {
    /// Takes what was said next.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            // A carriage return begins the line anew, as progress bars do.
            match byte {
                b'\n' => self.end(),
                b'\r' => self.line.clear(),
                byte if self.line.len() < MAX_LINE_BYTES => self.line.push(*byte),
                _ => {}
            }
        }
    }

    /// Ends the line.
    pub(super) fn end(&mut self) {
        let line = plain(&String::from_utf8_lossy(&self.line));
        self.line.clear();
        if line.is_empty() || is_trace(&line) {
            return;
        }
        let is_reason = REASONS.iter().any(|start| line.starts_with(start));
        let lines = if is_reason { &mut self.reasons } else { &mut self.lines };
        lines.push_back(line);
        if self.reasons.len() > MAX_REASONS {
            self.reasons.pop_front();
        }
        if self.reasons.len() + self.lines.len() > MAX_LINES {
            self.lines.pop_front();
        }
    }

    /// Returns the lines that were kept, the reasons first.
    pub(super) fn text(&self) -> String {
        self.reasons.iter().chain(&self.lines).map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// Tells whether a shell says what it executes; the deeper, the more signs.
fn is_trace(line: &str) -> bool {
    line.trim_start_matches(TRACE).starts_with(' ') && line.starts_with(TRACE)
}

/// Takes out colours and control characters.
fn plain(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    while let Some(char) = chars.next() {
        if char == '\u{1b}' && chars.next_if_eq(&'[').is_some() {
            // A sequence goes on up to a letter or one of a few signs.
            while chars.next().is_some_and(|char| !('\u{40}'..='\u{7e}').contains(&char)) {}
        } else if char == '\t' {
            plain.push(' ');
        } else if !char.is_control() {
            plain.push(char);
        }
    }
    plain.truncate(plain.trim_end().len());
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_without_colours_and_bars() {
        let mut tail = Tail::default();
        for number in 0..100 {
            tail.add(format!("line {number}\n").as_bytes());
        }
        tail.add(b" 10%\r 50%\r100%\n\n\x1b[31mFATAL:\x1b[0m\tno\xff\x07 ");
        tail.end();
        let text = tail.text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), &lines[..2], lines[39]), (40, &["FATAL: no\u{fffd}", "line 62"][..], "100%"));
        let mut tail = Tail::default();
        tail.add("x".repeat(100_000).as_bytes());
        tail.end();
        assert_eq!(tail.text().len(), MAX_LINE_BYTES);
    }

    #[test]
    fn reasons_come_first_and_what_a_shell_executes_is_left_out() {
        let mut tail = Tail::default();
        tail.add(b"ERROR: no mirror\n+ exec false\nE: gone\n++ date\nFATAL:   it failed\n");
        for number in 0..100 {
            tail.add(format!("line {number}\n+ trace\n").as_bytes());
        }
        let text = tail.text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[..3], ["ERROR: no mirror", "FATAL:   it failed", "line 62"]);
        assert_eq!((lines.len(), lines[39]), (40, "line 99"));
        for number in 0..100 {
            tail.add(format!("ERROR: {number}\n").as_bytes());
        }
        let text = tail.text();
        assert!(text.starts_with("ERROR: 90\n") && text.contains("\nline 70\n"), "{text}");
        assert!(!text.contains("trace") && !text.contains("date"), "{text}");
    }
}
