//! Where this process's own control group is, and why it may be of no use.

use std::{
    ffi::OsString,
    fmt, fs, io,
    os::unix::ffi::OsStringExt as _,
    path::{Component, Path, PathBuf},
};

use nix::unistd::{AccessFlags, eaccess};

use super::{PROCS, SUBTREE};

/// The controllers without which groups are of no use.
pub(super) const NEEDED: &[&str] = &["memory", "pids"];

/// Those that are used where they are there.
pub(super) const USEFUL: &[&str] = &["cpu"];

/// Why sandboxes get no control groups.
#[derive(Debug)]
pub(crate) enum Why {
    /// Nobody wanted them.
    Off,
    /// No hierarchy of version 2 can be seen.
    NoMount,
    /// The group cannot be seen in any mount.
    Hidden,
    /// Some controllers are not there for groups below this one.
    Controllers { group: PathBuf, missing: Vec<&'static str> },
    /// This user may not make groups there.
    NotOurs { group: PathBuf },
    /// Others are in the group, and would have to be moved.
    Others { group: PathBuf },
    /// This user may not move processes there from where it is.
    Unreachable { group: PathBuf, common: PathBuf },
    /// A call failed.
    Failed { group: PathBuf, source: io::Error },
}

impl Why {
    /// Says what can be done about it.
    pub(crate) fn remedy(&self) -> &'static str {
        const DELEGATE: &str = "start prorl in a group of its own that is delegated: a systemd service with Delegate=yes, \
                                or systemd-run --user --scope -p Delegate=yes prorl ...; in a container: make an empty group \
                                that this user owns, and name it";
        match self {
            Self::Off => "let control groups be looked for",
            Self::NoMount | Self::Hidden => {
                "boot with cgroup version 2 alone (systemd.unified_cgroup_hierarchy=1), and show it, writable, in containers"
            }
            Self::Controllers { group, .. } if group.join("cgroup.type").exists() => {
                "delegate these controllers too (systemd: Delegate=memory pids cpu)"
            }
            Self::Controllers { .. } => {
                "boot with cgroup version 2 alone (systemd.unified_cgroup_hierarchy=1): version 1 holds them"
            }
            Self::NotOurs { .. } | Self::Others { .. } => DELEGATE,
            Self::Unreachable { .. } => {
                "name a group below the one that prorl is started in, or below one that this user owns"
            }
            Self::Failed { .. } => "see what the kernel says of it (dmesg)",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("control groups are turned off"),
            Self::NoMount => f.write_str("no cgroup version 2 is mounted"),
            Self::Hidden => f.write_str("the own control group is outside of what is mounted"),
            Self::Controllers { group, missing } => {
                write!(f, "control group {} lacks the controllers {}", group.display(), missing.join(", "))
            }
            Self::NotOurs { group } => write!(f, "control group {} is not this user's", group.display()),
            Self::Others { group } => write!(f, "control group {} holds other processes too", group.display()),
            Self::Unreachable { group, common } => write!(
                f,
                "no process can be moved into control group {}: {} is not this user's",
                group.display(),
                common.join(PROCS).display()
            ),
            Self::Failed { group, source } => write!(f, "control group {}: {source}", group.display()),
        }
    }
}

/// Finds the folder of a process's group, from its `mountinfo` and its `cgroup` in `/proc`.
pub(super) fn own_group(mountinfo: &str, cgroup: &str) -> Result<PathBuf, Why> {
    let mounts: Vec<_> = mountinfo.lines().filter_map(mount_of_version_2).collect();
    let Some(own) = cgroup.lines().find_map(|line| line.strip_prefix("0::")).filter(|_| !mounts.is_empty()) else {
        return Err(Why::NoMount);
    };
    // One that is not below the root of this cgroup namespace begins so.
    let is_plain = Path::new(own).components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let in_mount = |(root, target): &(PathBuf, PathBuf)| {
        let rest = Path::new(own).strip_prefix(root).ok().filter(|_| is_plain)?;
        Some(if rest.as_os_str().is_empty() { target.clone() } else { target.join(rest) })
    };
    // A later mount covers an earlier one.
    mounts.iter().rev().find_map(in_mount).ok_or(Why::Hidden)
}

/// Returns what of the hierarchy is mounted, and where, from a line of `mountinfo`.
fn mount_of_version_2(line: &str) -> Option<(PathBuf, PathBuf)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(3);
    let (root, target) = (fields.next()?, fields.next()?);
    (kind.split(' ').next()? == "cgroup2").then(|| (unescape(root), unescape(target)))
}

/// Undoes the kernel's way to write blanks and the like: a backslash and three octal digits.
fn unescape(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| *first == b'\\');
        let code = code.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(bytes).into()
}

