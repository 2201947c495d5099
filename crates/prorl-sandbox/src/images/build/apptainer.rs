//! The long way: Apptainer builds, because a program has to run, or files to be fetched or copied, for the image.

use std::{fs, io, path::Path};

use nix::unistd::geteuid;

use super::{
    Compression,
    run::{Program, search_path},
};

/// What is to be done where a program of these names is missing.
pub(super) const INSTALL: &str = "install Apptainer or name its path";

/// What is to be done where root lacks capabilities and gets no user namespace in which it has them.
pub(super) const NO_USERS: &str =
    "root lacks capabilities here: build as an ordinary user, or allow root user namespaces";

/// What is to be done where a fake root has one id alone.
const RANGE: &str = "give this user a range of ids in /etc/subuid and /etc/subgid";

/// What is to be done about what a builder says. The first that is said counts.
const ADVICE: [(&str, &str); 15] = [
    ("No space left on device", "free space there, or choose another folder for the image or the state"),
    ("Disk quota exceeded", "free space there, or choose another folder for the image or the state"),
    ("unknown flag: --mksquashfs-args", "install Apptainer 1.1 or newer, or SingularityCE 4.1 or newer"),
    ("while permitted capability set is", "root lacks capabilities here: build as an ordinary user"),
    ("Could not create user namespace", "allow user namespaces; `prorl doctor` says how"),
    ("Failed to create user namespace", "allow user namespaces; `prorl doctor` says how"),
    ("failed to change uid and gids", RANGE),
    ("failed to Lchown", RANGE),
    ("error while starting the `faked' daemon", RANGE),
    ("mounted with noexec or nodev", RANGE),
    ("debootstrap is not in PATH", "install debootstrap, or build on an image by the variable `from`"),
    ("debootstrap not found", "install debootstrap, or build on an image by the variable `from`"),
    ("mksquashfs not found", "install squashfs-tools"),
    ("Failed getting release file", "see that the mirror can be reached, or name another by the variable `mirror`"),
    ("not supported", "choose another compression, or install a newer squashfs-tools"),
];

/// What a network that is not there makes programs say.
const NO_NETWORK: [&str; 6] = [
    "dial tcp",
    "Temporary failure resolving",
    "Could not resolve",
    "Couldn't download",
    "no such host",
    "Network is unreachable",
];

/// Returns the program that builds a definition into `part`.
pub(super) fn program(
    apptainer: &Path,
    mksquashfs: Option<&Path>,
    compression: Compression,
    definition: &Path,
    tree: &Path,
    part: &Path,
) -> Program {
    let args = compression.args().collect::<Vec<_>>().join(" ");
    let mut search = search_path();
    if let Some(folder) = mksquashfs.and_then(Path::parent) {
        let mut first = folder.as_os_str().to_owned();
        first.push(":");
        first.push(search);
        search = first;
    }
    let mut program = Program::new(apptainer)
        .args(["build", "--force", "--mksquashfs-args", &args])
        .args([part, definition])
        .env("PATH", search);
    for name in ["APPTAINER_TMPDIR", "SINGULARITY_TMPDIR"] {
        program = program.env(name, tree);
    }
    program.own_users = geteuid().is_root() && lacks_capabilities().unwrap_or(false);
    program
}

/// Tells whether this process lacks a capability that the kernel knows. Apptainer asks for every one to run a script as root.
fn lacks_capabilities() -> io::Result<bool> {
    let status = fs::read_to_string("/proc/self/status")?;
    let last: u32 = fs::read_to_string("/proc/sys/kernel/cap_last_cap")?.trim().parse().map_err(io::Error::other)?;
    let all = u64::MAX >> (63 - last.min(63));
    let of = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let have = of("CapEff:").and_then(|have| u64::from_str_radix(have.trim(), 16).ok());
    Ok(have.is_some_and(|have| have & all != all))
}

/// Says what can be done when a builder has failed with these last words.
pub(super) fn advice(words: &str, is_fetched: bool) -> &'static str {
    let known = ADVICE.iter().find(|(said, _)| words.contains(said)).map(|(_, advice)| *advice);
    if let Some(advice) = known {
        return advice;
    }
    if is_fetched && NO_NETWORK.iter().any(|said| words.contains(said)) {
        return "it needs a network: build where there is one, or on an image that is here";
    }
    "the build's last lines say why"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_about_what_was_said() {
        let said = "FATAL: write /x: No space left on device\ndial tcp";
        assert!(advice(said, true).starts_with("free space"));
        assert!(advice("dial tcp: lookup x: no such host", true).contains("needs a network"));
        assert!(!advice("dial tcp: refused", false).contains("network"));
        assert!(advice("E: Failed getting release file http://x", true).contains("mirror"));
        assert_eq!(advice("false", true), "the build's last lines say why");
    }
}
