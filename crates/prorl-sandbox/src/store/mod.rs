//! Where unpacked images and frozen layers are kept: one folder, shared by all processes of a user, on one machine or many.

mod digest;
mod error;
mod layer;
mod name;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

pub use self::{
    digest::{Digest, InvalidDigest},
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
    pub owner: Option<SandboxUser>,
    /// The guest's program, which removes what belongs to a fake root's other ids. Without it such layers are left, and said.
    pub guest: Option<PathBuf>,
}

impl StoreConfig {
    /// A store without a size limit.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), max_bytes: None, owner: None, guest: None }
    }
}

/// A store of images and layers.
#[derive(Clone, Debug)]
pub struct ImageStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: StoreConfig,
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
}

#[derive(Debug)]
struct HeldImage {
    filled: Filled,
    root: PathBuf,
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
}

impl ImageStore {
    /// Opens a store.
    ///
    /// # Errors
    /// When the folder cannot be made or read.
    pub fn open(config: StoreConfig) -> Result<Self, StoreError> {
        let at = |source: io::Error| StoreError::at("open store", &config.dir, source);
        fs::create_dir_all(config.dir.join("layers")).map_err(at)?;
        fs::create_dir_all(config.dir.join("images")).map_err(at)?;
        Ok(Self { inner: Arc::new(Inner { config }) })
    }

    /// Returns its folder.
    pub fn dir(&self) -> &Path {
        &self.inner.config.dir
    }

    /// Returns how it was opened.
    pub fn config(&self) -> &StoreConfig {
        &self.inner.config
    }
}
