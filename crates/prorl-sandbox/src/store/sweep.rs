//! Removing what dead processes have left.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    path::Path,
};

use super::{
    Collected, Digest, StoreError, claim,
    disk::{self, CLAIMS, Disk, IMAGE_RECORD, IMAGES, LAYERS, NAMES, OWNERS, REFS, SOURCES, STAGING, TRASH},
    entry::size_of,
    hold::{self, REMOVING, Removal, Thing, n_refs},
    image,
    janitor::remove_aside,
    layer,
    list::list,
    pulse::{self, Fate},
};

/// Removes everything of a dead process, and damaged images that nobody uses.
///
/// One thing that cannot be removed keeps no other: each is told in [`Collected::left`].
pub(super) fn all(disk: &Disk, is_dry: bool, done: &mut Collected) {
    let mut sweep = Sweep { disk, is_dry, done, dead: HashMap::new() };
    sweep.unfinished();
    sweep.each(IMAGES, Sweep::damaged);
    if !is_dry {
        sweep.each(REFS, Sweep::refs);
        // The last of all: without it, nothing else of a process can be told to be a dead one's.
        sweep.each(OWNERS, Sweep::owner);
    }
}

/// Removes what takes space of it, without a look at every image.
pub(super) fn unfinished(disk: &Disk) {
    let mut done = Collected::default();
    Sweep { disk, is_dry: false, done: &mut done, dead: HashMap::new() }.unfinished();
    if !done.left.is_empty() {
        tracing::warn!(left = ?done.left, "what dead processes have left cannot be removed");
    }
}

/// Removes what dead processes were removing, which is surely nobody's, to make room.
pub(super) fn trash(disk: &Disk) {
    let mut done = Collected::default();
    Sweep { disk, is_dry: false, done: &mut done, dead: HashMap::new() }.each(TRASH, Sweep::trash);
}

/// Tells that something could not be removed, once.
pub(super) fn tell(done: &mut Collected, error: &StoreError) {
    let text = explain(error);
    if !done.left.contains(&text) {
        done.left.push(text);
    }
}

/// Says an error with its causes.
fn explain(error: &StoreError) -> String {
    let source = std::error::Error::source(error).map(|source| format!(": {source}"));
    format!("{error}{}", source.unwrap_or_default())
}

struct Sweep<'a> {
    disk: &'a Disk,
    is_dry: bool,
    done: &'a mut Collected,
    /// What is known of each process, by its token. Who is dead stays so.
    dead: HashMap<String, bool>,
}

