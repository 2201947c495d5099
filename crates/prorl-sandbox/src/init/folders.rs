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

use super::{
    At,
    root::COVERED,
    stack::{Found, Said, Stack, make_folder},
};

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

/// Tells whether folders are to be made over those of an image's folder `lower`, which is at `path` in its root: whether it
/// belongs to somebody else, and no layer of a fake root has them already.
pub(super) fn is_foreign(lower: &Path, path: &Path, stack: &Stack) -> bool {
    fs::metadata(lower).is_ok_and(|meta| meta.uid() != geteuid().as_raw())
        && (stack.is_empty() || is_closed(lower, path, stack))
}

/// Tells whether a folder in a folder is in no layer. They are made from the top down, so that the first ones tell.
fn is_closed(lower: &Path, path: &Path, stack: &Stack) -> bool {
    let is_bare = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let is_covered = path.as_os_str().is_empty() && COVERED.iter().any(|covered| name == *covered);
        entry.file_type().is_ok_and(|kind| kind.is_dir())
            && !is_covered
            && matches!(stack.find(&path.join(name)), Ok(Said::Nothing))
            && fs::read_dir(entry.path()).is_ok()
    };
    fs::read_dir(lower).into_iter().flatten().flatten().any(is_bare)
}

/// Makes folders in `upper`, which is to be the upper side of an overlay, over those of `lower`, which is at `path` in the
/// image's root. `upper` exists. What the layers between them say stays.
pub(super) fn open(lower: &Path, path: &Path, upper: &Path, stack: &Stack) -> Result<(), StartFailure> {
    // Each takes one of the layer's files, of which most are for what will be written.
    let free = statvfs(upper).at("read", "layer")?.files_free();
    let mask = umask(Mode::empty());
    let made = mirror([lower, upper, path], stack, MAX_FOLDERS.min(free / 2));
    umask(mask);
    made
}

fn mirror(folders: [&Path; 3], stack: &Stack, mut left: u64) -> Result<(), StartFailure> {
    let mut folders = VecDeque::from([folders.map(Path::to_owned)]);
    while let Some([lower, upper, path]) = folders.pop_front() {
        // One that this user may not read is not for a fake root either.
        for entry in fs::read_dir(&lower).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let Some(rest) = left.checked_sub(1) else { return Ok(()) };
            let Ok(meta) = entry.metadata() else { continue };
            let [from, to, path] = [&lower, &upper, &path].map(|folder| folder.join(entry.file_name()));
            let mode = meta.mode() & 0o7777;
            if mode & 0o005 != 0o005 && fs::read_dir(&from).is_err() {
                continue;
            }
            match stack.find(&path).at("read layers", &path.to_string_lossy())? {
                Said::Nothing => {}
                Said::Here(Found::Folder { mode }) => {
                    // A fake root's already; one here is the way to those in it.
                    make_folder(&to, mode).at("make folder", &to.to_string_lossy())?;
                    folders.push_back([from, to, path]);
                    continue;
                }
                Said::Gone | Said::Here(_) => continue,
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
                folders.push_back([from, to, path]);
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
