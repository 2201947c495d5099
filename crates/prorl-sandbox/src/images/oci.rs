//! Images in the layout of the Open Container Initiative, in a folder or in a tar: an index that leads to manifests, which lead to
//! layers, all named by their digests.

use std::{collections::BTreeMap, fs::File, io, path::PathBuf, sync::Arc};

use rustix::fs::{CWD, Mode, OFlags, openat};
use serde::{Deserialize, de::DeserializeOwned};

use super::{
    ImageError,
    archive::Archive,
    part::{Checked, Part},
    source::Choice,
};
use crate::store::Digest;

/// Longest index, manifest or configuration, in bytes.
const MAX_JSON_BYTES: u64 = 8 << 20;

/// Most indexes on the way to a manifest.
const MAX_DEPTH: usize = 4;

/// Most variables that one image sets.
const MAX_VARIABLES: usize = 1000;

/// Most lines of a list in an error.
const MAX_LISTED: usize = 20;

/// How a layout says that it is one.
pub(super) const MARK: &str = "oci-layout";
pub(super) const INDEX: &str = "index.json";

/// The annotation that is an image's tag.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Where files of an image are.
pub(super) enum Files {
    Folder(PathBuf),
    Archive(Archive),
}

impl Files {
    /// Opens a file by its path inside, or nothing where there is none.
    pub(super) fn open(&self, path: &str) -> io::Result<Option<Part>> {
        let folder = match self {
            Self::Archive(archive) => return Ok(archive.member(path)),
            Self::Folder(folder) => folder,
        };
        // Without waiting for a writer, if it is a FIFO.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(CWD, folder.join(path), flags, Mode::empty()) {
            Err(error) if error == rustix::io::Errno::NOENT => return Ok(None),
            opened => File::from(opened?),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(super::tar_stream::invalid("is no file"));
        }
        Ok(Some(Part::new(Arc::new(file), 0, metadata.len())))
    }
}

/// What leads to a blob.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Descriptor {
    #[serde(default, rename = "mediaType")]
    kind: String,
    pub(super) digest: String,
    pub(super) size: u64,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Platform {
    os: String,
    architecture: String,
    variant: Option<String>,
}

/// An index or a manifest, as one does not always say which it is.
#[derive(Debug, Deserialize)]
struct Document {
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

/// What programs of an image are to find.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Config {
    os: String,
    architecture: String,
    #[serde(rename = "config")]
    settings: Option<Settings>,
    pub(super) rootfs: RootFs,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Settings {
    #[serde(rename = "Env")]
    env: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RootFs {
    pub(super) diff_ids: Vec<String>,
}

/// An image that was found, down to what it is made of.
#[derive(Debug)]
pub(super) struct Manifest {
    pub(super) digest: Digest,
    config: Descriptor,
    pub(super) layers: Vec<Descriptor>,
}

/// Reads parts of one image, whose name is in all errors.
pub(super) struct Reader<'a> {
    pub(super) image: &'a str,
    pub(super) files: &'a Files,
}

impl Reader<'_> {
    fn damaged(&self, what: impl Into<String>, problem: impl Into<String>) -> ImageError {
        ImageError::Damaged { image: self.image.to_owned(), what: what.into(), problem: problem.into() }
    }

    fn refused(&self, problem: String) -> ImageError {
        ImageError::Source { image: self.image.to_owned(), problem }
    }

    /// Wraps an error of reading `what`.
    pub(super) fn unreadable(&self, what: &str, error: &io::Error) -> ImageError {
        let problem = match error.kind() {
            io::ErrorKind::UnexpectedEof => "ends too early".to_owned(),
            _ => error.to_string(),
        };
        self.damaged(what, problem)
    }

    /// Reads a short file.
    pub(super) fn bytes(&self, path: &str) -> Result<Vec<u8>, ImageError> {
        let part = self.files.open(path).map_err(|error| self.unreadable(path, &error))?;
        let part = part.ok_or_else(|| self.damaged(path, "is missing"))?;
        part.read_whole(MAX_JSON_BYTES).map_err(|error| self.unreadable(path, &error))
    }

    pub(super) fn json<T: DeserializeOwned>(&self, what: &str, bytes: &[u8]) -> Result<T, ImageError> {
        serde_json::from_slice(bytes).map_err(|error| self.damaged(what, format!("cannot be understood: {error}")))
    }

    /// Checks a digest that was read, which is part of a path.
    pub(super) fn digest(&self, text: &str) -> Result<Digest, ImageError> {
        Digest::try_from(text.to_owned()).map_err(|error| self.damaged("a digest", format!("is wrong: {error}")))
    }

