//! From what a sandbox has written to a layer of a store.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::{fs::chown, net::UnixStream as StdStream, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Command as StdCommand, Stdio},
    time::Duration,
};

use prorl_core::{FailureClass, frame, hello::PROTOCOL};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::{
    io::AsyncReadExt as _,
    net::UnixStream,
    process::{Child, Command},
    task::spawn_blocking,
};

use crate::{
    Sandbox, SandboxError, SandboxSpec, SandboxUser,
    error::is_exhaustion,
    node::{Handle, below},
    parcel,
    setup::{Answer, Chore, Counted, Order, Setup},
    store::{Base, ImageStore, Layer, LayerRecord, LayerStaging, LayerUsers, StoreError},
};

/// How long a sandbox may take to end in order before it is killed. All that runs in it is its guest.
const GRACE: Duration = Duration::from_secs(2);

/// How long a freezer that is killed is waited for: it may be in the middle of a write.
const KILLED: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// Why a sandbox was not frozen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreezeError {
    /// It was started without [`SandboxSpec::freezable`]. It goes on.
    #[error("sandbox {id} was not started to be frozen: its spec does not say freezable")]
    NotFreezable {
        /// The sandbox's name.
        id: String,
    },
    /// It has ended, or was frozen already.
    #[error("sandbox {id} has ended, and what it has written with it")]
    Gone {
        /// The sandbox's name.
        id: String,
    },
    /// Something runs in it that may still write. It goes on, and can be frozen when that has ended.
    #[error("sandbox {id} cannot be frozen while these run in it: {}", processes.join(", "))]
    Running {
        /// The sandbox's name.
        id: String,
        /// Names of processes, and their numbers inside.
        processes: Vec<String>,
    },
    /// It could not be looked into. It goes on.
    #[error("failed to see what runs in sandbox {id}")]
    Look {
        /// The sandbox's name.
        id: String,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// It did not end.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The store takes no layer. The sandbox goes on if it is the place that could not be made.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something could not be copied as it is. Nothing of the layer is left, nor of the sandbox.
    #[error("failed to {step} {target} in the store {store}")]
    Copy {
        /// What was being done.
        step: String,
        /// The file, as it is named inside.
        target: String,
        /// The store's folder.
        store: PathBuf,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The freezer, a process of the guest's program, could not be started, or ended without a word.
    #[error("failed to run the freezer of sandbox {id}")]
    Freezer {
        /// The sandbox's name.
        id: String,
        /// What happened to it.
        #[source]
        source: io::Error,
    },
}

impl FreezeError {
    /// Returns who failed, in the words of a job's outcome.
    pub fn failure_class(&self) -> FailureClass {
        match self {
            // Whoever made the spec, or did not end what it had started.
            Self::NotFreezable { .. } | Self::Running { .. } => FailureClass::Handler,
            Self::Sandbox(error) => error.failure_class(),
            Self::Look { source, .. } | Self::Copy { source, .. } | Self::Freezer { source, .. }
                if is_exhaustion(source) =>
            {
                FailureClass::Resource
            }
            Self::Gone { .. } | Self::Look { .. } | Self::Store(_) | Self::Copy { .. } | Self::Freezer { .. } => {
                FailureClass::Sandbox
            }
        }
    }
}

/// What a layer of a sandbox is, and who can copy it; known before it starts.
#[derive(Debug)]
pub(crate) struct Layering {
    guest: PathBuf,
    user: Option<SandboxUser>,
    base: Base,
    /// Kept until the layer is made, which means nothing without them.
    below: Vec<Layer>,
}

impl Layering {
    /// `setup` was made from `spec`.
    pub(crate) fn new(spec: &SandboxSpec, setup: &Setup) -> Self {
        Self {
            guest: spec.guest.clone(),
            user: setup.become_user,
            base: spec.base(&setup.image),
            below: spec.layers.clone(),
        }
    }
}

/// What a sandbox that stands can be frozen by.
#[derive(Debug)]
pub(crate) struct Freezable {
    layering: Layering,
    /// The tmpfs of its writable layer.
    layer: OwnedFd,
    /// Its user namespace.
    users: OwnedFd,
}

impl Freezable {
    /// `files` came with the hello.
    pub(crate) fn new(layering: Layering, files: Vec<OwnedFd>) -> Result<Self, SandboxError> {
        let Ok([layer, users]) = <[OwnedFd; 2]>::try_from(files) else {
            let reason = "it keeps to itself what it can be frozen by".to_owned();
            return Err(SandboxError::Protocol { reason });
        };
        Ok(Self { layering, layer, users })
    }
}

impl Sandbox {
    /// Makes a layer of what was written in the sandbox, for others to start on: see [`SandboxSpec::layers`]. The sandbox
    /// ends with that, by design: whoever goes on from here starts from the layer, as all others do.
    ///
    /// Everything but the guest must have ended, the sessions of its tools too: a file that is being written has no state to
    /// keep. `/tmp` and `/dev/shm` are not part of the layer, nor is what was bound, nor `/etc/hosts` and the like where
    /// nobody has changed them.
    ///
    /// The channel has to stay open until then, since its end is the sandbox's: a client of the tools inside must not be dropped
    /// before.
    ///
    /// # Errors
    /// See [`FreezeError`], which says of each whether the sandbox goes on. Nothing of the layer is left.
    ///
    /// # Cancel safety
    /// A dropped call leaves no layer. The sandbox ends if it was to end already.
    pub async fn freeze(&self, store: &ImageStore) -> Result<Layer, FreezeError> {
        let id = || self.id().to_owned();
        if !self.is_freezable {
            return Err(FreezeError::NotFreezable { id: id() });
        }
        if self.processes.is_over() || self.freezable.lock().is_none() {
            return Err(FreezeError::Gone { id: id() });
        }
        let staging = {
            let store = store.clone();
            let staged = spawn_blocking(move || store.stage_layer()).await;
            staged.map_err(|error| FreezeError::Freezer { id: id(), source: io::Error::other(error) })??
        };
        let processes = below(self.facts().hello.host_pid).map_err(|source| FreezeError::Look { id: id(), source })?;
        if !processes.is_empty() {
            return Err(FreezeError::Running { id: id(), processes });
        }
        // Whoever shuts it down from now on loses nothing of it.
        let Some(Freezable { layering, layer, users }) = self.freezable.lock().take() else {
            return Err(FreezeError::Gone { id: id() });
        };
        self.shutdown(GRACE).await?;
        let counted = copy(self.id(), store, &layering, [layer, users], &staging).await?;
        let record = LayerRecord {
            id: staging.id().to_owned(),
            base: layering.base,
            below: layering.below.iter().map(|layer| layer.record().id.clone()).collect(),
            users: if counted.has_other_ids { LayerUsers::Range } else { LayerUsers::Own },
            entries: counted.entries,
            bytes: counted.bytes,
        };
        let published = spawn_blocking(move || staging.publish(record)).await;
        Ok(published.map_err(|error| FreezeError::Freezer { id: id(), source: io::Error::other(error) })??)
    }
}

/// Has a freezer copy a layer.
async fn copy(
    id: &str,
    store: &ImageStore,
    layering: &Layering,
    [layer, users]: [OwnedFd; 2],
    staging: &LayerStaging,
) -> Result<Counted, FreezeError> {
    let failed = |source| FreezeError::Freezer { id: id.to_owned(), source };
    let root = staging.root();
    if let Some(user) = layering.user {
        chown(&root, Some(user.uid), Some(user.gid)).map_err(failed)?;
    }
    let target = OwnedFd::from(fs::File::open(&root).map_err(failed)?);
    let order = Order::Freeze(Chore { protocol: PROTOCOL, become_user: layering.user });
    let (channel, command) =
        worker(&layering.guest, &order, &[layer.as_fd(), users.as_fd(), target.as_fd()]).map_err(failed)?;
    drop((layer, users));
    channel.set_nonblocking(true).map_err(failed)?;
    let mut channel = UnixStream::from_std(channel).map_err(failed)?;
    let mut freezer = Freezer::spawn(command).map_err(failed)?;
    let answer = read_answer(&mut channel).await;
    freezer.end().await;
    match answer {
        Ok(Answer::Done(counted)) => Ok(counted),
        Ok(Answer::Failed(failure)) => Err(FreezeError::Copy {
            step: failure.step,
            target: failure.target,
            store: store.dir().to_owned(),
            source: io::Error::from_raw_os_error(failure.errno),
        }),
        Err(source) => {
            let (guest, user) = (layering.guest.clone(), layering.user);
            // It was killed, and has left what it had copied.
            let _ = spawn_blocking(move || remove_foreign(&guest, &root, user)).await;
            Err(failed(source))
        }
    }
}

async fn read_answer(channel: &mut UnixStream) -> io::Result<Answer> {
    let mut header = [0; frame::HEADER_BYTES];
    channel.read_exact(&mut header).await?;
    let mut body = vec![0; frame::body_len(header).map_err(io::Error::other)?];
    channel.read_exact(&mut body).await?;
    frame::decode(&body).map_err(io::Error::other)
}

/// Returns a command of the guest's program that finds `order` and `files` on its channel, and the other end of that.
fn worker(guest: &Path, order: &Order, files: &[BorrowedFd<'_>]) -> io::Result<(StdStream, StdCommand)> {
    let (mut ours, theirs) = StdStream::pair()?;
    // Both are small, so that they wait on the way until the program reads them.
    ours.write_all(&frame::encode(order).map_err(io::Error::other)?)?;
    parcel::send(&ours, &[0], files)?;
    // A bare name would be looked for along PATH.
    let mut command = StdCommand::new(std::path::absolute(guest)?);
    command
        .arg0("prorl-guest")
        .env_clear()
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0); // a terminal's C-c is for the host alone
    Ok((ours, command))
}

/// A freezer, which does not outlive its owner.
struct Freezer {
    child: Child,
    handle: Option<Handle>,
}

impl Freezer {
    fn spawn(command: StdCommand) -> io::Result<Self> {
        let child = Command::from(command).kill_on_drop(true).spawn()?;
        // Nobody has waited for it, so that the number is its own.
        let handle = child.id().map(Handle::of).transpose()?.flatten();
        Ok(Self { child, handle })
    }

    /// Waits for the end of one that has answered, or hung up.
    async fn end(&mut self) {
        // A process that leaves its children to the kernel is not told how they end.
        let _ = self.child.wait().await;
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        // The folder that it writes to is removed next, and nothing is to appear in that meanwhile.
        let Some(handle) = &self.handle else { return };
        if !handle.has_ended() {
            handle.kill();
            let _ = poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&KILLED));
        }
    }
}

