//! What is found out by doing it: sandboxes that are started and ended, a mount that is made.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{fs::DirBuilderExt as _, fs::PermissionsExt as _, net::UnixStream, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use nix::unistd::{chown, getegid, geteuid};
use prorl_core::{
    frame,
    hello::{FakeRoot, Greeting, Hello},
};

use super::{
    Config, Finding, State,
    programs::{self, Group},
};
use crate::{SandboxError, SandboxSpec, diagnosis, setup::Order, start, sys};

/// How long a guest or a launcher may take.
const LIMIT: Duration = Duration::from_secs(20);

pub(super) fn namespace_runtime(config: &Config) -> Finding {
    match stand(config, false) {
        Ok(hello) => Finding::ok(
            format!("a sandbox stood; its user was {} inside", hello.uid),
            "sandboxes of the kernel's own namespaces work, with nothing to install",
        ),
        Err(error) => failed(&error, "the default runtime does not work here"),
    }
}

pub(super) fn fake_root(config: &Config) -> Finding {
    let meaning = "package managers may change owners inside, for real";
    match stand(config, true).map(|hello| hello.fakeroot) {
        Ok(Some(FakeRoot::Range)) => Finding::ok("a range of ids", meaning),
        Ok(Some(FakeRoot::Single { missing })) => Finding::warn(
            format!("a single id: {missing}"),
            "package managers work inside, but files that they give to other users stay the fake root's",
            format!("install the package uidmap (shadow-utils), and as root: {}", programs::give_ids("USER")),
        ),
        Ok(None) => Finding::bad("the guest made no fake root", meaning, "use the guest of this version"),
        Err(error) => failed(&error, "there is no fake root where there is no sandbox"),
    }
}

