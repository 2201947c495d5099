#![doc = include_str!("../README.md")]

#[cfg(feature = "init")]
pub mod init;
pub mod setup;
#[cfg(any(feature = "host", feature = "init"))]
mod sys;

#[cfg(feature = "host")]
mod diagnosis;
#[cfg(feature = "host")]
mod error;
#[cfg(feature = "host")]
mod namespace;
#[cfg(feature = "host")]
mod runtime;
#[cfg(feature = "host")]
mod sandbox;
#[cfg(feature = "host")]
mod spec;

#[cfg(feature = "host")]
pub use error::SandboxError;
#[cfg(feature = "host")]
pub use namespace::{NamespaceConfig, NamespaceRuntime};
#[cfg(feature = "host")]
pub use runtime::Runtime;
#[cfg(feature = "host")]
pub use sandbox::{Facts, Sandbox};
pub use setup::{Bind, Image, Network, SandboxUser};
#[cfg(feature = "host")]
pub use spec::SandboxSpec;
