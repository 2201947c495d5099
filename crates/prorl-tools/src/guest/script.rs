//! What a shell of ours reads, and what it says of itself.
//!
//! bash reads its script from a pipe, one byte at a time, so the lines there are short. For each command there are two. The first
//! [sources](RUN) a file of the guest's whose text is an `eval` of the command in quotes, all on one line: at top level, so that
//! `declare` is global and `break` has no loop of ours to leave; in a sourced file, so that `return` is harmless; on the first
//! line, so that the lines in bash's messages are the command's. The second, read only when the command has ended, sources
//! [`MARK`], which writes a mark to a socket: a word that is fresh for each command and no file ever holds, the exit code, and the
//! shell's flags.
//!
//! What a command switches on for later ones must not apply to these lines: tracing, history, and the traps `DEBUG`, `ERR` and
//! `RETURN`. So it is switched off after the command and on again inside the next `eval`. [`MARK`] does that once the mark is
//! written, when nobody waits for it any more. Where it is known that there are such traps, the second line does it before. Then
//! it also finds `DEBUG`, which bash hides from sourced files.
//!
//! The files and the socket are open in the shell alone. bash closes what it saves of a descriptor in the programs that it
//! starts, and a duplicate of such a one stays like that, which [`set_up`] makes use of.

use std::os::fd::RawFd;

/// The descriptors that the shell is started with: its script, its marks, the command's text, the mark's text.
pub(super) const GIVEN: [RawFd; 4] = [60, 61, 62, 63];

/// Where the shell keeps the last three of them: above what tasks count up to, and below the highest numbers that there can be in a
/// sandbox with the fewest open files, where bash keeps what it needs itself.
const MARK_FD: RawFd = 50;
const TEXT_FD: RawFd = 51;
const TAIL_FD: RawFd = 52;

/// Has each command that comes return, from the innermost function or sourced file out, until the script's own level is reached,
/// where there is nothing to return from.
///
/// The trap itself does not return, or bash would take itself to be in it from then on, where `return` and `exit` mean another
/// code. `DEBUG` is set last, since it would have the trap's own commands return. But if no command comes before the next such
/// signal, nothing else helps.
///
/// bash passes over an interrupt when its child does not die of it. The trap of `RTMAX`, which nothing else sends, runs as soon as
/// the child is gone, however it went.
const ABORT: &str = concat!(
    r#"\builtin trap '\builtin trap "\builtin return 130 2>/dev/null" INT;"#,
    r#"\builtin trap "\builtin return 130 2>/dev/null || \builtin trap - DEBUG" DEBUG' INT;"#,
    r#"\builtin trap '\builtin trap "\builtin return 130 2>/dev/null" RTMAX;"#,
    r#"\builtin trap "\builtin return 130 2>/dev/null || \builtin trap - DEBUG" DEBUG' RTMAX"#
);

/// Has bash forget that a signal came: one whose trap has returned stays counted, and would end every `wait` from then on. What is
/// counted no more is one whose trap runs to its end.
const FORGET: &str = r"\builtin trap : INT RTMAX;\builtin kill -RTMAX $$;\builtin kill -INT $$";

/// Writes the mark, and switches off what must not apply to the lines between commands. The exit code and the flags are given
/// where they had to be looked at before.
///
/// The last line is reached only where a command has put something in the place of `builtin`. Nothing can be put in the place of
/// an expansion, and one that fails has bash itself say the word.
pub(super) const MARK: &str = r#"\builtin printf '%s %s %s\n' "$1" "${2-$?}" "${3-$-}"
\builtin set +xv +o history;\builtin history -c;\builtin trap -p ERR RETURN;\builtin trap - ERR RETURN;\builtin return
_=${4?$1}
"#;

