//! Output of programs as text for a model: what a reader of the terminal would see at the end, without its colours.

/// In which form a model reads what programs print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextForm {
    /// As a terminal shows it in the end: see [`clean`].
    #[default]
    Clean,
    /// As it was printed, with escape sequences; only bytes that are not UTF-8 become U+FFFD.
    Raw,
}

/// An output as [`clean`] leaves it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// The text. Its control characters are newlines and tabs.
    pub text: String,
    /// Whether a full-screen program, such as an editor or a pager, took the terminal, or gave it back. Of its screen the text
    /// has what was drawn, in the order of drawing.
    pub full_screen: bool,
}

/// Returns what a terminal shows of an output, without limits of width and height.
///
/// Escape sequences are gone. Carriage returns, backspaces and the sequences that move the cursor within its line, to lines above
/// or erase a line are carried out, so that of a progress bar its last state remains. A bell is gone too; other control characters,
/// and bytes that are not UTF-8, are U+FFFD. A text without such things comes back as it is. It takes a time in proportion to
/// the length of the output, whatever is in it.
pub fn clean(bytes: &[u8]) -> Cleaned {
    let text = String::from_utf8_lossy(bytes);
    // 0xc2 begins the control characters above ASCII, and a few others, with which it takes longer and comes to the same.
    let is_plain = |byte: &u8| matches!(byte, b'\n' | b'\t' | b' '..=b'~' | 0x80..=0xc1 | 0xc3..);
    if bytes.iter().all(is_plain) {
        return Cleaned { text: text.into_owned(), full_screen: false };
    }
    let mut screen = Screen::default();
    let mut rest = text.chars();
    while let Some(char) = rest.next() {
        match char {
            '\x1b' => screen.escape(&mut rest),
            '\n' => screen.new_line(),
            '\r' => screen.column = 0,
            '\x08' => screen.column = screen.column.saturating_sub(1),
            '\x07' => {}
            '\t' => screen.put(char),
            _ if char.is_control() => screen.put(char::REPLACEMENT_CHARACTER),
            _ => screen.put(char),
        }
    }
    Cleaned { text: screen.text(), full_screen: screen.was_taken }
}

/// Lines above the last that a cursor can go to, as many as a large terminal has.
const REACH: usize = 60;

/// Spaces that one sequence can put at the end of a line.
const MOST_SPACES: usize = 80;

/// Lines that were printed and a cursor in them, which is never behind the end of its line.
struct Screen {
    lines: Vec<Vec<char>>,
    row: usize,
    column: usize,
    /// Whether a program took it for itself.
    was_taken: bool,
}

impl Default for Screen {
    fn default() -> Self {
        Self { lines: vec![Vec::new()], row: 0, column: 0, was_taken: false }
    }
}

impl Screen {
    fn put(&mut self, char: char) {
        let line = &mut self.lines[self.row];
        match line.get_mut(self.column) {
            Some(place) => *place = char,
            None => line.push(char),
        }
        self.column += 1;
    }

    fn new_line(&mut self) {
        self.row += 1;
        self.column = 0;
        if self.row == self.lines.len() {
            self.lines.push(Vec::new());
        }
    }

    fn go_to_column(&mut self, column: usize) {
        let line = &mut self.lines[self.row];
        if column > line.len() {
            line.resize(column.min(line.len() + MOST_SPACES), ' ');
        }
        self.column = column.min(line.len());
    }

    fn go_up(&mut self, n: usize) {
        let top = self.lines.len().saturating_sub(REACH);
        self.row = self.row.saturating_sub(n).max(top.min(self.row));
        self.column = self.column.min(self.lines[self.row].len());
    }

    fn go_down(&mut self, n: usize) {
        self.row = self.row.saturating_add(n).min(self.lines.len() - 1);
        self.column = self.column.min(self.lines[self.row].len());
    }

    /// Goes to a line of its own at the end: what is drawn somewhere on the screen is read as a line.
    fn apart(&mut self) {
        self.row = self.lines.len() - 1;
        self.column = 0;
        if !self.lines[self.row].is_empty() {
            self.new_line();
        }
    }

