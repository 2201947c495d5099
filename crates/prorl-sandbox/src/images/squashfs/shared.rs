//! What all threads of one unpacking share: the image, the folder it goes to, and the first thing that went wrong.

use std::{
    ffi::{CString, OsStr},
    fs::File,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open, openat},
    sys::{
        stat::{Mode, fchmod, futimens},
        time::TimeSpec,
    },
    unistd::{Gid, Uid, fchown},
};
use parking_lot::Mutex;
use rustix::fs::XattrFlags;

use super::{
    fragments::Fragments,
    packed::{Fault, Packed, Superblock},
};
use crate::{
    SandboxUser,
    images::{
        ImageError,
        meter::Meter,
        notes::{Note, Notes},
    },
};

/// The common ground of the thread that walks the tree and of those that write files.
///
/// Files are reached by paths from the root. That is safe although links could be in their way: each folder of a path was made
/// by this unpacking, under a name that nothing had, and nothing is ever removed or replaced.
pub(super) struct Shared<'a> {
    pub(super) packed: Packed<'a>,
    pub(super) superblock: Superblock,
    pub(super) meter: &'a Meter<'a>,
    pub(super) fragments: Fragments,
    pub(super) owner: Option<(Uid, Gid)>,
    pub(super) root: OwnedFd,
    root_path: &'a Path,
    error: Mutex<Option<ImageError>>,
    is_stopped: AtomicBool,
}

/// A file that is to be written.
pub(super) struct NewFile {
    /// From the root.
    pub(super) path: Box<[u8]>,
    pub(super) mode: u32,
    /// Seconds since 1970.
    pub(super) mtime: u32,
    /// Whether it was made already, because other names are linked to it.
    pub(super) exists: bool,
    /// Extended attributes.
    pub(super) attributes: Vec<(CString, Vec<u8>)>,
}

impl<'a> Shared<'a> {
    pub(super) fn new(
        packed: Packed<'a>,
        meter: &'a Meter<'a>,
        root_path: &'a Path,
        owner: Option<SandboxUser>,
    ) -> Result<Self, ImageError> {
        let superblock = Superblock::read(&packed).map_err(|fault| fault.of(meter.image, "its superblock"))?;
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let root = open(root_path, flags, Mode::empty()).map_err(|error| failed("open", root_path, error))?;
        Ok(Self {
            fragments: Fragments::new(superblock.block_len),
            packed,
            superblock,
            meter,
            owner: owner.map(|user| (Uid::from_raw(user.uid), Gid::from_raw(user.gid))),
            root,
            root_path,
            error: Mutex::new(None),
            is_stopped: AtomicBool::new(false),
        })
    }

    /// Ends the work of all threads, soon. The first error is the one that is told.
    pub(super) fn stop(&self, error: ImageError) {
        self.error.lock().get_or_insert(error);
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Returns why the work was ended, if it was.
    pub(super) fn take_error(&self) -> Option<ImageError> {
        self.error.lock().take()
    }

    /// Where a file of the image is in the store.
    pub(super) fn place(&self, path: &[u8]) -> PathBuf {
        self.root_path.join(OsStr::from_bytes(path))
    }

    /// Makes an error of a fault that `path` inside the image has.
    pub(super) fn damaged(&self, path: &[u8], fault: impl Into<Fault>) -> ImageError {
        fault.into().of(self.meter.image, &shown(path))
    }

    pub(super) fn refused(&self, path: &[u8], problem: &'static str) -> ImageError {
        ImageError::Refused { image: self.meter.image.to_owned(), entry: shown(path), problem }
    }

    /// Makes an error of what the system said when `path` was to be made.
    pub(super) fn not_made(&self, path: &[u8], error: Errno) -> ImageError {
        match error {
            Errno::EEXIST => self.damaged(path, "is there twice"),
            Errno::ENAMETOOLONG => self.refused(path, "has a path that is too long"),
            error => failed("create", self.place(path), error),
        }
    }

    pub(super) fn failed(&self, action: &'static str, path: &[u8], error: Errno) -> ImageError {
        failed(action, self.place(path), error)
    }

    /// Makes an empty file, or opens the one that was made for others to be linked to.
    pub(super) fn create(&self, new: &NewFile) -> Result<File, ImageError> {
        let how = if new.exists { OFlag::empty() } else { OFlag::O_CREAT | OFlag::O_EXCL };
        let flags = how | OFlag::O_WRONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let made = openat(&self.root, &*new.path, flags, Mode::from_bits_truncate(new.mode) | Mode::S_IWUSR);
        made.map(File::from).map_err(|error| self.not_made(&new.path, error))
    }

    /// Sets the length of a file that is empty, so that it reads as zeroes where nothing is written.
    pub(super) fn set_len(&self, file: &File, path: &[u8], len: u64) -> Result<(), ImageError> {
        file.set_len(len).map_err(|error| ImageError::at("set the length of", self.place(path), error))
    }

    /// Gives a file, once its bytes are written, everything else.
    pub(super) fn finish(&self, file: &File, new: &NewFile, notes: &mut Notes) -> Result<(), ImageError> {
        set_attributes(file, &new.path, &new.attributes, notes);
        let done = fchmod(file, Mode::from_bits_truncate(new.mode))
            .and_then(|()| futimens(file, &TimeSpec::UTIME_OMIT, &time(new.mtime)))
            .and_then(|()| match self.owner {
                Some((user, group)) => fchown(file, Some(user), Some(group)),
                None => Ok(()),
            });
        done.map_err(|error| self.failed("set mode, time and owner of", &new.path, error))
    }
}

/// Gives a file or folder its extended attributes, as far as the file system keeps them.
pub(super) fn set_attributes(file: &File, path: &[u8], attributes: &[(CString, Vec<u8>)], notes: &mut Notes) {
    let set = |(name, value): &(CString, Vec<u8>)| rustix::fs::fsetxattr(file, &**name, value, XattrFlags::empty());
    if attributes.iter().try_for_each(set).is_err() {
        notes.add(Note::Attributes, || shown(path));
    }
}

impl Fault {
    /// Makes an error of it: `what` of the image has it.
    pub(super) fn of(self, image: &str, what: &str) -> ImageError {
        match self {
            Self::Wrong(problem) => {
                ImageError::Damaged { image: image.to_owned(), what: what.to_owned(), problem: problem.into_owned() }
            }
            Self::Unreadable(error) => ImageError::at("read", image, error),
        }
    }
}

/// A time as the image writes it, in seconds since 1970.
pub(super) fn time(seconds: u32) -> TimeSpec {
    TimeSpec::new(seconds.into(), 0)
}

/// A path inside the image as it is shown to people.
pub(super) fn shown(path: &[u8]) -> String {
    if path.is_empty() { "/".to_owned() } else { String::from_utf8_lossy(path).into_owned() }
}

fn failed(action: &'static str, path: impl AsRef<Path>, error: Errno) -> ImageError {
    ImageError::at(action, path, io::Error::from(error))
}
