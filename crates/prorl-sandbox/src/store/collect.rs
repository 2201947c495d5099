//! Removing images that are not needed.

use std::{collections::HashSet, sync::Arc};

use super::{
    Collect, Collected, ImageStore, StoreError,
    disk::{self, Disk, IMAGES},
    hold::{self, Removal, Thing, n_refs},
    janitor::remove_aside,
    list::{self, Found},
    sweep,
};

impl ImageStore {
    /// Removes images as wanted, never one that is in use, and what dead processes have left: whatever they were making or
    /// removing, and layers that no living one uses. Blocks until it is done.
    ///
    /// # Errors
    /// When the store cannot be read or written. A single thing that cannot be removed is told in [`Collected::left`].
    pub fn collect(&self, wanted: &Collect) -> Result<Collected, StoreError> {
        let disk = &self.inner.disk;
        disk.check_maker()?;
        self.inner.janitor.wait(disk);
        list::list(&disk.folder(IMAGES))?;
        match disk.pulse() {
            // A full disk is what a collection is for.
            Err(error) if !wanted.dry_run && !disk::lacks_room(&error) => return Err(error),
            _ => {}
        }
        let mut done = Collected::default();
        sweep::all(disk, wanted.dry_run, &mut done);
        let images = list::images(disk)?;
        let there: HashSet<_> = images.iter().map(|found| &found.filled.digest).collect();
        done.missing = wanted.remove.iter().filter(|digest| !there.contains(digest)).cloned().collect();
        drop(there);
        let now = disk.now();
        let is_wanted = |found: &Found| {
            let unused_for = now.duration_since(found.last_used).unwrap_or_default();
            wanted.remove.contains(&found.filled.digest) || wanted.unused_for.is_some_and(|limit| unused_for >= limit)
        };
        let (unwanted, mut kept): (Vec<_>, Vec<_>) = images.into_iter().partition(is_wanted);
        for found in unwanted {
            match remove(disk, &found, wanted.dry_run, &mut done) {
                Ok(true) => continue,
                Ok(false) => done.in_use.push(found.filled.digest.clone()),
                Err(error) => sweep::tell(&mut done, &error),
            }
            kept.push(found);
        }
        if let Some(max_bytes) = wanted.max_bytes {
            shrink(kept, max_bytes, |found| {
                let removed = remove(disk, found, wanted.dry_run, &mut done);
                removed.unwrap_or_else(|error| {
                    sweep::tell(&mut done, &error);
                    false
                })
            });
        }
        if !wanted.dry_run {
            sweep::forget_gone(disk, &mut done);
        }
        Ok(done)
    }

    /// Removes images that nobody uses until the rest is no larger than this; what was removed goes in the background.
    pub(super) fn evict(&self, max_bytes: u64) {
        let disk = &self.inner.disk;
        let (mut is_any_removed, mut done) = (false, Collected::default());
        match list::images(disk) {
            Ok(images) => shrink(images, max_bytes, |found| {
                match hold::set_aside(disk, &Thing::image(&found.filled.digest)) {
                    Ok(Removal::Aside(path)) => self.inner.janitor.remove(disk, path),
                    Ok(Removal::InUse | Removal::Absent) => return false,
                    Err(error) => {
                        sweep::tell(&mut done, &error);
                        return false;
                    }
                }
                is_any_removed = true;
                true
            }),
            Err(error) => sweep::tell(&mut done, &error),
        }
        if is_any_removed {
            sweep::forget_gone(disk, &mut done);
        }
        if !done.left.is_empty() {
            tracing::warn!(left = ?done.left, "the store may be larger than it is to be");
        }
    }
}

/// Removes images, the one unused for longest first, until the rest is no larger than this or none can be removed.
fn shrink(mut images: Vec<Found>, max_bytes: u64, mut remove: impl FnMut(&Found) -> bool) {
    let mut size: u64 = images.iter().map(|found| found.size).sum();
    images.sort_by(|a, b| (a.last_used, &a.filled.digest).cmp(&(b.last_used, &b.filled.digest)));
    for found in images {
        if size <= max_bytes {
            break;
        }
        if remove(&found) {
            size -= found.size;
        }
    }
}

/// Removes an image, unless somebody uses it; tells whether it did.
fn remove(disk: &Arc<Disk>, found: &Found, is_dry: bool, done: &mut Collected) -> Result<bool, StoreError> {
    let digest = &found.filled.digest;
    let thing = Thing::image(digest);
    if is_dry {
        if n_refs(disk, &thing)? > 0 {
            return Ok(false);
        }
    } else {
        match hold::set_aside(disk, &thing)? {
            Removal::InUse => return Ok(false),
            Removal::Absent => return Ok(true), // somebody else did
            Removal::Aside(path) => {
                if let Err(error) = remove_aside(disk, &path) {
                    sweep::tell(done, &error);
                }
            }
        }
    }
    done.removed.push(digest.clone());
    done.freed_bytes += found.size;
    Ok(true)
}
