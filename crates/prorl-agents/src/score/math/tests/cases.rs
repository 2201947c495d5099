//! A table of answers and truths with their verdicts.

use super::super::{Verdict, grade};

/// Answer, ground truth: the same.
const EQUAL: &[(&str, &str)] = &[
    // Integers of any size.
    ("5", "5"),
    ("+5", "5"),
    ("-5", "-5"),
    ("\u{2212}5", "-5"),
    ("- 5", "-5"),
    ("007", "7"),
    ("0", "-0"),
    ("123456789012345678901234567890", "123456789012345678901234567890"),
    ("123,456,789,012,345,678,901,234,567,890", "123456789012345678901234567890"),
    // Thousands.
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    ("12{,}345{,}678", "12345678"),
    (r"1\,000", "1000"),
    (r"1\ 000\ 000", "1000000"),
    (r"1,\!000", "1000"),
    ("1 000 000", "1,000,000"),
    ("1,234.50", "1234.5"),
    ("(1,000)", "1000"),
    // Decimals.
    ("0.5", "0.50"),
    (".5", "0.5"),
    ("5.", "5"),
    ("5.0", "5"),
    ("-0.25", "-.25"),
    ("3.0", "3"),
    ("3", "3.0"),
    // Fractions.
    ("3/4", "0.75"),
    ("3 / 4", "3/4"),
    ("6/8", "3/4"),
    (r"\frac{3}{4}", "3/4"),
    (r"\dfrac{3}{4}", "3/4"),
    (r"\tfrac{3}{4}", "0.75"),
    (r"\frac34", "3/4"),
    (r"\frac 3 4", "3/4"),
    (r"\frac3{4}", "3/4"),
    (r"\frac{3}4", "3/4"),
    (r"-\frac{3}{4}", "-3/4"),
    (r"\frac{-3}{4}", "-3/4"),
    (r"\frac{3}{-4}", "-0.75"),
    ("-3/-4", "3/4"),
    ("(-3)/4", "-(3/4)"),
    (r"\frac{1.5}{2}", "3/4"),
    (r"\frac{\frac{1}{2}}{3}", "1/6"),
    (r"\frac{1{,}000}{3}", "1000/3"),
    (r"\frac{10}{2}", "5"),
    ("½", "0.5"),
    ("2½", "5/2"),
    ("3⁄4", "3/4"),
    // Mixed numbers.
    ("1 1/2", "3/2"),
    (r"1\frac{1}{2}", "1.5"),
    (r"-1\frac12", "-1.5"),
    (r"2 \dfrac{3}{4}", "11/4"),
    ("2 100/200", "2.5"),
    // Percentages.
    ("50%", "0.5"),
    (r"50\%", "50%"),
    ("50", "50%"),
    ("50%", "50"),
    ("1/2", r"50\%"),
    ("12.5 %", "1/8"),
    ("12.5 percent", "12.5%"),
    // Units, currencies, degrees.
    ("5 cm", "5"),
    (r"5\text{ cm}", "5"),
    (r"5\,\mathrm{m}", "5"),
    (r"5~\text{m/s}^2", "5"),
    ("5 km/h", "5 km/h"),
    ("5km", "5"),
    (r"5\text{m}", "5"),
    ("5 m", "5"),
    ("9.8 m/s^2", "9.8"),
    ("5 square meters", "5"),
    ("2m", "2 m"),
    ("2 m", "2m"),
    ("x = 2m", "2 m"),
    ("(2m, 3m)", "(2 m, 3 m)"),
    ("12 apples", "12"),
    ("5", "5 cm"),
    ("$5", "5"),
    (r"\$5", "5"),
    (r"\$1,234.50", "1234.5"),
    ("€5", "5"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"90\degree", "90°"),
    ("90 degrees", r"90^\circ"),
    ("25 °C", "25"),
    ("5 million", "5000000"),
    ("2.5 million dollars", "2500000"),
    ("3 hundred", "300"),
    // Names and hedges.
    ("x = 5", "5"),
    ("x=5", "x = 5"),
    ("5", "n = 5"),
    (r"\theta = 30^\circ", "30"),
    ("f(2) = 7", "7"),
    (r"x \approx 3.5", "3.5"),
    ("about 5", "5"),
    ("= 5", "5"),
    ("≈ 5", "5"),
    // Scientific notation.
    (r"1.2 \times 10^3", "1200"),
    (r"1.2 \cdot 10^{3}", "1200"),
    ("1.2e3", "1200"),
    ("1.2E+3", "1200"),
    (r"5 \times 10^{-4}", "0.0005"),
    ("5e-4", "1/2000"),
    ("10^6", "1000000"),
    ("10^{-2}", "0.01"),
    ("3 × 10^8 m/s", "300000000"),
    // Approximations.
    ("0.3333", "1/3"),
    ("0.66667", r"\frac{2}{3}"),
    ("1/3", "0.3333"),
    ("1.41421356", "1.4142"),
    ("33.3333%", "1/3"),
    ("0.30000000000000004", "0.3"),
    ("0.6666666666666666", "2/3"),
    ("1.9999999999999998", "2"),
    ("0.3", "0.30000000000000004"),
    ("602214076000000000000000", r"6.022 \times 10^{23}"),
    // Delimiters and grouping.
    ("$5$", "5"),
    (r"\(5\)", "5"),
    (r"\left(5\right)", "5"),
    ("{5}", "5"),
    ("(5)", "5"),
    ("[5]", "5"),
    (r"\displaystyle\frac{1}{2}", "0.5"),
    ("\"5\"", "5"),
    ("5", "\"5\""),
    // Tuples, intervals, sets, lists.
    ("(1,2)", "(1, 2)"),
    (r"\left( 1, \frac{1}{2} \right)", "(1, 0.5)"),
    ("1, 2", "(1,2)"),
    ("[0, 1)", r"\left[0,1\right)"),
    (r"(-\infty, 3]", "(-∞,3]"),
    (r"x \in [1, 2]", "[1,2]"),
    ("(1,234)", "(1, 234)"),
    ("(1,000, 2,000)", "(1000, 2000)"),
    ("1,000, 2,000", "1000, 2000"),
    ("1,2,100", "1, 2, 100"),
    (r"\{1, 2\}", "{2,1}"),
    ("2, -1", "-1, 2"),
    ("2 and -1", "-1, 2"),
    ("1, 2, and 3", "1,2,3"),
    ("x = 2 or x = -1", "x=-1, x=2"),
    ("x = 2 or x = -1", "-1, 2"),
    ("3, 5", "x=3, y=5"),
    ("x=5, y=3", "y = 3, x = 5"),
    ("[1, 2, 3]", "[1,2,3]"),
    ("((1,2),(3,4))", "((1, 2), (3, 4))"),
    (r"(1,2)\cup(3,4)", "(1, 2) ∪ (3, 4)"),
    // Texts.
    ("Yes", "yes"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(B)}", "B"),
    ("(c)", "C"),
    (r"2\pi", r"2 \pi"),
    ("2π", r"2\pi"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt3}{2}"),
    ("sqrt(3)/2", r"\dfrac{\sqrt{3}}{2}"),
    ("x^2 + 1", "x^{2}+1"),
    ("x**2+1", "x^2 + 1"),
    ("y = 2x + 1", "2x+1"),
    (r"2 \cdot x", "2x"),
    ("12:30", "12:30"),
    // Too large to be expanded, and still the same text.
    ("10^{999999999}", "10^{999999999}"),
    ("1e999999999", "1e999999999"),
];

