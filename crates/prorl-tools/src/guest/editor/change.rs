//! Changes of a text: exact replacement, insertion, and the words for what does not fit.

use std::fmt::Write as _;

use super::text::{line_at, lines};

/// Lines shown before and behind a change.
const AROUND: usize = 4;

/// Lines in which a text is found that are named.
const MAX_NAMED: usize = 20;

/// Replaces `old`, which must be there exactly once.
pub(super) fn replace(path: &str, text: &str, old: &str, new: &str) -> Result<String, String> {
    if old.is_empty() {
        return Err("`old_str` is empty. Give the text to replace, or use `insert`.".to_owned());
    }
    if old == new {
        return Err("`old_str` and `new_str` are the same. Nothing was changed.".to_owned());
    }
    let mut found: Vec<usize> = text.match_indices(old).map(|(at, _)| at).take(MAX_NAMED).collect();
    let mut n_found = text.matches(old).count();
    if let [once] = found[..] {
        // Of two that overlap it is not clear either which one is meant.
        let behind = once + text[once..].chars().next().map_or(0, char::len_utf8);
        if let Some(at) = text[behind..].find(old) {
            found.push(behind + at);
            n_found = 2;
        }
    }
    match found[..] {
        [] => Err(format!(
            "No replacement was performed: `old_str` does not appear in {path}. It must be exactly what is there, with all \
             spaces and line ends.{}",
            nearest(text, old)
        )),
        [at] => Ok([&text[..at], new, &text[at + old.len()..]].concat()),
        _ => {
            let mut named = String::new();
            let (mut line, mut from) = (1, 0);
            for at in &found {
                line += line_at(&text[from..], at - from) - 1;
                from = *at;
                let _infallible = write!(named, "{}{line}", if named.is_empty() { "" } else { ", " });
            }
            let more = if n_found > found.len() { " and more" } else { "" };
            Err(format!(
                "No replacement was performed: `old_str` appears {n_found} times in {path}, in lines {named}{more}. Take \
                 more of the lines around it, so that it is unique."
            ))
        }
    }
}

/// Inserts a text as lines of its own behind a line.
pub(super) fn insert(path: &str, text: &str, after: u64, new: &str) -> Result<String, String> {
    let n_lines = lines(text).count();
    let Some(after) = usize::try_from(after).ok().filter(|after| *after <= n_lines) else {
        return Err(format!(
            "`insert_line` must be from 0 to {n_lines}, the number of lines of {path}, and not {after}."
        ));
    };
    let at: usize = text.split_inclusive('\n').take(after).map(str::len).sum();
    let (before, behind) = text.split_at(at);
    // A file without a newline at its end has none afterwards, unless the new text brings it.
    let (open, close) = match (before.is_empty() || before.ends_with('\n'), new.ends_with('\n')) {
        (false, _) => ("\n", ""),
        (true, false) => ("", "\n"),
        (true, true) => ("", ""),
    };
    Ok([before, open, new, close, behind].concat())
}

/// Returns the first and last line of what is another in `after`, with some lines around.
pub(super) fn changed(before: &str, after: &str) -> (usize, usize) {
    let n_same = before.bytes().zip(after.bytes()).take_while(|(a, b)| a == b).count();
    let most = before.len().min(after.len()) - n_same;
    let n_same_end = before.bytes().rev().zip(after.bytes().rev()).take(most).take_while(|(a, b)| a == b).count();
    let n_lines = lines(after).count().max(1);
    let first = last_line(&after.as_bytes()[..n_same]);
    let last = last_line(&after.as_bytes()[..after.len() - n_same_end]);
    (first.saturating_sub(AROUND).max(1).min(n_lines), (last + AROUND).min(n_lines))
}

/// Returns the number of the last line of these.
fn last_line(bytes: &[u8]) -> usize {
    bytes.split(|byte| *byte == b'\n').count()
}

/// Says where something like `old` is, if it is anywhere.
fn nearest(text: &str, old: &str) -> String {
    let found = |form: fn(&str) -> String, of: &str| {
        let by_line = |text: &str| lines(text).map(form).collect::<Vec<_>>().join("\n");
        let (text, old) = (by_line(text), by_line(of));
        let at = Some(text.find(old.as_str())?).filter(|_| !old.trim().is_empty())?;
        Some(line_at(&text, at))
    };
    let end_trimmed = |line: &str| line.trim_end().to_owned();
    if let Some(line) = found(end_trimmed, old) {
        return format!(
            " At line {line} there is a text that differs only in spaces or carriage returns at the ends of lines."
        );
    }
    if let Some(line) = found(end_trimmed, &without_numbers(old)) {
        return format!(" It seems to have the numbers of lines in it: leave them out. The text is at line {line}.");
    }
    if let Some(line) = found(|line| line.split_whitespace().collect::<Vec<_>>().join(" "), old) {
        return format!(" At line {line} there is a text that differs in spaces, tabs or indentation.");
    }
    first_lines(text, old).unwrap_or_default()
}

/// Takes the numbers away that a view has before its lines.
fn without_numbers(old: &str) -> String {
    let bare = |line: &str| match line.split_once('\t') {
        Some((number, rest)) if number.trim_start().parse::<u64>().is_ok() => rest.to_owned(),
        _ => line.to_owned(),
    };
    lines(old).map(bare).collect::<Vec<_>>().join("\n")
}

