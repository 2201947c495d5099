use std::{
    fs::File,
    io::{self, Read as _},
    num::NonZeroUsize,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use nix::unistd::geteuid;
use rustix::fs::{CWD, Mode, OFlags, openat};
use sha2::{Digest as _, Sha256};

use super::{
    Cancel, ImageError, Progress, Source, UnpackLimits, environment, folder,
    layered::{self, Wanted},
    meter::Meter,
    oci::{self, Files},
    part::{Packing, Part},
    remote, shared,
    sif::{self, Packed},
    source::{Choice, Kind},
    squashfs,
};
use crate::{
    SandboxUser,
    store::{Digest, Filled, ImageStore, SourceKey, StoredImage},
};

/// Unpacks images into a store, each once.
///
/// A source that is as it was is not read again: that is a hit, which costs a few system calls. A file is as it was when its path,
/// place on disk, size and times are the same; a folder, when that holds for all that is in it, which takes a look at every file;
/// an OCI layout, when it leads to the same manifest.
///
/// A registry's image is looked up by its [name](Source::default_name), which is given to it when it is fetched: the tag of a
/// registry may come to mean something else, and what is in the store is used all the same until `refresh` is set.
///
/// The variables of a `.sif`, or of a squashfs that was one, are those that its scripts in `/.singularity.d/env` plainly set; no
/// script is run.
#[derive(Clone, Debug)]
pub struct Unpacker {
    /// Where to.
    pub store: ImageStore,
    /// How much.
    pub limits: UnpackLimits,
    /// How many threads one image may use.
    pub threads: NonZeroUsize,
    /// The program that fetches `docker://`; looked for along `PATH` without one. Where the store has a guest it runs below that,
    /// and nothing is left of it when this process is killed.
    pub apptainer: Option<PathBuf>,
    /// Whether registries are spoken to without encryption.
    pub no_https: bool,
    /// Whether a registry's image is fetched again although the store has one of its name.
    pub refresh: bool,
}

/// What a source has turned out to be.
enum Plan {
    /// A `.sif` or a squashfs.
    Packed(Opened),
    /// A tar with an image in it.
    Archive(Opened, Wanted),
    /// An OCI layout in a folder.
    Layout(PathBuf, Choice),
    /// A folder with an image's files in it, and what it looks like.
    Folder(PathBuf, String),
    /// A registry's image.
    Registry(String),
    /// An image that the store has.
    Known(StoredImage),
}

/// A file that is read.
#[derive(Clone)]
struct Opened {
    path: PathBuf,
    file: Arc<File>,
    len: u64,
    looks: String,
}

/// Where an image is unpacked to, and by what rules.
#[derive(Clone, Copy)]
struct Task<'a> {
    source: &'a Source,
    root: &'a Path,
    owner: Option<SandboxUser>,
    cancel: &'a Cancel,
    progress: &'a dyn Progress,
}

impl Unpacker {
    /// Makes one with the default limits and as many threads as there are processors for this process.
    pub fn new(store: ImageStore) -> Self {
        let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Self { store, limits: UnpackLimits::default(), threads, apptainer: None, no_https: false, refresh: false }
    }

    /// Returns the image of `source`, unpacking it where the store does not have it. Blocks, for as long as that takes.
    ///
    /// Threads and processes that ask for one image at a time wait for the first of them, which does the work.
    ///
    /// # Errors
    /// When there is no image, or none that may be unpacked, or the store has no room; nothing of it is left then.
    pub fn unpack(&self, source: &Source, cancel: &Cancel, progress: &dyn Progress) -> Result<StoredImage, ImageError> {
        let (key, plan) = self.plan(source, cancel)?;
        self.carry_out(source, &key, plan, cancel, progress)
    }

