//! What an image of Singularity's sets for its programs: variables, in scripts that a launcher sources in the order of their names.
//!
//! Nothing is run. What is plainly a variable that is set is read as a shell reads it; whatever else a script does is left out,
//! and noted.

mod blocks;
mod plain;

use std::{collections::BTreeMap, fs::File, io::Read as _, os::fd::AsFd, path::Path};

use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2},
    io::Errno,
};

use self::blocks::Blocks;
use super::{
    ImageError, layers,
    tree::{open_inside, text},
};

/// Where the scripts are.
const FOLDER: &str = ".singularity.d/env";

/// Scripts that are the same in every image: they serve the launcher.
const LAUNCHERS_OWN: [&[u8]; 5] =
    [b"01-base.sh", b"94-appsbase.sh", b"95-apps.sh", b"99-base.sh", b"99-runtimevars.sh"];

/// How many scripts are read.
const MAX_FILES: usize = 16;

/// How long each of them may be, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// How many variables there may be.
const MAX_VARIABLES: usize = 1000;

/// How long the value of one may be, in bytes.
const MAX_VALUE_BYTES: usize = 32 << 10;

/// How long all may be together, in bytes.
const MAX_BYTES: usize = 256 << 10;

/// A folder that a launcher binds, with libraries of the machine's. It is empty here.
const LAUNCHERS_LIBS: &str = "/.singularity.d/libs";

/// What was set so far.
#[derive(Debug, Default)]
struct Variables {
    by_name: BTreeMap<String, Variable>,
    n_bytes: usize,
}

#[derive(Clone, Debug)]
struct Variable {
    value: String,
    /// Whether programs get it.
    is_exported: bool,
}

impl Variables {
    /// Sets what a line sets; tells whether there was room for it.
    fn set(&mut self, changes: Vec<(String, Variable)>) -> bool {
        let size = |(name, variable): (&String, &Variable)| name.len() + variable.value.len();
        let more: usize = changes.iter().map(|(name, variable)| size((name, variable))).sum();
        if self.n_bytes + more > MAX_BYTES || self.by_name.len() + changes.len() > MAX_VARIABLES {
            return false;
        }
        for (name, variable) in changes {
            self.n_bytes -= self.by_name.get_key_value(&name).map_or(0, size);
            self.n_bytes += size((&name, &variable));
            self.by_name.insert(name, variable);
        }
        true
    }

    /// Returns what programs get.
    fn into_env(self) -> Vec<(String, String)> {
        let exported = self.by_name.into_iter().filter(|(_, variable)| variable.is_exported);
        let mut env: Vec<(String, String)> = exported.map(|(name, variable)| (name, variable.value)).collect();
        env.retain_mut(|(name, value)| {
            if name != "LD_LIBRARY_PATH" || !value.split(':').any(|folder| folder == LAUNCHERS_LIBS) {
                return true;
            }
            let others: Vec<&str> = value.split(':').filter(|folder| *folder != LAUNCHERS_LIBS).collect();
            *value = others.join(":");
            !value.is_empty()
        });
        env
    }
}

/// Reads the variables of an unpacked image, sorted by name. An image of another kind has none.
///
/// # Errors
/// When a script is there and the system fails to read it.
pub(super) fn read(root: &Path, notes: &mut Vec<String>) -> Result<Vec<(String, String)>, ImageError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root_fd = openat(CWD, root, flags, Mode::empty());
    let root_fd = root_fd.map_err(|error| ImageError::at("open folder", root, error.into()))?;
    let folder = match open_inside(&root_fd, FOLDER.as_bytes()) {
        Ok(folder) => folder,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(Vec::new()),
        Err(error) => return Err(ImageError::at("open folder", root.join(FOLDER), error.into())),
    };
    let names = layers::names(&folder);
    let mut names = names.map_err(|error| ImageError::at("list", root.join(FOLDER), error.into()))?;
    names.retain(|name| name.ends_with(b".sh") && !LAUNCHERS_OWN.contains(&name.as_slice()));
    names.sort_unstable();
    if names.len() > MAX_FILES {
        notes.push(format!("read variables from {MAX_FILES} files of {FOLDER} alone, of {}", names.len()));
    }
    let mut variables = Variables::default();
    for name in names.iter().take(MAX_FILES) {
        let path = format!("{FOLDER}/{}", text(name).escape_debug());
        let problem = match open_file(&root_fd, &[FOLDER.as_bytes(), b"/", name].concat()) {
            Err(error) => Some(format!("cannot be opened: {error}")),
            Ok(None) => Some("is no file".to_owned()),
            Ok(Some(file)) => {
                let mut bytes = Vec::new();
                let read = file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes);
                read.map_err(|error| ImageError::at("read", root.join(&path), error))?;
                if bytes.len() as u64 > MAX_FILE_BYTES {
                    Some(format!("is larger than {MAX_FILE_BYTES} bytes"))
                } else {
                    let left_out = source(&bytes, &mut variables);
                    left_out.map(|(n_lines, first)| {
                        let lines = if n_lines == 1 { "line" } else { "lines" };
                        format!("does more than set variables in {n_lines} {lines}, the first line {first}")
                    })
                }
            }
        };
        notes.extend(problem.map(|problem| format!("left out variables: {path} {problem}")));
    }
    Ok(variables.into_env())
}

/// Opens a file by its path inside of `root`, as if `root` were `/`. Returns nothing for what is there and no file.
fn open_file(root: impl AsFd, path: &[u8]) -> Result<Option<File>, Errno> {
    // Without waiting for a writer, if it is a FIFO.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = loop {
        match openat2(&root, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            opened => break File::from(opened?),
        }
    };
    let is_file = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_file();
    Ok(is_file.then_some(file))
}

/// Takes what a script sets; returns how many lines were left out, and the number of the first.
fn source(script: &[u8], variables: &mut Variables) -> Option<(usize, usize)> {
    let mut left_out = None;
    let mut blocks = Blocks::default();
    for (number, line) in (1..).zip(script.split(|byte| *byte == b'\n')) {
        let trimmed = line.trim_ascii();
        if trimmed.is_empty() || trimmed.starts_with(b"#") {
            blocks.pass(line);
            continue;
        }
        if !blocks.is_inside() {
            let changes = std::str::from_utf8(line).ok().and_then(|line| plain::changes(line, variables));
            if changes.is_some_and(|changes| variables.set(changes)) {
                continue;
            }
        }
        blocks.pass(line);
        left_out.get_or_insert((0, number)).0 += 1;
    }
    left_out
}

#[cfg(test)]
mod tests;
