//! The freezer: a process that copies what an ended sandbox has written into a folder of a store.
//!
//! It works in the sandbox's user namespace, where it has every right over the sandbox's files and no other, and where their
//! owners have the numbers by which the host will know them again. What it reads was written by whoever was in the
//! sandbox, so it follows no link, and goes from folder to folder by open ones.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            ffi::OsStrExt as _,
            fs::{FileExt as _, PermissionsExt as _},
        },
    },
    path::{Path, PathBuf},
};

use nix::{
    sched::{CloneFlags, setns},
    sys::{
        prctl::{set_dumpable, set_name},
        resource::{Resource, getrlimit, setrlimit},
        stat::{Mode as Umask, umask},
    },
};
use prorl_core::hello::StartFailure;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{
        AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, SeekFrom, Stat, Timestamps, Uid, XattrFlags, chmodat,
        chownat, fchmod, fchown, fgetxattr, flistxattr, flistxattr_query, fsetxattr, ftruncate, futimens, linkat,
        mkdirat, mknodat, openat, openat2, readlinkat, seek, statat, symlinkat, utimensat,
    },
    io::Errno,
};

use super::{
    At, become_user,
    made::{self, MADE, Made},
    remove, rlimits,
    root::{COVERED, WRITTEN},
};
use crate::{
    parcel,
    setup::{Chore, Counted},
    sys,
};

/// Folders that lie deeper are refused: each on the way costs open files.
pub(super) const MAX_DEPTH: usize = 1000;

/// How much is copied between two looks at the host, in bytes.
const PART_BYTES: usize = 1 << 20;

/// The most that an attribute can hold, and that their names can take, in bytes; as in `linux/limits.h`.
const MAX_ATTRIBUTE_BYTES: usize = 64 * 1024;

/// What overlayfs writes down for itself.
const OVERLAY: &[u8] = b"user.overlay.";

/// What of that means something to another overlay.
const OVERLAY_KEPT: &[&[u8]] = &[b"opaque", b"whiteout"];

/// Attributes that are no user's and that belong to a file all the same.
const KEPT: &[&[u8]] = &[b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default"];

/// Copies a layer into an empty folder. Returns what was copied.
///
/// # Errors
/// The step that failed and the file that it failed at; the folder is empty again then. That the host is gone is an error too.
pub fn freeze(channel: &OwnedFd, order: &Chore) -> Result<Counted, StartFailure> {
    start(channel, c"prorl-freezer")?;
    let [layer, users, target] = parcel::receive::<3>(channel).at("receive", "layer")?;
    if let Some(user) = order.become_user {
        become_user(user)?;
    }
    setns(users, CloneFlags::CLONE_NEWUSER).at("enter namespace", "user")?;
    set_dumpable(false).at("become undumpable", "")?;
    let copied = copy_layer(channel, &layer, &target);
    if copied.is_err() {
        // What cannot be removed is left to whoever removes the folder.
        let _ = remove::empty(target.as_fd());
    }
    copied
}

/// What processes that do one thing with files begin with.
pub(super) fn start(channel: &OwnedFd, name: &CStr) -> Result<(), StartFailure> {
    sys::close_all_but(channel.as_fd()).at("close descriptors", "")?;
    set_name(name).at("set name", "")?;
    umask(Umask::empty()); // modes are told
    rlimits::forbid_cores().at("limit core dumps", "")?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).at("limit open files", "")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).at("limit open files", "")
}

fn copy_layer(channel: &OwnedFd, layer: &OwnedFd, target: &OwnedFd) -> Result<Counted, StartFailure> {
    let made = openat(layer, MADE, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).at("read", MADE)?;
    let made = made::read(File::from(made)).at("read", MADE)?;
    let root = open_folder(layer, WRITTEN_NAME).at("open", "layer")?;
    let mut copier = Copier {
        channel,
        target,
        made: made.into_iter().map(|made| (PathBuf::from(&made.path), made)).collect(),
        links: HashMap::new(),
        own: (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw()),
        counted: Counted::default(),
        buffer: vec![0; PART_BYTES],
        path: PathBuf::new(),
        depth: 0,
    };
    copier.folder(&root, target)?;
    let stat = rustix::fs::fstat(&root).at("read", "/")?;
    copier.dress(&root, target, &stat)?;
    Ok(copier.counted)
}

