//! Walking the tree: folders, links and everything else that is made at once; files are handed on.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    ops::Range,
    sync::{Arc, mpsc::SyncSender},
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag, openat},
    sys::{
        stat::{FchmodatFlags, Mode, UtimensatFlags, fchmodat, mkdirat, utimensat},
        time::TimeSpec,
    },
    unistd::{fchownat, linkat, mkfifoat, symlinkat},
};

use super::{
    files::{Ending, Job, OpenFile, Span},
    inode::{Contents, Inode, Kind, Tail},
    metadata::Metadata,
    names::Listing,
    shared::{self, NewFile, Shared},
    tables::{self, Attributes, DataBlock, PackedSize},
};
use crate::images::{
    ImageError,
    notes::{Note, Notes},
    rules,
};

/// How much of a file a thread is given at a time, in bytes.
const PART_LEN: usize = 4 << 20;
/// How much is handed on at a time: files, and the bytes of their whole blocks.
const MAX_BATCH: usize = 64;
const MAX_BATCH_LEN: u64 = 1 << 20;

/// The thread that walks.
pub(super) struct Walker<'a> {
    shared: &'a Shared<'a>,
    metadata: Metadata<'a>,
    jobs: SyncSender<Job>,
    batch: Batch,
    /// Of the entry at hand, from the root.
    path: Vec<u8>,
    folders: Folders,
    /// Inodes of the folders so far: none may be there twice, or the tree would have no end.
    seen: HashSet<u64>,
    /// The first path of each file that has several, by its inode.
    linked: HashMap<u64, Box<[u8]>>,
    pub(super) notes: Notes,
}

/// Files that are handed on together.
#[derive(Default)]
struct Batch {
    files: Vec<(NewFile, Span)>,
    n_bytes: u64,
    fragment: Option<DataBlock>,
}

/// A folder that is being walked.
struct Open {
    listing: Listing,
    folder: usize,
    path_len: usize,
}

impl<'a> Walker<'a> {
    pub(super) fn new(shared: &'a Shared<'a>, metadata: Metadata<'a>, jobs: SyncSender<Job>) -> Self {
        Self {
            shared,
            metadata,
            jobs,
            batch: Batch::default(),
            path: Vec::new(),
            folders: Folders::default(),
            seen: HashSet::new(),
            linked: HashMap::new(),
            notes: Notes::default(),
        }
    }

    /// Walks the whole tree, in the order in which it was packed: that of names, each folder's files where its name is.
    /// Returns early when another thread has ended the work.
    pub(super) fn walk(mut self) -> Result<(Folders, Notes), ImageError> {
        let root = self.shared.superblock.root;
        let inode = self.inode(root)?;
        let Kind::Folder { names, len } = inode.kind else {
            return Err(self.damaged("is no folder"));
        };
        self.shared.meter.entry()?;
        let mut open = vec![self.open(root, &inode, names, len, None)?];
        let mut name = Vec::new();
        while let Some(folder) = open.last_mut() {
            if self.shared.is_stopped() {
                break;
            }
            self.path.truncate(folder.path_len);
            let Some(reference) = folder
                .listing
                .next(&mut self.metadata, &mut name)
                .map_err(|fault| self.shared.damaged(&self.path, fault))?
            else {
                open.pop();
                continue;
            };
            let parent = folder.folder;
            self.enter(&name)?;
            self.shared.meter.entry()?;
            let inode = self.inode(reference)?;
            match inode.kind {
                Kind::Folder { names, len } => {
                    let mode = Mode::from_bits_truncate(rules::folder_mode(inode.mode.into()));
                    mkdirat(&self.shared.root, &*self.path, mode).map_err(|error| self.not_made(error))?;
                    let folder = self.open(reference, &inode, names, len, Some((parent, name.len())))?;
                    open.push(folder);
                }
                _ => self.leaf(reference, inode)?,
            }
        }
        self.send_batch();
        Ok((self.folders, self.notes))
    }

