//! What other sandboxes have written, between an image and what this one writes.
//!
//! The kernel knows what a stack of layers means once it is mounted. Whatever is made in the writable layer beforehand must
//! not hide what the layers below it say, so this module reads them as overlayfs does.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use prorl_core::hello::StartFailure;

use super::{
    At,
    root::{bind_mount, on_stage},
};
use crate::setup::step;

/// Where layers are shown on the stage, under names that overlayfs can take.
pub(super) const LAYERS: &str = "/layers";

/// The mark of a folder that hides what is below it.
const OPAQUE: &str = "user.overlay.opaque";

/// What is at a path.
pub(super) enum Found {
    /// A symbolic link, and where it leads.
    Link(PathBuf),
    /// A folder and its mode.
    Folder { mode: u32 },
    /// Something else.
    Other,
}

impl Found {
    /// Tells what is at a path on the stage, which has this metadata.
    pub(super) fn at(path: &Path, meta: &fs::Metadata) -> io::Result<Self> {
        if meta.is_symlink() { fs::read_link(path).map(Self::Link) } else { Ok(Self::of(meta)) }
    }

    pub(super) fn of(meta: &fs::Metadata) -> Self {
        if meta.is_dir() { Self::Folder { mode: meta.mode() & 0o7777 } } else { Self::Other }
    }
}

/// What the layers say of a path.
pub(super) enum Said {
    /// Nothing: the image has the word.
    Nothing,
    /// That there is no such thing, whatever is below them.
    Gone,
    /// That this is there.
    Here(Found),
}

/// What one layer says of a path.
enum Word {
    /// Nothing; whether it hides what lower ones say.
    None {
        hides: bool,
    },
    Gone,
    Here(PathBuf, fs::Metadata),
}

/// Layers, from the top down.
pub(super) struct Stack {
    roots: Vec<PathBuf>,
}

impl Stack {
    /// Shows layers on the stage. `folders` are those of the host, the lowest first.
    pub(super) fn show(folders: &[OsString]) -> Result<Self, StartFailure> {
        let mut roots = Vec::new();
        for (number, folder) in folders.iter().enumerate() {
            let name = folder.to_string_lossy();
            let (source, root) = (on_stage(Path::new(folder)), Path::new(LAYERS).join(number.to_string()));
            fs::read_dir(&source).at(step::OPEN_LAYER, &name)?;
            fs::create_dir(&root).at("make folder", &root.to_string_lossy())?;
            bind_mount(&source, &root).map_err(|failure| StartFailure { target: name.to_string(), ..failure })?;
            roots.insert(0, root);
        }
        Ok(Self { roots })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.roots.is_empty()
    }

    /// Returns their roots, from the top down.
    pub(super) fn roots(&self) -> &[PathBuf] {
        &self.roots
    }

    /// Returns what the layers say of a path relative to the root, of which the last part alone may be a link.
    pub(super) fn find(&self, path: &Path) -> io::Result<Said> {
        for root in &self.roots {
            match word(root, path)? {
                Word::None { hides: false } => {}
                Word::None { hides: true } | Word::Gone => return Ok(Said::Gone),
                Word::Here(at, meta) => return Found::at(&at, &meta).map(Said::Here),
            }
        }
        Ok(Said::Nothing)
    }

    /// Tells whether the layers say anything of a path; what they say is not to be hidden.
    pub(super) fn has(&self, path: impl AsRef<Path>) -> Result<bool, StartFailure> {
        let path = path.as_ref();
        Ok(!matches!(self.find(path).at("read layers", &path.to_string_lossy())?, Said::Nothing))
    }

    /// Returns the folders of the layers that are merged at a path, from the top down, and whether the image's is too.
    pub(super) fn folders(&self, path: &Path) -> io::Result<(Vec<PathBuf>, bool)> {
        let mut folders = Vec::new();
        for root in &self.roots {
            match word(root, path)? {
                Word::None { hides: false } => {}
                Word::Here(at, meta) if meta.is_dir() => {
                    let hides = is_opaque(&at);
                    folders.push(at);
                    if hides {
                        return Ok((folders, false));
                    }
                }
                Word::None { hides: true } | Word::Gone | Word::Here(..) => return Ok((folders, false)),
            }
        }
        Ok((folders, true))
    }