pub(super) fn python(config: &Config) -> Finding {
    let remedy = "install python3 and IPython (python3 -m pip install ipython), or use an image that has them";
    match stand(config, false).map(|hello| hello.python) {
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

fn failed(error: &SandboxError, meaning: &str) -> Finding {
    let source = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
    match error {
        SandboxError::UserNamespaces { cause, advice, .. } => Finding::bad(format!("{cause}{source}"), meaning, advice),
        _ => Finding::not(State::Bad, format!("{error}{source}"), meaning, None),
    }
}

/// Starts a sandbox of the host's programs, hears its hello and ends it.
fn stand(config: &Config, fakeroot: bool) -> Result<Hello, SandboxError> {
    let spec = SandboxSpec { fakeroot, layer_bytes: 64 << 20, tmp_bytes: 1 << 20, ..SandboxSpec::new(&config.guest) };
    let setup = spec.to_setup(start::become_user(config.sandbox_user)?)?;
    let order = frame::encode(&Order::Enter(setup))
        .map_err(|error| SandboxError::at("order a sandbox", io::Error::other(error)))?;
    let (mut line, theirs) = UnixStream::pair().map_err(|source| SandboxError::at("create channel", source))?;
    line.set_read_timeout(Some(LIMIT)).map_err(|source| SandboxError::at("create channel", source))?;
    let mut command = Command::new(&config.guest);
    command.env_clear().stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::null());
    let group = Group::start(command).map_err(|source| SandboxError::Spawn { path: config.guest.clone(), source })?;
    // One that gives up before it has read all has a reason to tell.
    let _ = line.write_all(&order);
    let greeting = read_greeting(&mut line);
    // At the end of its channel a guest ends everything inside.
    let _ = line.shutdown(Shutdown::Both);
    let how = group.wait(LIMIT).map_or_else(|error| error.to_string(), |status| status.to_string());
    match greeting {
        Ok(Greeting::Ready(hello)) => Ok(hello),
        Ok(Greeting::Failed(failure)) => Err(diagnosis::explain(Path::new("/proc"), failure)),
        Err(error) => Err(SandboxError::Ended { how: format!("{how}; {error}") }),
    }
}

fn read_greeting(line: &mut UnixStream) -> io::Result<Greeting> {
    let mut header = [0; frame::HEADER_BYTES];
    line.read_exact(&mut header)?;
    let mut body = vec![0; frame::body_len(header).map_err(io::Error::other)?];
    line.read_exact(&mut body)?;
    frame::decode(&body).map_err(io::Error::other)
}

pub(super) fn singularity_runtime(config: &Config) -> Finding {
    let Some(launcher) = programs::find_launcher(config) else {
        return Finding::absent(
            "neither apptainer nor singularity",
            "packed images (.sif, squashfs) cannot be run; unpacked ones can, by the namespace runtime",
            programs::INSTALL_APPTAINER,
        );
    };
    let meaning = "Apptainer brings up an image";
    match Scratch::new(config).and_then(|scratch| scratch.launch(config, &launcher)) {
        Ok(()) => Finding::ok(format!("{} ran a program in an image", launcher.display()), meaning),
        Err(error) => Finding::bad(
            error.to_string(),
            "Singularity's runtime does not work here",
            "see what the checks of user namespaces say; otherwise try by hand: apptainer exec --userns FOLDER PROGRAM",
        ),
    }
}

/// A temporary folder with an image that holds the guest alone. Removed when dropped.
struct Scratch {
    folder: PathBuf,
}

impl Scratch {
    fn new(config: &Config) -> io::Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);

        let name = format!("prorl-doctor-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = config.temp_dir.join(name);
        fs::DirBuilder::new().mode(0o755).create(&folder)?;
        let scratch = Self { folder };
        for name in ["config", "image/dev", "image/proc", "image/sys", "image/tmp"] {
            fs::create_dir_all(scratch.folder.join(name))?;
        }
        let guest = scratch.folder.join("image/guest");
        fs::copy(&config.guest, &guest)?;
        fs::set_permissions(&guest, fs::Permissions::from_mode(0o755))?;
        Ok(scratch)
    }

    fn launch(&self, config: &Config, launcher: &Path) -> io::Result<()> {
        let mut command = Command::new(launcher);
        command
            .args(["--quiet", "exec", "--userns", "--containall", "--cleanenv", "--no-home", "--pwd", "/"])
            .arg(self.folder.join("image"))
            .args(["/guest", "--version"]);
        programs::cleanly(&mut command, config);
        // What a launcher keeps for a user it would keep in that user's home.
        let own = self.folder.join("config");
        command.envs(["APPTAINER_CONFIGDIR", "SINGULARITY_CONFIGDIR"].map(|name| (name, &own)));
        if let Some(user) = start::become_user(config.sandbox_user).map_err(io::Error::other)? {
            chown(&own, Some(user.uid.into()), Some(user.gid.into()))?;
            command.uid(user.uid).gid(user.gid);
        }
        let said = programs::run(command, LIMIT)?;
        if said.status.success() && said.stdout.starts_with(b"prorl-guest ") {
            return Ok(());
        }
        Err(io::Error::other(format!("{}: {}", said.status, programs::last_words(&said.stderr))))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

pub(super) fn overlay(config: &Config) -> Finding {
    let remedy = "boot Linux 5.11 or later with overlayfs, or load it as root (modprobe overlay)";
    let meaning = "an image gets a writable layer; without one its folders are read-only";
    if stand(config, false).is_err() {
        let found = "not known: it is tried in a user namespace, and no sandbox stands";
        return Finding::not(State::Absent, found, meaning, None);
    }
    let mut command = Command::new(&config.guest);
    command.arg0("prorl-guest").arg("--version").env_clear();
    let user = match start::become_user(config.sandbox_user) {
        Ok(user) => user.map_or((geteuid().as_raw(), getegid().as_raw()), |user| (user.uid, user.gid)),
        Err(error) => return Finding::not(State::Bad, error.to_string(), meaning, None),
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
