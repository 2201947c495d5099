use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    Digest, ImageStore, StoreError,
    disk::{LAYER_RECORD, ROOT},
    hold::{Hold, Thing},
    pulse,
    staging::Staging,
};

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
    _hold: Hold,
    /// A layer is nothing without those below it.
    _below: Vec<Layer>,
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
    staging: Staging,
}

impl LayerStaging {
    /// Returns the layer's name to be.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the empty folder that is to become the layer's root. It belongs to [`StoreConfig::owner`](super::StoreConfig),
    /// if there is one and this process is root.
    pub fn root(&self) -> PathBuf {
        self.staging.root()
    }

    /// Makes it a layer of the store, whole and at once. The layers below it that are there are kept with it.
    ///
    /// # Errors
    /// When it cannot be written; nothing of it is left then.
    pub fn publish(mut self, mut record: LayerRecord) -> Result<Layer, StoreError> {
        record.id.clone_from(&self.id);
        let inner = &self.store.inner;
        let thing = Thing::layer(&self.id);
        let place = thing.place(&inner.disk);
        let text = serde_json::to_vec_pretty(&record)
            .map_err(|error| StoreError::at("write", &place.join(LAYER_RECORD), error.into()))?;
        self.staging.write(LAYER_RECORD, &text)?;
        let below = self.store.below(&record)?;
        // The reference first: it is in use from the moment on that it is there.
        let hold = Hold::take(inner, thing)?;
        if !self.staging.publish(&place)? {
            return Err(StoreError::at("publish", &place, io::Error::from_raw_os_error(libc::EEXIST)));
        }
        Ok(Layer { held: Arc::new(HeldLayer { record, root: place.join(ROOT), _hold: hold, _below: below }) })
    }
}

impl ImageStore {
    /// Makes the place of a new layer.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn stage_layer(&self) -> Result<LayerStaging, StoreError> {
        let id = random_id().map_err(|source| StoreError::io("read", Path::new(RANDOM), source))?;
        let staging = Staging::new(&self.inner.disk)?;
        Ok(LayerStaging { id, store: self.clone(), staging })
    }

    /// Returns a layer, if the store has it. It has it for as long as somebody has a handle of it.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] when what is known of it cannot be read.
    pub fn layer(&self, id: &str) -> Result<Option<Layer>, StoreError> {
        let is_plain = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let thing = Thing::layer(id);
        let place = thing.place(&self.inner.disk);
        if !is_plain || !place.exists() {
            return Ok(None);
        }
        // The reference first, see the module `hold`.
        let hold = Hold::take(&self.inner, thing)?;
        let Some(record) = read(&place)? else { return Ok(None) };
        let below = self.below(&record)?;
        Ok(Some(Layer { held: Arc::new(HeldLayer { record, root: place.join(ROOT), _hold: hold, _below: below }) }))
    }

    fn below(&self, record: &LayerRecord) -> Result<Vec<Layer>, StoreError> {
        // The next one keeps those below itself.
        let next = record.below.last().filter(|id| **id != record.id);
        next.map_or(Ok(Vec::new()), |id| Ok(self.layer(id)?.into_iter().collect()))
    }
}

/// Reads what is known of a layer in its place, if it is there.
pub(super) fn read(place: &Path) -> Result<Option<LayerRecord>, StoreError> {
    let path = place.join(LAYER_RECORD);
    let text = match fs::read(&path) {
        Err(error) if pulse::is_gone(&error) => return Ok(None),
        text => text.map_err(|source| StoreError::io("read", &path, source))?,
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| StoreError::Damaged { path, problem: error.to_string() })
}

/// Where the system has random bytes.
const RANDOM: &str = "/dev/urandom";

/// Makes a name that no layer has, had or will have on any machine.
fn random_id() -> io::Result<String> {
    let mut bytes = [0; 8];
    File::open(RANDOM)?.read_exact(&mut bytes)?;
    Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
}
