//! Marks by which a layer removes what those below it have left.

use std::{
    hash::BuildHasher as _,
    os::fd::{AsFd as _, OwnedFd},
};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, statat};

use super::{Layers, Place, names, place_of};
use crate::images::{
    ImageError,
    tree::{open_folder, open_inside, text},
};

/// What begins the name of a mark that something of the layers below is removed.
pub(super) const WHITEOUT: &[u8] = b".wh.";

/// What begins the names of marks that are about the folder they are in, or about nothing any more.
const WHITEOUT_META: &[u8] = b".wh..wh.";

/// The mark that everything of the layers below is removed from its folder.
const OPAQUE: &[u8] = b".wh..wh..opq";

impl Layers<'_> {
    pub(super) fn whiteout(&mut self, parent: &[u8], name: &[u8], whole: &[u8]) -> Result<(), ImageError> {
        let Ok(place) = open_inside(&self.tree.root, parent) else {
            return Ok(()); // there is nothing that could be removed
        };
        let place = place_of(place).map_err(|error| self.tree.at("look at", parent, error))?;
        if name == OPAQUE {
            return self.clear(place, whole);
        }
        if name.starts_with(WHITEOUT_META) {
            return Ok(());
        }
        match &name[WHITEOUT.len()..] {
            b"" | b"." | b".." => {
                let image = self.tree.meter.image.to_owned();
                Err(ImageError::Refused { image, entry: text(whole), problem: "would remove what is no file" })
            }
            name => {
                let inside = self.hide(&place, name, whole)?;
                inside.map_or(Ok(()), |inside| self.clear(inside, whole))
            }
        }
    }

    /// Removes all that is in a folder, except what this layer has made.
    fn clear(&mut self, place: Place, whole: &[u8]) -> Result<(), ImageError> {
        if self.n_laid == 1 {
            return Ok(()); // nothing lies below
        }
        let mut left = vec![place];
        while let Some(place) = left.pop() {
            self.tree.meter.data(0)?; // which asks whether anybody still waits
            // Nothing of the layers below comes back; and folders that are emptied over and over would take for ever.
            if !self.cleared.insert(place.inode) {
                continue;
            }
            for name in names(&place.fd).map_err(|error| self.tree.at("read folder", whole, error))? {
                left.extend(self.hide(&place, &name, whole)?);
            }
        }
        Ok(())
    }

    /// Removes one thing that lies below. What this layer has made stays; a folder in which it has made something is returned,
    /// as there may be more in it.
    fn hide(&mut self, place: &Place, name: &[u8], whole: &[u8]) -> Result<Option<Place>, ImageError> {
        let Ok(found) = statat(&place.fd, name, AtFlags::SYMLINK_NOFOLLOW) else {
            return Ok(None);
        };
        let is_folder = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        let is_fresh = self.n_laid == 1 || self.fresh.contains(&self.mark(place.inode, name));
        if is_folder && (is_fresh || self.touched.contains(&found.st_ino)) {
            let fd = open_folder(&place.fd, name).map_err(|error| self.tree.at("open folder", whole, error))?;
            return Ok(Some(Place { fd, inode: found.st_ino }));
        }
        if !is_fresh {
            self.displace(place.fd.as_fd(), name, whole)?;
        }
        Ok(None)
    }

    fn mark(&self, inode: u64, name: &[u8]) -> u64 {
        self.hasher.hash_one((inode, name))
    }

    /// Remembers that this layer makes something there, where anything lies below that could be removed.
    pub(super) fn note_fresh(&mut self, place: &Place, name: &[u8]) -> Result<(), ImageError> {
        if self.n_laid == 1 {
            return Ok(());
        }
        self.fresh.insert(self.mark(place.inode, name));
        let mut inode = place.inode;
        let mut above: Option<OwnedFd> = None;
        while self.touched.insert(inode) {
            let folder = above.as_ref().unwrap_or(&place.fd);
            let next = openat(folder, c"..", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
            let next = next.and_then(place_of).map_err(|error| self.tree.at("look at", name, error))?;
            inode = next.inode;
            above = Some(next.fd);
        }
        Ok(())
    }
}
