//! What was left out or changed while an image was unpacked, told in a few lines however often it happened.

use std::collections::BTreeMap;

/// A thing that happens to many files in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Note {
    /// A program would have run as somebody else.
    SetId,
    /// A device node is not made: a sandbox has a `/dev` of its own.
    Device,
    /// A socket is not made: nobody would listen.
    Socket,
    /// A program would have had rights of its own. Only root may give them.
    Capabilities,
    /// The file system of the store does not keep attributes, or not so many.
    Attributes,
}

impl Note {
    fn line(self, n_files: u64, first: &str) -> String {
        let files = if n_files == 1 { "file" } else { "files" };
        let what = match self {
            Self::SetId => "cleared set-id bits of",
            Self::Device => "left out device nodes:",
            Self::Socket => "left out sockets:",
            Self::Capabilities => "left out capabilities of",
            Self::Attributes => "could not keep extended attributes of",
        };
        format!("{what} {n_files} {files}, the first {first}")
    }
}

/// Notes of one image: for each kind how often, and where first.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    counted: BTreeMap<Note, (u64, String)>,
    others: Vec<String>,
}

impl Notes {
    /// Counts one more file of a kind. Its name inside the image is asked for once.
    pub(crate) fn add(&mut self, note: Note, entry: impl FnOnce() -> String) {
        self.counted.entry(note).or_insert_with(|| (0, entry())).0 += 1;
    }

    /// Adds a line about something that happens once.
    pub(crate) fn say(&mut self, line: impl Into<String>) {
        self.others.push(line.into());
    }

    /// Adds what somebody else noted about the same image.
    pub(crate) fn merge(&mut self, other: Self) {
        for (note, (n_files, first)) in other.counted {
            self.counted.entry(note).or_insert((0, first)).0 += n_files;
        }
        self.others.extend(other.others);
    }

    /// Returns the lines, for people.
    pub(crate) fn into_lines(self) -> Vec<String> {
        let counted = self.counted.into_iter().map(|(note, (n_files, first))| note.line(n_files, &first));
        counted.chain(self.others).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_files_of_a_kind_are_one_line_that_names_the_first() {
        let mut notes = Notes::default();
        notes.add(Note::SetId, || "usr/bin/su".to_owned());
        let mut more = Notes::default();
        more.add(Note::SetId, || "usr/bin/mount".to_owned());
        more.add(Note::Device, || "dev/null".to_owned());
        more.say("not what it was");
        notes.merge(more);
        let lines = [
            "cleared set-id bits of 2 files, the first usr/bin/su",
            "left out device nodes: 1 file, the first dev/null",
            "not what it was",
        ];
        assert_eq!(notes.into_lines(), lines);
    }
}