    /// Goes from a folder to the entry of that name in it.
    fn enter(&mut self, name: &[u8]) -> Result<(), ImageError> {
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend(name);
        if matches!(name, b"" | b"." | b"..") || name.iter().any(|byte| matches!(byte, b'/' | 0)) {
            return Err(self.shared.refused(&self.path, "would be outside of the image"));
        }
        Ok(())
    }

    /// Begins with a folder that was just made. `parent` tells its parent and the length of its name, at the path's end.
    fn open(
        &mut self,
        reference: u64,
        inode: &Inode,
        names: u64,
        len: u32,
        parent: Option<(usize, usize)>,
    ) -> Result<Open, ImageError> {
        if !self.seen.insert(reference) {
            return Err(self.damaged("is a folder that is elsewhere too"));
        }
        let attributes = self.attributes(inode)?;
        if !attributes.is_empty() {
            let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let path = if self.path.is_empty() { b"." } else { &*self.path };
            let folder = openat(&self.shared.root, path, flags, Mode::empty());
            let folder = folder.map_err(|error| self.shared.failed("open", &self.path, error))?;
            shared::set_attributes(&File::from(folder), &self.path, &attributes, &mut self.notes);
        }
        let name = parent.map_or(&[][..], |(_, len)| &self.path[self.path.len() - len..]);
        let folder = self.folders.add(parent.map(|(parent, _)| parent), name, inode);
        let listing = Listing::new(self.shared.superblock.names, names, len);
        Ok(Open { listing, folder, path_len: self.path.len() })
    }

    /// Makes anything but a folder, or has it made.
    fn leaf(&mut self, reference: u64, inode: Inode) -> Result<(), ImageError> {
        let has_links = inode.n_links > 1 && !matches!(inode.kind, Kind::Device | Kind::Socket);
        if has_links && self.link(reference)? {
            return Ok(());
        }
        let path = &*self.path;
        match inode.kind {
            Kind::File(ref contents) if contents.len > i64::MAX.cast_unsigned() => {
                Err(self.damaged(format!("claims {} bytes", contents.len)))
            }
            Kind::File(_) => self.file(inode, has_links),
            Kind::Link(ref target) => {
                symlinkat(&**target, &self.shared.root, path).map_err(|error| self.not_made(error))?;
                self.set_owner_and_time(&inode)
            }
            Kind::Fifo => {
                let (mode, is_set_id) = rules::file_mode(inode.mode.into());
                let mode = Mode::from_bits_truncate(mode);
                mkfifoat(&self.shared.root, path, mode).map_err(|error| self.not_made(error))?;
                let done = fchmodat(&self.shared.root, path, mode, FchmodatFlags::FollowSymlink);
                done.map_err(|error| self.shared.failed("set mode of", path, error))?;
                if is_set_id {
                    self.note(Note::SetId);
                }
                self.set_owner_and_time(&inode)
            }
            Kind::Device => {
                self.note(Note::Device);
                Ok(())
            }
            Kind::Socket => {
                self.note(Note::Socket);
                Ok(())
            }
            Kind::Folder { .. } => unreachable!("folders are made by the caller"),
        }
    }

