//! What is being made, out of sight until it is whole.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    StoreError,
    disk::{self, Disk, ROOT, STAGING},
    pulse,
};

/// A folder with a `root/` that is being filled. Dropping it without [`publish`](Self::publish) removes it, in the background.
#[derive(Debug)]
pub(super) struct Staging {
    disk: Arc<Disk>,
    folder: PathBuf,
    is_published: bool,
}

impl Staging {
    pub(super) fn new(disk: &Arc<Disk>) -> Result<Self, StoreError> {
        let folder = disk.folder(STAGING).join(disk.fresh_name()?);
        let staging = Self { disk: Arc::clone(disk), folder, is_published: false };
        for path in [staging.folder.clone(), staging.root()] {
            disk::make_folder(&path).map_err(|source| StoreError::at("make", &path, source))?;
        }
        if let Some(owner) = disk.owner() {
            let root = staging.root();
            let given = std::os::unix::fs::chown(&root, Some(owner.uid), Some(owner.gid));
            given.map_err(|source| StoreError::io("give away", &root, source))?;
        }
        Ok(staging)
    }

    pub(super) fn root(&self) -> PathBuf {
        self.folder.join(ROOT)
    }

    /// Writes a file beside the root.
    pub(super) fn write(&self, name: &str, text: &[u8]) -> Result<(), StoreError> {
        let path = self.folder.join(name);
        fs::write(&path, text).map_err(|source| self.explain("write", &path, source))
    }

    /// Tells whether others have removed it, as what a dead process has left.
    pub(super) fn is_lost(&self) -> bool {
        !self.folder.exists()
    }

    pub(super) fn lost(&self) -> StoreError {
        StoreError::Lost { path: self.folder.clone() }
    }

    /// Puts it in its place, whole and at once. Tells whether the place was free; if not, it is removed when dropped.
    pub(super) fn publish(&mut self, place: &Path) -> Result<bool, StoreError> {
        match fs::rename(&self.folder, place) {
            Ok(()) => {
                self.is_published = true;
                Ok(true)
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EEXIST | libc::ENOTEMPTY)) => Ok(false),
            Err(error) => Err(self.explain("publish", place, error)),
        }
    }

    fn explain(&self, action: &'static str, path: &Path, source: io::Error) -> StoreError {
        if self.is_lost() { self.lost() } else { StoreError::at(action, path, source) }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.is_published || !self.disk.maker.is_here() {
            return;
        }
        // Out of its place at once, and removed later: whoever drops it may be a thread that must not wait.
        let aside = self.disk.fresh_trash(STAGING);
        let aside = match fs::rename(&self.folder, &aside) {
            Ok(()) => aside,
            Err(error) if pulse::is_gone(&error) => return,
            Err(_) => self.folder.clone(),
        };
        self.disk.worker.remove(&self.disk.config, aside);
    }
}
