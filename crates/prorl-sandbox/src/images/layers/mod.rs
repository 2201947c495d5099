//! Laying the tars of an image's layers over one another: each may add, replace and remove what those below it have left.

mod place;
mod whiteout;

use std::{
    collections::{HashMap, HashSet, hash_map::RandomState},
    fs,
    io::{self, Read, Seek as _, SeekFrom},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    rc::Rc,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fstat, openat, renameat, statat, unlinkat},
    io::Errno,
};

use self::whiteout::WHITEOUT;
use super::{
    ImageError,
    meter::Meter,
    notes::{Note, Notes},
    tar_stream::{Entry, EntryKind, TarStream},
    tree::{self, Look, Tree, open_folder, open_inside, text},
};
use crate::SandboxUser;

/// Most bytes of paths that are kept so as to set the times of folders at the end.
const MAX_TIME_BYTES: usize = 64 << 20;

/// How much is read of a file at a time.
const CHUNK: usize = 256 << 10;

/// A folder, and which one it is.
struct Place {
    fd: OwnedFd,
    inode: u64,
}

/// The layers of one image that lie over one another so far.
pub(super) struct Layers<'a> {
    tree: Tree<'a>,
    root: PathBuf,
    n_laid: usize,
    /// What this layer has made: hashes of a folder's inode and a name in it. Only that of layers below can be removed.
    fresh: HashSet<u64>,
    /// Folders below which it has made something.
    touched: HashSet<u64>,
    /// Folders that it has emptied of what lies below.
    cleared: HashSet<u64>,
    hasher: RandomState,
    /// The folder that the last entry was in, as most entries are in the same one as the one before.
    last: Option<(Vec<u8>, Rc<Place>)>,
    times: HashMap<u64, (Vec<u8>, (i64, u32))>,
    time_bytes: usize,
    removed: Removed,
    /// What was counted although it leaves nothing in the root.
    n_idle_bytes: u64,
    n_idle_entries: u64,
    buffer: Vec<u8>,
}

/// Where folders go that are replaced or removed: beside the root, whole, to be removed at the end.
struct Removed {
    path: PathBuf,
    folder: Option<OwnedFd>,
    n_moved: u64,
    /// Whether what was counted is more than what is left.
    any: bool,
}

/// How an entry's path is taken.
struct Split<'p> {
    parent: Vec<u8>,
    name: &'p [u8],
    /// The whole, without needless parts.
    whole: Vec<u8>,
}

impl<'a> Layers<'a> {
    /// Begins with an empty folder, beside which a folder `removed` may be made for the time being.
    pub(super) fn begin(root: &Path, owner: Option<SandboxUser>, meter: &'a Meter<'a>) -> Result<Self, ImageError> {
        let removed = Removed { path: root.with_file_name("removed"), folder: None, n_moved: 0, any: false };
        Ok(Self {
            tree: Tree::open(root, owner, meter)?,
            root: root.to_owned(),
            n_laid: 0,
            fresh: HashSet::new(),
            touched: HashSet::new(),
            cleared: HashSet::new(),
            hasher: RandomState::new(),
            last: None,
            times: HashMap::new(),
            time_bytes: 0,
            removed,
            n_idle_bytes: 0,
            n_idle_entries: 0,
            buffer: vec![0; CHUNK],
        })
    }

    /// Lays one more over the others. `layer` is what it is called in errors. Returns the input, read to the end of the tar.
    pub(super) fn add<R: Read>(&mut self, layer: &str, input: R) -> Result<R, ImageError> {
        self.n_laid += 1;
        self.fresh.clear();
        self.touched.clear();
        self.cleared.clear();
        let root = fstat(&self.tree.root).map_err(|error| self.tree.at("look at", b"", error))?;
        self.touched.insert(root.st_ino); // where every way up ends
        let mut tar = TarStream::new(input);
        while let Some(entry) = tar.next_entry().map_err(|error| self.unreadable(layer, &error))? {
            self.tree.meter.entry()?;
            self.entry(&mut tar, &entry, layer)?;
            // Data that nobody wants is read all the same, and so it counts.
            while tar.data_left() > 0 {
                let n_read = tar.read_data(&mut self.buffer).map_err(|error| self.unreadable(layer, &error))?;
                self.idle(n_read as u64)?;
            }
        }
        Ok(tar.into_inner())
    }

