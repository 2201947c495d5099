//! What `docker save` writes: a tar with a list of images, each with a configuration and layers.

use serde::Deserialize;

use super::{
    ImageError,
    oci::{Config, Files, Reader, short_list},
    part::{Part, digest_of},
};
use crate::store::Digest;

/// The list of what is in an archive.
pub(super) const MANIFEST: &str = "manifest.json";

/// One image of the list. Newer archives name blobs of an OCI layout here, older ones files of their own.
#[derive(Debug, Deserialize)]
struct Item {
    #[serde(rename = "Config")]
    config: String,
    #[serde(rename = "RepoTags", default)]
    tags: Option<Vec<String>>,
    #[serde(rename = "Layers")]
    layers: Vec<String>,
}

/// An image that was found.
pub(super) struct Saved {
    /// Of the configuration: what Docker calls the image's id.
    pub(super) digest: Digest,
    pub(super) config: Config,
    /// The layers, lowest first, each with the digest of its tar.
    pub(super) layers: Vec<SavedLayer>,
}

pub(super) struct SavedLayer {
    pub(super) name: String,
    pub(super) diff_id: Digest,
    pub(super) part: Part,
}

/// Finds the only image of an archive.
pub(super) fn find(reader: &Reader<'_>) -> Result<Saved, ImageError> {
    let damaged = |what: &str, problem: String| ImageError::Damaged {
        image: reader.image.to_owned(),
        what: what.to_owned(),
        problem,
    };
    let mut items: Vec<Item> = reader.json(MANIFEST, &reader.bytes(MANIFEST)?)?;
    if items.len() > 1 {
        let tags: Vec<String> = items.iter().flat_map(|item| item.tags.clone().unwrap_or_default()).collect();
        let problem = format!("has several images, and one was expected; save it alone: {}", short_list(&tags));
        return Err(ImageError::Source { image: reader.image.to_owned(), problem });
    }
    let item = items.pop().ok_or_else(|| damaged(MANIFEST, "names no image".to_owned()))?;
    let bytes = reader.bytes(&item.config)?;
    let config: Config = reader.json(&item.config, &bytes)?;
    reader.check_platform(&config)?;
    let diff_ids = &config.rootfs.diff_ids;
    if diff_ids.len() != item.layers.len() {
        let problem = format!("has {} layers, where {} were expected", item.layers.len(), diff_ids.len());
        return Err(damaged(MANIFEST, problem));
    }
    let mut layers = Vec::new();
    for (name, diff_id) in item.layers.into_iter().zip(diff_ids) {
        let part = reader.files.open(&name).map_err(|error| reader.unreadable(&name, &error))?;
        let part = part.ok_or_else(|| damaged(&name, "is not in the archive".to_owned()))?;
        layers.push(SavedLayer { name, diff_id: reader.digest(diff_id)?, part });
    }
    Ok(Saved { digest: digest_of(&bytes), config, layers })
}

/// Tells whether files are those of such an archive.
pub(super) fn is_one(files: &Files) -> bool {
    matches!(files, Files::Archive(archive) if archive.has(MANIFEST))
}
