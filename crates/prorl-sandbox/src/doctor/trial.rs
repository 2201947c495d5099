//! What is found out by doing it, as a server would: a node that is opened, sandboxes that are started and ended, a mount that
//! is made.

use std::{
    fs, io,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use nix::unistd::{getegid, geteuid};
use prorl_core::hello::{FakeRoot, Hello};

use super::{
    Config, Finding, State,
    advice::{self, Trouble},
    programs,
};
use crate::{
    Image, NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime, SandboxError, SandboxSpec, SingularityConfig,
    SingularityRuntime, start,
    subid::{self, Kind},
    sys,
};

/// How long a sandbox may take to end before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// How long a program may take that does next to nothing.
const LIMIT: Duration = Duration::from_secs(20);

/// What is examined, with what several checks need of it: made by the first of them.
pub(super) struct Machine {
    pub(super) config: Config,
    node: OnceLock<Result<Node, Trouble>>,
    stood: OnceLock<Result<Hello, Trouble>>,
}

impl Machine {
    pub(super) fn new(config: Config) -> Self {
        Self { config, node: OnceLock::new(), stood: OnceLock::new() }
    }

    fn guest(&self) -> Result<&Path, Trouble> {
        let no_guest = |error: &Arc<io::Error>| Trouble::new(format!("no guest: {error}"), advice::remedy(error));
        self.config.guest.as_deref().map_err(no_guest)
    }

    fn node(&self) -> Result<Node, Trouble> {
        let open = || {
            let config = NodeConfig { dir: self.config.run_dir.clone(), ..NodeConfig::new(self.guest()?) };
            Ok(Node::open(config)?)
        };
        self.node.get_or_init(open).clone()
    }

    /// Starts a sandbox of the host's programs and ends it, unless that has been done; returns what its guest said.
    fn stood(&self) -> Result<Hello, Trouble> {
        self.stood.get_or_init(|| self.stand(false)).clone()
    }

    fn stand(&self, fakeroot: bool) -> Result<Hello, Trouble> {
        let runtime = NamespaceRuntime::new(self.node()?, NamespaceConfig { sandbox_user: self.config.sandbox_user });
        Ok(stand(&runtime, &SandboxSpec { fakeroot, ..small(self.guest()?) })?)
    }
}

fn small(guest: &Path) -> SandboxSpec {
    SandboxSpec { layer_bytes: 64 << 20, tmp_bytes: 1 << 20, ..SandboxSpec::new(guest) }
}

/// Starts a sandbox, hears its hello and ends it. Needs no thread but this one, unless the runtime does.
fn stand(runtime: &dyn Runtime, spec: &SandboxSpec) -> Result<Hello, SandboxError> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let tokio = tokio.map_err(|source| SandboxError::at("start async runtime", source))?;
    tokio.block_on(async {
        let sandbox = runtime.start(spec).await?;
        sandbox.shutdown(GRACE).await?;
        Ok(sandbox.facts().hello.clone())
    })
}

pub(super) fn namespace_runtime(machine: &Machine) -> Finding {
    match machine.stood() {
        Ok(hello) => Finding::ok(
            format!("a sandbox stood; its user was {} inside", hello.uid),
            "sandboxes of the kernel's own namespaces work, with nothing to install",
        ),
        Err(trouble) => trouble.bad("the default runtime does not work here"),
    }
}

pub(super) fn fake_root(machine: &Machine) -> Finding {
    let meaning = "package managers may change owners inside, for real";
    match machine.stand(true).map(|hello| hello.fakeroot) {
        Ok(Some(FakeRoot::Range)) => Finding::ok("a range of ids", meaning),
        Ok(Some(FakeRoot::Single { missing })) => Finding::warn(
            format!("a single id: {missing}"),
            "package managers work inside, but files that they give to other users stay the fake root's",
            range_remedy(&machine.config),
        ),
        Ok(None) => Finding::bad("the guest made no fake root", meaning, "use the guest of this version"),
        Err(trouble) => trouble.bad("there is no fake root where there is no sandbox"),
    }
}

/// Names what is missing of a range of ids.
fn range_remedy(config: &Config) -> String {
    let kinds = [Kind::User, Kind::Group];
    let names = programs::sandbox_user(config).map(subid::names_of).unwrap_or_default();
    let no_range: Vec<Kind> = kinds.into_iter().filter(|kind| subid::range(*kind, &names).is_err()).collect();
    let mut all = Vec::new();
    if kinds.iter().any(|kind| kind.find_program().is_none()) {
        all.push(programs::INSTALL_UIDMAP.to_owned());
    }
    if !no_range.is_empty() {
        all.push(programs::give_ids(&names, &no_range));
    }
    if all.is_empty() {
        // Nothing is missing, so that it does not work.
        all.push("see seccomp, and let newuidmap and newgidmap be set-uid root or have their capabilities".to_owned());
    }
    all.join("; ")
}

