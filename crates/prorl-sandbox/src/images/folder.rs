//! Folders as images: looked over for their key, copied, and hashed on the way.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    vec,
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxAttributes, StatxFlags, fgetxattr, flistxattr, openat,
        readlinkat, statx,
    },
    io::Errno,
};
use sha2::{Digest as _, Sha256};

use super::{
    Cancel, ImageError,
    layers::names,
    meter::Meter,
    notes::{Note, Notes},
    rules,
    tree::{self, Look, Tree, as_path, open_folder, open_inside, text},
};
use crate::{SandboxUser, store::Digest};

/// Files are hashed in blocks of this size, leaving out those that are empty, so that holes make no difference.
const BLOCK: usize = 4096;

/// How much is read of a file at a time.
const CHUNK: usize = 64 * BLOCK;

/// Most bytes of a file's attributes, as file systems have it.
const MAX_ATTRIBUTE_BYTES: usize = 64 << 10;

/// One thing in a folder.
struct Found {
    path: Vec<u8>,
    name: Vec<u8>,
    stat: Statx,
    kind: FileType,
}

impl Found {
    /// Tells whether something else is mounted there, which is no part of the folder.
    fn is_mount(&self) -> bool {
        self.stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
    }

    fn mtime(&self) -> (i64, u32) {
        (self.stat.stx_mtime.tv_sec, self.stat.stx_mtime.tv_nsec)
    }

    /// Which file it is, if it has other names.
    fn shared(&self) -> Option<(u32, u32, u64)> {
        let stat = &self.stat;
        (stat.stx_nlink > 1).then_some((stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino))
    }
}

/// A folder that is gone through: its handle, and what is left of its names, sorted.
struct Level {
    fd: OwnedFd,
    path: Vec<u8>,
    left: vec::IntoIter<Vec<u8>>,
}

/// Goes through everything below a folder, each folder before what is in it. No link is followed.
struct Walk<'p> {
    root: &'p Path,
    levels: Vec<Level>,
}

impl<'p> Walk<'p> {
    fn begin(root: &'p Path) -> Result<Self, ImageError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = openat(CWD, root, flags, Mode::empty())
            .map_err(|error| ImageError::at("open folder", root, error.into()))?;
        let mut walk = Self { root, levels: Vec::new() };
        walk.enter(fd, Vec::new())?;
        Ok(walk)
    }

    fn at(&self, action: &'static str, path: &[u8], error: impl Into<io::Error>) -> ImageError {
        ImageError::at(action, self.root.join(as_path(path)), error.into())
    }

    fn enter(&mut self, fd: OwnedFd, path: Vec<u8>) -> Result<(), ImageError> {
        let mut names = names(&fd).map_err(|error| self.at("read folder", &path, error))?;
        names.sort_unstable();
        self.levels.push(Level { fd, path, left: names.into_iter() });
        Ok(())
    }

    /// Returns what comes next; [`enter_found`](Self::enter_found) goes into it if it is a folder, and [`here`](Self::here) is what it is in.
    fn next(&mut self) -> Result<Option<Found>, ImageError> {
        while let Some(level) = self.levels.last_mut() {
            let Some(name) = level.left.next() else {
                self.levels.pop();
                continue;
            };
            let path = if level.path.is_empty() { name.clone() } else { [&level.path[..], &name].join(&b'/') };
            let stat = statx(&level.fd, &name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)
                .map_err(|error| self.at("look at", &path, error))?;
            let kind = FileType::from_raw_mode(stat.stx_mode.into());
            return Ok(Some(Found { path, name, stat, kind }));
        }
        Ok(None)
    }

    fn here(&self) -> Result<&OwnedFd, ImageError> {
        // There is a level as long as something was found in it.
        self.levels.last().map(|level| &level.fd).ok_or_else(|| self.at("open folder", b"", Errno::NOENT))
    }

    fn enter_found(&mut self, found: &Found) -> Result<(), ImageError> {
        let fd = open_folder(self.here()?, &found.name);
        let fd = fd.map_err(|error| self.at("open folder", &found.path, error))?;
        self.enter(fd, found.path.clone())
    }
}

