//! What process 1 gives up before tasks may run: capabilities, new privileges, some system calls, and the host's environment.

use std::os::unix::fs::PermissionsExt as _;

use nix::{
    errno::Errno,
    sys::prctl::{set_dumpable, set_no_new_privs},
};
use prorl_core::hello::{FakeRoot, StartFailure};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capability_is_in_bounding_set, remove_capability_from_bounding_set, set_capabilities,
};

use super::{
    At,
    etc::APT_CONFIG,
    seccomp::{self, Kind},
};
use crate::{
    Network,
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

/// The highest number that a capability can have.
const MAX_CAPABILITY: u32 = 63;

/// Confines this process and everything it will start. `fakeroot` is what a fake root got; `ipc_is_limited` tells whether the
/// kernel holds System V objects to a limit.
pub(super) fn confine(setup: &Setup, fakeroot: Option<&FakeRoot>, ipc_is_limited: bool) -> Result<(), StartFailure> {
    set_env(setup, fakeroot);
    set_no_new_privs().at("forbid new privileges", "")?;
    drop_capabilities(setup.fakeroot).at("drop capabilities", "")?;
    if setup.network == Network::Host {
        // Abstract sockets belong to the network's namespace, and this is everybody's.
        sys::keep_to_itself().at("close abstract sockets", "")?;
    }
    let pretends = matches!(fakeroot, Some(FakeRoot::Single { .. }));
    seccomp::filter(Kind { pretends, ipc_is_limited }).at("filter system calls", "")?;
    // Last, as it closes this process's own /proc files. Without it a task of the same user could take the channel.
    set_dumpable(false).at("become undumpable", "")
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
