//! Digests of what a build depends on: base images, copied files, lock files.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::definition::{BaseImage, DefinitionFile, above_pattern};
use crate::{
    images::{Cancel, ImageError},
    store::Digest,
};

/// How much is read at once, in bytes.
const BUFFER_BYTES: usize = 1 << 18;

/// Something that a build depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Input {
    /// What it is: a path, or a reference to something elsewhere.
    pub(super) name: String,
    /// The digest of its content; of the reference itself where the content is elsewhere.
    pub(super) digest: Digest,
}

/// Returns the digest of bytes.
pub(super) fn of_bytes(bytes: &[u8]) -> Digest {
    Digest::from_bytes(Sha256::digest(bytes).into())
}

/// Returns the digest of a file's content.
pub(super) fn of_file(path: &Path, cancel: &Cancel) -> Result<Digest, ImageError> {
    let mut hash = Sha256::new();
    let mut file = File::open(path).map_err(|error| ImageError::at("open", path, error))?;
    add_content(&mut hash, &mut file, cancel).map_err(|stop| stop.at(path))?;
    Ok(Digest::from_bytes(hash.finalize().into()))
}

/// Returns the lock files and their digests, in the order of their names.
pub(super) fn of_locks(locks: &[PathBuf], cancel: &Cancel) -> Result<Vec<Input>, ImageError> {
    let mut inputs = Vec::new();
    for lock in locks {
        let path = std::path::absolute(lock).map_err(|error| ImageError::at("find lock file", lock, error))?;
        if !path.is_file() {
            let problem = if path.exists() { "is no file" } else { "is not there; it is named as a lock file" };
            return Err(ImageError::Source { image: lock.display().to_string(), problem: problem.to_owned() });
        }
        inputs.push(Input { name: path.display().to_string(), digest: of_file(&path, cancel)? });
    }
    inputs.sort_by(|a, b| a.name.cmp(&b.name));
    inputs.dedup();
    Ok(inputs)
}

/// Returns what a definition builds on, and the digests of that.
pub(super) fn of_bases(definition: &DefinitionFile, cancel: &Cancel) -> Result<Vec<Input>, ImageError> {
    let mut inputs = Vec::new();
    for base in definition.bases() {
        match base {
            BaseImage::Reference(reference) => {
                let digest = of_bytes(reference.as_bytes());
                inputs.push(Input { name: reference, digest });
            }
            BaseImage::Local(path) => inputs.push(of_path(&path, &path, cancel)?),
            BaseImage::Scratch(files) => {
                for file in files {
                    let read = above_pattern(&file).unwrap_or_else(|| file.clone());
                    inputs.push(of_path(&file, &read, cancel)?);
                }
            }
        }
    }
    Ok(inputs)
}

fn of_path(name: &Path, path: &Path, cancel: &Cancel) -> Result<Input, ImageError> {
    let meta = fs::metadata(path).map_err(|error| ImageError::at("read base", path, error))?;
    let digest = if meta.is_dir() { of_folder(path, cancel)? } else { of_file(path, cancel)? };
    Ok(Input { name: name.display().to_string(), digest })
}

/// Returns the digest of a listing of a folder: of everything below it the name, kind, mode and content, in the order of the
/// names. Times and owners are no part of it, so that a copy is the same.
fn of_folder(folder: &Path, cancel: &Cancel) -> Result<Digest, ImageError> {
    let mut hash = Sha256::new();
    let mut left = vec![PathBuf::new()];
    // A folder is listed when its turn comes; its own entries come next, before its siblings.
    while let Some(inner) = left.pop() {
        if cancel.is_cancelled() {
            return Err(ImageError::Cancelled);
        }
        let path = if inner.as_os_str().is_empty() { folder.to_owned() } else { folder.join(&inner) };
        // What is asked for may be a link; what is in it is taken as it is.
        let meta = if inner.as_os_str().is_empty() { fs::metadata(&path) } else { fs::symlink_metadata(&path) };
        let meta = meta.map_err(|error| ImageError::at("read base", &path, error))?;
        add_framed(&mut hash, inner.as_os_str().as_bytes());
        hash.update(meta.permissions().mode().to_le_bytes());
        let kind = meta.file_type();
        if kind.is_dir() {
            let names: io::Result<Vec<_>> =
                fs::read_dir(&path).and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
            let mut names = names.map_err(|error| ImageError::at("list base", &path, error))?;
            names.sort_unstable();
            left.extend(names.into_iter().rev().map(|name| inner.join(name)));
        } else if kind.is_symlink() {
            let target = fs::read_link(&path).map_err(|error| ImageError::at("read base", &path, error))?;
            add_framed(&mut hash, target.as_os_str().as_bytes());
        } else if kind.is_file() {
            let mut content = Sha256::new();
            let mut file = File::open(&path).map_err(|error| ImageError::at("read base", &path, error))?;
            add_content(&mut content, &mut file, cancel).map_err(|stop| stop.at(&path))?;
            hash.update(content.finalize());
        } else {
            hash.update(meta.rdev().to_le_bytes());
        }
    }
    Ok(Digest::from_bytes(hash.finalize().into()))
}

