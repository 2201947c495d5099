//! The file systems that a sandbox may write to: whether one is full.

use std::{os::fd::OwnedFd, time::Duration};

use parking_lot::Mutex;
use rustix::fs::{StatFs, fstatfs};
use tokio::time::Instant;

use super::log::Spell;
use crate::{DiskPlace, Exceeded};

/// How long there must have been space for the next time without it to be told.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Disk {
    places: [(DiskPlace, OwnedFd); 2],
    spells: Mutex<[Spell; 2]>,
}

impl Disk {
    pub(super) fn new(layer: OwnedFd, tmp: OwnedFd) -> Self {
        Self { places: [(DiskPlace::Layer, layer), (DiskPlace::Tmp, tmp)], spells: Mutex::default() }
    }

    /// Returns what is full and has not been told.
    pub(super) fn look(&self, now: Instant) -> Vec<Exceeded> {
        let mut spells = self.spells.lock();
        let news = self.places.iter().zip(spells.iter_mut()).filter_map(|((place, fd), spell)| {
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
