//! Files that say of what they lie beside that a process has it, for as long as that process lives.
//!
//! Each process has one such file in a store, its *pulse*: it says who the process is, and a thread touches it every few
//! seconds. What the process claims or refers to is marked by further hard links of that one file. A link is made whole or
//! not at all, and by one process only, on NFS too; and every mark beats with the one touch.
//!
//! Whoever finds a mark asks whether its process lives. On the same machine the kernel knows, at once. Of another machine's
//! process only the time of its last beat is known, by the file system's clock and not by either machine's.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, SystemTime},
};

use nix::{
    fcntl::AT_FDCWD,
    sys::{
        stat::{UtimensatFlags, utimensat},
        time::TimeSpec,
    },
};
use parking_lot::{Condvar, Mutex};

use super::owner::Owner;
use crate::node::Maker;

/// Time between two beats.
const BEAT: Duration = Duration::from_secs(5);

/// How long the process of another machine may have been silent before it is taken for dead.
pub(super) const SILENCE: Duration = Duration::from_mins(1);

/// Longest content of such a file, in bytes.
const MAX_BYTES: u64 = 4096;

/// This process's pulse, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Pulse {
    token: String,
    beating: Arc<Beating>,
    heart: Option<JoinHandle<()>>,
    /// What is claimed by this process's threads, which have one pulse.
    pub(super) claimed: Mutex<HashSet<PathBuf>>,
    maker: Maker,
}

#[derive(Debug)]
struct Beating {
    owner: Owner,
    path: PathBuf,
    /// Marks of what is in use, and where that is.
    used: Mutex<HashMap<PathBuf, PathBuf>>,
    is_over: Mutex<bool>,
    ended: Condvar,
}

impl Pulse {
    /// Starts one in a folder of nothing else.
    pub(crate) fn start(folder: &Path) -> io::Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);

        let owner = Owner::this()?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let host: String =
            owner.host.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(64).collect();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let token = format!("{host}-{}-{:x}-{count}", std::process::id(), since.as_nanos());
        let path = folder.join(&token);
        let beating = Arc::new(Beating {
            owner,
            path,
            used: Mutex::default(),
            is_over: Mutex::new(false),
            ended: Condvar::new(),
        });
        beating.write()?;
        let work = Arc::clone(&beating);
        let heart = thread::Builder::new().name("prorl-pulse".to_owned()).spawn(move || work.run());
        let heart = heart.inspect_err(|_| {
            let _ = fs::remove_file(&beating.path);
        })?;
        Ok(Self { token, beating, heart: Some(heart), claimed: Mutex::default(), maker: Maker::this() })
    }

    /// Returns a file name that is this process's alone, in this store, for good: letters, digits and `-`.
    pub(crate) fn token(&self) -> &str {
        &self.token
    }

    /// Returns whose it is.
    pub(super) fn owner(&self) -> &Owner {
        &self.beating.owner
    }

    /// Tells whether this process started it, and is no forked copy.
    pub(super) fn is_mine(&self) -> bool {
        self.maker.is_here()
    }

    /// Marks something: makes `path`. It must not be there yet, or be a mark of this process.
    pub(crate) fn mark(&self, path: &Path) -> io::Result<()> {
        let mut made = fs::hard_link(&self.beating.path, path);
        if made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) && !self.beating.path.exists() {
            self.beating.beat()?;
            made = fs::hard_link(&self.beating.path, path);
        }
        match made {
            // An answer of a file server that was lost, and a second question; or all marks were just made again.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && self.has_marked(path) => Ok(()),
            made => made,
        }
    }

    /// Keeps a mark, that of what is in `place`: it is made again if others remove it because this process stood still.
    pub(super) fn keep(&self, mark: PathBuf, place: PathBuf) {
        self.beating.used.lock().insert(mark, place);
    }

    /// Removes such a mark.
    pub(super) fn unmark(&self, mark: &Path) {
        let mut used = self.beating.used.lock();
        used.remove(mark);
        let _ = fs::remove_file(mark);
        drop(used);
    }

    /// Tells whether a mark is this process's.
    pub(super) fn has_marked(&self, path: &Path) -> bool {
        let same = |a: &fs::Metadata, b: &fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        let [mine, its] = [&self.beating.path, path].map(fs::symlink_metadata);
        matches!((mine, its), (Ok(mine), Ok(its)) if same(&mine, &its))
    }

    /// Beats, and returns the time of that by the file system's clock.
    pub(super) fn now(&self) -> io::Result<SystemTime> {
        self.beating.beat()?;
        File::open(&self.beating.path)?.metadata()?.modified()
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            std::mem::forget(self.heart.take()); // a forked process has no copy of the thread
            return;
        }
        *self.beating.is_over.lock() = true;
        self.beating.ended.notify_all();
        if let Some(heart) = self.heart.take() {
            let _ = heart.join();
        }
        let _ = fs::remove_file(&self.beating.path);
    }
}