/// [`WRITTEN`] as the system calls take it.
const WRITTEN_NAME: &CStr = c"root";
const _: () = assert!(WRITTEN.len() == WRITTEN_NAME.to_bytes().len());

pub(super) fn open_folder(at: impl AsFd, name: &CStr) -> rustix::io::Result<OwnedFd> {
    openat(at, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Returns what is in a folder, but for itself and the one above.
pub(super) fn names(folder: impl AsFd) -> rustix::io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

struct Copier<'a> {
    channel: &'a OwnedFd,
    target: &'a OwnedFd,
    /// What was there before any task and was not met yet, by its path.
    made: HashMap<PathBuf, Made>,
    /// Files that have more names, by their number: where the first is.
    links: HashMap<u64, PathBuf>,
    /// The ids of this process.
    own: (u32, u32),
    counted: Counted,
    buffer: Vec<u8>,
    /// What is being copied, relative to the root.
    path: PathBuf,
    depth: usize,
}

impl Copier<'_> {
    /// Copies what is in a folder.
    fn folder(&mut self, from: &OwnedFd, to: &OwnedFd) -> Result<(), StartFailure> {
        let names = self.at("read", names(from))?;
        let is_root = self.path.as_os_str().is_empty();
        for name in names {
            if is_root && COVERED.iter().any(|covered| covered.as_bytes() == name.to_bytes()) {
                continue;
            }
            self.path.push(std::ffi::OsStr::from_bytes(name.to_bytes()));
            self.entry(from, to, &name)?;
            self.path.pop();
        }
        if is_root {
            self.mark_removed(to)?;
        }
        Ok(())
    }

    fn entry(&mut self, from: &OwnedFd, to: &OwnedFd, name: &CStr) -> Result<(), StartFailure> {
        self.look_at_host()?;
        let stat = self.at("read", statat(from, name, AtFlags::SYMLINK_NOFOLLOW))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let made = self.made.remove(&self.path);
        if kind == FileType::Directory {
            return self.subfolder(from, to, name, &stat);
        }
        if made.is_some_and(|made| is_as_made(&made, from, name, &stat)) {
            return Ok(());
        }
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&stat.st_ino) {
                let linked = linkat(self.target, first, to, name, AtFlags::empty());
                self.at("link", linked)?;
                self.counted.entries += 1;
                return Ok(());
            }
            self.links.insert(stat.st_ino, self.path.clone());
        }
        let own_mode = Mode::RUSR | Mode::WUSR;
        match kind {
            FileType::RegularFile => {
                self.file(from, to, name, &stat)?;
                self.count(&stat);
                return Ok(());
            }
            FileType::Symlink => {
                let link = self.at("read", readlinkat(from, name, Vec::new()))?;
                self.at("make link", symlinkat(&link, to, name))?;
            }
            FileType::Fifo => self.at("make FIFO", mknodat(to, name, FileType::Fifo, own_mode, 0))?,
            FileType::Socket => self.at("make socket", mknodat(to, name, FileType::Socket, own_mode, 0))?,
            FileType::CharacterDevice if stat.st_rdev == 0 => {
                self.whiteout(to, name)?;
                self.counted.entries += 1;
                return Ok(());
            }
            // No task can make one.
            _ => return self.at("copy device", Err(Errno::NOTSUP)),
        }
        let owner = (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
        self.at("give away", chownat(to, name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW))?;
        if kind != FileType::Symlink {
            self.at("set mode of", chmodat(to, name, Mode::from_raw_mode(stat.st_mode), AtFlags::empty()))?;
        }
        self.at("set time of", utimensat(to, name, &times(&stat), AtFlags::SYMLINK_NOFOLLOW))?;
        self.count(&stat);
        Ok(())
    }

    fn subfolder(&mut self, from: &OwnedFd, to: &OwnedFd, name: &CStr, stat: &Stat) -> Result<(), StartFailure> {
        if self.depth >= MAX_DEPTH {
            return self.at("copy so deep a folder as", Err(Errno::LOOP));
        }
        self.at("make folder", mkdirat(to, name, Mode::RWXU))?;
        let from = self.at("open", open_folder(from, name))?;
        let to = self.at("open", open_folder(to, name))?;
        self.depth += 1;
        self.folder(&from, &to)?;
        self.depth -= 1;
        self.dress(&from, &to, stat)?;
        self.count(stat);
        Ok(())
    }

    fn file(&mut self, from: &OwnedFd, to: &OwnedFd, name: &CStr, stat: &Stat) -> Result<(), StartFailure> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let from = File::from(self.at("open", openat(from, name, flags, Mode::empty()))?);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let to = File::from(self.at("make", openat(to, name, flags, Mode::RUSR | Mode::WUSR))?);
        let mut at = 0;
        // What is between the data are holes, and stays.
        while let Some(data) = self.at("read", found(seek(&from, SeekFrom::Data(at))))? {
            at = self.at("read", seek(&from, SeekFrom::Hole(data)))?;
            self.bytes(&from, &to, data, at)?;
            self.counted.bytes += at - data;
        }
        let size = stat.st_size.unsigned_abs();
        if at < size {
            self.at("write", ftruncate(&to, size))?;
        }
        self.dress(&from, &to, stat)
    }

    /// Copies a stretch of a file.
    fn bytes(&mut self, from: &File, to: &File, mut at: u64, end: u64) -> Result<(), StartFailure> {
        while at < end {
            self.look_at_host()?;
            let len = usize::try_from(end - at).map_or(PART_BYTES, |left| left.min(PART_BYTES));
            let read = from.read_at(&mut self.buffer[..len], at);
            let n_read = self.at("read", read)?;
            if n_read == 0 {
                break;
            }
            let written = to.write_all_at(&self.buffer[..n_read], at);
            self.at("write", written)?;
            at += n_read as u64;
        }
        Ok(())
    }

    /// Gives a copy what its original has beside its content. In an order in which none takes another away.
    fn dress(&self, from: impl AsFd, to: impl AsFd, stat: &Stat) -> Result<(), StartFailure> {
        let (user, group) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        self.at("give away", fchown(&to, Some(user), Some(group)))?;
        self.attributes(from.as_fd(), to.as_fd())?;
        self.at("set mode of", fchmod(&to, Mode::from_raw_mode(stat.st_mode)))?;
        self.at("set time of", futimens(&to, &times(stat)))
    }

    fn attributes(&self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), StartFailure> {
        let n_bytes = match flistxattr_query(from) {
            Err(Errno::NOTSUP) | Ok(0) => return Ok(()),
            n_bytes => self.at("read attributes of", n_bytes)?,
        };
        let mut names = vec![0; n_bytes];
        self.at("read attributes of", flistxattr(from, &mut names[..]))?;
        for name in names.split(|byte| *byte == 0).filter(|name| is_kept(name)) {
            let mut value = vec![0; MAX_ATTRIBUTE_BYTES];
            let said = String::from_utf8_lossy(name);
            let n_bytes = self.at(&format!("read attribute {said} of"), fgetxattr(from, name, &mut value[..]))?;
            let set = fsetxattr(to, name, &value[..n_bytes], XattrFlags::empty());
            self.at(&format!("keep attribute {said} of"), set)?;
        }
        Ok(())
    }

    fn whiteout(&self, to: &OwnedFd, name: &CStr) -> Result<(), StartFailure> {
        let made = mknodat(to, name, FileType::CharacterDevice, Mode::empty(), 0);
        self.at("keep the mark (a device of number 0) that there is no", made)
    }

    /// Marks what was there before any task and is no more: where nothing lies below it, overlayfs has not done so.
    fn mark_removed(&mut self, to: &OwnedFd) -> Result<(), StartFailure> {
        for path in std::mem::take(&mut self.made).into_keys() {
            let (above, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
            let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
            // A link that a task has made leads anywhere.
            let (flags, resolve) = (OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, ResolveFlags::NO_SYMLINKS);
            let opened = loop {
                match openat2(to, above, flags, Mode::empty(), resolve | ResolveFlags::BENEATH) {
                    Err(Errno::AGAIN | Errno::INTR) => {} // see `patiently`
                    opened => break opened,
                }
            };
            let name = CString::new(name.as_bytes()).at("read", MADE)?;
            self.path.clone_from(&path);
            match opened.map(|folder| statat(&folder, &*name, AtFlags::SYMLINK_NOFOLLOW).map_err(|_none| folder)) {
                Ok(Err(folder)) => {
                    self.whiteout(&folder, &name)?;
                    self.counted.entries += 1;
                }
                // Overlayfs has left a mark, or the folder that it was in is gone too.
                Ok(Ok(_)) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(error) => return self.at("open", Err(error)),
            }
        }
        self.path = PathBuf::new();
        Ok(())
    }

    fn count(&mut self, stat: &Stat) {
        self.counted.entries += 1;
        self.counted.has_other_ids |= (stat.st_uid, stat.st_gid) != self.own;
    }

    /// Fails when nobody waits for the copy any more.
    fn look_at_host(&self) -> Result<(), StartFailure> {
        let mut fds = [PollFd::new(self.channel, PollFlags::RDHUP)];
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(0) | Err(Errno::INTR) => Ok(()),
            Ok(_) => Err(Errno::PIPE).at("copy on", "for a host that is gone"),
            Err(error) => Err(error).at("look at", "channel"),
        }
    }

    /// Names the step that failed, and the file.
    fn at<T>(&self, step: &str, done: Result<T, impl Into<io::Error>>) -> Result<T, StartFailure> {
        done.map_err(Into::into).at(step, &Path::new("/").join(&self.path).to_string_lossy())
    }
}

