//! What of the host is shown inside, and where.
//!
//! A target means what it would to a task: the image's own links lead to it, never out of the image, and none of them is
//! replaced. Its place is made in two goes. Nothing can be put into a folder of an image that belongs to somebody else once
//! a layer lies over it, so what is missing there is made in the layer beforehand ([`prepare`]). What is in a file system
//! that comes later, such as `/tmp`, is made when everything stands ([`mount_all`]).

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io,
    os::fd::{AsFd, AsRawFd as _},
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2, readlinkat},
    sys::stat::{Mode, mkdirat},
};
use prorl_core::hello::StartFailure;

use super::{
    At, patiently,
    root::{COVERED, ROOT, bind_mount, on_stage},
    stack::{Found, Said, Stack, make_folder},
};
use crate::{
    setup::{Bind, step},
    sys::{self, Seal},
};

/// How many links a target may lead through, as for the kernel.
const MAX_LINKS: u32 = 40;

/// The step at which a target fails.
const PLACE: &str = "make bind target";

/// Folders of a sandbox that nothing is put into; below the last one all can be.
const OWN: &[&str] = &["proc", "sys", "dev"];
const SHARED_MEMORY: &str = "dev/shm";

/// A root file system that is being built: what is written, and what that is to lie over.
pub(super) struct Layers<'a> {
    /// What is written to the root.
    pub(super) base: &'a Path,
    /// The root of what lies below all.
    pub(super) image: &'a Path,
    /// What lies between.
    pub(super) stack: &'a Stack,
    /// The top folders of the image that are shown. Nothing where all of the image is.
    pub(super) tops: Option<&'a [&'a str]>,
}

impl Layers<'_> {
    /// Looks for what a path means, of which the last part alone may be a link.
    fn look(&self, path: &Path) -> io::Result<Option<Found>> {
        let upper = self.base.join(path);
        match fs::symlink_metadata(&upper) {
            Ok(meta) => return Found::at(&upper, &meta).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        match self.stack.find(path)? {
            Said::Nothing => {}
            Said::Gone => return Ok(None),
            Said::Here(found) => return Ok(Some(found)),
        }
        if self.tops.is_some_and(|tops| !tops.iter().any(|name| path.starts_with(name))) {
            return Ok(None);
        }
        // Where a folder of the layer hides a link of the image, what that leads to is not there. One that may not be looked
        // into cannot be told from a missing one; the kernel will refuse what is asked of it.
        let image = open(self.image, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
        let Ok(found) = patiently(|| openat2(image.as_fd(), path, how)) else { return Ok(None) };
        let meta = File::from(found.try_clone()?).metadata()?;
        if meta.is_symlink() {
            return Ok(Some(Found::Link(readlinkat(found.as_fd(), "")?.into())));
        }
        Ok(Some(Found::of(&meta)))
    }

    /// Returns the path without links that a target leads to, or nothing where it leads to what comes later.
    fn resolve(&self, target: &Path) -> io::Result<Option<PathBuf>> {
        let parts = |path: &Path| path.components().rev().filter_map(part).collect::<Vec<_>>();
        let mut left = parts(target);
        let mut at = PathBuf::new();
        let mut n_links = 0;
        while let Some(part) = left.pop() {
            if part == ".." {
                at.pop();
                continue;
            }
            at.push(part);
            if COVERED.iter().any(|name| at.starts_with(name)) {
                return Ok(None);
            }
            if let Some(Found::Link(link)) = self.look(&at)? {
                n_links += 1;
                if n_links > MAX_LINKS {
                    return Err(Errno::ELOOP.into());
                }
                at.pop();
                if link.is_absolute() {
                    at = PathBuf::new();
                }
                left.extend(parts(&link));
            }
        }
        Ok(Some(at))
    }

    /// Makes what is missing of a path without links.
    fn make(&self, path: &Path, is_folder: bool) -> io::Result<()> {
        if self.look(path)?.is_some() {
            return Ok(());
        }
        let above: Vec<_> = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()).collect();
        for folder in above.into_iter().rev() {
            let mode = match self.look(folder)? {
                Some(Found::Folder { mode }) => mode,
                Some(Found::Link(_) | Found::Other) => return Err(Errno::ENOTDIR.into()),
                None => 0o755,
            };
            // The folder of a layer stands for the one below it, its mode too.
            make_folder(&self.base.join(folder), mode)?;
        }
        if is_folder {
            return make_folder(&self.base.join(path), 0o755);
        }
        OpenOptions::new().write(true).create_new(true).open(self.base.join(path)).map(drop)
    }
}

