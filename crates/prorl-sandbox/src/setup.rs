//! What the host tells a fresh guest to be: the frames that go down the channel before the guest's hello.

use std::{ffi::OsString, net::Ipv4Addr, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

/// The first frame from the host: what the fresh process is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// A sandbox: it makes its namespaces, mounts and limits, and becomes process 1 in them.
    Enter(Setup),
    /// The owner of a launcher such as Apptainer, which runs a second guest inside an image. That one reads the frame after
    /// this, which is an [`Order::Enter`] again.
    Launch(Launch),
    /// The keeper of a node, which cleans up after the host's process.
    Keep(Keep),
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
}

/// What a sandbox's root file system is made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Image {
    /// The host's own programs: `/usr`, `/bin`, `/sbin`, `/lib*` and a short list of `/etc`, under a private writable layer.
    /// Homes, `/run`, `/var`, `/srv`, `/opt` and other mounts of the host are not there.
    ///
    /// A folder of these that overlayfs refuses, because something is mounted below it (container runtimes mount drivers
    /// there), is read-only. The kernel then shows it only together with the mounts below it, which are read-only too.
    Host,
    /// An unpacked image: a directory that holds a whole root file system. It is never written to.
    Directory(#[serde(with = "path")] PathBuf),
    /// An image in one file: a `.sif` of Singularity, or a squashfs. It needs a launcher that can mount it.
    File(#[serde(with = "path")] PathBuf),
    /// The root file system that the guest finds itself in, which a launcher has made from an image. Not for a
    /// `SandboxSpec`.
    #[doc(hidden)]
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
    /// Inode number of the user namespace that the host and a launcher's owner are in. A launched guest must find itself in
    /// another.
    pub outer_namespace: Option<u64>,
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
    pub(crate) const OPEN_BIND: &str = "open bind source";
    pub(crate) const MOUNT: &str = "mount";
    pub(crate) const MOUNT_PROC: &str = "mount proc";
    pub(crate) const EXECUTE_LAUNCHER: &str = "execute launcher";
    pub(crate) const LAUNCH: &str = "launch";
    pub(crate) const LAUNCHED: &str = "find the launcher's user namespace";
    pub(crate) const PASS_FOLDER: &str = "pass through folder";
}
