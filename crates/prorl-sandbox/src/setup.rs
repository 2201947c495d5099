//! What the host tells a fresh guest to be: the frames that go down the channel before the guest's hello.

use std::{ffi::OsString, net::Ipv4Addr, path::PathBuf, time::Duration};

use prorl_core::hello::StartFailure;
use serde::{Deserialize, Serialize};

/// The first frame from the host: what the fresh process is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "a few are made for each start, and none is kept")]
pub enum Order {
    /// A sandbox: it makes its namespaces, mounts and limits, and becomes process 1 in them.
    Enter(Setup),
    /// The owner of a launcher such as Apptainer, which runs a second guest inside an image. That one reads the frame after
    /// this, which is an [`Order::Enter`] again.
    Launch(Launch),
    /// The keeper of a node, which cleans up after the host's process.
    Keep(Keep),
    /// The owner of a program outside of every sandbox, such as a builder of images.
    Own(Own),
    /// A freezer: it copies what a sandbox that has ended has written into a folder of a store, and ends.
    ///
    /// One byte follows, with three descriptors: the tmpfs of the sandbox's writable layer, the sandbox's user namespace, and
    /// the folder, which is empty. The answer is an [`Answer`].
    Freeze(Chore),
    /// A remover: it empties a folder in which files belong to a fake root's other ids, and ends.
    ///
    /// One byte follows, with the descriptor of the folder. The answer is an [`Answer`].
    Remove(Chore),
}

/// What program an owner runs. It reads nothing, and what it says goes to the owner's standard output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Own {
    /// [`prorl_core::hello::PROTOCOL`] of the host.
    pub protocol: u32,
    /// The program and its arguments. Everyone on the machine can read them.
    pub argv: Vec<OsString>,
    /// Its whole environment.
    pub env: Vec<(OsString, OsString)>,
    /// The folder that it is started in.
    #[serde(with = "path")]
    pub cwd: PathBuf,
    /// Whether it gets a user namespace of its own with the same ids, and mounts of its own, where root has the capabilities
    /// that the machine withholds from it. Only root can.
    pub own_users: bool,
}

/// What an owner tells when nothing of its program is left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owned {
    /// The program has ended with this code.
    Exited(i32),
    /// It has ended by this signal.
    Killed(i32),
    /// It did not run, or how it ended is not known.
    Failed(StartFailure),
}

/// What a process is told that does one thing with files and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chore {
    /// [`prorl_core::hello::PROTOCOL`] of the host.
    pub protocol: u32,
    /// The host user to become first. Only root can, and root must.
    pub become_user: Option<SandboxUser>,
}

/// What became of a [`Chore`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// It is done.
    Done(Counted),
    /// It failed, and nothing of it is left.
    Failed(StartFailure),
}

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Files, folders, links and marks of what was removed.
    pub entries: u64,
    /// Bytes of files, holes not counted.
    pub bytes: u64,
    /// Whether something belongs to another than the sandbox's user.
    pub has_other_ids: bool,
}

/// What an owner starts, and how long it may run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// [`prorl_core::hello::PROTOCOL`] of the host.
    pub protocol: u32,
    /// The launcher's program and its arguments. Everyone on the machine can read them.
    pub argv: Vec<OsString>,
    /// The launcher's whole environment.
    pub env: Vec<(OsString, OsString)>,
    /// How long the sandbox may live at most.
    pub max_life: Duration,
    /// The host user to become first. Only root can, and root must.
    pub become_user: Option<SandboxUser>,
    /// The sandbox's own folder, which that user must be able to pass through: what the launcher is told of is there.
    #[serde(with = "path")]
    pub folder: PathBuf,
}

/// What a keeper looks after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// The folder in which it makes one for the host's process.
    #[serde(with = "path")]
    pub dir: PathBuf,
    /// The machine's name.
    pub host: String,
    /// The machine's boot.
    pub boot_id: String,
    /// The host's process's folder of control groups, if it has one: it goes with the last sandbox.
    pub groups: Option<OsString>,
}

/// What a guest makes a sandbox's root file system from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Image {
    /// The host's own programs.
    Host,
    /// A directory that holds a whole root file system.
    Directory(#[serde(with = "path")] PathBuf),
    /// An image in one file, which a launcher has to mount.
    File(#[serde(with = "path")] PathBuf),
    /// The root file system that the guest finds itself in, which a launcher has made from an image.
    Root,
}

/// What a sandbox can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Network {
    /// Its own loopback interface only.
    None,
    /// The host's network, abstract sockets included.
    Host,
}

/// A file or folder of the host that is shown inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// Where it is on the host; absolute.
    #[serde(with = "path")]
    pub source: PathBuf,
    /// Where it appears inside; absolute, without `..`. Links of the image lead on as they do for a task, and none is replaced;
    /// missing folders on the way are made in the writable layer, in `/tmp` or in `/dev/shm`.
    #[serde(with = "path")]
    pub target: PathBuf,
    /// Whether the sandbox may write to it, as far as the modes allow. Otherwise it is read-only, mounts below it too.
    pub writable: bool,
}