/// Adds bytes so that none of them can be taken for what follows.
fn add_framed(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

/// Why a file was not read to its end.
enum Stop {
    Cancelled,
    Failed(io::Error),
}

impl Stop {
    fn at(self, path: &Path) -> ImageError {
        match self {
            Self::Cancelled => ImageError::Cancelled,
            Self::Failed(error) => ImageError::at("read", path, error),
        }
    }
}

fn add_content(hash: &mut Sha256, file: &mut File, cancel: &Cancel) -> Result<(), Stop> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        if cancel.is_cancelled() {
            return Err(Stop::Cancelled);
        }
        match file.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n_read) => hash.update(&buffer[..n_read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Stop::Failed(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    type Change = fn(&Path);

    #[test]
    fn a_folder_is_its_names_modes_and_contents() {
        let make = || {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join("a/b")).unwrap();
            fs::write(folder.path().join("a/file"), "content").unwrap();
            symlink("file", folder.path().join("a/link")).unwrap();
            folder
        };
        let digest = |folder: &tempfile::TempDir| of_folder(folder.path(), &Cancel::default()).unwrap();
        let (one, two) = (make(), make());
        assert_eq!(digest(&one), digest(&two));
        let changes: [(&str, Change); 5] = [
            ("content", |path| fs::write(path.join("a/file"), "Content").unwrap()),
            ("mode", |path| fs::set_permissions(path.join("a/file"), fs::Permissions::from_mode(0o700)).unwrap()),
            ("link", |path| {
                fs::remove_file(path.join("a/link")).unwrap();
                symlink("b", path.join("a/link")).unwrap();
            }),
            ("name", |path| fs::rename(path.join("a/b"), path.join("a/c")).unwrap()),
            ("more", |path| fs::write(path.join("b"), "").unwrap()),
        ];
        for (what, change) in changes {
            let other = make();
            change(other.path());
            assert_ne!(digest(&one), digest(&other), "{what}");
        }
    }

    #[test]
    fn bases_that_are_not_there_and_work_that_is_not_wanted_any_more_are_told() {
        let definition = |text: &str| DefinitionFile::new("a".into(), text.into());
        let missing = definition("Bootstrap: localimage\nFrom: /missing/base\n");
        let said = of_bases(&missing, &Cancel::default()).unwrap_err().to_string();
        assert_eq!(said, "failed to read base /missing/base");
        let folder = tempfile::tempdir().unwrap();
        let cancel = Cancel::default();
        cancel.cancel();
        let here = definition(&format!("Bootstrap: localimage\nFrom: {}\n", folder.path().display()));
        assert!(matches!(of_bases(&here, &cancel), Err(ImageError::Cancelled)));
        let pattern = definition(&format!("Bootstrap: scratch\n%files\n {}/*.txt /\n", folder.path().display()));
        let before = of_bases(&pattern, &Cancel::default()).unwrap();
        fs::write(folder.path().join("a.txt"), "").unwrap();
        let after = of_bases(&pattern, &Cancel::default()).unwrap();
        assert!(before[0].name == after[0].name && before[0].digest != after[0].digest);
    }
}
