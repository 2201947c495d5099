//! Images that are in the store already.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use super::{
    Digest, Filled, HeldImage, ImageName, ImageStore, SourceKey, StoreError, StoredImage,
    disk::{self, Disk, IMAGE_RECORD, NAMES, ROOT, SOURCES, USED},
    hold::{Hold, Thing},
    pulse, rights,
};

/// How exactly the time of last use is kept.
const USE_GRAIN: Duration = Duration::from_mins(1);

/// What a key was found to stand for.
#[derive(Serialize, Deserialize)]
struct Memo {
    key: String,
    digest: Digest,
}

impl ImageStore {
    /// Returns an image, if the store has it, and counts as a use of it. Takes no longer with more images.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] when what is known of it cannot be read; [`StoreError::OtherOwner`] where this process is root and it
    /// was unpacked for another user than [`StoreConfig::owner`](super::StoreConfig::owner).
    pub fn image(&self, digest: &Digest) -> Result<Option<StoredImage>, StoreError> {
        let disk = &self.inner.disk;
        let thing = Thing::image(digest);
        let place = thing.place(disk);
        if !place.exists() {
            return Ok(None);
        }
        // The reference first, see the module `hold`.
        let hold = Hold::take(&self.inner, thing)?;
        let Some(filled) = read(&place, digest)? else { return Ok(None) };
        let root = place.join(ROOT);
        if let Some(owner) = disk.owner() {
            rights::check_owner(&root, owner)?;
        }
        note_use(&place);
        Ok(Some(StoredImage { held: Arc::new(HeldImage { filled, root, _hold: hold }), is_new: false }))
    }

    /// Returns the image of a name, if the store has it.
    ///
    /// # Errors
    /// As [`image`](Self::image).
    pub fn named(&self, name: &ImageName) -> Result<Option<StoredImage>, StoreError> {
        let path = name_path(&self.inner.disk, name);
        match read_name(&path)? {
            Some(digest) => self.image(&digest),
            None => Ok(None),
        }
    }

    /// Returns the image that a source was unpacked to, if the store has it.
    ///
    /// # Errors
    /// As [`image`](Self::image).
    pub fn known(&self, key: &SourceKey) -> Result<Option<StoredImage>, StoreError> {
        match self.digest_of(key)? {
            Some(digest) => self.image(&digest),
            None => Ok(None),
        }
    }

    /// Gives an image a name, which it takes from another that has it. An image may have many.
    ///
    /// # Errors
    /// [`StoreError::NoImage`], and when it cannot be written.
    pub fn set_name(&self, name: &ImageName, digest: &Digest) -> Result<(), StoreError> {
        let disk = &self.inner.disk;
        if !Thing::image(digest).place(disk).exists() {
            return Err(StoreError::NoImage { dir: self.dir().to_owned(), digest: digest.clone() });
        }
        disk.write(&name_path(disk, name), digest.as_str().as_bytes())
    }

    /// Takes a name away from the image that has it, and tells whether one had. The image stays.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove_name(&self, name: &ImageName) -> Result<bool, StoreError> {
        let path = name_path(&self.inner.disk, name);
        match fs::remove_file(&path) {
            Err(error) if pulse::is_gone(&error) => Ok(false),
            removed => removed.map(|()| true).map_err(|source| StoreError::at("remove", &path, source)),
        }
    }

    /// Looks up what a key stood for when somebody unpacked it last.
    pub(super) fn digest_of(&self, key: &SourceKey) -> Result<Option<Digest>, StoreError> {
        let path = memo_path(&self.inner.disk, key);
        let memo = read_small(&path)?.and_then(|text| serde_json::from_slice::<Memo>(&text).ok());
        // One that cannot be understood costs no more than unpacking again.
        Ok(memo.filter(|memo| memo.key == key.as_str()).map(|memo| memo.digest))
    }

    pub(super) fn remember(&self, key: &SourceKey, digest: &Digest) -> Result<(), StoreError> {
        let path = memo_path(&self.inner.disk, key);
        let memo = Memo { key: key.as_str().to_owned(), digest: digest.clone() };
        let text = serde_json::to_vec(&memo).map_err(|error| StoreError::at("write", &path, error.into()))?;
        self.inner.disk.write(&path, &text)
    }
}

fn memo_path(disk: &Disk, key: &SourceKey) -> PathBuf {
    disk.folder(SOURCES).join(disk::hash(key.as_str()))
}

/// Reads of which image a memo is.
pub(super) fn read_memo(path: &Path) -> Option<Digest> {
    let memo = read_small(path).ok()??;
    serde_json::from_slice::<Memo>(&memo).ok().map(|memo| memo.digest)
}

/// A name may hold slashes, and no `%`.
fn name_path(disk: &Disk, name: &ImageName) -> PathBuf {
    disk.folder(NAMES).join(name.as_str().replace('/', "%"))
}

/// Finds the name that a file of names is for.
pub(super) fn name_of(file: &str) -> Option<ImageName> {
    ImageName::try_from(file.replace('%', "/")).ok()
}

/// Reads of which image a name is.
pub(super) fn read_name(path: &Path) -> Result<Option<Digest>, StoreError> {
    let Some(text) = read_small(path)? else { return Ok(None) };
    let digest = Digest::try_from(String::from_utf8_lossy(&text).trim().to_owned());
    digest.map(Some).map_err(|error| StoreError::Damaged { path: path.to_owned(), problem: error.to_string() })
}

/// Reads what is known of an image in its place, if it is there.
pub(super) fn read(place: &Path, digest: &Digest) -> Result<Option<Filled>, StoreError> {
    let inode = || fs::symlink_metadata(place).ok().map(|meta| meta.ino());
    loop {
        let before = inode();
        if before.is_none() {
            return Ok(None);
        }
        let read = read_once(place, digest);
        // Without a reference, it may have been removed while it was read, and another may be there now.
        if read.is_ok() || inode() == before {
            return read.map(Some);
        }
    }
}

fn read_once(place: &Path, digest: &Digest) -> Result<Filled, StoreError> {
    let path = place.join(IMAGE_RECORD);
    let damaged = |problem: String| StoreError::Damaged { path: path.clone(), problem };
    let text = read_small(&path)?.ok_or_else(|| damaged("it is missing".to_owned()))?;
    let filled: Filled = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    if filled.digest != *digest {
        return Err(damaged(format!("it is of image {}", filled.digest)));
    }
    if !place.join(ROOT).is_dir() {
        return Err(damaged("it has no root folder beside it".to_owned()));
    }
    Ok(filled)
}

/// Reads a whole file, if it is there.
fn read_small(path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    match fs::read(path) {
        Err(error) if pulse::is_gone(&error) => Ok(None),
        text => text.map(Some).map_err(|source| StoreError::io("read", path, source)),
    }
}

/// Returns when an image was used last.
pub(super) fn last_used(place: &Path) -> io::Result<SystemTime> {
    fs::metadata(place.join(USED))?.modified()
}

/// Notes that an image is used now. A store that cannot be written keeps the time that it has.
fn note_use(place: &Path) {
    let is_fresh = last_used(place).is_ok_and(|last| last.elapsed().is_ok_and(|since| since < USE_GRAIN));
    if !is_fresh {
        let _ = pulse::touch(&place.join(USED));
    }
}
