//! Reads a file or folder as records.

use std::{
    ffi::{CStr, CString, OsStr},
    fs::File,
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag, open, openat, readlinkat},
    sys::stat::{FileStat, Mode, SFlag, fstat, fstatat},
};
use prorl_core::frame;
use sha2::{Digest, Sha256};

use super::{
    Entry, MAX_DATA_BYTES, MAX_DEPTH, MAX_PATH_BYTES, TreeError, TreeLimits, count, nothing,
    place::{kind, names},
    too_many,
};
use crate::wire::{Bytes, TreeSummary};

/// Bytes of records that are handed out together, or a little more.
const PIECE_BYTES: usize = 64 * 1024;

/// A file or folder that is read as records, one piece after the other.
///
/// It holds one descriptor for each folder that it is inside of, follows no link below the root, and reads a folder's names in
/// their order as bytes. What changes meanwhile is read as it is then; a file that gets shorter while it is read is an error.
#[derive(Debug)]
pub struct TreeReader {
    root: PathBuf,
    limits: TreeLimits,
    /// The folders that it is inside of, the outermost first.
    inside: Vec<Level>,
    /// The path of the innermost.
    path: Vec<u8>,
    file: Option<Rest>,
    hash: Sha256,
    summary: TreeSummary,
    /// Records that were not handed out.
    records: Vec<u8>,
    has_ended: bool,
}

#[derive(Debug)]
struct Level {
    folder: OwnedFd,
    /// What is left in it.
    names: std::vec::IntoIter<CString>,
    /// Length of its parent's path.
    parent_len: usize,
}

/// A file that is being read.
#[derive(Debug)]
struct Rest {
    file: File,
    path: Vec<u8>,
    left: u64,
}

impl TreeReader {
    /// Opens a file or folder. Links on the way to it, and it itself being one, are followed.
    ///
    /// # Errors
    /// [`TreeError::Io`] when it cannot be opened, [`TreeError::Refused`] when it is neither.
    pub fn open(root: &Path, limits: TreeLimits) -> Result<Self, TreeError> {
        let mut reader = Self {
            root: root.to_owned(),
            limits,
            inside: Vec::new(),
            path: Vec::new(),
            file: None,
            hash: Sha256::new(),
            summary: nothing(),
            records: Vec::new(),
            has_ended: false,
        };
        let failed = |errno| reader.failed("open", &[], errno);
        // A pipe without a writer is no wait.
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let opened = open(root, flags, Mode::empty()).map_err(failed)?;
        let stat = fstat(&opened).map_err(failed)?;
        match kind(stat.st_mode) {
            SFlag::S_IFDIR => reader.enter(opened, Vec::new(), &stat)?,
            SFlag::S_IFREG => reader.begin(opened, Vec::new(), &stat)?,
            _ => return Err(reader.odd(&[])),
        }
        Ok(reader)
    }

    /// Returns the next records; `None` once all have been returned.
    ///
    /// # Errors
    /// [`TreeError::Io`] when something cannot be read, [`TreeError::Refused`] when it is too much, or neither file, folder nor
    /// link. The rest is of no use then.
    pub fn next_piece(&mut self) -> Result<Option<Vec<u8>>, TreeError> {
        while self.records.len() < PIECE_BYTES && !self.has_ended {
            self.step()?;
        }
        Ok(Some(std::mem::take(&mut self.records)).filter(|records| !records.is_empty()))
    }

    /// Returns what was read; whole once all pieces have been returned.
    pub fn summary(&self) -> TreeSummary {
        self.summary
    }

    fn step(&mut self) -> Result<(), TreeError> {
        if let Some(rest) = self.file.take() {
            return self.go_on(rest);
        }
        let Some(level) = self.inside.last_mut() else {
            self.summary.sha256 = std::mem::take(&mut self.hash).finalize().into();
            self.has_ended = true;
            return self.put(&Entry::End(self.summary));
        };
        if let Some(name) = level.names.next() {
            return self.visit(&name);
        }
        self.path.truncate(level.parent_len);
        self.inside.pop();
        Ok(())
    }

    /// Reads the next bytes of a file.
    fn go_on(&mut self, mut rest: Rest) -> Result<(), TreeError> {
        let most = usize::try_from(rest.left).unwrap_or(usize::MAX).min(MAX_DATA_BYTES);
        let mut data = vec![0; most];
        let n_read = loop {
            match rest.file.read(&mut data) {
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => return Err(self.failed("read", &rest.path, err)),
                Ok(0) => return Err(self.failed("read", &rest.path, io::Error::other("it has become shorter"))),
                Ok(n) => break n,
            }
        };
        data.truncate(n_read);
        rest.left -= n_read as u64;
        self.put(&Entry::Data(Bytes(data)))?;
        self.file = Some(rest).filter(|rest| rest.left > 0);
        Ok(())
    }

