use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use super::{ImageError, part::digest_of};
use crate::store::{Digest, ImageName};

/// Where an image comes from, as people write it.
///
/// | text | is |
/// |---|---|
/// | `PATH` | a `.sif`, a squashfs, an unpacked folder, an OCI layout or an archive of one, told apart by what is there |
/// | `docker-archive:PATH` | what `docker save` writes |
/// | `oci:PATH`, `oci:PATH:TAG`, `oci:PATH@sha256:…` | an OCI layout, as a folder or in a tar, and which of its images |
/// | `docker://REF` | an image of a registry, fetched by Apptainer |
///
/// Parsing opens nothing: a path that does not exist parses.
///
/// ```
/// use prorl_sandbox::images::Source;
///
/// let source: Source = "docker://python:3.12-slim".parse()?;
/// assert_eq!(source.default_name().as_str(), "python:3.12-slim");
/// assert_eq!(source.to_string(), "docker://python:3.12-slim");
/// # Ok::<(), prorl_sandbox::images::ImageError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    text: String,
    kind: Kind,
}

/// What a text stands for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// Something on disk, of a kind that is still to be found out.
    Path(PathBuf),
    DockerArchive(PathBuf),
    Oci {
        path: PathBuf,
        choice: Choice,
    },
    /// A registry's image, without the scheme.
    Docker(String),
}

/// Which image of a layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Choice {
    /// The only one.
    Only,
    Tag(String),
    Digest(Digest),
}

/// What is said to whoever wrote something else.
const EXPECTED: &str = "expected a path of a .sif, a squashfs, a folder or an archive, docker-archive:PATH, oci:PATH[:TAG] or \
                        docker://REF";

/// Longest reference of a registry, in bytes.
const MAX_REF_LEN: usize = 1024;

/// Longest name that [`ImageName`] takes, in bytes.
const MAX_NAME_LEN: usize = 200;

/// Endings of file names that say how something is packed, not what it is.
const ENDINGS: [&str; 11] =
    [".gz", ".zst", ".xz", ".tar", ".tgz", ".sif", ".sqfs", ".sqsh", ".squashfs", ".simg", ".img"];

impl Source {
    /// Reads one.
    ///
    /// # Errors
    /// [`ImageError::Source`] for a text of no known form, which says what was expected.
    pub fn parse(text: &str) -> Result<Self, ImageError> {
        let wrong = |problem: String| ImageError::Source { image: text.to_owned(), problem };
        if text.is_empty() || text.contains('\0') {
            return Err(wrong(format!("is no source of an image: {EXPECTED}")));
        }
        let path = |path: &str| match path {
            "" => Err(wrong(format!("names no path: {EXPECTED}"))),
            path => Ok(PathBuf::from(path)),
        };
        let kind = if let Some(reference) = text.strip_prefix("docker://") {
            Kind::Docker(reference_of(reference).map_err(wrong)?)
        } else if let Some(rest) = text.strip_prefix("docker-archive:") {
            Kind::DockerArchive(path(rest)?)
        } else if let Some(rest) = text.strip_prefix("oci:") {
            let (rest, choice) = choice_of(rest).map_err(wrong)?;
            Kind::Oci { path: path(rest)?, choice }
        } else if let Some(scheme) = scheme_of(text) {
            return Err(wrong(format!("is of a kind ({scheme}) that is not known: {EXPECTED}")));
        } else {
            Kind::Path(path(text)?)
        };
        Ok(Self { text: text.to_owned(), kind })
    }

    /// Returns what its image is called when nobody says otherwise: the file's name without its ending and with the tag that was
    /// asked for, or the registry's name with its tag (`latest` where there is none).
    pub fn default_name(&self) -> ImageName {
        let name = match &self.kind {
            Kind::Docker(reference) => reference.clone(),
            Kind::Path(path) | Kind::DockerArchive(path) | Kind::Oci { path, choice: Choice::Only } => stem(path),
            Kind::Oci { path, choice: Choice::Tag(tag) } => format!("{}:{tag}", stem(path)),
            Kind::Oci { path, choice: Choice::Digest(digest) } => format!("{}@{digest}", stem(path)),
        };
        as_name(&name)
    }

