//! Where unpacked images and frozen layers are kept: one folder, shared by all processes of a user, on one machine or many.
//!
//! ```text
//! store.json            format of the store
//! images/HEX/           an image: root/, image.json, used (its time is that of the last use)
//! layers/ID/            a layer: root/, layer.json
//! names/NAME            digest of the image of that name
//! sources/HASH          digest of the image that a source was unpacked to
//! owners/TOKEN          the pulse of a process that has something here
//! refs/HEX-or-ID/TOKEN  who uses an image or a layer
//! claims/HASH.NUMBER    who makes an image
//! staging/TOKEN.COUNT   what is being made
//! trash/..              what is being removed
//! ```
//!
//! Nothing relies on locks of the kernel, which not every file system of a cluster has, nor on any process's tidy end. Things
//! appear whole in their places, by one rename, and leave them by one; marks of processes, which others can tell to be dead,
//! say who uses or makes what (see `pulse`, `claim` and `hold`). What a dead process has left takes nothing but space, until
//! the next collection.

pub(crate) mod claim;
mod collect;
mod digest;
mod disk;
mod ensure;
mod entry;
mod error;
mod flight;
mod hold;
mod image;
mod janitor;
mod layer;
mod list;
mod name;
mod owner;
pub(crate) mod pulse;
pub(crate) mod remove;
mod rights;
mod staging;
mod sweep;
#[cfg(test)]
mod tests;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;

use self::{
    disk::Disk,
    flight::Flights,
    hold::{Hold, Holds},
    janitor::Janitor,
};

#[cfg(feature = "images")]
pub(crate) use self::remove::remove_tree;
pub use self::{
    digest::{Digest, InvalidDigest},
    entry::{Collect, Collected, ImageEntry, LayerEntry},
    error::StoreError,
    layer::{Base, Layer, LayerRecord, LayerStaging, LayerUsers},
    name::{ImageName, InvalidImageName},
};
use crate::SandboxUser;

/// Where a store is, and how large it may grow.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Its folder. It is made when it is missing.
    pub dir: PathBuf,
    /// Size above which images that nobody uses are removed, oldest use first, in bytes. Nothing is removed without one.
    pub max_bytes: Option<u64>,
    /// To whom unpacked files are given, where this process is root: the user that its sandboxes are mapped to.
    /// An image that belongs to another user is refused, and made again where its source is asked for and nobody uses it.
    pub owner: Option<SandboxUser>,
    /// The guest's program, which removes what belongs to a fake root's other ids, and below which registries' images are fetched.
    /// Without it such layers are left, and said, and a fetch goes on when this process is killed.
    pub guest: Option<PathBuf>,
}

impl StoreConfig {
    /// A store without a size limit.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), max_bytes: None, owner: None, guest: None }
    }
}

/// A store of images and layers. Clones are the same store, and so is what has the same folder, in any process.
///
/// Two threads work for it, each from when it is first needed: one tells other machines that this process lives, and one
/// removes layers. They end when the last clone, image and layer of it in this process is dropped; that drop waits for what
/// is being removed. A forked copy of the process has copies of its handles: dropping them there changes nothing, and
/// whatever else they are used for is refused.
#[derive(Clone, Debug)]
pub struct ImageStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    flights: Flights,
    holds: Mutex<Holds>,
    /// Before the disk, so that its work is done by a process that is marked as alive.
    janitor: Janitor,
    disk: Arc<Disk>,
}

/// What a source was found to be by looks alone: the same key means the same content, without reading it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceKey(String);

impl SourceKey {
    /// Makes one from everything that tells this content from others, such as path, size and times of a file, or a digest.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns that text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What an image was made of and what it holds.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Filled {
    /// Of the content: of the image file, of the manifest, or of the tree.
    pub digest: Digest,
    /// Where it came from, for people.
    pub source: String,
    /// Files, folders and links.
    pub entries: u64,
    /// Bytes of files, holes not counted.
    pub bytes: u64,
    /// Variables that the image sets for its programs.
    pub env: Vec<(String, String)>,
    /// What was left out or changed on the way, for people.
    pub notes: Vec<String>,
}

/// An image of a store, unpacked. While one lives, the image is not removed.
#[derive(Clone, Debug)]
pub struct StoredImage {
    held: Arc<HeldImage>,
    is_new: bool,
}

#[derive(Debug)]
struct HeldImage {
    filled: Filled,
    root: PathBuf,
    _hold: Hold,
}

impl StoredImage {
    /// Returns its root folder.
    pub fn root(&self) -> &Path {
        &self.held.root
    }

    /// Returns what is known of it.
    pub fn filled(&self) -> &Filled {
        &self.held.filled
    }

    /// Tells whether it was made for the call that returned it, rather than found.
    pub fn is_new(&self) -> bool {
        self.is_new
    }
}

impl PartialEq for StoredImage {
    fn eq(&self, other: &Self) -> bool {
        self.held.root == other.held.root
    }
}

impl Eq for StoredImage {}

/// Why an image did not come to be: the store's fault or its maker's.
#[derive(Debug, thiserror::Error)]
pub enum EnsureError<E> {
    /// The store's.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The maker's.
    #[error(transparent)]
    Make(E),
    /// Whoever asked for it has gone, before it was this call's turn to make it.
    #[error("nobody waits for the image any more")]
    Cancelled,
}

impl ImageStore {
    /// Opens a store, and makes it if its folder is missing or empty. One that can only be read opens too: what it has can be
    /// used, and what needs writing is refused.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`] for a folder of something else, [`StoreError::Newer`] for a store of a version to come, and when
    /// the folder cannot be made or read.
    pub fn open(config: StoreConfig) -> Result<Self, StoreError> {
        let disk = Arc::new(Disk::open(config)?);
        let inner = Inner { flights: Flights::default(), holds: Mutex::default(), janitor: Janitor::new(), disk };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Sees whether the user of root's sandboxes ([`StoreConfig::owner`]) can get to it, as those have to. For anybody but root
    /// there is nothing to see.
    ///
    /// # Errors
    /// [`StoreError::Closed`], which names the folder in the way.
    pub fn check_way(&self) -> Result<(), StoreError> {
        match self.inner.disk.owner() {
            Some(owner) => rights::check_way(self.dir(), owner),
            None => Ok(()),
        }
    }

    /// Returns its folder.
    pub fn dir(&self) -> &Path {
        &self.inner.disk.config.dir
    }

    /// Returns how it was opened.
    pub fn config(&self) -> &StoreConfig {
        &self.inner.disk.config
    }
}
