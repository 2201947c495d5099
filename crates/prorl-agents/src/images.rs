//! What an instance's word for an image means: the host, an image of the store, an unpacked folder, or a packed file.

use std::{
    error::Error,
    path::{Path, PathBuf},
    sync::Arc,
};

use prorl_core::FailureClass;
use prorl_pipeline::StageError;
use prorl_sandbox::{
    Image,
    images::{ImageError, Quiet, Source, Unpacker, is_packed},
    store::{ImageName, ImageStore, StoreError, StoredImage},
};

use crate::{PathPolicy, runtimes::HOST_IMAGE};

/// Beginnings of sources that a job can use only once they are in the store.
const SCHEMES: [&str; 3] = ["docker://", "docker-archive:", "oci:"];

/// How many names of a store are listed to somebody who asked for one that it does not have.
const LISTED_NAMES: usize = 10;

/// What a word for an image was found to mean.
#[derive(Clone, Debug)]
pub(crate) enum Found {
    /// The host's own programs.
    Host,
    /// An image of the store.
    Stored(StoredImage),
    /// An unpacked image somewhere else.
    Folder(PathBuf),
    /// A `.sif` or a squashfs.
    Packed(PathBuf),
}

/// Finds out what a word means.
///
/// A name of the store comes before a path: whoever means a path that reads like a name begins it with `/` or `./`, as no
/// name begins. The policy is for paths; what is in the store was put there by who runs the server.
pub(crate) fn find(word: &Path, paths: &PathPolicy, store: Option<&ImageStore>) -> Result<Found, String> {
    // A path that is no text can be nothing else.
    let text = word.to_str().unwrap_or("/");
    match text {
        HOST_IMAGE => return Ok(Found::Host),
        "" => return Err("expected a path or \"host\", found an empty text".to_owned()),
        _ => {}
    }
    if let Some(store) = store {
        if let Some(image) = named(text, store)? {
            return Ok(Found::Stored(image));
        }
        if SCHEMES.iter().any(|scheme| text.starts_with(scheme)) {
            return Err(format!("{text} is not in the store; unpack it first: prorl image unpack {text}"));
        }
        if name_of(text).is_some() && !word.exists() {
            let problem = "is neither an image of the store nor a path that is there";
            return Err(format!("{text} {problem}; {}", names_in(store)));
        }
    }
    if text.contains("://") {
        let expected = "the path of an unpacked folder, a .sif or a squashfs";
        return Err(format!("expected {expected}, found {text}: build or pull it first"));
    }
    let resolved = paths.check(word)?;
    if is_packed(&resolved) {
        Ok(Found::Packed(resolved))
    } else if resolved.is_dir() {
        Ok(Found::Folder(resolved))
    } else {
        Err(format!("expected an unpacked image folder, a .sif or a squashfs, found {}", resolved.display()))
    }
}

fn named(text: &str, store: &ImageStore) -> Result<Option<StoredImage>, String> {
    let Some(name) = name_of(text) else { return Ok(None) };
    store.named(&name).map_err(|err| with_causes(&err))
}

/// The name that a word may be in a store; a registry's image is there by the name that it is given when it is fetched.
fn name_of(text: &str) -> Option<ImageName> {
    if SCHEMES.iter().any(|scheme| text.starts_with(scheme)) {
        return Source::parse(text).ok().map(|source| source.default_name());
    }
    ImageName::try_from(text.to_owned()).ok()
}

fn names_in(store: &ImageStore) -> String {
    let entries = match store.list() {
        Ok(entries) => entries,
        Err(err) => return format!("the store cannot be listed: {}", with_causes(&err)),
    };
    let mut names: Vec<String> =
        entries.into_iter().flat_map(|entry| entry.names).map(|name| name.to_string()).collect();
    names.sort();
    let n_more = names.len().saturating_sub(LISTED_NAMES);
    names.truncate(LISTED_NAMES);
    match (names.is_empty(), n_more) {
        (true, _) => "the store has no names".to_owned(),
        (_, 0) => format!("the store has {}", names.join(", ")),
        (_, n_more) => format!("the store has {} and {n_more} more", names.join(", ")),
    }
}

fn with_causes(error: &(dyn Error + 'static)) -> String {
    StageError::new(FailureClass::Image, error).message
}

/// Why a packed image is not in the store.
pub(crate) struct NotUnpacked {
    pub(crate) error: StageError,
    /// The image as it is, where only the store is at fault.
    pub(crate) file: Option<PathBuf>,
}

impl From<StageError> for NotUnpacked {
    fn from(error: StageError) -> Self {
        Self { error, file: None }
    }
}

/// Tells whether the store could not be written, be it to this caller or to another that it waited for.
fn is_the_stores(error: &ImageError) -> bool {
    match error {
        ImageError::Store(error) => matches!(error, StoreError::ReadOnly { .. } | StoreError::Io { .. }),
        ImageError::Shared(error) => is_the_stores(error),
        _ => false,
    }
}

impl Found {
    /// Returns it as what a sandbox is started from. With an `unpacker` a packed image is unpacked into the store, once.
    ///
    /// # Errors
    /// Of class `image`, with the unpacker's words.
    ///
    /// # Cancel safety
    /// As that of [`Unpacker::unpack_async`].
    pub(crate) async fn unpacked(self, unpacker: Option<&Unpacker>) -> Result<Image, NotUnpacked> {
        let path = match self {
            Self::Host => return Ok(Image::Host),
            Self::Stored(image) => return Ok(Image::Stored(image)),
            Self::Folder(path) => return Ok(Image::Directory(path)),
            Self::Packed(path) => path,
        };
        let Some(unpacker) = unpacker else { return Ok(Image::File(path)) };
        let Some(text) = path.to_str() else {
            let problem = format!("image {} has a name that is no UTF-8", path.display());
            return Err(StageError::text(FailureClass::Image, problem).into());
        };
        let refused = |err: &ImageError| StageError::new(FailureClass::Image, err);
        let source = Source::parse(text).map_err(|err| refused(&err))?;
        match unpacker.unpack_async(source, Arc::new(Quiet)).await {
            Ok(image) => Ok(Image::Stored(image)),
            Err(err) => Err(NotUnpacked { error: refused(&err), file: is_the_stores(&err).then_some(path) }),
        }
    }
}
