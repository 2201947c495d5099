//! Which ids there are in the new user namespace.
//!
//! Without fake root one: the user's own. With it, the user is 0 inside, and beside it there are as many ids as
//! the machine's administrator lets the user hand out (`/etc/subuid`). Only the set-uid programs `newuidmap` and `newgidmap` may
//! write such a map, and only from outside the new namespace, so a helper is forked before it is made. Where there is no
//! range, 0 is the only id, and the system calls that would need another are pretended (see [`super::confine`]).

use std::{
    fs,
    io::{self, Read as _, Write as _},
    ops::Range,
    os::unix::net::UnixStream,
    path::Path,
    process::{self, Command, Stdio},
};

use nix::{
    errno::Errno,
    sys::wait::waitpid,
    unistd::{Pid, getegid, geteuid},
};
use prorl_core::hello::{FakeRoot, StartFailure};

use super::At;
use crate::{
    setup::step,
    subid::{self, Kind},
    sys::{self, Fork},
};

/// What the helper says when both maps are written; anything else is why they are not.
const DONE: &str = "done";

/// More words than this of a failed program are cut.
const MAX_WORDS: usize = 300;

/// The users of a namespace that is about to be made.
pub(super) struct Users {
    uid: u32,
    gid: u32,
    /// The numbers that the host knows the user and its group by.
    host_ids: (u32, u32),
    plan: Plan,
}

enum Plan {
    /// The user's own id, under its own number.
    Own,
    /// The user's own id as 0.
    Single { missing: String },
    /// The user's own id as 0, and more, by the hand of a helper in the old namespace.
    Range(Helper),
}

impl Users {
    /// Decides who there will be, and forks the helper where one is needed. The caller has one thread, is the sandbox's user
    /// already, and is still in the old user namespace. `no_range` is why there can be no range, if that is known.
    pub(super) fn plan(fakeroot: bool, no_range: Option<&str>) -> Result<Self, StartFailure> {
        let (uid, gid) = (geteuid(), getegid());
        if uid.is_root() {
            return Err(Errno::EPERM).at(step::BECOME_USER, "root"); // any map would make root inside root outside
        }
        let (uid, gid) = (uid.as_raw(), gid.as_raw());
        let plan = if fakeroot {
            match no_range.map_or_else(|| subid::ranges(uid), |missing| Err(missing.to_owned())) {
                Ok((users, groups)) => {
                    Plan::Range(Helper::fork(&users, &groups, uid, gid).at(step::MAP_USERS, "helper")?)
                }
                Err(missing) => Plan::Single { missing },
            }
        } else {
            Plan::Own
        };
        Ok(Self { uid, gid, host_ids: (uid, gid), plan })
    }

    /// Does the same in a launcher's user namespace, in which this process is root and there is no range of ids: the user
    /// is to have the number that it has outside of that, or 0 again.
    pub(super) fn plan_again(fakeroot: bool, no_range: Option<&str>) -> Result<Self, StartFailure> {
        let host_ids = (outside("/proc/self/uid_map")?, outside("/proc/self/gid_map")?);
        let missing = no_range.unwrap_or("the launcher's user namespace has one id").to_owned();
        let plan = if fakeroot { Plan::Single { missing } } else { Plan::Own };
        Ok(Self { uid: geteuid().as_raw(), gid: getegid().as_raw(), host_ids, plan })
    }

    /// Writes the map of the namespace that this process has just made. Returns what a fake root got; nothing without one.
    pub(super) fn map(self) -> Result<Option<FakeRoot>, StartFailure> {
        match &self.plan {
            Plan::Own => {
                self.write_single(self.host_ids.0, self.host_ids.1)?;
                Ok(None)
            }
            Plan::Single { missing } => {
                self.write_single(0, 0)?;
                Ok(Some(FakeRoot::Single { missing: missing.clone() }))
            }
            Plan::Range(helper) => match helper.map() {
                Ok(()) => Ok(Some(FakeRoot::Range)),
                Err(missing) => {
                    self.write_single(0, 0)?;
                    Ok(Some(FakeRoot::Single { missing }))
                }
            },
        }
    }

