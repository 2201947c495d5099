//! The file systems that a sandbox may write to: whether one is full.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rustix::fs::{StatFs, fstatfs};
use tokio::time::Instant;

use super::{log::Spell, shmem::used};
use crate::{DiskPlace, Exceeded};

/// How long there must have been space for the next time without it to be told.
const PAUSE: Duration = Duration::from_secs(1);

/// The file systems, open.
#[derive(Clone, Debug)]
pub(super) struct Files(Arc<[(DiskPlace, OwnedFd); 2]>);

impl Files {
    pub(super) fn new(layer: OwnedFd, tmp: OwnedFd) -> Self {
        Self(Arc::new([(DiskPlace::Layer, layer), (DiskPlace::Tmp, tmp)]))
    }

    /// Returns how many bytes are in those of them that are in memory.
    pub(super) fn in_memory(&self) -> u64 {
        self.0.iter().filter_map(|(_, fd)| used(fd)).fold(0, u64::saturating_add)
    }
}

#[derive(Debug)]
pub(super) struct Disk {
    files: Files,
    spells: Mutex<[Spell; 2]>,
}

impl Disk {
    pub(super) fn new(files: Files) -> Self {
        Self { files, spells: Mutex::default() }
    }

    /// Returns what is full and has not been told.
    pub(super) fn look(&self, now: Instant) -> Vec<Exceeded> {
        let mut spells = self.spells.lock();
        let news = self.files.0.iter().zip(spells.iter_mut()).filter_map(|((place, fd), spell)| {
            let stat = fstatfs(fd).ok()?;
            let limit_bytes = stat.f_blocks.saturating_mul(u64::try_from(stat.f_bsize).unwrap_or_default());
            let full = Exceeded::Disk { place: *place, limit_bytes };
            spell.tells(is_full(&stat), now, PAUSE).then_some(full)
        });
        news.collect()
    }
}

/// Tells whether nothing more can be written, or no more files made. Where there is no limit, both numbers are 0.
fn is_full(stat: &StatFs) -> bool {
    (stat.f_blocks > 0 && stat.f_bavail == 0) || (stat.f_files > 0 && stat.f_ffree == 0)
}
