//! What the machine has: control groups, memory, virtual machines, limits, a network.

use std::{
    fs,
    io::{self, ErrorKind},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    thread,
    time::Duration,
};

use nix::{
    sys::resource::{RLIM_INFINITY, Resource, getrlimit},
    unistd::{Gid, Group, User, geteuid},
};

use super::{Finding, State};
use crate::{
    NodeConfig,
    cgroup::{self, Why},
    limits::memory_total,
    node::free_memory_here,
    sys,
};

/// What a few hundred jobs at once take of open files.
const MANY_FILES: u64 = 4096;

/// What a few hundred sandboxes take of processes.
const MANY_PROCESSES: u64 = 4096;

pub(super) fn limits() -> Finding {
    judge_groups(cgroup::look())
}

fn judge_groups(found: Result<(PathBuf, Vec<&'static str>), Why>) -> Finding {
    match found {
        Ok((group, controllers)) => Finding::ok(
            format!("control groups delegated at {} ({})", group.display(), controllers.join(", ")),
            "the kernel holds each sandbox to its limits, and a watchdog tells what was exceeded",
        ),
        Err(why) => Finding::warn(
            format!("rlimits, affinity and watchdog (cgroup v2 is not delegated: {why})"),
            "limits of sandboxes are held, by looking ten times a second at what the kernel does not limit by itself",
            why.remedy(),
        ),
    }
}

pub(super) fn memory() -> Finding {
    let meaning =
        "a sandbox is started while so much is free as its node leaves to others; what it writes is memory too";
    let Some(free) = free_memory_here() else {
        return Finding::warn("not known", meaning, "show /proc/meminfo in this container");
    };
    let config = NodeConfig::new("");
    let text = format!("{} MiB of {} MiB free", free >> 20, memory_total() >> 20);
    if free < config.min_free_memory {
        return Finding::bad(
            format!("{text}, less than {} MiB", config.min_free_memory >> 20),
            "no sandbox is started while so little is free",
            "end what needs memory, or give this machine or container more",
        );
    }
    Finding::ok(text, meaning)
}

pub(super) fn idle_scheduling() -> Finding {
    // A thread may not be able to come back from it.
    let tried = thread::Builder::new().name("doctor-idle".to_owned()).spawn(|| Ok(sys::set_idle(0, true)?));
    let tried = tried.and_then(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread broke"))));
    match tried {
        Ok(()) => {
            Finding::ok("SCHED_IDLE", "a sandbox that wants more processors than it has runs when nobody else wants to")
        }
        Err(error) => Finding::warn(
            format!("SCHED_IDLE: {error}"),
            "a sandbox with more running threads than processors slows its neighbours",
            "let the seccomp filter of this container pass sched_setscheduler",
        ),
    }
}

pub(super) fn kvm() -> Finding {
    let path = "/dev/kvm";
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => Finding::ok(
            format!("{path} opens"),
            "virtual machines may run at full speed; only one that has booted proves it",
        ),
        Err(error) if error.kind() == ErrorKind::NotFound => Finding::absent(
            format!("no {path}"),
            "virtual machines are emulated, which is slow; nothing else needs it",
            "turn on virtualization in the firmware, or nested virtualization of this virtual machine",
        ),
        Err(error) => Finding::warn(
            format!("{path}: {error}"),
            "virtual machines are emulated for this user, which is slow; nothing else needs it",
            match fs::metadata(path) {
                Ok(meta) if error.raw_os_error() == Some(libc::EACCES) => kvm_remedy(meta.gid(), meta.mode()),
                _ => "give the device to this container (docker: --device /dev/kvm), or load its module as root \
                      (modprobe kvm_intel or kvm_amd)"
                    .to_owned(),
            },
        ),
    }
}

/// Says how to let a user open the device, from its group and mode.
fn kvm_remedy(gid: u32, mode: u32) -> String {
    if gid == 0 || mode & 0o060 != 0o060 {
        // A member of root's group could do more than that.
        let rule = r#"KERNEL=="kvm", GROUP="kvm", MODE="0660""#;
        return format!(
            "let a group open it, as root: chgrp kvm /dev/kvm && chmod 660 /dev/kvm (for good by a udev rule: {rule}), and \
             make the user a member"
        );
    }
    let group = Group::from_gid(Gid::from_raw(gid)).ok().flatten().map_or_else(|| gid.to_string(), |group| group.name);
    let user = User::from_uid(geteuid()).ok().flatten().map_or_else(|| geteuid().to_string(), |user| user.name);
    format!("make the user a member of the device's group as root: usermod -aG {group} {user}; then log in again")
}

pub(super) fn open_files() -> Finding {
    let remedy = "raise the hard limit (ulimit -Hn; LimitNOFILE= in systemd)";
    let limit = |(_, hard): (u64, u64)| hard; // the soft one is raised at the start
    judge_limit(Resource::RLIMIT_NOFILE, limit, MANY_FILES, "each sandbox holds about five open files", remedy)
}

pub(super) fn processes() -> Finding {
    let remedy = "raise it (ulimit -u; LimitNPROC= or TasksMax= in systemd)";
    let meaning = "each sandbox is two processes and what its tasks start, all of one user";
    judge_limit(Resource::RLIMIT_NPROC, |(soft, _)| soft, MANY_PROCESSES, meaning, remedy)
}

pub(super) fn locked_memory() -> Finding {
    let remedy = "raise it for such tasks (ulimit -l; LimitMEMLOCK= in systemd)";
    let meaning = "tasks may lock so many bytes; few need any";
    judge_limit(Resource::RLIMIT_MEMLOCK, |(soft, _)| soft, 64 * 1024, meaning, remedy)
}

pub(super) fn address_space() -> Finding {
    let remedy = "lift it (ulimit -v unlimited)";
    let meaning = "a limit of bytes here ends programs that reserve much and use little";
    judge_limit(Resource::RLIMIT_AS, |(soft, _)| soft, RLIM_INFINITY, meaning, remedy)
}

pub(super) fn file_size() -> Finding {
    let remedy = "lift it (ulimit -f unlimited)";
    let meaning = "a limit of bytes here ends programs that write large files";
    judge_limit(Resource::RLIMIT_FSIZE, |(soft, _)| soft, RLIM_INFINITY, meaning, remedy)
}

fn judge_limit(resource: Resource, which: fn((u64, u64)) -> u64, enough: u64, meaning: &str, remedy: &str) -> Finding {
    match getrlimit(resource).map(which) {
        Ok(RLIM_INFINITY) => Finding::ok("unlimited", meaning),
        Ok(limit) if limit >= enough => Finding::ok(limit.to_string(), meaning),
        Ok(limit) => Finding::warn(limit.to_string(), meaning, remedy),
        Err(error) => Finding::not(State::Warn, error.to_string(), meaning, None),
    }
}

pub(super) fn loopback() -> Finding {
    let connect = |address: Ipv4Addr| -> io::Result<()> {
        let listener = TcpListener::bind((address, 0))?;
        TcpStream::connect_timeout(&listener.local_addr()?, Duration::from_secs(2)).map(drop)
    };
    for address in [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 64, 0, 1)] {
        if let Err(error) = connect(address) {
            return Finding::bad(
                format!("{address}: {error}"),
                "services on this machine cannot be reached, nor sandboxes that share its network",
                "bring the loopback interface up as root: ip link set lo up",
            );
        }
    }
    Finding::ok("lo is up", "each sandbox on the host's network has an address of its own here")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_told_to_join_roots_group() {
        let closed = [kvm_remedy(0, 0o20600), kvm_remedy(0, 0o20660), kvm_remedy(12345, 0o20600)];
        assert!(closed.iter().all(|remedy| remedy.contains("chmod 660") && !remedy.contains("usermod")), "{closed:?}");
        let open = kvm_remedy(4_000_001, 0o20660);
        assert!(open.contains("usermod -aG 4000001 "), "{open}");
    }

    #[test]
    fn who_holds_limits_is_told_with_the_reason() {
        let found = judge_groups(Ok(("/sys/fs/cgroup/x".into(), vec!["memory", "pids"])));
        assert_eq!(found.state, State::Ok);
        assert_eq!(found.found, "control groups delegated at /sys/fs/cgroup/x (memory, pids)");
        let not = judge_groups(Err(Why::Others { group: "/sys/fs/cgroup/y".into() }));
        assert_eq!(not.state, State::Warn);
        assert_eq!(
            not.found,
            "rlimits, affinity and watchdog (cgroup v2 is not delegated: control group /sys/fs/cgroup/y holds other \
             processes too)"
        );
        assert!(not.remedy.unwrap().contains("Delegate=yes"));
    }

    #[test]
    fn memory_and_scheduling_are_looked_at() {
        assert!(memory().found.contains(" MiB free"));
        assert!(idle_scheduling().found.starts_with("SCHED_IDLE"));
        assert_eq!(parse_policy(), "0", "this thread is as it was");
    }

    /// The policy of the calling thread, as the kernel numbers it.
    fn parse_policy() -> String {
        let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
        stat.rsplit_once(')').unwrap().1.split_whitespace().nth(38).unwrap().to_owned()
    }

    #[test]
    fn limits_are_judged_by_what_is_needed() {
        let state = |limit: fn((u64, u64)) -> u64| judge_limit(Resource::RLIMIT_NOFILE, limit, 100, "", "x").state;
        assert_eq!([state(|_| 99), state(|_| 100), state(|_| RLIM_INFINITY)], [State::Warn, State::Ok, State::Ok]);
    }
}
