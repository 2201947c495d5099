//! References: who uses an image or a layer, and the only way in which one is removed.
//!
//! A process that uses something has a mark in `refs/ID/`, one however many handles it has. Removing never races with that:
//!
//! - Taking makes that mark, and then looks for `refs/ID/removing`. If it is there, and of a living process, the mark is taken
//!   back, and all of it is tried again a moment later. If not, the thing is in its place for as long as the mark is, or was
//!   not there to begin with.
//! - Removing makes `refs/ID/removing`, and then looks for marks. If there is one of a living process, the thing stays. If not,
//!   it is renamed out of its place, which is final, and then `removing` is taken back.
//!
//! In whatever order the steps of the two follow each other, the later of the two looks sees what the other has made before.
//! Both look into the folder in which they have just made something, so that a client of NFS shows them its content of now.
//! There is one remover at a time, who has a claim to it. A `removing` of a dead one stands for nothing, and the next remover
//! takes its place.
//!
//! Renaming the thing first and putting it back if it is used after all would need no `removing`; but then the files of
//! somebody who has just taken it would be gone for a moment.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    Digest, Inner, StoreError,
    claim::{self, Claim, Turn},
    disk::{self, CLAIMS, Disk, IMAGES, LAYERS, REFS},
    pulse::{self, Fate, Pulse},
    sweep,
};

/// An image or a layer, by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Thing {
    /// [`IMAGES`] or [`LAYERS`].
    pub(super) kind: &'static str,
    pub(super) id: String,
}

impl Thing {
    pub(super) fn image(digest: &Digest) -> Self {
        Self { kind: IMAGES, id: digest.hex().to_owned() }
    }

    pub(super) fn layer(id: &str) -> Self {
        Self { kind: LAYERS, id: id.to_owned() }
    }

    pub(super) fn place(&self, disk: &Disk) -> PathBuf {
        disk.folder(self.kind).join(&self.id)
    }

    pub(super) fn refs(&self, disk: &Disk) -> PathBuf {
        disk.folder(REFS).join(&self.id)
    }
}

/// The mark of who is removing a thing; no token is that.
pub(super) const REMOVING: &str = "removing";

/// How often, and after how long, something is tried again that somebody else has in hand for a moment.
const MAX_TRIES: u32 = 500;
const PAUSE: Duration = Duration::from_millis(2);

/// How many handles of each thing this process has.
pub(super) type Holds = HashMap<Thing, usize>;

/// A handle of something, which is not removed meanwhile.
#[derive(Debug)]
pub(super) struct Hold {
    thing: Thing,
    inner: Arc<Inner>,
}

impl Hold {
    /// Takes one. The caller then looks whether the thing is in its place; what is not there is not there for good.
    ///
    /// # Errors
    /// When it cannot be marked, or when somebody who is removing it stands still.
    pub(super) fn take(inner: &Arc<Inner>, thing: Thing) -> Result<Self, StoreError> {
        inner.disk.check_maker()?;
        let mut remover = String::new();
        for _ in 0..MAX_TRIES {
            let mut holds = inner.holds.lock();
            if let Some(count) = holds.get_mut(&thing) {
                *count += 1;
                // One that could not be marked is marked as soon as that can be done.
                if inner.disk.unmarked.lock().contains(&thing) && matches!(mark(&inner.disk, &thing), Ok(None)) {
                    inner.disk.unmarked.lock().remove(&thing);
                }
                drop(holds);
                return Ok(Self { thing, inner: Arc::clone(inner) });
            }
            match mark(&inner.disk, &thing) {
                Ok(None) => {}
                // A store that cannot be written can be used. Whoever can write it may remove what is used here.
                Err(error) if disk::lacks_room(&error) || matches!(error, StoreError::ReadOnly { .. }) => {
                    warn_unmarked(&error);
                    inner.disk.unmarked.lock().insert(thing.clone());
                }
                Ok(Some(who)) => {
                    drop(holds);
                    remover = who;
                    thread::park_timeout(PAUSE);
                    continue;
                }
                Err(error) => return Err(error),
            }
            holds.insert(thing.clone(), 1);
            drop(holds);
            return Ok(Self { thing, inner: Arc::clone(inner) });
        }
        Err(StoreError::Busy { path: thing.place(&inner.disk), who: remover })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A forked copy of the process drops copies of its handles.
        if !self.inner.disk.maker.is_here() {
            return;
        }
        let mut holds = self.inner.holds.lock();
        let Some(count) = holds.get_mut(&self.thing) else { return };
        *count -= 1;
        if *count > 0 {
            return;
        }
        holds.remove(&self.thing);
        // What was not marked, and never could be, needs no pulse to be let go.
        let is_marked = !self.inner.disk.unmarked.lock().remove(&self.thing);
        if let Some(pulse) = is_marked.then(|| self.inner.disk.pulse().ok()).flatten() {
            pulse.unmark(&self.thing.refs(&self.inner.disk).join(pulse.token()));
        }
        drop(holds);
        if self.thing.kind == LAYERS {
            self.inner.janitor.remove_unused(&self.inner.disk, self.thing.clone());
        }
    }
}

/// Says once that what is used here is not safe.
fn warn_unmarked(error: &StoreError) {
    static IS_SAID: AtomicBool = AtomicBool::new(false);

    if !IS_SAID.swap(true, Ordering::Relaxed) {
        let error = error as &dyn std::error::Error;
        tracing::warn!(error, "images in use cannot be marked as such: others may remove them");
    }
}

