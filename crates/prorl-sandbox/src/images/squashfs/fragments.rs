//! Blocks that hold the ends of many files, kept for a while once they are unpacked.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;

use super::tables::DataBlock;

/// Memory for unpacked fragments, in bytes. Files that are next to each other share them, so that few are enough; those that
/// were packed once because others are the same may lie further back.
const CACHED_BYTES: usize = 16 << 20;

/// An unpacked fragment. Files are slices of it.
pub(super) type Fragment = Arc<Vec<u8>>;

/// The fragments that were used last. Shared by all threads.
pub(super) struct Fragments {
    /// Latest use last.
    cached: Mutex<VecDeque<(DataBlock, Fragment)>>,
    most: usize,
}

impl Fragments {
    /// Makes room for some whose length is at most `block_len` bytes.
    pub(super) fn new(block_len: usize) -> Self {
        let most = (CACHED_BYTES / block_len).clamp(4, 256);
        Self { cached: Mutex::new(VecDeque::with_capacity(most)), most }
    }

    pub(super) fn get(&self, block: DataBlock) -> Option<Fragment> {
        let mut cached = self.cached.lock();
        let idx = cached.iter().rposition(|(other, _)| *other == block)?;
        let found = cached.remove(idx)?;
        let fragment = Arc::clone(&found.1);
        cached.push_back(found);
        Some(fragment)
    }

    /// Remembers one. Two threads may have unpacked the same; that is harmless.
    ///
    /// Returns the memory of one that nobody needs any more, if there is any.
    pub(super) fn put(&self, block: DataBlock, fragment: Fragment) -> Option<Vec<u8>> {
        let mut cached = self.cached.lock();
        cached.push_back((block, fragment));
        let oldest = if cached.len() > self.most { cached.pop_front() } else { None };
        drop(cached);
        oldest.and_then(|(_, fragment)| Arc::into_inner(fragment))
    }
}
