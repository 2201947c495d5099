//! The `str_replace_editor`: shows files and folders, and changes files by one exact edit at a time.
//!
//! What cannot be done is refused with the reason, and then nothing was done. A file keeps its encoding, the ends of its lines,
//! its mode, its owner and its links; nobody ever reads it half written.

mod change;
mod file;
mod text;
mod view;

use std::{
    collections::VecDeque,
    env,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
};

use parking_lot::Mutex;

use self::{
    file::{MAX_BYTES, Opened},
    text::{Text, lines},
};
use super::serve::Shared;
use crate::wire::{Answer, Change, Edit, EditAnswer};

/// Changes of one file that can be undone.
const MAX_VERSIONS: usize = 10;

/// Changes that can be undone in all, and the bytes kept for that.
const MAX_CHANGES: usize = 1000;
const MAX_HISTORY_BYTES: usize = 32 * 1024 * 1024;

/// Characters of an answer, whatever was asked for, so that it has a frame.
const MAX_ANSWER_CHARS: u64 = 500_000;

pub(super) fn run(shared: &Shared, id: u64, edit: &Edit) {
    let done = Job { history: &shared.edits, file_bytes: shared.terms.limits.file_bytes, edit }.run();
    let is_refused = done.is_err();
    let text = done.unwrap_or_else(|reason| reason);
    shared.post.done(id, Answer::Edit(EditAnswer { text, is_refused }));
}

/// What files were before they were changed, so that changes can be undone; the oldest first.
#[derive(Debug, Default)]
pub(super) struct History(VecDeque<Version>);

#[derive(Debug)]
struct Version {
    path: PathBuf,
    /// What it was; nothing of a file that was made.
    before: Option<Vec<u8>>,
    /// Of what it became.
    after: u64,
}

impl History {
    fn push(&mut self, path: PathBuf, before: Option<Vec<u8>>, after: &[u8]) {
        let same = |version: &Version| version.path == path;
        if self.0.iter().filter(|version| same(version)).count() == MAX_VERSIONS
            && let Some(oldest) = self.0.iter().position(same)
        {
            self.0.remove(oldest);
        }
        self.0.push_back(Version { path, before, after: digest(after) });
        while self.0.len() > MAX_CHANGES || self.n_bytes() > MAX_HISTORY_BYTES {
            self.0.pop_front();
        }
    }

    fn n_bytes(&self) -> usize {
        self.0.iter().filter_map(|version| version.before.as_ref()).map(Vec::len).sum()
    }

    /// Returns the place of the last change of a file.
    fn last(&self, path: &Path) -> Option<usize> {
        self.0.iter().rposition(|version| version.path == path)
    }
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// One call.
struct Job<'a> {
    history: &'a Mutex<History>,
    /// Bytes that a task's file may have.
    file_bytes: Option<u64>,
    edit: &'a Edit,
}

