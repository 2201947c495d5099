//! Finds the final answer in a text.

use super::value::Value;

/// Characters of a line that may be an answer as a whole.
const MAX_WHOLE_CHARS: usize = 80;

/// What introduces the reason for an answer.
const REASONS: [&str; 2] = [" since", " because"];

/// Returns the final answer, trimmed and not empty.
pub(super) fn final_answer(text: &str) -> Option<&str> {
    let said = without_thinking(text);
    let answer = match last_box(said) {
        // A box is the policy's own word for "final": an empty one is not replaced by a guess.
        Some(boxed) => tidy(boxed),
        None => marked(said).or_else(|| whole(said)).or_else(|| last_number(said))?,
    };
    (!answer.is_empty()).then_some(answer)
}

/// Returns the answer of a ground truth, which is bare unless it is a worked solution.
pub(super) fn truth(text: &str) -> &str {
    let answer = last_box(text).or_else(|| text.rfind("####").map(|at| &text[at + 4..]));
    tidy(answer.unwrap_or(text))
}

/// Drops thinking, also when it was cut before its end.
fn without_thinking(text: &str) -> &str {
    let after = text.rfind("</think>").map_or(text, |at| &text[at + "</think>".len()..]);
    after.find("<think>").map_or(after, |at| &after[..at])
}

/// Returns the content of the `\boxed{..}` that ends last. One pass: unfinished boxes cost nothing extra.
fn last_box(text: &str) -> Option<&str> {
    const BOXES: [&str; 2] = ["\\boxed", "\\fbox"];
    let bytes = text.as_bytes();
    let mut open = Vec::new(); // for each open brace: where its content starts, when it is a box
    let mut last = None;
    let mut pos = 0;
    while pos < bytes.len() {
        match bytes[pos] {
            b'\\' => pos += 1, // an escaped brace is text
            b'{' => {
                let before = text[..pos].trim_end_matches(' ');
                open.push(BOXES.iter().any(|name| before.ends_with(name)).then_some(pos + 1));
            }
            b'}' => {
                if let Some(Some(start)) = open.pop() {
                    last = Some(&text[start..pos]);
                }
            }
            _ => {}
        }
        pos += 1;
    }
    last
}

/// Cuts off what follows the first of these phrases.
fn before<'a>(text: &'a str, phrases: &[&str]) -> &'a str {
    let lower = text.to_ascii_lowercase(); // keeps byte positions
    let starts = phrases.iter().filter_map(|reason| {
        let mut found = lower.match_indices(reason).map(|(at, _)| at);
        found.find(|at| !lower[at + reason.len()..].starts_with(char::is_alphanumeric))
    });
    starts.min().map_or(text, |at| &text[..at])
}

/// Returns what follows the last phrase that announces an answer.
fn marked(text: &str) -> Option<&str> {
    let lower = text.to_ascii_lowercase(); // keeps byte positions
    let phrase = lower.rmatch_indices("answer").find_map(|(at, word)| {
        let rest = lower[at + word.len()..].trim_start_matches([' ', '*']);
        let rest = rest.strip_prefix(':').or_else(|| rest.strip_prefix('=')).or_else(|| rest.strip_prefix("is"))?;
        let boundary = !rest.starts_with(|next: char| next.is_alphanumeric());
        boundary.then_some(text.len() - rest.len())
    });
    let start = phrase.max(text.rfind("####").map(|at| at + 4))?;
    let rest = text[start..].trim_start_matches(|c: char| c.is_whitespace() || matches!(c, ':' | '*' | '='));
    let line = rest.lines().next().unwrap_or_default();
    let answer = formula(line).unwrap_or_else(|| {
        let sentence = line.find(". ").map_or(line, |end| &line[..end]);
        before(sentence, &[", as", ", so", REASONS[0], REASONS[1]])
    });
    Some(tidy(answer)).filter(|answer| !answer.is_empty())
}

/// Returns the formula that a line starts with, between its math delimiters.
fn formula(line: &str) -> Option<&str> {
    [("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")].iter().find_map(|(open, close)| {
        let (formula, _) = line.strip_prefix(open)?.split_once(close)?;
        // "$5 and $6" are two amounts, not the formula "5 and ".
        (!formula.ends_with(' ') || *close != "$").then_some(formula)
    })
}

/// Returns the whole text when it is nothing but an answer.
fn whole(text: &str) -> Option<&str> {
    let text = tidy(text);
    if text.is_empty() || text.contains('\n') || text.chars().count() > MAX_WHOLE_CHARS {
        return None;
    }
    let without_reason = tidy(before(text, &REASONS));
    if without_reason.len() < text.len() && Value::read(without_reason).is_numeric() {
        return Some(without_reason);
    }
    let has_digit = text.bytes().any(|byte| byte.is_ascii_digit());
    // Commands such as `\sqrt` are no words; a sentence has at least two.
    let n_words = text.split_whitespace().filter(|word| word.chars().filter(|c| c.is_alphabetic()).count() > 1);
    let n_words = n_words.filter(|word| !word.contains('\\')).count();
    (!has_digit || n_words < 2 || Value::read(text).is_numeric()).then_some(text)
}

/// Returns the last word that has a digit in it.
fn last_number(text: &str) -> Option<&str> {
    let word = text.split_whitespace().rfind(|word| word.bytes().any(|byte| byte.is_ascii_digit()))?;
    Some(tidy(word))
}

/// Drops spaces, Markdown emphasis, quotes and the punctuation of a sentence.
fn tidy(text: &str) -> &str {
    let text = text.trim_matches(|c: char| c.is_whitespace() || matches!(c, '*' | '`' | '"'));
    text.trim_end_matches(|c: char| c.is_whitespace() || matches!(c, '.' | ',' | ';' | ':' | '?' | '*' | '`' | '"'))
}