/// Makes the places of all binds that are in the image or in its layers.
pub(super) fn prepare(binds: &[Bind], layers: &Layers<'_>) -> Result<(), StartFailure> {
    for bind in binds {
        let is_folder = is_folder(bind)?;
        let made = layers.resolve(&bind.target).and_then(|path| match path {
            Some(path) => layers.make(&path, is_folder),
            None => Ok(()),
        });
        made.at(PLACE, &bind.target.to_string_lossy())?;
    }
    Ok(())
}

/// Makes the places that are still missing, and then mounts every bind, in their order. All else is mounted.
pub(super) fn mount_all(binds: &[Bind]) -> Result<(), StartFailure> {
    if binds.is_empty() {
        return Ok(());
    }
    let root = open(ROOT, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).at("open", ROOT)?;
    // Before any is mounted, so that nothing is made in a folder of the host.
    for bind in binds {
        complete(&root, &bind.target, is_folder(bind)?).at(PLACE, &bind.target.to_string_lossy())?;
    }
    for bind in binds {
        let name = bind.target.to_string_lossy();
        let place = place(&root, &bind.target).at(PLACE, &name)?;
        bind_mount(&on_stage(&bind.source), &place)
            .map_err(|failure| StartFailure { target: name.to_string(), ..failure })?;
        // A bind may be a device on purpose.
        let seal = if bind.writable { Seal::Writable } else { Seal::ReadOnly };
        sys::seal_mount(&place, seal).at("make read-only", &name)?;
    }
    Ok(())
}

/// Makes what is missing of a target, as a process whose root directory is `root` would.
fn complete(root: &impl AsFd, target: &Path, is_folder: bool) -> Result<(), Errno> {
    let mut path = PathBuf::new();
    let mut above = open_inside(root, Path::new("."))?;
    let mut parts = target.components().filter_map(part).peekable();
    while let Some(part) = parts.next() {
        path.push(&part);
        above = match open_inside(root, &path) {
            Err(Errno::ENOENT) => {
                if is_folder || parts.peek().is_some() {
                    mkdirat(&above, part.as_os_str(), Mode::from_bits_truncate(0o755))?;
                } else {
                    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
                    openat(&above, part.as_os_str(), flags, Mode::from_bits_truncate(0o644))?;
                }
                open_inside(root, &path)?
            }
            found => found?,
        };
    }
    Ok(())
}

/// Returns the path without links, as this process sees it, that a target leads to.
fn place(root: &impl AsFd, target: &Path) -> io::Result<PathBuf> {
    let found = open_inside(root, target)?;
    let place = fs::read_link(format!("{ROOT}/proc/self/fd/{}", found.as_raw_fd()))?;
    let inside = place.strip_prefix(ROOT).map_err(|_outside| Errno::EXDEV)?;
    let is_own = OWN.iter().any(|own| inside.starts_with(own))
        && !(inside.starts_with(SHARED_MEMORY) && inside != Path::new(SHARED_MEMORY));
    // A link of the image may lead there.
    if is_own || inside.as_os_str().is_empty() { Err(Errno::EPERM.into()) } else { Ok(place) }
}

fn open_inside(root: &impl AsFd, path: &Path) -> Result<File, Errno> {
    let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_IN_ROOT);
    Ok(patiently(|| openat2(root, path, how))?.into())
}

fn is_folder(bind: &Bind) -> Result<bool, StartFailure> {
    let meta = fs::metadata(on_stage(&bind.source)).at(step::OPEN_BIND, &bind.source.to_string_lossy())?;
    Ok(meta.is_dir())
}

/// A part of a path that leads somewhere.
fn part(part: Component<'_>) -> Option<OsString> {
    matches!(part, Component::Normal(_) | Component::ParentDir).then(|| part.as_os_str().to_owned())
}
