//! One writable layer over one folder of an image, and what other sandboxes have written between the two.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    mount::{MntFlags, mount, umount2},
};
use prorl_core::hello::StartFailure;

use super::{
    At, folders,
    root::{NO_DEVICES, make_dir},
    stack::Stack,
};
use crate::setup::{Setup, step};

/// What an overlay lies over.
pub(super) struct Lower<'a> {
    /// A folder of the image.
    pub(super) image: &'a Path,
    /// Where that is in the image's root.
    pub(super) path: &'a Path,
    /// The same folder of the layers that have it, from the top down.
    pub(super) layers: Vec<PathBuf>,
    /// Whether the image's is below them: a layer may hide it.
    pub(super) has_image: bool,
    /// All layers.
    pub(super) stack: &'a Stack,
}

impl<'a> Lower<'a> {
    pub(super) fn of(image: &'a Path, path: &'a Path, stack: &'a Stack) -> Result<Self, StartFailure> {
        let (layers, has_image) = stack.folders(path).at("read layers", &path.to_string_lossy())?;
        Ok(Self { image, path, layers, has_image, stack })
    }

    /// Returns the topmost folder.
    pub(super) fn top(&self) -> &Path {
        self.layers.first().map_or(self.image, PathBuf::as_path)
    }

    /// Returns them as an option of the mount, unless one has a name that means something there.
    fn option(&self) -> Option<String> {
        let folders = self.layers.iter().map(PathBuf::as_path).chain(self.has_image.then_some(self.image));
        let names: Vec<_> = folders.map(Path::to_string_lossy).collect();
        let is_plain = |name: &str| !name.contains([',', ':', '\\', char::REPLACEMENT_CHARACTER]);
        names.iter().all(|name| is_plain(name)).then(|| names.join(":"))
    }

    /// Refuses layers that have anything in a folder which can only be shown as it is in the image.
    pub(super) fn demand_nothing(&self) -> Result<(), StartFailure> {
        let is_empty = |folder: &PathBuf| fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
        if self.layers.iter().all(is_empty) {
            return Ok(());
        }
        Err(Errno::EINVAL).at(step::PUT_LAYERS, &format!("/{}", self.path.display()))
    }
}

/// Puts a writable layer over a folder. Tells whether the kernel takes that folder for the lower side.
pub(super) fn add_layer(
    setup: &Setup,
    lower: &Lower<'_>,
    upper: &Path,
    work: &Path,
    target: &str,
) -> Result<bool, StartFailure> {
    if overlay(lower, upper, work, target).is_err() {
        return Ok(false);
    }
    if setup.fakeroot && folders::is_foreign(lower.image, lower.path, lower.stack) {
        // The upper side of a mounted overlay must not be changed behind its back. Before it was known to be taken, it must
        // not either: folders in it would hide what is shown by other means then.
        umount2(target, MntFlags::empty()).at("unmount", target)?;
        folders::open(lower.image, lower.path, upper, lower.stack)?;
        overlay(lower, upper, work, target)?;
    }
    Ok(true)
}

pub(super) fn overlay(lower: &Lower<'_>, upper: &Path, work: &Path, target: &str) -> Result<(), StartFailure> {
    make_dir(work)?;
    // A folder with such a name is treated as one that the kernel refuses.
    let Some(folders) = lower.option() else { return Err(Errno::EINVAL).at(step::MOUNT, target) };
    // Whiteouts and the like are kept in user attributes; the trusted ones need root.
    let options =
        format!("lowerdir={folders},upperdir={},workdir={},userxattr", upper.to_string_lossy(), work.to_string_lossy());
    mount(Some("overlay"), target, Some("overlay"), NO_DEVICES, Some(options.as_str())).at(step::MOUNT, target)
}
