//! Sandboxes whose image Apptainer or Singularity brings.

mod conf;
mod explain;
mod program;

use std::{
    ffi::OsString,
    fs, io,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use nix::unistd::geteuid;
use prorl_core::hello::PROTOCOL;

use self::{
    explain::Explain,
    program::{Program, Users},
};
use crate::{
    Bind, Image, Network, Node, Runtime, Sandbox, SandboxError, SandboxSpec, SandboxUser,
    node::{Claim, Reach},
    setup::{self, LAUNCHED_FLAG, Launch, OWN_FOLDER, Order, Setup},
    start::{self, Kind, Orders},
    subid,
};

/// An owner allows its launcher 1.5 s to clean up, and as much again when it has to insist.
const KIND: Kind = Kind { name: "singularity", reach: Reach::Session, collapse: Duration::from_secs(4) };

/// How a [`SingularityRuntime`] works.
#[derive(Clone, Debug, Default)]
pub struct SingularityConfig {
    /// The program. By default `apptainer`, or else `singularity`, is looked for along `PATH`.
    pub program: Option<PathBuf>,
    /// The host user that sandboxes run as when they are started by root; `nobody` by default. `/etc/passwd` has to know
    /// it. An ordinary user's sandboxes run as that user, whatever is said here.
    pub sandbox_user: Option<SandboxUser>,
}

/// Sandboxes from images of Apptainer or Singularity: `.sif` and squashfs files, and unpacked directories.
///
/// The launcher brings the image and no more. Inside, the guest makes the same namespaces, mounts and limits as in the
/// namespace runtime, so that both keep one contract. No daemon and no set-uid program is needed; image files need FUSE.
/// The launcher is the child of an owner, a guest of its own, which leaves nothing of it: no FUSE helper either, which
/// a launcher that is killed leaves behind.
///
/// Started by root, sandboxes and their launchers run as an unprivileged user.
#[derive(Clone, Debug)]
pub struct SingularityRuntime {
    node: Node,
    program: Program,
    user: Option<SandboxUser>,
    /// Why a fake root gets no range of ids here, if it gets none.
    no_range: Option<String>,
}

impl SingularityRuntime {
    /// Makes a runtime whose sandboxes belong to `node`. Looks for the program and asks it for its configuration, which takes
    /// some 20 ms.
    ///
    /// # Errors
    /// [`SandboxError::Program`] when there is no such program, or when it is another; [`SandboxError::Folder`] for a node whose
    /// folder has a name that the program takes apart; [`SandboxError::Invalid`] for a sandbox user that would be root.
    pub fn new(node: Node, config: SingularityConfig) -> Result<Self, SandboxError> {
        check_name(node.folder())?;
        let user = start::become_user(config.sandbox_user)?;
        let program = Program::find(config.program)?;
        let uid = user.map_or_else(|| geteuid().as_raw(), |user| user.uid);
        Ok(Self { node, program, user, no_range: subid::ranges(uid).err() })
    }

    /// Returns the path of the program that is used.
    pub fn program(&self) -> &Path {
        &self.program.path
    }

    /// Returns what the program calls itself, such as `apptainer 1.4.5`.
    pub fn version(&self) -> &str {
        &self.program.version
    }

    /// Returns the configuration that the program is given in place of the site's, if it takes one.
    pub fn conf(&self) -> Option<&str> {
        self.program.conf.as_deref()
    }

    /// Returns the flags of the program's `exec` that sandboxes start with, less what differs from one to another. With
    /// [`conf`](Self::conf), it is what the program alone has to be measured by.
    pub fn flags(&self) -> Vec<&'static str> {
        let mut flags = vec!["--userns", "--pid", "--cleanenv", "--no-init", "--no-home", "--no-umask"];
        flags.extend(self.program.own_flags());
        flags
    }

    /// Makes the sandbox's own folder: plain names for everything that the launcher is told of, so that no image and no
    /// source of a bind has a name that means something in an argument.
    fn furnish(&self, folder: &Path, setup: &Setup, guest: &Path) -> io::Result<Furniture> {
        let mut shown = vec![mount_argument(guest, "guest", false)];
        match &setup.image {
            setup::Image::Directory(path) | setup::Image::File(path) => symlink(path, folder.join("image"))?,
            // Refused before.
            setup::Image::Host | setup::Image::Root => return Err(io::ErrorKind::InvalidInput.into()),
        }
        let mut layers = Vec::new();
        for (number, layer) in setup.layers.iter().enumerate() {
            let link = folder.join(format!("layer-{number}"));
            symlink(layer, &link)?;
            shown.push(mount_argument(&link, &format!("layers/{number}"), false));
            layers.push(format!("{OWN_FOLDER}/layers/{number}").into());
        }
        let mut binds = Vec::new();
        for (number, bind) in setup.binds.iter().enumerate() {
            if self.program.shows_devices() && bind.source.starts_with("/dev") {
                // The launcher's own binds are of no use for devices, but its /dev is the host's.
                binds.push(bind.clone());
                continue;
            }
            let link = folder.join(format!("bind-{number}"));
            symlink(&bind.source, &link)?;
            shown.push(mount_argument(&link, &format!("binds/{number}"), bind.writable));
            let source = PathBuf::from(format!("{OWN_FOLDER}/binds/{number}"));
            binds.push(Bind { source, ..bind.clone() });
        }
        let resolv_conf = Path::new("/etc/resolv.conf");
        if setup.network == Network::Host && resolv_conf.exists() {
            shown.push(mount_argument(resolv_conf, "resolv.conf", false));
        }
        let conf = folder.join("launcher.conf");
        let conf = match &self.program.conf {
            Some(text) => {
                fs::write(&conf, text)?;
                // Whatever the umask: who starts this and who reads it may be two users.
                fs::set_permissions(&conf, fs::Permissions::from_mode(0o644))?;
                Some(conf)
            }
            None => None,
        };
        Ok(Furniture { folder: folder.to_owned(), image: folder.join("image"), conf, shown, layers, binds })
    }

    fn launch(&self, setup: &Setup, furniture: &Furniture, users: Users) -> Launch {
        let mut argv: Vec<OsString> = vec![self.program.path.clone().into(), "--quiet".into()];
        if let Some(conf) = &furniture.conf {
            argv.extend(["--config".into(), conf.into()]);
        }
        argv.push("exec".into());
        argv.extend(self.flags().into_iter().map(Into::into));
        argv.extend(self.program.user_flags(users).iter().map(Into::into));
        for shown in &furniture.shown {
            argv.extend(["--bind".into(), shown.clone()]);
        }
        argv.extend(["--pwd".into(), "/".into(), furniture.image.clone().into()]);
        argv.extend([format!("{OWN_FOLDER}/guest").into(), LAUNCHED_FLAG.into()]);
        Launch {
            protocol: PROTOCOL,
            argv,
            env: self.program.env.clone(),
            max_life: setup.max_life,
            become_user: setup.become_user,
            folder: furniture.folder.clone(),
        }
    }

    /// Returns the guest as a file that a launcher can show. The first call copies it and executes it once.
    async fn guest_file(&self) -> Result<PathBuf, SandboxError> {
        let node = self.node.clone();
        let made = tokio::task::spawn_blocking(move || node.guest_file()).await;
        made.unwrap_or_else(|error| Err(SandboxError::at("make guest's file", io::Error::other(error))))
    }

    /// Says what the owner and then the guest, which is in the file `guest`, are to be.
    fn orders(
        &self,
        spec: &SandboxSpec,
        guest: &Path,
        claim: &Claim,
        mut setup: Setup,
    ) -> Result<Orders, SandboxError> {
        let folder = claim.run_dir().map_err(|source| SandboxError::at("make folder", source))?;
        let furniture = self
            .furnish(&folder, &setup, guest)
            .map_err(|source| SandboxError::at("furnish the sandbox's folder", source))?;
        let users = match &setup.image {
            _ if setup.fakeroot && self.no_range.is_none() => Users::Range,
            setup::Image::File(_) => Users::Root,
            setup::Image::Directory(_) | setup::Image::Host | setup::Image::Root => Users::Own,
        };
        let launch = self.launch(&setup, &furniture, users);
        let explain = Explain::new(self.program.path.clone(), spec, &setup, &folder);
        let own_namespace = fs::metadata("/proc/self/ns/user").map(|meta| meta.ino());
        let own_namespace = own_namespace.map_err(|source| SandboxError::at("read namespace", source))?;
        setup.outer_namespace = Some(own_namespace);
        setup.no_range.clone_from(&self.no_range);
        setup.become_user = None; // done by the owner, and for good
        setup.image = setup::Image::Root;
        setup.layers = furniture.layers;
        setup.binds = furniture.binds;
        Ok(Orders {
            frames: vec![Order::Launch(launch), Order::Enter(setup)],
            has_launcher: true,
            explain: Box::new(move |failure| explain.explain(Path::new("/proc"), failure)),
        })
    }
}