impl Sweep<'_> {
    fn unfinished(&mut self) {
        self.each(STAGING, Self::staging);
        self.each(TRASH, Self::trash);
        self.claims();
        self.each(LAYERS, Self::layer);
    }

    /// Looks at everything in a folder of the store.
    fn each(&mut self, folder: &str, mut look: impl FnMut(&mut Self, &Path, &str) -> Result<(), StoreError>) {
        let folder = self.disk.folder(folder);
        match list(&folder) {
            Ok(names) => {
                for name in names {
                    if let Err(error) = look(self, &folder.join(&name), &name) {
                        tell(self.done, &error);
                    }
                }
            }
            Err(error) => tell(self.done, &error),
        }
    }

    fn is_dead(&mut self, token: &str) -> Result<bool, StoreError> {
        if let Some(known) = self.dead.get(token) {
            return Ok(*known);
        }
        // A process removes its pulse when it has nothing here any more.
        let fate = self.disk.fate(&self.disk.folder(OWNERS).join(token))?;
        let is_dead = !matches!(fate, Fate::Lives(_));
        self.dead.insert(token.to_owned(), is_dead);
        Ok(is_dead)
    }

    /// Tells whether something is a dead process's, by its name `..TOKEN.COUNT`. What has no such name is nobody's.
    fn is_left(&mut self, name: &str) -> Result<bool, StoreError> {
        let token = name.rsplit_once('.').and_then(|(front, _)| front.rsplit('.').next());
        token.map_or(Ok(true), |token| self.is_dead(token))
    }

    fn remove(&mut self, path: &Path) -> Result<(), StoreError> {
        remove_aside(self.disk, path)?;
        self.done.n_leftovers += 1;
        Ok(())
    }

    fn staging(&mut self, path: &Path, name: &str) -> Result<(), StoreError> {
        if !self.is_left(name)? {
            return Ok(());
        }
        if self.is_dry {
            self.done.n_leftovers += 1;
            return Ok(());
        }
        // Moved first, so that a process that lives after all cannot publish the half of it.
        let aside = self.disk.fresh_trash(STAGING);
        match fs::rename(path, &aside) {
            Ok(()) => self.remove(&aside),
            Err(error) if pulse::is_gone(&error) => Ok(()),
            Err(source) => Err(StoreError::at("remove", path, source)),
        }
    }

    fn trash(&mut self, path: &Path, name: &str) -> Result<(), StoreError> {
        if !self.is_left(name)? {
            return Ok(());
        }
        if self.is_dry {
            self.done.n_leftovers += 1;
            return Ok(());
        }
        self.remove(path)
    }

    fn claims(&mut self) {
        let mut stems = HashSet::new();
        self.each(CLAIMS, |sweep, path, name| {
            if sweep.disk.fate(path)? != Fate::Dead {
                return Ok(());
            }
            sweep.done.n_leftovers += 1;
            let Some((stem, _)) = claim::parse(name) else { return Ok(()) };
            if !sweep.is_dry && stems.insert(stem.to_owned()) {
                // Whoever has the turn removes the marks of the dead, and nobody else may.
                let folder = sweep.disk.folder(CLAIMS);
                let turn = claim::take(&sweep.disk.pulse()?, &folder, stem);
                drop(turn.map_err(|source| StoreError::at("collect", path, source))?);
            }
            Ok(())
        });
    }

    fn layer(&mut self, path: &Path, id: &str) -> Result<(), StoreError> {
        let thing = Thing::layer(id);
        check_folder(path)?;
        if n_refs(self.disk, &thing)? > 0 {
            return Ok(());
        }
        let record = layer::read(path).ok().flatten();
        if !self.is_dry {
            match hold::set_aside(self.disk, &thing)? {
                Removal::InUse | Removal::Absent => return Ok(()),
                Removal::Aside(aside) => {
                    if let Err(error) = remove_aside(self.disk, &aside) {
                        tell(self.done, &error);
                    }
                }
            }
        }
        self.done.freed_bytes += record.map_or(0, |record| size_of(record.bytes, record.entries));
        self.done.layers.push(id.to_owned());
        Ok(())
    }

    fn damaged(&mut self, path: &Path, hex: &str) -> Result<(), StoreError> {
        check_folder(path)?;
        let Ok(digest) = Digest::try_from(format!("sha256:{hex}")) else { return Ok(()) };
        match image::read(path, &digest) {
            Err(StoreError::Damaged { .. }) => {}
            read => return read.map(drop),
        }
        if self.is_dry {
            self.done.n_leftovers += 1;
        } else if let Removal::Aside(aside) = hold::set_aside(self.disk, &Thing::image(&digest))? {
            self.remove(&aside)?;
        }
        Ok(())
    }

    fn refs(&mut self, path: &Path, id: &str) -> Result<(), StoreError> {
        for mark in list(path)? {
            if let Err(error) = self.mark(id, &path.join(&mark), &mark) {
                tell(self.done, &error);
            }
        }
        let is_there = [IMAGES, LAYERS].iter().any(|kind| self.disk.folder(kind).join(id).exists());
        if !is_there {
            let _ = fs::remove_dir(path); // marks keep it
        }
        Ok(())
    }

    fn mark(&self, id: &str, path: &Path, mark: &str) -> Result<(), StoreError> {
        if self.disk.fate(path)? != Fate::Dead {
            return Ok(());
        }
        if mark == REMOVING {
            return hold::forget_remover(self.disk, &Thing::layer(id)); // for its marks, the kind of thing is the same
        }
        disk::gone(fs::remove_file(path)).map_err(|source| StoreError::at("remove", path, source))
    }

    fn owner(&mut self, path: &Path, _name: &str) -> Result<(), StoreError> {
        if self.disk.fate(path)? != Fate::Dead {
            return Ok(());
        }
        disk::gone(fs::remove_file(path)).map_err(|source| StoreError::at("remove", path, source))
    }
}

/// Refuses what no store has made, and what is not removed therefore.
fn check_folder(path: &Path) -> Result<(), StoreError> {
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.is_dir() => Err(StoreError::io("read", path, io::Error::from_raw_os_error(libc::ENOTDIR))),
        _ => Ok(()),
    }
}

fn is_there(disk: &Disk, digest: &Digest) -> bool {
    Thing::image(digest).place(disk).join(IMAGE_RECORD).exists()
}

/// Removes names of images that are gone, and what is remembered of their sources.
pub(super) fn forget_gone(disk: &Disk, done: &mut Collected) {
    let mut sweep = Sweep { disk, is_dry: false, done, dead: HashMap::new() };
    sweep.each(NAMES, |sweep, path, _| match image::read_name(path) {
        Ok(Some(digest)) if !is_there(sweep.disk, &digest) => forget_name(sweep.disk, path, &digest),
        _ => Ok(()),
    });
    sweep.each(SOURCES, |sweep, path, _| {
        if image::read_memo(path).is_some_and(|digest| is_there(sweep.disk, &digest)) {
            return Ok(());
        }
        disk::gone(fs::remove_file(path)).map_err(|source| StoreError::at("remove", path, source))
    });
}

/// Removes a name, unless it is another image's by now. It is taken away before it is read, and put back if it is.
fn forget_name(disk: &Disk, path: &Path, digest: &Digest) -> Result<(), StoreError> {
    let aside = disk.fresh_trash(NAMES);
    match fs::rename(path, &aside) {
        Err(error) if pulse::is_gone(&error) => return Ok(()),
        moved => moved.map_err(|source| StoreError::at("remove", path, source))?,
    }
    if image::read_name(&aside)?.is_some_and(|of| of != *digest) {
        let _ = fs::hard_link(&aside, path); // unless somebody has given it anew
    }
    fs::remove_file(&aside).map_err(|source| StoreError::at("remove", &aside, source))
}