    /// Opens what a descriptor leads to. Its size is as it should be; its digest is still to be checked.
    pub(super) fn blob(&self, descriptor: &Descriptor) -> Result<(Digest, Part), ImageError> {
        let digest = self.digest(&descriptor.digest)?;
        let what = format!("blob {digest}");
        let opened = self.files.open(&format!("blobs/sha256/{}", digest.hex()));
        let part = opened.map_err(|error| self.unreadable(&what, &error))?;
        let part = part.ok_or_else(|| self.damaged(&what, "is missing"))?;
        if part.len() != descriptor.size {
            let problem = format!("has {} bytes, where {} were expected", part.len(), descriptor.size);
            return Err(self.damaged(what, problem));
        }
        Ok((digest, part))
    }

    /// Reads and checks a short blob.
    fn short_blob(&self, descriptor: &Descriptor) -> Result<(Digest, Vec<u8>), ImageError> {
        let (digest, part) = self.blob(descriptor)?;
        let what = format!("blob {digest}");
        let bytes = part.read_whole(MAX_JSON_BYTES).map_err(|error| self.unreadable(&what, &error))?;
        let mut checked = Checked::new(&bytes[..]);
        let done = io::copy(&mut checked, &mut io::sink()).and_then(|_| checked.check(&digest));
        done.map_err(|error| self.unreadable(&what, &error))?;
        Ok((digest, bytes))
    }

    /// Finds the image that is meant.
    pub(super) fn find(&self, choice: &Choice) -> Result<Manifest, ImageError> {
        let index: Document = self.json(INDEX, &self.bytes(INDEX)?)?;
        let all = index.manifests.unwrap_or_default();
        if all.is_empty() {
            return Err(self.refused("has no image in it".to_owned()));
        }
        let chosen: Vec<&Descriptor> = all.iter().filter(|one| one.is_chosen(choice)).collect();
        if chosen.is_empty() {
            let wanted = match choice {
                Choice::Tag(tag) => format!("tag {tag:?}"),
                Choice::Digest(digest) => format!("digest {digest}"),
                Choice::Only => "any".to_owned(),
            };
            return Err(self.refused(format!("has no image of {wanted}: {}", listed(&all))));
        }
        let ours = for_this_machine(&chosen);
        let first = ours.first().ok_or_else(|| self.not_for_us(&chosen))?;
        if ours.iter().any(|one| one.digest != first.digest) {
            return Err(self.refused(format!("has several images, and needs a tag or a digest: {}", listed(&all))));
        }
        self.resolve((*first).clone())
    }

    /// Follows indexes down to a manifest for this machine.
    fn resolve(&self, mut descriptor: Descriptor) -> Result<Manifest, ImageError> {
        for _ in 0..MAX_DEPTH {
            let (digest, bytes) = self.short_blob(&descriptor)?;
            let document: Document = self.json(&format!("blob {digest}"), &bytes)?;
            match document {
                Document { config: Some(config), layers: Some(layers), .. } => {
                    return Ok(Manifest { digest, config, layers });
                }
                Document { manifests: Some(manifests), .. } => {
                    let all: Vec<&Descriptor> = manifests.iter().collect();
                    let ours = for_this_machine(&all);
                    descriptor = (*ours.first().ok_or_else(|| self.not_for_us(&all))?).clone();
                }
                _ => return Err(self.damaged(format!("blob {digest}"), "is neither a manifest nor an index")),
            }
        }
        Err(self.damaged("its index", format!("leads through more than {MAX_DEPTH} others")))
    }

    fn not_for_us(&self, all: &[&Descriptor]) -> ImageError {
        let platforms: Vec<String> = all.iter().filter_map(|one| one.platform.as_ref()).map(Platform::text).collect();
        self.refused(format!("is not for this machine, {}: {}", here(), short_list(&platforms)))
    }

    /// Reads a manifest's configuration.
    pub(super) fn config(&self, manifest: &Manifest) -> Result<Config, ImageError> {
        let (digest, bytes) = self.short_blob(&manifest.config)?;
        let config: Config = self.json(&format!("blob {digest}"), &bytes)?;
        self.check_platform(&config)?;
        Ok(config)
    }

    /// Refuses images for other machines.
    pub(super) fn check_platform(&self, config: &Config) -> Result<(), ImageError> {
        let platform = Platform { os: config.os.clone(), architecture: config.architecture.clone(), variant: None };
        if platform.is_ours() {
            return Ok(());
        }
        Err(self.refused(format!("is for {}, and this machine is {}", platform.text(), here())))
    }

    /// Refuses what is no layer of files, such as a model in an artifact.
    pub(super) fn check_layer(&self, layer: &Descriptor) -> Result<(), ImageError> {
        let kind = &layer.kind;
        if kind.is_empty() || (kind.contains("tar") && !kind.contains("encrypted")) {
            return Ok(());
        }
        Err(self.refused(format!("holds {kind:?}, which is no layer of files")))
    }
}

impl Descriptor {
    fn is_chosen(&self, choice: &Choice) -> bool {
        match choice {
            Choice::Only => true,
            Choice::Tag(tag) => self.tag() == Some(tag),
            Choice::Digest(digest) => self.digest == digest.as_str(),
        }
    }

