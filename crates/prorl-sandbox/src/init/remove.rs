//! The remover: a process that empties a folder in which files belong to a fake root's other ids. Outside of a user namespace
//! that has those ids too, the user whose sandbox it was has no right over them.

use std::{
    ffi::CStr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use nix::{
    sched::{CloneFlags, unshare},
    sys::prctl::set_dumpable,
};
use prorl_core::hello::{FakeRoot, StartFailure};
use rustix::{
    fs::{AtFlags, unlinkat},
    io::Errno,
};

use super::{
    At, become_user,
    freeze::{MAX_DEPTH, names, open_folder, start},
    users::Users,
};
use crate::{
    parcel,
    setup::{Chore, Counted, step},
    sys,
};

/// Empties a folder.
///
/// # Errors
/// The step that failed, and the name of what it failed at.
pub fn remove(channel: &OwnedFd, order: &Chore) -> Result<Counted, StartFailure> {
    start(channel, c"prorl-remover")?;
    let [folder] = parcel::receive::<1>(channel).at("receive", "folder")?;
    if let Some(user) = order.become_user {
        become_user(user)?;
    }
    sys::reset_signals().at("reset signals", "")?; // or nobody learns how the programs end that map users
    let users = Users::plan(true, None)?;
    unshare(CloneFlags::CLONE_NEWUSER).at(step::NAMESPACES, "")?;
    if let Some(FakeRoot::Single { missing }) = users.map()? {
        return Err(Errno::PERM).at("get a range of ids", &missing);
    }
    set_dumpable(false).at("become undumpable", "")?;
    empty(folder.as_fd())?;
    Ok(Counted::default())
}

/// Removes everything in a folder, as far as it can be; fails for the first thing that cannot.
pub(super) fn empty(folder: BorrowedFd<'_>) -> Result<(), StartFailure> {
    empty_at(folder, 0)
}

fn empty_at(folder: BorrowedFd<'_>, depth: usize) -> Result<(), StartFailure> {
    let mut all = Ok(());
    for name in names(folder).at("read", "folder")? {
        let removed = match unlinkat(folder, &*name, AtFlags::empty()) {
            Err(Errno::ISDIR) if depth < MAX_DEPTH => remove_folder(folder, &name, depth),
            removed => removed.at("remove", &name.to_string_lossy()),
        };
        all = all.and(removed);
    }
    all
}

fn remove_folder(above: BorrowedFd<'_>, name: &CStr, depth: usize) -> Result<(), StartFailure> {
    let said = name.to_string_lossy();
    let folder = open_folder(above, name).at("open", &said)?;
    empty_at(folder.as_fd(), depth + 1)?;
    unlinkat(above, name, AtFlags::REMOVEDIR).at("remove", &said)
}
