use std::{
    ffi::OsString,
    fmt, io,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path, PathBuf},
    time::Duration,
};

use prorl_core::hello;

use crate::{
    Bind, Limits, Network, SandboxError, SandboxUser, cpus, limits,
    setup::{self, Setup, Walls},
    store::{Base, Layer, LayerUsers, StoredImage},
};

/// How long a sandbox may live when nothing else is said. Whoever needs more says so; nothing lives for ever by mistake.
const MAX_LIFE: Duration = Duration::from_hours(24);

/// Longest variable of an image that is passed on, in bytes: a program with a longer one (128 KiB) cannot be executed.
const MAX_VARIABLE: usize = (128 << 10) - 1;

/// How many layers a sandbox can stand on. Their names have to fit into what one mount can be told.
const MAX_LAYERS: usize = 64;

/// What a sandbox's root file system is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Image {
    /// The host's own programs: `/usr`, `/bin`, `/sbin`, `/lib*` and a short list of `/etc`, under a private writable layer.
    /// Homes, `/run`, `/var`, `/srv`, `/opt` and other mounts of the host are not there.
    ///
    /// A folder of these that overlayfs refuses, because something is mounted below it (container runtimes mount drivers
    /// there), is read-only. The kernel then shows it only together with the mounts below it, which are read-only too.
    Host,
    /// An unpacked image: a directory that holds a whole root file system. It is never written to.
    Directory(PathBuf),
    /// An image in one file: a `.sif` of Singularity, or a squashfs. It needs a launcher that can mount it.
    File(PathBuf),
    /// An unpacked image of a store, which keeps it while the spec or the sandbox lives. The variables that it is known to set
    /// ([`Filled::env`](crate::store::Filled::env)) are set inside, but for those that no program could be given.
    Stored(StoredImage),
}

impl Image {
    /// Returns where it is, unless it is the host itself.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Host => None,
            Self::Directory(path) | Self::File(path) => Some(path),
            Self::Stored(image) => Some(image.root()),
        }
    }
}