/// Checks that this user may make groups in a group, and that these can be limited. Returns the controllers to be used.
pub(super) fn check(group: &Path, needed: &[&'static str]) -> Result<Vec<&'static str>, Why> {
    let files = [(group.to_owned(), AccessFlags::W_OK | AccessFlags::X_OK)].into_iter();
    let files = files.chain([PROCS, SUBTREE].map(|name| (group.join(name), AccessFlags::W_OK)));
    for (path, mode) in files {
        match eaccess(&path, mode) {
            Ok(()) => {}
            Err(errno) if errno == nix::errno::Errno::ENOENT => {
                return Err(Why::Failed { group: group.to_owned(), source: errno.into() });
            }
            Err(_refused) => return Err(Why::NotOurs { group: group.to_owned() }),
        }
    }
    let failed = |source| Why::Failed { group: group.to_owned(), source };
    let offered = fs::read_to_string(group.join("cgroup.controllers")).map_err(failed)?;
    let is_offered = |name: &&'static str| offered.split_whitespace().any(|one| one == *name);
    let missing: Vec<_> = needed.iter().copied().filter(|name| !is_offered(name)).collect();
    if missing.is_empty() {
        Ok(needed.iter().copied().chain(USEFUL.iter().copied().filter(is_offered)).collect())
    } else {
        Err(Why::Controllers { group: group.to_owned(), missing })
    }
}

/// Checks that processes can be moved between two groups: into that one's, and out of the next that both are below.
pub(super) fn check_reach(from: &Path, to: &Path) -> Result<(), Why> {
    let common = to.ancestors().find(|above| from.starts_with(above)).unwrap_or(to);
    eaccess(&common.join(PROCS), AccessFlags::W_OK)
        .map_err(|_refused| Why::Unreachable { group: to.to_owned(), common: common.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    const PLAIN: &str = "25 1 0:22 / /sys rw - sysfs sysfs rw\n\
                         30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    fn told(mountinfo: &str, cgroup: &str) -> String {
        own_group(mountinfo, cgroup).map_or_else(|why| why.to_string(), |path| path.display().to_string())
    }

    #[test]
    fn the_own_group_is_found_in_whatever_is_mounted() {
        let service = "0::/system.slice/prorl.service\n";
        assert_eq!(told(PLAIN, service), "/sys/fs/cgroup/system.slice/prorl.service");
        assert_eq!(told(PLAIN, "0::/\n"), "/sys/fs/cgroup");
        let hybrid = "31 25 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        assert_eq!(told(hybrid, "4:memory:/x\n0::/y\n"), "/sys/fs/cgroup/unified/y");
        let part = PLAIN.replace("0:26 / /sys/fs/cgroup", "0:26 /pod/one /a\\040b\\134c");
        assert_eq!(told(&part, "0::/pod/one\n"), "/a b\\c");
        assert_eq!(told(&part, "0::/pod/one/two\n"), "/a b\\c/two");
        let twice = format!("{PLAIN}44 30 0:26 /pod /elsewhere rw - cgroup2 none rw\n");
        assert_eq!(told(&twice, "0::/pod/x\n"), "/elsewhere/x");
        assert_eq!(told(&twice, "0::/x\n"), "/sys/fs/cgroup/x");
    }

    #[test]
    fn a_group_that_cannot_be_seen_is_told() {
        let part = PLAIN.replace("0:26 / ", "0:26 /pod/one ");
        for outside in ["0::/\n", "0::/pod\n", "0::/pod/one2\n", "0::/../x\n"] {
            assert!(matches!(own_group(&part, outside), Err(Why::Hidden)), "{outside}");
        }
        assert!(matches!(own_group(PLAIN, "0::/../x\n"), Err(Why::Hidden)));
        for (mountinfo, cgroup) in [("", "0::/\n"), (PLAIN, "4:memory:/x\n"), ("garbage - \n - cgroup2 x\n", "0::/\n")]
        {
            assert!(matches!(own_group(mountinfo, cgroup), Err(Why::NoMount)), "{mountinfo}");
        }
    }

    /// A folder that looks like a group.
    fn fake(controllers: &str) -> tempfile::TempDir {
        let group = tempfile::tempdir().unwrap();
        for (name, text) in [(PROCS, ""), (SUBTREE, ""), ("cgroup.controllers", controllers), ("cgroup.type", "domain")]
        {
            fs::write(group.path().join(name), text).unwrap();
        }
        group
    }

    #[test]
    fn controllers_that_are_needed_must_be_there() {
        let whole = fake("cpuset cpu io memory pids\n");
        assert_eq!(check(whole.path(), NEEDED).unwrap(), ["memory", "pids", "cpu"]);
        let without_cpu = fake("memory pids\n");
        assert_eq!(check(without_cpu.path(), NEEDED).unwrap(), ["memory", "pids"]);
        let part = fake("cpu pids hugetlb\n");
        let why = check(part.path(), NEEDED).unwrap_err();
        assert!(why.to_string().ends_with("lacks the controllers memory"), "{why}");
        assert!(why.remedy().contains("Delegate=memory"), "{}", why.remedy());
        fs::remove_file(part.path().join("cgroup.type")).unwrap(); // as of the root
        assert!(why.remedy().contains("version 1"), "{}", why.remedy());
    }

    #[test]
    fn a_group_of_another_user_is_told() {
        use std::os::unix::fs::PermissionsExt as _;

        let group = fake("memory pids\n");
        fs::remove_file(group.path().join(PROCS)).unwrap();
        assert!(matches!(check(group.path(), NEEDED), Err(Why::Failed { .. })), "no group at all");
        if nix::unistd::geteuid().is_root() {
            return; // everything is root's
        }
        let closed = fake("memory pids\n");
        fs::set_permissions(closed.path().join(SUBTREE), Permissions::from_mode(0o444)).unwrap();
        let why = check(closed.path(), NEEDED).unwrap_err();
        assert!(why.to_string().ends_with("is not this user's"), "{why}");
        assert!(why.remedy().contains("Delegate=yes"));
    }

    #[test]
    fn processes_are_moved_through_the_next_common_group() {
        let top = fake("");
        let [from, to] = ["from/deep", "to"].map(|name| top.path().join(name));
        for group in [&from, &to] {
            fs::create_dir_all(group).unwrap();
        }
        check_reach(&from, &to).unwrap();
        check_reach(&from, &top.path().join("from")).unwrap_err();
        fs::remove_file(top.path().join(PROCS)).unwrap();
        let why = check_reach(&from, &to).unwrap_err();
        assert!(why.to_string().contains(&format!("{}/cgroup.procs", top.path().display())), "{why}");
    }
}