impl Job<'_> {
    fn run(&self) -> Result<String, String> {
        let path = Path::new(&self.edit.path);
        if !path.is_absolute() {
            let absolute = env::current_dir().unwrap_or_default().join(path);
            return Err(format!(
                "`path` must be absolute, beginning with `/`. Perhaps {} is meant.",
                absolute.display()
            ));
        }
        match &self.edit.change {
            Change::View { range } => self.view(*range),
            Change::Create { text } => self.create(text),
            Change::Replace { old, new } => {
                self.change(|text| change::replace(&self.edit.path, &text.content, &text.piece(old), &text.piece(new)))
            }
            Change::Insert { after, text: new } => {
                self.change(|text| change::insert(&self.edit.path, &text.content, *after, &text.piece(new)))
            }
            Change::Undo => self.undo(),
        }
    }

    fn limit(&self) -> usize {
        usize::try_from(self.edit.output_chars.min(MAX_ANSWER_CHARS)).unwrap_or(usize::MAX)
    }

    fn view(&self, range: Option<(u64, Option<u64>)>) -> Result<String, String> {
        let path = &self.edit.path;
        if Path::new(path).is_dir() {
            return match range {
                Some(_) => Err(format!("`view_range` is for files, and {path} is a folder.")),
                None => view::folder(path, Path::new(path), self.limit()),
            };
        }
        view::file(path, &self.text(&Opened::read(path)?)?, range, self.limit())
    }

    fn create(&self, text: &str) -> Result<String, String> {
        let shown = &self.edit.path;
        let path = Path::new(shown);
        if path.is_dir() || file::is_folder_form(path) {
            return Err(format!("{shown} is a folder. Give the path of a file."));
        }
        let mut history = self.history.lock();
        if file::exists(path) {
            return Err(format!(
                "There is a file {shown} already. Change it with `str_replace` or `insert`, or remove it first."
            ));
        }
        let made = file::create(path, text.as_bytes(), self.file_bytes)
            .map_err(|err| format!("Cannot create {shown}: {err}."))?;
        history.push(made, None, text.as_bytes());
        Ok(format!("File created successfully at: {shown}"))
    }

    fn text(&self, opened: &Opened) -> Result<Text, String> {
        Text::decode(&opened.bytes).map_err(|what| {
            format!("{} is {what} of {} bytes. The editor takes text.", self.edit.path, opened.bytes.len())
        })
    }

    /// Reads the file, makes another text of its text, and writes that.
    fn change(&self, make: impl FnOnce(&Text) -> Result<String, String>) -> Result<String, String> {
        let shown = &self.edit.path;
        if Path::new(shown).is_dir() {
            return Err(format!("{shown} is a folder. Give the path of a file; `view` lists a folder."));
        }
        let mut history = self.history.lock();
        let opened = Opened::read(shown)?;
        let text = self.text(&opened)?;
        let new = make(&text)?;
        let bytes = text.encode(&new).map_err(|char| {
            format!("{shown} is not UTF-8 but in an encoding of one byte for each character, which has no {char:?}.")
        })?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(format!(
                "{shown} would have {} bytes, more than the {MAX_BYTES} that the editor takes.",
                bytes.len()
            ));
        }
        let note = opened.replace(&bytes, self.file_bytes).map_err(|err| format!("Cannot write {shown}: {err}."))?;
        history.push(opened.path, Some(opened.bytes), &bytes);
        Ok(self.snippet(&format!("The file {shown} has been edited."), &text.content, &new, note))
    }

    fn undo(&self) -> Result<String, String> {
        let shown = &self.edit.path;
        let mut history = self.history.lock();
        let path = file::real(Path::new(shown)).map_err(|err| file::reason(shown, &err))?;
        let Some(place) = history.last(&path) else {
            return Err(format!("There is no change of {shown} by this editor that could be undone."));
        };
        let opened = Opened::read(shown)?;
        let version = &history.0[place];
        if digest(&opened.bytes) != version.after {
            return Err(format!(
                "{shown} has been changed since by something else, which an undo would lose. Nothing was done."
            ));
        }
        let failed = |err| format!("Cannot undo the last change of {shown}: {err}.");
        let told = match &version.before {
            None => {
                opened.remove().map_err(failed)?;
                format!("Last edit to {shown} undone successfully: the file, which it had made, is removed.")
            }
            Some(before) => {
                let note = opened.replace(before, self.file_bytes).map_err(failed)?;
                let told = format!("Last edit to {shown} undone successfully.");
                match (Text::decode(&opened.bytes), Text::decode(before)) {
                    (Ok(from), Ok(to)) => self.snippet(&told, &from.content, &to.content, note),
                    _ => told,
                }
            }
        };
        history.0.remove(place);
        Ok(told)
    }

    /// Adds to what was done how the file looks around it.
    fn snippet(&self, done: &str, before: &str, after: &str, note: Option<&str>) -> String {
        let path = &self.edit.path;
        let mut told = done.to_owned();
        if lines(after).next().is_none() {
            told.push_str(" It is empty now.\n");
        } else {
            let (first, last) = change::changed(before, after);
            let heading = format!(" Here's the result of running `cat -n` on a snippet of {path}:\n");
            let room = self.limit().saturating_sub(told.chars().count() + heading.chars().count());
            told.push_str(&heading);
            told.push_str(&view::numbered(after, first, last, room));
        }
        if let Some(note) = note {
            told.push('[');
            told.push_str(note);
            told.push_str("]\n");
        }
        told
    }
}