    /// Writes maps that show the user and its group under the given ids, and no other. A map that is there already, as when
    /// the helper's second program failed, stays.
    fn write_single(&self, shown_user: u32, shown_group: u32) -> Result<(), StartFailure> {
        for (file, line) in [
            ("/proc/self/uid_map", format!("{shown_user} {} 1", self.uid)),
            ("/proc/self/setgroups", "deny".to_owned()), // or an ordinary user may not map a group
            ("/proc/self/gid_map", format!("{shown_group} {} 1", self.gid)),
        ] {
            let is_written = file.ends_with("_map") && fs::read(file).is_ok_and(|map| !map.is_empty());
            if !is_written {
                fs::write(file, line).at(step::MAP_USERS, file)?;
            }
        }
        Ok(())
    }
}

/// Returns the id outside of a user namespace that the first one of its map stands for.
fn outside(file: &str) -> Result<u32, StartFailure> {
    let map = fs::read_to_string(file).at(step::MAP_USERS, file)?;
    let id = map.split_whitespace().nth(1).and_then(|id| id.parse().ok());
    id.ok_or(Errno::EINVAL).at(step::MAP_USERS, file)
}

/// Tells which ids a fake root has in the user namespace that this process is in, made by somebody else.
///
/// `missing` is why there is no range, should there be none.
pub(super) fn current(missing: &str) -> FakeRoot {
    let n_ids = |file: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum::<u64>()
    };
    if n_ids("/proc/self/uid_map").min(n_ids("/proc/self/gid_map")) > 1 {
        FakeRoot::Range
    } else {
        FakeRoot::Single { missing: missing.to_owned() }
    }
}

/// A child that stays in the old user namespace to run the two programs there.
struct Helper {
    child: Pid,
    line: UnixStream,
}

impl Helper {
    fn fork(users: &Range<u32>, groups: &Range<u32>, uid: u32, gid: u32) -> io::Result<Self> {
        let (line, mut theirs) = UnixStream::pair()?;
        let target = process::id();
        match sys::fork()? {
            Fork::Parent(child) => Ok(Self { child, line }),
            Fork::Child => {
                drop(line);
                // A host may ignore the ends of its children, and then nobody here learns how they ended.
                let _ = sys::reset_signals();
                // No byte but an end means that nothing is to be mapped any more.
                if theirs.read_exact(&mut [0]).is_ok() {
                    let said = run(Kind::User, target, uid, users).and_then(|()| run(Kind::Group, target, gid, groups));
                    let _ = theirs.write_all(said.err().as_deref().unwrap_or(DONE).as_bytes());
                }
                process::exit(0)
            }
        }
    }

    /// Has the maps of this process's new namespace written.
    ///
    /// # Errors
    /// Which program failed, and its words.
    fn map(&self) -> Result<(), String> {
        let mut said = String::new();
        let mut line = &self.line;
        let told = line.write_all(&[1]).and_then(|()| line.read_to_string(&mut said));
        while waitpid(self.child, None) == Err(Errno::EINTR) {}
        match told {
            Ok(_) if said == DONE => Ok(()),
            Ok(0) => Err("the helper that runs newuidmap was killed".to_owned()),
            Ok(_) => Err(said),
            Err(error) => Err(format!("the helper that runs newuidmap failed: {error}")),
        }
    }
}

/// Has a map written: `own` as 0, then the ids of `range` from 1 on.
fn run(kind: Kind, target: u32, own: u32, range: &Range<u32>) -> Result<(), String> {
    let name = kind.program();
    let program = kind.find_program().unwrap_or_else(|| Path::new("/usr/bin").join(name));
    let n_ids = range.end - range.start;
    let numbers = [target, 0, own, 1, 1, range.start, n_ids].map(|number| number.to_string());
    let ran = Command::new(program).args(numbers).env_clear().stdin(Stdio::null()).stdout(Stdio::null()).output();
    match ran {
        Ok(ran) if ran.status.success() => Ok(()),
        Ok(ran) => {
            let words = String::from_utf8_lossy(&ran.stderr);
            let words: String = words.trim().replace('\n', "; ").chars().take(MAX_WORDS).collect();
            let words = words.strip_prefix(&format!("{name}: ")).unwrap_or(&words);
            Err(format!("{name} failed ({}): {words}", ran.status))
        }
        Err(error) => Err(format!("{name} failed: {error}")),
    }
}