/// What everything below a folder looks like, without being read: another key means that something was changed.
pub(super) fn look_over(root: &Path, cancel: &Cancel) -> Result<String, ImageError> {
    let mut hasher = Sha256::new();
    let mut walk = Walk::begin(root)?;
    while let Some(found) = walk.next()? {
        if cancel.is_cancelled() {
            return Err(ImageError::Cancelled);
        }
        let stat = &found.stat;
        text_into(&mut hasher, &found.path);
        let times = [&stat.stx_mtime, &stat.stx_ctime].map(|time| (time.tv_sec, time.tv_nsec));
        let line = format!("{:?}", (stat.stx_mode, stat.stx_size, stat.stx_ino, stat.stx_dev_minor, times));
        text_into(&mut hasher, line.as_bytes());
        if found.kind == FileType::Directory && !found.is_mount() {
            walk.enter_found(&found)?;
        }
    }
    Ok(Digest::from_bytes(hasher.finalize().into()).to_string())
}

/// Counts entries and bytes below a folder, holes not counted and each file once.
pub(super) fn measure(root: &Path) -> Result<(u64, u64), ImageError> {
    let mut walk = Walk::begin(root)?;
    let (mut entries, mut bytes) = (0, 0);
    let mut seen = std::collections::HashSet::new();
    while let Some(found) = walk.next()? {
        entries += 1;
        match found.kind {
            FileType::Directory => walk.enter_found(&found)?,
            FileType::RegularFile if found.shared().is_none_or(|shared| seen.insert(shared)) => {
                bytes += found.stat.stx_size.min(found.stat.stx_blocks.saturating_mul(512));
            }
            _ => {}
        }
    }
    Ok((entries, bytes))
}

/// A copy that is being made.
struct Copy<'a> {
    tree: Tree<'a>,
    hasher: Sha256,
    /// Where files with several names are, by their first.
    shared: HashMap<(u32, u32, u64), Vec<u8>>,
    /// Times of folders, to be set when all is made.
    times: Vec<(Vec<u8>, (i64, u32))>,
    n_mounts: u64,
    first_mount: String,
    buffer: Vec<u8>,
}

/// Copies everything below `from` into the empty folder `root`. Returns the digest of what there is now: names, kinds, modes,
/// sizes, links, contents and attributes, but neither times nor owners.
pub(super) fn copy(
    from: &Path,
    root: &Path,
    owner: Option<SandboxUser>,
    meter: &Meter<'_>,
) -> Result<(Digest, Notes), ImageError> {
    let mut walk = Walk::begin(from)?;
    let mut copy = Copy {
        tree: Tree::open(root, owner, meter)?,
        hasher: Sha256::new(),
        shared: HashMap::new(),
        times: Vec::new(),
        n_mounts: 0,
        first_mount: String::new(),
        buffer: vec![0; CHUNK],
    };
    let mut place: Option<(Vec<u8>, OwnedFd)> = None;
    let mut is_empty = true;
    while let Some(found) = walk.next()? {
        is_empty = false;
        meter.entry()?;
        let parent = &found.path[..found.path.len() - found.name.len()];
        let into = match place.take() {
            Some((path, fd)) if path == parent => fd,
            _ => open_inside(&copy.tree.root, parent).map_err(|error| copy.tree.at("open folder", parent, error))?,
        };
        copy.entry(&mut walk, &found, &into)?;
        place = Some((parent.to_vec(), into));
    }
    if is_empty {
        let problem = "is an empty folder: expected one with an image's files in it".to_owned();
        return Err(ImageError::Source { image: meter.image.to_owned(), problem });
    }
    for (path, mtime) in copy.times.iter().rev() {
        let folder = open_inside(&copy.tree.root, path).map_err(|error| copy.tree.at("open folder", path, error))?;
        copy.tree.set_time(folder, path, *mtime)?;
    }
    if copy.n_mounts > 0 {
        let line = format!("left out what is mounted below it: {}, the first {}", copy.n_mounts, copy.first_mount);
        copy.tree.notes.say(line);
    }
    Ok((Digest::from_bytes(copy.hasher.finalize().into()), copy.tree.notes))
}

