//! What this machine's prorl processes own together: who started which sandbox, and how it ends whatever becomes of them.
//!
//! A [`Node`] is one process's share. It has a folder, in which each sandbox has a record and may have a folder, and a
//! *keeper*: a small process that waits for the end of this one. Sandboxes end by themselves when their host does; the keeper
//! proves it, kills what stays, and removes every file. Should both be killed, the next process that opens a node here
//! does the same.

mod attend;
mod endings;
mod folder;
mod process;
mod record;
mod sweep;
mod wire;

#[cfg(feature = "host")]
mod admission;
#[cfg(feature = "host")]
mod below;
#[cfg(feature = "host")]
mod claim;
#[cfg(feature = "host")]
mod executable;
#[cfg(feature = "host")]
mod host;
#[cfg(feature = "init")]
mod keeper;
#[cfg(feature = "host")]
mod link;
#[cfg(feature = "host")]
mod loopback;
#[cfg(feature = "host")]
mod reconcile;
#[cfg(all(test, feature = "host"))]
mod tests;

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

#[cfg(feature = "init")]
pub use self::keeper::keep;
#[cfg(feature = "host")]
pub(crate) use self::{
    admission::free_memory_here,
    below::below,
    claim::Claim,
    process::{Handle, Maker, Process, descends, has_ended},
    record::Reach,
};
#[cfg(feature = "host")]
pub use self::{
    host::{Node, NodeConfig},
    loopback::Loopback,
};

/// Raises this process's soft limit of open files to the hard one, and returns it: a sandbox holds about five, and the usual
/// soft limit is 1024.
///
/// # Errors
/// What the system says; the limit is as it was then.
pub fn raise_open_files() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}
