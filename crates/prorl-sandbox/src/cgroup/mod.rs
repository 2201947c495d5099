//! Control groups (version 2) of sandboxes, where the machine has delegated some to this process.
//!
//! Nobody without root makes a control group where he likes: somebody has to give him a folder of the hierarchy, as systemd does
//! with `Delegate=yes`. A group that has processes cannot have limited groups below it; so a process that is alone in its
//! group, as a service is, moves itself one down. What it makes then:
//!
//! ```text
//! its own group, or the folder that the operator names
//! `- prorl-PID-START        one of each process: its number, and the clock tick of its start
//!    |- server              this process and its keepers, if they were in the group above
//!    `- SANDBOX             one of each sandbox, limited
//! ```
//!
//! A process that shares its group with others leaves them where they are, and goes without control groups.

#[cfg(feature = "host")]
mod find;
#[cfg(feature = "host")]
mod group;
#[cfg(feature = "host")]
mod home;
#[cfg(all(test, feature = "host"))]
mod tests;

#[cfg(feature = "host")]
pub use self::home::GroupChoice;
#[cfg(feature = "host")]
pub(crate) use self::{
    find::Why,
    group::{Ceilings, Group},
    home::{Groups, look},
};

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Lists the processes of a group, and takes in others.
const PROCS: &str = "cgroup.procs";

/// Names the controllers of the groups below a group.
const SUBTREE: &str = "cgroup.subtree_control";

/// Kills everything in a group and below it.
const KILL: &str = "cgroup.kill";

/// The group of the process itself, below its folder.
const SERVER: &str = "server";

/// Writes to a file of a group. There is none to be made.
fn write(folder: &Path, name: &str, text: &str) -> io::Result<()> {
    use std::io::Write as _;

    fs::File::options().write(true).open(folder.join(name))?.write_all(text.as_bytes())
}

/// Returns the groups directly below a group; none of one that is gone.
fn below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Tells whether an error says that a group is not there. Files that are open say so by the second.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}

/// Kills whatever is in a group and in those below it. Before Linux 5.14 it does nothing.
fn kill(folder: &Path) {
    let _ = write(folder, KILL, "1");
}

/// Removes a group and those below it, and tells whether that is done: what still has processes stays.
fn remove_empty(folder: &Path) -> io::Result<bool> {
    match fs::remove_dir(folder) {
        Ok(()) => return Ok(true),
        Err(error) if is_gone(&error) => return Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
        Err(error) => return Err(error),
    }
    let mut is_empty = true;
    let children = below(folder)?;
    for child in &children {
        is_empty &= remove_empty(child)?;
    }
    // Without children it was a process that kept it.
    if children.is_empty() || !is_empty {
        return Ok(false);
    }
    match fs::remove_dir(folder) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(false),
        Err(error) if !is_gone(&error) => Err(error),
        Ok(()) | Err(_) => Ok(true),
    }
}

/// Ends a group whose sandbox is known to be over: kills what is left in it and removes it. Tells whether it is gone; until then
/// it is to be called again.
pub(crate) fn end(folder: &Path) -> io::Result<bool> {
    kill(folder);
    remove_empty(folder)
}

/// Gives up a process's folder of groups, and moves this process back to where it came from. Nothing happens as long as others
/// use it, the last of whom does it.
pub(crate) fn leave(folder: &Path) -> io::Result<()> {
    let server = folder.join(SERVER);
    if let (Some(parent), true) = (folder.parent(), server.exists()) {
        let is_alone = processes(&server)? == [std::process::id()];
        if !is_alone || below(folder)?.iter().any(|group| *group != server) {
            return Ok(());
        }
        for group in [folder, parent] {
            disable_all(group)?;
        }
        write(parent, PROCS, "0")?;
        fs::remove_dir(server)?;
    }
    match fs::remove_dir(folder) {
        Err(error) if !is_gone(&error) && error.raw_os_error() != Some(libc::EBUSY) => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns the numbers of the processes in a group; 0 is one that this process cannot see.
fn processes(folder: &Path) -> io::Result<Vec<u32>> {
    let list = fs::read_to_string(folder.join(PROCS))?;
    Ok(list.lines().map(|line| line.trim().parse().unwrap_or_default()).collect())
}

/// Takes every controller from the groups below a group.
fn disable_all(folder: &Path) -> io::Result<()> {
    let enabled = fs::read_to_string(folder.join(SUBTREE))?;
    let text: Vec<_> = enabled.split_whitespace().map(|name| format!("-{name}")).collect();
    if text.is_empty() { Ok(()) } else { write(folder, SUBTREE, &text.join(" ")) }
}
