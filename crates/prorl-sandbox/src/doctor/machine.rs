//! What the machine has: groups of control, virtual machines, limits, disks, a network.

use std::{
    fs,
    io::{self, ErrorKind},
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::Path,
    time::Duration,
};

use nix::{
    sys::{
        resource::{RLIM_INFINITY, Resource, getrlimit},
        statvfs::{FsFlags, statvfs},
    },
    unistd::{AccessFlags, access},
};

use super::{Finding, State};

const MIB: u64 = 1 << 20;

/// What a few hundred jobs at once take of open files.
const MANY_FILES: u64 = 4096;

/// What a few hundred sandboxes take of processes.
const MANY_PROCESSES: u64 = 4096;

/// Free space below this is worth a word.
const LITTLE_SPACE: u64 = 1024 * MIB;

/// What a runtime writes for itself.
const NO_SPACE: u64 = 16 * MIB;

pub(super) fn cgroups() -> Finding {
    let root = Path::new("/sys/fs/cgroup");
    if !root.join("cgroup.controllers").exists() {
        let found = if root.join("memory").exists() || root.join("unified").exists() { "version 1" } else { "none" };
        return Finding::absent(
            found,
            "memory and processors cannot be limited by the kernel for ordinary users; resource limits and a watch on memory \
             stand in",
            "boot with systemd.unified_cgroup_hierarchy=1, or mount cgroup2 at /sys/fs/cgroup in this container",
        );
    }
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let own = root.join(own);
    let controllers = fs::read_to_string(own.join("cgroup.controllers")).unwrap_or_default();
    let controllers = controllers.trim();
    let is_ours =
        access(&own, AccessFlags::W_OK).is_ok() && access(&own.join("cgroup.procs"), AccessFlags::W_OK).is_ok();
    if is_ours && ["memory", "pids"].iter().all(|name| controllers.split(' ').any(|one| one == *name)) {
        return Finding::ok(
            format!("version 2, delegated: {controllers}"),
            "memory and processors can be limited by the kernel",
        );
    }
    let found =
        if is_ours { format!("version 2, delegated: {controllers}") } else { "version 2, not delegated".to_owned() };
    Finding::warn(
        found,
        "memory and processors cannot be limited by the kernel for this user; resource limits and a watch on memory stand in",
        "run it in a unit with Delegate=yes (systemd-run --user --scope -p Delegate=yes ...)",
    )
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
            "add the user to the device's group (usermod -aG kvm USER)",
        ),
    }
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

pub(super) fn disk(dir: &Path) -> Finding {
    // One that is not there yet is made in the nearest that is.
    let Some(found) = dir.ancestors().find(|path| path.exists()) else {
        return Finding::bad(format!("no {}", dir.display()), "runtimes have nowhere to work", "set TMPDIR");
    };
    let shown = found.display();
    let space = match statvfs(found) {
        Ok(space) => space,
        Err(error) => return Finding::bad(format!("{shown}: {error}"), "runtimes have nowhere to work", "set TMPDIR"),
    };
    let block = space.fragment_size();
    let (free, size) = (space.blocks_available() * block, space.blocks() * block);
    let flags = space.flags();
    let text = format!("{shown}: {} of {} MiB free", free / MIB, size / MIB);
    let remedy = "free some space, or set TMPDIR to a folder with more";
    if access(found, AccessFlags::W_OK).is_err() {
        let remedy = "set TMPDIR to a folder that this user may write to";
        return Finding::bad(format!("{text}, not writable"), "runtimes have nowhere to work", remedy);
    }
    if flags.contains(FsFlags::ST_NOEXEC) {
        return Finding::warn(
            format!("{text}, noexec"),
            "Singularity's runtime keeps a program there that it must execute",
            "set TMPDIR to a folder without noexec",
        );
    }
    match free {
        ..NO_SPACE => Finding::bad(text, "runtimes cannot write what they need", remedy),
        NO_SPACE..LITTLE_SPACE => Finding::warn(text, "unpacked images and results may not fit", remedy),
        _ => Finding::ok(text, "room for what runtimes write; sandboxes themselves write to memory"),
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
    fn a_folder_that_is_not_there_yet_is_judged_by_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let finding = disk(&dir.path().join("not/yet"));
        assert!(finding.found.starts_with(&dir.path().display().to_string()), "{}", finding.found);
        assert_eq!(disk(Path::new("/proc")).state, State::Bad);
    }

    #[test]
    fn limits_are_judged_by_what_is_needed() {
        let state = |limit: fn((u64, u64)) -> u64| judge_limit(Resource::RLIMIT_NOFILE, limit, 100, "", "x").state;
        assert_eq!([state(|_| 99), state(|_| 100), state(|_| RLIM_INFINITY)], [State::Warn, State::Ok, State::Ok]);
    }
}
