#![doc = include_str!("../README.md")]

#[cfg(feature = "conformance")]
pub mod conformance;
pub mod schema;
pub mod tree;
pub mod wire;

#[cfg(feature = "guest")]
pub mod guest;
#[cfg(feature = "host")]
pub mod host;