    pub(super) fn kind(&self) -> &Kind {
        &self.kind
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Source {
    /// Writes it as it was written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Source {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        Self::parse(text)
    }
}

/// Returns the scheme of a text that looks like an address.
fn scheme_of(text: &str) -> Option<&str> {
    let known_elsewhere = [
        "docker-daemon",
        "docker",
        "dir",
        "oras",
        "library",
        "shub",
        "oci-archive",
        "localimage",
        "containers-storage",
    ];
    if let Some((scheme, _rest)) = text.split_once("://") {
        let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+.-".contains(&byte);
        return (!scheme.is_empty() && scheme.bytes().all(is_scheme)).then_some(scheme);
    }
    known_elsewhere.into_iter().find(|scheme| text.strip_prefix(scheme).is_some_and(|rest| rest.starts_with(':')))
}

/// Splits off which image of a layout is meant. A path may hold colons as long as a slash follows, or a tag.
fn choice_of(text: &str) -> Result<(&str, Choice), String> {
    if let Some((path, hex)) = text.rsplit_once("@sha256:") {
        let digest =
            Digest::try_from(format!("sha256:{hex}")).map_err(|error| format!("has a wrong digest: {error}"))?;
        return Ok((path, Choice::Digest(digest)));
    }
    match text.rsplit_once(':') {
        Some((_, tag)) if tag.contains('/') => Ok((text, Choice::Only)),
        Some((_, "")) => Err("ends in a colon without a tag".to_owned()),
        Some((path, tag)) => Ok((path, Choice::Tag(tag.to_owned()))),
        None => Ok((text, Choice::Only)),
    }
}

/// Checks a registry's reference, and completes it by the tag that an absent one means.
fn reference_of(text: &str) -> Result<String, String> {
    let problem = |what: &str| Err(format!("is no reference of a registry's image, [HOST[:PORT]/]NAME[:TAG]: {what}"));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@".contains(&byte);
    let (name, digest) = text.split_once('@').map_or((text, None), |(name, digest)| (name, Some(digest)));
    if digest.is_some_and(|digest| Digest::try_from(digest.to_owned()).is_err()) {
        return problem("only a digest, sha256: and 64 hexadecimal digits, may follow an @");
    }
    if text.len() > MAX_REF_LEN || !text.bytes().all(is_plain) {
        return problem("it has characters that none has");
    }
    // The first part may be a host of any case; everything else begins with a letter or a digit.
    if name.split('/').any(|part| !part.starts_with(|first: char| first.is_ascii_alphanumeric())) {
        return problem("a part of its name is empty or begins with a sign");
    }
    let last = name.rsplit('/').next().unwrap_or(name);
    match last.split_once(':') {
        Some((_, "")) => problem("its tag is empty"),
        Some((_, tag)) if tag.contains(':') => problem("it has two tags"),
        Some(_) => Ok(text.to_owned()),
        None if digest.is_some() => Ok(text.to_owned()),
        None => Ok(format!("{text}:latest")),
    }
}

/// The last part of a path without endings that say how it is packed.
fn stem(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut stem = name.as_str();
    while let Some(shorter) =
        ENDINGS.iter().find_map(|ending| stem.strip_suffix(ending)).filter(|shorter| !shorter.is_empty())
    {
        stem = shorter;
    }
    stem.to_owned()
}

/// Makes a name of anything: what no name may hold becomes `-`, and the end of a long one a hash, so that no two share one.
fn as_name(text: &str) -> ImageName {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-/:@+".contains(c) { c } else { '-' };
    let name: String = text.chars().map(plain).collect();
    let mut name = name.trim_start_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned();
    if name.len() > MAX_NAME_LEN {
        let hash = digest_of(name.as_bytes());
        name.truncate(MAX_NAME_LEN - 33);
        name = format!("{name}-{}", &hash.hex()[..32]);
    }
    let fallback = || ImageName::try_from(String::from("image")).expect("a plain word is a name");
    ImageName::try_from(name).unwrap_or_else(|_taken| fallback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> Kind {
        Source::parse(text).unwrap().kind
    }

    #[test]
    fn each_form_is_told_from_the_others() {
        assert_eq!(kind("a/b.sif"), Kind::Path("a/b.sif".into()));
        assert_eq!(kind("a:b"), Kind::Path("a:b".into()));
        assert_eq!(kind("docker-archive:a:b.tar"), Kind::DockerArchive("a:b.tar".into()));
        assert_eq!(kind("oci:a"), Kind::Oci { path: "a".into(), choice: Choice::Only });
        assert_eq!(kind("oci:a:1.2"), Kind::Oci { path: "a".into(), choice: Choice::Tag("1.2".into()) });
        assert_eq!(kind("oci:/x:y/a"), Kind::Oci { path: "/x:y/a".into(), choice: Choice::Only });
        let digest = format!("sha256:{}", "0a".repeat(32));
        let choice = Choice::Digest(Digest::try_from(digest.clone()).unwrap());
        assert_eq!(kind(&format!("oci:a@{digest}")), Kind::Oci { path: "a".into(), choice });
        assert_eq!(kind("docker://busybox"), Kind::Docker("busybox:latest".into()));
        assert_eq!(kind("docker://r.example:5000/a/b"), Kind::Docker("r.example:5000/a/b:latest".into()));
        assert_eq!(kind(&format!("docker://a@{digest}")), Kind::Docker(format!("a@{digest}")));
        assert_eq!(Source::parse("docker://busybox").unwrap().to_string(), "docker://busybox");
    }

    #[test]
    fn what_is_no_source_is_told_what_was_expected() {
        for (text, word) in [
            ("", "expected a path"),
            ("a\0b", "expected a path"),
            ("oci:", "names no path"),
            ("oci:a:", "without a tag"),
            ("oci:a@sha256:12", "64 hexadecimal digits"),
            ("docker-archive:", "names no path"),
            ("docker://", "part of its name is empty"),
            ("docker://-v", "begins with a sign"),
            ("docker://a b", "characters that none has"),
            ("docker://name:secret@host/a", "may follow an @"),
            ("docker://a:1:2", "two tags"),
            ("docker:a", "expected a path"),
            ("oras://a/b:1", "kind (oras)"),
        ] {
            let error = Source::parse(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn every_source_has_a_name_for_its_image() {
        let long = "x".repeat(300);
        for (text, name) in [
            ("/images/python-3.12.sif", "python-3.12"),
            ("docker-archive:django.tar.gz", "django"),
            ("oci:layouts/django:4.2", "django:4.2"),
            ("docker://r.example/a/b:1", "r.example/a/b:1"),
            ("docker://busybox", "busybox:latest"),
            ("/", "image"),
            ("host", "image"),
            ("/x/.hidden one", "hidden-one"),
            (".sif", "sif"),
        ] {
            assert_eq!(Source::parse(text).unwrap().default_name().as_str(), name, "{text}");
        }
        let name = |text: &str| Source::parse(text).unwrap().default_name();
        assert!(name(&long).as_str().starts_with("xxx") && name(&long) != name(&format!("{long}y")));
    }
}
