//! What holds for every number, and for every text.

use proptest::prelude::*;

use super::super::{MAX_VALUE_BYTES, Verdict, grade};

fn is_equal(answer: &str, truth: &str) -> bool {
    grade(&format!(r"\boxed{{{answer}}}"), truth).verdict == Verdict::Equal
}

/// Writes an integer with a separator between its thousands.
fn grouped(number: u64, separator: &str) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (idx, digit) in digits.chars().enumerate() {
        if idx > 0 && (digits.len() - idx).is_multiple_of(3) {
            out.push_str(separator);
        }
        out.push(digit);
    }
    out
}

proptest! {
    #[test]
    fn a_fraction_has_one_value(n in -10_000_i64..10_000, d in 1_i64..10_000, factor in 1_i64..1000) {
        let plain = format!("{n}/{d}");
        for other in [
            format!(r"\frac{{{n}}}{{{d}}}"),
            format!(r"\dfrac{{{}}}{{{}}}", n * factor, d * factor),
            format!(r"\frac{{{}}}{{{}}}", -n, -d),
            format!("({n})/({d})"),
            format!("x = {n}/{d}"),
        ] {
            prop_assert!(is_equal(&other, &plain), "{other} against {plain}");
            prop_assert!(is_equal(&plain, &other), "{plain} against {other}");
        }
        let next = format!("{}/{d}", n + 1);
        prop_assert!(!is_equal(&next, &plain));
    }

    #[test]
    fn a_mixed_number_is_its_fraction(whole in 0_u64..10_000, n in 0_u64..100, more in 1_u64..100) {
        let d = n + more;
        let improper = format!("{}/{d}", whole * d + n);
        let (mixed, latex) = (format!("{whole} {n}/{d}"), format!(r"{whole}\frac{{{n}}}{{{d}}}"));
        prop_assert!(is_equal(&mixed, &improper));
        prop_assert!(is_equal(&latex, &improper));
    }

    #[test]
    fn a_decimal_is_its_fraction(digits in 0_u64..10_000_000_000, places in 1_u32..10) {
        let scale = 10_u64.pow(places);
        let (whole, part, width) = (digits / scale, digits % scale, places as usize);
        let decimal = format!("{whole}.{part:0width$}");
        let (fraction, scientific) = (format!("{digits}/{scale}"), format!("{digits}e-{places}"));
        prop_assert!(is_equal(&decimal, &fraction), "{}", decimal);
        let padded = format!("{decimal}00");
        prop_assert!(is_equal(&padded, &decimal));
        prop_assert!(is_equal(&scientific, &decimal));
    }

    #[test]
    fn a_percentage_is_its_hundredth(n in 0_u64..100_000) {
        let signs = [format!("{n}%"), format!(r"{n}\%"), format!("{n} percent")];
        let fraction = format!("{n}/100");
        for percent in &signs {
            prop_assert!(is_equal(percent, &fraction));
            prop_assert!(is_equal(&n.to_string(), percent));
            prop_assert!(!is_equal(percent, &(n + 1).to_string()));
        }
    }

    #[test]
    fn separators_do_not_count(n in any::<u64>()) {
        for separator in [",", "{,}", r"\,", r"\ ", ",\\!", "\u{a0}"] {
            prop_assert!(is_equal(&grouped(n, separator), &n.to_string()), "{}", grouped(n, separator));
        }
    }

    #[test]
    fn integers_are_exact(digits in "[1-9][0-9]{0,400}") {
        prop_assert!(is_equal(&digits, &digits));
        let (measured, decimal, longer) = (format!("{digits} cm"), format!("{digits}.0"), format!("{digits}0"));
        prop_assert!(is_equal(&measured, &decimal));
        prop_assert!(!is_equal(&longer, &digits));
        let last = if digits.ends_with('1') { '2' } else { '1' };
        let close = format!("{}{last}", &digits[..digits.len() - 1]);
        prop_assert!(!is_equal(&close, &digits), "{} against {}", close, digits);
    }

    #[test]
    fn printed_floats_are_the_fractions_they_come_from(n in 1_i32..10_000, d in 1_i32..10_000) {
        let float = f64::from(n) / f64::from(d);
        let fraction = format!("{n}/{d}");
        prop_assert!(is_equal(&float.to_string(), &fraction), "{} against {}", float, fraction);
        prop_assert!(is_equal(&fraction, &float.to_string()), "{} against {}", fraction, float);
    }

    #[test]
    fn tuples_keep_their_order(items in prop::collection::vec(-1000_i32..1000, 2..8)) {
        let write = |items: &[i32], separator: &str| {
            items.iter().map(i32::to_string).collect::<Vec<_>>().join(separator)
        };
        let truth = format!("({})", write(&items, ", "));
        let reversed: Vec<i32> = items.iter().rev().copied().collect();
        let spelled = format!(r"\left({}\right)", write(&items, ","));
        let reversed_list = write(&reversed, ", ");
        let list = write(&items, ", ");
        prop_assert!(is_equal(&spelled, &truth), "{} against {}", spelled, truth);
        prop_assert_eq!(is_equal(&format!("({reversed_list})"), &truth), items == reversed);
        prop_assert!(is_equal(&reversed_list, &list));
    }

    #[test]
    fn no_text_is_a_panic(answer in any::<String>(), truth in any::<String>()) {
        grade(&answer, &truth);
        grade(&format!(r"\boxed{{{answer}}}"), &truth);
    }

    #[test]
    fn no_mathematical_text_is_a_panic(
        answer in r"([0-9]{1,3}|[(){}\[\],;. +*/%^_=°∞×−½é$-]|\\frac|\\sqrt|\\text|\\boxed|\\left|\\[{},! ]|e9| or |x|\\circ){0,40}",
        truth in r"([0-9]{1,3}|[(){}\[\],. /%^=-]|\\frac|\\sqrt|10\^|e-9){0,20}",
    ) {
        let there = grade(&answer, &truth);
        prop_assert_eq!(there.verdict == Verdict::Equal, there.reward > 0.5);
        grade(&format!(r"\boxed{{{answer}}}"), &truth);
    }
}

