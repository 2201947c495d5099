//! Building image files from definition files.

mod apptainer;
mod claim;
mod definition;
mod inputs;
mod left;
mod pack;
mod record;
pub(super) mod run;
mod tail;
mod template;
mod work;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde_json::{Map, Value};

pub use self::template::Template;
use self::{claim::Turns, definition::DefinitionFile, work::Work};
use super::{Cancel, ImageError, Progress};
use crate::store::Digest;

/// How an image is packed. What packs better takes longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Zstandard, of a level from 1 to 22. Level 1 takes a twentieth of the time of gzip and a tenth more of space.
    Zstd(u8),
    /// What every Singularity can read.
    Gzip,
    /// The smallest, and slow to read.
    Xz,
    /// The fastest to read.
    Lz4,
}

impl Default for Compression {
    /// Zstandard of level 1.
    fn default() -> Self {
        Self::Zstd(1)
    }
}

impl Compression {
    /// Returns what `mksquashfs` is told.
    fn args(self) -> impl Iterator<Item = String> {
        let level = match self {
            Self::Zstd(level) => Some(level),
            Self::Gzip | Self::Xz | Self::Lz4 => None,
        };
        let level = level.map(|level| ["-Xcompression-level".to_owned(), level.to_string()]);
        ["-comp".to_owned(), self.name().to_owned()].into_iter().chain(level.into_iter().flatten())
    }

    fn name(self) -> &'static str {
        match self {
            Self::Zstd(_) => "zstd",
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Lz4 => "lz4",
        }
    }
}

impl std::fmt::Display for Compression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Zstd(level) => write!(f, "zstd-{level}"),
            Self::Gzip | Self::Xz | Self::Lz4 => f.write_str(self.name()),
        }
    }
}

/// When the image that is there already will do (paper, 3.2.2).
///
/// In every mode it must have been built here from the same rendered definition, into the same output and with the same
/// compression, and be as it was built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// Never.
    Scratch,
    /// While what the definition builds on and prorl's version are unchanged. Of something that is fetched from elsewhere only
    /// the reference is known, such as `docker://python:3.12`, and not whether it means the same as before.
    Versioned,
    /// While the dependency lock files are byte-identical.
    Lock,
}

/// What to build from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Definition {
    /// The shipped template of this name.
    Template(String),
    /// A file: a Jinja template if its name ends in `.j2` or `.jinja`. Any other is handed on as it is, byte for byte.
    File(PathBuf),
    /// A text, taken as a file of this name would be.
    Text {
        /// What it is called in messages.
        name: String,
        /// The text.
        text: String,
    },
}

/// What to build, and where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildRequest {
    /// What from. Relative paths in a definition are below the current folder, as Apptainer takes them.
    pub definition: Definition,
    /// What a template's variables are. Each must be known to the template, and each that it needs must be there.
    pub variables: Map<String, Value>,
    /// The image file. One that is there is replaced.
    pub output: PathBuf,
    /// When the image that is there will do.
    pub mode: CacheMode,
    /// The dependency lock files that count in the mode [`CacheMode::Lock`], one at least.
    pub locks: Vec<PathBuf>,
}

/// What came of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The image file; absolute.
    pub path: PathBuf,
    /// Of the image file.
    pub digest: Digest,
    /// Whether it was there already.
    pub reused: bool,
    /// Why it was reused or built, for people, such as `rebuilt: the base image /base.sif changed (sha256:ab.. is now sha256:cd..)`.
    pub reason: String,
    /// How long it took, waiting for others included.
    pub took: Duration,
}

/// Where builders work, and what with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuilderConfig {
    /// The guest's program, below which everything runs: so nothing is left of a build whose process dies.
    pub guest: PathBuf,
    /// The folder of what is remembered of builds, of claims, and of temporary trees, which can be several times as large as an
    /// image. Builders that share it build each output once.
    pub state: PathBuf,
    /// The program of Apptainer or Singularity; found along `PATH` otherwise. Not needed for definitions that only put metadata
    /// beside the files of an unpacked image.
    pub apptainer: Option<PathBuf>,
    /// The program `mksquashfs`; found along `PATH` otherwise.
    pub mksquashfs: Option<PathBuf>,
    /// How images are packed.
    pub compression: Compression,
}

impl BuilderConfig {
    /// A builder with the programs that are found.
    pub fn new(guest: impl Into<PathBuf>, state: impl Into<PathBuf>) -> Self {
        Self {
            guest: guest.into(),
            state: state.into(),
            apptainer: None,
            mksquashfs: None,
            compression: Compression::default(),
        }
    }
}

/// Builds image files. Clones share everything.
#[derive(Clone, Debug)]
pub struct ImageBuilder {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: BuilderConfig,
    turns: Turns,
}