/// Finds where the most lines of `old` are from its first on.
fn first_lines(text: &str, old: &str) -> Option<String> {
    /// Places and lines that are compared, so that a text of equal lines takes no longer than others.
    const MOST: usize = 1000;
    let first = lines(old).next().filter(|line| !line.trim().is_empty())?;
    let all: Vec<&str> = lines(text).collect();
    let starts = all.iter().enumerate().filter(|(_, line)| **line == first).map(|(idx, _)| idx).take(MOST);
    let n_same = |start: usize| lines(old).zip(&all[start..]).take(MOST).take_while(|(old, line)| old == *line).count();
    let (n_same, start) =
        starts.map(|start| (n_same(start), start)).max_by_key(|(n, start)| (*n, usize::MAX - start))?;
    Some(format!(
        " Its first line is at line {} of the file, and what follows is another from line {} on.",
        start + 1,
        start + 1 + n_same
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(text: &str, old: &str) -> String {
        replace("F", text, old, "new").unwrap_err()
    }

    #[test]
    fn a_text_that_is_there_once_is_replaced() {
        assert_eq!(replace("F", "a b c", "b", "x").unwrap(), "a x c");
        assert_eq!(replace("F", "a\nb\nc\n", "b\n", "").unwrap(), "a\nc\n");
    }

    #[test]
    fn a_text_that_is_there_often_is_told_with_its_lines() {
        let told = refused("a\nb\na\n a\n", "a");
        assert!(told.contains("appears 3 times in F, in lines 1, 3, 4."), "{told}");
        let told = refused(&"a\n".repeat(30), "a");
        assert!(told.contains("appears 30 times in F, in lines 1, 2,") && told.contains("20 and more."), "{told}");
        let told = refused("x\naaa\n", "aa");
        assert!(told.contains("appears 2 times in F, in lines 2, 2."), "{told}");
    }

    #[test]
    fn a_text_that_is_not_there_is_told_with_what_comes_near() {
        let file = "def f():\n    return 1  \n\ndef g():\n\treturn 2\n";
        for (old, told) in [
            (
                "    return 1\n\ndef",
                "At line 2 there is a text that differs only in spaces or carriage returns at the ends",
            ),
            ("def f():\r\n", "At line 1 there is a text that differs only in spaces or carriage returns"),
            ("     4\tdef g():\n     5\t\treturn 2", "numbers of lines in it: leave them out. The text is at line 4."),
            ("def g():\n    return 2", "At line 4 there is a text that differs in spaces, tabs or indentation."),
            (
                "def g():\n\treturn 3",
                "Its first line is at line 4 of the file, and what follows is another from line 5 on.",
            ),
        ] {
            let text = refused(file, old);
            assert!(text.contains(told), "{old:?}: {text}");
        }
        assert!(refused(file, "nothing like it").ends_with("with all spaces and line ends."));
        assert!(refused(file, " \n ").ends_with("with all spaces and line ends."));
    }

    #[test]
    fn insertion_makes_lines_and_keeps_the_end_of_the_file() {
        for (text, after, new, result) in [
            ("", 0, "x", "x\n"),
            ("a\nb\n", 0, "x", "x\na\nb\n"),
            ("a\nb\n", 1, "x\n", "a\nx\nb\n"),
            ("a\nb\n", 2, "x", "a\nb\nx\n"),
            ("a\nb", 2, "x", "a\nb\nx"),
            ("a\nb", 2, "x\n", "a\nb\nx\n"),
            ("a\n", 1, "", "a\n\n"),
        ] {
            assert_eq!(insert("F", text, after, new).unwrap(), result, "{text:?} {after} {new:?}");
        }
        assert!(
            insert("F", "a\n", 2, "x")
                .unwrap_err()
                .contains("must be from 0 to 1, the number of lines of F, and not 2")
        );
    }

    #[test]
    fn the_changed_lines_are_found() {
        let before = (1..=20).map(|n| format!("{n}\n")).collect::<Vec<_>>().concat();
        let after = before.replace("10\n", "ten\nand\n");
        assert_eq!(changed(&before, &after), (6, 15));
        assert_eq!([changed("", ""), changed("a\n", ""), changed("", "a\n")], [(1, 1), (1, 1), (1, 1)]);
    }

    proptest! {
        #[test]
        fn nothing_panics_and_a_replacement_changes_one_place(text in "[ab\n\u{e9}\t ]{0,30}", old in "[ab\n\u{e9}\t ]{0,3}", new in "[xb]{0,3}") {
            if let Ok(changed) = replace("F", &text, &old, &new) {
                prop_assert_eq!(text.matches(&old).count(), 1);
                prop_assert_eq!(changed, text.replace(&old, &new));
            }
            let n_lines = lines(&text).count();
            let inserted = insert("F", &text, (n_lines / 2) as u64, &new).unwrap();
            let (first, last) = changed(&text, &inserted);
            prop_assert!(1 <= first && first <= last && last <= lines(&inserted).count().max(1));
            prop_assert!(lines(&inserted).count() > n_lines);
        }
    }
}