    fn visit(&mut self, name: &CStr) -> Result<(), TreeError> {
        let Some(level) = self.inside.last() else { return Ok(()) };
        let mut path = self.path.clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend(name.to_bytes());
        let at = |flags| {
            let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NOCTTY | OFlag::O_CLOEXEC | flags;
            openat(&level.folder, name, flags, Mode::empty()).map_err(|errno| self.failed("open", &path, errno))
        };
        let stat = match fstatat(&level.folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            // It was removed since its name was read, as if it had been before.
            Err(Errno::ENOENT) => return Ok(()),
            other => other.map_err(|errno| self.failed("look at", &path, errno))?,
        };
        match kind(stat.st_mode) {
            SFlag::S_IFDIR => {
                let folder = at(OFlag::O_DIRECTORY)?;
                self.enter(folder, path, &stat)
            }
            SFlag::S_IFREG => {
                let file = at(OFlag::O_NONBLOCK)?;
                // It may be another by now.
                let stat = fstat(&file).map_err(|errno| self.failed("look at", &path, errno))?;
                if kind(stat.st_mode) == SFlag::S_IFREG { self.begin(file, path, &stat) } else { Err(self.odd(&path)) }
            }
            SFlag::S_IFLNK => {
                let target = readlinkat(&level.folder, name).map_err(|errno| self.failed("read", &path, errno))?;
                count(&mut self.summary, &self.limits, None)?;
                self.put(&Entry::Link { path: Bytes(path), target: Bytes(target.into_vec()) })
            }
            _ => Err(self.odd(&path)),
        }
    }

    fn enter(&mut self, folder: OwnedFd, path: Vec<u8>, stat: &FileStat) -> Result<(), TreeError> {
        if self.inside.len() >= MAX_DEPTH {
            return Err(TreeError::Refused(format!("folders are more than {MAX_DEPTH} deep")));
        }
        count(&mut self.summary, &self.limits, None)?;
        let names = self.names(&folder, &path)?;
        self.put(&Entry::Folder { path: Bytes(path.clone()), mode: stat.st_mode & 0o777 })?;
        let parent_len = self.path.len();
        self.path = path;
        self.inside.push(Level { folder, names: names.into_iter(), parent_len });
        Ok(())
    }

    fn names(&self, folder: &OwnedFd, path: &[u8]) -> Result<Vec<CString>, TreeError> {
        let most = self.limits.max_entries.saturating_sub(self.summary.n_entries);
        let names = names(folder, most).map_err(|errno| self.failed("list", path, errno))?;
        let mut names = names.ok_or_else(|| too_many(&self.limits))?;
        names.sort_unstable();
        Ok(names)
    }

    fn begin(&mut self, file: OwnedFd, path: Vec<u8>, stat: &FileStat) -> Result<(), TreeError> {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        count(&mut self.summary, &self.limits, Some(size))?;
        self.put(&Entry::File { path: Bytes(path.clone()), mode: stat.st_mode & 0o777, size })?;
        self.file = (size > 0).then(|| Rest { file: File::from(file), path, left: size });
        Ok(())
    }

    fn put(&mut self, entry: &Entry) -> Result<(), TreeError> {
        if let Entry::Folder { path, .. } | Entry::File { path, .. } | Entry::Link { path, .. } = entry
            && path.0.len() > MAX_PATH_BYTES
        {
            return Err(TreeError::Refused(format!("a path has more than {MAX_PATH_BYTES} bytes")));
        }
        let record = frame::encode(entry).map_err(|err| TreeError::Record(format!("record cannot be made: {err}")))?;
        if !matches!(entry, Entry::End(_)) {
            self.hash.update(&record);
        }
        self.records.extend(record);
        Ok(())
    }

    fn failed(&self, what: &'static str, path: &[u8], source: impl Into<io::Error>) -> TreeError {
        TreeError::Io { what, path: self.named(path), source: source.into() }
    }

    fn odd(&self, path: &[u8]) -> TreeError {
        TreeError::Refused(format!("{} is neither a file nor a folder nor a link", self.named(path).display()))
    }

    fn named(&self, path: &[u8]) -> PathBuf {
        if path.is_empty() { self.root.clone() } else { self.root.join(OsStr::from_bytes(path)) }
    }
}
