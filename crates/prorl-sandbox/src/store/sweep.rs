//! Removing what dead processes have left.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::Path,
    sync::Arc,
};

use super::{
    Collected, Digest, StoreError,
    claim::{self, Turn},
    disk::{CLAIMS, Disk, IMAGE_RECORD, IMAGES, LAYERS, NAMES, OWNERS, REFS, SOURCES, STAGING, TRASH},
    entry::size_of,
    hold::{self, REMOVING, Removal, Thing, n_refs},
    image,
    janitor::remove_aside,
    layer,
    list::list,
    pulse::{self, Fate},
};

/// Removes everything of a dead process, and damaged images that nobody uses.
pub(super) fn all(disk: &Arc<Disk>, is_dry: bool, done: &mut Collected) -> Result<(), StoreError> {
    let mut sweep = Sweep { disk, is_dry, done, dead: HashMap::new() };
    sweep.unfinished()?;
    sweep.damaged()?;
    sweep.refs()?;
    sweep.owners()
}

/// Removes what takes space of it, without a look at every image.
pub(super) fn unfinished(disk: &Arc<Disk>) -> Result<(), StoreError> {
    let mut done = Collected::default();
    Sweep { disk, is_dry: false, done: &mut done, dead: HashMap::new() }.unfinished()?;
    if !done.left.is_empty() {
        tracing::warn!(left = ?done.left, "what dead processes have left cannot be removed");
    }
    Ok(())
}

/// Says an error with its causes.
pub(super) fn explain(error: &StoreError) -> String {
    let source = std::error::Error::source(error).map(|source| format!(": {source}"));
    format!("{error}{}", source.unwrap_or_default())
}

struct Sweep<'a> {
    disk: &'a Arc<Disk>,
    is_dry: bool,
    done: &'a mut Collected,
    /// What is known of each process, by its token. Who is dead stays so.
    dead: HashMap<String, bool>,
}

