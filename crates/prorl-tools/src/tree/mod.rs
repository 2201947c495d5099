//! Files and folders on their way over the channel: the records that they are made of, who reads them from a file system and who
//! makes files of them again. The same code serves both sides and both ways.
//!
//! A record is a [frame](prorl_core::frame) with an [`Entry`]. The first is the root, whose path is empty; a folder comes before
//! what is in it, and all of that before anything else. So whoever takes records in holds the folders that it is inside of as
//! descriptors, makes each entry in the innermost of them, and never looks a path up: no link can lead it anywhere. What has
//! come is kept in a folder of its own until all has come and its SHA-256 is right; only then is it moved to where it belongs.
//!
//! Permission bits come over; owners, times, extended attributes, and that two names are one file do not.

mod place;
mod read;
mod write;

use std::{io, path::PathBuf};

use serde::{Deserialize, Serialize};

pub use read::TreeReader;
pub use write::TreeWriter;

use crate::wire::{Bytes, TreeSummary};

/// How deep below the root an entry may be.
pub const MAX_DEPTH: usize = 128;

/// Bytes of a path below the root at most, and of where a link leads.
pub const MAX_PATH_BYTES: usize = 4096;

/// Bytes of content in one record at most.
pub const MAX_DATA_BYTES: usize = 64 * 1024;

/// Bytes of the body of a record at most: those of content or of two paths, and what is around them.
const MAX_RECORD_BYTES: usize = MAX_DATA_BYTES + 1024;

/// One record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// A folder.
    Folder {
        /// Its path below the root.
        path: Bytes,
        /// Its permission bits.
        mode: u32,
    },
    /// A file, whose content follows.
    File {
        /// Its path below the root.
        path: Bytes,
        /// Its permission bits.
        mode: u32,
        /// Bytes of its content.
        size: u64,
    },
    /// The next bytes of a file.
    Data(Bytes),
    /// A symbolic link.
    Link {
        /// Its path below the root.
        path: Bytes,
        /// Where it leads.
        target: Bytes,
    },
    /// Nothing follows.
    End(TreeSummary),
}

/// What may come over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeLimits {
    /// Bytes of all files together.
    pub max_bytes: u64,
    /// Bytes of one file.
    pub max_file_bytes: u64,
    /// Files, folders and links.
    pub max_entries: u64,
    /// Whether links may lead out of the tree.
    pub outside_links: OutsideLinks,
}

impl Default for TreeLimits {
    /// Returns 1 GiB and 100,000 entries, and no link that leads outside.
    fn default() -> Self {
        Self { max_bytes: 1 << 30, max_file_bytes: u64::MAX, max_entries: 100_000, outside_links: OutsideLinks::Refuse }
    }
}

/// What becomes of a link that may lead out of the tree that it is in: an absolute one, or one with too many `..`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutsideLinks {
    /// It is an error. Whoever opens files of the tree by their names then opens no others, whatever made the tree.
    Refuse,
    /// It is made as it is.
    Keep,
}

/// What becomes of files that are there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfPresent {
    /// They stay, and nothing is made.
    Refuse,
    /// They are replaced.
    Replace,
}

/// Why a file or folder does not come over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TreeError {
    /// The file system does not let it.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was to be done.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// It is more than is wanted, or of another kind, or in the way of something.
    #[error("{0}")]
    Refused(String),
    /// The records are wrong: whoever sent them, or what they came through, is at fault.
    #[error("{0}")]
    Record(String),
}

impl TreeError {
    /// Returns the error and its cause in one line.
    pub fn told(&self) -> String {
        match self {
            Self::Io { source, .. } => format!("{self}: {source}"),
            Self::Refused(_) | Self::Record(_) => self.to_string(),
        }
    }
}

/// Counts entries and bytes as they come.
///
/// # Errors
/// When there are more than the limits allow.
fn count(summary: &mut TreeSummary, limits: &TreeLimits, file_bytes: Option<u64>) -> Result<(), TreeError> {
    summary.n_entries += 1;
    if summary.n_entries > limits.max_entries {
        return Err(too_many(limits));
    }
    if let Some(bytes) = file_bytes {
        if bytes > limits.max_file_bytes {
            let most = limits.max_file_bytes;
            return Err(TreeError::Refused(format!("a file has {bytes} bytes, and {most} are the most")));
        }
        summary.n_files += 1;
        summary.n_bytes = summary.n_bytes.saturating_add(bytes);
        if summary.n_bytes > limits.max_bytes {
            return Err(TreeError::Refused(format!("the files have more than {} bytes", limits.max_bytes)));
        }
    }
    Ok(())
}

fn too_many(limits: &TreeLimits) -> TreeError {
    TreeError::Refused(format!("there are more than {} files, folders and links", limits.max_entries))
}

/// Returns a summary of nothing.
fn nothing() -> TreeSummary {
    TreeSummary { n_files: 0, n_entries: 0, n_bytes: 0, sha256: [0; 32] }
}

#[cfg(test)]
mod tests;
