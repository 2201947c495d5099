//! Makes files and folders of records.

use std::{
    ffi::OsStr,
    fs::File,
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, Write},
    mem,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, openat},
    sys::stat::{Mode, SFlag, fchmod, mkdirat},
    unistd::symlinkat,
};
use prorl_core::frame::{self, HEADER_BYTES};
use sha2::{Digest, Sha256};

use super::{
    Entry, IfPresent, MAX_DEPTH, MAX_PATH_BYTES, MAX_RECORD_BYTES, OutsideLinks, TreeError, TreeLimits, count, nothing,
    place::Place,
};
use crate::wire::TreeSummary;

/// The root's name while it is in the folder where all is made.
const ROOT: &str = "root";

/// A file or folder that is made of records, however they are cut.
///
/// All is made in a folder of its own, beside where it belongs and with a name that begins with `.prorl-`, and moved once it is
/// whole. Dropping the writer before that removes the folder, and nothing has changed.
#[derive(Debug)]
pub struct TreeWriter {
    place: Place,
    limits: TreeLimits,
    stage: Stage,
    /// The folders that it is inside of, the outermost first, and the length of each one's path.
    inside: Vec<(OwnedFd, usize)>,
    /// The path of the innermost.
    path: Vec<u8>,
    /// The file that is being written, and how many bytes of it are still to come.
    file: Option<(File, u64)>,
    root: Option<SFlag>,
    /// Folders that even their owner may not change, which they are made in the end.
    locked: Vec<(Vec<u8>, Mode)>,
    hash: Sha256,
    summary: TreeSummary,
    /// Bytes of a record that has not come whole.
    bytes: Vec<u8>,
    has_ended: bool,
}

impl TreeWriter {
    /// Prepares to make a file or folder, which is put to where `to` is. If that is a folder, or a link to one, a folder is put
    /// into it, as far as there is nothing in the way.
    ///
    /// # Errors
    /// [`TreeError::Refused`] when a file is there and is to stay; [`TreeError::Io`] when nothing can be made there.
    pub fn begin(to: &Path, if_present: IfPresent, limits: TreeLimits) -> Result<Self, TreeError> {
        let place = Place::find(to, if_present)?;
        let stage = Stage::make(&place)?;
        Ok(Self {
            place,
            limits,
            stage,
            inside: Vec::new(),
            path: Vec::new(),
            file: None,
            root: None,
            locked: Vec::new(),
            hash: Sha256::new(),
            summary: nothing(),
            bytes: Vec::new(),
            has_ended: false,
        })
    }

