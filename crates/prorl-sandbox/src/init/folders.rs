//! Lets a fake root write into folders of an image that belong to somebody else.
//!
//! The kernel gives a fake root no right over a file whose owner has no id inside, which on the host's own programs and on a
//! shared image is every file. But of two folders that an overlay merges, the upper one says who may write: so a fake
//! root gets empty folders of its own over the image's. Files stay as they are; new ones can be put beside them. The few
//! files that package managers open for writing are copied.

use std::{
    collections::VecDeque,
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
    path::Path,
};

use nix::{
    sys::{
        stat::{Mode, umask},
        statvfs::statvfs,
    },
    unistd::geteuid,
};
use prorl_core::hello::StartFailure;

use super::At;

/// How many folders are made at most. They go from the top down, so what an image has more lies deep.
const MAX_FOLDERS: u64 = 2048;

/// Folders, often the half of all, in which each package keeps to a folder of its own.
const OWN_FOLDERS: &[&str] = &["debug", "doc", "src"];

/// Folders, by the ends of their paths, with the locks and the lists of package managers.
const DATABASES: &[&str] = &["lib/apk/db", "var/lib/dpkg", "var/lib/dpkg/triggers"];

/// A file above this size is not copied, in bytes.
const MAX_COPY_BYTES: u64 = 8 << 20;

/// The rights that a new folder gets as asked for; those above are told to it afterwards.
const PLAIN_MODE: u32 = 0o1777;

/// Tells whether a folder of an image belongs to somebody else.
pub(super) fn is_foreign(lower: &Path) -> bool {
    fs::metadata(lower).is_ok_and(|meta| meta.uid() != geteuid().as_raw())
}

/// Makes folders in `upper`, which is to be the upper side of an overlay, over those of `lower`. `upper` exists.
pub(super) fn open(lower: &Path, upper: &Path) -> Result<(), StartFailure> {
    // Each takes one of the layer's files, of which most are for what will be written.
    let free = statvfs(upper).at("read", "layer")?.files_free();
    let mask = umask(Mode::empty());
    let made = mirror(lower, upper, MAX_FOLDERS.min(free / 2));
    umask(mask);
    made
}

fn mirror(lower: &Path, upper: &Path, mut left: u64) -> Result<(), StartFailure> {
    let mut folders = VecDeque::from([(lower.to_owned(), upper.to_owned())]);
    while let Some((lower, upper)) = folders.pop_front() {
        // One that this user may not read is not for a fake root either.
        for entry in fs::read_dir(&lower).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let Some(rest) = left.checked_sub(1) else { return Ok(()) };
            let Ok(meta) = entry.metadata() else { continue };
            let (from, to) = (entry.path(), upper.join(entry.file_name()));
            let mode = meta.mode() & 0o7777;
            if mode & 0o005 != 0o005 && fs::read_dir(&from).is_err() {
                continue;
            }
            match fs::DirBuilder::new().mode(mode).create(&to) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(error).at("make folder", &to.to_string_lossy());
                }
                Ok(()) if mode & !PLAIN_MODE != 0 => {
                    fs::set_permissions(&to, fs::Permissions::from_mode(mode)).at("set mode", &to.to_string_lossy())?;
                }
                Ok(()) | Err(_) => {}
            }
            if DATABASES.iter().any(|end| from.ends_with(end)) {
                copy_files(&from, &to);
            }
            left = rest;
            // Two names, its own and `.`, are the mark of a folder without folders in it, where names are counted at all.
            let is_leaf = meta.nlink() == 2 || OWN_FOLDERS.iter().any(|name| entry.file_name() == *name);
            if !is_leaf {
                folders.push_back((from, to));
            }
        }
    }
    Ok(())
}

/// Copies the files of a folder, as far as this user may read them and the layer has space.
fn copy_files(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).into_iter().flatten().flatten() {
        if entry.metadata().is_ok_and(|meta| meta.is_file() && meta.len() <= MAX_COPY_BYTES) {
            let _ = fs::copy(entry.path(), to.join(entry.file_name()));
        }
    }
}