    /// Does the same on a thread of the runtime's that may block.
    ///
    /// # Errors
    /// As [`unpack`](Self::unpack). Where several wait for the same work, its failure is [`ImageError::Shared`].
    ///
    /// # Cancel safety
    /// Dropping the future ends the work soon and leaves nothing of it, unless others in this process wait for the same image
    /// through this function: then it goes on for them.
    pub async fn unpack_async(&self, source: Source, progress: Arc<dyn Progress>) -> Result<StoredImage, ImageError> {
        let looking = CancelOnDrop(Cancel::default());
        let look = {
            let (this, source, cancel) = (self.clone(), source.clone(), looking.0.clone());
            move || this.plan(&source, &cancel)
        };
        // No answer means that the runtime ends, or that the look has panicked, which was told by then.
        let looked = tokio::task::spawn_blocking(look).await.map_err(|_no_answer| ImageError::Cancelled)?;
        let (key, plan) = looked?;
        if let Plan::Known(image) = plan {
            return Ok(image);
        }
        let (ticket, job) = shared::join((self.store.dir().to_owned(), key.clone()), progress);
        if let Some(job) = job {
            let this = self.clone();
            tokio::task::spawn_blocking(move || {
                job.run(|cancel, progress| this.carry_out(&source, &key, plan, cancel, progress));
            });
        }
        ticket.wait().await
    }

    /// Tells whether the store has the image of `source`, so that nothing would be unpacked. Blocks for a look at the source.
    ///
    /// # Errors
    /// When there is no such source, or the store cannot be read.
    pub fn is_there(&self, source: &Source) -> Result<bool, ImageError> {
        Ok(match self.plan(source, &Cancel::default())? {
            (_, Plan::Known(_)) => true,
            (key, _) => self.store.known(&key)?.is_some(),
        })
    }

    /// Finds out what a source is, and the key under which the store knows it.
    fn plan(&self, source: &Source, cancel: &Cancel) -> Result<(SourceKey, Plan), ImageError> {
        let image = source.as_str();
        let wrong = |problem: &str| ImageError::Source { image: image.to_owned(), problem: problem.to_owned() };
        let path = match source.kind() {
            Kind::Docker(reference) => return self.plan_registry(source, reference),
            Kind::Path(path) | Kind::DockerArchive(path) | Kind::Oci { path, .. } => path,
        };
        let path = path.canonicalize().map_err(|error| ImageError::at("open image", path, error))?;
        if path.is_dir() {
            let choice = match source.kind() {
                Kind::Oci { choice, .. } => choice.clone(),
                Kind::DockerArchive(_) => return Err(wrong("is a folder: expected what docker save writes")),
                _ => Choice::Only,
            };
            if matches!(source.kind(), Kind::Oci { .. }) || path.join(oci::MARK).is_file() {
                let files = Files::Folder(path.clone());
                let manifest = oci::Reader { image, files: &files }.find(&choice)?;
                return Ok((SourceKey::new(format!("manifest {}", manifest.digest)), Plan::Layout(path, choice)));
            }
            let store = self.store.dir();
            if store.canonicalize().is_ok_and(|store| store.starts_with(&path)) {
                let problem = format!("has the store in it, {}, which would be copied into itself", store.display());
                return Err(wrong(&problem));
            }
            let looks = folder::look_over(&path, cancel)?;
            return Ok((SourceKey::new(format!("folder {} {looks}", path.display())), Plan::Folder(path, looks)));
        }
        let opened = Opened::new(path, image)?;
        let mut start = [0; 512];
        let n_read = Part::new(Arc::clone(&opened.file), 0, opened.len)
            .peek(&mut start)
            .map_err(|error| ImageError::at("read", &opened.path, error))?;
        let is_tar = start[257..].starts_with(b"ustar") || Packing::of(&start[..n_read]) != Packing::Plain;
        let wanted = match source.kind() {
            Kind::DockerArchive(_) => Some(Wanted::Saved),
            Kind::Oci { choice, .. } => Some(Wanted::Layout(choice.clone())),
            _ => is_tar.then_some(Wanted::Any),
        };
        let key = SourceKey::new(format!("file {} {wanted:?}", opened.looks));
        Ok((key, wanted.map_or_else(|| Plan::Packed(opened.clone()), |wanted| Plan::Archive(opened.clone(), wanted))))
    }