    /// Takes the next bytes in. At most one record is kept in memory.
    ///
    /// # Errors
    /// [`TreeError::Record`] when they are none, [`TreeError::Refused`] for more than the limits, [`TreeError::Io`] when
    /// something cannot be made. The rest is of no use then.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), TreeError> {
        self.bytes.extend_from_slice(bytes);
        let bytes = mem::take(&mut self.bytes);
        let mut rest = bytes.as_slice();
        while let Some(header) = rest.first_chunk::<HEADER_BYTES>() {
            let len = frame::body_len(*header).ok().filter(|len| *len <= MAX_RECORD_BYTES);
            let len = len.ok_or_else(|| wrong("a record is too long"))?;
            let Some((record, after)) = rest.split_at_checked(HEADER_BYTES + len) else { break };
            rest = after;
            if self.has_ended {
                return Err(wrong("something follows the end"));
            }
            let entry = frame::decode::<Entry>(&record[HEADER_BYTES..])
                .map_err(|err| TreeError::Record(format!("what came is no record: {err}")))?;
            if !matches!(entry, Entry::End(_)) {
                self.hash.update(record);
            }
            self.take(entry)?;
        }
        self.bytes = rest.to_vec();
        Ok(())
    }

    /// Moves what has come to where it belongs.
    ///
    /// # Errors
    /// [`TreeError::Record`] when it is not whole, [`TreeError::Refused`] when something is in the way, and nothing has changed
    /// then; [`TreeError::Io`] when something cannot be moved, at which what has been before stays moved.
    pub fn finish(mut self) -> Result<TreeSummary, TreeError> {
        let Some(root) = self.root.filter(|_| self.has_ended && self.bytes.is_empty()) else {
            return Err(wrong("it ends too early"));
        };
        self.inside.clear();
        self.place.put(&self.stage.folder, ROOT, root == SFlag::S_IFDIR)?;
        for (path, mode) in self.locked.iter().rev() {
            self.place.lock(path, *mode);
        }
        Ok(self.summary)
    }

    fn take(&mut self, entry: Entry) -> Result<(), TreeError> {
        match entry {
            Entry::Data(data) => return self.go_on(&data.0),
            _ if self.file.is_some() => return Err(wrong("a file is shorter than was said")),
            _ => {}
        }
        match entry {
            Entry::Data(_) => {}
            Entry::Folder { path, mode } => {
                count(&mut self.summary, &self.limits, None)?;
                self.enter(path.0, mode)?;
            }
            Entry::File { path, mode, size } => {
                count(&mut self.summary, &self.limits, Some(size))?;
                self.begin_file(&path.0, mode, size)?;
            }
            Entry::Link { path, target } => {
                count(&mut self.summary, &self.limits, None)?;
                self.link(&path.0, &target.0)?;
            }
            Entry::End(told) => {
                self.summary.sha256 = mem::take(&mut self.hash).finalize().into();
                if cfg!(fuzzing) {
                    self.summary.sha256 = told.sha256; // no fuzzer finds one
                }
                if told != self.summary {
                    return Err(wrong("what came is not what was sent: its SHA-256 or its size differs"));
                }
                self.has_ended = true;
            }
        }
        Ok(())
    }

    fn enter(&mut self, path: Vec<u8>, mode: u32) -> Result<(), TreeError> {
        let name = self.go_to(&path, SFlag::S_IFDIR)?;
        let parent = self.folder(&path);
        // Open to us until all is in its place.
        mkdirat(parent, name, Mode::S_IRWXU).map_err(|errno| self.failed(&path, errno))?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let folder = openat(parent, name, flags, Mode::empty()).map_err(|errno| self.failed(&path, errno))?;
        let mode = Mode::from_bits_truncate(mode & 0o777);
        if mode.contains(Mode::S_IRWXU) {
            fchmod(&folder, mode).map_err(|errno| self.failed(&path, errno))?;
        } else {
            self.locked.push((path.clone(), mode));
        }
        self.inside.push((folder, path.len()));
        self.path = path;
        Ok(())
    }

    fn begin_file(&mut self, path: &[u8], mode: u32, size: u64) -> Result<(), TreeError> {
        let name = self.go_to(path, SFlag::S_IFREG)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = openat(self.folder(path), name, flags, Mode::S_IRUSR | Mode::S_IWUSR);
        let file = file.map_err(|errno| self.failed(path, errno))?;
        fchmod(&file, Mode::from_bits_truncate(mode & 0o777)).map_err(|errno| self.failed(path, errno))?;
        self.file = (size > 0).then(|| (file.into(), size));
        Ok(())
    }

    fn go_on(&mut self, data: &[u8]) -> Result<(), TreeError> {
        let (mut file, left) = self.file.take().ok_or_else(|| wrong("content of no file came"))?;
        let left = left.checked_sub(data.len() as u64).filter(|_| !data.is_empty());
        let left = left.ok_or_else(|| wrong("a file is longer than was said"))?;
        let path = self.place.to().to_owned();
        file.write_all(data).map_err(|source| TreeError::Io { what: "write below", path, source })?;
        self.file = (left > 0).then_some((file, left));
        Ok(())
    }

    fn link(&mut self, path: &[u8], target: &[u8]) -> Result<(), TreeError> {
        if target.is_empty() || target.len() > MAX_PATH_BYTES || target.contains(&0) {
            return Err(wrong("a link leads nowhere"));
        }
        let name = self.go_to(path, SFlag::S_IFLNK)?;
        let depth = path.split(|byte| *byte == b'/').skip(1).count();
        if self.limits.outside_links == OutsideLinks::Refuse && !stays_inside(target, depth) {
            let (path, target) = (String::from_utf8_lossy(path), String::from_utf8_lossy(target));
            return Err(TreeError::Refused(format!("{path} is a link to {target}, which may be outside")));
        }
        symlinkat(OsStr::from_bytes(target), self.folder(path), name).map_err(|errno| self.failed(path, errno))
    }

    /// Goes to the [folder](Self::folder) that an entry is in; returns the entry's name there.
    fn go_to<'a>(&mut self, path: &'a [u8], kind: SFlag) -> Result<&'a OsStr, TreeError> {
        if path.is_empty() {
            // A root that is a link would be followed by nobody.
            if self.root.is_some() || kind == SFlag::S_IFLNK {
                return Err(wrong("there is a second root, or it is a link"));
            }
            self.root = Some(kind);
            return Ok(OsStr::new(ROOT));
        }
        let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&[][..], path),
        };
        if matches!(name, b"" | b"." | b"..") || name.contains(&0) || path[0] == b'/' || path.len() > MAX_PATH_BYTES {
            return Err(TreeError::Record(format!("no path: {}", path.escape_ascii())));
        }
        // Those that it leaves have been left for good: an entry of theirs that came later would find them gone from here.
        while self.inside.len() > 1 && self.path != parent {
            self.inside.pop();
            self.path.truncate(self.inside.last().map_or(0, |(_, len)| *len));
        }
        if self.path != parent || self.inside.is_empty() || self.inside.len() > MAX_DEPTH {
            return Err(TreeError::Record(format!("no folder for {}", path.escape_ascii())));
        }
        Ok(OsStr::from_bytes(name))
    }

    /// Returns the folder that was gone to for an entry.
    fn folder(&self, path: &[u8]) -> &OwnedFd {
        let innermost = self.inside.last().filter(|_| !path.is_empty());
        innermost.map_or(&self.stage.folder, |(folder, _)| folder)
    }

    fn failed(&self, path: &[u8], errno: Errno) -> TreeError {
        match errno {
            Errno::EEXIST => TreeError::Record(format!("{} came twice", path.escape_ascii())),
            errno => TreeError::Io { what: "make", path: self.place.named(path), source: errno.into() },
        }
    }
}

