//! Gives LaTeX commands back the backslash that JSON took.
//!
//! A model that writes `"\boxed{42}"` into a call's arguments, one backslash short, has written a backspace and `oxed{42}` as
//! far as JSON is concerned: the command's first letter went into an escape. The answer is the same.

use std::borrow::Cow;

/// A control character, the letter by which JSON escapes it, and rests of the commands that start with that letter.
struct Escape {
    control: char,
    letter: char,
    /// No words: commands wherever they stand.
    rests: &'static [&'static str],
    /// Words too, in a table or at the start of a line: commands only before what an operand starts with.
    words: &'static [&'static str],
}

const ESCAPES: [Escape; 5] = [
    Escape {
        control: '\u{8}',
        letter: 'b',
        rests: &["ar", "egin", "eta", "f", "ig", "igl", "igr", "inom", "mod", "oxed", "ullet"],
        words: &[],
    },
    Escape { control: '\u{c}', letter: 'f', rests: &["box", "lat", "loor", "orall", "rac"], words: &[] },
    Escape {
        control: '\t',
        letter: 't',
        rests: &["extbf", "extit", "extrm", "extstyle", "exttt", "frac", "heta", "ilde", "imes", "riangle"],
        words: &["an", "ext", "o"],
    },
    Escape { control: '\r', letter: 'r', rests: &["ceil", "floor", "ho", "ight"], words: &[] },
    // `\nu` and `\ne` are not among them: a line may well start with `u =`.
    Escape { control: '\n', letter: 'n', rests: &["abla"], words: &["eq"] },
];

/// Returns the text with its LaTeX commands whole. Other control characters stay.
pub(super) fn restored(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut done = 0;
    for (at, control) in text.match_indices(|c: char| c.is_ascii_control()) {
        let behind = &text[at + 1..];
        let escape = ESCAPES.iter().find(|escape| control.starts_with(escape.control));
        if let Some(escape) = escape.filter(|escape| is_command(escape, behind)) {
            out.push_str(&text[done..at]);
            out.extend(['\\', escape.letter]);
            done = at + 1;
        }
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[done..]);
    Cow::Owned(out)
}

fn is_command(escape: &Escape, behind: &str) -> bool {
    let len = behind.bytes().take_while(u8::is_ascii_alphabetic).count();
    let (rest, next) = behind.split_at(len);
    escape.rests.contains(&rest) || (escape.words.contains(&rest) && is_operand(next))
}

/// Whether an operand starts here: `\tan 30`, `\tan(x)`, `\to \infty`, `\neq x`, but no word.
fn is_operand(text: &str) -> bool {
    let mut chars = text.trim_start_matches(' ').chars();
    match chars.next() {
        Some(c) if c.is_alphabetic() => !chars.next().is_some_and(char::is_alphabetic),
        Some(c) => c.is_ascii_digit() || matches!(c, '\\' | '(' | '{' | '^' | '-' | '+'),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_whole_again() {
        for command in [
            r"\boxed{42}",
            r"\binom{5}{2}",
            r"\begin{pmatrix}1&2\end{pmatrix}",
            r"\beta",
            r"\frac{3}{4}",
            r"\frac34",
            r"\boxed{\frac{3}{4}}",
            r"\tfrac12",
            r"\fbox{3}",
            r"2 \times 10^3",
            r"5\text{ cm}",
            r"\textbf{5}",
            r"\theta = 3",
            r"\tan 30",
            r"\tan(x)",
            r"\tan x",
            r"\tan^2 x",
            r"x \to 0",
            r"x \to -1",
            r"\rho",
            r"(1, 2\right)",
            r"x \neq 5",
            r"\nabla f",
        ] {
            let escapes = [(r"\b", "\u{8}"), (r"\f", "\u{c}"), (r"\t", "\t"), (r"\r", "\r"), (r"\n", "\n")];
            let decoded =
                escapes.iter().fold(command.to_owned(), |text, (escape, control)| text.replace(escape, control));
            assert_ne!(decoded, command);
            assert_eq!(restored(&decoded), command, "{decoded:?}");
        }
    }

    #[test]
    fn ordinary_control_characters_stay() {
        for text in [
            "a\tb\tc\n1\t2\t3\n",
            "one\ttwo\tthree",
            "\tan answer",
            "\tto be",
            "\to be",
            "x\to\ty",
            "name\text\tsize",
            "\tfraction",
            "first\r\nsecond\r\n",
            "\rightly",
            "\nequal\nu = 3\ne = 2\nnot\neq. 5",
            "\u{c}page two",
            "\u{8}",
            "\u{8}5",
            "\t",
            "plain",
            "",
        ] {
            assert_eq!(restored(text), text, "{text:?}");
        }
    }
}