/// Answer, ground truth: not the same.
const DIFFERENT: &[(&str, &str)] = &[
    ("5", "6"),
    ("-5", "5"),
    ("123456789012345678901234567890", "123456789012345678901234567891"),
    ("1,000", "1"),
    ("1,000", "(1, 0)"),
    ("1,00", "100"),
    ("1{,}00", "100"),
    ("1,234", "(1, 234)"),
    ("0.5", "0.05"),
    ("0.33", "1/3"),
    ("0.333", "1/3"),
    ("0.3334", "1/3"),
    ("1/3", "0.33"),
    ("1.4142", "1.41421356"),
    ("12.346", "12.34"),
    ("1000.04", "1000.0"),
    ("1.2346e3", "1234.56"),
    ("1235", "1234.5"),
    ("123456789012.5", "123456789012"),
    ("1.00000001", "1"),
    (r"\frac{3}{4}", "4/3"),
    ("1/0", "1"),
    ("0/0", "0/1"),
    ("1/2/3", "1/6"),
    ("1 1/2", "11/2"),
    ("5 3/2", "6.5"),
    ("2 3", "23"),
    ("50%", "0.05"),
    ("0.5", "50"),
    ("5%", "0.5"),
    ("500%", "50%"),
    // What is behind the number is no unit.
    ("5x", "5"),
    ("5m", "5"),
    ("5m^2", "5"),
    ("5xy", "5"),
    ("5xy", "5yz"),
    ("5 ab", "5"),
    ("5θ", "5"),
    ("2 thirds", "2"),
    ("5 apples and 3 pears", "5"),
    ("5 x", "5"),
    ("5i", "5"),
    (r"5\pi", "5"),
    ("5 pi", "5"),
    (r"5\sqrt{2}", "5"),
    ("5!", "5"),
    ("5 squared", "25"),
    ("5 squared", "5"),
    ("5 million", "5"),
    ("5 dozen", "5"),
    ("5 below zero", "5"),
    ("5 degrees below zero", "5"),
    ("5 less than seven", "5"),
    ("3 base eight", "3"),
    ("5 and more", "5"),
    ("5 and a half", "5"),
    ("5 or more", "5"),
    ("5 point five", "5"),
    ("2 m", "3m"),
    ("5 or 6", "5"),
    ("5 remainder 2", "5"),
    // The exercise repeated is no answer.
    ("3+4", "7"),
    (r"3 \cdot 4", "12"),
    ("123*456", "56088"),
    ("2^{10}", "1024"),
    ("10-3", "7"),
    (r"\sqrt{16}", "4"),
    // Equations.
    ("x + y = 5", "5"),
    ("2x = 10", "10"),
    ("x^2+y^2=4", "4"),
    // Scientific notation.
    (r"1.2 \times 10^3", "120"),
    (r"1.2 \times 10^{-3}", "1200"),
    ("10^5", "1000000"),
    ("10^{999999999}", "10^{999999998}"),
    ("1e999999999", "1"),
    // Sequences.
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("[0,1)", "(0,1]"),
    ("(1,2)", "(1,2,3)"),
    ("1, 2", "(2, 1)"),
    ("{1,2}", "{1,3}"),
    ("{1,1,2}", "{1,2,2}"),
    ("x=5, y=3", "x=3, y=5"),
    ("5, 3", "x=3, y=5"),
    ("1, 2", "1"),
    ("1", "1, 2"),
    // Texts.
    ("Yes", "No"),
    ("(A)", "B"),
    (r"2\pi", r"3\pi"),
    (r"\sqrt{2}", r"\sqrt{3}"),
    (r"\frac{1}{2x}", r"\frac{1}{2}x"),
    ("12:30", "12.5"),
    ("12 3", "123"),
    ("f'(x)", "f(x)"),
    ("0,500", "500"),
    ("blue", "5"),
    ("5", "blue"),
];

