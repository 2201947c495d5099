use std::{
    io,
    path::{Path, PathBuf},
};

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
}

impl StoreError {
    pub(crate) fn at(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}