/// What a sandbox is to be. Runtimes check it whole before they make anything.
#[derive(Clone, Debug)]
pub struct SandboxSpec {
    /// The guest's static program, as a path that the calling process can execute.
    pub guest: PathBuf,
    /// The root file system.
    pub image: Image,
    /// What other sandboxes have written, to lie between the image and what this one writes; the lowest first. Each was
    /// frozen over this image and over the layers before it. Nothing is copied, and nothing is written to them.
    pub layers: Vec<Layer>,
    /// Whether it can be frozen: see [`Sandbox::freeze`](crate::Sandbox::freeze). It costs two open files of this process
    /// as long as it stands.
    pub freezable: bool,
    /// Host name inside: 1 to 63 letters, digits and `-`.
    pub hostname: String,
    /// Environment of everything inside, over the standard one (`PATH`, `HOME`, `USER`, `LOGNAME`, `SHELL`, `LANG`, `TERM`),
    /// over the numbers of threads that go with [`Limits::cpus`] (`OMP_NUM_THREADS` and the like) and over that of an image
    /// of a store, see [`Image::Stored`]. Nothing of the host's environment is there. It never
    /// appears in an argument list.
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
    /// What it may use beside that.
    pub limits: Limits,
    /// Where a way out is to begin, if it has no network but its own: the port of its loopback interface at which the host
    /// listens, see [`Sandbox::take_proxy`](crate::Sandbox::take_proxy). The variables that programs look for are set to it.
    pub proxy_port: Option<u16>,
    /// What of the host is shown inside.
    pub binds: Vec<Bind>,
    /// How long the guest may take until its hello; and, before there is one, how long the machine may take to have room for it,
    /// see [`NodeConfig::min_free_memory`](crate::NodeConfig::min_free_memory).
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
            layers: Vec::new(),
            freezable: false,
            hostname: "sandbox".to_owned(),
            env: Vec::new(),
            fakeroot: false,
            network: Network::None,
            layer_bytes: limits::memory_total().min(2 << 30),
            tmp_bytes: limits::memory_total().min(512 << 20),
            limits: Limits::default(),
            proxy_port: None,
            binds: Vec::new(),
            start_timeout: Duration::from_secs(10),
            max_life: MAX_LIFE,
        }
    }

    /// Checks everything that can be known before a process exists, and returns what the guest is told.
    pub(crate) fn to_setup(&self, become_user: Option<SandboxUser>) -> Result<Setup, SandboxError> {
        self.check_values()?;
        let (image, binds) = self.check_files()?;
        let layers = self.check_layers(&self.base(&image))?;
        let needs_range = self.layers.iter().map(Layer::record).find(|record| record.users == LayerUsers::Range);
        Ok(Setup {
            protocol: hello::PROTOCOL,
            image,
            layers,
            needs_range: needs_range.map(|record| record.id.clone()),
            freezable: self.freezable,
            hostname: self.hostname.clone(),
            env: self.variables(),
            fakeroot: self.fakeroot,
            network: self.network,
            layer_bytes: self.layer_bytes,
            tmp_bytes: self.tmp_bytes,
            binds,
            max_life: self.max_life,
            become_user,
            no_range: None,
            loopback: None,
            proxy_port: self.proxy_port,
            walls: self.walls(),
            outer_namespace: None,
        })
    }

    /// Returns the limits that the kernel keeps.
    fn walls(&self) -> Walls {
        let Limits { pids, open_files, file_bytes, .. } = self.limits;
        Walls { pids, open_files, file_bytes, cpus: Vec::new() }
    }

    /// Returns the numbers of threads that go with its processors, then the image's variables, those of the proxy, and its own, so
    /// that its own win. What is wrong with an image's is no fault of whoever starts it; a proxy that an image names cannot be
    /// reached from here.
    fn variables(&self) -> Vec<(String, String)> {
        let of_image = match &self.image {
            Image::Stored(image) => image.filled().env.as_slice(),
            Image::Host | Image::Directory(_) | Image::File(_) => &[],
        };
        let is_usable = |(name, value): &&(String, String)| {
            let is_foreign_proxy = self.proxy_port.is_some() && name.to_ascii_lowercase().ends_with("_proxy");
            is_name(name)
                && !value.contains('\0')
                && name.len() + value.len() + "=".len() < MAX_VARIABLE
                && !is_foreign_proxy
        };
        let n_processors = self.limits.cpus.map(|cpus| cpus::whole(cpus).to_string());
        let threads = n_processors
            .iter()
            .flat_map(|number| cpus::THREAD_VARIABLES.iter().map(|name| ((*name).to_owned(), number.clone())));
        let mut variables: Vec<_> = threads.chain(of_image.iter().filter(is_usable).cloned()).collect();
        variables.extend(self.proxy_port.into_iter().flat_map(proxy_variables));
        variables.extend_from_slice(&self.env);
        variables
    }

    /// Checks that the files are there, and returns those that the guest must find, their links resolved: it looks for them
    /// from another root.
    fn check_files(&self) -> Result<(setup::Image, Vec<Bind>), SandboxError> {
        let guest_error = |source| SandboxError::Guest { path: self.guest.clone(), source };
        if !self.guest.metadata().map_err(guest_error)?.is_file() {
            return Err(guest_error(io::ErrorKind::IsADirectory.into()));
        }
        let image_error = |path: &Path, source| SandboxError::Image { path: path.to_owned(), source };
        let image = match &self.image {
            Image::Host => setup::Image::Host,
            Image::Directory(_) | Image::Stored(_) => {
                let path = self.image.path().unwrap_or(Path::new(""));
                let found = path.canonicalize().map_err(|source| image_error(path, source))?;
                if !found.is_dir() {
                    return Err(image_error(path, io::ErrorKind::NotADirectory.into()));
                }
                setup::Image::Directory(found)
            }
            Image::File(path) => {
                let found = path.canonicalize().map_err(|source| image_error(path, source))?;
                if !found.is_file() {
                    let why = "it is neither a file nor an unpacked directory";
                    return Err(image_error(path, io::Error::new(io::ErrorKind::InvalidInput, why)));
                }
                setup::Image::File(found)
            }
        };
        let binds = self.binds.iter().map(|bind| {
            let bind_error = |source| SandboxError::Bind { path: bind.source.clone(), source };
            let source = bind.source.canonicalize().map_err(bind_error)?;
            Ok(Bind { source, ..bind.clone() })
        });
        Ok((image, binds.collect::<Result<_, SandboxError>>()?))
    }

    /// Returns what a layer of this sandbox lies over, below all other layers. `found` is what the guest is told.
    pub(crate) fn base(&self, found: &setup::Image) -> Base {
        match (&self.image, found) {
            (Image::Stored(image), _) => Base::Image(image.filled().digest.clone()),
            (_, setup::Image::Directory(path) | setup::Image::File(path)) => Base::Path(path.clone()),
            (_, setup::Image::Host | setup::Image::Root) => Base::Host,
        }
    }

    /// Checks that each layer lies over what it was frozen over, and returns their folders.
    fn check_layers(&self, base: &Base) -> Result<Vec<OsString>, SandboxError> {
        if self.layers.len() > MAX_LAYERS {
            return Err(invalid("layers", format!("{} are more than {MAX_LAYERS}", self.layers.len())));
        }
        let mut below: Vec<&str> = Vec::new();
        let mut folders = Vec::new();
        for layer in &self.layers {
            let record = layer.record();
            let id = &record.id;
            if record.base != *base {
                let (made, found) = (Described(&record.base), Described(base));
                return Err(invalid("layers", format!("layer {id} was frozen over {made}, and not over {found}")));
            }
            if !record.below.iter().eq(&below) {
                let [made, found] = [record.below.join(", "), below.join(", ")];
                let reason = format!("layer {id} was frozen over layers [{made}], and here it lies over [{found}]");
                return Err(invalid("layers", reason));
            }
            if record.users == LayerUsers::Range && !self.fakeroot {
                let reason =
                    format!("layer {id} holds files of a fake root's other ids, and this is to be no fake root");
                return Err(invalid("layers", reason));
            }
            let open_error = |source| SandboxError::Image { path: layer.root().to_owned(), source };
            folders.push(layer.root().canonicalize().map_err(open_error)?.into_os_string());
            below.push(id);
        }
        Ok(folders)
    }

    /// Checks its limits and the sizes of its disk, each alone and against what this machine has.
    ///
    /// # Errors
    /// [`SandboxError::Invalid`] for the first that cannot be held, by its name: `limits.cpus`, `layer_bytes`. For its reason see
    /// [`Limits::check`].
    pub fn check_limits(&self) -> Result<(), SandboxError> {
        let whose = "this machine's memory, which holds what is written";
        for (what, bytes) in [("layer_bytes", self.layer_bytes), ("tmp_bytes", self.tmp_bytes)] {
            limits::check_bytes(what, Some(bytes), limits::LEAST_MEMORY, limits::memory_total(), whose)?;
        }
        self.limits.check()
    }

    fn check_values(&self) -> Result<(), SandboxError> {
        let label = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if !(1..=63).contains(&self.hostname.len()) || !self.hostname.bytes().all(label) {
            return Err(invalid("hostname", format!("{:?} is not 1 to 63 letters, digits and '-'", self.hostname)));
        }
        for (name, value) in &self.env {
            if !is_name(name) {
                return Err(invalid("env", format!("{name:?} is no name of a variable")));
            }
            if value.contains('\0') {
                // The value may be a secret, so only its name is said.
                return Err(invalid("env", format!("value of {name} holds a NUL byte")));
            }
        }
        self.check_limits()?;
        if self.start_timeout.is_zero() {
            return Err(invalid("start_timeout", "zero".to_owned()));
        }
        if self.max_life.is_zero() {
            return Err(invalid("max_life", "zero".to_owned()));
        }
        match self.proxy_port {
            Some(0) => return Err(invalid("proxy_port", "0 is no port that programs could be told of".to_owned())),
            Some(port) if self.network == Network::Host => {
                let reason = format!("{port} would be a port of the host, whose network the sandbox is to share");
                return Err(invalid("proxy_port", reason));
            }
            Some(_) | None => {}
        }
        if let Some(path) = self.image.path() {
            no_nul("image", path)?;
        }
        self.binds.iter().try_for_each(check_bind)
    }
}