    fn tag(&self) -> Option<&String> {
        self.annotations.as_ref()?.get(REF_NAME)
    }
}

impl Platform {
    /// Tells whether programs for it run here. What says nothing is taken at its word.
    fn is_ours(&self) -> bool {
        matches!(&*self.os, "" | "linux") && (self.architecture.is_empty() || self.architecture == architecture())
    }

    fn text(&self) -> String {
        let variant = self.variant.as_ref().map(|variant| format!("/{variant}")).unwrap_or_default();
        format!("{}/{}{variant}", self.os, self.architecture)
    }
}

/// Those that are for this machine, best first: those that say so before those that say nothing, the plainest kind of processor
/// first.
fn for_this_machine<'d>(all: &[&'d Descriptor]) -> Vec<&'d Descriptor> {
    let mut named: Vec<&Descriptor> = Vec::new();
    let mut unnamed: Vec<&Descriptor> = Vec::new();
    for one in all {
        match &one.platform {
            Some(platform) if platform.is_ours() => named.push(one),
            Some(_) => {}
            None => unnamed.push(one),
        }
    }
    if named.is_empty() {
        return unnamed;
    }
    let variant = |one: &&Descriptor| one.platform.as_ref().and_then(|platform| platform.variant.clone());
    named.sort_by_key(variant);
    let best = named.first().and_then(variant);
    named.retain(|one| variant(one) == best);
    named
}

/// The processor's name as Go has it, which is that of images.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
        other => other,
    }
}

fn here() -> String {
    format!("linux/{}", architecture())
}

/// The images of an index, for people.
fn listed(all: &[Descriptor]) -> String {
    let line = |one: &Descriptor| {
        let tag = one.tag().map(|tag| format!("{tag} ")).unwrap_or_default();
        let platform = one.platform.as_ref().map(|platform| format!("{} ", platform.text())).unwrap_or_default();
        format!("{tag}{platform}{}", one.digest)
    };
    short_list(&all.iter().map(line).collect::<Vec<_>>())
}

pub(super) fn short_list(lines: &[String]) -> String {
    let more = lines.len().saturating_sub(MAX_LISTED);
    let shown = lines.iter().take(MAX_LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match (lines.len(), more) {
        (0, _) => "there are none".to_owned(),
        (_, 0) => format!("there are {shown}"),
        _ => format!("there are {shown}, and {more} more"),
    }
}

impl Config {
    /// Returns the variables that are set for programs. What is no `NAME=VALUE` line is left out, and noted.
    pub(super) fn env(&self, notes: &mut Vec<String>) -> Vec<(String, String)> {
        let lines = self.settings.as_ref().and_then(|settings| settings.env.as_deref()).unwrap_or_default();
        let mut env: Vec<(String, String)> = Vec::new();
        if lines.len() > MAX_VARIABLES {
            notes.push(format!("left out all but {MAX_VARIABLES} of {} variables", lines.len()));
        }
        for line in lines.iter().take(MAX_VARIABLES) {
            match line.split_once('=') {
                Some((name, value)) if !name.is_empty() && !line.contains('\0') => {
                    env.retain(|(known, _)| known != name);
                    env.push((name.to_owned(), value.to_owned()));
                }
                _ => {
                    let start: String = line.chars().take(80).collect();
                    notes.push(format!("left out the variable {start:?}, which is no NAME=VALUE"));
                }
            }
        }
        env
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(json: &str) -> Descriptor {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn the_plainest_kind_of_this_processor_is_taken() {
        let of = |platform: &str| descriptor(&format!(r#"{{"digest": "x", "size": 1, "platform": {platform}}}"#));
        let arch = architecture();
        let all = [
            of(r#"{"os": "unknown", "architecture": "unknown"}"#),
            of(&format!(r#"{{"os": "linux", "architecture": "{arch}", "variant": "v3"}}"#)),
            of(&format!(r#"{{"os": "linux", "architecture": "{arch}"}}"#)),
            of(&format!(r#"{{"os": "windows", "architecture": "{arch}"}}"#)),
            descriptor(r#"{"digest": "x", "size": 1}"#),
        ];
        let found = for_this_machine(&all.iter().collect::<Vec<_>>());
        assert!(matches!(found[..], [one] if std::ptr::eq(one, &raw const all[2])));
        assert!(matches!(for_this_machine(&[&all[0], &all[4]])[..], [one] if one.platform.is_none()));
        assert!(for_this_machine(&[&all[0], &all[3]]).is_empty());
    }

    #[test]
    fn variables_that_are_none_are_noted() {
        let config: Config =
            serde_json::from_str(r#"{"config": {"Env": ["A=1", "B=x=y", "A=2", "wrong", "=3", "C="]}}"#).unwrap();
        let mut notes = Vec::new();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(config.env(&mut notes), [pair("B", "x=y"), pair("A", "2"), pair("C", "")]);
        assert_eq!(notes.len(), 2);
        assert!(notes[0].contains("wrong"), "{notes:?}");
    }
}
