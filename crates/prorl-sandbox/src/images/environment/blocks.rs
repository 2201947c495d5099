//! Where in a script a line is: what stands in a block is not done always, and not everything that looks like a line is one.

/// Words that begin a block, and how it ends.
const BEGIN: [&str; 7] = ["if", "case", "for", "while", "until", "select", "{"];
const END: [&str; 4] = ["fi", "esac", "done", "}"];

/// Words after which a command begins.
const BEFORE_COMMANDS: [&str; 8] = ["if", "then", "elif", "else", "while", "until", "do", "{"];

/// Commands after which the rest of a script may not be reached.
const LEAVE: [&str; 3] = ["exit", "return", "exec"];

/// What is open after the lines that were passed. In doubt it is more than less: then plain lines are left out, and noted.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    depth: usize,
    n_parentheses: usize,
    is_continued: bool,
    /// Nothing can be said of any line to come.
    is_lost: bool,
}

impl Blocks {
    /// Tells whether the next line is not one of its own, or not one that is always reached.
    pub(super) fn is_inside(&self) -> bool {
        self.depth > 0 || self.n_parentheses > 0 || self.is_continued || self.is_lost
    }

    /// Passes a line.
    pub(super) fn pass(&mut self, line: &[u8]) {
        self.is_continued = false;
        // A word keeps its quotes, so that it is no keyword in them.
        let mut word = Vec::new();
        let mut begins_command = true;
        let mut quote = None;
        let mut bytes = line.iter().copied().peekable();
        while let Some(byte) = bytes.next() {
            if byte == b'\\' && quote != Some(b'\'') {
                self.is_continued = bytes.next().is_none();
                word.push(byte);
            } else if quote.is_some() {
                quote = quote.filter(|quote| *quote != byte);
            } else if matches!(byte, b'\'' | b'"' | b'`') {
                quote = Some(byte);
                word.push(byte);
            } else if byte == b'#' && word.is_empty() {
                break;
            } else if byte.is_ascii_whitespace() {
                self.end_word(&mut word, &mut begins_command);
            } else if matches!(byte, b';' | b'&' | b'|' | b'(' | b')') {
                self.end_word(&mut word, &mut begins_command);
                begins_command = true;
                match byte {
                    b'(' => self.n_parentheses += 1,
                    b')' => self.n_parentheses = self.n_parentheses.saturating_sub(1),
                    _ => {}
                }
            } else {
                // Lines that a command reads follow.
                self.is_lost |= byte == b'<' && bytes.peek() == Some(&b'<');
                word.push(byte);
            }
        }
        self.end_word(&mut word, &mut begins_command);
        self.is_lost |= quote.is_some();
    }

    fn end_word(&mut self, word: &mut Vec<u8>, begins_command: &mut bool) {
        if word.is_empty() {
            return;
        }
        let is_one_of = |words: &[&str]| words.iter().any(|known| known.as_bytes() == word.as_slice());
        if is_one_of(&BEGIN) {
            self.depth += 1;
            // Its patterns end in parentheses that nothing has opened.
            self.is_lost |= word == b"case" && self.n_parentheses > 0;
        } else if *begins_command && is_one_of(&END) {
            self.depth = self.depth.saturating_sub(1);
        }
        self.is_lost |= *begins_command && is_one_of(&LEAVE);
        *begins_command = is_one_of(&BEFORE_COMMANDS);
        word.clear();
    }
}
