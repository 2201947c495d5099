//! Decides whether two values are the same.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow, Signed};

use super::{
    number::{Form, Number},
    value::{Kind, Sequence, Value},
};

/// Significant digits from which a decimal may stand for a longer number.
const MIN_ROUNDED_DIGITS: usize = 4;

/// Significant digits from which a decimal is taken for a printed binary float.
const MIN_FLOAT_DIGITS: usize = 12;

/// Tolerance of a printed binary float: one part in this many.
const FLOAT_PARTS: i64 = 1_000_000_000;

/// Items up to which sets are compared in any order; the work grows with the square.
const MAX_UNORDERED_ITEMS: usize = 64;

/// Whether the answer is the truth.
pub(super) fn same(answer: &Value, truth: &Value) -> bool {
    match (&answer.kind, &truth.kind) {
        (Kind::Number(answer), Kind::Number(truth)) => same_number(answer, truth),
        (Kind::Sequence(answer), Kind::Sequence(truth)) => same_sequence(answer, truth),
        (Kind::Text(answer), Kind::Text(truth)) => answer == truth && !truth.is_empty(),
        (Kind::Number(_), Kind::Text(text)) => answer.spelled.as_ref() == Some(text),
        (Kind::Text(text), Kind::Number(_)) => truth.spelled.as_ref() == Some(text),
        _ => false,
    }
}

fn same_sequence(answer: &Sequence, truth: &Sequence) -> bool {
    if answer.items.len() != truth.items.len() {
        return false;
    }
    let any_order = answer.is_unordered()
        && truth.is_unordered()
        && answer.is_named() == truth.is_named()
        && truth.items.len() <= MAX_UNORDERED_ITEMS;
    if any_order {
        let named = truth.is_named();
        let same_item = |answer: &Value, truth: &Value| (!named || answer.name == truth.name) && same(answer, truth);
        let mut left: Vec<&Value> = truth.items.iter().collect();
        return answer.items.iter().all(|item| {
            let found = left.iter().position(|truth| same_item(item, truth));
            found.map(|idx| left.swap_remove(idx)).is_some()
        });
    }
    let brackets_agree = answer.brackets == truth.brackets || answer.is_bare() || truth.is_bare();
    brackets_agree && answer.items.iter().zip(&truth.items).all(|(answer, truth)| same(answer, truth))
}

fn same_number(answer: &Number, truth: &Number) -> bool {
    if answer.percent && truth.percent {
        return same_reading((&answer.value, &answer.form), (&truth.value, &truth.form));
    }
    let truths = truth.readings();
    answer
        .readings()
        .iter()
        .any(|(value, form)| truths.iter().any(|(truth, truth_form)| same_reading((value, form), (truth, truth_form))))
}

fn same_reading(answer: (&BigRational, &Form), truth: (&BigRational, &Form)) -> bool {
    answer.0 == truth.0 || answer_rounds_to(answer, truth) || rounds_to(truth, answer) || float_noise(answer, truth)
}

/// Whether a decimal truth is the rounding of an answer that is more precise.
fn answer_rounds_to(answer: (&BigRational, &Form), truth: (&BigRational, &Form)) -> bool {
    let more_precise = match (answer.1, truth.1) {
        (Form::Decimal { last_place: answer, .. }, Form::Decimal { last_place: truth, .. }) => answer < truth,
        (_, Form::Decimal { .. }) => true,
        _ => false,
    };
    more_precise && is_rounding(answer.0, truth)
}

/// Whether a decimal answer is the rounding of a truth that is written as a fraction.
fn rounds_to(truth: (&BigRational, &Form), answer: (&BigRational, &Form)) -> bool {
    *truth.1 == Form::Fraction && is_rounding(truth.0, answer)
}

/// Whether the decimal is within half a unit of its last place of the exact number.
fn is_rounding(exact: &BigRational, decimal: (&BigRational, &Form)) -> bool {
    let Form::Decimal { n_digits, last_place } = *decimal.1 else { return false };
    if n_digits < MIN_ROUNDED_DIGITS {
        return false;
    }
    // |exact - decimal| <= 10^place / 2
    let twice = (exact - decimal.0).abs() * BigInt::from(2);
    let power = Pow::pow(BigInt::from(10), last_place.unsigned_abs());
    if last_place < 0 { twice * power <= BigRational::one() } else { twice <= BigRational::from_integer(power) }
}

fn float_noise(answer: (&BigRational, &Form), truth: (&BigRational, &Form)) -> bool {
    let is_float = |form: &Form| matches!(form, Form::Decimal { n_digits, .. } if *n_digits >= MIN_FLOAT_DIGITS);
    if !is_float(answer.1) && !is_float(truth.1) {
        return false;
    }
    let scale = truth.0.abs().min(BigRational::one());
    (answer.0 - truth.0).abs() * BigInt::from(FLOAT_PARTS) <= scale
}