    fn plan_registry(&self, source: &Source, reference: &str) -> Result<(SourceKey, Plan), ImageError> {
        let key = format!("docker://{reference}");
        if self.refresh {
            // A key that nothing is known by.
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let key = SourceKey::new(format!("{key} at {now:?}"));
            return Ok((key, Plan::Registry(reference.to_owned())));
        }
        let named = self.store.named(&source.default_name())?;
        let plan = named.map_or_else(|| Plan::Registry(reference.to_owned()), Plan::Known);
        Ok((SourceKey::new(key), plan))
    }

    fn carry_out(
        &self,
        source: &Source,
        key: &SourceKey,
        plan: Plan,
        cancel: &Cancel,
        progress: &dyn Progress,
    ) -> Result<StoredImage, ImageError> {
        let plan = match plan {
            Plan::Known(image) => return Ok(image),
            plan => plan,
        };
        let is_registry = matches!(plan, Plan::Registry(_));
        let owner = self.store.config().owner.filter(|_| geteuid().is_root());
        let make = |root: &Path| self.make(plan, Task { source, root, owner, cancel, progress });
        let on_wait = |whom: &str| progress.begin(&format!("wait for {whom}"), None);
        let image = self.store.ensure(key, &|| cancel.is_cancelled(), &on_wait, make)?;
        if is_registry {
            self.store.set_name(&source.default_name(), &image.filled().digest)?;
        }
        Ok(image)
    }

    fn make(&self, plan: Plan, task: Task<'_>) -> Result<Filled, ImageError> {
        let image = task.source.as_str();
        match plan {
            Plan::Known(image) => Ok(image.filled().clone()),
            Plan::Packed(opened) => {
                let filled = self.packed(&opened, task)?;
                opened.check(image)?;
                Ok(filled)
            }
            Plan::Archive(opened, wanted) => {
                let filled = self.archive(&opened, &wanted, task)?;
                opened.check(image)?;
                Ok(filled)
            }
            Plan::Layout(path, choice) => self.layered(&Files::Folder(path), &Wanted::Layout(choice), None, task),
            Plan::Folder(path, looks) => {
                let meter = Meter::new(image, u64::MAX, self.limits, task.cancel, task.progress);
                task.progress.begin("copy", None);
                let (digest, notes) = folder::copy(&path, task.root, task.owner, &meter)?;
                if folder::look_over(&path, task.cancel)? != looks {
                    return Err(folder::changed(image, "a file in it"));
                }
                Ok(filled(task, &meter, digest, notes.into_lines()))
            }
            Plan::Registry(reference) => {
                let pull = remote::Pull {
                    image,
                    reference: &reference,
                    program: self.apptainer.as_deref(),
                    guest: self.store.config().guest.as_deref(),
                    no_https: self.no_https,
                    folder: &task.root.with_file_name("pull"),
                };
                task.progress.begin("fetch", None);
                let file = pull.run(task.cancel)?;
                let filled = Opened::new(file, image).and_then(|opened| self.packed(&opened, task));
                // Before it is published: only the root is an image's.
                crate::store::remove_tree(pull.folder)?;
                filled
            }
        }
    }

