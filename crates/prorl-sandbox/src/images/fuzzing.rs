//! What fuzzers drive: the readers of image files, with no store around them. Not there in any other build.

use std::{fs, fs::File, num::NonZeroUsize, path::Path, sync::Arc};

use super::{
    Cancel, ImageError, Quiet, UnpackLimits, environment,
    layered::{self, Wanted},
    layers::Layers,
    meter::Meter,
    oci,
    part::{Packing, Part, unpacked},
    sif::{self, Packed},
    squashfs,
};

/// Most entries that come of one image.
pub const MAX_ENTRIES: u64 = 200;

/// Most bytes that come of one image.
pub const MAX_BYTES: u64 = 4 << 20;

const LIMITS: UnpackLimits = UnpackLimits { max_entries: MAX_ENTRIES, max_bytes: MAX_BYTES, max_ratio: u64::MAX };
const NAME: &str = "image";

/// Unpacks an image file of whatever kind into `root` in the folder `place`; returns how many entries and bytes came of it.
///
/// # Errors
/// When it is no image, or none that may be unpacked.
pub fn unpack(image: &Path, place: &Path) -> Result<(u64, u64), ImageError> {
    let (file, len, is_tar) = opened(image)?;
    let root = made(place)?;
    let cancel = Cancel::default();
    let meter = Meter::new(NAME, len, LIMITS, &cancel, &Quiet);
    if is_tar {
        let plain = layered::plain_file(&file, len, &place.join("archive.tar"), &meter)?;
        let files = layered::open_archive(NAME, plain)?;
        let stack = layered::find(&oci::Reader { image: NAME, files: &files }, &Wanted::Any)?;
        let meter = Meter::new(NAME, stack.packed_bytes(), LIMITS, &cancel, &Quiet);
        let laid = stack.lay(&root, None, &meter)?;
        let (entries, bytes) = (laid.entries, laid.bytes);
        return Ok((entries, bytes));
    }
    let (offset, len) = match sif::recognise(&file, NAME)? {
        Packed::Sif { offset, len } => (offset, len),
        Packed::Squashfs { len } => (0, len),
    };
    let notes = squashfs::unpack(&file, offset, len, &root, None, NonZeroUsize::MIN, &meter)?;
    environment::read(&root, &mut notes.into_lines())?;
    Ok(meter.counted())
}

/// Lays a tar that is a single layer into `root` in the folder `place`; returns how many entries and bytes came of it.
///
/// # Errors
/// When it is no tar, or none that may be unpacked.
pub fn lay(image: &Path, place: &Path) -> Result<(u64, u64), ImageError> {
    let (file, len, is_tar) = opened(image)?;
    if !is_tar {
        return Ok((0, 0));
    }
    let root = made(place)?;
    let cancel = Cancel::default();
    let meter = Meter::new(NAME, len, LIMITS, &cancel, &Quiet);
    let mut layers = Layers::begin(&root, None, &meter)?;
    // Twice: a layer over one of the same is a case of its own.
    for name in ["the lower layer", "the upper layer"] {
        let input =
            unpacked(Part::new(Arc::clone(&file), 0, len)).map_err(|error| ImageError::at("read", image, error))?;
        let tar = layers.add(name, input)?;
        layers.drain(name, tar)?;
    }
    let (_notes, entries, bytes) = layers.finish()?;
    Ok((entries, bytes))
}

/// Removes what the others have made.
///
/// # Panics
/// When something of it cannot be removed.
pub fn clear(place: &Path) {
    for name in ["root", "removed", "archive.tar"] {
        crate::store::remove_tree(&place.join(name)).expect("what was unpacked can be removed");
    }
}

/// Opens a file and tells, as it is told elsewhere, whether it is a tar, packed or not.
fn opened(image: &Path) -> Result<(Arc<File>, u64, bool), ImageError> {
    let at = |error| ImageError::at("open image", image, error);
    let file = Arc::new(File::open(image).map_err(at)?);
    let len = file.metadata().map_err(at)?.len();
    let mut start = [0; 512];
    let n_read = Part::new(Arc::clone(&file), 0, len).peek(&mut start).map_err(at)?;
    let is_tar = start[257..].starts_with(b"ustar") || Packing::of(&start[..n_read]) != Packing::Plain;
    Ok((file, len, is_tar))
}

fn made(place: &Path) -> Result<std::path::PathBuf, ImageError> {
    let root = place.join("root");
    fs::create_dir(&root).map_err(|error| ImageError::at("make folder", &root, error))?;
    Ok(root)
}
