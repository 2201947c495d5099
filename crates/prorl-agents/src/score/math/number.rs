//! Reads finished numbers as exact fractions.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow, Zero};

/// Nested parentheses of a number.
const MAX_DEPTH: usize = 8;

/// Powers of ten that are expanded, either way.
const MAX_EXPONENT: i64 = 1000;

/// How a number was written, which decides what it may stand for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Digits alone, or a decimal with nothing but zeros behind the point.
    Integer,
    /// A decimal: its significant digits, and the power of ten of the last one.
    Decimal { n_digits: usize, last_place: i64 },
    /// A fraction or a mixed number.
    Fraction,
}

/// A number and how it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Number {
    pub(super) value: BigRational,
    pub(super) form: Form,
    /// Whether a percent sign stands behind it; `value` is the figure before the sign.
    pub(super) percent: bool,
}

impl Number {
    /// Reads plain text that is one number and perhaps a unit.
    pub(super) fn read(text: &str) -> Option<Self> {
        let mut reader = Reader { rest: text };
        let number = reader.signed(0)?;
        number.with_unit(reader.rest)
    }

    /// Returns the number itself, and for a percentage also the fraction that it stands for.
    pub(super) fn readings(&self) -> Vec<(BigRational, Form)> {
        let mut readings = vec![(self.value.clone(), self.form.clone())];
        if self.percent {
            readings.push(self.shifted(-2));
        }
        readings
    }

    /// Multiplies by a power of ten.
    fn shifted(&self, exponent: i64) -> (BigRational, Form) {
        let form = match &self.form {
            Form::Integer if exponent < 0 => Form::Fraction,
            Form::Decimal { n_digits, last_place } => {
                Form::Decimal { n_digits: *n_digits, last_place: last_place + exponent }
            }
            other => other.clone(),
        };
        (&self.value * power_of_ten(exponent), form)
    }

    fn with_unit(mut self, text: &str) -> Option<Self> {
        let mut text = text.trim_end();
        for (word, exponent) in [("hundred", 2), ("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12)] {
            if let Some(rest) = strip_word(text.trim_start(), word) {
                (self.value, self.form) = self.shifted(exponent);
                text = rest;
                break;
            }
        }
        let sign = text.trim_start();
        let percent = sign.strip_prefix('%').or_else(|| strip_word(sign, "percent"));
        if let Some(rest) = percent {
            return rest.trim().is_empty().then_some(Self { percent: true, ..self });
        }
        is_unit(text).then_some(self)
    }
}

fn strip_word<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    let head = text.get(..word.len())?;
    let rest = &text[word.len()..];
    (head.eq_ignore_ascii_case(word) && !rest.starts_with(char::is_alphabetic)).then_some(rest)
}

/// Returns a power of ten. Callers bound the exponent, by `MAX_EXPONENT` or by the digits of a text.
fn power_of_ten(exponent: i64) -> BigRational {
    let power = Pow::pow(BigInt::from(10), exponent.unsigned_abs());
    if exponent < 0 { BigRational::new(BigInt::one(), power) } else { BigRational::from_integer(power) }
}

/// Words that change a number, so that they are no units.
const NOT_UNITS: [&str; 56] = [
    "above",
    "and",
    "base",
    "below",
    "choose",
    "cos",
    "cot",
    "cubed",
    "dozen",
    "eight",
    "except",
    "exp",
    "factorial",
    "fewer",
    "fifths",
    "five",
    "four",
    "fourths",
    "greater",
    "half",
    "halves",
    "hundredths",
    "larger",
    "less",
    "log",
    "minus",
    "mod",
    "more",
    "nine",
    "not",
    "one",
    "over",
    "plus",
    "point",
    "quarters",
    "remainder",
    "root",
    "sec",
    "seven",
    "sin",
    "six",
    "smaller",
    "sqrt",
    "squared",
    "tan",
    "ten",
    "tenths",
    "than",
    "thirds",
    "thousandths",
    "three",
    "times",
    "two",
    "under",
    "without",
    "zero",
];

/// Units that do not look like words.
const SHORT_UNITS: [&str; 38] = [
    "C", "F", "GB", "Hz", "J", "K", "L", "MB", "MHz", "N", "V", "W", "cm", "dB", "dm", "ft", "g", "h", "hr", "hrs",
    "in", "kB", "kHz", "kW", "kWh", "kg", "km", "lb", "lbs", "m", "mL", "mg", "ml", "mm", "ms", "pts", "s", "sq",
];