    /// Carries out one escape sequence, of which the first character has been read.
    fn escape(&mut self, rest: &mut std::str::Chars<'_>) {
        let mut ahead = rest.clone();
        match ahead.next() {
            Some('[') => {
                *rest = ahead;
                self.control(rest);
            }
            // A title of the window or the like, up to its end, which is on the same line.
            Some(']' | 'P' | 'X' | '^' | '_') => {
                *rest = ahead;
                skip_string(rest);
            }
            // A choice of characters and the like: some of these, and one last.
            Some(' '..='/') => {
                *rest = ahead;
                skip_while(rest, |char| matches!(char, ' '..='/'));
                skip_one(rest, |char| matches!(char, '0'..='~'));
            }
            Some('0'..='~') => *rest = ahead,
            // An escape character alone is nothing to see.
            _ => {}
        }
    }

    /// Carries out a sequence that began with `ESC [`.
    fn control(&mut self, rest: &mut std::str::Chars<'_>) {
        let parameters = skip_while(rest, |char| matches!(char, '0'..='?'));
        skip_while(rest, |char| matches!(char, ' '..='/'));
        let Some(last) = skip_one(rest, |char| matches!(char, '@'..='~')) else { return };
        let number = parameters.split(';').next().and_then(|first| first.parse::<usize>().ok());
        let n = number.unwrap_or(1).max(1);
        match last {
            'A' => self.go_up(n),
            'F' => {
                self.go_up(n);
                self.column = 0;
            }
            'B' => self.go_down(n),
            'E' => {
                self.go_down(n);
                self.column = 0;
            }
            'C' => self.go_to_column(self.column.saturating_add(n)),
            'D' => self.column = self.column.saturating_sub(n),
            'G' => self.go_to_column(n - 1),
            'K' => match number.unwrap_or(0) {
                0 => self.lines[self.row].truncate(self.column),
                2 => {
                    self.lines[self.row].clear();
                    self.column = 0;
                }
                _ => {}
            },
            'H' | 'f' | 'd' => self.apart(),
            'h' | 'l' if parameters.starts_with('?') => {
                let is_screen = |mode: &str| matches!(mode, "47" | "1047" | "1049");
                if parameters[1..].split(';').any(is_screen) {
                    self.was_taken = true;
                    self.apart();
                }
            }
            _ => {}
        }
    }

    fn text(&self) -> String {
        let mut text = String::with_capacity(self.lines.iter().map(|line| line.len() + 1).sum());
        for (idx, line) in self.lines.iter().enumerate() {
            if idx > 0 {
                text.push('\n');
            }
            text.extend(line);
        }
        text
    }
}

/// Takes characters while they are wanted, and returns them.
fn skip_while<'a>(rest: &mut std::str::Chars<'a>, is_wanted: impl Fn(char) -> bool) -> &'a str {
    let text = rest.as_str();
    let end = text.find(|char| !is_wanted(char)).unwrap_or(text.len());
    *rest = text[end..].chars();
    &text[..end]
}

/// Takes one character if it is wanted.
fn skip_one(rest: &mut std::str::Chars<'_>, is_wanted: impl Fn(char) -> bool) -> Option<char> {
    let char = rest.clone().next().filter(|char| is_wanted(*char))?;
    rest.next();
    Some(char)
}

