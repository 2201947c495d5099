//! What a launcher says on standard error: its last words, made fit for an error message.

use std::{
    io::{PipeReader, Read as _},
    os::fd::{AsFd as _, BorrowedFd},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How much is kept, in bytes.
const KEPT_BYTES: usize = 2048;

/// How much of that may be the first line, which says what is wrong where a page of help follows it.
const FIRST_BYTES: usize = 256;

/// Listens to a pipe and keeps the end of what it heard.
pub(super) struct Words {
    pipe: Option<PipeReader>,
    first: Vec<u8>,
    heard: Vec<u8>,
}

impl Words {
    pub(super) fn new(pipe: PipeReader) -> Self {
        Self { pipe: Some(pipe), first: Vec::new(), heard: Vec::new() }
    }

    /// Returns the pipe while anybody may write to it.
    pub(super) fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(|pipe| pipe.as_fd())
    }

    /// Reads once. Blocks unless there is something to read, or an end.
    pub(super) fn listen(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        let mut bytes = [0; 4096];
        match pipe.read(&mut bytes) {
            Ok(n_read @ 1..) => {
                let missing = FIRST_BYTES.saturating_sub(self.first.len());
                self.first.extend_from_slice(&bytes[..n_read.min(missing)]);
                self.heard.extend_from_slice(&bytes[..n_read]);
                let excess = self.heard.len().saturating_sub(2 * KEPT_BYTES);
                self.heard.drain(..excess);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => self.pipe = None,
        }
    }

    /// Reads what is there already.
    pub(super) fn listen_to_the_end(&mut self) {
        while self.pipe().is_some_and(|pipe| {
            let mut fds = [PollFd::new(pipe, PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::ZERO) == Ok(1)
        }) {
            self.listen();
        }
    }

    /// Returns the first line and whole lines from the end, as many as fit, without colours and control characters.
    pub(super) fn last(&self) -> String {
        let text = plain(&String::from_utf8_lossy(&self.heard));
        let text = text.trim();
        if text.len() <= KEPT_BYTES {
            return text.to_owned();
        }
        let first = plain(&String::from_utf8_lossy(&self.first));
        let first = first.trim_start().lines().next().unwrap_or_default();
        let start = text.ceil_char_boundary(text.len() + first.len() + 1 - KEPT_BYTES);
        let rest = &text[start..];
        format!("{first}\n{}", rest.split_once('\n').map_or(rest, |(_cut, whole)| whole))
    }
}

/// Takes out escape sequences and control characters other than the line's end.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\u{1b}' if chars.peek() == Some(&'[') => {
                chars.next();
                // A sequence goes on up to a letter or one of a few signs.
                while chars.next().is_some_and(|char| !('\u{40}'..='\u{7e}').contains(&char)) {}
            }
            '\n' => plain.push('\n'),
            '\t' => plain.push(' '),
            char if char.is_control() => {}
            char => plain.push(char),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::io::{Write as _, pipe};

    use super::*;

    fn kept(text: &[u8]) -> String {
        let (reader, mut writer) = pipe().unwrap();
        let mut words = Words::new(reader);
        for part in text.chunks(4096) {
            writer.write_all(part).unwrap();
            words.listen_to_the_end();
        }
        drop(writer);
        words.listen_to_the_end();
        assert!(words.pipe().is_none());
        words.last()
    }

    #[test]
    fn colours_and_control_characters_are_taken_out() {
        assert_eq!(kept(b"\x1b[31mFATAL:  \x1b[0m no\r\n\x07image\t\xff\n\n"), "FATAL:   no\nimage \u{fffd}");
        assert_eq!(kept(b"cut \x1b["), "cut");
        assert_eq!(kept(b""), "");
    }

    #[test]
    fn whole_lines_are_kept_from_the_end() {
        let long = "x".repeat(1500) + "\n" + &"é".repeat(600) + "\nlast\n";
        let text = kept(long.as_bytes());
        assert_eq!(text, "x".repeat(FIRST_BYTES) + "\n" + &"é".repeat(600) + "\nlast");
        let endless = kept("é".repeat(5000).as_bytes());
        assert!((KEPT_BYTES - 4..=KEPT_BYTES).contains(&endless.len()), "{}", endless.len());
        assert_eq!(kept(("no flag\n".to_owned() + &"help\n".repeat(5000)).as_bytes()).lines().next(), Some("no flag"));
    }
}
