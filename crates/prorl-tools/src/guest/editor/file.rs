//! Files as the editor reads and writes them: whole, regular, not too large, and never seen half written.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    },
    path::{Path, PathBuf},
};

use nix::{
    sys::statfs::{PROC_SUPER_MAGIC, SYSFS_MAGIC, fstatfs},
    unistd::{AccessFlags, access},
};

use crate::guest::sys;

/// Bytes of a file that the editor takes.
pub(super) const MAX_BYTES: u64 = 10 * 1024 * 1024;

/// A file that was read.
#[derive(Debug)]
pub(super) struct Opened {
    /// Where it is, without links.
    pub(super) path: PathBuf,
    pub(super) bytes: Vec<u8>,
    meta: Metadata,
}

/// Returns the path without links; of a file that is not there, or a link to nothing, at least that of its folder.
pub(super) fn real(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(err) if err.kind() == io::ErrorKind::NotFound => {
            let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Err(err) };
            Ok(fs::canonicalize(folder)?.join(name))
        }
        found => found,
    }
}

/// Says why a file cannot be read or written, in words for the agent.
pub(super) fn reason(path: &str, err: &io::Error) -> String {
    match err.kind() {
        io::ErrorKind::NotFound => format!("There is no file or folder {path}."),
        _ => format!("Cannot open {path}: {err}."),
    }
}

impl Opened {
    /// Reads a file.
    ///
    /// # Errors
    /// Why it cannot be read, or is nothing for an editor, in words for the agent.
    pub(super) fn read(shown: &str) -> Result<Self, String> {
        let path = fs::canonicalize(shown).map_err(|err| reason(shown, &err))?;
        // Looked at before it is opened, which already does something to a device or a pipe.
        let meta = fs::metadata(&path).map_err(|err| reason(shown, &err))?;
        if !meta.is_file() {
            return Err(format!("{shown} is no file and no folder, but a device, a pipe or a socket."));
        }
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
            .open(&path)
            .map_err(|err| reason(shown, &err))?;
        if fstatfs(&file).is_ok_and(|fs| [PROC_SUPER_MAGIC, SYSFS_MAGIC].contains(&fs.filesystem_type())) {
            return Err(format!("{shown} is made up by the kernel as it is read. Use execute_bash for it."));
        }
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|err| reason(shown, &err))?;
        let n_bytes = meta.len().max(bytes.len() as u64);
        if n_bytes > MAX_BYTES {
            return Err(format!(
                "{shown} has {n_bytes} bytes, and the editor takes files of {MAX_BYTES} at most. Use execute_bash for it, \
                 with `sed -n`, `head` or `grep`."
            ));
        }
        Ok(Self { path, bytes, meta })
    }

    /// Puts other bytes in the place of those that were read: at once, so that nobody reads half of them, where the folder
    /// allows it, and the file remains what it was. Mode and owner stay. Returns what is to be said about it, if anything.
    ///
    /// # Errors
    /// When it cannot be written; then it is as it was.
    pub(super) fn replace(&self, bytes: &[u8], file_bytes: Option<u64>) -> io::Result<Option<&'static str>> {
        check_len(bytes, file_bytes)?;
        access(&self.path, AccessFlags::W_OK)?;
        if self.meta.nlink() > 1 {
            self.overwrite(bytes)?;
            return Ok(Some("The file has several names (hard links), so it was written in place."));
        }
        match self.swap(bytes) {
            Ok(()) => Ok(None),
            // The folder takes no new file, a file cannot be put there (it is mounted), or its owner would be another.
            Err(err) if matches!(err.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::EBUSY)) => {
                self.overwrite(bytes)?;
                Ok(Some("Its folder takes no other file in its place, so it was written in place."))
            }
            Err(err) => Err(err),
        }
    }

    /// Writes another file and puts it in the place of this one.
    fn swap(&self, bytes: &[u8]) -> io::Result<()> {
        let new = Unnamed::write(&self.path, bytes, 0o600)?;
        let made = new.file.metadata()?;
        if (made.uid(), made.gid()) != (self.meta.uid(), self.meta.gid()) {
            fchown(&new.file, Some(self.meta.uid()), Some(self.meta.gid()))?;
        }
        // After the owner, with whose change the kernel takes bits away.
        new.file.set_permissions(Permissions::from_mode(self.meta.mode() & 0o7777))?;
        fs::rename(&new.path, &self.path)
    }

    /// Writes into the file itself, and undoes that when there is no room for all of it.
    fn overwrite(&self, bytes: &[u8]) -> io::Result<()> {
        let file = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(&self.path)?;
        let put = |bytes: &[u8]| file.write_all_at(bytes, 0).and_then(|()| file.set_len(bytes.len() as u64));
        put(bytes).inspect_err(|_| {
            // The room that the old bytes had is still the file's.
            let _restored = put(&self.bytes);
        })
    }

    /// Removes the file.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub(super) fn remove(&self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

/// The kernel holds tasks to their largest file, and not the guest.
fn check_len(bytes: &[u8], file_bytes: Option<u64>) -> io::Result<()> {
    match file_bytes {
        Some(most) if bytes.len() as u64 > most => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        _ => Ok(()),
    }
}

/// Makes a file where there is none, and the folders above it. Returns where it is, without links.
///
/// # Errors
/// When there is one, or it cannot be written; then there is none.
pub(super) fn create(path: &Path, bytes: &[u8], file_bytes: Option<u64>) -> io::Result<PathBuf> {
    check_len(bytes, file_bytes)?;
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).create(folder)?;
    }
    let path = real(path)?;
    let new = Unnamed::write(&path, bytes, 0o666)?;
    // A second name, unlike another one, cannot take the place of a file that somebody has made meanwhile.
    match fs::hard_link(&new.path, &path) {
        Err(err) if err.kind() != io::ErrorKind::AlreadyExists && !path.exists() => fs::rename(&new.path, &path)?,
        linked => linked?,
    }
    Ok(path)
}

/// A file under a name that nobody looks for, which it loses when this is dropped.
struct Unnamed {
    path: PathBuf,
    file: File,
}

impl Unnamed {
    /// Writes one beside another.
    fn write(beside: &Path, bytes: &[u8], mode: u32) -> io::Result<Self> {
        let mut name = OsString::from(".prorl-");
        name.push(sys::word());
        let path = beside.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path)?;
        let mut new = Self { path, file };
        new.file.write_all(bytes)?;
        Ok(new)
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        // It is gone when it has got the place of another.
        let _removed = fs::remove_file(&self.path);
    }
}

/// Tells whether anything is there, be it a link to nothing.
pub(super) fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Tells whether a path names a folder by its form: with a slash at its end.
pub(super) fn is_folder_form(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b"/") || path.file_name().is_none()
}
