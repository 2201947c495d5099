//! Removing what builds have left whose processes are gone, of whatever output.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
};

use super::{
    claim::Turns,
    record::{self, RECORDS},
};
use crate::{images::ImageError, store::remove::remove_tree_of_any};

/// The folder, in a state, of what builds need while they last: one folder each, of the build's name.
pub(super) const TREES: &str = "trees";

/// The file in such a folder that tells where the build's image grows, which is elsewhere.
const PLACE: &str = "part";

/// Returns where a build of the output that `key` names keeps what it needs for a while. `build` is a token and a number.
pub(super) fn tree(state: &Path, key: &str, build: &str) -> PathBuf {
    state.join(TREES).join(format!("{key}.{build}"))
}

/// Notes in a build's folder where its image grows.
pub(super) fn note_part(tree: &Path, part: &Path) -> Result<(), ImageError> {
    let place = tree.join(PLACE);
    fs::write(&place, part.as_os_str().as_bytes()).map_err(|error| ImageError::at("write", &place, error))
}

/// Removes what is left, and returns how many things that were. What cannot be removed stays, with a warning.
pub(super) fn sweep(state: &Path, guest: &Path, turns: &Turns) -> Result<usize, ImageError> {
    let mut n_removed = 0;
    let mut remove = |path: &Path| match remove_tree_of_any(path, Some(guest), None) {
        Ok(()) => n_removed += 1,
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(path = %path.display(), error, "what a build has left stays");
        }
    };
    for folder in [TREES, RECORDS].map(|name| state.join(name)) {
        for name in list(&folder)? {
            let Some(build) = build_of(&name) else { continue };
            if !build.rsplit_once('-').is_some_and(|(token, _)| turns.is_gone(token)) {
                continue;
            }
            let path = folder.join(&name);
            if let Some(part) = part_of(&path, build) {
                remove(&part);
            }
            remove(&path);
        }
    }
    Ok(n_removed + turns.sweep()?)
}

/// Returns the name of the build that a file or folder of this name is of: a record has none.
fn build_of(name: &OsStr) -> Option<&str> {
    let (_, build) = name.to_str()?.split_once('.')?;
    (build != record::ENDING).then_some(build)
}

/// Reads where the image of a build grows, if it is there still.
fn part_of(tree: &Path, build: &str) -> Option<PathBuf> {
    let part = PathBuf::from(OsString::from_vec(fs::read(tree.join(PLACE)).ok()?));
    let is_of_build = part.to_str().is_some_and(|part| part.ends_with(&format!(".{build}.part")));
    (is_of_build && part.symlink_metadata().is_ok_and(|meta| meta.is_file())).then_some(part)
}

fn list(folder: &Path) -> Result<Vec<OsString>, ImageError> {
    let names = fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
    names.map_err(|error: io::Error| ImageError::at("list", folder, error))
}