/// The host user that a sandbox's processes are, as the host sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxUser {
    /// User id on the host; never 0.
    pub uid: u32,
    /// Group id on the host; never 0.
    pub gid: u32,
}

/// Everything a guest needs to build its sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// [`prorl_core::hello::PROTOCOL`] of the host.
    pub protocol: u32,
    /// The root file system.
    pub image: Image,
    /// Folders of the layers between the image and what is written, the lowest first.
    pub layers: Vec<OsString>,
    /// The name of one of them with files of a fake root's other ids. Nothing where there is none.
    pub needs_range: Option<String>,
    /// Whether the guest hands out what its writable layer can be frozen by.
    pub freezable: bool,
    /// Host name inside.
    pub hostname: String,
    /// Environment of everything inside, over the standard one.
    pub env: Vec<(String, String)>,
    /// Whether the user inside is 0, without any right of the host's 0.
    pub fakeroot: bool,
    /// What it can reach.
    pub network: Network,
    /// Size limit of the writable layer, in bytes.
    pub layer_bytes: u64,
    /// Size limit of `/tmp`, in bytes; that of `/dev/shm` is the same.
    pub tmp_bytes: u64,
    /// What of the host is shown inside.
    pub binds: Vec<Bind>,
    /// How long the sandbox may live at most; the guest's outer process ends it then, whatever became of the host.
    pub max_life: Duration,
    /// The host user to become first. Only root can, and root must.
    pub become_user: Option<SandboxUser>,
    /// Why a fake root gets no range of ids, where the host knows better than the guest can.
    pub no_range: Option<String>,
    /// The sandbox's own address on a loopback interface that it shares with the host.
    pub loopback: Option<Ipv4Addr>,
    /// The port of the sandbox's loopback interface at which the guest opens a listening socket for the host.
    pub proxy_port: Option<u16>,
    /// What the kernel holds tasks to.
    pub walls: Walls,
    /// Inode number of the user namespace that the host and a launcher's owner are in. A launched guest must find itself in
    /// another.
    pub outer_namespace: Option<u64>,
}

/// Limits that the kernel holds a sandbox's tasks to by itself. Nothing is no limit of ours.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Walls {
    /// Processes and threads of all tasks together.
    pub pids: Option<u32>,
    /// Files that one task may have open.
    pub open_files: Option<u64>,
    /// Size of one file, in bytes.
    pub file_bytes: Option<u64>,
    /// The processors that the sandbox may run on, by number; all where none is named.
    pub cpus: Vec<u32>,
}

/// Tells a guest that a launcher started it: it answers to its owner on standard output, first of all.
pub const LAUNCHED_FLAG: &str = "--launched";

/// What a launched guest says to its owner.
#[cfg(feature = "init")]
pub(crate) const LAUNCHED_MARK: u8 = 0x06;

/// A folder of a launcher's root file system that holds what is the guest's, out of every image's way.
#[cfg(any(feature = "host", feature = "init"))]
pub(crate) const OWN_FOLDER: &str = "/.prorl";

/// Working folder inside, writable.
pub const WORKSPACE: &str = "/workspace";

/// Home folder inside, for a sandbox without fake root.
pub const HOME: &str = "/home/agent";

/// Name of the user inside, for a sandbox without fake root.
pub const USER: &str = "agent";

/// Search path inside.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Paths as bytes: one that is not UTF-8 is a path too.
mod path {
    use std::{
        ffi::OsString,
        os::unix::ffi::{OsStrExt, OsStringExt},
        path::{Path, PathBuf},
    };

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(path.as_os_str().as_bytes())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Ok(OsString::from_vec(Vec::deserialize(from)?).into())
    }
}

/// The steps of a guest's set-up that the host can say more about when they fail.
#[cfg(any(feature = "host", feature = "init"))]
pub(crate) mod step {
    pub(crate) const READ_SETUP: &str = "read set-up";
    pub(crate) const BECOME_USER: &str = "become the sandbox user";
    pub(crate) const NAMESPACES: &str = "create namespaces";
    pub(crate) const MAP_USERS: &str = "map users";
    pub(crate) const OPEN_IMAGE: &str = "open image";
    pub(crate) const OPEN_LAYER: &str = "open layer";
    pub(crate) const LAYER_IDS: &str = "own the files of layers";
    #[cfg(feature = "init")]
    pub(crate) const PUT_LAYERS: &str = "put layers over the image";
    pub(crate) const OPEN_BIND: &str = "open bind source";
    pub(crate) const MOUNT: &str = "mount";
    pub(crate) const MOUNT_PROC: &str = "mount proc";
    pub(crate) const EXECUTE_LAUNCHER: &str = "execute launcher";
    pub(crate) const LAUNCH: &str = "launch";
    pub(crate) const LAUNCHED: &str = "find the launcher's user namespace";
    pub(crate) const PASS_FOLDER: &str = "pass through folder";
}
