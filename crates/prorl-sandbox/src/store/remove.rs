//! Removing trees, whatever is in them.

use std::{
    ffi::{CStr, OsStr},
    fs, io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use nix::unistd::geteuid;
use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, chmod, fchmod, fstat, openat, renameat, unlinkat},
    io::Errno,
    path::Arg,
};

use super::{StoreError, disk};
use crate::{SandboxUser, freeze};

/// Removes a file, or a folder with everything in it; what is gone already is no error.
///
/// Folders that their owner may not change are opened up. No link is followed, even if somebody swaps a folder for one
/// meanwhile. A tree of any depth takes the same few open files, because folders in folders are moved to the top before they
/// are emptied.
///
/// # Errors
/// The first thing that cannot be removed, such as the content of another user's folder. What can be removed is, all the same.
pub(crate) fn remove_tree(path: &Path) -> Result<(), StoreError> {
    let at = |source: io::Error| StoreError::io("remove", path, source);
    let is_folder = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        meta => meta.map_err(at)?.is_dir(),
    };
    if !is_folder {
        return disk::gone(fs::remove_file(path)).map_err(at);
    }
    let top = open_folder(CWD, path).map_err(|error| at(error.into()))?;
    let mut tree = Tree { path, top, n_done: 0, n_moved: 0, failed: None };
    // What was moved to the top may or may not be seen in the round that moved it.
    loop {
        let n_before = tree.n_done;
        tree.empty_top();
        if tree.n_done == n_before {
            break;
        }
    }
    match tree.failed {
        Some(error) => Err(error),
        None => disk::gone(fs::remove_dir(path)).map_err(at),
    }
}

/// Does the same with a tree in which files may belong to the other ids of a fake root, which only a process with the same ids
/// can remove: the guest, where there is one. `user` is whom the sandbox belonged to, where that is another than this process's.
///
/// # Errors
/// As [`remove_tree`].
pub(crate) fn remove_tree_of_any(
    path: &Path,
    guest: Option<&Path>,
    user: Option<SandboxUser>,
) -> Result<(), StoreError> {
    let refused = match remove_tree(path) {
        Err(error) if error.is_refusal() => error,
        removed => return removed,
    };
    let Some(guest) = guest else { return Err(refused) };
    let user = user.filter(|_| geteuid().is_root());
    freeze::remove_foreign(guest, path, user).map_err(|source| StoreError::io("remove", path, source))?;
    remove_tree(path)
}

struct Tree<'a> {
    path: &'a Path,
    top: OwnedFd,
    /// How much was removed or moved. A folder is moved once.
    n_done: u64,
    n_moved: u64,
    failed: Option<StoreError>,
}

impl Tree<'_> {
    fn empty_top(&mut self) {
        let Some(entries) = self.check(c"", Dir::read_from(&self.top)) else { return };
        for entry in entries {
            let Some(entry) = self.check(c"", entry) else { return };
            let name = entry.file_name();
            if is_dots(name) || self.is_file_removed(None, name, entry.file_type()) {
                continue;
            }
            let Some(folder) = self.check(name, self.open_at_top(name)) else { continue };
            self.empty(&folder, name);
            let removed = unlinkat(&self.top, name, AtFlags::REMOVEDIR);
            if removed == Err(Errno::NOTEMPTY) && self.failed.is_some() {
                continue; // what is in it was told
            }
            self.done(name, removed);
        }
    }

    /// Opens a folder at the top, which must not be a mount point: what is mounted there is not the tree's.
    fn open_at_top(&self, name: &CStr) -> Result<OwnedFd, Errno> {
        let folder = open_folder(self.top.as_fd(), name)?;
        if fstat(&folder)?.st_dev == fstat(&self.top)?.st_dev { Ok(folder) } else { Err(Errno::XDEV) }
    }

    /// Empties a folder at the top, whose own folders come to the top.
    fn empty(&mut self, folder: &OwnedFd, name: &CStr) {
        let Some(entries) = self.check(name, Dir::read_from(folder)) else { return };
        for entry in entries {
            let Some(entry) = self.check(name, entry) else { return };
            let inner = entry.file_name();
            if is_dots(inner) || self.is_file_removed(Some(folder), inner, entry.file_type()) {
                continue;
            }
            let mut moved = self.move_up(folder, inner);
            if moved == Err(Errno::ACCESS) {
                // A folder that may not be changed cannot be moved either: it names the one above it.
                moved = open_folder(folder.as_fd(), inner).and_then(|_| self.move_up(folder, inner));
            }
            self.done(inner, moved);
        }
    }

    fn move_up(&mut self, folder: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        loop {
            self.n_moved += 1;
            match renameat(folder, name, &self.top, format!(".{}", self.n_moved)) {
                // A name that something at the top has.
                Err(Errno::NOTDIR | Errno::NOTEMPTY | Errno::EXIST) => {}
                moved => return moved,
            }
        }
    }

    /// Removes what is no folder; tells whether it was none.
    fn is_file_removed(&mut self, folder: Option<&OwnedFd>, name: &CStr, kind: FileType) -> bool {
        if kind == FileType::Directory {
            return false;
        }
        let removed = unlinkat(folder.unwrap_or(&self.top), name, AtFlags::empty());
        if removed == Err(Errno::ISDIR) {
            return false; // not every file system says what an entry is
        }
        self.done(name, removed);
        true
    }

    fn done(&mut self, name: &CStr, done: Result<(), Errno>) {
        match done {
            Err(Errno::NOENT) => {}
            done => self.n_done += u64::from(self.check(name, done).is_some()),
        }
    }

    /// Keeps the first error.
    fn check<T>(&mut self, name: &CStr, result: Result<T, Errno>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.failed.get_or_insert_with(|| {
                    let path = self.path.join(OsStr::from_bytes(name.to_bytes()));
                    StoreError::io("remove", &path, error.into())
                });
                None
            }
        }
    }
}

fn is_dots(name: &CStr) -> bool {
    matches!(name.to_bytes(), b"." | b"..")
}

/// Opens a folder, and opens it up for changes, where that is this user's to do.
fn open_folder(parent: BorrowedFd<'_>, name: impl Arg + Copy) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat(parent, name, flags | OFlags::RDONLY, Mode::empty());
    let folder = match opened {
        Err(Errno::ACCESS) => {
            // The kernel changes the mode of what such a handle is of only by way of its name here.
            let handle = openat(parent, name, flags | OFlags::PATH, Mode::empty())?;
            chmod(format!("/proc/self/fd/{}", handle.as_raw_fd()), Mode::RWXU)?;
            openat(parent, name, flags | OFlags::RDONLY, Mode::empty())?
        }
        opened => opened?,
    };
    if !Mode::from_raw_mode(fstat(&folder)?.st_mode).contains(Mode::RWXU) {
        let _ = fchmod(&folder, Mode::RWXU); // what it was needed for fails, and says so
    }
    Ok(folder)
}
