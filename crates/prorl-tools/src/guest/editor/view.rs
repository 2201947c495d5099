//! What an agent sees: lines of a file with their numbers, and what a folder has.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use super::text::{Encoding, Endings, Text, lines};

/// Entries of a folder that are listed.
const MAX_ENTRIES: usize = 1000;

/// Entries of one folder that are remembered to sort them; the others are counted.
const MAX_SORTED: usize = 10_000;

/// Characters kept for what is said about lines that are not shown.
const NOTE_CHARS: usize = 200;

/// Shows a file, or the lines `first..=last` of it.
pub(super) fn file(path: &str, text: &Text, range: Option<(u64, Option<u64>)>, limit: usize) -> Result<String, String> {
    let n_lines = lines(&text.content).count();
    let (first, last) = match range {
        None => (1, n_lines),
        Some((first, last)) => {
            let n = n_lines as u64;
            let last = last.unwrap_or(n);
            if first < 1 || first > n.max(1) || last > n || last < first.min(n) {
                return Err(format!(
                    "`view_range` must be [first, last] with 1 <= first <= last <= {n_lines}, or -1 as last: {path} has \
                     {n_lines} lines."
                ));
            }
            (usize::try_from(first).unwrap_or(usize::MAX), usize::try_from(last).unwrap_or(usize::MAX))
        }
    };
    let mut shown = format!("Here's the result of running `cat -n` on {path}:\n");
    if n_lines == 0 {
        shown.push_str("[The file is empty.]\n");
    }
    let room = limit.saturating_sub(shown.chars().count());
    shown.push_str(&numbered(&text.content, first, last, room));
    match (text.encoding, text.endings) {
        (Encoding::Latin1, _) => shown.push_str("[The file is not UTF-8. It is shown, and kept, as Latin-1.]\n"),
        (_, Endings::Mixed { n_crlf }) => {
            let _infallible =
                writeln!(shown, "[{n_crlf} of the {n_lines} lines end with \\r\\n, which `old_str` must have there.]");
        }
        _ => {}
    }
    Ok(shown)
}

/// Returns the lines `first..=last` with their numbers, as many as have room.
pub(super) fn numbered(text: &str, first: usize, last: usize, room: usize) -> String {
    let room = room.saturating_sub(NOTE_CHARS);
    let (mut shown, mut used) = (String::new(), 0);
    for (idx, line) in lines(text).enumerate().take(last).skip(first - 1) {
        let (number, n_chars) = (idx + 1, line.chars().count());
        // The number takes six characters, or what it needs; then there is a tab, and the end of the line.
        let head = 2 + number.to_string().len().max(6);
        if used + head + n_chars > room {
            if number == first {
                let part: String = line.chars().take(room.saturating_sub(head)).collect();
                let _infallible = writeln!(
                    shown,
                    "{number:6}\t{part}\n[Line {number} has {n_chars} characters, of which {} are shown.]",
                    part.chars().count()
                );
            }
            if number < last {
                let next = if number == first { number + 1 } else { number };
                let _infallible = writeln!(
                    shown,
                    "[The lines from {next} to {last} are left out. Call again with a `view_range` to see them.]"
                );
            } else if number != first {
                let _infallible =
                    writeln!(shown, "[Line {last} is left out. Call again with a `view_range` to see it.]");
            }
            break;
        }
        let _infallible = writeln!(shown, "{number:6}\t{line}");
        used += head + n_chars;
    }
    shown
}

/// One entry of a folder.
struct Entry {
    name: String,
    path: PathBuf,
    kind: fs::FileType,
}

/// What a folder has: what is listed, and how much is not.
#[derive(Default)]
struct Listing {
    entries: Vec<Entry>,
    n_hidden: usize,
    n_more: usize,
}

fn list(folder: &Path) -> std::io::Result<Listing> {
    let mut listing = Listing::default();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(b".") {
            listing.n_hidden += 1;
        } else if listing.entries.len() == MAX_SORTED {
            listing.n_more += 1;
        } else {
            let kind = entry.file_type()?;
            listing.entries.push(Entry { name: one_line(&name.to_string_lossy()), path: entry.path(), kind });
        }
    }
    listing.entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(listing)
}

/// A name may have any characters, and the list has one name in a line.
fn one_line(name: &str) -> String {
    name.replace(char::is_control, "\u{fffd}")
}

/// Lists a folder two levels deep, without hidden entries and without following links.
pub(super) fn folder(path: &str, real: &Path, limit: usize) -> Result<String, String> {
    let top = list(real).map_err(|err| format!("Cannot list {path}: {err}."))?;
    let base = path.trim_end_matches('/');
    let mut shown =
        format!("Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n{base}/\n");
    let mut room = limit.saturating_sub(shown.chars().count() + NOTE_CHARS);
    let (mut n_listed, mut n_more) = (0, 0);
    let (mut n_unsorted, mut n_hidden) = (top.n_more, top.n_hidden);
    let mut add = |line: &str| {
        let n_chars = line.chars().count() + 1;
        if n_listed == MAX_ENTRIES || n_chars > room {
            n_more += 1;
            room = 0;
            return;
        }
        (n_listed, room) = (n_listed + 1, room - n_chars);
        shown.push_str(line);
        shown.push('\n');
    };
    for entry in &top.entries {
        let name = format!("{base}/{}", entry.name);
        if entry.kind.is_symlink() {
            let target = fs::read_link(&entry.path).unwrap_or_default();
            add(&format!("{name} -> {}", one_line(&target.to_string_lossy())));
        } else if entry.kind.is_dir() {
            match list(&entry.path) {
                Err(err) => add(&format!("{name}/ ({err})")),
                Ok(below) => {
                    add(&format!("{name}/"));
                    n_hidden += below.n_hidden;
                    for entry in &below.entries {
                        let end = if entry.kind.is_dir() { "/" } else { "" };
                        let link = entry.kind.is_symlink().then(|| fs::read_link(&entry.path).unwrap_or_default());
                        let to = link.map(|to| format!(" -> {}", one_line(&to.to_string_lossy()))).unwrap_or_default();
                        add(&format!("{name}/{}{end}{to}", entry.name));
                    }
                    n_unsorted += below.n_more;
                }
            }
        } else {
            add(&name);
        }
    }
    n_more += n_unsorted;
    if n_more > 0 {
        let _infallible = writeln!(shown, "[{n_more} more are left out. `find` in execute_bash lists them.]");
    }
    if n_hidden > 0 {
        let _infallible =
            writeln!(shown, "[{n_hidden} hidden items are left out. `ls -a` in execute_bash lists them.]");
    }
    Ok(shown)
}