    /// Reads to the end. What is behind the end of a tar counts, as its reading takes time.
    pub(super) fn drain(&mut self, layer: &str, mut input: impl Read) -> Result<(), ImageError> {
        loop {
            match input.read(&mut self.buffer) {
                Ok(0) => return Ok(()),
                Ok(n_read) => self.idle(n_read as u64)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.unreadable(layer, &error)),
            }
        }
    }

    /// Counts bytes that are read and not written.
    fn idle(&mut self, n_bytes: u64) -> Result<(), ImageError> {
        self.n_idle_bytes += n_bytes;
        self.tree.meter.data(n_bytes)
    }

    /// Sets the times of folders and removes what was replaced. Returns the notes and how many entries and bytes there are.
    pub(super) fn finish(mut self) -> Result<(Notes, u64, u64), ImageError> {
        for (inode, (path, mtime)) in &self.times {
            // A folder that is gone or another by now was replaced by a later entry, whose time counts.
            if let Ok(folder) = open_inside(&self.tree.root, path)
                && fstat(&folder).is_ok_and(|stat| stat.st_ino == *inode)
            {
                self.tree.set_time(&folder, path, *mtime)?;
            }
        }
        let (mut entries, mut bytes) = self.tree.meter.counted();
        bytes -= self.n_idle_bytes;
        entries -= self.n_idle_entries;
        if self.removed.folder.take().is_some() {
            let gone = crate::store::remove_tree(&self.removed.path);
            gone?;
        }
        if self.removed.any {
            (entries, bytes) = super::folder::measure(&self.root)?;
        }
        Ok((self.tree.notes, entries, bytes))
    }

    fn unreadable(&self, layer: &str, error: &io::Error) -> ImageError {
        let problem = match error.kind() {
            io::ErrorKind::UnexpectedEof => "ends too early".to_owned(),
            _ => error.to_string(),
        };
        ImageError::Damaged { image: self.tree.meter.image.to_owned(), what: layer.to_owned(), problem }
    }

    fn damaged(&self, entry: &[u8], problem: impl Into<String>) -> ImageError {
        ImageError::Damaged { image: self.tree.meter.image.to_owned(), what: text(entry), problem: problem.into() }
    }

    /// Takes a path apart. Nothing climbs: what is absolute begins at the image's root, and `..` is refused.
    fn split<'p>(&self, path: &'p [u8], entry: &[u8]) -> Result<Option<Split<'p>>, ImageError> {
        let is_part = |part: &&[u8]| !matches!(*part, b"" | b".");
        let mut parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(is_part).collect();
        if parts.contains(&b"..".as_slice()) || path.contains(&0) {
            let image = self.tree.meter.image.to_owned();
            return Err(ImageError::Refused { image, entry: text(entry), problem: "would be outside of the image" });
        }
        let whole = parts.join(&b'/');
        let Some(name) = parts.pop() else { return Ok(None) };
        Ok(Some(Split { parent: parts.join(&b'/'), name, whole }))
    }

    fn entry<R: Read>(&mut self, tar: &mut TarStream<R>, entry: &Entry, layer: &str) -> Result<(), ImageError> {
        let look = Look { mode: entry.mode, mtime: entry.mtime, attributes: &entry.attributes };
        let Some(Split { parent, name, whole }) = self.split(&entry.path, &entry.path)? else {
            self.n_idle_entries += 1;
            return self.root_entry(entry, look);
        };
        if name.starts_with(WHITEOUT) {
            self.n_idle_entries += 1;
            return self.whiteout(&parent, name, &whole);
        }
        let place = self.place(&parent, &whole)?;
        self.note_fresh(&place, name)?;
        let folder = place.fd.as_fd();
        match entry.kind {
            EntryKind::Folder => self.folder(folder, name, &whole, look),
            EntryKind::File => self.file(tar, &place, name, &whole, entry, layer),
            EntryKind::SymbolicLink => {
                self.make(folder, name, &whole, "link", || tree::make_link(folder, name, &entry.target))?;
                self.tree.finish_other(folder, name, &whole, entry.mtime)
            }
            EntryKind::Fifo => {
                self.make(folder, name, &whole, "make", || tree::make_fifo(folder, name, entry.mode))?;
                self.tree.finish_other(folder, name, &whole, entry.mtime)
            }
            EntryKind::HardLink => self.hard_link(folder, name, &whole, &entry.target),
            EntryKind::Device => {
                self.n_idle_entries += 1;
                self.displace(folder, name, &whole)?;
                self.tree.notes.add(Note::Device, || text(&whole));
                Ok(())
            }
            EntryKind::Unknown(letter) => {
                let letter = char::from(letter).escape_default();
                Err(self.damaged(&whole, format!("is of a kind ('{letter}') that is not known")))
            }
        }
    }

    /// What is said of the root itself, which stays open to those who start sandboxes on it, whoever they are.
    fn root_entry(&mut self, entry: &Entry, look: Look<'_>) -> Result<(), ImageError> {
        if entry.kind != EntryKind::Folder {
            return Err(self.damaged(b"/", "is no folder"));
        }
        let root = self.tree.root.try_clone().map_err(|error| self.tree.at("open", b"", error))?;
        self.tree.finish_folder(&root, b"", Look { mode: look.mode | 0o555, ..look })?;
        self.note_time(&root, b"", look.mtime)
    }

    fn folder(&mut self, folder: BorrowedFd<'_>, name: &[u8], whole: &[u8], look: Look<'_>) -> Result<(), ImageError> {
        let made = match tree::make_folder(folder, name) {
            Err(Errno::EXIST) => match open_folder(folder, name) {
                Ok(there) => {
                    self.n_idle_entries += 1;
                    there
                }
                Err(_no_folder) => {
                    self.make(folder, name, whole, "make folder", || tree::make_folder(folder, name))?;
                    self.open_made(folder, name, whole)?
                }
            },
            made => {
                made.map_err(|error| self.tree.at("make folder", whole, error))?;
                self.open_made(folder, name, whole)?
            }
        };
        self.tree.finish_folder(&made, whole, look)?;
        self.note_time(&made, whole, look.mtime)
    }

    fn open_made(&self, folder: BorrowedFd<'_>, name: &[u8], whole: &[u8]) -> Result<OwnedFd, ImageError> {
        open_folder(folder, name).map_err(|error| self.tree.at("open folder", whole, error))
    }

    fn file<R: Read>(
        &mut self,
        tar: &mut TarStream<R>,
        place: &Place,
        name: &[u8],
        whole: &[u8],
        entry: &Entry,
        layer: &str,
    ) -> Result<(), ImageError> {
        let folder = place.fd.as_fd();
        let mut file = self.make(folder, name, whole, "make", || tree::make_file(folder, name))?;
        let mut copy = |this: &mut Self, file: &mut fs::File, mut left: u64| {
            while left > 0 {
                let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK);
                let read = tar.read_data(&mut this.buffer[..wanted]);
                let n_read = read.map_err(|error| this.unreadable(layer, &error))?;
                this.tree.write(file, whole, &this.buffer[..n_read])?;
                left -= n_read as u64;
            }
            Ok::<_, ImageError>(())
        };
        match &entry.pieces {
            None => copy(self, &mut file, entry.size)?,
            Some(pieces) => {
                for piece in pieces {
                    let moved = file.seek(SeekFrom::Start(piece.offset));
                    moved.map_err(|error| self.tree.at("write", whole, error))?;
                    copy(self, &mut file, piece.len)?;
                }
                file.set_len(entry.size).map_err(|error| self.tree.at("write", whole, error))?;
            }
        }
        let look = Look { mode: entry.mode, mtime: entry.mtime, attributes: &entry.attributes };
        self.tree.finish_file(&file, whole, look)
    }

    /// Makes another name of a file of this layer or one below. It lies where its path leads inside of the image.
    fn hard_link(
        &mut self,
        folder: BorrowedFd<'_>,
        name: &[u8],
        whole: &[u8],
        target: &[u8],
    ) -> Result<(), ImageError> {
        let missing = |this: &Self| this.damaged(whole, format!("links to {:?}, which is no file of it", text(target)));
        let Some(split) = self.split(target, whole)? else {
            return Err(missing(self));
        };
        let Ok(from) = open_inside(&self.tree.root, &split.parent) else {
            return Err(missing(self));
        };
        let found = statat(&from, split.name, AtFlags::SYMLINK_NOFOLLOW)
            .ok()
            .filter(|stat| FileType::from_raw_mode(stat.st_mode) != FileType::Directory);
        let Some(found) = found else {
            return Err(missing(self));
        };
        let there = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
        if there.is_ok_and(|there| (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino)) {
            self.n_idle_entries += 1;
            return Ok(());
        }
        let (from, to) = ((from.as_fd(), split.name), (folder, name));
        self.make(folder, name, whole, "link", || tree::make_hard_link(from, to))
    }

    /// Makes something in the place of whatever is there.
    fn make<T>(
        &mut self,
        folder: BorrowedFd<'_>,
        name: &[u8],
        whole: &[u8],
        action: &'static str,
        attempt: impl Fn() -> Result<T, Errno>,
    ) -> Result<T, ImageError> {
        let made = match attempt() {
            Err(Errno::EXIST) => {
                self.displace(folder, name, whole)?;
                attempt()
            }
            made => made,
        };
        made.map_err(|error| self.tree.at(action, whole, error))
    }

    /// Removes whatever is there, if anything.
    fn displace(&mut self, folder: BorrowedFd<'_>, name: &[u8], whole: &[u8]) -> Result<(), ImageError> {
        let is_folder = match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(()),
            found => {
                let found = found.map_err(|error| self.tree.at("look at", whole, error))?;
                FileType::from_raw_mode(found.st_mode) == FileType::Directory
            }
        };
        // The way to the last folder may have led through it.
        self.last = None;
        self.removed.any = true;
        let done = if is_folder { self.removed.take(folder, name) } else { unlinkat(folder, name, AtFlags::empty()) };
        done.map_err(|error| self.tree.at("remove", whole, error))
    }

    fn note_time(&mut self, made: &OwnedFd, whole: &[u8], mtime: (i64, u32)) -> Result<(), ImageError> {
        let inode = fstat(made).map_err(|error| self.tree.at("look at", whole, error))?.st_ino;
        if self.time_bytes > MAX_TIME_BYTES {
            return Ok(());
        }
        self.time_bytes += whole.len();
        if self.time_bytes > MAX_TIME_BYTES {
            self.tree.notes.say("did not keep the times of some folders, of which there are too many");
        } else {
            self.times.insert(inode, (whole.to_vec(), mtime));
        }
        Ok(())
    }
}

impl Removed {
    fn take(&mut self, folder: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
        if self.folder.is_none() {
            rustix::fs::mkdir(&self.path, Mode::RWXU)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            self.folder = Some(openat(CWD, &self.path, flags, Mode::empty())?);
        }
        let Some(removed) = &self.folder else { return Err(Errno::NOENT) };
        self.n_moved += 1;
        renameat(folder, name, removed, self.n_moved.to_string())
    }
}

fn place_of(fd: OwnedFd) -> Result<Place, Errno> {
    let inode = fstat(&fd)?.st_ino;
    Ok(Place { fd, inode })
}

/// Names of what is in a folder.
pub(super) fn names(folder: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}