pub(super) fn python(machine: &Machine) -> Finding {
    let remedy = "install python3 and IPython (python3 -m pip install ipython), or use an image that has them";
    match machine.stood().map(|hello| hello.python) {
        Ok(Some(python)) if python.ipython => Finding::ok(
            format!("{} with IPython", python.path),
            "cells of sandboxes of the host's programs run in IPython",
        ),
        Ok(Some(python)) => Finding::warn(
            format!("{} without IPython", python.path),
            "cells of sandboxes of the host's programs run in the plain interpreter, without magics",
            remedy,
        ),
        Ok(None) => Finding::absent("no python3", "sandboxes of the host's programs cannot run Python cells", remedy),
        Err(_) => {
            Finding::not(State::Absent, "not known", "it is looked for inside a sandbox, and there is none", None)
        }
    }
}

pub(super) fn singularity_runtime(machine: &Machine) -> Finding {
    let Some(launcher) = programs::find_launcher(&machine.config) else {
        return Finding::absent(
            "neither apptainer nor singularity",
            "packed images (.sif, squashfs) cannot be run; unpacked ones can, by the namespace runtime",
            programs::INSTALL_APPTAINER,
        );
    };
    match launch(machine, launcher) {
        Ok(found) => Finding::ok(found, "Apptainer brings up an image, and a sandbox stands in it"),
        Err(trouble) => trouble.bad("Singularity's runtime does not work here"),
    }
}

/// Starts a sandbox of an image that holds nothing, and ends it; returns what was found.
fn launch(machine: &Machine, launcher: PathBuf) -> Result<String, Trouble> {
    let node = machine.node()?;
    // The launcher has threads, and so has the runtime, which counts on them.
    let thread = thread::Builder::new().spawn(|| ());
    thread.map_err(|error| Trouble::new(format!("no thread can be started: {error}"), advice::remedy(&error)))?;
    node.guest_file()?;
    let config = SingularityConfig { program: Some(launcher), sandbox_user: machine.config.sandbox_user };
    let runtime = SingularityRuntime::new(node.clone(), config)?;
    // In a folder of the node's, so that it goes whatever becomes of this process.
    let place = node.claim("doctor")?;
    let image = place.run_dir().and_then(|folder| empty_image(&folder));
    let image = image.map_err(|source| SandboxError::at("make an image", source))?;
    let hello = stand(&runtime, &SandboxSpec { image: Image::Directory(image), ..small(machine.guest()?) })?;
    let program = runtime.program().display();
    Ok(format!("{} at {program} brought up an image; its user was {} inside", runtime.version(), hello.uid))
}

fn empty_image(folder: &Path) -> io::Result<PathBuf> {
    let image = folder.join("empty");
    for path in [image.clone()].into_iter().chain(["dev", "etc", "proc", "sys", "tmp"].map(|name| image.join(name))) {
        fs::create_dir(&path)?;
        // Sandboxes of root belong to somebody else.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(image)
}

pub(super) fn overlay(machine: &Machine) -> Finding {
    let remedy = "boot Linux 5.11 or later with overlayfs, or load it as root (modprobe overlay)";
    let meaning = "an image gets a writable layer; without one its folders are read-only";
    let (Ok(_), Ok(guest)) = (machine.stood(), machine.guest()) else {
        let found = "not known: it is tried in a user namespace, and no sandbox stands";
        return Finding::not(State::Absent, found, meaning, None);
    };
    let mut command = Command::new(guest);
    command.arg0("prorl-guest").arg("--version").env_clear();
    let user = match start::become_user(machine.config.sandbox_user) {
        Ok(user) => user.map_or((geteuid().as_raw(), getegid().as_raw()), |user| (user.uid, user.gid)),
        Err(error) => return Trouble::from(error).bad(meaning),
    };
    if geteuid().is_root() {
        command.uid(user.0).gid(user.1);
    }
    sys::enter_overlay(&mut command, user);
    match programs::run(command, LIMIT) {
        Ok(said) if said.status.success() => Finding::ok("mounted in a user namespace", meaning),
        Ok(said) => Finding::bad(said.status.to_string(), meaning, remedy),
        Err(error) => Finding::bad(format!("not mounted in a user namespace: {error}"), meaning, remedy),
    }
}
