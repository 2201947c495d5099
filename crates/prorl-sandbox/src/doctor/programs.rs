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

use super::{
    Config, Finding,
    advice::{self, Trouble},
};
use crate::{
    SandboxError, start,
    subid::{self, Kind},
};

const OWN_PROGRAM: &str = "name Apptainer's or Singularity's own program (--apptainer)";

pub(super) const INSTALL_UIDMAP: &str = "install the package uidmap (Debian) or shadow-utils (Fedora)";

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

/// Finds the launcher that a runtime would use; one that was given is used whatever it is.
pub(super) fn find_launcher(config: &Config) -> Option<PathBuf> {
    match &config.launcher {
        Some(path) => Some(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
        None => ["apptainer", "singularity"].iter().find_map(|name| find(config, name)),
    }
}

pub(super) fn apptainer(config: &Config) -> Finding {
    let meaning = "brings up packed images (.sif, squashfs) for Singularity's runtime";
    let Some(launcher) = find_launcher(config) else {
        return Finding::absent("neither apptainer nor singularity", meaning, INSTALL_APPTAINER);
    };
    let shown = launcher.display();
    let ask = |argument: &str| {
        let mut command = Command::new(&launcher);
        command.arg(argument);
        cleanly(&mut command, config);
        let said = run(command, LIMIT)?;
        if !said.status.success() {
            return Err(io::Error::other(format!(
                "{}: {}",
                said.status,
                advice::gist(&String::from_utf8_lossy(&said.stderr))
            )));
        }
        Ok(String::from_utf8_lossy(&said.stdout).into_owned())
    };
    let settings = match ask("buildcfg") {
        Ok(settings) => settings,
        Err(error) => {
            let remedy = match (error.kind(), &config.launcher) {
                (ErrorKind::NotFound, _) => OWN_PROGRAM.to_owned(),
                (ErrorKind::Other, given) => advice::lift_limits().unwrap_or_else(|| {
                    if given.is_some() { OWN_PROGRAM.to_owned() } else { "install it again".to_owned() }
                }),
                _ => advice::remedy(&error),
            };
            return Finding::bad(format!("{shown}: {error}"), meaning, remedy);
        }
    };
    let value = |name: &str| settings.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let Some(package) =
        value("PACKAGE_NAME").filter(|name| ["apptainer", "singularity"].iter().any(|known| name.starts_with(known)))
    else {
        return Finding::bad(
            format!("{shown} is another program: it does not answer to 'buildcfg' as Apptainer and Singularity do"),
            meaning,
            OWN_PROGRAM,
        );
    };
    let version = value("PACKAGE_VERSION").unwrap_or("of an unknown version");
    let setting = |name: &str| value(&format!("APPTAINER_{name}")).or_else(|| value(&format!("SINGULARITY_{name}")));
    let is_setuid = setting("SUID_INSTALL") == Some("1");
    let how = if is_setuid { "set-uid" } else { "not set-uid" };
    let found = format!("{package} {version} at {shown}, {how}");
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
    let names = match sandbox_user(config) {
        Ok(uid) => subid::names_of(uid),
        Err(error) => return Trouble::from(error).bad(meaning),
    };
    match subid::range(kind, &names) {
        Ok(range) => {
            let user = names.first().map_or("?", String::as_str);
            Finding::ok(format!("{} ids from {} for {user}", range.len(), range.start), meaning)
        }
        Err(missing) => Finding::absent(missing, meaning, give_ids(&names, &[kind])),
    }
}

/// Returns the number of the user that sandboxes run as.
pub(super) fn sandbox_user(config: &Config) -> Result<u32, SandboxError> {
    Ok(start::become_user(config.sandbox_user)?.map_or_else(|| geteuid().as_raw(), |user| user.uid))
}

/// The command by which root gives a user, known by the first of `names`, ids that nobody else has.
pub(super) fn give_ids(names: &[String], kinds: &[Kind]) -> String {
    let user = names.first().map_or("USER", String::as_str);
    let first = subid::first_free();
    let last = first.saturating_add(subid::MAX_IDS - 1);
    if user.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number is no user's name, but the tables may hold it.
        let tables: Vec<_> = kinds.iter().map(|kind| kind.table()).collect();
        return format!("as root: echo {user}:{first}:{} | tee -a {}", subid::MAX_IDS, tables.join(" "));
    }
    let flags = kinds.iter().map(|kind| match kind {
        Kind::User => format!("--add-subuids {first}-{last} "),
        Kind::Group => format!("--add-subgids {first}-{last} "),
    });
    format!("as root: usermod {}{user}", flags.collect::<String>())
}