/// Takes a text that ends with a bell or `ESC \`. One that has no end ends with its line.
fn skip_string(rest: &mut std::str::Chars<'_>) {
    skip_while(rest, |char| !matches!(char, '\x07' | '\x1b' | '\n'));
    if skip_one(rest, |char| char == '\x07').is_none() && rest.as_str().starts_with("\x1b\\") {
        *rest = rest.as_str()[2..].chars();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use tokio::time::Instant;

    use super::*;

    fn text(printed: &str) -> String {
        clean(printed.as_bytes()).text
    }

    #[test]
    fn a_terminal_shows_this() {
        for (printed, shown) in [
            ("plain\n\ttext \u{e4}\n", "plain\n\ttext \u{e4}\n"),
            (
                "\x1b[1;31mred\x1b[0m\x1b(B\x1b[m \x1b]0;title\x07x\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n",
                "red xlink\n",
            ),
            ("a\r\nb\r\n", "a\nb\n"),
            ("\r 10%\r 50%\r100%\n", "100%\n"),
            ("downloading\rdone\x1b[K\n", "done\n"),
            ("long line\rshort\n", "shortline\n"),
            ("abc\x08\x08X\n", "aXc\n"),
            ("N\x08NA\x08AM\x08M\n", "NAM\n"),
            ("one\ntwo\n\x1b[2A\x1b[2Kone: done\n\x1b[1B", "one: done\ntwo\n"),
            ("a\x1b[3Cb\x1b[1GX\x1b[20Gend\n", "X   b              end\n"),
            ("bell\x07, nul \0, del \x7f, \u{85}\n", "bell, nul \u{fffd}, del \u{fffd}, \u{fffd}\n"),
            ("\x1b]0;no end\nnext\n", "\nnext\n"),
            ("\x1b[31\nnext\x1b", "\nnext"),
            ("\x1b[?25lhidden cursor\x1b[?25h\n", "hidden cursor\n"),
            ("\x1b[H\x1b[2J\x1b[3Jcleared\n", "cleared\n"),
        ] {
            assert_eq!(text(printed), shown, "{printed:?}");
        }
        assert_eq!(clean(b"\xff\x1b[m\xfe").text, "\u{fffd}\u{fffd}");
    }

    #[test]
    fn a_full_screen_program_is_told() {
        let drawn = clean(b"\x1b[?1049h\x1b[1;1Hfirst\x1b[2;1Hsecond\x1b[24;1H\x1b[7mEND\x1b[m");
        assert_eq!(drawn, Cleaned { text: "first\nsecond\nEND".to_owned(), full_screen: true });
        assert!(clean(b"\x1b[?12;1047l").full_screen);
        assert!(!clean(b"\x1b[?25l\x1b[2J").full_screen);
    }

    #[test]
    fn time_is_in_proportion_to_length() {
        for piece in [
            "\x1b[1K",
            "\x1b[2K",
            "\x1b[K",
            "\x1b[99C\x1b[1G",
            "\x1b[999A\x1b[999B",
            "\x1b",
            "\x1b]",
            "\x1b[",
            "\x1b[1;",
            "\x1bP\x1b",
            "x\r",
            "\n\x1b[9A",
            "\x1b[H",
        ] {
            // The longest line there is, then as many of these.
            let printed = "x".repeat(1 << 19) + &piece.repeat((1 << 19) / piece.len());
            let begun = Instant::now();
            clean(printed.as_bytes());
            // In proportion it takes milliseconds, and by the square of the length minutes.
            assert!(begun.elapsed() < Duration::from_secs(5), "{piece:?}: {:?}", begun.elapsed());
        }
    }

    /// What terminals are sent, and what is like it.
    fn printed() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            "[a-c \u{e4}\t\n\r]{0,6}".prop_map(String::into_bytes),
            "\x1b\\[[0-9;?]{0,4}[A-HJKfdmhl ]?".prop_map(String::into_bytes),
            "\x1b[\\]P_][a-z\x07\x1b\\\\\n]{0,5}".prop_map(String::into_bytes),
            proptest::collection::vec(any::<u8>(), 0..6),
            proptest::collection::vec(0_u8..0x20, 0..4),
        ];
        proptest::collection::vec(piece, 0..30).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn nothing_but_text_remains_and_it_remains_so(printed in printed()) {
            let once = clean(&printed);
            prop_assert!(!once.text.contains(|char: char| char.is_control() && char != '\n' && char != '\t'));
            prop_assert_eq!(clean(once.text.as_bytes()).text, once.text);
        }

        #[test]
        fn plain_text_is_unchanged(plain in "[^\\pC]{0,20}(\n\t?[^\\pC]{0,20}){0,5}") {
            prop_assert_eq!(text(&plain), plain.clone());
            // And goes the long way with the same result.
            prop_assert_eq!(text(&format!("\x1b[m{plain}")), plain);
        }
    }
}