/// Empties a folder in which files belong to the other ids of a fake root whose sandbox ran as `user`; as this process's own user
/// if nothing is said. Blocks.
///
/// # Errors
/// What could not be removed, or why there are no such ids any more.
pub(crate) fn remove_foreign(guest: &Path, folder: &Path, user: Option<SandboxUser>) -> io::Result<()> {
    let opened = OwnedFd::from(fs::File::open(folder)?);
    let order = Order::Remove(Chore { protocol: PROTOCOL, become_user: user });
    let (mut channel, mut command) = worker(guest, &order, &[opened.as_fd()])?;
    let mut child = command.spawn()?;
    drop(command); // with its copy of their end
    let mut header = [0; frame::HEADER_BYTES];
    let answer = channel.read_exact(&mut header).and_then(|()| {
        let mut body = vec![0; frame::body_len(header).map_err(io::Error::other)?];
        channel.read_exact(&mut body)?;
        frame::decode::<Answer>(&body).map_err(io::Error::other)
    });
    let _ = child.wait();
    match answer? {
        Answer::Done(_) => Ok(()),
        Answer::Failed(failure) => {
            let source = io::Error::from_raw_os_error(failure.errno);
            let words = format!("failed to {} {}: {source}", failure.step, failure.target);
            Err(io::Error::new(source.kind(), words))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, lchown, symlink};

    use nix::unistd::{User, geteuid};

    use super::*;
    use crate::subid;

    fn told(why: &str) {
        writeln!(io::stderr(), "skipped freeze::tests: {why}").unwrap();
    }

    /// A folder of a user's, and one in it that is closed and has files of the first id that the user may hand out.
    fn foreign_files(user: SandboxUser, id: u32) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let closed = folder.path().join("closed");
        fs::create_dir_all(closed.join("deep")).unwrap();
        fs::write(closed.join("deep/file"), "x").unwrap();
        symlink("/etc", closed.join("link")).unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
        for path in [closed.join("deep/file"), closed.join("deep"), closed.join("link"), closed] {
            lchown(path, Some(id), Some(id)).unwrap();
        }
        chown(folder.path(), Some(user.uid), Some(user.gid)).unwrap();
        folder
    }

    #[test]
    fn files_of_a_fake_roots_other_ids_can_be_removed() {
        if !geteuid().is_root() {
            return told("only root gives files away");
        }
        let table = fs::read_to_string("/etc/subuid").unwrap_or_default();
        let user = table.lines().find_map(|line| User::from_name(line.split(':').next()?).ok()?);
        let Some(user) = user.filter(|user| !user.uid.is_root()) else {
            return told("no user of this machine has a range of ids");
        };
        let guest = prorl_guest::Guest::install().unwrap();
        let (users, _) = subid::ranges(user.uid.as_raw()).unwrap();
        let user = SandboxUser { uid: user.uid.as_raw(), gid: user.gid.as_raw() };
        let folder = foreign_files(user, users.start + 6);
        remove_foreign(guest.path(), folder.path(), Some(user)).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        // Not those of anybody else, nor without ids.
        let folder = foreign_files(user, 0);
        let error = remove_foreign(guest.path(), folder.path(), Some(user)).unwrap_err();
        assert!(error.to_string().contains("closed"), "{error}");
        let nobody = SandboxUser { uid: 65534, gid: 65534 };
        let error = remove_foreign(guest.path(), folder.path(), Some(nobody)).unwrap_err();
        assert!(error.to_string().contains("/etc/subuid has no line"), "{error}");
        assert!(folder.path().join("closed/deep/file").exists());
    }
}
