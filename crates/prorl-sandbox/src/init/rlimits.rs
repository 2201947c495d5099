//! What the kernel limits for each process, and what a sandbox may take of what its user has.

use std::{fs, io};

use nix::{
    errno::Errno,
    sys::{
        resource::{Resource, getrlimit, rlim_t, setrlimit},
        utsname::uname,
    },
};
use prorl_core::hello::StartFailure;

use super::At;
use crate::setup::Walls;

/// Processes and threads that the guest may have beside those of tasks: it must be able to start something, and to end it, in a
/// sandbox that is full.
const OWN_PROCESSES: rlim_t = 64;

/// Part of what a user may have in all its sandboxes together that one of them may take.
const SHARE: rlim_t = 4;

/// The first kernel that counts the processes of each user namespace by themselves. Before it, one number is counted for all
/// processes of a user, in whatever sandbox.
const COUNTS_BY_NAMESPACE: (u32, u32) = (5, 14);

/// How the kernel is to choose among processes when the machine is out of memory: one of a sandbox rather than a service.
const OOM_SCORE: i32 = 500;

/// Forbids core dumps, to files and to a program of the host's.
///
/// The kernel passes over a limit of 0 where `core_pattern` is a pipe, and would start a program as the host's root on what
/// a task left in its memory. A limit of 1 byte stops both. A host whose own limit is 0 keeps it unless it is root, which is
/// why this comes before root is given up.
pub(super) fn forbid_cores() -> Result<(), Errno> {
    setrlimit(Resource::RLIMIT_CORE, 1, 1).or_else(|_refused| setrlimit(Resource::RLIMIT_CORE, 0, 0))
}

/// Makes the kernel rather end this process, and what it will start, than a service of the host, when the machine is out of
/// memory. A process may raise its own score, and not lower it again.
pub(super) fn offer_first() -> io::Result<()> {
    const FILE: &str = "/proc/self/oom_score_adj";
    let score: Option<i32> = fs::read_to_string(FILE)?.trim().parse().ok();
    if score.is_some_and(|score| score >= OOM_SCORE) {
        return Ok(());
    }
    fs::write(FILE, OOM_SCORE.to_string())
}

/// Limits this process and everything it will start. Returns the limits that the programs of tasks are to get beside.
pub(super) fn limit(walls: &Walls) -> Result<Walls, StartFailure> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).at("limit open files", "")?;
    // The kernel counts open files that are being sent for the user, in all its sandboxes, and lets each process send until there are
    // as many as it may have open itself. So the guest may have more than any task: it sends some with its hello.
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).at("limit open files", "")?;
    // Nothing runs before others, and nothing that was put behind all others comes back by itself.
    for resource in [Resource::RLIMIT_NICE, Resource::RLIMIT_RTPRIO] {
        setrlimit(resource, 0, 0).at("limit priority", "")?;
    }
    // Both are kernel memory that is counted for the user, in all its sandboxes.
    for resource in [Resource::RLIMIT_MSGQUEUE, Resource::RLIMIT_SIGPENDING] {
        let (_, hard) = getrlimit(resource).at("limit queues", "")?;
        let share = if hard == libc::RLIM_INFINITY { hard } else { hard / SHARE };
        setrlimit(resource, share, share).at("limit queues", "")?;
    }
    let pids = walls.pids.filter(|_limit| counts_by_namespace());
    if let Some(pids) = pids {
        let (_, hard) = getrlimit(Resource::RLIMIT_NPROC).at("limit processes", "")?;
        let own = hard.min(rlim_t::from(pids) + OWN_PROCESSES);
        setrlimit(Resource::RLIMIT_NPROC, own, own).at("limit processes", "")?;
    }
    Ok(Walls { pids, ..walls.clone() })
}

fn counts_by_namespace() -> bool {
    uname().is_ok_and(|name| version(&name.release().to_string_lossy()) >= Some(COUNTS_BY_NAMESPACE))
}

/// Reads the two numbers that a kernel's release begins with.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|char: char| !char.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Limits what this user namespace may take of what its user may have in all of them, by its own settings in `to`. The user's are
/// in `from`, which shows the same in every namespace. Where a setting is missing, the kernel has no such thing.
pub(super) fn share_notices(from: &str, to: &str) {
    for name in ["instances", "watches"] {
        let all =
            fs::read_to_string(format!("{from}/max_user_{name}")).ok().and_then(|all| all.trim().parse::<u64>().ok());
        if let Some(all) = all {
            // A kernel that cannot be told limits all together still.
            let _ = fs::write(format!("{to}/max_inotify_{name}"), (all / SHARE).max(1).to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_begins_with_two_numbers() {
        assert_eq!(version("6.18.44-fc-v669"), Some((6, 18)));
        assert_eq!(version("4.18.0-553.el8.x86_64"), Some((4, 18)));
        assert_eq!(version("6.1"), Some((6, 1)));
        assert_eq!(version("unknown"), None);
        assert!(version("unknown") < Some(COUNTS_BY_NAMESPACE));
    }
}
