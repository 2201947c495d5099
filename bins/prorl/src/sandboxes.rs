//! Where the sandboxes of every command come from: one node, and the runtimes on it.

use std::{num::NonZeroUsize, path::PathBuf, sync::Arc};

use anyhow::{Context, anyhow};
use nix::unistd::{Uid, User};
use prorl_agents::Runtimes;
use prorl_core::request::RuntimeChoice;
use prorl_guest::Guest;
use prorl_sandbox::{
    GroupChoice, NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime, SandboxUser, SingularityConfig,
    SingularityRuntime, store::ImageStore,
};

use crate::{limits::free_mib, stores::StoreArgs};

/// What is asked for of sandboxes; the flags of every command that starts some by itself.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct SandboxConfig {
    /// The apptainer or singularity program [default: looked for along PATH].
    #[arg(long, env = "PRORL_APPTAINER", value_name = "PATH")]
    pub(crate) apptainer: Option<PathBuf>,
    /// Local folder for what sandboxes need while they live [default: prorl-UID in TMPDIR].
    #[arg(long, env = "PRORL_RUN_DIR", value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,
    /// Number of the host user that sandboxes are mapped to when started by root, who alone can choose [default: that of
    /// nobody]. Apptainer needs one that /etc/passwd knows.
    #[arg(long, env = "PRORL_SANDBOX_USER", value_name = "UID")]
    pub(crate) sandbox_user: Option<u32>,
    /// Control groups of sandboxes: `auto` for those that are delegated to this process, if any; `off`; or an empty folder of the
    /// hierarchy that belongs to this user [default: auto].
    #[arg(long, env = "PRORL_CGROUP", value_name = "auto|off|DIR")]
    pub(crate) cgroup: Option<PathBuf>,
    /// Memory that stays free: less, and no further sandbox starts, in MiB [default: 2 % of the machine's, 256 to 2048].
    #[arg(long, env = "PRORL_MIN_FREE_MEMORY_MB", value_name = "N", value_parser = free_mib)]
    pub(crate) min_free_memory_mb: Option<u64>,
    /// Disk that stays free where --run-dir is: less, and no further sandbox starts, in MiB [default: 64].
    #[arg(long, env = "PRORL_MIN_FREE_DISK_MB", value_name = "N", value_parser = free_mib)]
    pub(crate) min_free_disk_mb: Option<u64>,
    /// How many sandboxes may start at once.
    #[arg(skip)]
    pub(crate) max_starting: Option<NonZeroUsize>,
}

impl SandboxConfig {
    /// Returns the user with its group.
    pub(crate) fn user(&self) -> Option<SandboxUser> {
        self.sandbox_user.map(|uid| {
            let known = User::from_uid(Uid::from_raw(uid)).ok().flatten();
            SandboxUser { uid, gid: known.map_or(uid, |user| user.gid.as_raw()) }
        })
    }

    /// Returns which control groups are wanted.
    ///
    /// # Errors
    /// Says what was expected where none is meant that could be there.
    pub(crate) fn groups(&self) -> Result<GroupChoice, String> {
        match &self.cgroup {
            None => Ok(GroupChoice::Auto),
            Some(word) if word == "auto" => Ok(GroupChoice::Auto),
            Some(word) if word == "off" => Ok(GroupChoice::Off),
            // Which only version 2 has, in every folder.
            Some(folder) if folder.join("cgroup.controllers").is_file() => Ok(GroupChoice::At(folder.clone())),
            Some(other) => {
                let expected = "expected auto, off or a folder of the cgroup version 2 hierarchy";
                Err(format!("{expected}, found {}", other.display()))
            }
        }
    }
}

/// A node, and what makes sandboxes on it. Dropping it leaves nothing.
pub(crate) struct Sandboxes {
    pub(crate) guest: Guest,
    pub(crate) node: Node,
    config: SandboxConfig,
}

impl Sandboxes {
    /// Opens a node.
    pub(crate) fn open(config: SandboxConfig) -> anyhow::Result<Self> {
        let guest = Guest::install().context("the guest program cannot be made executable")?;
        let mut of_node = NodeConfig::new(guest.path());
        if let Some(dir) = &config.run_dir {
            of_node.dir.clone_from(dir);
        }
        if let Some(max_starting) = config.max_starting {
            of_node.max_starting = max_starting;
        }
        of_node.groups = config.groups().map_err(|problem| anyhow!("--cgroup: {problem}"))?;
        if let Some(mib) = config.min_free_memory_mb {
            of_node.min_free_memory = mib.saturating_mul(1 << 20);
        }
        if let Some(mib) = config.min_free_disk_mb {
            of_node.min_free_disk = mib.saturating_mul(1 << 20);
        }
        let node = Node::open(of_node).context("sandboxes cannot be started here")?;
        Ok(Self { guest, node, config })
    }

    /// Opens the store of images that its sandboxes start from.
    pub(crate) fn store(&self, args: &StoreArgs) -> anyhow::Result<ImageStore> {
        args.open(&self.guest, self.owner()?)
    }

    /// Returns the user that its sandboxes belong to, if that is another than this process's own.
    pub(crate) fn owner(&self) -> anyhow::Result<Option<SandboxUser>> {
        Ok(prorl_sandbox::sandbox_user(self.config.user())?)
    }

    /// Returns the program that was named for Apptainer.
    pub(crate) fn apptainer(&self) -> Option<PathBuf> {
        self.config.apptainer.clone()
    }

    /// Makes the embedded runtime.
    pub(crate) fn namespace(&self) -> NamespaceRuntime {
        NamespaceRuntime::new(self.node.clone(), NamespaceConfig { sandbox_user: self.config.user() })
    }

    /// Makes the Singularity runtime, where there is such a program.
    pub(crate) fn singularity(&self) -> anyhow::Result<SingularityRuntime> {
        let config = SingularityConfig { program: self.config.apptainer.clone(), sandbox_user: self.config.user() };
        Ok(SingularityRuntime::new(self.node.clone(), config)?)
    }

    /// Makes both, for jobs that choose. That Singularity is missing is told to the jobs that need it, or at once where it was
    /// asked for.
    pub(crate) fn runtimes(&self, preferred: RuntimeChoice, image: Option<PathBuf>) -> anyhow::Result<Runtimes> {
        let namespace: Arc<dyn Runtime> = Arc::new(self.namespace());
        let is_asked_for = preferred == RuntimeChoice::Singularity || self.config.apptainer.is_some();
        let singularity = match self.singularity() {
            Err(error) if is_asked_for => return Err(error.context("the singularity runtime cannot be used")),
            Err(error) => Err(format!("this server has no singularity runtime: {error:#}")),
            Ok(runtime) => Ok(Arc::new(runtime) as Arc<dyn Runtime>),
        };
        Ok(Runtimes::from(namespace).with_singularity(singularity).preferring(preferred).with_default_image(image))
    }
}

/// Returns the user that sandboxes started by this process belong to, if that is another than its own.
pub(crate) fn owner(asked: Option<u32>) -> anyhow::Result<Option<SandboxUser>> {
    let config = SandboxConfig { sandbox_user: asked, ..SandboxConfig::default() };
    Ok(prorl_sandbox::sandbox_user(config.user())?)
}