impl Sweep<'_> {
    fn unfinished(&mut self) -> Result<(), StoreError> {
        self.staging()?;
        self.trash()?;
        self.claims()?;
        self.layers()
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

    fn remove(&mut self, path: &Path) {
        match remove_aside(self.disk, path) {
            Ok(()) => self.done.n_leftovers += 1,
            Err(error) => self.done.left.push(explain(&error)),
        }
    }

    fn staging(&mut self) -> Result<(), StoreError> {
        let folder = self.disk.folder(STAGING);
        for name in list(&folder)? {
            if !self.is_left(&name)? {
                continue;
            }
            if self.is_dry {
                self.done.n_leftovers += 1;
                continue;
            }
            // Moved first, so that a process that lives after all cannot publish the half of it.
            let aside = self.disk.folder(TRASH).join(format!("{STAGING}.{}", self.disk.fresh_name()?));
            match fs::rename(folder.join(&name), &aside) {
                Ok(()) => self.remove(&aside),
                Err(error) if pulse::is_gone(&error) => {}
                Err(source) => self.done.left.push(explain(&StoreError::at("remove", &folder.join(&name), source))),
            }
        }
        Ok(())
    }

    fn trash(&mut self) -> Result<(), StoreError> {
        let folder = self.disk.folder(TRASH);
        for name in list(&folder)? {
            if !self.is_left(&name)? {
                continue;
            }
            if self.is_dry {
                self.done.n_leftovers += 1;
                continue;
            }
            self.remove(&folder.join(&name));
        }
        Ok(())
    }

    fn claims(&mut self) -> Result<(), StoreError> {
        let folder = self.disk.folder(CLAIMS);
        let at = |source| StoreError::at("collect", &folder, source);
        let mut stems = HashSet::new();
        for name in list(&folder)? {
            let is_dead = self.disk.fate(&folder.join(&name))? == Fate::Dead;
            if !is_dead {
                continue;
            }
            self.done.n_leftovers += 1;
            let Some((stem, _)) = claim::parse(&name) else { continue };
            if !self.is_dry && stems.insert(stem.to_owned()) {
                // Whoever has the turn removes the marks of the dead, and nobody else may.
                match claim::take(&self.disk.pulse()?, &folder, stem).map_err(at)? {
                    Turn::Mine(claim) => drop(claim),
                    Turn::Of(_) => {}
                }
            }
        }
        Ok(())
    }

    fn layers(&mut self) -> Result<(), StoreError> {
        for id in list(&self.disk.folder(LAYERS))? {
            let thing = Thing::layer(&id);
            if n_refs(self.disk, &thing)? > 0 {
                continue;
            }
            let record = layer::read(&thing.place(self.disk)).ok().flatten();
            if !self.is_dry {
                match hold::set_aside(self.disk, &thing)? {
                    Removal::InUse | Removal::Absent => continue,
                    Removal::Aside(path) => {
                        if let Err(error) = remove_aside(self.disk, &path) {
                            self.done.left.push(explain(&error));
                        }
                    }
                }
            }
            self.done.freed_bytes += record.map_or(0, |record| size_of(record.bytes, record.entries));
            self.done.layers.push(id);
        }
        Ok(())
    }

    fn damaged(&mut self) -> Result<(), StoreError> {
        for hex in list(&self.disk.folder(IMAGES))? {
            let Ok(digest) = Digest::try_from(format!("sha256:{hex}")) else { continue };
            let thing = Thing::image(&digest);
            let is_damaged = matches!(image::read(&thing.place(self.disk), &digest), Err(StoreError::Damaged { .. }));
            if !is_damaged {
                continue;
            }
            if self.is_dry {
                self.done.n_leftovers += 1;
            } else if let Removal::Aside(path) = hold::set_aside(self.disk, &thing)? {
                self.remove(&path);
            }
        }
        Ok(())
    }

    fn refs(&mut self) -> Result<(), StoreError> {
        if self.is_dry {
            return Ok(());
        }
        let folder = self.disk.folder(REFS);
        for id in list(&folder)? {
            for mark in list(&folder.join(&id))? {
                let path = folder.join(&id).join(&mark);
                if self.disk.fate(&path)? != Fate::Dead {
                    continue;
                }
                if mark == REMOVING {
                    hold::forget_remover(self.disk, &Thing::layer(&id))?; // for its marks, the kind of thing is the same
                } else {
                    let _ = fs::remove_file(&path);
                }
            }
            let is_there = [IMAGES, LAYERS].iter().any(|kind| self.disk.folder(kind).join(&id).exists());
            if !is_there {
                let _ = fs::remove_dir(folder.join(&id)); // marks keep it
            }
        }
        Ok(())
    }

    /// The last of all: without it, nothing else of a process can be told to be a dead one's.
    fn owners(&mut self) -> Result<(), StoreError> {
        let folder = self.disk.folder(OWNERS);
        for name in list(&folder)? {
            let path = folder.join(name);
            if !self.is_dry && self.disk.fate(&path)? == Fate::Dead {
                let _ = fs::remove_file(&path);
            }
        }
        Ok(())
    }
}

fn is_there(disk: &Disk, digest: &Digest) -> bool {
    Thing::image(digest).place(disk).join(IMAGE_RECORD).exists()
}

/// Removes names of images that are gone.
pub(super) fn forget_names(disk: &Disk) -> Result<(), StoreError> {
    let folder = disk.folder(NAMES);
    for name in list(&folder)? {
        let path = folder.join(name);
        if let Ok(Some(digest)) = image::read_name(&path)
            && !is_there(disk, &digest)
        {
            forget_name(disk, &path, &digest)?;
        }
    }
    Ok(())
}

/// Removes a name, unless it is another image's by now. It is taken away before it is read, and put back if it is.
fn forget_name(disk: &Disk, path: &Path, digest: &Digest) -> Result<(), StoreError> {
    let aside = disk.folder(STAGING).join(disk.fresh_name()?);
    match fs::rename(path, &aside) {
        Err(error) if pulse::is_gone(&error) => return Ok(()),
        moved => moved.map_err(|source| StoreError::at("remove", path, source))?,
    }
    if image::read_name(&aside)?.is_some_and(|of| of != *digest) {
        let _ = fs::hard_link(&aside, path); // unless somebody has given it anew
    }
    fs::remove_file(&aside).map_err(|source| StoreError::at("remove", &aside, source))
}

/// Removes what is remembered of sources whose images are gone.
pub(super) fn forget_sources(disk: &Disk) -> Result<(), StoreError> {
    let folder = disk.folder(SOURCES);
    for name in list(&folder)? {
        let path = folder.join(name);
        if !image::read_memo(&path).is_some_and(|digest| is_there(disk, &digest)) {
            let _ = fs::remove_file(&path);
        }
    }
    Ok(())
}
