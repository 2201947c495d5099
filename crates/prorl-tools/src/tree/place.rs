//! Where a file or folder belongs, and how it gets there.

use std::{
    ffi::{CString, OsStr, OsString},
    fs, io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{AtFlags, OFlag, open, openat, renameat},
    sys::stat::{Mode, SFlag, fchmod, fstat, fstatat},
};

use super::{IfPresent, TreeError};

const FOLDER: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

/// A place for a file or folder.
#[derive(Debug)]
pub(super) struct Place {
    to: PathBuf,
    if_present: IfPresent,
    /// The place itself where it is a folder, or the nearest folder above that is there.
    base: OwnedFd,
    base_path: PathBuf,
    is_folder: bool,
}

impl Place {
    /// # Errors
    /// When something is there that is to stay, or no folder above can be opened.
    pub(super) fn find(to: &Path, if_present: IfPresent) -> Result<Self, TreeError> {
        let is_folder = fs::metadata(to).is_ok_and(|found| found.is_dir());
        if !is_folder {
            if to.file_name().is_none() {
                return Err(TreeError::Refused(format!("{} is no name for a file or folder", to.display())));
            }
            if if_present == IfPresent::Refuse && fs::symlink_metadata(to).is_ok() {
                return Err(in_the_way(to));
            }
        }
        let is_there = |folder: &&Path| fs::metadata(folder).is_ok();
        let above = if is_folder { Some(to) } else { to.ancestors().skip(1).find(is_there) };
        let base_path = above.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
        let base = open(&base_path, FOLDER, Mode::empty()).map_err(|errno| failed("open", &base_path, errno))?;
        Ok(Self { to: to.to_owned(), if_present, base, base_path, is_folder })
    }

    pub(super) fn to(&self) -> &Path {
        &self.to
    }

    /// Returns the folder to make things in, from which they can be moved.
    pub(super) fn base(&self) -> &OwnedFd {
        &self.base
    }

    pub(super) fn base_path(&self) -> PathBuf {
        self.base_path.clone()
    }

    /// Returns the name of an entry, for a person to read.
    pub(super) fn named(&self, path: &[u8]) -> PathBuf {
        if path.is_empty() { self.to.clone() } else { self.to.join(OsStr::from_bytes(path)) }
    }

    /// Moves a file or folder here.
    ///
    /// # Errors
    /// When something is in the way, or the system refuses.
    pub(super) fn put(&self, from: &OwnedFd, name: &str, is_folder: bool) -> Result<(), TreeError> {
        if self.is_folder {
            if !is_folder {
                return Err(in_the_way(&self.to));
            }
            let made = openat(from, name, FOLDER | OFlag::O_NOFOLLOW, Mode::empty());
            let made = made.map_err(|errno| failed("open", &self.to, errno))?;
            // Once for whether all fits, so that nothing is moved if something does not.
            self.merge(&made, &self.base, &self.to, Act::Look)?;
            return self.merge(&made, &self.base, &self.to, Act::Move);
        }
        let (parent, own_name) = self.parent()?;
        match fstatat(&parent, own_name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => {}
            Ok(found)
                if self.if_present == IfPresent::Replace && !is_folder && kind(found.st_mode) != SFlag::S_IFDIR => {}
            Ok(_) => return Err(in_the_way(&self.to)),
            Err(errno) => return Err(failed("look at", &self.to, errno)),
        }
        renameat(from, name, &parent, own_name.as_os_str()).map_err(|errno| failed("make", &self.to, errno))
    }

    /// Gives a folder that was made its permissions, if it is still as it was made.
    pub(super) fn lock(&self, path: &[u8], mode: Mode) {
        let root = if self.is_folder {
            self.base.try_clone().map_err(|_full| Errno::EMFILE)
        } else {
            self.parent().map_err(|_gone| Errno::ENOENT).and_then(|(parent, name)| below(&parent, &name))
        };
        let parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty());
        let folder = parts.fold(root, |folder, part| below(&folder?, OsStr::from_bytes(part)));
        // Whoever has moved or changed it meanwhile knows better.
        if let Ok(folder) = folder
            && fstat(&folder).is_ok_and(|stat| stat.st_mode & 0o777 == Mode::S_IRWXU.bits())
        {
            let _changed = fchmod(&folder, mode);
        }
    }

    /// Returns the folder above, which is made where it is not there, and the name in it.
    fn parent(&self) -> Result<(OwnedFd, OsString), TreeError> {
        let name = self.to.file_name().unwrap_or_default().to_owned();
        let parent = self.to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(|source| TreeError::Io {
            what: "make folder",
            path: parent.to_owned(),
            source,
        })?;
        let parent = open(parent, FOLDER, Mode::empty()).map_err(|errno| failed("open", parent, errno))?;
        Ok((parent, name))
    }

    /// Moves what is in one folder into another, or looks whether that is possible.
    fn merge(&self, from: &OwnedFd, to: &OwnedFd, path: &Path, act: Act) -> Result<(), TreeError> {
        for name in names(from, u64::MAX).map_err(|errno| failed("list", path, errno))?.unwrap_or_default() {
            let name = OsStr::from_bytes(name.to_bytes());
            let path = path.join(name);
            let io = |errno| failed("make", &path, errno);
            let made = fstatat(from, name, AtFlags::AT_SYMLINK_NOFOLLOW).map_err(io)?;
            let found = match fstatat(to, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
                Err(Errno::ENOENT) => None,
                other => Some(kind(other.map_err(io)?.st_mode)),
            };
            match (kind(made.st_mode) == SFlag::S_IFDIR, found) {
                (true, Some(SFlag::S_IFDIR)) => {
                    let (from, to) = (below(from, name).map_err(io)?, below(to, name).map_err(io)?);
                    self.merge(&from, &to, &path, act)?;
                }
                (_, Some(SFlag::S_IFDIR)) | (true, Some(_)) => return Err(in_the_way(&path)),
                (false, Some(_)) if self.if_present == IfPresent::Refuse => return Err(in_the_way(&path)),
                (_, None) | (false, Some(_)) => {
                    if act == Act::Move {
                        renameat(from, name, to, name).map_err(io)?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Act {
    Look,
    Move,
}

fn below(folder: &OwnedFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    openat(folder, name, FOLDER | OFlag::O_NOFOLLOW, Mode::empty())
}

/// Returns the names in a folder; nothing where there are more than `most`.
pub(super) fn names(folder: &OwnedFd, most: u64) -> Result<Option<Vec<CString>>, Errno> {
    let again = openat(folder, ".", FOLDER, Mode::empty())?;
    let mut names = Vec::new();
    for entry in Dir::from_fd(again)?.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            names.push(name.to_owned());
        }
        if names.len() as u64 > most {
            return Ok(None);
        }
    }
    Ok(Some(names))
}

pub(super) fn kind(mode: u32) -> SFlag {
    SFlag::from_bits_truncate(mode) & SFlag::S_IFMT
}

fn in_the_way(path: &Path) -> TreeError {
    TreeError::Refused(format!("{} is there already", path.display()))
}

fn failed(what: &'static str, path: &Path, source: impl Into<io::Error>) -> TreeError {
    TreeError::Io { what, path: path.to_owned(), source: source.into() }
}
