//! The tokens beside the vocabulary: `<|im_end|>`, `<tool_call>` and their like.
//!
//! A template writes them and means control ids. The same letters inside a content are plain text. To keep the two apart,
//! content is *broken*: a marker character that occurs nowhere goes into each occurrence before the template sees it.
//! What is unbroken in the rendered text was written by the template.

use std::collections::HashMap;

use aho_corasick::{AhoCorasick, MatchKind};
use prorl_core::TokenId;
use serde_json::Value;

/// One added token.
#[derive(Clone, Debug)]
pub(crate) struct AddedToken {
    pub(crate) id: TokenId,
    pub(crate) content: String,
    /// Special ones steer the model; the others (`<tool_call>`, `<think>`) are text of its own that has one id.
    pub(crate) special: bool,
}

/// Which added tokens to break in a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    /// Every one: what users and tools say.
    All,
    /// Special ones: what an assistant is quoted with may hold `<tool_call>`.
    Special,
}

/// Finds added tokens in text.
pub(crate) struct AddedTokens {
    tokens: Vec<AddedToken>,
    by_id: HashMap<TokenId, usize>,
    longest: AhoCorasick,
    every: AhoCorasick,
    every_special: AhoCorasick,
    specials: Vec<usize>,
}

impl AddedTokens {
    pub(crate) fn new(tokens: Vec<AddedToken>) -> Result<Self, aho_corasick::BuildError> {
        let contents = || tokens.iter().map(|token| &token.content);
        let specials: Vec<usize> = (0..tokens.len()).filter(|idx| tokens[*idx].special).collect();
        Ok(Self {
            longest: AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents())?,
            every: AhoCorasick::new(contents())?,
            every_special: AhoCorasick::new(specials.iter().map(|idx| &tokens[*idx].content))?,
            by_id: tokens.iter().enumerate().map(|(idx, token)| (token.id, idx)).collect(),
            specials,
            tokens,
        })
    }

    pub(crate) fn tokens(&self) -> &[AddedToken] {
        &self.tokens
    }

    pub(crate) fn by_id(&self, id: TokenId) -> Option<&AddedToken> {
        self.by_id.get(&id).map(|idx| &self.tokens[*idx])
    }

    pub(crate) fn by_content(&self, content: &str) -> Option<&AddedToken> {
        self.tokens.iter().find(|token| token.content == content)
    }

    /// Added tokens of `text` in order, the longest first where several start: start, end, token.
    pub(crate) fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, usize, &'a AddedToken)> + 'a {
        self.longest.find_iter(text).map(|found| (found.start(), found.end(), &self.tokens[found.pattern().as_usize()]))
    }

    /// Puts `marker` behind the first character of each added token's text.
    pub(crate) fn break_text(&self, text: &str, marker: char, which: Break) -> String {
        let automaton = match which {
            Break::All => &self.every,
            Break::Special if self.specials.is_empty() => return text.to_owned(),
            Break::Special => &self.every_special,
        };
        // Every occurrence, overlapping ones too: breaking one must not leave another whole.
        let mut starts: Vec<usize> = automaton.find_overlapping_iter(text).map(|found| found.start()).collect();
        starts.sort_unstable();
        starts.dedup();
        let mut broken = String::with_capacity(text.len() + starts.len() * marker.len_utf8());
        let mut done = 0;
        for start in starts {
            let first = text[start..].chars().next().map_or(0, char::len_utf8);
            broken.push_str(&text[done..start + first]);
            broken.push(marker);
            done = start + first;
        }
        broken.push_str(&text[done..]);
        broken
    }

    /// Breaks every text inside a JSON value, keys too.
    pub(crate) fn break_value(&self, value: &Value, marker: char, which: Break) -> Value {
        match value {
            Value::String(text) => Value::String(self.break_text(text, marker, which)),
            Value::Array(items) => items.iter().map(|item| self.break_value(item, marker, which)).collect(),
            Value::Object(fields) => fields
                .iter()
                .map(|(key, value)| (self.break_text(key, marker, which), self.break_value(value, marker, which)))
                .collect(),
            other => other.clone(),
        }
    }
}

/// Code points of Unicode's third private area, which no text assigns a meaning to.
const MARKERS: std::ops::RangeInclusive<char> = '\u{10_0000}'..='\u{10_FFFD}';

/// Finds the first marker candidate that occurs in none of the texts; nothing is left only when they hold all 65,534.
pub(crate) fn choose_marker<'a>(texts: impl Iterator<Item = &'a str>) -> Option<char> {
    let mut used: Vec<char> = texts.flat_map(str::chars).filter(|letter| MARKERS.contains(letter)).collect();
    used.sort_unstable();
    used.dedup();
    MARKERS.enumerate().find(|(idx, candidate)| used.get(*idx) != Some(candidate)).map(|(_, candidate)| candidate)
}

/// Visits every text inside a JSON value.
pub(crate) fn texts_of<'a>(value: &'a Value, out: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => out.push(text),
        Value::Array(items) => items.iter().for_each(|item| texts_of(item, out)),
        Value::Object(fields) => {
            for (key, value) in fields {
                out.push(key);
                texts_of(value, out);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added() -> AddedTokens {
        let token = |id, content: &str, special| AddedToken { id, content: content.into(), special };
        AddedTokens::new(vec![token(1, "<|a|>", true), token(2, "<t>", false), token(3, "<t><t>", false)]).unwrap()
    }

    #[test]
    fn a_broken_text_holds_no_added_token_and_loses_nothing() {
        for text in ["<|a|>", "x<t><t><t>y", "<<|a|>|a|>", "plain", ""] {
            let broken = added().break_text(text, '\u{10_0000}', Break::All);
            assert_eq!(added().find(&broken).count(), 0, "{broken:?}");
            assert_eq!(broken.replace('\u{10_0000}', ""), text);
        }
        assert_eq!(added().break_text("<t><|a|>", '!', Break::Special), "<t><!|a|>");
    }

    #[test]
    fn the_longest_token_wins() {
        let added = added();
        let ids: Vec<_> = added.find("<t><t><t>").map(|(_, _, token)| token.id).collect();
        assert_eq!(ids, [3, 2]);
    }

    #[test]
    fn the_marker_occurs_in_no_text() {
        assert_eq!(choose_marker(["a"].into_iter()), Some('\u{10_0000}'));
        assert_eq!(choose_marker(["\u{10_0001}", "\u{10_0000}\u{10_0003}"].into_iter()), Some('\u{10_0002}'));
        let all: String = MARKERS.collect();
        assert_eq!(choose_marker([all.as_str()].into_iter()), None);
    }
}