/// Text, what is extracted.
const EXTRACTED: &[(&str, Option<&str>)] = &[
    (r"So \boxed{3}.", Some("3")),
    (r"First \boxed{3}, no, \boxed{4}.", Some("4")),
    (r"\boxed{\frac{3}{4}}", Some(r"\frac{3}{4}")),
    (r"\boxed {7}", Some("7")),
    (r"\fbox{7}", Some("7")),
    (r"\boxed{\{1, 2\}}", Some(r"\{1, 2\}")),
    (r"\boxed{\left\{5\right.}", Some(r"\left\{5\right")),
    (r"\boxed{\boxed{5}}", Some(r"\boxed{5}")),
    (r"Stray } and { before \boxed{5}", Some("5")),
    (r"\boxed{5} and then \boxed{6", Some("5")),
    (r"The answer is 9, in a box: \boxed{8}", Some("8")),
    (r"\boxed{}", None),
    (r"\boxed{ }, so 5", None),
    ("The answer is 42.", Some("42")),
    ("The final answer is: $\\frac{1}{2}$ because it is half.", Some(r"\frac{1}{2}")),
    (r"the answer is \(x = 5\), as shown", Some("x = 5")),
    ("The answer is 5 apples. There were 7 before.", Some("5 apples")),
    ("The final answer is 12, since 3*4 = 12", Some("12")),
    ("The answer is 12 because 3*4 = 12", Some("12")),
    ("The answer is 12, Because of 3*4", Some("12")),
    ("Answer: 12, as 3*4 = 12.", Some("12")),
    ("The answer is (1, 2), so x = 1.", Some("(1, 2)")),
    ("The answer is sinus, assuming x", Some("sinus, assuming x")),
    ("12, since 3*4 = 12", Some("12")),
    ("12 because 3*4 = 12", Some("12")),
    ("blue because of the sky", Some("blue because of the sky")),
    ("There are cats, so the count is 7", Some("7")),
    ("I had to think, since\nthere are cats.\nThere are 7.", Some("7")),
    ("So \u{8}oxed{42}.", Some("42")),
    ("\u{8}oxed{\u{c}rac{3}{4}}", Some(r"\frac{3}{4}")),
    ("The answer is 2 \times 10^3", Some(r"2 \times 10^3")),
    ("The answer is\t5\nand done", Some("5")),
    ("The answer is $5 and not 6", Some("$5 and not 6")),
    ("Answer: 42", Some("42")),
    ("**Answer:** 42", Some("42")),
    ("**Answer**: 42", Some("42")),
    ("ANSWER:\n\n42\nDone.", Some("42")),
    ("answer = 3.5", Some("3.5")),
    ("The answer is 1. No, the answer is 2.", Some("2")),
    ("They add up to 72.\n#### 72", Some("72")),
    ("An answer isotope with 3 neutrons in it", Some("3")),
    ("42", Some("42")),
    ("  42.\n", Some("42")),
    ("**42**", Some("42")),
    ("`42`", Some("42")),
    ("5 cm", Some("5 cm")),
    ("x^2 + 1", Some("x^2 + 1")),
    ("(1, 2)", Some("(1, 2)")),
    ("blue", Some("blue")),
    ("I think it is blue", Some("I think it is blue")),
    ("I think it's 5", Some("5")),
    ("There are 3 cases.\nThey sum to $\\frac{3}{4}$.", Some("$\\frac{3}{4}$")),
    ("There are three cases\nand nothing else", None),
    ("", None),
    (" \n ", None),
    ("...", None),
    ("<think>It is \\boxed{5}</think>It is \\boxed{6}", Some("6")),
    ("<think>It is \\boxed{5}</think>", None),
    ("<think>It is \\boxed{5}", None),
];