/// Returns the line that makes a bash a shell of ours.
pub(super) fn set_up() -> String {
    let [script, marks, text, tail] = GIVEN;
    // What the group closes is saved as 10, 11 and 12. A bash that did otherwise would only hide nothing.
    format!(
        "\\builtin set +mH +o history;\\builtin history -c;\\builtin unset HISTFILE;BASH_ARGV0=bash;{ABORT};\
         {{ \\exec {MARK_FD}>&10 {TEXT_FD}<&11 {TAIL_FD}<&12; }} {marks}>&- {text}<&- {tail}<&- 2>/dev/null||\
         \\exec {MARK_FD}>&{marks} {TEXT_FD}<&{text} {TAIL_FD}<&{tail};\\exec {script}<&- {marks}>&- {text}<&- {tail}<&-\n"
    )
}

/// Returns the line that runs the command's text.
pub(super) fn run() -> String {
    format!("\\. /proc/self/fd/{TEXT_FD}\n")
}

/// Returns the line that has the shell write a mark.
pub(super) fn mark(word: &str, has_traps: bool) -> String {
    // Both outputs go to the socket, so that neither tracing nor a trap prints anything of this to the terminal.
    if has_traps {
        format!(
            "{{ \\builtin eval \"\\builtin trap -p DEBUG ERR RETURN;\\builtin trap - DEBUG ERR RETURN;\
             \\. /proc/self/fd/{TAIL_FD} {word} $? $-\"; }} >&{MARK_FD} 2>&1\n"
        )
    } else {
        format!("{{ \\. /proc/self/fd/{TAIL_FD} {word}; }} >&{MARK_FD} 2>&1\n")
    }
}

/// How a command left the shell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    /// The exit code.
    pub(super) status: i32,
    /// The shell's flags (`$-`).
    pub(super) flags: String,
    /// What sets its traps again.
    pub(super) traps: Vec<Trap>,
}

/// A trap that would apply to our own lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trap {
    /// The command that sets it.
    command: String,
    is_debug: bool,
}

impl State {
    /// Returns the text that runs a command where the last one has left the shell like this.
    pub(super) fn text(&self, command: &str, was_interrupted: bool) -> String {
        let mut text = String::with_capacity(command.len() + 64);
        // An interrupt leaves its code also when it was not ours.
        if was_interrupted || self.status == 130 {
            text.extend([FORGET, ";", ABORT, ";"]);
        }
        // `$?` of the last command, which the mark has covered. In a list no trap takes it for a failure, nor does `set -e`.
        let mut restore_status = "";
        if self.status != 0 {
            let function = format!("__prorl(){{ \\builtin unset -f __prorl;\\builtin return {};}};", self.status);
            text.push_str(&function);
            restore_status = "__prorl&&:";
        }
        let tracing: String = self.flags.chars().filter(|flag| "xv".contains(*flag)).collect();
        if tracing.is_empty() && self.traps.is_empty() {
            let status = if restore_status.is_empty() { "" } else { ";" };
            text.extend([restore_status, status, "\\builtin eval ", &quote(command), "\n"]);
            return text;
        }
        // `DEBUG` comes last, since it would take what follows for the command's. All has a line of its own, so that it is done
        // whether or not bash can make sense of the command.
        let mut before = String::new();
        for trap in self.traps.iter().filter(|trap| !trap.is_debug) {
            before.extend(["\\builtin ", &trap.command, ";"]);
        }
        if tracing.is_empty() {
            before.push_str(restore_status);
        } else {
            let trace = format!("{{ \\builtin set -{tracing};{restore_status}\n}} 2>/dev/null");
            before.push_str(&trace);
        }
        for trap in self.traps.iter().filter(|trap| trap.is_debug) {
            before.extend(["\n\\builtin ", &trap.command]);
        }
        text.extend(["\\builtin eval ", &quote(&format!("{before}\n{command}")), "\n"]);
        text
    }
}

/// Makes a text one word of a shell.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// What a message of the shell's is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The mark: the exit code and the flags.
    Mark(i32, String),
    /// That it cannot write marks any more.
    Broken,
    /// Anything else, which may be part of what is said of traps.
    Other,
}

