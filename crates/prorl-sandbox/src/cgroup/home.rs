//! What this process has of control groups, and shares among its nodes.

use std::{
    cell::RefCell,
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use parking_lot::ReentrantMutex;

use super::{Ceilings, Group, PROCS, SERVER, SUBTREE, Why, find, is_gone, leave, processes, remove_empty, write};
use crate::node::{Maker, Process};

/// Which control groups sandboxes are to be limited by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupChoice {
    /// Groups below this process's own, if that is delegated to its user and it is alone there; otherwise none. This process
    /// then moves one group down, and back in the end.
    #[default]
    Auto,
    /// None.
    Off,
    /// Groups below this one, which has no processes and no limits that sandboxes are not to share; opening a node fails
    /// where they cannot be used. An ordinary user needs one below a group of his that this process is in, too.
    At(PathBuf),
}

/// How names of the folders of processes begin.
const PREFIX: &str = "prorl-";

/// How much more of the processors this process gets than one sandbox, where all want them.
const SERVER_WEIGHT: &str = "1000";

/// The folder that [`GroupChoice::Auto`] has made for this process, as long as a node uses it: the process is in it, and can find
/// its own group no more. Locked by whoever moves the process; an attempt that fails moves it back.
static OWN: ReentrantMutex<RefCell<Weak<Home>>> = ReentrantMutex::new(RefCell::new(Weak::new()));

/// This process's folder of groups. It is left when this is dropped.
#[derive(Debug)]
pub(super) struct Home {
    folder: PathBuf,
    /// Those that limit the groups in it.
    controllers: Vec<&'static str>,
    maker: Maker,
}

/// The control groups of a node's sandboxes, or why there are none.
#[derive(Clone, Debug)]
pub(crate) struct Groups(Result<Arc<Home>, Arc<Why>>);

impl Groups {
    /// Finds what there is, and makes this process's folder in it.
    ///
    /// # Errors
    /// Why groups that were named cannot be used.
    pub(crate) fn open(choice: &GroupChoice) -> Result<Self, Why> {
        match choice {
            GroupChoice::Off => Ok(Self(Err(Arc::new(Why::Off)))),
            GroupChoice::At(path) => Self::at(path, find::NEEDED),
            GroupChoice::Auto => {
                let own = OWN.lock();
                let present = own.borrow().upgrade();
                if let Some(home) = present {
                    return Ok(Self(Ok(home)));
                }
                Ok(Self(match Home::below_own() {
                    Ok(home) => {
                        let home = Arc::new(home);
                        own.replace(Arc::downgrade(&home));
                        Ok(home)
                    }
                    Err(why) => {
                        tracing::debug!(%why, "sandboxes get no control groups");
                        Err(Arc::new(why))
                    }
                }))
            }
        }
    }

    /// Uses a group that was named, with these controllers at least.
    pub(super) fn at(group: &Path, needed: &[&'static str]) -> Result<Self, Why> {
        let failed = |source| Why::Failed { group: group.to_owned(), source };
        // Both are compared by their names.
        let group = group.canonicalize().map_err(failed)?;
        let controllers = find::check(&group, needed)?;
        find::check_reach(&own_group()?, &group)?;
        if !is_root(&group) && !processes(&group).map_err(failed)?.is_empty() {
            return Err(Why::Others { group });
        }
        Ok(Self::of(Home::make(&group, controllers, false)?))
    }

    pub(super) fn of(home: Home) -> Self {
        Self(Ok(Arc::new(home)))
    }

    /// Returns this process's folder.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.0.as_ref().ok().map(|home| home.folder.as_path())
    }

    /// Returns what a sandbox's group will be called, if it is to have one.
    pub(crate) fn path_of(&self, id: &str) -> Option<PathBuf> {
        self.folder().map(|folder| folder.join(id))
    }

    /// Makes a sandbox's group, which is to be at [`path_of`](Self::path_of).
    pub(crate) fn make(&self, path: PathBuf, ceilings: &Ceilings) -> io::Result<Group> {
        let Ok(home) = &self.0 else { return Err(io::ErrorKind::Unsupported.into()) };
        match Group::make(path.clone(), *ceilings, &home.controllers) {
            // Somebody who took this process for a dead one has removed its folder.
            Err(error) if is_gone(&error) => {
                home.furnish()?;
                Group::make(path, *ceilings, &home.controllers)
            }
            made => made,
        }
    }

    /// Removes what dead processes have left beside this one's folder, as far as nothing is in it.
    pub(crate) fn tidy(&self) {
        let Some((own, beside)) = self.folder().and_then(|own| Some((own, own.parent()?))) else { return };
        for folder in super::below(beside).unwrap_or_default() {
            if folder != own && folder.file_name().and_then(OsStr::to_str).is_some_and(is_dead) {
                let _ = remove_empty(&folder);
            }
        }
    }
}