    /// Unpacks a squashfs, in a `.sif` or alone, and hashes the file meanwhile.
    fn packed(&self, opened: &Opened, task: Task<'_>) -> Result<Filled, ImageError> {
        let image = task.source.as_str();
        let (offset, len) = match sif::recognise(&opened.file, image)? {
            Packed::Sif { offset, len } => (offset, len),
            Packed::Squashfs { len } => (0, len),
        };
        let meter = Meter::new(image, len, self.limits, task.cancel, task.progress);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let hash = scope.spawn(|| opened.digest(|| is_over.load(Ordering::Relaxed) || task.cancel.is_cancelled()));
            let unpacked = squashfs::unpack(&opened.file, offset, len, task.root, task.owner, self.threads, &meter);
            is_over.store(unpacked.is_err(), Ordering::Relaxed);
            let hash = hash.join().expect("hashing does not panic");
            let mut notes = unpacked?.into_lines();
            let hash = hash?;
            let env = environment::read(task.root, &mut notes)?;
            Ok(Filled { env, ..filled(task, &meter, hash, notes) })
        })
    }

    /// Unpacks an image in a tar, which may be packed itself.
    fn archive(&self, opened: &Opened, wanted: &Wanted, task: Task<'_>) -> Result<Filled, ImageError> {
        let image = task.source.as_str();
        let plain = task.root.with_file_name("archive.tar");
        let meter = Meter::new(image, opened.len, self.limits, task.cancel, task.progress);
        let file = layered::plain_file(&opened.file, opened.len, &plain, &meter)?;
        let files = layered::open_archive(image, file)?;
        let filled = self.layered(&files, wanted, Some(opened.len), task)?;
        crate::store::remove_tree(&plain)?;
        Ok(filled)
    }

    fn layered(
        &self,
        files: &Files,
        wanted: &Wanted,
        packed_bytes: Option<u64>,
        task: Task<'_>,
    ) -> Result<Filled, ImageError> {
        let image = task.source.as_str();
        let stack = layered::find(&oci::Reader { image, files }, wanted)?;
        let packed_bytes = packed_bytes.unwrap_or_else(|| stack.packed_bytes());
        let meter = Meter::new(image, packed_bytes, self.limits, task.cancel, task.progress);
        task.progress.begin("unpack", Some(stack.packed_bytes()));
        let layered::Laid { notes, entries, bytes } = stack.lay(task.root, task.owner, &meter)?;
        let mut notes = notes.into_lines();
        let env = stack.config.env(&mut notes);
        Ok(Filled { entries, bytes, env, ..filled(task, &meter, stack.digest, notes) })
    }
}

fn filled(task: Task<'_>, meter: &Meter<'_>, digest: Digest, notes: Vec<String>) -> Filled {
    let (entries, bytes) = meter.counted();
    Filled { digest, source: task.source.to_string(), entries, bytes, env: Vec::new(), notes }
}

impl Opened {
    fn new(path: PathBuf, image: &str) -> Result<Self, ImageError> {
        // Without waiting for a writer, if it is a FIFO.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = openat(CWD, &path, flags, Mode::empty());
        let file = File::from(opened.map_err(|error| ImageError::at("open image", &path, error.into()))?);
        let metadata = file.metadata().map_err(|error| ImageError::at("look at", &path, error))?;
        if !metadata.is_file() {
            let problem = "is neither a file nor a folder".to_owned();
            return Err(ImageError::Source { image: image.to_owned(), problem });
        }
        let looks = looks(&path, &metadata);
        Ok(Self { path, file: Arc::new(file), len: metadata.len(), looks })
    }

    /// Refuses a file that has not stayed as it was.
    fn check(&self, image: &str) -> Result<(), ImageError> {
        let now = self.file.metadata().map_err(|error| ImageError::at("look at", &self.path, error))?;
        if looks(&self.path, &now) == self.looks { Ok(()) } else { Err(folder::changed(image, "it")) }
    }

    /// Hashes all of it, until `is_over`.
    fn digest(&self, is_over: impl Fn() -> bool) -> Result<Digest, ImageError> {
        let mut part = Part::new(Arc::clone(&self.file), 0, self.len);
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        while !is_over() {
            match part.read(&mut buffer).map_err(|error| ImageError::at("read", &self.path, error))? {
                0 if part.len() > 0 => {
                    let error = io::Error::from(io::ErrorKind::UnexpectedEof);
                    return Err(ImageError::at("read", &self.path, error));
                }
                0 => return Ok(Digest::from_bytes(hasher.finalize().into())),
                n_read => hasher.update(&buffer[..n_read]),
            }
        }
        Err(ImageError::Cancelled)
    }
}

/// All that tells a file from what it was, or is later, without reading it.
fn looks(path: &Path, metadata: &std::fs::Metadata) -> String {
    let times = [(metadata.mtime(), metadata.mtime_nsec()), (metadata.ctime(), metadata.ctime_nsec())];
    format!("{} {} {} {} {times:?}", path.display(), metadata.dev(), metadata.ino(), metadata.len())
}

/// Ends a look at a source when nobody waits for it any more.
struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}
