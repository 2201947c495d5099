//! What process 1 gives up before tasks may run: capabilities, new privileges, some system calls, the host's environment, and
//! core dumps.

use std::os::unix::fs::PermissionsExt as _;

use nix::{
    errno::Errno,
    sys::{
        prctl::{set_dumpable, set_no_new_privs},
        resource::{Resource, getrlimit, setrlimit},
    },
};
use prorl_core::hello::{FakeRoot, StartFailure};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capability_is_in_bounding_set, remove_capability_from_bounding_set, set_capabilities,
};

use super::{At, etc::APT_CONFIG};
use crate::{
    setup::{HOME, PATH, Setup, USER},
    sys,
};

/// What a fake root keeps, over its own namespace's files and processes only.
const FAKEROOT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// System calls that do not exist for tasks.
///
/// Keyrings know no namespace but that of users: the session keyring of whoever started the host's program would come along
/// into every sandbox, to be read, filled and revoked there.
const DENIED_CALLS: &[libc::c_long] = &[libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl];

/// System calls that a fake root of one id only seems to make: there is nobody to give a file to, nor to become. The
/// post-install scripts of packages make them and need no more than that they succeed. Making devices
/// is not pretended: whoever makes one goes on to change it, and a refusal is what such tools know.
const PRETENDED_CALLS: &[libc::c_long] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setuid,
];

/// Soft limit of open files. The hard one stays the host's, so that a task can raise its own.
const OPEN_FILES: u64 = 4096;

/// The highest number that a capability can have.
const MAX_CAPABILITY: u32 = 63;

/// Confines this process and everything it will start. `fakeroot` is what a fake root got.
pub(super) fn confine(setup: &Setup, fakeroot: Option<&FakeRoot>) -> Result<(), StartFailure> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).at("limit open files", "")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(OPEN_FILES), hard).at("limit open files", "")?;
    set_env(setup, fakeroot);
    set_no_new_privs().at("forbid new privileges", "")?;
    drop_capabilities(setup.fakeroot).at("drop capabilities", "")?;
    let pretended = match fakeroot {
        Some(FakeRoot::Single { .. }) => PRETENDED_CALLS,
        Some(FakeRoot::Range) | None => &[],
    };
    let filter = sys::Filter { denied: DENIED_CALLS, pretended };
    sys::filter_calls(&filter).at("filter system calls", "")?;
    // Last, as it closes this process's own /proc files. Without it a task of the same user could take the channel.
    set_dumpable(false).at("become undumpable", "")
}

/// Forbids core dumps, to files and to a program of the host's.
///
/// The kernel passes over a limit of 0 where `core_pattern` is a pipe, and would start a program as the host's root on what
/// a task left in its memory. A limit of 1 byte stops both. A host whose own limit is 0 keeps it unless it is root, which is
/// why this comes before root is given up.
pub(super) fn forbid_cores() -> Result<(), Errno> {
    setrlimit(Resource::RLIMIT_CORE, 1, 1).or_else(|_refused| setrlimit(Resource::RLIMIT_CORE, 0, 0))
}

/// Drops every capability, or all but those of a fake root, for good.
pub(super) fn drop_capabilities(fakeroot: bool) -> Result<(), Errno> {
    let kept = if fakeroot { FAKEROOT } else { CapabilitySet::empty() };
    for number in 0..=MAX_CAPABILITY {
        let one = CapabilitySet::from_bits_retain(1 << number);
        match capability_is_in_bounding_set(one) {
            Ok(true) if !kept.contains(one) => remove_capability_from_bounding_set(one).map_err(errno)?,
            Ok(_) => {}
            Err(_) => break, // the kernel knows no more of them
        }
    }
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(errno)
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

/// Makes the environment that everything inside inherits: a standard one, then the spec's.
fn set_env(setup: &Setup, fakeroot: Option<&FakeRoot>) {
    let (user, home) = user_of(setup);
    let shell = ["/bin/bash", "/bin/sh"].into_iter().find(|path| is_program(path)).unwrap_or("/bin/sh");
    let standard = [
        ("PATH", PATH),
        ("HOME", home),
        ("USER", user),
        ("LOGNAME", user),
        ("SHELL", shell),
        ("LANG", "C.UTF-8"),
        ("TERM", "dumb"),
    ];
    let apt_config = format!("/etc/{APT_CONFIG}");
    let apt_config = match fakeroot {
        Some(FakeRoot::Single { .. }) => Some(("APT_CONFIG", apt_config.as_str())),
        Some(FakeRoot::Range) | None => None,
    };
    let own = setup.env.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    sys::set_env(standard.into_iter().chain(apt_config).chain(own));
}

/// Returns the name and the home of the user inside.
pub(super) fn user_of(setup: &Setup) -> (&'static str, &'static str) {
    if setup.fakeroot { ("root", "/root") } else { (USER, HOME) }
}

fn is_program(path: &str) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}
