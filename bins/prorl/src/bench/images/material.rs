//! The image that is measured with: this machine's own programs, up to a size.

use std::{
    collections::VecDeque,
    fs, io,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};
use serde::Serialize;
use tokio::process::Command;

use super::Args;

/// Where its files are taken from, in this order.
const SOURCES: &[&str] =
    &["/usr/bin", "/usr/lib/python3", "/usr/lib/python3.11", "/usr/lib/git-core", "/usr/lib", "/usr/share"];

/// The largest file that is taken, in bytes: an image of a few huge ones would be no image.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// What the image is.
#[derive(Clone, Debug, Serialize)]
pub(super) struct About {
    pub(super) files: u64,
    pub(super) bytes: u64,
}

/// A folder with an image in it, and place for what is made of it. It is removed when dropped.
pub(super) struct Material {
    folder: tempfile::TempDir,
    about: About,
}

impl Material {
    pub(super) fn make(args: &Args) -> anyhow::Result<Self> {
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix("prorl-bench-");
        let folder = match &args.dir {
            Some(dir) => builder.tempdir_in(dir).with_context(|| format!("--dir {}", dir.display()))?,
            None => builder.tempdir()?,
        };
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let mut copy = Copy { left: args.size_mb << 20, about: About { files: 0, bytes: 0 } };
        let tree = folder.path().join("tree");
        for name in ["bin", "dev", "etc", "proc", "root", "sys", "tmp", "var/tmp"] {
            fs::create_dir_all(tree.join(name))?;
        }
        for source in SOURCES {
            copy.folder(Path::new(source), &tree)?;
        }
        ensure!(copy.about.files > 0, "there are no programs in {}", SOURCES.join(", "));
        Ok(Self { folder, about: copy.about })
    }

    pub(super) fn about(&self) -> &About {
        &self.about
    }

    /// The image, unpacked.
    pub(super) fn tree(&self) -> PathBuf {
        self.folder.path().join("tree")
    }

    /// A place for something that is made.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

struct Copy {
    left: u64,
    about: About,
}

impl Copy {
    fn folder(&mut self, source: &Path, tree: &Path) -> io::Result<()> {
        let mut folders = VecDeque::from([source.to_owned()]);
        while let Some(folder) = folders.pop_front() {
            let target = tree.join(folder.strip_prefix("/").unwrap_or(&folder));
            // What may not be read is not needed.
            let Ok(entries) = fs::read_dir(&folder) else { continue };
            fs::create_dir_all(&target)?;
            for entry in entries.flatten() {
                let (Ok(kind), to) = (entry.file_type(), target.join(entry.file_name())) else { continue };
                if self.left == 0 {
                    return Ok(());
                }
                if kind.is_dir() {
                    folders.push_back(entry.path());
                } else if kind.is_symlink() && fs::symlink_metadata(&to).is_err() {
                    symlink(fs::read_link(entry.path())?, to)?;
                } else if kind.is_file() && fs::symlink_metadata(&to).is_err() {
                    let size = entry.metadata().map_or(u64::MAX, |meta| meta.len());
                    if size <= MAX_FILE_BYTES && fs::copy(entry.path(), &to).is_ok() {
                        self.about.files += 1;
                        self.about.bytes += size;
                        self.left = self.left.saturating_sub(size);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Runs a program to its end.
pub(super) async fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.as_std().get_program().to_string_lossy().into_owned();
    let ran = command.kill_on_drop(true).output().await.with_context(|| format!("{name} does not start"))?;
    let words = String::from_utf8_lossy(&ran.stderr);
    ensure!(ran.status.success(), "{name} failed ({}): {}", ran.status, words.trim());
    Ok(())
}
