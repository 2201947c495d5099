//! What the agent reads: the output, then what is to be said about it in brackets.

use std::{fmt::Write as _, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use prorl_core::{Content, Part};

use super::{
    channel::Shown,
    client::CellOutput,
    text::{TextForm, clean},
    toolbox::{ToolContext, ToolResult},
};
use crate::wire::{BashAnswer, BashEnd, Captured, CellEnd, Interrupt};

/// Characters that an agent reads of one call of `execute_bash`, `execute_ipython_cell` or `str_replace_editor` when nothing else
/// is said, notes in brackets included: some ten thousand tokens.
///
/// Of a longer output it reads the beginning and the end, with a count of the bytes left out between. The client's answers
/// ([`Captured`]) hold more.
pub const RESULT_CHARS: usize = 30_000;

/// More than what tells how many bytes are left out.
const OMITTED_CHARS: usize = 100;

/// An output in the form in which it is read, and what stands in it.
#[derive(Debug, Default)]
struct Woven<'a> {
    text: String,
    /// Where in the text the guest has left something out.
    gap: Option<usize>,
    /// Images, each with its place in the text, in order.
    images: Vec<(usize, &'a Shown)>,
    /// Bytes that were printed, and those of the lines that tell what was shown.
    total: u64,
    full_screen: bool,
}

impl<'a> Woven<'a> {
    /// Puts together what was printed and what was shown.
    fn new(output: &Captured, shown: &'a [Shown], context: &ToolContext<'_>) -> Self {
        let mut woven = Self { total: output.total, ..Self::default() };
        let bytes = output.bytes();
        let n_head = output.head.0.len();
        let omitted = usize::try_from(output.omitted()).unwrap_or(usize::MAX);
        let place_of = |one: &Shown| match usize::try_from(one.at).unwrap_or(usize::MAX) {
            at if at <= n_head => at,
            // What was shown where bytes are left out stands between the two ends.
            at => at.saturating_sub(omitted).clamp(n_head, bytes.len()),
        };
        let gap = (omitted > 0).then_some((n_head, None));
        let mut places: Vec<(usize, Option<&Shown>)> =
            shown.iter().map(|one| (place_of(one), Some(one))).chain(gap).collect();
        places.sort_by_key(|(place, _)| *place);
        let mut from = 0;
        for (place, one) in places {
            woven.print(&bytes[from..place], context.text);
            from = place;
            match one {
                Some(one) => woven.show(one, context.images),
                None => woven.gap = Some(woven.text.len()),
            }
        }
        woven.print(&bytes[from..], context.text);
        woven
    }

    fn print(&mut self, bytes: &[u8], form: TextForm) {
        match form {
            TextForm::Raw => self.text.push_str(&String::from_utf8_lossy(bytes)),
            TextForm::Clean => {
                let cleaned = clean(bytes);
                self.full_screen |= cleaned.full_screen;
                self.text.push_str(&cleaned.text);
            }
        }
    }

    fn show(&mut self, one: &'a Shown, images: bool) {
        let line = match one.mime.as_str() {
            "image/png" | "image/jpeg" if images => {
                self.images.push((self.text.len(), one));
                return;
            }
            // The text that stands for it is printed as well.
            "text/html" => return,
            "text/markdown" => clean(&one.data).text,
            _ => described(one),
        };
        let before = self.text.len();
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        self.text.push_str(&line);
        if !line.ends_with('\n') {
            self.text.push('\n');
        }
        self.total = self.total.saturating_add((self.text.len() - before) as u64);
    }

    /// Cuts the text to so many characters, between its two ends.
    fn cut(&mut self, limit: usize) {
        let n_chars = self.text.chars().count();
        if self.gap.is_none() && n_chars <= limit {
            return;
        }
        let half = limit.saturating_sub(OMITTED_CHARS) / 2;
        let offset = |n: usize| self.text.char_indices().nth(n).map_or(self.text.len(), |(at, _)| at);
        let head = offset(half).min(self.gap.unwrap_or(usize::MAX));
        let tail = offset(n_chars.saturating_sub(half)).max(self.gap.unwrap_or(0));
        let kept = (head + self.text.len() - tail) as u64;
        let omitted = self.total.saturating_sub(kept);
        let note = format!("\n[... {omitted} of {} bytes left out ...]\n", self.total);
        for (place, _) in &mut self.images {
            if *place > head {
                *place = head + note.len() + place.saturating_sub(tail);
            }
        }
        self.text.replace_range(head..tail, &note);
    }

    /// Returns all of it before the notes about it, in `limit` characters at most.
    fn before_notes(mut self, notes: &str, limit: usize) -> Content {
        self.cut(limit.saturating_sub(notes.chars().count() + 1));
        if !self.text.is_empty() && !notes.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        self.text.push_str(notes);
        if self.images.is_empty() {
            return Content::Text(self.text);
        }
        let mut parts = Vec::new();
        let mut from = 0;
        let mut text = |parts: &mut Vec<Part>, to: usize| {
            if to > from {
                parts.push(Part::Text { text: self.text[from..to].to_owned() });
                from = to;
            }
        };
        for (place, image) in &self.images {
            text(&mut parts, *place);
            parts.push(Part::Image { mime: image.mime.clone(), data: STANDARD.encode(&image.data) });
        }
        text(&mut parts, self.text.len());
        Content::Parts(parts)
    }
}

/// Says in a line what was shown that the agent does not see.
fn described(one: &Shown) -> String {
    let mut line = format!("[{}", plain(&one.mime));
    // The size of a PNG is at the same place in each.
    if let (b"\x89PNG\r\n\x1a\n", Some(size)) = (one.data.get(..8).unwrap_or_default(), one.data.get(16..24)) {
        let side = |bytes: &[u8]| bytes.iter().fold(0_u32, |side, byte| side << 8 | u32::from(*byte));
        let _infallible = write!(line, ", {}x{}", side(&size[..4]), side(&size[4..]));
    }
    let _infallible = write!(line, ", {} bytes]", one.data.len());
    line
}

/// Returns a name that came from inside a sandbox so that it can stand in a line.
fn plain(name: &str) -> String {
    name.chars().take(64).map(|char| if char.is_control() { char::REPLACEMENT_CHARACTER } else { char }).collect()
}

/// Appends a bracketed line, beginning on a line of its own.
fn note(text: &mut String, note: &str) {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push('[');
    text.push_str(note);
    text.push(']');
}

fn seconds(millis: u64) -> String {
    match millis {
        1000 => "1 second".to_owned(),
        _ => format!("{} seconds", Duration::from_millis(millis).as_secs_f64()),
    }
}

fn took(by: Interrupt, what: &str) -> String {
    match by {
        Interrupt::Signal => "It was interrupted.".to_owned(),
        Interrupt::Kill => "It did not end on an interrupt, so its processes were killed.".to_owned(),
        Interrupt::Restart => format!("It did not end on an interrupt, so the {what} was killed."),
    }
}

/// `is_capped` tells whether the agent asked for more time than there was.
pub(super) fn bash(answer: &BashAnswer, context: &ToolContext<'_>, is_capped: bool) -> ToolResult {
    if let BashEnd::Refused(reason) = &answer.end {
        return ToolResult::error(reason.clone());
    }
    let woven = Woven::new(&answer.output, &[], context);
    let mut text = String::new();
    let mut is_error = false;
    let mut runs = false;
    match &answer.end {
        BashEnd::Exited(code) => note(&mut text, &format!("The command completed with exit code {code}.")),
        BashEnd::Running { silent_ms, wants_input } => {
            runs = true;
            let waits = if *wants_input { " and is waiting for input" } else { "" };
            note(
                &mut text,
                &format!(
                    "The command has printed nothing for {}{waits}. It is still running. Call again with is_input true: \
                     an empty command to wait, a text to type in, C-c to interrupt it.",
                    seconds(*silent_ms)
                ),
            );
        }
        BashEnd::LimitPassed { limit_ms, by, wanted_input } => {
            is_error = true;
            let capped = if is_capped { ", which was all the time that the task had left" } else { "" };
            let waited = if *wanted_input {
                " It was waiting for input, which it can get from a pipe, or from a call with is_input true while it runs."
            } else {
                ""
            };
            let limit = seconds(*limit_ms);
            note(&mut text, &format!("The command timed out after {limit}{capped}.{waited} {}", took(*by, "shell")));
        }
        BashEnd::Cancelled => note(&mut text, "The command was cancelled."),
        BashEnd::Refused(_) => {}
    }
    if woven.full_screen {
        note(
            &mut text,
            if runs {
                "A full-screen program has the terminal, and its screen cannot be shown as it looks. Type its keys with \
                 is_input true, or interrupt it with C-c."
            } else {
                "A full-screen program had the terminal, and its screen cannot be shown as it looks. Prefer commands that \
                 print and end."
            },
        );
    }
    if !answer.background.is_empty() {
        let list: Vec<String> =
            answer.background.iter().map(|one| format!("{} (pid {})", plain(&one.name), one.pid)).collect();
        note(&mut text, &format!("Running in the background: {}.", list.join(", ")));
    }
    if let Some(to) = &answer.output_elsewhere {
        note(
            &mut text,
            &format!("The shell's output goes to {} since an `exec`; `exec >/dev/tty 2>&1` brings it back.", path(to)),
        );
    }
    if let Some(reason) = &answer.restarted {
        let place = answer.cwd.as_ref().map_or_else(|| "the same directory".to_owned(), |cwd| path(cwd));
        note(&mut text, &format!("{reason} A new shell was started in {place}; variables and functions are reset."));
    }
    if let Some(cwd) = &answer.cwd {
        note(&mut text, &format!("Current working directory: {}", path(cwd)));
    }
    ToolResult { is_error, ..ToolResult::new(woven.before_notes(&text, context.output_chars)) }
}

/// A path may have a newline in it, and a note is one line.
fn path(path: &str) -> String {
    path.replace(char::is_control, "\u{fffd}")
}

pub(super) fn ipython(answer: &CellOutput, context: &ToolContext<'_>) -> ToolResult {
    if let CellEnd::Refused(reason) = &answer.end {
        return ToolResult::error(reason.clone());
    }
    let woven = Woven::new(&answer.output, &answer.shown, context);
    let mut text = String::new();
    let mut is_error = false;
    match &answer.end {
        CellEnd::LimitPassed { limit_ms, by } => {
            is_error = true;
            note(&mut text, &format!("The cell timed out after {}. {}", seconds(*limit_ms), took(*by, "interpreter")));
        }
        CellEnd::Cancelled => note(&mut text, "The cell was cancelled."),
        CellEnd::Ok | CellEnd::Raised | CellEnd::Died | CellEnd::Refused(_) => {}
    }
    if let Some(reason) = &answer.restarted {
        is_error = true;
        note(
            &mut text,
            &format!("{reason} A new interpreter starts with the next cell; variables and imports are gone."),
        );
    }
    if woven.text.is_empty() && woven.images.is_empty() && text.is_empty() {
        "[The cell ran without output.]".clone_into(&mut text);
    }
    ToolResult { is_error, ..ToolResult::new(woven.before_notes(&text, context.output_chars)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        host::ToolClient,
        wire::{Background, Bytes},
    };

    /// What a call of a tool is given, with a client whose sandbox is gone.
    struct Given(ToolClient);

    impl Given {
        fn context(&self) -> ToolContext<'_> {
            ToolContext::new(&self.0, Duration::ZERO)
        }
    }

    fn given<T>(test: impl FnOnce(&Given) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let _inside = runtime.enter();
        test(&Given(ToolClient::new(tokio::net::UnixStream::pair().unwrap().0)))
    }

    fn captured(bytes: &[u8]) -> Captured {
        Captured { total: bytes.len() as u64, head: Bytes(bytes.to_vec()), tail: Bytes::default() }
    }

    fn answer(output: Captured, end: BashEnd) -> BashAnswer {
        let cwd = Some("/workspace".to_owned());
        BashAnswer { output, end, restarted: None, cwd, background: Vec::new(), output_elsewhere: None }
    }

    fn bash_text(output: Captured) -> String {
        given(|given| bash(&answer(output, BashEnd::Exited(0)), &given.context(), false).content.text())
    }

    #[test]
    fn a_result_has_its_limit_whatever_is_printed() {
        let notes = "\n[The command completed with exit code 0.]\n[Current working directory: /workspace]";
        for piece in ["#", "\u{e9}", "\u{1f600}"] {
            // As much as fits is shown whole, and one more is not.
            let fits = RESULT_CHARS - notes.chars().count();
            let text = |n: usize| {
                let bytes = piece.repeat(n).into_bytes();
                bash_text(Captured { total: bytes.len() as u64, head: Bytes(bytes), tail: Bytes::default() })
            };
            assert_eq!(text(fits), format!("{}{notes}", piece.repeat(fits)));
            for n in [fits + 1, 100_000] {
                let text = text(n);
                assert!(text.chars().count() <= RESULT_CHARS && text.chars().count() > RESULT_CHARS - 100);
                assert!(text.starts_with(piece) && text.ends_with(&format!("{piece}{notes}")));
                let (shown, total) = (text.matches(piece).count() * piece.len(), n * piece.len());
                let told = format!("[... {} of {total} bytes left out ...]", total - shown);
                assert!(text.contains(&told), "{told}");
            }
        }
    }

    #[test]
    fn what_the_guest_left_out_is_counted_in() {
        let piece = |byte: u8| Bytes(vec![byte; 64 * 1024]);
        let output = Captured { head: piece(b'a'), tail: piece(b'z'), total: 10_000_000 };
        let answer = CellOutput { output, end: CellEnd::Ok, restarted: None, shown: Vec::new() };
        let text = given(|given| ipython(&answer, &given.context()).content.text());
        assert!(text.starts_with("aaa") && text.ends_with("zzz") && text.chars().count() <= RESULT_CHARS);
        let shown = text.matches(['a', 'z']).count();
        assert!(
            text.contains(&format!(" {} of 10000000 bytes left out ", 10_000_000 - shown)),
            "{}",
            &text[14_900..15_100]
        );
    }

    #[test]
    fn what_a_shell_does_is_said_in_lines_of_their_own() {
        given(|given| {
            let text = |answer: BashAnswer, is_capped| bash(&answer, &given.context(), is_capped).content.text();
            let limit = BashEnd::LimitPassed { limit_ms: 1500, by: Interrupt::Signal, wanted_input: true };
            assert_eq!(
                text(answer(captured(b"\x1b[32mName?\x1b[m "), limit), true),
                "Name? \n[The command timed out after 1.5 seconds, which was all the time that the task had left. It was \
                 waiting for input, which it can get from a pipe, or from a call with is_input true while it runs. It was \
                 interrupted.]\n[Current working directory: /workspace]"
            );
            let running = BashEnd::Running { silent_ms: 2000, wants_input: true };
            let told = text(answer(captured(b"\x1b[?1049h\x1b[HA file"), running), false);
            assert!(
                told.starts_with("A file\n[The command has printed nothing for 2 seconds and is waiting for input.")
            );
            assert!(told.contains("]\n[A full-screen program has the terminal, and"), "{told}");
            let background = [(7, "sleep"), (8, "a\nb")].map(|(pid, name)| Background { pid, name: name.to_owned() });
            let busy = BashAnswer {
                background: background.to_vec(),
                output_elsewhere: Some("/dev/null".to_owned()),
                restarted: Some("The shell ended.".to_owned()),
                ..answer(Captured::default(), BashEnd::Exited(0))
            };
            assert_eq!(
                text(busy, false),
                "[The command completed with exit code 0.]\n[Running in the background: sleep (pid 7), a\u{fffd}b (pid \
                 8).]\n[The shell's output goes to /dev/null since an `exec`; `exec >/dev/tty 2>&1` brings it back.]\n[The \
                 shell ended. A new shell was started in /workspace; variables and functions are reset.]\n[Current working \
                 directory: /workspace]"
            );
        });
    }

    #[test]
    fn raw_text_keeps_its_escape_sequences() {
        given(|given| {
            let context = ToolContext { text: TextForm::Raw, ..given.context() };
            let result = bash(&answer(captured(b"\x1b[31ma\rb\xff"), BashEnd::Exited(0)), &context, false);
            assert!(result.content.text().starts_with("\x1b[31ma\rb\u{fffd}\n["));
        });
    }

    fn png(at: u64) -> Shown {
        let head = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\x02\x80\0\0\x01\xe0";
        Shown { at, mime: "image/png".to_owned(), data: head.to_vec() }
    }

    #[test]
    fn what_a_cell_shows_stands_where_it_was_shown() {
        given(|given| {
            let shown = |at, mime: &str, data: &[u8]| Shown { at, mime: mime.to_owned(), data: data.to_vec() };
            let answer = CellOutput {
                output: captured(b"one\ntwo\n"),
                end: CellEnd::Ok,
                restarted: None,
                shown: vec![png(4), shown(4, "text/html", b"<b>"), shown(8, "text/markdown", b"**x**"), png(99)],
            };
            let context = given.context();
            assert_eq!(
                ipython(&answer, &context).content,
                Content::Text(
                    "one\n[image/png, 640x480, 24 bytes]\ntwo\n**x**\n[image/png, 640x480, 24 bytes]\n".to_owned()
                )
            );
            let text = |text: &str| Part::Text { text: text.to_owned() };
            let image =
                Part::Image { mime: "image/png".to_owned(), data: "iVBORw0KGgoAAAANSUhEUgAAAoAAAAHg".to_owned() };
            let context = ToolContext { images: true, ..context };
            assert_eq!(
                ipython(&answer, &context).content,
                Content::Parts(vec![text("one\n"), image.clone(), text("two\n**x**\n"), image.clone()])
            );
            let silent = CellOutput { output: Captured::default(), shown: vec![png(0)], ..answer };
            assert_eq!(ipython(&silent, &context).content, Content::Parts(vec![image]));
        });
    }

    proptest! {
        #[test]
        fn a_cut_output_is_its_two_ends(
            bytes in proptest::collection::vec(prop_oneof![Just(b'a'), Just(0xc3), Just(0xa9), any::<u8>()], 0..2000),
            limit in 0_usize..1000,
        ) {
            given(|given| {
                let context = ToolContext { text: TextForm::Raw, ..given.context() };
                let mut woven = Woven::new(&captured(&bytes), &[], &context);
                woven.cut(limit);
                let text = woven.text;
                let whole = String::from_utf8_lossy(&bytes);
                if whole.chars().count() <= limit {
                    prop_assert_eq!(text, whole);
                } else {
                    prop_assert!(text.chars().count() <= limit.max(OMITTED_CHARS));
                    let half = limit.saturating_sub(OMITTED_CHARS) / 2;
                    let head: String = whole.chars().take(half).collect();
                    let tail: String = whole.chars().skip(whole.chars().count() - half).collect();
                    prop_assert!(text.starts_with(&head) && text.ends_with(&tail));
                }
                Ok(())
            })?;
        }

        #[test]
        fn images_are_all_there_wherever_they_were_shown(
            n_head in 0_usize..300, n_tail in 0_usize..300, omitted in 0_u64..300, limit in 0_usize..500,
            places in proptest::collection::vec(any::<u16>(), 0..5),
        ) {
            given(|given| {
                let piece = |n: usize| Bytes("\u{e9}".repeat(n).into_bytes());
                let output = Captured { head: piece(n_head), tail: piece(n_tail), total: (2 * (n_head + n_tail)) as u64 + omitted };
                let shown: Vec<Shown> = places.iter().map(|at| png(u64::from(*at) % 1000)).collect();
                let answer = CellOutput { output, end: CellEnd::Ok, restarted: None, shown };
                let context = ToolContext { images: true, output_chars: limit, ..given.context() };
                let content = ipython(&answer, &context).content;
                let n_images = match &content {
                    Content::Text(_) => 0,
                    Content::Parts(parts) => parts.iter().filter(|part| matches!(part, Part::Image { .. })).count(),
                };
                prop_assert_eq!(n_images, places.len());
                prop_assert!(content.text().chars().count() <= limit.max(OMITTED_CHARS) + 1);
                Ok(())
            })?;
        }
    }
}