/// Texts that a scorer which rescans, recurses or expands would sit over for hours, or die of; here they take seconds,
/// and the test runner ends what hangs.
#[test]
fn a_megabyte_of_anything_ends() {
    let pieces = [
        "{",
        "}",
        "(",
        "[",
        r"\boxed{",
        r"\boxed{1}",
        r"\frac",
        r"\frac{1}",
        r"\{",
        "\\",
        "9",
        "1,",
        "1, ",
        ",",
        "^{",
        "x=",
        "answer is ",
        "answer ",
        "answer",
        "####",
        "<think>",
        "</think>",
        "$",
        " ",
        "\n",
        "-",
        "/",
        "1e999 ",
        "10^",
        " or ",
        "é",
        "*",
        "%",
        "1 1/2 ",
    ];
    for piece in pieces {
        for size in [MAX_VALUE_BYTES - 100, 1 << 20] {
            let text = piece.repeat(size / piece.len());
            grade(&text, "5");
            grade(&text, &text);
            grade(&format!(r"\boxed{{{text}}}"), &text);
            grade(&format!("The answer is {text}"), "5");
        }
    }
}

#[test]
fn huge_numbers_are_compared_without_being_expanded() {
    for huge in ["10^999999999", "1e999999999", "1e-999999999", r"2 \times 10^{99999999999999999999}", "1e1001"] {
        assert!(!is_equal(huge, "5"), "{huge}");
        assert!(!is_equal("5", huge), "{huge}");
        assert!(is_equal(huge, huge), "{huge}");
    }
    let digits = "7".repeat(MAX_VALUE_BYTES + 1);
    assert!(is_equal(&digits, &digits));
    assert!(!is_equal(&format!("{digits}7"), &digits));
    let many = vec!["1e1000"; 2500].join(", ");
    assert!(is_equal(&many, &many));
}
