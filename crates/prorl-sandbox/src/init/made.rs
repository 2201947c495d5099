//! What a sandbox was given at its start, such as its `/etc/hosts`: what a task leaves of that as it was is no part of what it
//! has written, and whoever starts on top of that gets its own.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use prorl_core::{frame, hello::StartFailure};
use serde::{Deserialize, Serialize};

use super::At;

/// Where it is written down, beside the tree.
pub(super) const MADE: &str = "made";

/// A file up to this size is compared by its bytes, in bytes; a larger one by the time of its last change.
pub(super) const MAX_KEPT_BYTES: u64 = 4096;

/// A file or a link.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Made {
    /// Where, relative to the root.
    pub(super) path: OsString,
    pub(super) inode: u64,
    /// When it or its metadata were changed last, in seconds and nanoseconds.
    pub(super) changed: (i64, i64),
    pub(super) mode: u32,
    pub(super) owner: (u32, u32),
    /// What is in a small file.
    pub(super) content: Option<Vec<u8>>,
}

/// Writes down the files and links in the root and in `/etc` of `base`. Folders are kept by whoever changes them or not.
pub(super) fn note(base: &Path, layer: &Path) -> Result<(), StartFailure> {
    let mut made: Vec<Made> = Vec::new();
    for folder in ["", "etc"] {
        collect(base, Path::new(folder), &mut made).at("write down what was made", folder)?;
    }
    let bytes = frame::encode(&made).map_err(io::Error::other).at("write down what was made", "")?;
    fs::write(layer.join(MADE), bytes).at("write down what was made", "")
}

fn collect(base: &Path, folder: &Path, made: &mut Vec<Made>) -> io::Result<()> {
    let entries = match fs::read_dir(base.join(folder)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let (path, meta): (PathBuf, _) = (folder.join(entry.file_name()), entry.metadata()?);
        if meta.is_dir() {
            if !folder.as_os_str().is_empty() {
                collect(base, &path, made)?;
            }
            continue;
        }
        let is_small = meta.is_file() && meta.len() <= MAX_KEPT_BYTES;
        made.push(Made {
            inode: meta.ino(),
            changed: (meta.ctime(), meta.ctime_nsec()),
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
            content: if is_small { Some(fs::read(entry.path())?) } else { None },
            path: path.into(),
        });
    }
    Ok(())
}

/// Reads what was written down.
pub(super) fn read(mut file: impl io::Read) -> io::Result<Vec<Made>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    frame::decode(bytes.get(frame::HEADER_BYTES..).unwrap_or_default()).map_err(io::Error::other)
}