/// Returns the variables that programs look for to find a proxy. Some know only those in lower case, some only the others.
fn proxy_variables(port: u16) -> impl Iterator<Item = (String, String)> {
    let proxy = format!("http://127.0.0.1:{port}");
    let own = "localhost,127.0.0.1,::1".to_owned();
    ["http", "https", "no"].into_iter().flat_map(move |what| {
        let value = if what == "no" { own.clone() } else { proxy.clone() };
        let name = format!("{what}_proxy");
        [(name.to_ascii_uppercase(), value.clone()), (name, value)]
    })
}

/// Tells whether a variable can have this name.
fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(|c: char| c == '=' || c.is_control())
}

/// A base in words.
struct Described<'a>(&'a Base);

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Base::Host => f.write_str("the host's programs"),
            Base::Image(digest) => write!(f, "image {digest}"),
            Base::Path(path) => write!(f, "image {}", path.display()),
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Digest, Filled, ImageStore, SourceKey, StoreConfig};

    #[test]
    fn programs_are_told_how_many_threads_to_start_unless_the_spec_says_so() {
        let mut spec = SandboxSpec::new("/proc/self/exe");
        spec.env = vec![("GOMAXPROCS".to_owned(), "7".to_owned())];
        assert_eq!(spec.variables(), spec.env, "without a limit nothing is said");
        spec.limits.cpus = Some(0.5);
        let variables = spec.variables();
        assert_eq!(variables.len(), cpus::THREAD_VARIABLES.len() + 1);
        let last = |name: &str| variables.iter().rfind(|(known, _)| known == name).map(|(_, value)| value.as_str());
        assert_eq!([last("OMP_NUM_THREADS"), last("GOMAXPROCS")], [Some("1"), Some("7")]);
    }

    #[test]
    fn variables_of_an_image_are_set_below_those_of_the_spec() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let folder = tempfile::tempdir().unwrap();
        let store = ImageStore::open(StoreConfig::new(folder.path().join("store"))).unwrap();
        let long = "x".repeat(MAX_VARIABLE);
        let unusable = [pair("", "a"), pair("A=B", "a"), pair("A\0", "a"), pair("NUL", "\0"), pair("LONG", &long)];
        let foreign = [pair("all_proxy", "socks5://192.0.2.1"), pair("HTTPS_PROXY", "http://192.0.2.1")];
        let of_image = [pair("PATH", "/opt/bin"), pair("MODE", "image")].into_iter().chain(foreign.clone());
        let env = of_image.chain(unusable).collect();
        let (digest, source) = (Digest::from_bytes([1; 32]), "one".to_owned());
        let filled = Filled { digest, source, entries: 0, bytes: 0, env, notes: Vec::new() };
        let made = store.ensure(&SourceKey::new("one"), &|| false, &|_| {}, |_| Ok::<_, io::Error>(filled));
        let mut spec = SandboxSpec::new("/proc/self/exe");
        spec.env = vec![pair("MODE", "spec")];
        assert_eq!(spec.to_setup(None).unwrap().env, spec.env);
        spec.image = Image::Stored(made.unwrap());
        let [all, https] = foreign;
        let expected = [pair("PATH", "/opt/bin"), pair("MODE", "image"), all.clone(), https, pair("MODE", "spec")];
        assert_eq!(spec.to_setup(None).unwrap().env, expected);
        // One that is to go through a proxy goes through that one.
        spec.proxy_port = Some(3128);
        let env = spec.to_setup(None).unwrap().env;
        assert!(!env.contains(&all), "{env:?}");
        let [ours, none] = ["http://127.0.0.1:3128", "localhost,127.0.0.1,::1"];
        for (name, value) in [
            ("http_proxy", ours),
            ("HTTP_PROXY", ours),
            ("https_proxy", ours),
            ("HTTPS_PROXY", ours),
            ("no_proxy", none),
            ("NO_PROXY", none),
        ] {
            assert_eq!(env.iter().filter(|(other, _)| other == name).collect::<Vec<_>>(), [&pair(name, value)]);
        }
        spec.env = vec![pair("no_proxy", "*")];
        assert_eq!(spec.to_setup(None).unwrap().env.last(), Some(&pair("no_proxy", "*")));
    }

    #[test]
    fn a_proxy_needs_a_port_and_a_network_of_the_sandboxs_own() {
        let refused = |spec: SandboxSpec| spec.to_setup(None).unwrap_err().to_string();
        let spec = |proxy_port| SandboxSpec { proxy_port: Some(proxy_port), ..SandboxSpec::new("/proc/self/exe") };
        assert!(refused(spec(0)).starts_with("invalid proxy_port: 0 is no port"));
        let shared = SandboxSpec { network: Network::Host, ..spec(3128) };
        assert!(refused(shared).starts_with("invalid proxy_port: 3128 would be a port of the host"));
    }
}