#[test]
fn equal_answers_earn_one() {
    for (answer, truth) in EQUAL {
        let grade = grade(&format!("It is $\\boxed{{{answer}}}$."), truth);
        assert_eq!((grade.verdict, grade.reward), (Verdict::Equal, 1.0), "{answer} against {truth}: {}", grade.reason);
    }
}

#[test]
fn different_answers_earn_nothing() {
    for (answer, truth) in DIFFERENT {
        let grade = grade(&format!("It is $\\boxed{{{answer}}}$."), truth);
        assert_eq!(
            (grade.verdict, grade.reward),
            (Verdict::Different, 0.0),
            "{answer} against {truth}: {}",
            grade.reason
        );
    }
}

#[test]
fn the_final_answer_is_found() {
    for (text, expected) in EXTRACTED {
        let grade = grade(text, "no such truth");
        assert_eq!(grade.answer.as_deref(), *expected, "{text:?}");
        assert_eq!(grade.verdict == Verdict::Unreadable, expected.is_none(), "{text:?}");
        assert_eq!(grade.reward.to_bits(), 0.0_f64.to_bits(), "{text:?}");
    }
}

#[test]
fn a_backslash_lost_to_json_costs_nothing() {
    for (said, truth) in [
        (r"It is \boxed{42}", "42"),
        (r"\frac{3}{4}", "0.75"),
        (r"The answer is $\frac{1}{2}$", "1/2"),
        (r"\boxed{2 \times 10^3}", "2000"),
        (r"\boxed{5\text{ cm}}", "5"),
        (r"\boxed{\theta = 30}", "30"),
        (r"\boxed{x \neq 0}", r"x \neq 0"),
        (r"\boxed{\tan 1}", r"\tan 1"),
        (r"\boxed{(1, 2\right)}", "(1,2)"),
    ] {
        let decoded: String = serde_json::from_str(&format!("\"{said}\"")).unwrap();
        assert_ne!(decoded, said);
        assert_eq!(grade(&decoded, truth).verdict, Verdict::Equal, "{said}");
        assert_eq!(grade(said, truth).verdict, Verdict::Equal, "{said}");
    }
}

#[test]
fn the_truth_may_be_a_worked_solution() {
    for truth in [r"Add them: \boxed{72}.", "Add them up to 72.\n#### 72", "$72$", "72\n", "[72]", "72.0", "7.2e1"] {
        assert_eq!(grade("72", truth).verdict, Verdict::Equal, "{truth:?}");
        assert_eq!(grade("73", truth).verdict, Verdict::Different, "{truth:?}");
    }
}

#[test]
fn nothing_equals_an_empty_truth() {
    for truth in ["", " ", "$", r"\boxed{}"] {
        assert_ne!(grade("0", truth).verdict, Verdict::Equal, "{truth:?}");
        assert_ne!(grade(r"\boxed{$}", truth).verdict, Verdict::Equal, "{truth:?}");
    }
}

#[test]
fn a_grade_says_why() {
    assert_eq!(grade("5", "6").reason, "the answer 5 is not 6");
    assert_eq!(grade("5.0", "5").reason, "the answer 5.0 is 5");
    assert_eq!(grade("\n", "6").reason, "the text is empty");
    assert_eq!(grade(r"\boxed{}", "6").reason, "the text has no final answer");
    let long = grade(&format!(r"\boxed{{{}}}", "é".repeat(5000)), "6");
    assert_eq!(long.answer.unwrap().chars().count(), 1003);
    assert!(long.reason.len() < 300);
}

#[test]
fn a_grade_is_json() {
    let json = serde_json::to_value(grade("5", "5")).unwrap();
    let expected = serde_json::json!({"reward": 1.0, "verdict": "equal", "answer": "5", "reason": "the answer 5 is 5"});
    assert_eq!(json, expected);
}
