//! The math scorer: is the final answer of a text the same as the ground truth?
//!
//! # Where the answer is
//!
//! LaTeX that lost a backslash to JSON is mended first: a backspace and `oxed{5}` were `\boxed{5}`. Text inside `<think>`
//! never counts. In what is left, the first of these that is there holds the answer:
//!
//! 1. the last complete `\boxed{..}`;
//! 2. what follows the last `answer is`, `answer:`, `answer =` or `####`, up to the end of the line or sentence, or to a reason
//!    (`, since ..`, `because ..`);
//! 3. the whole text, when it is one short line that reads as a value, with or without a reason, or has no digits;
//! 4. the last word with a digit in it.
//!
//! An empty box, or a text with none of these, is [`Verdict::Unreadable`].
//!
//! # What is equal
//!
//! Both sides are freed of LaTeX spelling (`\frac34`, `\left(`, `\text{..}`, `1{,}000`, `$`) and read as one of three
//! kinds of value; values of different kinds differ.
//!
//! * **Numbers** are compared as exact fractions of any size: integers, decimals, fractions, mixed numbers (`1 1/2`),
//!   scientific notation. Only *finished* numbers count: `3 \cdot 4` is not 12, since whoever repeats the exercise has
//!   not solved it. Units, currency signs and degrees are dropped, not converted. A percentage is equal to its fraction and to its
//!   bare figure: `50%` agrees with `0.5` and with `50`, while `0.5` and `50` differ.
//! * **Sequences**: tuples and intervals item by item with their brackets; sets and bare lists (`2, -1`,
//!   `x = 2 or x = -1`) of up to 64 items in any order. A bare list also agrees with a bracketed one in the same order. Between digits a
//!   comma groups thousands where it can (`1,000`); inside brackets it separates items (`(1,234)` is a pair), unless
//!   what follows could not stand alone (`(1,000)` is one thousand).
//! * **Texts** are compared without case, spaces and backslashes. A number with a unit agrees with a text of the same
//!   letters: `2 m` with `2m`, which may as well be a product.
//!
//! A decimal is exact, with two exceptions:
//!
//! * One with at least four significant digits may stand for a longer number that it is the rounding of: an answer
//!   `0.3333` for the truth `1/3`, or an answer `1/3` or `1.41421` for a truth `0.3333` or `1.4142`. An answer that is
//!   shorter than a decimal truth is wrong.
//! * One with at least twelve significant digits is taken for a printed binary float and has a tolerance of 1e-9,
//!   relative for numbers below one and absolute above: `0.30000000000000004` is `0.3`.
//!
//! # Bounds
//!
//! Work is linear in the text. An answer or truth of more than 20 kB is compared byte by byte, and exponents beyond
//! ±1000 are not expanded: such numbers are texts.

mod compare;
mod escape;
mod extract;
mod latex;
mod number;
#[cfg(test)]
mod tests;
mod value;

use serde::Serialize;

use value::Value;

/// Bytes of an answer or ground truth that are read as a value; what is longer is compared byte by byte.
const MAX_VALUE_BYTES: usize = 20_000;

/// Characters of an answer that a grade repeats.
const MAX_SHOWN_CHARS: usize = 1000;

/// What the comparison found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The answer is the ground truth.
    Equal,
    /// There is an answer, and it is another one.
    Different,
    /// There is no answer to compare.
    Unreadable,
}

/// The worth of one answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Grade {
    /// 1.0 for [`Verdict::Equal`], otherwise 0.0.
    pub reward: f64,
    /// What the comparison found.
    pub verdict: Verdict,
    /// The final answer as it was written, cut after 1000 characters; `None` when it is unreadable.
    pub answer: Option<String>,
    /// One sentence for people.
    pub reason: String,
}

/// Grades a text against the ground truth.
///
/// `ground_truth` is the bare answer, a JSON number or list written as text, or a worked solution whose answer is in
/// `\boxed{..}` or behind `####`. An empty one is no task: callers refuse it before a rollout starts, and here nothing
/// is equal to it.
///
/// ```
/// use prorl_agents::score::math::{Verdict, grade};
///
/// let grade = grade(r"Half of three halves is \boxed{\frac{3}{4}}.", "0.75");
/// assert_eq!((grade.reward, grade.verdict), (1.0, Verdict::Equal));
/// assert_eq!(grade.answer.as_deref(), Some(r"\frac{3}{4}"));
/// ```
pub fn grade(answer_text: &str, ground_truth: &str) -> Grade {
    let ground_truth = escape::restored(ground_truth);
    let truth = extract::truth(&ground_truth);
    let restored = escape::restored(answer_text);
    let Some(answer) = extract::final_answer(&restored) else {
        let reason = if answer_text.trim().is_empty() { "the text is empty" } else { "the text has no final answer" };
        return Grade { reward: 0.0, verdict: Verdict::Unreadable, answer: None, reason: reason.to_owned() };
    };
    let (reward, verdict, relation) =
        if same(answer, truth) { (1.0, Verdict::Equal, "is") } else { (0.0, Verdict::Different, "is not") };
    Grade {
        reward,
        verdict,
        answer: Some(clip(answer, MAX_SHOWN_CHARS)),
        reason: format!("the answer {} {relation} {}", clip(answer, 80), clip(truth, 80)),
    }
}

fn same(answer: &str, truth: &str) -> bool {
    if truth.is_empty() {
        return false;
    }
    if answer.len().max(truth.len()) > MAX_VALUE_BYTES {
        return answer == truth;
    }
    compare::same(&Value::read(answer), &Value::read(truth))
}

fn clip(text: &str, max_chars: usize) -> String {
    match text.char_indices().nth(max_chars) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
