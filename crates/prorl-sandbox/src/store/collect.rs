//! Removing images that are not needed.

use std::{collections::HashSet, sync::Arc};

use super::{
    Collect, Collected, ImageStore, StoreError,
    disk::Disk,
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
        self.inner.janitor.wait();
        let mut done = Collected::default();
        sweep::all(disk, wanted.dry_run, &mut done)?;
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
            if !remove(disk, &found, wanted.dry_run, &mut done)? {
                done.in_use.push(found.filled.digest.clone());
                kept.push(found);
            }
        }
        if let Some(max_bytes) = wanted.max_bytes {
            shrink(kept, max_bytes, |found| remove(disk, found, wanted.dry_run, &mut done))?;
        }
        if !wanted.dry_run {
            sweep::forget_names(disk)?;
            sweep::forget_sources(disk)?;
        }
        Ok(done)
    }

    /// Removes images that nobody uses until the rest is no larger than this; what was removed goes in the background.
    pub(super) fn evict(&self, max_bytes: u64) {
        let disk = &self.inner.disk;
        let mut is_any_removed = false;
        let evicted = list::images(disk).and_then(|images| {
            shrink(images, max_bytes, |found| {
                let thing = Thing::image(&found.filled.digest);
                let Removal::Aside(path) = hold::set_aside(disk, &thing)? else { return Ok(false) };
                self.inner.janitor.remove(disk, path);
                is_any_removed = true;
                Ok(true)
            })?;
            if is_any_removed { sweep::forget_names(disk) } else { Ok(()) }
        });
        if let Err(error) = evicted {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "the store may be larger than it is to be");
        }
    }
}

/// Removes images, the one unused for longest first, until the rest is no larger than this or none can be removed.
fn shrink(
    mut images: Vec<Found>,
    max_bytes: u64,
    mut remove: impl FnMut(&Found) -> Result<bool, StoreError>,
) -> Result<(), StoreError> {
    let mut size: u64 = images.iter().map(|found| found.size).sum();
    images.sort_by(|a, b| (a.last_used, &a.filled.digest).cmp(&(b.last_used, &b.filled.digest)));
    for found in images {
        if size <= max_bytes {
            break;
        }
        if remove(&found)? {
            size -= found.size;
        }
    }
    Ok(())
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
                    done.left.push(sweep::explain(&error));
                }
            }
        }
    }
    done.removed.push(digest.clone());
    done.freed_bytes += found.size;
    Ok(true)
}