    /// Links the entry at hand to the first one of the same inode. If it is the first, or that one has all the links that the
    /// file system allows, the entry is to be made, and is the first of the following ones.
    fn link(&mut self, reference: u64) -> Result<bool, ImageError> {
        let root = &self.shared.root;
        let Some(first) = self.linked.get(&reference) else {
            self.linked.insert(reference, Box::from(&*self.path));
            return Ok(false);
        };
        match linkat(root, &**first, root, &*self.path, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::EMLINK) => {
                self.linked.insert(reference, Box::from(&*self.path));
                Ok(false)
            }
            Err(error) => Err(self.not_made(error)),
        }
    }

    fn file(&mut self, inode: Inode, has_links: bool) -> Result<(), ImageError> {
        let attributes = self.attributes(&inode)?;
        let Inode { kind: Kind::File(mut contents), mode, mtime, .. } = inode else {
            unreachable!("the caller has looked")
        };
        let (mode, is_set_id) = rules::file_mode(mode.into());
        if is_set_id {
            self.note(Note::SetId);
        }
        let mut new = NewFile { path: Box::from(&*self.path), mode, mtime, exists: false, attributes };
        let tail = contents.tail.take().map(|tail| self.ending(&tail)).transpose()?;
        let most = PART_LEN / self.shared.superblock.block_len;
        if contents.n_blocks > most as u64 {
            return self.large_file(new, contents, tail);
        }
        if has_links {
            self.shared.create(&new)?;
            new.exists = true;
        }
        let n_blocks = usize::try_from(contents.n_blocks).expect("not more than in one part");
        let sizes = self.sizes(&mut contents, n_blocks)?;
        let span = Span { file_len: contents.len, offset: 0, at: contents.start, sizes, tail };
        self.add_to_batch(new, span);
        Ok(())
    }

    /// Hands a file on in parts. Parts that are holes are not worth telling anyone.
    fn large_file(&mut self, new: NewFile, mut contents: Contents, tail: Option<Ending>) -> Result<(), ImageError> {
        let block_len = self.shared.superblock.block_len as u64;
        let most = PART_LEN / self.shared.superblock.block_len;
        let file = self.shared.create(&new)?;
        self.shared.set_len(&file, &new.path, contents.len)?;
        let open = Arc::new(OpenFile { file, new });
        let (mut at, mut offset, mut left) = (contents.start, 0, contents.n_blocks);
        while left > 0 && !self.shared.is_stopped() {
            let n_blocks = usize::try_from(left).map_or(most, |left| left.min(most));
            let sizes = self.sizes(&mut contents, n_blocks)?;
            let n_packed: u64 = sizes.iter().map(|size| u64::from(size.len())).sum();
            if sizes.iter().any(|size| !size.is_hole()) {
                let span = Span { file_len: contents.len, offset, at, sizes, tail: None };
                self.send(Job::Part(Arc::clone(&open), span));
            } else {
                self.shared.meter.data(0)?; // there may be any number of them: asks whether to go on
            }
            at = at.saturating_add(n_packed);
            left -= n_blocks as u64;
            offset += n_blocks as u64 * block_len;
        }
        let span = Span { file_len: contents.len, offset, at, sizes: Vec::new(), tail };
        self.send(Job::Part(open, span));
        Ok(())
    }

    fn ending(&mut self, tail: &Tail) -> Result<Ending, ImageError> {
        let found = tables::fragment(&mut self.metadata, &self.shared.superblock, tail.fragment);
        let fragment = found.map_err(|fault| self.shared.damaged(&self.path, fault))?;
        Ok(Ending { fragment, offset: tail.offset as usize, len: tail.len })
    }

    fn sizes(&mut self, contents: &mut Contents, n_blocks: usize) -> Result<Vec<PackedSize>, ImageError> {
        let mut bytes = vec![0; n_blocks * 4];
        let read = contents.sizes.read(&mut self.metadata, &mut bytes);
        read.map_err(|fault| self.shared.damaged(&self.path, fault))?;
        let (sizes, _none) = bytes.as_chunks::<4>();
        Ok(sizes.iter().map(|size| PackedSize::new(u32::from_le_bytes(*size))).collect())
    }

    fn add_to_batch(&mut self, new: NewFile, span: Span) {
        let fragment = span.tail.as_ref().map(|tail| tail.fragment);
        if fragment.is_some() && self.batch.fragment.is_some() && fragment != self.batch.fragment {
            self.send_batch();
        }
        let attributes_len: usize = new.attributes.iter().map(|(_, value)| value.len()).sum();
        self.batch.fragment = fragment.or(self.batch.fragment);
        self.batch.n_bytes += (span.sizes.len() * self.shared.superblock.block_len + attributes_len) as u64;
        self.batch.files.push((new, span));
        if self.batch.files.len() == MAX_BATCH || self.batch.n_bytes >= MAX_BATCH_LEN {
            self.send_batch();
        }
    }

    fn send_batch(&mut self) {
        let Batch { files, .. } = std::mem::take(&mut self.batch);
        if !files.is_empty() {
            self.send(Job::Files(files));
        }
    }

    fn send(&self, job: Job) {
        // Nobody takes it only when every thread has panicked, which whoever waits for them will find.
        let _ = self.jobs.send(job);
    }

    fn inode(&mut self, reference: u64) -> Result<Inode, ImageError> {
        let read = Inode::read(&mut self.metadata, &self.shared.superblock, reference);
        read.map_err(|fault| self.shared.damaged(&self.path, fault))
    }

    fn attributes(&mut self, inode: &Inode) -> Result<Vec<(std::ffi::CString, Vec<u8>)>, ImageError> {
        let Some(idx) = inode.attributes else { return Ok(Vec::new()) };
        let read = tables::attributes(&mut self.metadata, &self.shared.superblock, idx);
        let Attributes { kept, has_capabilities } = read.map_err(|fault| self.shared.damaged(&self.path, fault))?;
        if has_capabilities {
            self.note(Note::Capabilities);
        }
        Ok(kept)
    }

    fn set_owner_and_time(&self, inode: &Inode) -> Result<(), ImageError> {
        let (root, path) = (&self.shared.root, &*self.path);
        let how = UtimensatFlags::NoFollowSymlink;
        let done = utimensat(root, path, &TimeSpec::UTIME_OMIT, &shared::time(inode.mtime), how);
        let done = done.and_then(|()| match self.shared.owner {
            Some((user, group)) => fchownat(root, path, Some(user), Some(group), AtFlags::AT_SYMLINK_NOFOLLOW),
            None => Ok(()),
        });
        done.map_err(|error| self.shared.failed("set time and owner of", path, error))
    }

    fn note(&mut self, note: Note) {
        self.notes.add(note, || shared::shown(&self.path));
    }

    fn damaged(&self, problem: impl Into<super::packed::Fault>) -> ImageError {
        self.shared.damaged(&self.path, problem)
    }

    fn not_made(&self, error: Errno) -> ImageError {
        self.shared.not_made(&self.path, error)
    }
}

