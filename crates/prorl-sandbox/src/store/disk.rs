//! Where things are in a store's folder.

use std::{
    collections::HashSet,
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use nix::unistd::geteuid;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{
    StoreConfig, StoreError,
    hold::Thing,
    janitor::Worker,
    owner::Owner,
    pulse::{self, Fate, Pulse},
};
use crate::{SandboxUser, node::Maker};

/// The format that this version writes, and the newest that it knows.
const FORMAT: u64 = 1;

/// The file that makes a folder a store.
const MARKER: &str = "store.json";

/// What an image or layer is, in its folder.
pub(super) const IMAGE_RECORD: &str = "image.json";
pub(super) const LAYER_RECORD: &str = "layer.json";

/// The file in an image's folder whose time is that of its last use.
pub(super) const USED: &str = "used";

/// The files, in the folder of an image or layer.
pub(super) const ROOT: &str = "root";

/// Folders of a store.
pub(super) const IMAGES: &str = "images";
pub(super) const LAYERS: &str = "layers";
pub(super) const NAMES: &str = "names";
pub(super) const SOURCES: &str = "sources";
pub(super) const CLAIMS: &str = "claims";
pub(super) const OWNERS: &str = "owners";
pub(super) const REFS: &str = "refs";
pub(super) const STAGING: &str = "staging";
pub(super) const TRASH: &str = "trash";
const FOLDERS: [&str; 9] = [IMAGES, LAYERS, NAMES, SOURCES, CLAIMS, OWNERS, REFS, STAGING, TRASH];

/// Content of [`MARKER`].
#[derive(Serialize, Deserialize)]
struct Marker {
    format: u64,
}

/// A store's folder, as this process sees it.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) config: StoreConfig,
    /// Before the pulse, so that its work is done by a process that is marked as alive.
    pub(super) worker: Arc<Worker>,
    /// What this process uses and could not mark.
    pub(super) unmarked: Mutex<HashSet<Thing>>,
    /// Started when the first thing is to be marked.
    pulse: Mutex<Option<Arc<Pulse>>>,
    me: OnceLock<Owner>,
    n_names: AtomicU64,
    pub(super) maker: Maker,
}

impl Disk {
    pub(super) fn open(mut config: StoreConfig) -> Result<Self, StoreError> {
        config.dir = std::path::absolute(&config.dir).map_err(|source| StoreError::io("find", &config.dir, source))?;
        let disk = Self {
            config,
            worker: Arc::new(Worker::new()),
            unmarked: Mutex::default(),
            pulse: Mutex::default(),
            me: OnceLock::new(),
            n_names: AtomicU64::new(0),
            maker: Maker::this(),
        };
        if !disk.is_store()? {
            disk.found()?;
        }
        for name in FOLDERS {
            let path = disk.config.dir.join(name);
            match make_folder(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                // What is there can be used without writing.
                Err(error) if is_closed(&error) => {}
                made => made.map_err(|source| StoreError::at("make", &path, source))?,
            }
        }
        Ok(disk)
    }

    /// Returns to whom files are given: root gives them away, and nobody else can.
    pub(super) fn owner(&self) -> Option<SandboxUser> {
        self.config.owner.filter(|_| geteuid().is_root())
    }

    /// Tells whether the folder is a store already, of a format that is known.
    fn is_store(&self) -> Result<bool, StoreError> {
        let path = self.config.dir.join(MARKER);
        let text = match fs::read(&path) {
            Err(error) if pulse::is_gone(&error) => return Ok(false),
            text => text.map_err(|source| StoreError::io("read", &path, source))?,
        };
        let dir = || self.config.dir.clone();
        match serde_json::from_slice(&text) {
            Ok(Marker { format: FORMAT }) => Ok(true),
            Ok(Marker { format: found @ 1.. }) => Err(StoreError::Newer { dir: dir(), found, known: FORMAT }),
            Ok(Marker { format: 0 }) => Err(StoreError::Damaged { path, problem: "there is no format 0".to_owned() }),
            Err(error) => Err(StoreError::Damaged { path, problem: error.to_string() }),
        }
    }

