use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{Digest, ImageStore, StoreError};

/// What a layer lies over: it means nothing over anything else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Base {
    /// The host's own programs.
    Host,
    /// An image of a store.
    Image(Digest),
    /// An unpacked image somewhere else, its links resolved, or an image file.
    Path(PathBuf),
}

/// Whose the files of a layer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerUsers {
    /// All are the sandbox user's own.
    Own,
    /// Some are those of a fake root's range of other ids, which a sandbox on top has to have too.
    Range,
}

/// What is known of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// Its name in the store.
    pub id: String,
    /// The image it lies over.
    pub base: Base,
    /// The layers between it and the image, lowest first.
    pub below: Vec<String>,
    /// Whose its files are.
    pub users: LayerUsers,
    /// Files, folders, links and marks of what was removed.
    pub entries: u64,
    /// Bytes of files, holes not counted.
    pub bytes: u64,
}

/// A read-only layer of a store: what one sandbox has written, to lie under others. While one lives, it is not removed.
#[derive(Clone, Debug)]
pub struct Layer {
    held: Arc<HeldLayer>,
}

#[derive(Debug)]
struct HeldLayer {
    record: LayerRecord,
    root: PathBuf,
}

impl Layer {
    /// Returns what is known of it.
    pub fn record(&self) -> &LayerRecord {
        &self.held.record
    }

    /// Returns the folder that lies over the image's root.
    pub fn root(&self) -> &Path {
        &self.held.root
    }
}

/// A layer that is being filled. Dropping it without [`publish`](Self::publish) removes it.
#[derive(Debug)]
pub struct LayerStaging {
    id: String,
    store: ImageStore,
    folder: PathBuf,
}

impl LayerStaging {
    /// Returns the layer's name to be.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the empty folder that is to become the layer's root.
    pub fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    /// Makes it a layer of the store, whole and at once.
    ///
    /// # Errors
    /// When it cannot be written; nothing of it is left then.
    pub fn publish(self, record: LayerRecord) -> Result<Layer, StoreError> {
        let layers = self.store.dir().join("layers");
        let target = layers.join(&self.id);
        fs::rename(&self.folder, &target).map_err(|source| StoreError::at("publish layer", &target, source))?;
        Ok(Layer { held: Arc::new(HeldLayer { record, root: target.join("root") }) })
    }
}

impl ImageStore {
    /// Makes the place of a new layer.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn stage_layer(&self) -> Result<LayerStaging, StoreError> {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let id = format!("{}-{number}", std::process::id());
        let folder = self.dir().join("layers").join(format!(".{id}"));
        fs::create_dir_all(folder.join("root")).map_err(|source| StoreError::at("make layer", &folder, source))?;
        Ok(LayerStaging { id, store: self.clone(), folder })
    }
}
