use std::{
    io,
    path::{Path, PathBuf},
};

use super::Digest;

/// Why a store does not do what it is asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The system refused something.
    #[error("failed to {action} {path}")]
    Io {
        /// What was being done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The folder holds something else.
    #[error("{dir} is not empty and no store of images: it has no store.json")]
    NotAStore {
        /// The folder.
        dir: PathBuf,
    },
    /// A newer version of prorl made the store.
    #[error("the store {dir} has format {found}, and this version knows formats up to {known}")]
    Newer {
        /// The store.
        dir: PathBuf,
        /// Its format.
        found: u64,
        /// The newest format that is known here.
        known: u64,
    },
    /// Something had to be written into a store that cannot be written.
    #[error("failed to {action} {path}: this process may only read the store")]
    ReadOnly {
        /// What was to be done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// What says what an image or a layer is cannot be understood.
    #[error("{path} is damaged: {problem}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The store has no such image.
    #[error("the store {dir} has no image {digest}")]
    NoImage {
        /// The store.
        dir: PathBuf,
        /// The image.
        digest: Digest,
    },
    /// An image is larger than all images together may be.
    #[error("{image} takes {size} bytes in the store, and the limit of the whole store is {limit}")]
    TooLarge {
        /// Where it came from.
        image: String,
        /// Its size, in bytes.
        size: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// What was being made was removed meanwhile: other machines have taken this process for dead, because it stood still.
    #[error("{path} was removed while it was being filled: this process was taken for dead")]
    Lost {
        /// Where it was being made.
        path: PathBuf,
    },
    /// Somebody has been removing it for seconds.
    #[error("{path} cannot be used: {who} is removing it, and stands still")]
    Busy {
        /// The image or layer.
        path: PathBuf,
        /// Who.
        who: String,
    },
    /// Root's sandboxes belong to a user who cannot get to the store.
    #[error(
        "user {user}, to whom sandboxes belong, cannot pass through {folder} to the store {dir}: choose another store (--store), or \
         open that folder (chmod a+x)"
    )]
    Closed {
        /// The store.
        dir: PathBuf,
        /// The folder above it, or itself, that is closed.
        folder: PathBuf,
        /// The user, with the numbers of user and group.
        user: String,
    },
    /// Root has unpacked the image for the sandboxes of another user, who alone may be able to read it.
    #[error(
        "{root} belongs to user {owner}, and sandboxes to user {user}: choose that user (--sandbox-user) or another store (--store), or \
         remove the image when nobody uses it"
    )]
    OtherOwner {
        /// The image.
        root: PathBuf,
        /// Its user, with the numbers of user and group.
        owner: String,
        /// The user of sandboxes here, with both numbers.
        user: String,
    },
    /// A store does not survive a fork.
    #[error("the store {dir} was opened by a process of which this one is a forked copy: open it again")]
    Forked {
        /// The store.
        dir: PathBuf,
    },
}

impl StoreError {
    /// Names what the system refused to whoever only wanted to read, or is outside of a store as yet.
    pub(super) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    /// Tells whether the rights of this process were at fault.
    pub(super) fn is_refusal(&self) -> bool {
        let (Self::Io { source, .. } | Self::ReadOnly { source, .. }) = self else { return false };
        source.kind() == io::ErrorKind::PermissionDenied
    }

    /// Names what could not be written into a store; tells one that cannot be written from other trouble.
    pub(crate) fn at(action: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if super::disk::is_closed(&source) {
            Self::ReadOnly { action, path, source }
        } else {
            Self::Io { action, path, source }
        }
    }
}
