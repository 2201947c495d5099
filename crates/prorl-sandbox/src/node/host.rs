use std::{
    fs::{self, File},
    io,
    num::NonZeroUsize,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::{
    claim::{Claim, Permit},
    executable, folder,
    folder::Origin,
    link::Link,
    process::Maker,
    reconcile,
    wire::Request,
};
use crate::{SandboxError, setup::Keep, watch::Watcher};

/// The least that may start at once on any machine.
const MIN_STARTING: usize = 4;

/// How a [`Node`] works.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Where all nodes of this user have their folders; made if it is missing. On a local disk, because processes on one
    /// machine share it.
    pub dir: PathBuf,
    /// The guest's static program, as a path that the calling process can execute.
    pub guest: PathBuf,
    /// How many sandboxes may be between their first process and their hello at one time. More at once than the machine has
    /// processors for start no sooner, and each takes longer.
    pub max_starting: NonZeroUsize,
}

impl NodeConfig {
    /// The folder `prorl-UID` in the folder of temporary files; two starting sandboxes for each processor, four at least.
    pub fn new(guest: impl Into<PathBuf>) -> Self {
        let n_processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            dir: std::env::temp_dir().join(format!("prorl-{}", nix::unistd::geteuid())),
            guest: guest.into(),
            max_starting: NonZeroUsize::new((2 * n_processors).max(MIN_STARTING)).unwrap_or(NonZeroUsize::MIN),
        }
    }
}

/// This process's share of what prorl owns on this machine. Clones are the same node.
///
/// Runtimes start sandboxes on a node, and hold it. When the last clone is dropped, or this process ends however it does,
/// the node's keeper ends every sandbox that is left and removes every file. Dropping the last clone waits up to a second
/// for that. A copy that a forked process has is not the node's: dropping it there ends nothing.
///
/// Should the keeper be killed, a thread of this process does its work; then what is left when this process is killed too is
/// removed by the next that opens a node here.
#[derive(Clone, Debug)]
pub struct Node {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: NodeConfig,
    /// The guest as a file with a name, once somebody wanted one.
    guest_file: Mutex<Option<PathBuf>>,
    starting: Arc<Semaphore>,
    watcher: Watcher,
    link: Link,
    /// There until the drop.
    lock: Option<Flock<File>>,
    maker: Maker,
}

impl Node {
    /// Opens a node: starts its keeper, and ends and removes what dead processes of this user have left on this machine.
    ///
    /// Blocks for a few milliseconds when there is nothing to remove, and for up to half a minute for a process that does not
    /// die. Needs no tokio runtime.
    ///
    /// # Errors
    /// [`SandboxError::Folder`] when the folder cannot be used, is a link, or is in others' hands. Nothing is left then.
    pub fn open(config: NodeConfig) -> Result<Self, SandboxError> {
        let dir = std::path::absolute(&config.dir).map_err(|source| SandboxError::at("find node folder", source))?;
        let origin = origin().map_err(|source| SandboxError::at("identify machine", source))?;
        let keep = Keep { dir: dir.clone(), host: origin.host.clone(), boot_id: origin.boot_id.clone() };
        let link = Link::start(&config.guest, keep)?;
        let lock = folder::lock(link.folder(), FlockArg::LockSharedNonblock)
            .and_then(|lock| lock.ok_or_else(|| io::Error::other("somebody else has locked it")))
            .map_err(|source| SandboxError::at("lock node folder", source))?;
        reconcile::others(&dir, link.folder(), &origin);
        let starting = Arc::new(Semaphore::new(config.max_starting.get().min(Semaphore::MAX_PERMITS)));
        let (guest_file, maker) = (Mutex::new(None), Maker::this());
        let watcher = Watcher::default();
        let shared = Shared { config, guest_file, starting, watcher, link, lock: Some(lock), maker };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns this node's own folder.
    pub fn folder(&self) -> &Path {
        self.shared.link.folder()
    }

    /// Returns the guest's program, as a path for this process to execute. It may mean nothing to another program.
    pub fn guest(&self) -> &Path {
        &self.shared.config.guest
    }

    /// Returns the guest's program as a file that any program, and a sandbox's user, can find and execute. It is made in the
    /// node's folder on first use, and tried once.
    ///
    /// # Errors
    /// [`SandboxError::Folder`] when there is no space for it, or when the folder is on a file system that forbids programs.
    pub fn guest_file(&self) -> Result<PathBuf, SandboxError> {
        let mut made = self.shared.guest_file.lock();
        // Somebody may tidy up folders of temporary files.
        if let Some(path) = made.as_ref().filter(|path| path.exists()) {
            return Ok(path.clone());
        }
        let path = executable::install(self.guest(), self.folder())?;
        Ok(made.insert(path).clone())
    }

    /// Waits for a place among the sandboxes that are starting, in order of asking.
    ///
    /// # Cancel safety
    /// A dropped wait gives its turn to the next.
    pub(crate) async fn admit(&self) -> Permit {
        let place = Arc::clone(&self.shared.starting).acquire_owned().await;
        Permit { _place: place.expect("the semaphore is never closed") }
    }

    /// Returns who looks after its sandboxes.
    pub(crate) fn watcher(&self) -> &Watcher {
        &self.shared.watcher
    }

    /// Takes a place for a new sandbox of this runtime, before anything of it exists.
    pub(crate) fn claim(&self, runtime: &'static str) -> Result<Claim, SandboxError> {
        Claim::new(self.clone(), runtime).map_err(|source| SandboxError::at("write down sandbox", source))
    }

    /// Leaves the end of a sandbox to the keeper.
    pub(super) fn hand_over(&self, id: &str) {
        self.shared.link.ask(&Request::End(id.to_owned()));
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            // Unlocked here, it would be unlocked for the maker too.
            std::mem::forget(self.lock.take());
            return;
        }
        let folder = self.link.folder();
        // A keeper that was killed, and that nothing could stand in for, has left everything as it was.
        if self.link.close() && folder.exists() && folder::boxes(folder).is_ok_and(|left| left.is_empty()) {
            let _ = folder::remove_instance(folder);
        }
    }
}

pub(super) fn origin() -> io::Result<Origin> {
    Ok(Origin {
        host: nix::unistd::gethostname()?.to_string_lossy().into_owned(),
        boot_id: fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
        pid_namespace: fs::metadata("/proc/self/ns/pid")?.ino(),
    })
}