    /// Makes the folder a store. Several processes may do so at once; the marker is there before anything else.
    fn found(&self) -> Result<(), StoreError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);

        let dir = &self.config.dir;
        let at = |action| move |source| StoreError::io(action, dir, source);
        match make_folders(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.map_err(at("make store"))?,
        }
        let unfinished = format!("{MARKER}.{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        for entry in fs::read_dir(dir).map_err(at("list"))? {
            let name = entry.map_err(at("list"))?.file_name();
            if !name.to_string_lossy().starts_with(MARKER) {
                // Another process may just have made it.
                return if self.is_store()? { Ok(()) } else { Err(StoreError::NotAStore { dir: dir.clone() }) };
            }
        }
        let text = serde_json::to_vec(&Marker { format: FORMAT }).map_err(io::Error::from);
        write_by_rename(&dir.join(unfinished), &dir.join(MARKER), &text.map_err(at("write"))?).map_err(at("make store"))
    }

    pub(super) fn folder(&self, name: &str) -> PathBuf {
        self.config.dir.join(name)
    }

    /// Refuses to work in a forked copy of the process: it lacks the threads, and would undo what is the maker's.
    pub(super) fn check_maker(&self) -> Result<(), StoreError> {
        if self.maker.is_here() { Ok(()) } else { Err(StoreError::Forked { dir: self.config.dir.clone() }) }
    }

    /// Returns this process's pulse here, started on first use.
    pub(super) fn pulse(&self) -> Result<Arc<Pulse>, StoreError> {
        self.check_maker()?;
        let mut started = self.pulse.lock();
        if let Some(pulse) = &*started {
            return Ok(Arc::clone(pulse));
        }
        let folder = self.folder(OWNERS);
        let pulse = Pulse::start(&folder).map_err(|source| StoreError::at("mark this process in", &folder, source))?;
        Ok(Arc::clone(started.insert(Arc::new(pulse))))
    }

    /// Finds out what became of the process that a mark is of.
    pub(super) fn fate(&self, mark: &Path) -> Result<Fate, StoreError> {
        let at = |source| StoreError::io("read", mark, source);
        if self.me.get().is_none() {
            let _ = self.me.set(Owner::this().map_err(at)?); // the same, whoever sets it
        }
        let me = self.me.get().ok_or_else(|| at(io::Error::from_raw_os_error(libc::ESRCH)))?;
        pulse::fate(mark, me, || Ok(self.now())).map_err(at)
    }

    /// Returns the time by the clock of the store's file system, or by this machine's where the store cannot be written.
    pub(super) fn now(&self) -> SystemTime {
        let now = self.pulse().ok().and_then(|pulse| pulse.now().ok());
        now.unwrap_or_else(SystemTime::now)
    }

    /// Returns a name that nothing in the store has had: this process's token and a count.
    pub(super) fn fresh_name(&self) -> Result<String, StoreError> {
        let number = self.n_names.fetch_add(1, Ordering::Relaxed);
        Ok(format!("{}.{number}", self.pulse()?.token()))
    }

    /// Returns a path in the trash that nothing has had. Without a pulse it is named for a process that is none, so that
    /// everybody may remove what comes there.
    pub(super) fn fresh_trash(&self, what: &str) -> PathBuf {
        let name = self.fresh_name().unwrap_or_else(|_| {
            let number = self.n_names.fetch_add(1, Ordering::Relaxed);
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            format!("unmarked-{}-{:x}.{number}", std::process::id(), since.as_nanos())
        });
        self.folder(TRASH).join(format!("{what}.{name}"))
    }

    /// Writes a small file, whole and at once.
    pub(super) fn write(&self, path: &Path, text: &[u8]) -> Result<(), StoreError> {
        let unfinished = self.folder(STAGING).join(self.fresh_name()?);
        write_by_rename(&unfinished, path, text).map_err(|source| StoreError::at("write", path, source))
    }
}

/// Makes a folder that everybody may pass through, whatever the umask: sandboxes that root starts belong to another user.
pub(super) fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o755).create(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o755))
}

/// Makes a folder, and those above it that are missing.
fn make_folders(path: &Path) -> io::Result<()> {
    match make_folder(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let above = path.parent().filter(|above| !above.as_os_str().is_empty()).ok_or(error)?;
            match make_folders(above) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
            make_folder(path)
        }
        made => made,
    }
}

fn write_by_rename(unfinished: &Path, path: &Path, text: &[u8]) -> io::Result<()> {
    let written = File::create_new(unfinished)
        .and_then(|mut file| file.write_all(text))
        .and_then(|()| fs::rename(unfinished, path));
    written.inspect_err(|_| {
        let _ = fs::remove_file(unfinished);
    })
}

/// Takes for done what somebody else has done.
pub(super) fn gone(removed: io::Result<()>) -> io::Result<()> {
    removed.or_else(|error| if pulse::is_gone(&error) { Ok(()) } else { Err(error) })
}

/// Tells whether an error says that this process may not write here.
pub(super) fn is_closed(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EROFS | libc::EACCES | libc::EPERM))
}

/// Tells whether an error says that there is no room.
fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// Tells whether something could not be written for want of room.
pub(super) fn lacks_room(error: &StoreError) -> bool {
    matches!(error, StoreError::Io { source, .. } if is_full(source))
}

/// Hashes a text into a plain file name (FNV-1a, 128 bits). Whoever finds a file by it compares the text, which it holds.
pub(super) fn hash(text: &str) -> String {
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for byte in text.bytes() {
        hash = (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
    }
    format!("{hash:032x}")
}