/// Tells whether a link in a folder that is `depth` folders below the root leads to nothing outside: it begins with as many `..`
/// as there are real folders above it at most, and has none later, where it would be one of whatever a link led to.
fn stays_inside(target: &[u8], depth: usize) -> bool {
    let mut parts = target.split(|byte| *byte == b'/').filter(|part| *part != b".").peekable();
    if target.starts_with(b"/") {
        return false;
    }
    let mut n_up = 0;
    while parts.next_if(|part| *part == b"..").is_some() {
        n_up += 1;
    }
    n_up <= depth && !parts.any(|part| part == b"..")
}

fn wrong(what: &str) -> TreeError {
    TreeError::Record(what.to_owned())
}

/// The folder in which all is made. Dropping it removes it with what is in it.
#[derive(Debug)]
struct Stage {
    /// Where it is.
    base: OwnedFd,
    name: String,
    folder: OwnedFd,
}

impl Stage {
    fn make(place: &Place) -> Result<Self, TreeError> {
        let failed = |source: io::Error| TreeError::Io { what: "make a folder in", path: place.base_path(), source };
        let base = place.base().try_clone().map_err(failed)?;
        let name = format!(".prorl-{:016x}", RandomState::new().build_hasher().finish());
        mkdirat(&base, name.as_str(), Mode::S_IRWXU).map_err(|errno| failed(errno.into()))?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let folder = openat(&base, name.as_str(), flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
        Ok(Self { base, name, folder })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // By the descriptor, since a folder above may have been moved. What another has made in it may be locked and stay.
        let path = format!("/proc/self/fd/{}/{}", self.base.as_raw_fd(), self.name);
        let _removed = std::fs::remove_dir_all(path);
    }
}
