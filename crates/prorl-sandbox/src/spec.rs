use std::{
    io,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path, PathBuf},
    time::Duration,
};

use prorl_core::hello;

use crate::{Bind, Image, Network, SandboxError, SandboxUser, setup::Setup};

/// How long a sandbox may live when nothing else is said. Whoever needs more says so; nothing lives for ever by mistake.
const MAX_LIFE: Duration = Duration::from_hours(24);

/// What a sandbox is to be. Runtimes check it whole before they make anything.
#[derive(Clone, Debug)]
pub struct SandboxSpec {
    /// The guest's static program, as a path that the calling process can execute.
    pub guest: PathBuf,
    /// The root file system.
    pub image: Image,
    /// Host name inside: 1 to 63 letters, digits and `-`.
    pub hostname: String,
    /// Environment of everything inside, over the standard one (`PATH`, `HOME`, `USER`, `LOGNAME`, `SHELL`, `LANG`, `TERM`).
    /// Nothing of the host's environment is there. It never appears in an argument list.
    pub env: Vec<(String, String)>,
    /// Whether the user inside is 0. It is then root over its own files only; outside it stays the ordinary user.
    /// The hello says which other ids it has: a range, where `/etc/subuid` and `newuidmap` give one, or none, where giving
    /// files away succeeds and does nothing.
    pub fakeroot: bool,
    /// What it can reach.
    pub network: Network,
    /// Size limit of the writable layer (everything but `/tmp` and `/dev/shm`), in bytes. It is memory.
    pub layer_bytes: u64,
    /// Size limits of `/tmp` and of `/dev/shm`, each, in bytes. They are memory.
    pub tmp_bytes: u64,
    /// What of the host is shown inside.
    pub binds: Vec<Bind>,
    /// How long the guest may take until its hello.
    pub start_timeout: Duration,
    /// How long the sandbox may live at most, held by the guest itself.
    pub max_life: Duration,
}

impl SandboxSpec {
    /// A sandbox of the host's own programs: own user, no network, 2 GiB of writable layer, 512 MiB of `/tmp`, 10 s to
    /// start, a day to live.
    pub fn new(guest: impl Into<PathBuf>) -> Self {
        Self {
            guest: guest.into(),
            image: Image::Host,
            hostname: "sandbox".to_owned(),
            env: Vec::new(),
            fakeroot: false,
            network: Network::None,
            layer_bytes: 2 << 30,
            tmp_bytes: 512 << 20,
            binds: Vec::new(),
            start_timeout: Duration::from_secs(10),
            max_life: MAX_LIFE,
        }
    }

    /// Checks everything that can be known before a process exists, and returns what the guest is told.
    pub(crate) fn to_setup(&self, become_user: Option<SandboxUser>) -> Result<Setup, SandboxError> {
        self.check_values()?;
        let (image, binds) = self.check_files()?;
        Ok(Setup {
            protocol: hello::PROTOCOL,
            image,
            hostname: self.hostname.clone(),
            env: self.env.clone(),
            fakeroot: self.fakeroot,
            network: self.network,
            layer_bytes: self.layer_bytes,
            tmp_bytes: self.tmp_bytes,
            binds,
            max_life: self.max_life,
            become_user,
            no_range: None,
            loopback: None,
            outer_namespace: None,
        })
    }

    /// Checks that the files are there, and returns those that the guest must find, their links resolved: it looks for them
    /// from another root.
    fn check_files(&self) -> Result<(Image, Vec<Bind>), SandboxError> {
        let guest_error = |source| SandboxError::Guest { path: self.guest.clone(), source };
        if !self.guest.metadata().map_err(guest_error)?.is_file() {
            return Err(guest_error(io::ErrorKind::IsADirectory.into()));
        }
        let image = match &self.image {
            Image::Host => Image::Host,
            Image::Directory(path) => {
                let image_error = |source| SandboxError::Image { path: path.clone(), source };
                let found = path.canonicalize().map_err(image_error)?;
                if !found.is_dir() {
                    return Err(image_error(io::ErrorKind::NotADirectory.into()));
                }
                Image::Directory(found)
            }
            Image::File(path) => {
                let image_error = |source| SandboxError::Image { path: path.clone(), source };
                let found = path.canonicalize().map_err(image_error)?;
                if !found.is_file() {
                    let why = "it is neither a file nor an unpacked directory";
                    return Err(image_error(io::Error::new(io::ErrorKind::InvalidInput, why)));
                }
                Image::File(found)
            }
            Image::Root => return Err(invalid("image", "a launched root is no image of a spec".to_owned())),
        };
        let binds = self.binds.iter().map(|bind| {
            let bind_error = |source| SandboxError::Bind { path: bind.source.clone(), source };
            let source = bind.source.canonicalize().map_err(bind_error)?;
            Ok(Bind { source, ..bind.clone() })
        });
        Ok((image, binds.collect::<Result<_, SandboxError>>()?))
    }

    fn check_values(&self) -> Result<(), SandboxError> {
        let label = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if !(1..=63).contains(&self.hostname.len()) || !self.hostname.bytes().all(label) {
            return Err(invalid("hostname", format!("{:?} is not 1 to 63 letters, digits and '-'", self.hostname)));
        }
        for (name, value) in &self.env {
            if name.is_empty() || name.contains(|c: char| c == '=' || c.is_control()) {
                return Err(invalid("env", format!("{name:?} is no name of a variable")));
            }
            if value.contains('\0') {
                // The value may be a secret, so only its name is said.
                return Err(invalid("env", format!("value of {name} holds a NUL byte")));
            }
        }
        for (what, bytes) in [("layer_bytes", self.layer_bytes), ("tmp_bytes", self.tmp_bytes)] {
            if bytes < 1 << 20 {
                return Err(invalid(what, format!("{bytes} is below one mebibyte")));
            }
        }
        if self.start_timeout.is_zero() {
            return Err(invalid("start_timeout", "zero".to_owned()));
        }
        if self.max_life.is_zero() {
            return Err(invalid("max_life", "zero".to_owned()));
        }
        if let Image::Directory(path) | Image::File(path) = &self.image {
            no_nul("image", path)?;
        }
        self.binds.iter().try_for_each(check_bind)
    }
}

fn check_bind(bind: &Bind) -> Result<(), SandboxError> {
    no_nul("binds", &bind.source)?;
    no_nul("binds", &bind.target)?;
    if !bind.source.is_absolute() {
        return Err(invalid("binds", format!("source {} is not absolute", bind.source.display())));
    }
    let mut parts = bind.target.components();
    let rooted = parts.next() == Some(Component::RootDir);
    let plain = parts.all(|part| matches!(part, Component::Normal(_)));
    let target = bind.target.display();
    if !rooted || !plain {
        return Err(invalid("binds", format!("target {target} is not an absolute path without '..'")));
    }
    let taken = ["/proc", "/dev", "/sys"].iter().any(|own| bind.target.starts_with(own));
    let is_shared_memory = bind.target.starts_with("/dev/shm") && bind.target != Path::new("/dev/shm");
    if (taken && !is_shared_memory) || bind.target == Path::new("/") {
        return Err(invalid("binds", format!("target {target} belongs to the sandbox itself")));
    }
    Ok(())
}

fn no_nul(what: &'static str, path: &Path) -> Result<(), SandboxError> {
    if path.as_os_str().as_bytes().contains(&0) {
        return Err(invalid(what, format!("{} holds a NUL byte", path.display())));
    }
    Ok(())
}

fn invalid(what: &'static str, reason: String) -> SandboxError {
    SandboxError::Invalid { what, reason }
}