/// All folders, for their modes and times, which are set once nothing is made in them any more.
///
/// An image may have millions: a folder takes a few bytes here, and its name.
#[derive(Default)]
pub(super) struct Folders {
    all: Vec<Folder>,
    names: Vec<u8>,
}

struct Folder {
    /// Of the root, itself.
    parent: usize,
    name: Range<usize>,
    mode: u16,
    mtime: u32,
}

impl Folders {
    fn add(&mut self, parent: Option<usize>, name: &[u8], inode: &Inode) -> usize {
        let idx = self.all.len();
        let start = self.names.len();
        self.names.extend(name);
        let name = start..self.names.len();
        self.all.push(Folder { parent: parent.unwrap_or(idx), name, mode: inode.mode, mtime: inode.mtime });
        idx
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Gives folders their modes, times and owners. The order does not matter: that of a folder changes nothing in its parent.
    pub(super) fn finish(&self, shared: &Shared<'_>, which: Range<usize>) -> Result<(), ImageError> {
        let mut path = Vec::new();
        for idx in which {
            self.path(idx, &mut path);
            let Folder { mode, mtime, .. } = self.all[idx];
            let place = if path.is_empty() { b"." } else { &*path };
            let mode = Mode::from_bits_truncate(rules::folder_mode(mode.into()));
            let done = fchmodat(&shared.root, place, mode, FchmodatFlags::FollowSymlink)
                .and_then(|()| {
                    let how = UtimensatFlags::NoFollowSymlink;
                    utimensat(&shared.root, place, &TimeSpec::UTIME_OMIT, &shared::time(mtime), how)
                })
                .and_then(|()| match shared.owner {
                    Some((user, group)) => {
                        fchownat(&shared.root, place, Some(user), Some(group), AtFlags::AT_SYMLINK_NOFOLLOW)
                    }
                    None => Ok(()),
                });
            done.map_err(|error| shared.failed("set mode, time and owner of", &path, error))?;
        }
        Ok(())
    }

    /// Puts the path of a folder into `path`.
    fn path(&self, mut idx: usize, path: &mut Vec<u8>) {
        path.clear();
        // From the folder up, each name back to front.
        while self.all[idx].parent != idx {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(self.names[self.all[idx].name.clone()].iter().rev());
            idx = self.all[idx].parent;
        }
        path.reverse();
    }
}
