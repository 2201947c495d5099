//! Names and modes of what a node has on disk, and how it is taken away.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    unistd::geteuid,
};
use serde::{Deserialize, Serialize};

/// How names of instance folders begin. Others are not looked at.
pub(crate) const PREFIX: &str = "node-";

/// The file in an instance folder that says where its processes are; see [`Origin`].
pub(crate) const ORIGIN: &str = "node";

/// What that file is called until it is whole.
pub(crate) const NEW_ORIGIN: &str = "node.new";

/// The bit in the mode of a folder of all instances that says that we made it, and may remove it. It is the sticky bit, which
/// means nothing where only the owner may write. A folder that somebody else has made for us stays.
pub(crate) const OURS: u32 = 0o1000;

/// The folder of records.
pub(crate) const BOXES: &str = "boxes";

/// The folder of the sandboxes' own folders.
pub(crate) const RUN: &str = "run";

/// The guest as a file, where one was wanted.
pub(crate) const GUEST: &str = "guest";

/// The machine, boot and pid namespace in which the process numbers of an instance mean something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// Host name.
    pub(crate) host: String,
    /// The kernel's random name for this boot.
    pub(crate) boot_id: String,
    /// Inode number of the pid namespace.
    pub(crate) pid_namespace: u64,
}

/// Returns the mode of a folder that the sandboxes' user may pass through: it is another one where this is root.
pub(crate) fn open_mode() -> u32 {
    if geteuid().is_root() { 0o711 } else { 0o700 }
}

/// Makes a folder with exactly this mode, whatever the umask.
pub(crate) fn make(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().mode(mode).create(path)?; // never more, and then not less
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Locks an instance, or returns `None` when somebody has locked it otherwise or taken it away meanwhile.
///
/// Its server and its keeper hold it locked, shared, for as long as they live. It is the folder itself that is locked, as
/// systemd-tmpfiles, which leaves such a folder and all in it alone, understands it; a file in it could be removed as an old
/// one.
pub(crate) fn lock(instance: &Path, how: FlockArg) -> io::Result<Option<Flock<File>>> {
    let opened = File::options().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(instance)?;
    let lock = match Flock::lock(opened, how) {
        Ok(lock) => lock,
        Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
        Err((_, error)) => return Err(error.into()),
    };
    // One that was removed between the opening and the locking locks nothing.
    match fs::symlink_metadata(instance) {
        Ok(named) if named.ino() == lock.metadata()?.ino() => Ok(Some(lock)),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes what a sandbox had on disk: its own folder, then its record, which says that there may be one.
pub(crate) fn remove_box(instance: &Path, id: &str) -> io::Result<()> {
    gone(fs::remove_dir_all(instance.join(RUN).join(id)))?;
    gone(fs::remove_file(instance.join(BOXES).join(id)))
}

/// Removes an instance.
///
/// Only what an instance consists of is removed, so that a folder which merely looks like one is left with what is in it. What
/// says whose it is goes after what it is needed for.
pub(crate) fn remove_instance(instance: &Path) -> io::Result<()> {
    for name in [BOXES, RUN] {
        gone(fs::remove_dir_all(instance.join(name)))?;
    }
    for name in [GUEST, NEW_ORIGIN, ORIGIN] {
        gone(fs::remove_file(instance.join(name)))?;
    }
    remove_empty(instance)
}

/// Removes an empty instance, and the folder of all instances if it was the only one and we made it.
pub(crate) fn remove_empty(instance: &Path) -> io::Result<()> {
    gone(fs::remove_dir(instance))?;
    if let Some(dir) = instance.parent()
        && fs::symlink_metadata(dir).is_ok_and(|meta| meta.mode() & OURS != 0)
    {
        let _ = fs::remove_dir(dir); // others may be in it
    }
    Ok(())
}

/// Takes for done what somebody else has done.
pub(super) fn gone(removed: io::Result<()>) -> io::Result<()> {
    removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// Returns the ids of an instance's records.
pub(crate) fn boxes(instance: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(instance.join(BOXES)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Returns the path of a sandbox's record.
pub(crate) fn record(instance: &Path, id: &str) -> PathBuf {
    instance.join(BOXES).join(id)
}
