use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::store::{EnsureError, StoreError};

/// Why an image cannot be unpacked or built. Nothing of it is left then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The source is no image, or one of a kind that is not known.
    #[error("{image} {problem}")]
    Source {
        /// What was asked for, as it was written.
        image: String,
        /// What is wrong with it, and what was expected.
        problem: String,
    },
    /// The source is an image, and damaged.
    #[error("image {image} is damaged: {what} {problem}")]
    Damaged {
        /// The image.
        image: String,
        /// The part or the file inside.
        what: String,
        /// What is wrong with that.
        problem: String,
    },
    /// The image would write where it must not.
    #[error("image {image} is refused: {entry:?} {problem}")]
    Refused {
        /// The image.
        image: String,
        /// The file inside.
        entry: String,
        /// What it would do.
        problem: &'static str,
    },
    /// The image holds more than may be unpacked.
    #[error("image {image} is refused: it holds {found}, and the limit is {limit}")]
    TooLarge {
        /// The image.
        image: String,
        /// What was found, so far.
        found: String,
        /// What was allowed.
        limit: String,
    },
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
    /// A program that is needed is missing, or failed.
    #[error("{program} {problem}; {advice}")]
    Program {
        /// Its name or path.
        program: String,
        /// What happened, with its last words.
        problem: String,
        /// What can be done about it.
        advice: String,
    },
    /// The store refused something.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another did the same work at the same time, and this came of it.
    #[error(transparent)]
    Shared(Arc<ImageError>),
    /// Whoever asked for it has gone.
    #[error("the work on the image was cancelled")]
    Cancelled,
}

impl ImageError {
    pub(crate) fn at(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        Self::Io { action, path: path.as_ref().to_owned(), source }
    }
}

impl From<EnsureError<ImageError>> for ImageError {
    fn from(error: EnsureError<ImageError>) -> Self {
        match error {
            EnsureError::Store(error) => Self::Store(error),
            EnsureError::Make(error) => error,
            EnsureError::Cancelled => Self::Cancelled,
        }
    }
}