/// Whether the text behind a number is nothing, or a unit that may be dropped.
///
/// `5 apples` is five; `5x`, `5 ab`, `5 pi` and `5 squared` are not. A unit of one letter needs a space before it, since
/// `5m` may as well be a product.
fn is_unit(text: &str) -> bool {
    const MAX_WORDS: usize = 4;
    let is_product = !text.starts_with([' ', '°']) && text.chars().nth(1).is_none_or(|c| !c.is_alphabetic());
    let text = text.trim_start().trim_start_matches('°').trim();
    let is_word = |word: &str| {
        let (name, power) = word.split_once('^').unwrap_or((word, "1"));
        let long = name.chars().count() > 2 && name.chars().all(char::is_alphabetic);
        let word = long && name.contains(['a', 'e', 'i', 'o', 'u', 'A', 'E', 'I', 'O', 'U']);
        matches!(power, "1" | "2" | "3" | "(-1)" | "(-2)")
            && (SHORT_UNITS.contains(&name) || (word && !NOT_UNITS.contains(&name.to_ascii_lowercase().as_str())))
    };
    let mut words = text.split([' ', '/', '-', '*', '.', '°']).filter(|word| !word.is_empty());
    text.is_empty() || (!is_product && words.by_ref().take(MAX_WORDS).all(is_word) && words.next().is_none())
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn eat(&mut self, token: &str) -> bool {
        match self.rest.trim_start().strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn digits(&mut self) -> &'a str {
        let len = self.rest.bytes().take_while(u8::is_ascii_digit).count();
        let (digits, rest) = self.rest.split_at(len);
        self.rest = rest;
        digits
    }

    fn signed(&mut self, depth: usize) -> Option<Number> {
        let negative = self.eat("-");
        if !negative {
            self.eat("+");
        }
        let mut number = self.quotient(depth)?;
        if negative {
            number.value = -number.value;
        }
        Some(number)
    }

    /// Reads a number, a fraction, a mixed number or a multiple of a power of ten.
    fn quotient(&mut self, depth: usize) -> Option<Number> {
        let first = self.primary(depth)?;
        if self.eat("/") {
            let negative = self.eat("-");
            let below = self.primary(depth)?.value;
            if below.is_zero() {
                return None;
            }
            let value = first.value / if negative { -below } else { below };
            return Some(Number { value, form: Form::Fraction, percent: false });
        }
        if first.form == Form::Integer
            && let Some(part) = self.proper_fraction()
        {
            return Some(Number { value: first.value + part, form: Form::Fraction, percent: false });
        }
        let start = self.rest;
        if self.eat("*") && self.eat("10") && self.eat("^") {
            let exponent = self.exponent()?;
            let (value, form) = first.shifted(exponent);
            return Some(Number { value, form, percent: false });
        }
        self.rest = start;
        Some(first)
    }

    /// Reads the second half of a mixed number, which has a space before it and is below one.
    fn proper_fraction(&mut self) -> Option<BigRational> {
        let start = self.rest;
        let read = |reader: &mut Self| {
            reader.rest = reader.rest.strip_prefix(' ')?;
            let above: BigInt = reader.digits().parse().ok()?;
            let below: BigInt = reader.eat("/").then(|| reader.digits().parse().ok())??;
            (above < below).then(|| BigRational::new(above, below))
        };
        let part = read(self);
        if part.is_none() {
            self.rest = start;
        }
        part
    }

    /// Reads an exponent, perhaps in parentheses, that is small enough to be expanded.
    fn exponent(&mut self) -> Option<i64> {
        let enclosed = self.eat("(");
        let negative = self.eat("-");
        if !negative {
            self.eat("+");
        }
        let exponent: i64 = self.digits().parse().ok()?;
        if exponent > MAX_EXPONENT || (enclosed && !self.eat(")")) {
            return None;
        }
        Some(if negative { -exponent } else { exponent })
    }

    fn primary(&mut self, depth: usize) -> Option<Number> {
        self.rest = self.rest.trim_start();
        if depth < MAX_DEPTH && self.eat("(") {
            let inner = self.signed(depth + 1)?;
            return self.eat(")").then_some(inner);
        }
        self.literal()
    }

    /// Reads digits with their thousands separators, decimal point and exponent.
    fn literal(&mut self) -> Option<Number> {
        let mut digits = self.digits().to_owned();
        if matches!(digits.len(), 1..=3) && !digits.starts_with('0') {
            self.thousands(&mut digits);
        }
        let is_ten = digits == "10";
        let mut fraction = "";
        let whole = self.rest;
        if let Some(rest) = whole.strip_prefix('.') {
            self.rest = rest;
            fraction = self.digits().trim_end_matches('0');
        }
        if digits.is_empty() && self.rest.len() + 1 >= whole.len() {
            return None; // neither `5`, nor `.5`
        }
        if is_ten && self.rest.starts_with('^') {
            self.rest = &self.rest[1..];
            let one = Number { value: BigRational::one(), form: Form::Integer, percent: false };
            let (value, form) = one.shifted(self.exponent()?);
            return Some(Number { value, form, percent: false });
        }
        digits.push_str(fraction);
        let mut exponent = 0;
        if let Some(rest) = self.rest.strip_prefix(['e', 'E'])
            && rest.trim_start_matches(['+', '-']).starts_with(|c: char| c.is_ascii_digit())
        {
            self.rest = rest;
            exponent = self.exponent()?;
        }
        let last_place = exponent - i64::try_from(fraction.len()).ok()?;
        let n_digits = digits.trim_start_matches('0').len();
        let form =
            if fraction.is_empty() && exponent >= 0 { Form::Integer } else { Form::Decimal { n_digits, last_place } };
        let digits: BigInt = digits.parse().ok()?;
        Some(Number { value: BigRational::from_integer(digits) * power_of_ten(last_place), form, percent: false })
    }

    /// Reads groups of three digits behind the first group, when there are any.
    ///
    /// A space groups too (`1\,000`), but not before a slash: `2 100/200` is a mixed number.
    fn thousands(&mut self, digits: &mut String) {
        let Some(separator) = self.rest.chars().next().filter(|c| matches!(c, ',' | ' ')) else { return };
        let mut groups = String::new();
        let mut rest = self.rest;
        while let Some(group) = rest.strip_prefix(separator) {
            let len = group.bytes().take_while(u8::is_ascii_digit).count();
            if len != 3 {
                break;
            }
            groups.push_str(&group[..3]);
            rest = &group[3..];
        }
        if separator == ' ' && rest.trim_start().starts_with('/') {
            return;
        }
        digits.push_str(&groups);
        self.rest = rest;
    }
}
