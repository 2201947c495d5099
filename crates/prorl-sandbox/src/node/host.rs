use std::{
    fs::{self, File},
    io,
    num::NonZeroUsize,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;

use super::{
    admission::{self, Admission, Permit},
    claim::Claim,
    executable, folder,
    folder::Origin,
    link::Link,
    process::Maker,
    reconcile,
    wire::Request,
};
use crate::{
    GroupChoice, SandboxError,
    cgroup::{Groups, Why},
    cpus::{self, Processors},
    setup::Keep,
    watch::Watcher,
};

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
    /// How much memory has to be free before a sandbox is started, in bytes: available to programs, on this machine and below
    /// the limits of the control groups that this process is in. While less is free a start waits, for its own
    /// [`start_timeout`](crate::SandboxSpec::start_timeout) at most.
    pub min_free_memory: u64,
    /// How much of the disk that the node's folder is on has to be free, in bytes, likewise.
    pub min_free_disk: u64,
    /// Which control groups sandboxes are limited by, beside what limits them anyway.
    pub groups: GroupChoice,
}

impl NodeConfig {
    /// The folder `prorl-UID` in the folder of temporary files; two starting sandboxes for each processor, four at least; 2 % of
    /// the machine's memory free, from 256 MiB (or a quarter of it) to 2 GiB, and 64 MiB of disk; control groups where they
    /// are delegated.
    pub fn new(guest: impl Into<PathBuf>) -> Self {
        let n_processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            dir: std::env::temp_dir().join(format!("prorl-{}", nix::unistd::geteuid())),
            guest: guest.into(),
            max_starting: NonZeroUsize::new((2 * n_processors).max(MIN_STARTING)).unwrap_or(NonZeroUsize::MIN),
            min_free_memory: admission::default_min_free_memory(),
            min_free_disk: admission::MIN_FREE_DISK,
            groups: GroupChoice::default(),
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
    admission: Admission,
    processors: Processors,
    watcher: Watcher,
    link: Link,
    /// There until the drop.
    lock: Option<Flock<File>>,
    maker: Maker,
    /// Given up last, when the keeper has ended, which is in the same group as this process.
    groups: Groups,
}

impl Node {
    /// Opens a node: starts its keeper, and ends and removes what dead processes of this user have left on this machine.
    ///
    /// With [`GroupChoice::Auto`] this process may be moved into another control group, until its last node is dropped.
    ///
    /// Blocks for a few milliseconds when there is nothing to remove, and for up to half a minute for a process that does not
    /// die. Needs no tokio runtime.
    ///
    /// # Errors
    /// [`SandboxError::Folder`] when the folder cannot be used, is a link, or is in others' hands, or when the control groups that
    /// are named cannot be used. Nothing is left then.
    pub fn open(config: NodeConfig) -> Result<Self, SandboxError> {
        // First, so that the keeper begins where this process is then.
        let groups = Groups::open(&config.groups).map_err(|why| unusable(&config.groups, why))?;
        Self::open_with(config, groups)
    }

    /// Opens a node whose sandboxes get these groups.
    pub(crate) fn open_with(config: NodeConfig, groups: Groups) -> Result<Self, SandboxError> {
        let dir = std::path::absolute(&config.dir).map_err(|source| SandboxError::at("find node folder", source))?;
        let origin = origin().map_err(|source| SandboxError::at("identify machine", source))?;
        let keep = Keep {
            dir: dir.clone(),
            host: origin.host.clone(),
            boot_id: origin.boot_id.clone(),
            groups: groups.folder().map(|folder| folder.as_os_str().to_owned()),
        };
        let link = Link::start(&config.guest, keep)?;
        let lock = folder::lock(link.folder(), FlockArg::LockSharedNonblock)
            .and_then(|lock| lock.ok_or_else(|| io::Error::other("somebody else has locked it")))
            .map_err(|source| SandboxError::at("lock node folder", source))?;
        reconcile::others(&dir, link.folder(), &origin);
        groups.tidy();
        let room = Box::new(admission::Machine::new(link.folder()));
        let max_starting = config.max_starting.get();
        let admission = Admission::new(max_starting, room, config.min_free_memory, config.min_free_disk);
        let (processors, guest_file, maker) = (Processors::new(cpus::allowed()), Mutex::new(None), Maker::this());
        let (watcher, lock) = (Watcher::default(), Some(lock));
        let shared = Shared { config, guest_file, admission, processors, watcher, link, lock, maker, groups };
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

    /// Returns the processor time that looking after all its sandboxes has taken so far: what their limits cost while they run.
    pub fn watch_cpu_time(&self) -> Duration {
        self.shared.watcher.cpu_time()
    }

    /// Waits for a place among the sandboxes that are starting, in order of asking, and then for up to `patience` until the
    /// machine has room for one more.
    ///
    /// # Errors
    /// [`SandboxError::NoRoom`] when it has none by then.
    ///
    /// # Cancel safety
    /// A dropped wait gives its turn to the next.
    pub(crate) async fn admit(&self, patience: Duration) -> Result<Permit, SandboxError> {
        self.shared.admission.admit(patience).await
    }

    /// Tells those who wait for room that a sandbox is over.
    pub(super) fn freed(&self) {
        self.shared.admission.freed();
    }

    /// Returns the processors that its sandboxes are spread over.
    pub(crate) fn processors(&self) -> &Processors {
        &self.shared.processors
    }

    /// Returns its control groups.
    pub(crate) fn groups(&self) -> &Groups {
        &self.shared.groups
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

/// Makes an error of why control groups cannot be used that were named.
fn unusable(choice: &GroupChoice, why: Why) -> SandboxError {
    let path = if let GroupChoice::At(path) = choice { path.clone() } else { PathBuf::new() };
    let (problem, advice) = (format!("cannot hold the control groups of sandboxes ({why})"), why.remedy().to_owned());
    let source = match why {
        Why::Failed { source, .. } => source,
        _ => io::ErrorKind::Unsupported.into(),
    };
    SandboxError::Folder { path, problem, advice, source }
}

pub(super) fn origin() -> io::Result<Origin> {
    Ok(Origin {
        host: nix::unistd::gethostname()?.to_string_lossy().into_owned(),
        boot_id: fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
        pid_namespace: fs::metadata("/proc/self/ns/pid")?.ino(),
    })
}
