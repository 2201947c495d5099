//! How much may be unpacked, how much has been, and whether to go on.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::ImageError;

/// What an image may hold. An image that holds more is refused as soon as it does, and nothing of it is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Files, folders and links.
    pub max_entries: u64,
    /// Bytes of files, holes not counted.
    pub max_bytes: u64,
    /// How many bytes of files one packed byte may stand for, on the whole. The first [`RATIO_FREE_BYTES`] are free.
    pub max_ratio: u64,
}

/// What an image may hold before it is asked how well it is packed, in bytes.
pub const RATIO_FREE_BYTES: u64 = 1 << 30;

impl Default for UnpackLimits {
    /// 4 million entries, 1 TiB, 200 bytes from one.
    fn default() -> Self {
        Self { max_entries: 4_000_000, max_bytes: 1 << 40, max_ratio: 200 }
    }
}

/// Who wants to know how far it has come. Called from several threads, often.
pub trait Progress: Send + Sync {
    /// A new part of the work begins, such as `unpack`, of so many packed bytes where that is known.
    fn begin(&self, part: &str, total: Option<u64>) {
        let _ = (part, total);
    }

    /// So many more of them are done.
    fn advance(&self, n_bytes: u64) {
        let _ = n_bytes;
    }
}

/// Nobody wants to know.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {}

/// A word by which work on other threads is ended. Copies are the same word.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Says it.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Tells whether it was said.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counts what comes out of one image, on any number of threads.
pub(crate) struct Meter<'a> {
    pub(crate) image: &'a str,
    pub(crate) progress: &'a dyn Progress,
    limits: UnpackLimits,
    packed_bytes: u64,
    cancel: &'a Cancel,
    entries: AtomicU64,
    bytes: AtomicU64,
}

impl<'a> Meter<'a> {
    /// `packed_bytes` is what there is to unpack.
    pub(crate) fn new(
        image: &'a str,
        packed_bytes: u64,
        limits: UnpackLimits,
        cancel: &'a Cancel,
        progress: &'a dyn Progress,
    ) -> Self {
        Self { image, progress, limits, packed_bytes, cancel, entries: AtomicU64::new(0), bytes: AtomicU64::new(0) }
    }

    /// Counts a file, folder or link that is about to be made.
    pub(crate) fn entry(&self) -> Result<(), ImageError> {
        if self.cancel.is_cancelled() {
            return Err(ImageError::Cancelled);
        }
        let entries = self.entries.fetch_add(1, Ordering::Relaxed) + 1;
        if entries > self.limits.max_entries {
            return Err(self.too_large(format!("{entries} files"), self.limits.max_entries.to_string()));
        }
        Ok(())
    }

    /// Counts bytes of a file that are about to be written.
    pub(crate) fn data(&self, n_bytes: u64) -> Result<(), ImageError> {
        if self.cancel.is_cancelled() {
            return Err(ImageError::Cancelled);
        }
        let bytes = self.bytes.fetch_add(n_bytes, Ordering::Relaxed).saturating_add(n_bytes);
        if bytes > self.limits.max_bytes {
            return Err(self.too_large(format!("{bytes} bytes"), self.limits.max_bytes.to_string()));
        }
        if bytes > RATIO_FREE_BYTES && bytes / self.limits.max_ratio.max(1) > self.packed_bytes {
            let found = format!("{bytes} bytes in {} packed ones", self.packed_bytes);
            return Err(self.too_large(found, format!("{} from one", self.limits.max_ratio)));
        }
        Ok(())
    }

    /// Returns how many entries and bytes were counted.
    pub(crate) fn counted(&self) -> (u64, u64) {
        (self.entries.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    fn too_large(&self, found: String, limit: String) -> ImageError {
        ImageError::TooLarge { image: self.image.to_owned(), found, limit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_told_by_name() {
        let cancel = Cancel::default();
        let limits = UnpackLimits { max_entries: 2, max_bytes: 4 << 30, max_ratio: 10 };
        let meter = Meter::new("a.sif", 1 << 20, limits, &cancel, &Quiet);
        meter.entry().unwrap();
        meter.entry().unwrap();
        assert!(meter.entry().unwrap_err().to_string().contains("3 files, and the limit is 2"));
        meter.data(RATIO_FREE_BYTES).unwrap();
        assert!(meter.data(1 << 20).unwrap_err().to_string().contains("the limit is 10 from one"));
        let meter = Meter::new("a.sif", u64::MAX, limits, &cancel, &Quiet);
        meter.data(4 << 30).unwrap();
        assert!(meter.data(1).unwrap_err().to_string().contains("the limit is 4294967296"));
        cancel.cancel();
        assert!(matches!(meter.entry(), Err(ImageError::Cancelled)));
    }
}
