#![doc = include_str!("../README.md")]

pub mod schema;
pub mod wire;

#[cfg(feature = "guest")]
pub mod guest;
#[cfg(feature = "host")]
pub mod host;
