//! The image that a command line names.

use std::{os::unix::ffi::OsStrExt as _, path::Path, sync::Arc};

use anyhow::{Context, bail};
use prorl_agents::runtimes::HOST_IMAGE;
use prorl_sandbox::{
    Image,
    images::{Source, Unpacker, is_packed},
    store::{ImageName, ImageStore},
};

use crate::{image::Bar, sandboxes::Sandboxes, stores::StoreArgs};

/// Finds an image: the host's programs, one of the store by its name, or one by its path. A packed one is unpacked into the
/// store first, or was; where there is to be no store it stays as it is.
pub(super) async fn find(given: &Path, store: &StoreArgs, sandboxes: &Sandboxes) -> anyhow::Result<Image> {
    if given == Path::new(HOST_IMAGE) {
        return Ok(Image::Host);
    }
    let is_path = given.as_os_str().as_bytes().first().is_none_or(|first| matches!(first, b'/' | b'.'));
    let name = given.to_str().filter(|_| !is_path).and_then(|text| ImageName::try_from(text.to_owned()).ok());
    let open = || sandboxes.store(store);
    if let Some(name) = name
        && store.is_there()
        && let Some(image) = open()?.named(&name)?
    {
        return Ok(Image::Stored(image));
    }
    match given {
        path if path.is_dir() && !is_packed(path) => Ok(Image::Directory(path.to_owned())),
        // As it is, which only a runtime that mounts takes; another says so.
        path if path.exists() && store.is_none() => Ok(Image::File(path.to_owned())),
        path if path.exists() => unpack(path, open()?, sandboxes).await,
        path => bail!("there is no image {}: {}", path.display(), advice(path)),
    }
}

async fn unpack(path: &Path, store: ImageStore, sandboxes: &Sandboxes) -> anyhow::Result<Image> {
    let path = path.to_str().with_context(|| format!("the path {} is not UTF-8", path.display()))?;
    // A path with a colon would be taken for something else.
    let absolute = std::path::absolute(path).with_context(|| format!("failed to open image {path}"))?;
    let source = Source::parse(absolute.to_str().unwrap_or(path))?;
    let unpacker = Unpacker { apptainer: sandboxes.apptainer(), ..Unpacker::new(store) };
    let bar = Arc::new(Bar::new(path));
    let image = unpacker.unpack_async(source, Arc::clone(&bar) as _).await;
    bar.clear();
    Ok(Image::Stored(image?))
}

/// Says what else could have been meant.
fn advice(given: &Path) -> String {
    let text = given.display();
    let is_source = Source::parse(&given.to_string_lossy()).is_ok() && given.to_string_lossy().contains(':');
    if is_source {
        return format!("`prorl image unpack {text}` brings it into the store, and says its name there");
    }
    "expected `host`, a name of the store (see `prorl image list`), or the path of an unpacked image, a .sif or a squashfs".to_owned()
}
