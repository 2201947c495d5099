//! Programs of others that a runtime uses.

use std::{
    fs,
    io::{self, ErrorKind, Read as _},
    os::{
        fd::AsFd as _,
        unix::{fs::PermissionsExt as _, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd::geteuid,
};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::{Config, Finding, State};
use crate::{
    start,
    subid::{self, Kind},
};

pub(super) const INSTALL_APPTAINER: &str = "install Apptainer (the package apptainer, or singularity-ce)";

/// How long a program may take to tell about itself.
const LIMIT: Duration = Duration::from_secs(10);

/// More words than this of a failed program are cut, from the front.
const MAX_WORDS: usize = 400;

/// Folders with the helpers of a launcher that was installed as a package.
const HELPERS: [&str; 3] = ["/usr/libexec/apptainer/bin", "/usr/libexec/singularity/bin", "/usr/lib/apptainer/bin"];

/// Finds a program along the configured folders.
fn find(config: &Config, name: &str) -> Option<PathBuf> {
    config.search.iter().map(|folder| folder.join(name)).find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

pub(super) fn find_launcher(config: &Config) -> Option<PathBuf> {
    match &config.launcher {
        Some(path) if path.components().count() > 1 => is_program(path).then(|| path.clone()),
        Some(name) => find(config, &name.to_string_lossy()),
        None => ["apptainer", "singularity"].iter().find_map(|name| find(config, name)),
    }
}

pub(super) fn apptainer(config: &Config) -> Finding {
    let meaning = "brings up packed images (.sif, squashfs) for Singularity's runtime";
    let Some(launcher) = find_launcher(config) else {
        return Finding::absent("neither apptainer nor singularity", meaning, INSTALL_APPTAINER);
    };
    let ask = |argument: &str| {
        let mut command = Command::new(&launcher);
        command.arg(argument);
        cleanly(&mut command, config);
        let said = run(command, LIMIT)?;
        if !said.status.success() {
            return Err(io::Error::other(format!("{}: {}", said.status, last_words(&said.stderr))));
        }
        Ok(String::from_utf8_lossy(&said.stdout).into_owned())
    };
    let told = ask("--version").and_then(|version| Ok((version.trim().to_owned(), ask("buildcfg")?)));
    let (version, settings) = match told {
        Ok(told) => told,
        Err(error) => {
            return Finding::bad(format!("{}: {error}", launcher.display()), meaning, "install it again");
        }
    };
    let setting = |name: &str| {
        let names = [format!("APPTAINER_{name}="), format!("SINGULARITY_{name}=")];
        settings.lines().find_map(|line| names.iter().find_map(|name| line.strip_prefix(name.as_str())))
    };
    let is_setuid = setting("SUID_INSTALL") == Some("1");
    let how = if is_setuid { "set-uid" } else { "not set-uid" };
    let found = format!("{version} at {}, {how}", launcher.display());
    match setting("CONF_FILE") {
        Some(path) if fs::File::open(path).is_ok() => Finding::ok(format!("{found}, configured by {path}"), meaning),
        Some(path) => Finding::warn(
            format!("{found}, but {path} cannot be read"),
            "sandboxes are made without the site's settings",
            "let everyone read it",
        ),
        None => Finding::ok(format!("{found}, configuration unknown"), meaning),
    }
}

pub(super) fn fuse() -> Finding {
    let path = "/dev/fuse";
    let meaning = "packed images (.sif, squashfs) are mounted through it; unpacked ones need none";
    let remedy = "let everyone open it, as udev does (chmod 666 /dev/fuse)";
    // Whoever runs as root here starts sandboxes of somebody else.
    let opened = match fs::metadata(path) {
        Ok(meta) if geteuid().is_root() && meta.permissions().mode() & 0o006 != 0o006 => {
            Err(io::Error::new(ErrorKind::PermissionDenied, "for root alone"))
        }
        Ok(_) => fs::File::options().read(true).write(true).open(path).map(drop),
        Err(error) => Err(error),
    };
    match opened {
        Ok(()) => Finding::ok(format!("{path} opens"), meaning),
        Err(error) if error.kind() == ErrorKind::NotFound => Finding::absent(
            format!("no {path}"),
            meaning,
            "load the module fuse, or give the device to this container (docker: --device /dev/fuse)",
        ),
        Err(error) => Finding::warn(format!("{path}: {error}"), meaning, remedy),
    }
}

pub(super) fn squashfuse(config: &Config) -> Finding {
    let meaning = "mounts packed images (.sif, squashfs) for Apptainer";
    helper(config, &["squashfuse_ll", "squashfuse"], meaning, "install the package squashfuse")
}

pub(super) fn fuse_overlayfs(config: &Config) -> Finding {
    let meaning = "used by Apptainer where it makes layers itself; sandboxes do not need it";
    helper(config, &["fuse-overlayfs"], meaning, "install the package fuse-overlayfs")
}

fn helper(config: &Config, names: &[&str], meaning: &str, remedy: &str) -> Finding {
    let packaged = |name: &str| HELPERS.iter().map(|folder| Path::new(folder).join(name)).find(|path| is_program(path));
    match names.iter().find_map(|name| packaged(name).or_else(|| find(config, name))) {
        Some(path) => Finding::ok(path.display().to_string(), meaning),
        None => Finding::absent(format!("no {}", names.join(" nor ")), meaning, remedy),
    }
}

pub(super) fn subuid(config: &Config) -> Finding {
    ids(config, Kind::User)
}

pub(super) fn subgid(config: &Config) -> Finding {
    ids(config, Kind::Group)
}

fn ids(config: &Config, kind: Kind) -> Finding {
    let meaning = "ids that a fake root may give files to";
    let uid = match start::become_user(config.sandbox_user) {
        Ok(user) => user.map_or(geteuid().as_raw(), |user| user.uid),
        Err(error) => return Finding::not(State::Bad, error.to_string(), meaning, None),
    };
    let names = subid::names_of(uid);
    let user = names.first().map_or("USER", String::as_str);
    match subid::range(kind, &names) {
        Ok(range) => Finding::ok(format!("{} ids from {} for {user}", range.len(), range.start), meaning),
        Err(missing) => Finding::absent(missing, meaning, give_ids(user)),
    }
}

/// The command by which root gives a user ids that nobody else has.
pub(super) fn give_ids(user: &str) -> String {
    let first = subid::first_free();
    let last = first.saturating_add(subid::MAX_IDS - 1);
    format!("usermod --add-subuids {first}-{last} --add-subgids {first}-{last} {user}")
}

pub(super) fn newuidmap() -> Finding {
    let meaning = "puts a range of ids into a fake root's user namespace";
    match (Kind::User.find_program(), Kind::Group.find_program()) {
        (Some(users), Some(groups)) => Finding::ok(format!("{} and {}", users.display(), groups.display()), meaning),
        _ => Finding::absent(
            "newuidmap or newgidmap is not installed",
            meaning,
            "install the package uidmap (Debian) or shadow-utils (Fedora)",
        ),
    }
}

/// Gives a command a plain environment and no input.
pub(super) fn cleanly(command: &mut Command, config: &Config) {
    command.env_clear().env("HOME", "/nonexistent").stdin(Stdio::null());
    if let Ok(path) = std::env::join_paths(&config.search) {
        command.env("PATH", path);
    }
}

/// The end of what a program said, on one line and without colours.
pub(super) fn last_words(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let mut words = String::new();
    for (part_idx, part) in text.trim().split('\x1b').enumerate() {
        // After an escape come its parameters, up to a letter.
        let plain = if part_idx == 0 {
            part
        } else {
            part.split_once(|one: char| one.is_ascii_alphabetic()).map_or("", |(_, rest)| rest)
        };
        words.extend(plain.chars().map(|one| if one.is_control() { ' ' } else { one }));
    }
    let skipped = words.chars().count().saturating_sub(MAX_WORDS);
    words.trim().chars().skip(skipped).collect()
}

/// A child that leads a process group of its own. Dropping it kills the group.
pub(super) struct Group(Child);

impl Group {
    pub(super) fn start(mut command: Command) -> io::Result<Self> {
        Ok(Self(command.process_group(0).spawn()?))
    }

    /// Waits for the leader's end.
    ///
    /// # Errors
    /// When it does not end in time; the group is killed then.
    pub(super) fn wait(mut self, limit: Duration) -> io::Result<ExitStatus> {
        let handle = pidfd_open(self.leader()?, PidfdFlags::empty())?;
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        loop {
            match poll(&mut [PollFd::new(handle.as_fd(), PollFlags::POLLIN)], limit) {
                Err(Errno::EINTR) => {}
                Ok(1..) => return self.0.wait(),
                Ok(_) => return Err(ErrorKind::TimedOut.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn leader(&self) -> io::Result<Pid> {
        i32::try_from(self.0.id()).ok().and_then(Pid::from_raw).ok_or_else(|| ErrorKind::InvalidInput.into())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Unreaped, the leader keeps its number, which is its group's too.
        if let (Ok(None), Ok(leader)) = (self.0.try_wait(), self.leader()) {
            let _ = kill_process_group(leader, Signal::KILL);
            let _ = self.0.wait();
        }
    }
}

/// Runs a program that says little.
pub(super) fn run(mut command: Command, limit: Duration) -> io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut group = Group::start(command)?;
    let (stdout, stderr) = (group.0.stdout.take(), group.0.stderr.take());
    let status = group.wait(limit)?;
    let mut output = Output { status, stdout: Vec::new(), stderr: Vec::new() };
    if let Some(mut pipe) = stdout {
        pipe.read_to_end(&mut output.stdout)?;
    }
    if let Some(mut pipe) = stderr {
        pipe.read_to_end(&mut output.stderr)?;
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_killed_with_what_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let told = folder.path().join("pid");
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & echo $! > \"$0\"; wait"]).arg(&told);
        let error = run(command, Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let pid = fs::read_to_string(told).unwrap();
        // The kernel lets go of a killed process in its own time; one that was not killed stays.
        let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        if let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) {
            let mut fds = [PollFd::new(handle.as_fd(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut fds, PollTimeout::from(10_000_u16)), Ok(1), "{pid:?} is still there");
        }
    }

    #[test]
    fn last_words_are_one_short_line() {
        assert_eq!(last_words(b"\x1b[91mone\ntwo\x1b[0m\n"), "one two");
        assert_eq!(last_words(&[b'x'; 1000]).len(), MAX_WORDS);
    }
}
