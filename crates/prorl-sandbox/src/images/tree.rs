//! Making the files of an image below one folder, by the rules that all sources share. Everything is made by name in an open
//! folder, so that no link is ever followed.

use std::{
    fs::File,
    io::{self, Write as _},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags, chmodat,
        chownat, fchmod, fchown, fsetxattr, futimens, linkat, mkdirat, mknodat, openat, openat2, symlinkat, utimensat,
    },
    io::Errno,
};

use super::{
    ImageError,
    meter::Meter,
    notes::{Note, Notes},
    rules,
};
use crate::SandboxUser;

/// What a file or folder is to look like. Set-id bits and foreign attributes may be in it, and are not kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look<'a> {
    pub(super) mode: u32,
    /// Seconds and nanoseconds.
    pub(super) mtime: (i64, u32),
    /// Extended attributes: names and values.
    pub(super) attributes: &'a [(Vec<u8>, Vec<u8>)],
}

/// A folder that is being filled.
pub(super) struct Tree<'a> {
    pub(super) root: OwnedFd,
    pub(super) meter: &'a Meter<'a>,
    pub(super) notes: Notes,
    path: PathBuf,
    owner: Option<SandboxUser>,
}

/// How folders are opened: for reading, as what they are.
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Opens a folder by its name in another. A link is none.
pub(super) fn open_folder(folder: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    openat(folder, name, FOLDER | OFlags::NOFOLLOW, Mode::empty())
}

/// Opens a folder by its path inside of `root`, which links in it are followed in, as if `root` were `/`.
pub(super) fn open_inside(root: impl AsFd, path: &[u8]) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    loop {
        // The kernel asks to be asked again when something was renamed meanwhile, anywhere.
        match openat2(&root, path, FOLDER, Mode::empty(), ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            opened => return opened,
        }
    }
}

impl<'a> Tree<'a> {
    /// Opens a folder, which is given to `owner`, as all that is made in it will be.
    pub(super) fn open(path: &Path, owner: Option<SandboxUser>, meter: &'a Meter<'a>) -> Result<Self, ImageError> {
        let root = openat(CWD, path, FOLDER, Mode::empty())
            .map_err(|error| ImageError::at("open folder", path, error.into()))?;
        let tree = Self { root, meter, notes: Notes::default(), path: path.to_owned(), owner };
        tree.give_open(&tree.root, b"")?;
        Ok(tree)
    }

    /// Wraps the system's word about an entry.
    pub(super) fn at(&self, action: &'static str, entry: &[u8], error: impl Into<io::Error>) -> ImageError {
        ImageError::at(action, self.path.join(as_path(entry)), error.into())
    }

    /// Gives a folder its look, but for its time, which changes with every file that is made in it.
    pub(super) fn finish_folder(&mut self, fresh: impl AsFd, entry: &[u8], look: Look<'_>) -> Result<(), ImageError> {
        self.give_open(&fresh, entry)?;
        self.mode(&fresh, entry, rules::folder_mode(look.mode))?;
        self.attributes(&fresh, entry, look.attributes);
        Ok(())
    }

    /// Writes bytes of a file, which are counted.
    pub(super) fn write(&self, file: &mut File, entry: &[u8], bytes: &[u8]) -> Result<(), ImageError> {
        self.meter.data(bytes.len() as u64)?;
        file.write_all(bytes).map_err(|error| self.at("write", entry, error))
    }

    /// Gives a file its look, after its last byte.
    pub(super) fn finish_file(&mut self, fresh: &File, entry: &[u8], look: Look<'_>) -> Result<(), ImageError> {
        // As long as it can be written: who may not write a file may not change its attributes either.
        self.attributes(fresh, entry, look.attributes);
        self.give_open(fresh, entry)?;
        let (mode, was_cleared) = rules::file_mode(look.mode);
        if was_cleared {
            self.notes.add(Note::SetId, || text(entry));
        }
        self.mode(fresh, entry, mode)?;
        futimens(fresh, &stamps(look.mtime)).map_err(|error| self.at("set the time of", entry, error))
    }

