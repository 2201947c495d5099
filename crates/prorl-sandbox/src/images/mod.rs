//! What images come from: reading, unpacking and building them.

mod error;
mod meter;

pub use self::{
    error::ImageError,
    meter::{Cancel, Progress, Quiet, RATIO_FREE_BYTES, UnpackLimits},
};
