//! The folders that the files of a layer lie in, wherever links lead inside of the image.

use std::{
    collections::VecDeque,
    os::fd::{AsFd as _, OwnedFd},
    rc::Rc,
};

use rustix::{fs::readlinkat, io::Errno};

use super::{Layers, Place, place_of};
use crate::images::{
    ImageError,
    tree::{self, Look, open_folder, open_inside},
};

/// Most links that are followed on the way to one folder.
const MAX_LINKS: usize = 40;

impl Layers<'_> {
    /// Returns the folder that an entry is in, made if it is missing.
    pub(super) fn place(&mut self, parent: &[u8], whole: &[u8]) -> Result<Rc<Place>, ImageError> {
        if let Some((path, place)) = &self.last
            && path == parent
        {
            return Ok(Rc::clone(place));
        }
        let found = match open_inside(&self.tree.root, parent) {
            Err(Errno::NOENT) => self.make_parents(parent, whole)?,
            found => found.map_err(|error| self.no_way(parent, whole, error))?,
        };
        let place = Rc::new(place_of(found).map_err(|error| self.tree.at("look at", parent, error))?);
        self.last = Some((parent.to_vec(), Rc::clone(&place)));
        Ok(place)
    }

    /// Makes the folders of a path that are missing, also those that a link on the way leads to.
    fn make_parents(&mut self, parent: &[u8], whole: &[u8]) -> Result<OwnedFd, ImageError> {
        let mut left: VecDeque<Vec<u8>> = parent.split(|byte| *byte == b'/').map(<[u8]>::to_vec).collect();
        let mut path: Vec<u8> = Vec::new();
        let mut n_links = 0;
        let mut here = open_inside(&self.tree.root, b"").map_err(|error| self.tree.at("open folder", b"", error))?;
        while let Some(part) = left.pop_front() {
            if part.is_empty() {
                continue;
            }
            let next = if path.is_empty() { part.clone() } else { [&path[..], &part].join(&b'/') };
            here = match open_inside(&self.tree.root, &next) {
                Ok(there) => there,
                Err(Errno::NOENT) => match tree::make_folder(here.as_fd(), &part) {
                    Ok(()) => {
                        self.tree.meter.entry()?;
                        let made = open_folder(&here, &part).map_err(|error| self.tree.at("open", &next, error))?;
                        let look = Look { mode: 0o755, mtime: (0, 0), attributes: &[] };
                        self.tree.finish_folder(&made, &next, look)?;
                        made
                    }
                    Err(Errno::EXIST) => {
                        n_links += 1;
                        let target =
                            readlinkat(&here, part.as_slice(), Vec::new()).ok().filter(|_| n_links <= MAX_LINKS);
                        let Some(target) = target else {
                            return Err(self.damaged(whole, "lies behind links that lead nowhere"));
                        };
                        let target = target.as_bytes();
                        for part in target.split(|byte| *byte == b'/').rev() {
                            left.push_front(part.to_vec());
                        }
                        if target.starts_with(b"/") {
                            path.clear();
                        }
                        let back = open_inside(&self.tree.root, &path);
                        here = back.map_err(|error| self.tree.at("open folder", &path, error))?;
                        continue;
                    }
                    Err(error) => return Err(self.tree.at("make folder", &next, error)),
                },
                Err(error) => return Err(self.no_way(&next, whole, error)),
            };
            path = next;
        }
        Ok(here)
    }

    /// Explains why the folder `path`, in which `whole` is to lie, cannot be opened.
    fn no_way(&self, path: &[u8], whole: &[u8], error: Errno) -> ImageError {
        match error {
            Errno::NOTDIR => self.damaged(whole, "lies in something that is no folder"),
            Errno::LOOP => self.damaged(whole, "lies behind links that lead in a circle"),
            error => self.tree.at("open folder", path, error),
        }
    }
}