    /// Gives what cannot be opened its owner and time.
    pub(super) fn finish_other(
        &self,
        folder: BorrowedFd<'_>,
        name: &[u8],
        entry: &[u8],
        mtime: (i64, u32),
    ) -> Result<(), ImageError> {
        if let Some((user, group)) = self.ids() {
            chownat(folder, name, user, group, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|error| self.at("give away", entry, error))?;
        }
        utimensat(folder, name, &stamps(mtime), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|error| self.at("set the time of", entry, error))
    }

    /// Sets the time of a folder in which nothing will be made any more.
    pub(super) fn set_time(&self, folder: impl AsFd, entry: &[u8], mtime: (i64, u32)) -> Result<(), ImageError> {
        futimens(folder, &stamps(mtime)).map_err(|error| self.at("set the time of", entry, error))
    }

    fn mode(&self, fresh: impl AsFd, entry: &[u8], mode: u32) -> Result<(), ImageError> {
        // At its making the process's mask would have had a say.
        fchmod(fresh, Mode::from_raw_mode(mode)).map_err(|error| self.at("set the mode of", entry, error))
    }

    fn give_open(&self, fresh: impl AsFd, entry: &[u8]) -> Result<(), ImageError> {
        let Some((user, group)) = self.ids() else { return Ok(()) };
        fchown(fresh, user, group).map_err(|error| self.at("give away", entry, error))
    }

    fn ids(&self) -> Option<(Option<Uid>, Option<Gid>)> {
        self.owner.map(|owner| (Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid))))
    }

    fn attributes(&mut self, fresh: impl AsFd, entry: &[u8], attributes: &[(Vec<u8>, Vec<u8>)]) {
        for (name, value) in attributes {
            if name == rules::CAPABILITY {
                self.notes.add(Note::Capabilities, || text(entry));
            } else if rules::keeps_attribute(name)
                && fsetxattr(&fresh, name.as_slice(), value, XattrFlags::empty()).is_err()
            {
                self.notes.add(Note::Attributes, || text(entry));
            }
        }
    }
}

/// Makes a folder. [`Errno::EXIST`] is for the caller.
pub(super) fn make_folder(folder: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    mkdirat(folder, name, Mode::RWXU)
}

/// Makes an empty file. [`Errno::EXIST`] is for the caller.
pub(super) fn make_file(folder: BorrowedFd<'_>, name: &[u8]) -> Result<File, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(folder, name, flags, Mode::RUSR | Mode::WUSR).map(File::from)
}

/// Makes a symbolic link. [`Errno::EXIST`] is for the caller.
pub(super) fn make_link(folder: BorrowedFd<'_>, name: &[u8], target: &[u8]) -> Result<(), Errno> {
    symlinkat(target, folder, name)
}

/// Makes a FIFO. [`Errno::EXIST`] is for the caller.
pub(super) fn make_fifo(folder: BorrowedFd<'_>, name: &[u8], mode: u32) -> Result<(), Errno> {
    let mode = Mode::from_raw_mode(rules::file_mode(mode).0);
    mknodat(folder, name, FileType::Fifo, mode, 0)?;
    chmodat(folder, name, mode, AtFlags::empty())
}

/// Makes another name of a file that is there. A link gets one itself, not what it leads to. Errors are for the caller.
pub(super) fn make_hard_link(from: (BorrowedFd<'_>, &[u8]), to: (BorrowedFd<'_>, &[u8])) -> Result<(), Errno> {
    linkat(from.0, from.1, to.0, to.1, AtFlags::empty())
}

fn stamps((secs, nanos): (i64, u32)) -> Timestamps {
    let time = Timespec { tv_sec: secs, tv_nsec: nanos.into() };
    Timestamps { last_access: time, last_modification: time }
}

/// Bytes of a path, for people.
pub(super) fn text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

pub(super) fn as_path(path: &[u8]) -> &Path {
    use std::os::unix::ffi::OsStrExt as _;
    Path::new(std::ffi::OsStr::from_bytes(path))
}
