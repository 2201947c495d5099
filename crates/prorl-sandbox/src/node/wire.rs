//! The frames between a server and its keeper, after the order to keep.

use serde::{Deserialize, Serialize};

/// A keeper's only answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kept {
    /// It has made an instance folder.
    Made {
        /// The folder's name.
        name: String,
        /// Its own process id.
        pid: u32,
    },
    /// It could not make one, and has left nothing.
    Refused(Refusal),
}

/// Why a keeper made no folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    /// What is wrong with the path.
    pub(crate) problem: Problem,
    /// The folder or file, as far as it is text.
    pub(crate) path: String,
    /// The system's error number; 0 when it was no system call.
    pub(crate) errno: i32,
}

/// What can be wrong with the folder of all instances, or with making one in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Problem {
    /// It is a link or a file.
    NoFolder,
    /// Somebody else owns it.
    Owner(u32),
    /// Others may write into it.
    Open(u32),
    /// A call failed.
    Call,
}

/// What a server asks of its keeper later on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// To see to the end of the sandbox of this id, and to remove its files.
    End(String),
}
