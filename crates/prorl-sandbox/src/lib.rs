#![doc = include_str!("../README.md")]

#[cfg(any(feature = "host", feature = "init"))]
mod cgroup;
#[cfg(feature = "init")]
pub mod init;
#[cfg(any(feature = "host", feature = "init"))]
pub mod node;
#[cfg(any(feature = "host", feature = "init"))]
mod parcel;
pub mod setup;
#[cfg(any(feature = "host", feature = "init"))]
mod subid;
#[cfg(any(feature = "host", feature = "init"))]
mod sys;

#[cfg(feature = "host")]
mod cpus;
#[cfg(feature = "host")]
mod diagnosis;
#[cfg(feature = "host")]
pub mod doctor;
#[cfg(feature = "egress")]
pub mod egress;
#[cfg(feature = "host")]
mod error;
#[cfg(feature = "host")]
mod freeze;
#[cfg(feature = "images")]
pub mod images;
#[cfg(feature = "host")]
mod limits;
#[cfg(feature = "host")]
mod namespace;
#[cfg(feature = "host")]
mod runtime;
#[cfg(feature = "host")]
mod sandbox;
#[cfg(feature = "host")]
mod singularity;
#[cfg(feature = "host")]
mod spec;
#[cfg(feature = "host")]
mod start;
#[cfg(feature = "host")]
pub mod store;
#[cfg(feature = "host")]
mod watch;

#[cfg(feature = "host")]
pub use cgroup::GroupChoice;
#[cfg(feature = "host")]
pub use error::{LauncherFault, SandboxError};
#[cfg(feature = "host")]
pub use freeze::FreezeError;
#[cfg(feature = "host")]
pub use limits::{DiskPlace, Exceeded, Limits};
#[cfg(feature = "host")]
pub use namespace::{NamespaceConfig, NamespaceRuntime};
#[cfg(feature = "host")]
pub use node::{Node, NodeConfig};
#[cfg(feature = "host")]
pub use runtime::Runtime;
#[cfg(feature = "host")]
pub use sandbox::{Facts, Sandbox};
pub use setup::{Bind, Network, SandboxUser};
#[cfg(feature = "host")]
pub use singularity::{SingularityConfig, SingularityRuntime};
#[cfg(feature = "host")]
pub use spec::{Image, SandboxSpec};
#[cfg(feature = "host")]
pub use start::become_user as sandbox_user;
