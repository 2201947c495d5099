//! Whether the user of root's sandboxes can use what is in a store.

use std::{
    fmt,
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use nix::unistd::{Uid, User};

use super::StoreError;
use crate::SandboxUser;

/// The attribute that grants rights beyond those of the mode.
const ACCESS_LIST: &str = "system.posix_acl_access";

/// A user and a group, for people.
struct Named(SandboxUser);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match User::from_uid(Uid::from_raw(self.0.uid)) {
            Ok(Some(user)) => write!(f, "{} ({}:{})", user.name, self.0.uid, self.0.gid),
            _ => write!(f, "{}:{}", self.0.uid, self.0.gid),
        }
    }
}

/// Refuses a store that `user` cannot get to: each folder above it, and itself, must let everybody or this user pass.
pub(super) fn check_way(store: &Path, user: SandboxUser) -> Result<(), StoreError> {
    let real = store.canonicalize().map_err(|source| StoreError::io("find", store, source))?;
    // From the top, as the user would go.
    let above: Vec<_> = real.ancestors().collect();
    for folder in above.into_iter().rev() {
        let meta = fs::metadata(folder).map_err(|source| StoreError::io("look at", folder, source))?;
        if !may_pass(&meta, user) && !has_access_list(folder) {
            return Err(StoreError::Closed {
                dir: store.to_owned(),
                folder: folder.to_owned(),
                user: Named(user).to_string(),
            });
        }
    }
    Ok(())
}

fn may_pass(folder: &Metadata, user: SandboxUser) -> bool {
    let bit = if folder.uid() == user.uid {
        0o100
    } else if folder.gid() == user.gid {
        0o010
    } else {
        0o001
    };
    folder.mode() & bit != 0
}

/// Tells whether a folder may be open to more users than its mode says.
fn has_access_list(folder: &Path) -> bool {
    rustix::fs::getxattr(folder, ACCESS_LIST, &mut [0_u8; 0]).is_ok()
}

/// Refuses an image that was unpacked for another user than `user`: that one may not be able to read it. Its root says whose it
/// is, as its other files do.
pub(super) fn check_owner(root: &Path, user: SandboxUser) -> Result<(), StoreError> {
    let meta = fs::metadata(root).map_err(|source| StoreError::io("look at", root, source))?;
    let owner = SandboxUser { uid: meta.uid(), gid: meta.gid() };
    if owner == user {
        return Ok(());
    }
    Err(StoreError::OtherOwner {
        root: root.to_owned(),
        owner: Named(owner).to_string(),
        user: Named(user).to_string(),
    })
}