/// Marks a thing as used, or returns who is removing it.
fn mark(disk: &Disk, thing: &Thing) -> Result<Option<String>, StoreError> {
    let (pulse, folder) = (disk.pulse()?, thing.refs(disk));
    let path = folder.join(pulse.token());
    // Before it is made, so that it is never missed when all are made again.
    pulse.keep(path.clone(), thing.place(disk));
    mark_in(&pulse, &folder, &path).inspect_err(|_| pulse.unmark(&path))?;
    let fate = disk.fate(&folder.join(REMOVING));
    if matches!(fate, Ok(Fate::Dead | Fate::Unmarked)) {
        return Ok(None);
    }
    pulse.unmark(&path);
    Ok(if let Fate::Lives(who) = fate? { Some(who) } else { None })
}

/// Makes a mark, and the folder for it. A folder without marks may be removed at any time.
fn mark_in(pulse: &Pulse, folder: &Path, path: &Path) -> Result<(), StoreError> {
    let mut marked = pulse.mark(path);
    for _ in 0..MAX_TRIES {
        if !marked.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            break;
        }
        match fs::create_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.map_err(|source| StoreError::at("make", folder, source))?,
        }
        marked = pulse.mark(path);
    }
    marked.map_err(|source| StoreError::at("write", path, source))
}

/// Counts the processes that use something, and removes marks of dead ones.
pub(super) fn n_refs(disk: &Disk, thing: &Thing) -> Result<usize, StoreError> {
    let folder = thing.refs(disk);
    let at = |source| StoreError::io("list", &folder, source);
    // What this process uses without a mark only this process knows of.
    let n_unmarked = usize::from(disk.unmarked.lock().contains(thing));
    let entries = match fs::read_dir(&folder) {
        Err(error) if pulse::is_gone(&error) => return Ok(n_unmarked),
        entries => entries.map_err(at)?,
    };
    let mut n_refs = n_unmarked;
    for entry in entries {
        let entry = entry.map_err(at)?;
        if entry.file_name() == REMOVING {
            continue;
        }
        match disk.fate(&entry.path())? {
            Fate::Lives(_) => n_refs += 1,
            Fate::Dead => {
                let _ = fs::remove_file(entry.path());
            }
            Fate::Unmarked => {}
        }
    }
    Ok(n_refs)
}

/// What came of removing something from its place.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Removal {
    /// Somebody uses it, or is trying to remove it too; it is where it was.
    InUse,
    /// It was not there.
    Absent,
    /// It is here now, for nobody but the caller, who removes it.
    Aside(PathBuf),
}

/// Takes something that nobody uses out of its place.
pub(super) fn set_aside(disk: &Disk, thing: &Thing) -> Result<Removal, StoreError> {
    disk.check_maker()?;
    for is_room_made in [false, true] {
        match set_aside_marked(disk, thing) {
            Err(error) if disk::lacks_room(&error) && !is_room_made => sweep::trash(disk),
            Err(error) if disk::lacks_room(&error) => {}
            done => return done,
        }
    }
    // No room for a mark, and nothing else that could be removed: to insist on one would keep the disk full for good. Marks of
    // others still count, and a disk that has no room for this one has none for theirs, so that hardly anybody can make
    // one between this look and the rename; who takes it without a mark knows that it may go. Of two that rename it one succeeds.
    let is_removed_by_other = matches!(disk.fate(&thing.refs(disk).join(REMOVING))?, Fate::Lives(_));
    if is_removed_by_other || n_refs(disk, thing)? > 0 {
        return Ok(Removal::InUse);
    }
    move_aside(disk, thing)
}

fn set_aside_marked(disk: &Disk, thing: &Thing) -> Result<Removal, StoreError> {
    let refs = thing.refs(disk);
    if n_refs(disk, thing)? > 0 {
        return Ok(Removal::InUse);
    }
    let Some(_claim) = claim(disk, thing)? else { return Ok(Removal::InUse) };
    let pulse = disk.pulse()?;
    let removing = Removing(refs.join(REMOVING));
    // One that is there is of a dead remover.
    disk::gone(fs::remove_file(&removing.0)).map_err(|source| StoreError::at("remove", &removing.0, source))?;
    mark_in(&pulse, &refs, &removing.0)?;
    if n_refs(disk, thing)? > 0 {
        return Ok(Removal::InUse);
    }
    move_aside(disk, thing)
}

fn move_aside(disk: &Disk, thing: &Thing) -> Result<Removal, StoreError> {
    let (place, trash) = (thing.place(disk), disk.fresh_trash(&thing.id));
    match fs::rename(&place, &trash) {
        Err(error) if pulse::is_gone(&error) => Ok(Removal::Absent),
        moved => moved.map(|()| Removal::Aside(trash)).map_err(|source| StoreError::at("remove", &place, source)),
    }
}

/// Removes the mark of a remover that is dead.
pub(super) fn forget_remover(disk: &Disk, thing: &Thing) -> Result<(), StoreError> {
    // Only who has the claim may: a living remover's mark has the same name.
    if let Some(_claim) = claim(disk, thing)? {
        drop(Removing(thing.refs(disk).join(REMOVING)));
    }
    Ok(())
}

/// Claims the removal of a thing, or returns `None` where somebody else has it for long.
fn claim(disk: &Disk, thing: &Thing) -> Result<Option<Claim>, StoreError> {
    let (pulse, folder) = (disk.pulse()?, disk.folder(CLAIMS));
    for _ in 0..MAX_TRIES {
        match claim::take(&pulse, &folder, &thing.id).map_err(|source| StoreError::at("claim in", &folder, source))? {
            Turn::Mine(claim) => return Ok(Some(claim)),
            Turn::Of(_) => thread::park_timeout(PAUSE),
        }
    }
    Ok(None)
}

/// This remover's mark, removed when dropped, before the claim is given back. The folder goes with it if there are no others.
struct Removing(PathBuf);

impl Drop for Removing {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
        if let Some(refs) = self.0.parent() {
            let _ = fs::remove_dir(refs);
        }
    }
}
