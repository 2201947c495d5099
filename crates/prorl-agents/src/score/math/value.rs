//! Reads a text as a number, a sequence or a text.

use super::{latex, number::Number};

/// Nested sequences that are told apart; deeper ones are text.
const MAX_DEPTH: usize = 8;

/// The brackets of a list that has none.
const BARE: (char, char) = (' ', ' ');

/// A mathematical value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Value {
    /// The name before an equals sign, as in `x = 5`.
    pub(super) name: Option<String>,
    pub(super) kind: Kind,
    /// For a number its text in canonical form: `2 m`, a number, may be meant by `2m`, a text.
    pub(super) spelled: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Number(Number),
    Sequence(Sequence),
    /// Everything else, without case, spaces and backslashes.
    Text(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) brackets: (char, char),
    pub(super) items: Vec<Value>,
}

impl Sequence {
    pub(super) fn is_bare(&self) -> bool {
        self.brackets == BARE
    }

    /// Whether it may be a set: curly brackets, or none.
    pub(super) fn is_unordered(&self) -> bool {
        self.is_bare() || self.brackets == ('{', '}')
    }

    /// Whether names tell its items apart. In `x = 2 or x = -1` they do not.
    pub(super) fn is_named(&self) -> bool {
        self.items.iter().any(|item| item.name != self.items[0].name)
    }
}

impl Value {
    /// Reads LaTeX or plain text.
    pub(super) fn read(text: &str) -> Self {
        Self::read_plain(&latex::plain(text), 0)
    }

    /// Whether it consists of numbers alone.
    pub(super) fn is_numeric(&self) -> bool {
        match &self.kind {
            Kind::Number(_) => true,
            Kind::Sequence(sequence) => sequence.items.iter().all(Self::is_numeric),
            Kind::Text(_) => false,
        }
    }

    fn read_plain(text: &str, depth: usize) -> Self {
        let (name, text) = named(trim(text));
        let named = |kind| Self { name: name.map(canonical), kind, spelled: None };
        if depth < MAX_DEPTH {
            if let Some((brackets, inner)) = bracketed(text) {
                let items = split(inner, true);
                if let [item] = items[..]
                    && matches!(brackets, ('(', ')') | ('[', ']') | ('{', '}'))
                {
                    return Self { name: name.map(canonical), ..Self::read_plain(item, depth + 1) }; // nothing but grouping
                }
                return named(sequence(brackets, &items, depth));
            }
            if let Some(number) = Number::read(text) {
                return Self { spelled: Some(canonical(text)), ..named(Kind::Number(number)) };
            }
            let items = split(text, false);
            if items.len() > 1 {
                return named(sequence(BARE, &items, depth));
            }
        }
        named(Kind::Text(canonical(text)))
    }
}

fn sequence(brackets: (char, char), items: &[&str], depth: usize) -> Kind {
    let items = items.iter().map(|item| Value::read_plain(item, depth + 1)).collect();
    Kind::Sequence(Sequence { brackets, items })
}

/// Drops what stands around a value in a sentence.
fn trim(text: &str) -> &str {
    const HEDGES: [&str; 6] = ["about ", "approximately ", "approx. ", "around ", "exactly ", "roughly "];
    let text = text.trim_end_matches([' ', '.', ',', ';', ':', '"']).trim_start_matches([' ', '=', '"']);
    let text = text.strip_prefix('\'').and_then(|text| text.strip_suffix('\'')).unwrap_or(text);
    let hedge =
        HEDGES.iter().find(|hedge| text.get(..hedge.len()).is_some_and(|head| head.eq_ignore_ascii_case(hedge)));
    hedge.map_or(text, |hedge| text[hedge.len()..].trim_start())
}

/// Splits `x = 5` into the name and the value. An equation such as `x + y = 5` has no name.
fn named(text: &str) -> (Option<&str>, &str) {
    const MAX_NAME_CHARS: usize = 24;
    let Some((name, value)) = text.split_once('=') else { return (None, text) };
    let is_name = name.starts_with(|c: char| c.is_alphabetic() || c == '\\')
        && name.chars().all(|c| c.is_alphanumeric() || matches!(c, ' ' | '\\' | '_' | '(' | ')'))
        && name.chars().count() <= MAX_NAME_CHARS;
    if is_name && !value.contains('=') { (Some(name), value.trim_start()) } else { (None, text) }
}

/// Returns the brackets around a whole text and what is between them. `[1, 2)` counts, `(1, 2) ∪ (3, 4)` does not.
fn bracketed(text: &str) -> Option<((char, char), &str)> {
    let mut chars = text.chars();
    let open = chars.next().filter(|c| matches!(c, '(' | '[' | '{'))?;
    let close = chars.next_back().filter(|c| matches!(c, ')' | ']' | '}'))?;
    let inner = chars.as_str();
    let mut depth = 0_usize;
    for c in inner.chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.checked_sub(1)?,
            _ => {}
        }
    }
    (depth == 0 && !inner.trim().is_empty()).then_some(((open, close), inner))
}

/// Splits at the commas, semicolons, `and` and `or` outside brackets. Empty items are dropped.
///
/// A comma before exactly three digits may group thousands. It does where the text is not in brackets and every
/// comma without a space behind it could be such a one; otherwise only before a zero, since no item starts with that.
fn split(text: &str, in_brackets: bool) -> Vec<&str> {
    let bytes = text.as_bytes();
    let groups = |at: usize| {
        let digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
        at > 0 && digit(at - 1) && (1..=3).all(|step| digit(at + step)) && !digit(at + 4)
    };
    let mut tight_commas = text.match_indices(',').filter(|(at, _)| bytes.get(at + 1) != Some(&b' '));
    let strict = in_brackets || tight_commas.any(|(at, _)| !groups(at));
    let mut items = Vec::new();
    let mut depth = 0_usize;
    let (mut start, mut pos) = (0, 0);
    while pos < bytes.len() {
        let mut separator = 0;
        match bytes[pos] {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            b';' if depth == 0 => separator = 1,
            b',' if depth == 0 && !(groups(pos) && (!strict || bytes[pos + 1] == b'0')) => separator = 1,
            b' ' if depth == 0 => {
                let word = [" and ", " or "].iter().find(|word| {
                    bytes.get(pos..pos + word.len()).is_some_and(|head| head.eq_ignore_ascii_case(word.as_bytes()))
                });
                separator = word.map_or(0, |word| word.len() - 1); // its last space may begin the next one
            }
            _ => {}
        }
        if separator > 0 {
            items.push(&text[start..pos]);
            start = pos + separator;
        }
        pos += separator.max(1);
    }
    items.push(&text[start..]);
    items.retain(|item| !item.trim().is_empty());
    items
}

/// Writes a text without what does not count: case, spaces, backslashes, quotes and signs of multiplication.
fn canonical(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut gap = None;
    for c in text.chars().flat_map(char::to_lowercase) {
        match c {
            ' ' | '*' => gap = Some(c),
            '\\' | '"' => {}
            _ => {
                // Between digits they do count: `2 3` is not 23.
                if let Some(gap) = gap.take()
                    && c.is_ascii_digit()
                    && out.ends_with(|last: char| last.is_ascii_digit())
                {
                    out.push(gap);
                }
                out.push(c);
            }
        }
    }
    out
}
