//! What the kernel and its settings allow.

use std::{fs, io, path::Path};

use super::{Finding, State};
use crate::sys;

/// The kinds of namespaces that a sandbox has.
pub(super) const NAMESPACES: [&str; 7] = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];

/// The first kernel that can make a mount and all below it read-only.
const OLDEST: (u32, u32) = (5, 12);

/// A limit below this many sandboxes is worth a word.
const FEW: u64 = 1000;

const PROC: &str = "/proc";

pub(super) fn version() -> Finding {
    let release = nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
    let release = release.unwrap_or_else(|error| error.to_string());
    judge_version(release)
}

fn judge_version(release: String) -> Finding {
    let mut numbers = release.split(['.', '-', '+']).map_while(|part| part.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) >= OLDEST => {
            Finding::ok(release, "new enough for every kind of sandbox")
        }
        _ => Finding::bad(
            release,
            "sandboxes seal their mounts by a call that Linux 5.12 brought",
            "boot Linux 5.12 or later",
        ),
    }
}

pub(super) fn namespace_limit(kind: &str) -> Finding {
    judge_limit(Path::new(PROC), kind)
}

fn judge_limit(proc: &Path, kind: &str) -> Finding {
    let name = format!("user.max_{kind}_namespaces");
    let needed = format!("every sandbox takes one {kind} namespace");
    let remedy = format!("raise it as root: sysctl -w {name}=10000");
    match read(proc, &format!("sys/user/max_{kind}_namespaces")).map(|text| (text.parse::<u64>(), text)) {
        None => Finding::absent(
            "no such setting",
            needed,
            format!("boot a kernel with {kind} namespaces, or show /proc/sys in this container"),
        ),
        Some((Ok(0), _)) => Finding::bad("0", format!("{needed}, and none can be made"), remedy),
        Some((Ok(limit @ ..FEW), _)) => {
            Finding::warn(limit.to_string(), format!("{needed}, so few sandboxes can stand at once"), remedy)
        }
        Some((_, text)) => Finding::ok(text, needed),
    }
}

pub(super) fn userns_clone() -> Finding {
    judge_userns_clone(Path::new(PROC))
}