/// Returns what a message is while this word is the one that counts.
pub(super) fn message(bytes: &[u8], word: &str) -> Message {
    let Some(text) = std::str::from_utf8(bytes).ok().filter(|text| !word.is_empty() && text.contains(word)) else {
        return Message::Other;
    };
    parse_mark(text, word).unwrap_or_else(|| {
        // With tracing the lines that write the mark come this way too.
        if text.starts_with("bash: ") && text.ends_with(&format!(": {word}\n")) {
            Message::Broken
        } else {
            Message::Other
        }
    })
}

fn parse_mark(text: &str, word: &str) -> Option<Message> {
    let mut fields = text.strip_suffix('\n')?.split(' ');
    let (Some(first), Some(status), flags, None) = (fields.next(), fields.next(), fields.next(), fields.next()) else {
        return None;
    };
    (first == word).then_some(Message::Mark(status.parse().ok()?, flags.unwrap_or_default().to_owned()))
}

/// Finds traps in what the shell has said, beside whatever the traps themselves have printed.
pub(super) fn traps(said: &[u8]) -> Vec<Trap> {
    const BEGIN: &str = "trap -- '";
    let said = String::from_utf8_lossy(said);
    let mut traps = Vec::new();
    let mut rest = said.as_ref();
    while let Some(at) = rest.find(BEGIN) {
        let found = &rest[at..];
        let (len, trap) = parse_trap(found, BEGIN.len()).map_or((BEGIN.len(), None), |(len, trap)| (len, Some(trap)));
        traps.extend(trap);
        rest = &found[len..];
    }
    traps
}

/// Reads `trap -- 'COMMAND' NAME`, whose command begins at `from`, and returns its length too.
fn parse_trap(text: &str, from: usize) -> Option<(usize, Trap)> {
    let mut at = from;
    loop {
        at += text[at..].find('\'')?;
        // A quote inside of the quotes.
        let Some(_) = text[at..].strip_prefix(r"'\''") else { break };
        at += 4;
    }
    let line = text[at + 1..].split_once('\n')?.0;
    let is_debug = line == " DEBUG";
    (is_debug || matches!(line, " ERR" | " RETURN")).then(|| {
        let end = at + 1 + line.len();
        (end, Trap { command: text[..end].to_owned(), is_debug })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_the_word_a_code_and_flags() {
        let of = |text: &str| message(text.as_bytes(), "abc");
        assert_eq!(of("abc 7 hiB\n"), Message::Mark(7, "hiB".to_owned()));
        for other in [
            "abc 7 hiB",
            "abd 7 hiB\n",
            "abc seven h\n",
            "abc\n",
            "abc 7 h 8\n",
            "x abc 7 h\n",
            "\n",
            "abc 7 h\nabc 7 h\n",
            "+ . /proc/self/fd/52 abc\n",
        ] {
            assert_eq!(of(other), Message::Other, "{other:?}");
        }
        assert_eq!(message(b" 7 h\n", ""), Message::Other);
        assert_eq!(of("bash: 4: abc\n"), Message::Broken);
    }

    #[test]
    fn traps_are_found_among_what_they_print() {
        let said = "DBG\ntrap -- 'echo DBG' DEBUG\nDBG\ntrap -- 'x' INT\ntrap -- 'echo '\\''a\nb'\\''' ERR\ntrap -- '";
        let found = traps(said.as_bytes());
        let commands: Vec<&str> = found.iter().map(|trap| trap.command.as_str()).collect();
        assert_eq!(commands, ["trap -- 'echo DBG' DEBUG", "trap -- 'echo '\\''a\nb'\\''' ERR"]);
        assert_eq!(found.iter().map(|trap| trap.is_debug).collect::<Vec<_>>(), [true, false]);
    }

    #[test]
    fn the_usual_text_is_the_command_on_the_first_line() {
        assert_eq!(State::default().text("it's $HOME", false), "\\builtin eval 'it'\\''s $HOME'\n");
        let failed = State { status: 7, ..State::default() };
        assert_eq!(failed.text("a\nb", false).split_once('\n').unwrap().1, "b'\n");
    }
}
