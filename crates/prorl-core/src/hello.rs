//! The first frame that a guest sends: who it is and what it found. Types only.

use serde::{Deserialize, Serialize};

/// The version of the frames between guest and host. Both sides of one build agree; an older guest is refused by name.
pub const PROTOCOL: u32 = 2;

/// The first frame from a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Greeting {
    /// The sandbox stands and takes requests.
    Ready(Hello),
    /// It does not.
    Failed(StartFailure),
}

/// What a guest says when its sandbox stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of the guest.
    pub protocol: u32,
    /// Version of the guest's package.
    pub version: String,
    /// Process id of the guest as the host sees it. The guest sends 0, and the host fills in what the kernel says.
    pub host_pid: u32,
    /// Inode number of its pid namespace.
    pub pid_namespace: u64,
    /// Inode number of its user namespace.
    pub user_namespace: u64,
    /// Inode number of the user namespace that a launcher has made around it, or of its own if it made no other. Nothing
    /// without a launcher.
    pub launcher_namespace: Option<u64>,
    /// Effective user id inside.
    pub uid: u32,
    /// What a fake root got; nothing where none was asked for.
    pub fakeroot: Option<FakeRoot>,
    /// The shell, if the image has one.
    pub bash: Option<String>,
    /// The Python interpreter, if the image has one.
    pub python: Option<Python>,
}

/// Which ids a fake root has inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FakeRoot {
    /// 0 and a range of others: files change owners for real.
    Range,
    /// 0 alone. System calls that would need another id are pretended: they succeed and do nothing.
    Single {
        /// What the machine lacks for a range, for a person to read.
        missing: String,
    },
}

/// The Python of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Python {
    /// Path of the interpreter.
    pub path: String,
    /// Whether IPython is there; without it cells run in the plain interpreter.
    pub ipython: bool,
}

/// The step at which a sandbox failed to start, in the guest's words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartFailure {
    /// What was being done, such as `create user namespace` or `mount proc`.
    pub step: String,
    /// The thing it was done to, when there is one.
    pub target: String,
    /// The system's error number; 0 when it was no system call.
    pub errno: i32,
}
