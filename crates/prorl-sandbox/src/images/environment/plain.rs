//! Lines that set variables and do nothing else.

use super::{MAX_VALUE_BYTES, MAX_VARIABLES, Variable, Variables};
use crate::setup;

/// Returns what a line sets, in its order, or nothing for a line that does anything else.
pub(super) fn changes(line: &str, known: &Variables) -> Option<Vec<(String, Variable)>> {
    let mut reader = Reader { rest: line, known, changes: Vec::new(), n_seen: None };
    loop {
        reader.command()?;
        if !reader.eat(";") {
            break;
        }
        reader.skip_blanks();
        if reader.is_over() {
            break;
        }
    }
    reader.is_over().then_some(reader.changes)
}

/// What is still to be read of a line, and what it has set so far.
struct Reader<'a> {
    rest: &'a str,
    known: &'a Variables,
    changes: Vec<(String, Variable)>,
    /// How many of those references see, if not all.
    n_seen: Option<usize>,
}

/// Where a value, or a part of it, stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Within {
    /// A word without quotes.
    Word,
    /// Double quotes.
    Quotes,
}

impl Reader<'_> {
    /// Reads assignments, or an `export` of some.
    fn command(&mut self) -> Option<()> {
        self.skip_blanks();
        let mut rest = self.rest;
        let is_export = name(&mut rest) == Some("export") && rest.starts_with(is_blank);
        if is_export {
            self.rest = rest;
        }
        let n_before = self.changes.len();
        // The words of a command are read before it does anything, while assignments alone are done one by one.
        self.n_seen = is_export.then_some(n_before);
        loop {
            self.skip_blanks();
            if self.is_over() || self.rest.starts_with(';') {
                return (self.changes.len() > n_before).then_some(());
            }
            let name = name(&mut self.rest)?.to_owned();
            let before = self.variable(&name, self.changes.len()).cloned();
            let was_exported = before.as_ref().is_some_and(|variable| variable.is_exported);
            let value = if self.eat("=") {
                self.value()?
            } else if is_export {
                before?.value
            } else {
                return None;
            };
            if self.changes.len() >= MAX_VARIABLES || !self.rest.is_empty() && !self.rest.starts_with(is_end) {
                return None;
            }
            self.changes.push((name, Variable { value, is_exported: is_export || was_exported }));
        }
    }

    fn value(&mut self) -> Option<String> {
        let mut value = String::new();
        while !self.rest.is_empty() && !self.rest.starts_with(is_end) {
            self.piece(&mut value)?;
        }
        Some(value)
    }

    /// Reads a piece of a word that is in no quotes as a whole.
    fn piece(&mut self, value: &mut String) -> Option<()> {
        match self.next()? {
            '\'' => {
                let (text, rest) = self.rest.split_once('\'')?;
                self.rest = rest;
                is_text(text).then(|| value.push_str(text))?;
            }
            '"' => self.quotes(value, true)?,
            '$' => self.reference(value, Within::Word)?,
            '\\' => value.push(self.next().filter(|char| !char.is_control())?),
            char if is_plain(char) => value.push(char),
            _ => return None,
        }
        (value.len() <= MAX_VALUE_BYTES).then_some(())
    }

    /// Reads up to the end of double quotes.
    fn quotes(&mut self, value: &mut String, has_references: bool) -> Option<()> {
        loop {
            match self.next()? {
                '"' => return Some(()),
                '$' if has_references => self.reference(value, Within::Quotes)?,
                char => self.quoted(char, value)?,
            }
            if value.len() > MAX_VALUE_BYTES {
                return None;
            }
        }
    }

    /// Takes what is in double quotes and no reference.
    fn quoted(&mut self, char: char, value: &mut String) -> Option<()> {
        match char {
            '$' | '`' => return None,
            '\\' => match self.rest.chars().next()? {
                escaped @ ('$' | '`' | '"' | '\\') => {
                    self.next();
                    value.push(escaped);
                }
                _ => value.push('\\'),
            },
            '\t' => value.push('\t'),
            char if char.is_control() => return None,
            char => value.push(char),
        }
        Some(())
    }

    /// Reads what stands for a variable's value: `NAME`, `{NAME}` or `{NAME:-OTHERWISE}`.
    fn reference(&mut self, value: &mut String, within: Within) -> Option<()> {
        let has_braces = self.eat("{");
        let name = name(&mut self.rest)?.to_owned();
        let found = match self.variable(&name, self.n_seen.unwrap_or(self.changes.len())) {
            Some(variable) => Some(variable.value.clone()),
            // What a sandbox's programs have where the image says nothing.
            None => (name == "PATH").then(|| setup::PATH.to_owned()),
        };
        if has_braces && self.eat(":-") {
            let otherwise = self.otherwise(within)?;
            value.push_str(found.as_ref().filter(|found| !found.is_empty()).unwrap_or(&otherwise));
            return Some(());
        }
        if has_braces && !self.eat("}") {
            return None;
        }
        value.push_str(&found?);
        Some(())
    }

    /// Reads what counts where a variable is not set, up to the brace. References are not read in it: it would never end.
    fn otherwise(&mut self, within: Within) -> Option<String> {
        let mut value = String::new();
        loop {
            match self.next()? {
                '}' => return Some(value),
                '"' => self.quotes(&mut value, false)?,
                char if within == Within::Quotes => self.quoted(char, &mut value)?,
                char if is_plain(char) => value.push(char),
                _ => return None,
            }
        }
    }

    /// Returns what a variable is after the first changes of the line.
    fn variable(&self, name: &str, n_changes: usize) -> Option<&Variable> {
        let changed = self.changes[..n_changes].iter().rev().find(|(changed, _)| changed == name);
        changed.map(|(_, variable)| variable).or_else(|| self.known.by_name.get(name))
    }

    fn next(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let next = chars.next();
        self.rest = chars.as_str();
        next
    }

    fn eat(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn skip_blanks(&mut self) {
        self.rest = self.rest.trim_start_matches(is_blank);
    }

    /// Tells whether nothing but a comment follows. Only what follows a blank is one.
    fn is_over(&self) -> bool {
        self.rest.is_empty() || self.rest.starts_with('#')
    }
}

/// Takes a variable's name off the front.
fn name<'a>(rest: &mut &'a str) -> Option<&'a str> {
    let len = rest.find(|char: char| !(char.is_ascii_alphanumeric() || char == '_')).unwrap_or(rest.len());
    let (name, after) = rest.split_at(len);
    if name.is_empty() || name.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    *rest = after;
    Some(name)
}

fn is_blank(char: char) -> bool {
    char == ' ' || char == '\t'
}

fn is_end(char: char) -> bool {
    is_blank(char) || char == ';'
}

/// Tells whether a character means itself outside of quotes.
fn is_plain(char: char) -> bool {
    char.is_ascii_alphanumeric() || "%+,-./:@^_=!#".contains(char) || !char.is_ascii() && !char.is_control()
}

fn is_text(text: &str) -> bool {
    text.chars().all(|char| char == '\t' || !char.is_control())
}