/// Returns a place in a file, or nothing where there is no data any more.
fn found(place: rustix::io::Result<u64>) -> rustix::io::Result<Option<u64>> {
    match place {
        Err(Errno::NXIO) => Ok(None),
        place => place.map(Some),
    }
}

fn times(stat: &Stat) -> Timestamps {
    let time = |seconds: i64, nanos| Timespec { tv_sec: seconds, tv_nsec: i64::try_from(nanos).unwrap_or_default() };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}

fn is_kept(name: &[u8]) -> bool {
    match name.strip_prefix(OVERLAY) {
        Some(rest) => OVERLAY_KEPT.contains(&rest),
        None => name.starts_with(b"user.") || KEPT.contains(&name),
    }
}

/// Tells whether a file or link is as it was made.
fn is_as_made(made: &Made, from: &OwnedFd, name: &CStr, stat: &Stat) -> bool {
    let changed = (stat.st_ctime, i64::try_from(stat.st_ctime_nsec).unwrap_or_default());
    if made.inode == stat.st_ino && made.changed == changed {
        return true;
    }
    // As after an editor that has written the same, or `chown -R`.
    let Some(content) = &made.content else { return false };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let is_same_kind = made.mode == stat.st_mode && stat.st_nlink == 1 && made.owner == (stat.st_uid, stat.st_gid);
    is_same_kind
        && usize::try_from(stat.st_size) == Ok(content.len())
        && openat(from, name, flags, Mode::empty()).is_ok_and(|file| {
            let file = File::from(file);
            let mut found = vec![0; content.len()];
            file.metadata().is_ok_and(|meta| meta.permissions().mode() == made.mode)
                && file.read_exact_at(&mut found, 0).is_ok()
                && found == *content
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_overlays_own_attributes_those_are_kept_that_mean_something_to_another() {
        for name in ["user.overlay.opaque", "user.overlay.whiteout", "user.x", "security.capability"] {
            assert!(is_kept(name.as_bytes()), "{name}");
        }
        for name in ["", "user.overlay.origin", "user.overlay.impure", "security.selinux", "trusted.overlay.opaque"] {
            assert!(!is_kept(name.as_bytes()), "{name}");
        }
    }
}
