//! What images come from: reading, unpacking and building them.

mod archive;
mod build;
mod docker;
mod environment;
mod error;
mod folder;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod layered;
mod layers;
mod meter;
mod notes;
mod oci;
mod part;
mod remote;
mod rules;
mod shared;
mod sif;
mod source;
mod squashfs;
mod tar_pax;
mod tar_stream;
#[cfg(test)]
mod tests;
mod tree;
mod unpack;

pub use self::{
    build::{BuildRequest, BuilderConfig, Built, CacheMode, Compression, Definition, ImageBuilder, Template},
    error::ImageError,
    meter::{Cancel, Progress, Quiet, RATIO_FREE_BYTES, UnpackLimits},
    source::Source,
    unpack::Unpacker,
};

/// Tells whether what is at a path has to be unpacked before a sandbox can start from it: a file, or a folder with an OCI layout.
pub fn is_packed(path: &std::path::Path) -> bool {
    path.is_file() || path.join(oci::MARK).is_file()
}