impl Copy<'_> {
    fn entry(&mut self, walk: &mut Walk<'_>, found: &Found, into: &OwnedFd) -> Result<(), ImageError> {
        let (path, name) = (&found.path, found.name.as_slice());
        if found.is_mount() {
            self.n_mounts += 1;
            if self.first_mount.is_empty() {
                self.first_mount = text(path);
            }
            // A folder stays as a place to mount on; a file would be an empty one that nobody has written.
            if found.kind != FileType::Directory {
                return Ok(());
            }
        }
        let mode = u32::from(found.stat.stx_mode);
        let check = |done: Result<(), Errno>, this: &Self| done.map_err(|error| this.tree.at("make", path, error));
        match found.kind {
            FileType::Directory => {
                check(tree::make_folder(into.as_fd(), name), self)?;
                let folder = open_folder(into, name).map_err(|error| self.tree.at("open folder", path, error))?;
                let attributes = if found.is_mount() {
                    Vec::new()
                } else {
                    walk.enter_found(found)?;
                    attributes_of(walk.here()?)
                };
                self.describe(b'd', path, rules::folder_mode(mode), &attributes);
                let look = Look { mode, mtime: found.mtime(), attributes: &attributes };
                self.tree.finish_folder(folder, path, look)?;
                self.times.push((path.clone(), found.mtime()));
            }
            FileType::RegularFile => self.file(walk, found, into)?,
            FileType::Symlink => {
                let target = readlinkat(walk.here()?, name, Vec::new());
                let target = target.map_err(|error| walk.at("read link", path, error))?;
                check(tree::make_link(into.as_fd(), name, target.as_bytes()), self)?;
                self.tree.finish_other(into.as_fd(), name, path, found.mtime())?;
                self.describe(b'l', path, 0, &[]);
                text_into(&mut self.hasher, target.as_bytes());
            }
            FileType::Fifo => {
                check(tree::make_fifo(into.as_fd(), name, mode), self)?;
                self.tree.finish_other(into.as_fd(), name, path, found.mtime())?;
                self.describe(b'p', path, rules::file_mode(mode).0, &[]);
            }
            FileType::Socket => self.tree.notes.add(Note::Socket, || text(path)),
            _ => self.tree.notes.add(Note::Device, || text(path)),
        }
        Ok(())
    }

    fn file(&mut self, walk: &Walk<'_>, found: &Found, into: &OwnedFd) -> Result<(), ImageError> {
        let (path, name) = (&found.path, found.name.as_slice());
        if let Some(shared) = found.shared() {
            if let Some(first) = self.shared.get(&shared) {
                return self.hard_link(&first.clone(), found, into);
            }
            self.shared.insert(shared, path.clone());
        }
        // A FIFO that has just taken its place would wait for a writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let from = openat(walk.here()?, name, flags, Mode::empty());
        let mut from = from.map(File::from).map_err(|error| walk.at("open", path, error))?;
        let attributes = attributes_of(&from);
        let mode = u32::from(found.stat.stx_mode);
        let mut to = tree::make_file(into.as_fd(), name).map_err(|error| self.tree.at("make", path, error))?;
        self.describe(b'f', path, rules::file_mode(mode).0, &attributes);
        let size = found.stat.stx_size;
        self.hasher.update(size.to_le_bytes());
        let mut pos = 0;
        while pos < size {
            let (begin, end) = match data_at(&mut from, pos, size) {
                Ok(Some(data)) => data,
                Ok(None) => break, // a hole up to the end
                Err(error) => return Err(walk.at("read", path, error)),
            };
            self.run(walk, found, (&mut from, &mut to), begin, end)?;
            pos = end;
        }
        let now = from.metadata().map_err(|error| walk.at("look at", path, error))?.len();
        if now != size {
            return Err(self.changed(found));
        }
        to.set_len(size).map_err(|error| self.tree.at("write", path, error))?;
        self.tree.finish_file(&to, path, Look { mode, mtime: found.mtime(), attributes: &attributes })
    }

    /// Copies a run of data, and hashes it in blocks.
    fn run(
        &mut self,
        walk: &Walk<'_>,
        found: &Found,
        (from, to): (&mut File, &mut File),
        begin: u64,
        end: u64,
    ) -> Result<(), ImageError> {
        // Blocks are those of the file, wherever its data begins: what is before it in its first block is a hole, which reads
        // as zeros.
        let mut pos = begin - begin % BLOCK as u64;
        for file in [&mut *from, &mut *to] {
            file.seek(SeekFrom::Start(pos)).map_err(|error| walk.at("read", &found.path, error))?;
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        while pos < end {
            let wanted = usize::try_from(end - pos).unwrap_or(usize::MAX).min(CHUNK);
            let mut n_read = 0;
            while n_read < wanted {
                match from.read(&mut buffer[n_read..wanted]) {
                    Ok(0) => return Err(self.changed(found)),
                    Ok(n_more) => n_read += n_more,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(walk.at("read", &found.path, error)),
                }
            }
            self.tree.write(to, &found.path, &buffer[..n_read])?;
            for block in buffer[..n_read].chunks(BLOCK) {
                if block.iter().any(|byte| *byte != 0) {
                    self.hasher.update(pos.to_le_bytes());
                    self.hasher.update(block);
                }
                pos += block.len() as u64;
            }
            self.tree.meter.progress.advance(n_read as u64);
        }
        self.buffer = buffer;
        Ok(())
    }

    fn hard_link(&mut self, first: &[u8], found: &Found, into: &OwnedFd) -> Result<(), ImageError> {
        let (path, name) = (&found.path, found.name.as_slice());
        let split = first.iter().rposition(|byte| *byte == b'/');
        let (folder, first_name) = split.map_or((&b""[..], first), |at| (&first[..at], &first[at + 1..]));
        let linked = open_inside(&self.tree.root, folder)
            .and_then(|folder| tree::make_hard_link((folder.as_fd(), first_name), (into.as_fd(), name)));
        linked.map_err(|error| self.tree.at("link", path, error))?;
        self.describe(b'h', path, 0, &[]);
        text_into(&mut self.hasher, first);
        Ok(())
    }

    /// Hashes what there is of an entry beside its content.
    fn describe(&mut self, kind: u8, path: &[u8], mode: u32, attributes: &[(Vec<u8>, Vec<u8>)]) {
        self.hasher.update([kind]);
        text_into(&mut self.hasher, path);
        self.hasher.update(mode.to_le_bytes());
        let kept = || attributes.iter().filter(|(name, _value)| rules::keeps_attribute(name));
        self.hasher.update((kept().count() as u64).to_le_bytes());
        for (name, value) in kept() {
            text_into(&mut self.hasher, name);
            text_into(&mut self.hasher, value);
        }
    }

    fn changed(&self, found: &Found) -> ImageError {
        changed(self.tree.meter.image, &text(&found.path))
    }
}

