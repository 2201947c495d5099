use std::{
    path::PathBuf,
    time::{Duration, SystemTime},
};

use super::{Digest, Filled, ImageName, LayerRecord};

/// An image, as a list of a store shows it.
#[derive(Clone, Debug)]
pub struct ImageEntry {
    /// What it is called by content.
    pub digest: Digest,
    /// Names that it was given, in order.
    pub names: Vec<ImageName>,
    /// What is known of it.
    pub filled: Filled,
    /// Its root folder.
    pub root: PathBuf,
    /// How many processes use it.
    pub n_refs: usize,
    /// When it was used last, to the minute, by the clock of the file system.
    pub last_used: SystemTime,
    /// What it takes, in bytes: its files, and 4 KiB for each entry.
    pub size: u64,
}

/// A layer, as a list of a store shows it.
#[derive(Clone, Debug)]
pub struct LayerEntry {
    /// What is known of it.
    pub record: LayerRecord,
    /// How many processes use it.
    pub n_refs: usize,
    /// What it takes, in bytes: its files, and 4 KiB for each entry.
    pub size: u64,
}

/// What to remove from a store, beside what dead processes have left.
#[derive(Clone, Debug, Default)]
pub struct Collect {
    /// Images, the one unused for longest first, until the rest takes no more than so many bytes.
    pub max_bytes: Option<u64>,
    /// Images that nobody has used for so long.
    pub unused_for: Option<Duration>,
    /// These images.
    pub remove: Vec<Digest>,
    /// Only tell what would be removed.
    pub dry_run: bool,
}

/// What was removed from a store.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// Images.
    pub removed: Vec<Digest>,
    /// What they and [`layers`](Self::layers) took, in bytes.
    pub freed_bytes: u64,
    /// Images that were to be removed by name or by age, and are in use.
    pub in_use: Vec<Digest>,
    /// Images that were to be removed by name, and are not there.
    pub missing: Vec<Digest>,
    /// Layers that no living process uses.
    pub layers: Vec<String>,
    /// How many things that dead processes left half made or half removed.
    pub n_leftovers: usize,
    /// What could not be removed, and why, for people.
    pub left: Vec<String>,
}

/// What is reckoned for each entry beside its bytes: an inode, and the rest of its last block.
const ENTRY_BYTES: u64 = 4096;

/// Returns what an image or layer takes, in bytes.
pub(super) fn size_of(bytes: u64, entries: u64) -> u64 {
    bytes.saturating_add(entries.saturating_mul(ENTRY_BYTES))
}