impl Home {
    /// Makes this process's folder below its own group, and moves it there.
    fn below_own() -> Result<Self, Why> {
        let group = own_group()?;
        let controllers = find::check(&group, find::NEEDED)?;
        check_alone(&group)?;
        Self::make(&group, controllers, !is_root(&group))
    }

    /// Makes this process's folder in `group`, and moves it from there if it is in the way.
    pub(super) fn make(group: &Path, controllers: Vec<&'static str>, moves: bool) -> Result<Self, Why> {
        let failed = |source| Why::Failed { group: group.to_owned(), source };
        let me = Process::of(std::process::id()).map_err(failed)?;
        let started = me.and_then(|me| me.started).unwrap_or_default();
        let folder = group.join(format!("{PREFIX}{}-{started}", std::process::id()));
        let mut home = Self { folder, controllers, maker: Maker::this() };
        // From here on a failure leaves again what was made.
        let made = if moves { home.move_in() } else { Ok(()) };
        made.and_then(|()| home.furnish()).map_err(failed)?;
        let enabled = fs::read_to_string(home.folder.join(SUBTREE)).map_err(failed)?;
        home.controllers.retain(|name| enabled.split_whitespace().any(|one| one == *name));
        Ok(home)
    }

    /// Moves this process into a group of its own.
    fn move_in(&self) -> io::Result<()> {
        let server = self.folder.join(SERVER);
        for folder in [&self.folder, &server] {
            make_folder(folder)?;
        }
        write(&server, PROCS, "0")
    }

    /// Makes the folder, unless it is there, and lets what is in it have limits.
    fn furnish(&self) -> io::Result<()> {
        make_folder(&self.folder)?;
        for group in self.folder.parent().into_iter().chain([self.folder.as_path()]) {
            for name in &self.controllers {
                match write(group, SUBTREE, &format!("+{name}")) {
                    // One may be there and not to be had, as that of the processors beside threads with deadlines.
                    Err(_refused) if find::USEFUL.contains(name) => {}
                    result => result?,
                }
            }
        }
        // Best effort: what is held is held without it.
        let _ = write(&self.folder.join(SERVER), "cpu.weight", SERVER_WEIGHT);
        Ok(())
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            return;
        }
        let _moving = OWN.lock();
        if let Err(error) = leave(&self.folder) {
            tracing::debug!(folder = %self.folder.display(), %error, "folder of control groups was left");
        }
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

pub(super) fn own_group() -> Result<PathBuf, Why> {
    let [mountinfo, cgroup] = ["/proc/self/mountinfo", "/proc/self/cgroup"].map(fs::read_to_string);
    find::own_group(&mountinfo.unwrap_or_default(), &cgroup.unwrap_or_default())
}

/// Tells whether a folder is that of a process which is not there. Numbers mean nothing across pid namespaces, so that it may
/// be wrong; no harm comes of that.
fn is_dead(name: &str) -> bool {
    let numbers = name.strip_prefix(PREFIX).and_then(|numbers| numbers.split_once('-'));
    let Some((Ok(pid), Ok(started))) = numbers.map(|(pid, started)| (pid.parse::<u32>(), started.parse::<u64>()))
    else {
        return false;
    };
    let known = |process: Process| process.started.is_none_or(|now| now == started);
    matches!(Process::of(pid), Ok(found) if !found.is_some_and(known))
}

/// Says what [`Groups::open`] would find, without making anything: where groups would be, and their controllers.
pub(crate) fn look() -> Result<(PathBuf, Vec<&'static str>), Why> {
    let own = OWN.lock();
    let present = own.borrow().upgrade();
    if let Some(home) = present {
        return Ok((home.folder.clone(), home.controllers.clone()));
    }
    let group = own_group()?;
    let controllers = find::check(&group, find::NEEDED)?;
    check_alone(&group)?;
    Ok((group, controllers))
}

/// Tells whether a group is the root of the hierarchy, which is the only one that may have both processes and groups with limits.
fn is_root(group: &Path) -> bool {
    !group.join("cgroup.type").exists()
}

/// Checks that nobody would have to be moved out of a group but this process.
fn check_alone(group: &Path) -> Result<(), Why> {
    match processes(group) {
        Ok(all) if is_root(group) || all == [std::process::id()] => Ok(()),
        Ok(_) => Err(Why::Others { group: group.to_owned() }),
        Err(source) => Err(Why::Failed { group: group.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_the_dead_are_told_by_number_and_start() {
        let me = Process::of(std::process::id()).unwrap().unwrap();
        let started = me.started.unwrap();
        assert!(!is_dead(&format!("prorl-{}-{started}", me.pid)));
        assert!(is_dead(&format!("prorl-{}-{}", me.pid, started + 1)));
        assert!(is_dead(&format!("prorl-{}-5", i32::MAX)));
        for other in ["prorl-x-1", "prorl-1", "other-1-1", "prorl-1-1-1"] {
            assert!(!is_dead(other), "{other}");
        }
    }
}