/// What is said when a source does not stay as it is.
pub(super) fn changed(image: &str, what: &str) -> ImageError {
    let problem =
        format!("was changed while it was read: {what} is not what it was; try again when nobody writes to it");
    ImageError::Source { image: image.to_owned(), problem }
}

/// Hashes bytes so that they cannot be taken for what is before or behind them.
fn text_into(hasher: &mut Sha256, text: &[u8]) {
    hasher.update((text.len() as u64).to_le_bytes());
    hasher.update(text);
}

/// Returns the next run of data at or behind `pos`, or nothing where there is only a hole.
fn data_at(file: &mut File, pos: u64, size: u64) -> Result<Option<(u64, u64)>, Errno> {
    let begin = match rustix::fs::seek(&*file, rustix::fs::SeekFrom::Data(pos)) {
        Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL) => return Ok(Some((pos, size))), // a file system without holes
        begin => begin?,
    };
    let end = rustix::fs::seek(&*file, rustix::fs::SeekFrom::Hole(begin))?;
    Ok((begin < size).then_some((begin, end.min(size))))
}

/// Returns the extended attributes of an open file, sorted. Where they cannot be read there are none.
fn attributes_of(file: impl std::os::fd::AsFd) -> Vec<(Vec<u8>, Vec<u8>)> {
    // Most files have none, and are not worth the room.
    if flistxattr(&file, &mut [0_u8; 0][..]).unwrap_or(0) == 0 {
        return Vec::new();
    }
    let mut list = vec![0; MAX_ATTRIBUTE_BYTES];
    let Ok(len) = flistxattr(&file, &mut list[..]) else { return Vec::new() };
    let mut names: Vec<&[u8]> = list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    let mut value = vec![0; MAX_ATTRIBUTE_BYTES];
    let mut attributes = Vec::new();
    for name in names {
        if let Ok(len) = fgetxattr(&file, name, &mut value[..]) {
            attributes.push((name.to_vec(), value[..len].to_vec()));
        }
    }
    attributes
}