    /// Makes the folders above `path` in `base`, which is to lie over the layers: with the modes that they have there.
    pub(super) fn make_above(&self, base: &Path, path: &Path) -> Result<(), StartFailure> {
        let above: Vec<_> = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()).collect();
        for folder in above.into_iter().rev() {
            let name = folder.to_string_lossy();
            let mode = match self.find(folder).at("read layers", &name)? {
                Said::Here(Found::Folder { mode }) => mode,
                _ => 0o755,
            };
            make_folder(&base.join(folder), mode).at("make folder", &name)?;
        }
        Ok(())
    }
}

/// Makes a folder of this mode, whatever the umask, unless there is one.
pub(super) fn make_folder(path: &Path, mode: u32) -> io::Result<()> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(mode)),
    }
}

fn word(root: &Path, path: &Path) -> io::Result<Word> {
    let mut at = root.to_owned();
    let mut hides = false;
    let mut parts = path.iter().peekable();
    while let Some(part) = parts.next() {
        at.push(part);
        let meta = match fs::symlink_metadata(&at) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Word::None { hides }),
            meta => meta?,
        };
        if parts.peek().is_none() {
            return Ok(if is_whiteout(&meta) { Word::Gone } else { Word::Here(at, meta) });
        }
        if !meta.is_dir() {
            return Ok(Word::Gone); // removed, or something that holds no other
        }
        hides |= is_opaque(&at);
    }
    let meta = fs::symlink_metadata(root)?;
    Ok(Word::Here(at, meta))
}

/// Tells whether a file is the mark of one that was removed.
fn is_whiteout(meta: &fs::Metadata) -> bool {
    meta.file_type().is_char_device() && meta.rdev() == 0
}

fn is_opaque(folder: &Path) -> bool {
    let mut value = [0; 1];
    rustix::fs::lgetxattr(folder, OPAQUE, &mut value[..]) == Ok(1) && value == *b"y"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(stack: &Stack, path: &str) -> &'static str {
        match stack.find(Path::new(path)).unwrap() {
            Said::Nothing => "nothing",
            Said::Gone => "gone",
            Said::Here(Found::Link(_)) => "link",
            Said::Here(Found::Folder { .. }) => "folder",
            Said::Here(Found::Other) => "file",
        }
    }

    #[test]
    fn layers_are_read_as_the_kernel_reads_them() {
        let folder = tempfile::tempdir().unwrap();
        let [top, low] = ["top", "low"].map(|name| folder.path().join(name));
        for path in ["top/a/new", "top/made", "low/a/b", "low/made/old", "low/gone", "low/plain"] {
            fs::create_dir_all(folder.path().join(path)).unwrap();
        }
        std::os::unix::fs::symlink("a", top.join("link")).unwrap();
        fs::write(top.join("plain"), "").unwrap();
        let mode = rustix::fs::Mode::empty();
        rustix::fs::mknodat(rustix::fs::CWD, top.join("gone"), rustix::fs::FileType::CharacterDevice, mode, 0).unwrap();
        let none = rustix::fs::XattrFlags::empty();
        if rustix::fs::setxattr(top.join("made"), OPAQUE, b"y", none).is_err() {
            return; // no file system for layers
        }
        let stack = Stack { roots: vec![top.clone(), low.clone()] };
        for (path, expected) in [
            ("", "folder"),
            ("a", "folder"),
            ("a/new", "folder"),
            ("a/b", "folder"),
            ("a/none", "nothing"),
            ("none/deep", "nothing"),
            ("link", "link"),
            ("link/deep", "gone"),
            ("plain", "file"),
            ("gone", "gone"),
            ("gone/deep", "gone"),
            ("made", "folder"),
            ("made/old", "gone"),
        ] {
            assert_eq!(said(&stack, path), expected, "{path}");
        }
        let folders = |path: &str| stack.folders(Path::new(path)).unwrap();
        assert_eq!(folders("a"), (vec![top.join("a"), low.join("a")], true));
        assert_eq!(folders("made"), (vec![top.join("made")], false));
        assert_eq!(folders("plain"), (vec![], false));
        assert_eq!(folders("none"), (vec![], true));
    }
}