pub(super) fn newuidmap() -> Finding {
    let meaning = "puts a range of ids into a fake root's user namespace";
    match (Kind::User.find_program(), Kind::Group.find_program()) {
        (Some(users), Some(groups)) => Finding::ok(format!("{} and {}", users.display(), groups.display()), meaning),
        _ => Finding::absent("newuidmap or newgidmap is not installed", meaning, INSTALL_UIDMAP),
    }
}

/// Gives a command a plain environment and no input.
fn cleanly(command: &mut Command, config: &Config) {
    command.env_clear().env("HOME", "/nonexistent").stdin(Stdio::null());
    if let Ok(path) = std::env::join_paths(&config.search) {
        command.env("PATH", path);
    }
}

/// The end of what a program said, on one line and without colours.
pub(super) fn last_words(said: &str) -> String {
    let words = one_line(said);
    let skipped = words.chars().count().saturating_sub(MAX_WORDS);
    words.chars().skip(skipped).collect()
}

/// Text of others on one line and without colours.
pub(super) fn one_line(text: &str) -> String {
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
    words.trim().to_owned()
}

/// A child that leads a process group of its own. Dropping it kills the group.
struct Group(Child);

impl Group {
    fn start(mut command: Command) -> io::Result<Self> {
        Ok(Self(command.process_group(0).spawn()?))
    }

    /// Waits for the leader's end. Where this process leaves its children to the kernel, each counts as a success: nobody knows
    /// better, and what it said still tells.
    ///
    /// # Errors
    /// When it does not end in time; the group is killed then.
    fn wait(mut self, limit: Duration) -> io::Result<ExitStatus> {
        let handle = pidfd_open(self.leader()?, PidfdFlags::empty())?;
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        loop {
            match poll(&mut [PollFd::new(handle.as_fd(), PollFlags::POLLIN)], limit) {
                Err(Errno::EINTR) => {}
                Ok(1..) => {
                    return match self.0.wait() {
                        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(ExitStatus::default()),
                        ended => ended,
                    };
                }
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
    use crate::doctor::State;

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
            assert_eq!(crate::sys::poll_patiently(&mut fds, 10_000), 1, "{pid:?} is still there");
        }
    }

    #[test]
    fn ids_are_given_by_name_and_for_what_is_missing() {
        let names = ["ada".to_owned(), "1001".to_owned()];
        let both = give_ids(&names, &[Kind::User, Kind::Group]);
        assert!(both.contains("--add-subuids ") && both.contains("--add-subgids ") && both.ends_with(" ada"), "{both}");
        let groups = give_ids(&names, &[Kind::Group]);
        assert!(groups.contains("--add-subgids ") && !groups.contains("subuids"), "{groups}");
        let numbered = give_ids(&names[1..], &[Kind::User]);
        assert!(numbered.contains("echo 1001:") && numbered.ends_with(":65536 | tee -a /etc/subuid"), "{numbered}");
    }

    #[test]
    fn a_launcher_that_was_given_is_judged_by_what_it_is() {
        for (path, words) in [("/nonexistent/launcher", "No such file"), ("/bin/true", "another program")] {
            let finding = apptainer(&Config { launcher: Some(path.into()), ..Config::new("/guest") });
            assert_eq!(finding.state, State::Bad, "{}", finding.found);
            assert!(finding.found.starts_with(path) && finding.found.contains(words), "{}", finding.found);
        }
        let nowhere = Config { search: vec!["/nonexistent".into()], ..Config::new("/guest") };
        assert_eq!(apptainer(&nowhere).state, State::Absent);
    }

    #[test]
    fn last_words_are_one_short_line() {
        assert_eq!(last_words("\x1b[91mone\ntwo\x1b[0m\n"), "one two");
        assert_eq!(last_words(&"x".repeat(1000)).len(), MAX_WORDS);
    }
}
