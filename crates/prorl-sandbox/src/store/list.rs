//! What a store has.

use std::{collections::HashMap, fs, io, path::Path, time::SystemTime};

use super::{
    Digest, Filled, ImageEntry, ImageName, ImageStore, LayerEntry, StoreError,
    disk::{Disk, IMAGES, LAYERS, NAMES, ROOT},
    entry::size_of,
    hold::{Thing, n_refs},
    image, layer, pulse,
};

/// An image that is there.
pub(super) struct Found {
    pub(super) filled: Filled,
    pub(super) size: u64,
    pub(super) last_used: SystemTime,
}

impl ImageStore {
    /// Returns all images, the one used last first. One whose record is damaged is left out, with a warning.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn list(&self) -> Result<Vec<ImageEntry>, StoreError> {
        let disk = &self.inner.disk;
        let mut names = names(disk)?;
        let entries = images(disk)?.into_iter().map(|found| {
            let thing = Thing::image(&found.filled.digest);
            let mut names = names.remove(&found.filled.digest).unwrap_or_default();
            names.sort_unstable();
            Ok(ImageEntry {
                digest: found.filled.digest.clone(),
                names,
                filled: found.filled,
                root: thing.place(disk).join(ROOT),
                n_refs: n_refs(disk, &thing)?,
                last_used: found.last_used,
                size: found.size,
            })
        });
        let mut entries = entries.collect::<Result<Vec<_>, StoreError>>()?;
        entries.sort_by(|a, b| (b.last_used, &b.digest).cmp(&(a.last_used, &a.digest)));
        Ok(entries)
    }

    /// Returns all layers, in no order.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn list_layers(&self) -> Result<Vec<LayerEntry>, StoreError> {
        let disk = &self.inner.disk;
        let mut layers = Vec::new();
        for id in list(&disk.folder(LAYERS))? {
            let thing = Thing::layer(&id);
            match layer::read(&thing.place(disk)) {
                Ok(Some(record)) => {
                    let size = size_of(record.bytes, record.entries);
                    layers.push(LayerEntry { record, n_refs: n_refs(disk, &thing)?, size });
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "a layer is left out"),
            }
        }
        Ok(layers)
    }
}

/// Returns all images whose records can be read.
pub(super) fn images(disk: &Disk) -> Result<Vec<Found>, StoreError> {
    let mut images = Vec::new();
    for hex in list(&disk.folder(IMAGES))? {
        let Ok(digest) = Digest::try_from(format!("sha256:{hex}")) else { continue };
        let place = Thing::image(&digest).place(disk);
        match image::read(&place, &digest) {
            Ok(Some(filled)) => {
                let last_used = image::last_used(&place).unwrap_or(SystemTime::UNIX_EPOCH);
                images.push(Found { size: size_of(filled.bytes, filled.entries), filled, last_used });
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "an image is left out"),
        }
    }
    Ok(images)
}

/// Returns all names by image.
pub(super) fn names(disk: &Disk) -> Result<HashMap<Digest, Vec<ImageName>>, StoreError> {
    let folder = disk.folder(NAMES);
    let mut names: HashMap<_, Vec<_>> = HashMap::new();
    for file in list(&folder)? {
        if let (Some(name), Ok(Some(digest))) = (image::name_of(&file), image::read_name(&folder.join(&file))) {
            names.entry(digest).or_default().push(name);
        }
    }
    Ok(names)
}

/// Returns the names in a folder of the store, none where there is no folder.
pub(super) fn list(folder: &Path) -> Result<Vec<String>, StoreError> {
    let at = |source: io::Error| StoreError::io("list", folder, source);
    let entries = match fs::read_dir(folder) {
        Err(error) if pulse::is_gone(&error) => return Ok(Vec::new()),
        entries => entries.map_err(at)?,
    };
    entries.map(|entry| Ok(entry.map_err(at)?.file_name().to_string_lossy().into_owned())).collect()
}