impl ImageBuilder {
    /// Opens the state folder, which is made when it is missing, and removes what dead builds have left there, as
    /// [`sweep`](Self::sweep) does.
    ///
    /// # Errors
    /// When it cannot be made or written, or the compression is none.
    pub fn new(config: BuilderConfig) -> Result<Self, ImageError> {
        if let Compression::Zstd(level) = config.compression
            && !(1..=22).contains(&level)
        {
            let problem = format!("has no level {level}; expected 1 to 22");
            return Err(ImageError::Source { image: "zstd".to_owned(), problem });
        }
        let state = std::path::absolute(&config.state).map_err(|error| ImageError::at("find", &config.state, error))?;
        let config = BuilderConfig { state, ..config };
        let turns = Turns::open(&config.state)?;
        for folder in [record::RECORDS, left::TREES].map(|name| config.state.join(name)) {
            fs::create_dir_all(&folder).map_err(|error| ImageError::at("make", &folder, error))?;
        }
        let builder = Self { inner: Arc::new(Inner { config, turns }) };
        builder.tidy();
        Ok(builder)
    }

    /// Removes what builds of any output in this state folder have left whose processes have ended: temporary trees, images half
    /// made, and marks of who builds. Returns how many such things there were. What cannot be removed stays, with a warning.
    /// Builds that go on are not touched. Blocks, for as long as removing takes.
    ///
    /// A build cleans up after itself unless its process ends first; this is for the rest. Each new builder and each build
    /// begins with it.
    ///
    /// # Errors
    /// When the state folder cannot be read or written.
    pub fn sweep(&self) -> Result<usize, ImageError> {
        let Inner { config, turns } = &*self.inner;
        left::sweep(&config.state, &config.guest, turns)
    }

    /// Does the same, where that is not what was asked for.
    fn tidy(&self) {
        if let Err(error) = self.sweep() {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "what builds have left is not removed");
        }
    }

    /// Returns the definition files that are shipped as templates.
    pub fn templates() -> &'static [Template] {
        template::TEMPLATES
    }

    /// Renders a definition: returns what would be built.
    ///
    /// # Errors
    /// When there is no such definition, or a variable is missing or unknown, which is named with its line.
    pub fn render(definition: &Definition, variables: &Map<String, Value>) -> Result<Vec<u8>, ImageError> {
        Ok(load(definition, variables)?.bytes)
    }

    /// Builds an image, or finds that the one that is there will do. Blocks, for minutes.
    ///
    /// The image appears whole and at once. Of builds of one output at the same time the first builds, and the others wait and
    /// take what it has built. A build that ends early, however, leaves no process; what it leaves of files, if this process
    /// was killed or has ended meanwhile, the next build in the same state folder removes, see [`sweep`](Self::sweep).
    ///
    /// # Errors
    /// [`ImageError::Program`] with its last lines for a program that is missing or fails; [`ImageError::Source`] for a
    /// definition or a lock file that is not right, or an output that is a folder; [`ImageError::Io`] for an output in a folder that
    /// is missing or cannot be written, before anything is built; [`ImageError::Cancelled`] soon after `cancel` was said.
    pub fn build(&self, request: &BuildRequest, cancel: &Cancel, progress: &dyn Progress) -> Result<Built, ImageError> {
        let definition = load(&request.definition, &request.variables)?;
        let work = Work::new(&self.inner.config, request, &definition, cancel, progress)?;
        self.tidy();
        work.build(&self.inner.turns)
    }

    /// Builds as [`build`](Self::build) does, on a thread for work that blocks.
    ///
    /// # Errors
    /// See [`build`](Self::build).
    ///
    /// # Cancel safety
    /// Dropping the future ends the build soon, as cancelling it does. The drop does not wait for that: of a process that ends
    /// right after it the next build removes what is left.
    ///
    /// # Panics
    /// When the build does.
    pub async fn build_async(&self, request: BuildRequest, progress: Arc<dyn Progress>) -> Result<Built, ImageError> {
        let cancel = CancelOnDrop(Cancel::default());
        let (builder, word) = (self.clone(), cancel.0.clone());
        let building = tokio::task::spawn_blocking(move || builder.build(&request, &word, progress.as_ref()));
        match building.await {
            Ok(built) => built,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime is shutting down.
            Err(_) => Err(ImageError::Cancelled),
        }
    }
}

/// Cancels when nobody waits any more.
struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Reads a definition and renders it if it is a template. Nothing else is touched before that.
fn load(definition: &Definition, variables: &Map<String, Value>) -> Result<DefinitionFile, ImageError> {
    let (name, bytes, is_template) = match definition {
        Definition::Template(name) => (name.clone(), template::shipped(name)?.text.as_bytes().to_vec(), true),
        Definition::File(path) => {
            let bytes = fs::read(path).map_err(|error| ImageError::at("read definition", path, error))?;
            (path.display().to_string(), bytes, is_template(path))
        }
        Definition::Text { name, text } => (name.clone(), text.clone().into_bytes(), is_template(Path::new(name))),
    };
    if !is_template {
        if let Some(variable) = variables.keys().next() {
            let problem = format!(
                "takes no variable {variable:?}: it is no template, as its name ends in neither .j2 nor .jinja"
            );
            return Err(ImageError::Source { image: name, problem });
        }
        return Ok(DefinitionFile::new(name, bytes));
    }
    let text = String::from_utf8(bytes)
        .map_err(|_| ImageError::Source { image: name.clone(), problem: "is a template and not UTF-8".to_owned() })?;
    let text = template::render(&name, &text, variables)?;
    Ok(DefinitionFile::new(name, text.into_bytes()))
}

fn is_template(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "j2" || extension == "jinja")
}