impl Beating {
    fn run(&self) {
        let mut is_over = self.is_over.lock();
        while !*is_over {
            if self.ended.wait_for(&mut is_over, BEAT).timed_out() && !*is_over {
                parking_lot::MutexGuard::unlocked(&mut is_over, || {
                    if let Err(error) = self.beat() {
                        tracing::warn!(path = %self.path.display(), %error, "other machines may take this process for dead");
                    }
                });
            }
        }
    }

    /// Touches the file. One that is gone, because this process stood still for so long that others removed it, is made anew.
    fn beat(&self) -> io::Result<()> {
        match touch(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.write()?;
                self.mark_again();
                Ok(())
            }
            touched => touched,
        }
    }

    /// Marks anew what is in use and still there: its marks are gone, or links of a file that beats no more.
    fn mark_again(&self) {
        let used = self.used.lock();
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let link = self.path.with_file_name(format!("again-{name}"));
        for (mark, place) in used.iter().filter(|(_, place)| place.exists()) {
            if let Some(folder) = mark.parent() {
                let _ = fs::create_dir(folder); // if it is missing
            }
            // By a rename, which takes the place of an old mark.
            let marked = fs::hard_link(&self.path, &link).and_then(|()| fs::rename(&link, mark));
            if let Err(error) = marked {
                let _ = fs::remove_file(&link);
                tracing::warn!(path = %place.display(), %error, "others may remove what this process uses");
            } else if !place.exists() {
                let _ = fs::remove_file(mark);
            }
        }
        drop(used);
    }

    /// Makes the file, whole and at once.
    fn write(&self) -> io::Result<()> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let unfinished = self.path.with_file_name(format!("new-{name}"));
        let written = File::create_new(&unfinished)
            .and_then(|mut file| file.write_all(&serde_json::to_vec(&self.owner)?))
            .and_then(|()| fs::rename(&unfinished, &self.path));
        written.inspect_err(|_| {
            let _ = fs::remove_file(&unfinished);
        })
    }
}

/// Sets a file's times to now, by the clock of the file system that it is on.
pub(super) fn touch(path: &Path) -> io::Result<()> {
    let now = TimeSpec::UTIME_NOW;
    Ok(utimensat(AT_FDCWD, path, &now, &now, UtimensatFlags::NoFollowSymlink)?)
}

/// What became of the process that a mark is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The mark is gone.
    Unmarked,
    /// It is dead.
    Dead,
    /// It lives, or may; with its name for people.
    Lives(String),
}

/// Finds out what became of the process that a mark is of, as `me` sees it; `now` is asked for the file system's clock.
pub(super) fn fate(mark: &Path, me: &Owner, now: impl FnOnce() -> io::Result<SystemTime>) -> io::Result<Fate> {
    // Opened, because a client of NFS asks the server for the times of a file that is opened and may not for others.
    let file = match File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(mark) {
        Err(error) if is_gone(&error) => return Ok(Fate::Unmarked),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(Fate::Lives("another user's process".to_owned()));
        }
        file => file?,
    };
    let mut text = Vec::new();
    let read = (&file).take(MAX_BYTES).read_to_end(&mut text).and_then(|_| file.metadata()?.modified());
    let last = match read {
        Err(error) if is_gone(&error) => return Ok(Fate::Unmarked),
        last => last?,
    };
    // What cannot be read is judged by its beats alone.
    let owner: Option<Owner> = serde_json::from_slice(&text).ok();
    let lives = owner.as_ref().and_then(|owner| owner.lives(me));
    let lives = match lives {
        Some(lives) => lives,
        None => now()?.duration_since(last).unwrap_or_default() <= SILENCE,
    };
    if !lives {
        return Ok(Fate::Dead);
    }
    Ok(Fate::Lives(owner.map_or_else(|| "an unknown process".to_owned(), |owner| owner.to_string())))
}

/// Tells whether the process of a pulse has ended, which removes the pulse, or is dead.
#[cfg(feature = "images")]
pub(crate) fn has_ended(pulse: &Pulse, mark: &Path) -> io::Result<bool> {
    Ok(!matches!(fate(mark, pulse.owner(), || pulse.now())?, Fate::Lives(_)))
}

/// Removes what dead processes have left in a folder of pulses, and returns how many they were.
#[cfg(feature = "images")]
pub(crate) fn remove_dead(pulse: &Pulse, folder: &Path) -> io::Result<usize> {
    let mut n_removed = 0;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if fate(&path, pulse.owner(), || pulse.now())? == Fate::Dead {
            n_removed += usize::from(fs::remove_file(path).is_ok());
        }
    }
    Ok(n_removed)
}

/// Tells whether an error says that a file was removed; a client of NFS may say it so.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE))
}