#[async_trait]
impl Runtime for SingularityRuntime {
    fn name(&self) -> &'static str {
        KIND.name
    }

    async fn start(&self, spec: &SandboxSpec) -> Result<Sandbox, SandboxError> {
        if spec.image == Image::Host {
            let reason = "the singularity runtime has no image of its own: name a directory, a .sif or a squashfs";
            return Err(SandboxError::Invalid { what: "image", reason: reason.to_owned() });
        }
        let setup = spec.to_setup(self.user)?;
        let guest = self.guest_file().await?;
        start::start(&self.node, KIND, spec, setup, |claim, setup| self.orders(spec, &guest, claim, setup)).await
    }
}

/// Refuses a folder that could not be named in an argument of `--bind`, which has its own meaning for some characters.
fn check_name(folder: &Path) -> Result<(), SandboxError> {
    let is_special = |byte: &u8| b":,\"'\\".contains(byte) || byte.is_ascii_control();
    if !folder.as_os_str().as_bytes().iter().any(is_special) {
        return Ok(());
    }
    Err(SandboxError::Folder {
        path: folder.to_owned(),
        problem: "has a character in its name that Apptainer takes apart (: , \" ' \\ or a control character)"
            .to_owned(),
        advice: "name another folder for the node (--run-dir or TMPDIR)".to_owned(),
        source: io::ErrorKind::InvalidFilename.into(),
    })
}

/// What a sandbox's own folder holds, and what of the host the launcher is to show.
struct Furniture {
    folder: PathBuf,
    image: PathBuf,
    conf: Option<PathBuf>,
    /// Arguments of `--bind`.
    shown: Vec<OsString>,
    /// The layers' folders as the guest finds them.
    layers: Vec<OsString>,
    /// The binds as the guest finds them.
    binds: Vec<Bind>,
}

/// Returns an argument of `--bind` that shows `path` in the guest's own folder.
fn mount_argument(path: &Path, name: &str, is_writable: bool) -> OsString {
    let mut argument = OsString::from(path);
    argument.push(format!(":{OWN_FOLDER}/{name}{}", if is_writable { "" } else { ":ro" }));
    argument
}
