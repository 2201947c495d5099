//! The course of one build.

use std::{
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use nix::unistd::{AccessFlags, eaccess};
use tokio::time::Instant;

use super::{
    BuildRequest, BuilderConfig, Built, CacheMode, apptainer,
    claim::Turns,
    definition::DefinitionFile,
    inputs, left, pack,
    record::{self, Facts, Last, Record},
    run,
};
use crate::{
    images::{Cancel, ImageError, Progress},
    store::{Digest, remove::remove_tree_of_any},
};

/// How a file beside an output begins and ends that is to become the output.
const PART: (&str, &str) = (".", ".part");

/// Longest part of an output's name in that of its file in the making, in bytes: names end at 255.
const NAME_BYTES: usize = 80;

pub(super) struct Work<'a> {
    config: &'a BuilderConfig,
    request: &'a BuildRequest,
    definition: &'a DefinitionFile,
    cancel: &'a Cancel,
    progress: &'a dyn Progress,
    begun: Instant,
    /// The folder of the output, its links resolved, and the output in it.
    folder: PathBuf,
    output: PathBuf,
    /// A name for the output: digits only.
    key: String,
}

impl<'a> Work<'a> {
    /// Sees whether there is a place for the output.
    pub(super) fn new(
        config: &'a BuilderConfig,
        request: &'a BuildRequest,
        definition: &'a DefinitionFile,
        cancel: &'a Cancel,
        progress: &'a dyn Progress,
    ) -> Result<Self, ImageError> {
        let begun = Instant::now();
        let refused = |problem: &str| ImageError::Source {
            image: request.output.display().to_string(),
            problem: problem.to_owned(),
        };
        let path = std::path::absolute(&request.output)
            .map_err(|error| ImageError::at("find output", &request.output, error))?;
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(refused("is no name of an image file"));
        };
        let folder = folder.canonicalize().map_err(|error| ImageError::at("find folder", folder, error))?;
        let output = folder.join(name);
        if output.is_dir() {
            return Err(refused("is a folder; an image file is built"));
        }
        if request.mode == CacheMode::Lock && request.locks.is_empty() {
            return Err(refused("is to be built in the mode lock, and no lock file is named"));
        }
        let key = inputs::of_bytes(output.as_os_str().as_bytes()).hex().to_owned();
        Ok(Self { config, request, definition, cancel, progress, begun, folder, output, key })
    }

    pub(super) fn build(&self, turns: &Turns) -> Result<Built, ImageError> {
        let locks = self.locks()?;
        let record = record::path(&self.config.state, &self.key);
        let before = Last::read(&record);
        let turn = turns.wait(&self.key, self.cancel, |who| {
            self.progress.begin(&format!("wait for {who}, which builds {}", self.output.display()), None);
        })?;
        self.sweep()?;
        let last = Last::read(&record);
        let is_fresh = turn.has_waited && last.build().is_some() && last.build() != before.build();
        let found = match &last {
            // What it is does not matter, as nothing is known of it.
            Last::Nothing | Last::Damaged(_) => self.output.exists().then(|| inputs::of_bytes(b"")),
            Last::Known(_) if self.output.is_file() => Some(inputs::of_file(&self.output, self.cancel)?),
            Last::Known(_) => None,
        };
        let mut facts = self.facts(locks)?;
        let reason = match last.judge(self.request.mode, &facts, is_fresh, found.as_ref()) {
            Err(reason) => reason,
            Ok(reason) => {
                let digest = found.unwrap_or_else(|| inputs::of_bytes(b""));
                return Ok(self.built(digest, true, reason));
            }
        };
        self.check_place()?;
        if facts.bases.is_none() {
            // So that the next build can ask, whatever its mode. One that cannot be read is the build's to tell.
            facts.bases = match self.bases() {
                Err(ImageError::Cancelled) => return Err(ImageError::Cancelled),
                bases => bases.ok(),
            };
        }
        let digest = self.make(turns, &record, facts)?;
        Ok(self.built(digest, false, reason))
    }

    fn built(&self, digest: Digest, reused: bool, reason: String) -> Built {
        Built { path: self.output.clone(), digest, reused, reason, took: self.begun.elapsed() }
    }

    fn locks(&self) -> Result<Option<Vec<inputs::Input>>, ImageError> {
        match self.request.mode {
            CacheMode::Lock => inputs::of_locks(&self.request.locks, self.cancel).map(Some),
            CacheMode::Scratch | CacheMode::Versioned => Ok(None),
        }
    }

    /// Sees whether an image can be put into its place, before one is made.
    fn check_place(&self) -> Result<(), ImageError> {
        eaccess(&self.folder, AccessFlags::W_OK | AccessFlags::X_OK)
            .map_err(|error| ImageError::at("write into folder", &self.folder, error.into()))
    }

    fn bases(&self) -> Result<Vec<inputs::Input>, ImageError> {
        self.progress.begin("read the base", None);
        inputs::of_bases(self.definition, self.cancel)
    }

    /// Finds out what the build depends on, as far as the mode asks: reading a base takes time.
    fn facts(&self, locks: Option<Vec<inputs::Input>>) -> Result<Facts, ImageError> {
        let bases = match self.request.mode {
            CacheMode::Versioned => Some(self.bases()?),
            CacheMode::Scratch | CacheMode::Lock => None,
        };
        Ok(Facts {
            definition: inputs::of_bytes(&self.definition.bytes),
            compression: self.config.compression.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            bases,
            locks,
        })
    }

    /// Builds, and puts the image in its place. Nothing is left beside it, however this ends.
    fn make(&self, turns: &Turns, record: &Path, facts: Facts) -> Result<Digest, ImageError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);

        let build = format!("{}-{}", turns.token(), COUNT.fetch_add(1, Ordering::Relaxed));
        let scrap = Scrap {
            tree: left::tree(&self.config.state, &self.key, &build),
            part: self.folder.join(format!("{}{build}{}", self.part_prefix(), PART.1)),
        };
        fs::create_dir(&scrap.tree).map_err(|error| ImageError::at("make", &scrap.tree, error))?;
        let made = left::note_part(&scrap.tree, &scrap.part).and_then(|()| self.pack(&scrap)).and_then(|()| {
            let digest = inputs::of_file(&scrap.part, self.cancel)?;
            // Who is killed between the two leaves a record of another image than is there, and the next build sees that.
            fs::rename(&scrap.part, &self.output)
                .map_err(|error| ImageError::at("put into place", &self.output, error))?;
            Record::new(build, digest.clone(), facts).write(record)?;
            Ok(digest)
        });
        // The one that tells of the other goes last.
        self.remove(&scrap.part);
        self.remove(&scrap.tree);
        made
    }

    fn pack(&self, scrap: &Scrap) -> Result<(), ImageError> {
        let (config, definition) = (self.config, self.definition);
        if let Some(plain) = definition.plain() {
            let advice = "install squashfs-tools or name the path of mksquashfs";
            let mksquashfs = run::find(&["mksquashfs"], config.mksquashfs.as_deref(), advice)?;
            self.progress.begin("pack", None);
            let program =
                pack::program(&mksquashfs, config.compression, &plain, &definition.bytes, &scrap.tree, &scrap.part)?;
            self.run(&program, &mksquashfs)?;
            return pack::complete(&scrap.part, &plain, &definition.bytes);
        }
        let apptainer = run::find(&["apptainer", "singularity"], config.apptainer.as_deref(), apptainer::INSTALL)?;
        let file = scrap.tree.join("definition.def");
        fs::write(&file, &definition.bytes).map_err(|error| ImageError::at("write definition", &file, error))?;
        self.progress.begin("build", None);
        let program = apptainer::program(
            &apptainer,
            config.mksquashfs.as_deref(),
            config.compression,
            &file,
            &scrap.tree,
            &scrap.part,
        );
        self.run(&program, &apptainer)
    }

    fn run(&self, program: &run::Program, path: &Path) -> Result<(), ImageError> {
        let ended = program.run(&self.config.guest, self.cancel)?;
        let Some((how, words)) = ended.failure() else { return Ok(()) };
        let advice = if ended.is_missing() {
            "see that it can be executed here"
        } else if ended.is_without_users() {
            apptainer::NO_USERS
        } else {
            apptainer::advice(&words, self.definition.is_fetched())
        };
        let said = if words.is_empty() { String::new() } else { format!("; its last lines:\n{words}\n") };
        Err(ImageError::Program {
            program: path.display().to_string(),
            problem: format!("{how} while it built {} from {}{said}", self.output.display(), self.definition.name),
            advice: advice.to_owned(),
        })
    }

    /// Removes what dead builds of this output have left. Nobody else builds it now.
    fn sweep(&self) -> Result<(), ImageError> {
        let trees = self.config.state.join(left::TREES);
        let prefixes = [(self.folder.as_path(), self.part_prefix()), (trees.as_path(), format!("{}.", self.key))];
        for (folder, prefix) in prefixes {
            let at = |error| ImageError::at("list", folder, error);
            for entry in fs::read_dir(folder).map_err(at)? {
                let entry = entry.map_err(at)?;
                if entry.file_name().as_bytes().starts_with(prefix.as_bytes()) {
                    self.remove(&entry.path());
                }
            }
        }
        Ok(())
    }

    /// Removes what nobody needs. Its name is never used again, so that what cannot be removed is in nobody's way.
    fn remove(&self, path: &Path) {
        if let Err(error) = remove_tree_of_any(path, Some(&self.config.guest), None) {
            let image = self.output.display();
            tracing::warn!(path = %path.display(), %image, %error, "what a build has left stays");
        }
    }

    /// How the names of files in the making of this output begin. Builders with another state folder have names of their own:
    /// they do not wait for this one.
    fn part_prefix(&self) -> String {
        let name = self.output.file_name().unwrap_or_default().to_string_lossy();
        let name = &name[..name.floor_char_boundary(NAME_BYTES)];
        let state = inputs::of_bytes(self.config.state.as_os_str().as_bytes());
        format!("{}{name}.{}.{}.", PART.0, &self.key[..8], &state.hex()[..8])
    }
}

/// What a build needs for a while.
struct Scrap {
    tree: PathBuf,
    part: PathBuf,
}