fn judge_userns_clone(proc: &Path) -> Finding {
    match read(proc, "sys/kernel/unprivileged_userns_clone").as_deref() {
        None => Finding::not(
            State::Absent,
            "no such setting",
            "this kernel has no switch that takes user namespaces from ordinary users",
            None,
        ),
        Some("0") => Finding::bad(
            "0",
            "ordinary users may make no user namespace, and so no sandbox",
            "set it to 1 as root: sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        Some(value) => Finding::ok(value, "ordinary users may make user namespaces"),
    }
}

pub(super) fn apparmor() -> Finding {
    judge_apparmor(Path::new(PROC))
}

fn judge_apparmor(proc: &Path) -> Finding {
    match read(proc, "sys/kernel/apparmor_restrict_unprivileged_userns").as_deref() {
        None => Finding::not(
            State::Absent,
            "no such setting",
            "no AppArmor here that takes capabilities from user namespaces",
            None,
        ),
        Some("1") => Finding::warn(
            "kernel.apparmor_restrict_unprivileged_userns is 1",
            "a program without a profile that says otherwise can mount nothing in its own user namespace",
            "set it to 0 as root (sysctl -w kernel.apparmor_restrict_unprivileged_userns=0), or give the program an \
             AppArmor profile with 'userns,'",
        ),
        Some(value) => Finding::ok(value, "AppArmor leaves user namespaces alone"),
    }
}

pub(super) fn masked_proc() -> Finding {
    judge_mounts(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

/// Finds mounts that cover parts of `/proc`; the kernel refuses a fresh `/proc`, which would uncover them.
fn judge_mounts(mountinfo: &str) -> Finding {
    // A folder that is empty by nature may be covered.
    let covered = |target: &&str| target.starts_with("/proc/") && !target.starts_with("/proc/sys/fs/binfmt_misc");
    let targets: Vec<_> = mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).filter(covered).take(3).collect();
    if targets.is_empty() {
        return Finding::ok("/proc is whole", "a sandbox can have a /proc of its own");
    }
    Finding::warn(
        format!("{} and maybe more are covered", targets.join(", ")),
        "the kernel may refuse a sandbox its own /proc, which would uncover them",
        "start the container with an unmasked /proc (docker: --security-opt systempaths=unmasked; \
         Kubernetes: procMount: Unmasked)",
    )
}

pub(super) fn hidden_processes() -> Finding {
    judge_hiding(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

/// Finds the option of `/proc` that hides processes. Those of a sandbox that are not dumpable are hidden from their own user
/// then.
fn judge_hiding(mountinfo: &str) -> Finding {
    // The last one covers those before it. Its options follow the kind and the source, which follow a lone hyphen.
    let line = mountinfo.lines().rfind(|line| line.split(' ').nth(4) == Some("/proc")).unwrap_or_default();
    let options = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').nth(2)).unwrap_or_default();
    let hiding = options
        .split(',')
        .find(|option| option.strip_prefix("hidepid=").is_some_and(|value| !["0", "off"].contains(&value)));
    match hiding {
        None => Finding::ok("every process can be seen", "what is left of a sandbox whose server was killed is found"),
        Some(option) => Finding::warn(
            format!("/proc has {option}"),
            "an ordinary user cannot see its sandboxes' first processes, nor tell when they started; what is left of \
             one whose server and keeper were both killed may not be found",
            "mount it without as root (mount -o remount,hidepid=0 /proc), or let this user's group see (gid=)",
        ),
    }
}

pub(super) fn seccomp() -> Finding {
    judge_status(&fs::read_to_string("/proc/self/status").unwrap_or_default())
}

fn judge_status(status: &str) -> Finding {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let Some(mode) = field("Seccomp:") else {
        return Finding::bad(
            "no seccomp in this kernel",
            "sandboxes are denied system calls by a filter, and none can be made",
            "boot a kernel with CONFIG_SECCOMP_FILTER, or show /proc/self/status in this container",
        );
    };
    let has_filter = mode == "2";
    let has_no_new_privileges = field("NoNewPrivs:") == Some("1");
    match (has_filter, has_no_new_privileges) {
        (false, false) => Finding::ok("no filter, new privileges allowed", "system calls are not in the way"),
        (false, true) => Finding::warn(
            "no filter, no new privileges",
            "newuidmap cannot work, so a fake root has a single id",
            "start without NoNewPrivileges= (systemd) or with allowPrivilegeEscalation: true (Kubernetes)",
        ),
        (true, _) => Finding::warn(
            "a filter",
            "it may refuse new namespaces and mounts",
            "where sandboxes fail, start the container with a profile that allows unshare and mount \
             (docker: --security-opt seccomp=FILE)",
        ),
    }
}

/// The first version that keeps a sandbox on the host's network from the host's abstract sockets.
const SCOPED: u32 = 6;

pub(super) fn landlock() -> Finding {
    judge_landlock(sys::landlock_version())
}

fn judge_landlock(version: io::Result<u32>) -> Finding {
    let meaning = "a sandbox on the host's network is kept from the host's abstract sockets";
    match version {
        Ok(version @ SCOPED..) => Finding::ok(format!("version {version}"), meaning),
        Ok(version) => Finding::absent(
            format!("version {version}, without scopes"),
            format!("{meaning} by version {SCOPED}; one with a network of its own is anyway"),
            "boot Linux 6.12 or later",
        ),
        Err(error) => Finding::absent(
            error.to_string(),
            format!("{meaning} by it; one with a network of its own is anyway"),
            "boot Linux 6.12 or later with landlock among its security modules (lsm=landlock,...)",
        ),
    }
}

fn read(proc: &Path, name: &str) -> Option<String> {
    Some(fs::read_to_string(proc.join(name)).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, text: &str, judge: impl Fn(&Path) -> Finding) -> State {
        let proc = tempfile::tempdir().unwrap();
        let path = proc.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        judge(proc.path()).state
    }

    #[test]
    fn versions_of_landlock_are_told_apart() {
        let state = |version| judge_landlock(version).state;
        let none = || Err(io::Error::from_raw_os_error(libc::ENOSYS));
        assert_eq!(
            [state(Ok(7)), state(Ok(6)), state(Ok(5)), state(none())].map(|state| state == State::Ok),
            [true, true, false, false]
        );
        assert!(judge_landlock(none()).remedy.unwrap().contains("lsm=landlock"));
    }

    #[test]
    fn kernels_that_are_too_old_are_told() {
        for (release, state) in [
            ("6.18.44-fc", State::Ok),
            ("5.12", State::Ok),
            ("5.12-rc1", State::Ok),
            ("10.0.1", State::Ok),
            ("5.11.22", State::Bad),
            ("4.18.0-553.el8", State::Bad),
            ("strange", State::Bad),
        ] {
            assert_eq!(judge_version(release.to_owned()).state, state, "{release}");
        }
    }

    #[test]
    fn settings_are_judged_by_their_values() {
        let limit = |text| with("sys/user/max_net_namespaces", text, |proc| judge_limit(proc, "net"));
        assert_eq!([limit("0\n"), limit("7\n"), limit("96315\n")], [State::Bad, State::Warn, State::Ok]);
        let clone = |text| with("sys/kernel/unprivileged_userns_clone", text, judge_userns_clone);
        assert_eq!([clone("0\n"), clone("1\n")], [State::Bad, State::Ok]);
        let apparmor = |text| with("sys/kernel/apparmor_restrict_unprivileged_userns", text, judge_apparmor);
        assert_eq!([apparmor("0\n"), apparmor("1\n")], [State::Ok, State::Warn]);
        let nowhere = Path::new("/nonexistent");
        let absent = [judge_limit(nowhere, "user"), judge_userns_clone(nowhere), judge_apparmor(nowhere)];
        assert!(absent.iter().all(|finding| finding.state == State::Absent));
    }

    #[test]
    fn a_covered_proc_is_seen() {
        let line = |target| format!("61 60 0:5 / {target} rw,nosuid - tmpfs tmpfs rw\n");
        assert_eq!(judge_mounts(&(line("/proc") + &line("/proc/sys/fs/binfmt_misc"))).state, State::Ok);
        assert_eq!(judge_mounts(&(line("/proc") + &line("/proc/kcore"))).state, State::Warn);
    }

    #[test]
    fn hidden_processes_are_seen() {
        let line = |options: &&str| format!("22 1 0:5 / /proc rw,nosuid shared:2 - proc proc {options}\n");
        let state = |mounts: &[&str]| judge_hiding(&mounts.iter().map(line).collect::<String>()).state;
        for options in ["rw", "rw,hidepid=0", "rw,hidepid=off,gid=5"] {
            assert_eq!(state(&["rw,hidepid=2", options]), State::Ok, "{options}");
        }
        for options in ["rw,hidepid=1", "rw,gid=5,hidepid=2", "rw,hidepid=invisible", "rw,hidepid=ptraceable,x"] {
            assert_eq!(state(&["rw", options]), State::Warn, "{options}");
        }
        assert_eq!(state(&[]), State::Ok);
    }

    #[test]
    fn filters_are_seen() {
        let state = |status| judge_status(status).state;
        assert_eq!(state("Name:\tx\nNoNewPrivs:\t0\nSeccomp:\t0\n"), State::Ok);
        assert_eq!(state("NoNewPrivs:\t1\nSeccomp:\t0\n"), State::Warn);
        assert_eq!(state("NoNewPrivs:\t1\nSeccomp:\t2\n"), State::Warn);
    }
}
