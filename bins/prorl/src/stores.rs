//! Where the store of images is, for every command that uses one.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use nix::unistd::geteuid;
use prorl_guest::Guest;
use prorl_sandbox::{
    SandboxUser,
    images::Unpacker,
    store::{ImageStore, StoreConfig},
};

use crate::sandboxes::Sandboxes;

/// The store's folder in a folder of users' data.
const OWN_FOLDER: &str = "prorl/store";

/// Where root keeps it if its own home is closed to the sandboxes' user, as it usually is.
const OF_THE_MACHINE: &str = "/var/lib/prorl/store";

/// What is written in place of a folder where there is to be no store; a folder of that name is `./none`.
const NONE: &str = "none";

/// Which store is meant; a flag of every command that uses one.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct StoreArgs {
    /// Folder of the store of images, or `none` for no store [default: prorl/store in `XDG_DATA_HOME` or ~/.local/share; for
    /// root, where that is closed to other users, /var/lib/prorl/store].
    #[arg(long, env = "PRORL_STORE", value_name = "DIR")]
    pub(crate) store: Option<PathBuf>,
}

impl StoreArgs {
    /// Returns its folder.
    pub(crate) fn dir(&self) -> anyhow::Result<PathBuf> {
        match &self.store {
            Some(_) if self.is_none() => bail!("--store {NONE}: there is no store of images"),
            Some(dir) => std::path::absolute(dir).with_context(|| format!("--store {}", dir.display())),
            None => default_dir(),
        }
    }

    /// Tells whether there is to be no store at all.
    pub(crate) fn is_none(&self) -> bool {
        self.store.as_deref() == Some(Path::new(NONE))
    }

    /// Tells whether there is one; opening it would make it.
    pub(crate) fn is_there(&self) -> bool {
        self.dir().is_ok_and(|dir| dir.is_dir())
    }

    /// Tells whether nothing is where it would be. Something that cannot be looked at is there.
    pub(crate) fn is_missing(&self) -> anyhow::Result<bool> {
        let dir = self.dir()?;
        Ok(fs::symlink_metadata(dir).is_err_and(|error| error.kind() == io::ErrorKind::NotFound))
    }

    /// Opens the store. `guest` is what removes the files of a fake root's other ids.
    pub(crate) fn open(&self, guest: &Guest, owner: Option<SandboxUser>) -> anyhow::Result<ImageStore> {
        self.open_limited(guest, owner, None)
    }

    /// Opens the store, which is to be held to a size.
    pub(crate) fn open_limited(
        &self,
        guest: &Guest,
        owner: Option<SandboxUser>,
        max_bytes: Option<u64>,
    ) -> anyhow::Result<ImageStore> {
        let dir = self.dir()?;
        let config = StoreConfig { max_bytes, owner, guest: Some(guest.path().to_owned()), ..StoreConfig::new(dir) };
        let store = ImageStore::open(config).context("the store of images cannot be used")?;
        if let Err(problem) = store.check_way() {
            tracing::warn!("{problem}");
        }
        Ok(store)
    }
}

/// The store of a service.
#[derive(Clone, Debug)]
pub(crate) struct ServedStore {
    pub(crate) args: StoreArgs,
    /// The size that it is held to, in bytes.
    pub(crate) max_bytes: Option<u64>,
}

impl ServedStore {
    /// Opens it. A store that nobody has named may be missing: a service can do without one.
    pub(crate) fn unpacker(&self, sandboxes: &Sandboxes) -> anyhow::Result<Option<Unpacker>> {
        if self.args.is_none() {
            return Ok(None);
        }
        let is_named = self.args.store.is_some();
        let opened =
            sandboxes.owner().and_then(|owner| self.args.open_limited(&sandboxes.guest, owner, self.max_bytes));
        match opened {
            Ok(store) => Ok(Some(Unpacker { apptainer: sandboxes.apptainer(), ..Unpacker::new(store) })),
            Err(error) if is_named => Err(error),
            Err(error) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "there is no store of images; --store names a place for one"
                );
                Ok(None)
            }
        }
    }
}

/// Returns where the store of this user is.
fn default_dir() -> anyhow::Result<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")));
    match data {
        Some(data) if !geteuid().is_root() || is_open_to_all(&data) => Ok(data.join(OWN_FOLDER)),
        _ if geteuid().is_root() => Ok(PathBuf::from(OF_THE_MACHINE)),
        Some(_) | None => {
            bail!("there is no home to keep images in: neither XDG_DATA_HOME nor HOME is set; name --store")
        }
    }
}

/// Tells whether everybody may pass through a folder, or through those of it that are there: sandboxes of root belong to
/// another user.
fn is_open_to_all(folder: &Path) -> bool {
    let there = folder.ancestors().filter_map(|path| fs::metadata(path).ok());
    there.into_iter().all(|meta| meta.permissions().mode() & 0o001 != 0)
}

/// Reads a size such as `500M` or `20G`; bytes without a letter, which stands for a power of 1024.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let expected = || format!("expected a number with K, M, G or T, such as 20G, found {text:?}");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err(expected()),
    };
    let number: u64 = digits.parse().map_err(|_| expected())?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than can be counted"))
}

/// Counts things for people, by a word that takes an `s`.
pub(crate) fn show_count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Writes a size for people.
pub(crate) fn show_size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in
            [("0", 0), ("512", 512), ("2k", 2 << 10), ("500M", 500 << 20), ("20GiB", 20 << 30), ("1T", 1 << 40)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "M", "-1", "1.5G", "10X", "99999999999T"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_store_is_nowhere() {
        let args = |text: &str| StoreArgs { store: Some(text.into()) };
        assert!(args("none").is_none() && !args("none").is_there() && args("none").dir().is_err());
        assert!(!args("./none").is_none() && args("./none").is_missing().unwrap());
    }

    #[test]
    fn a_closed_folder_on_the_way_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        assert!(!is_open_to_all(&inner), "it is its owner's alone");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let is_temp_open = folder.path().ancestors().skip(1).all(is_open_to_all);
        assert_eq!(is_open_to_all(&inner), is_temp_open);
    }
}
