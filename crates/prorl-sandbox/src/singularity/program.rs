//! Which program launches images here, and what it can be told.

use std::{
    env,
    ffi::OsString,
    fs,
    io::{self, Read as _},
    os::{
        fd::AsFd as _,
        unix::{fs::PermissionsExt as _, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use tokio::time::Instant;

use super::conf;
use crate::SandboxError;

/// The names that are looked for, in this order.
const NAMES: [&str; 2] = ["apptainer", "singularity"];

/// Where programs are when nobody says otherwise.
const SYSTEM_PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin";

/// How long the program may take to say how it was built. It takes 20 ms where nothing is wrong.
const ANSWER: Duration = Duration::from_secs(10);

/// More than any launcher says of its build, in bytes.
const MAX_ANSWER_BYTES: u64 = 64 * 1024;

/// Which ids there are in a launcher's user namespace. The guest's own is made in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Users {
    /// The user's own.
    Own,
    /// The user's own as 0: so the files in an image file are the user's, as almost all belong to root there. `SingularityCE`
    /// cannot do that without a range, and such files are read-only then.
    Root,
    /// The user's own as 0, and a range.
    Range,
}

/// A launcher.
#[derive(Clone, Debug)]
pub(super) struct Program {
    /// Where it is.
    pub(super) path: PathBuf,
    /// What it calls itself.
    pub(super) version: String,
    /// Its configuration for sandboxes, where it takes one.
    pub(super) conf: Option<String>,
    /// Its whole environment.
    pub(super) env: Vec<(OsString, OsString)>,
    is_apptainer: bool,
}

impl Program {
    /// Finds the program and asks it how it was built.
    pub(super) fn find(given: Option<PathBuf>) -> Result<Self, SandboxError> {
        let search = env::var_os("PATH").unwrap_or_default();
        let path = match given {
            Some(path) => std::path::absolute(&path).map_err(|source| SandboxError::Program { path, source })?,
            None => look_for(&search).ok_or_else(|| SandboxError::Program {
                path: NAMES.join(" or ").into(),
                source: io::Error::new(io::ErrorKind::NotFound, "not found along PATH: install one, or name its path"),
            })?,
        };
        let answer = ask(&path).map_err(|source| SandboxError::Program { path: path.clone(), source })?;
        let Some(build) = Build::parse(&answer) else {
            let source = io::Error::new(io::ErrorKind::InvalidData, "it does not answer to 'buildcfg' as those do");
            return Err(SandboxError::Program { path, source });
        };
        // One with a set-uid part takes nobody's configuration but root's.
        let site = |conf: PathBuf| conf::rewrite(&fs::read_to_string(conf).unwrap_or_default());
        let conf = if build.is_setuid { None } else { build.conf.map(site) };
        let mut path_variable = search;
        path_variable.push(format!(":{SYSTEM_PATH}"));
        // Its own folder in a home, where it would keep nothing but what it makes there unasked.
        let nowhere = || OsString::from("/nonexistent");
        let env = vec![
            ("PATH".into(), path_variable),
            ("APPTAINER_CONFIGDIR".into(), nowhere()),
            ("SINGULARITY_CONFIGDIR".into(), nowhere()),
        ];
        Ok(Self { path, version: build.version, conf, env, is_apptainer: build.is_apptainer })
    }

    /// Tells whether the whole of the host's `/dev` can be seen from the launcher's root.
    pub(super) fn shows_devices(&self) -> bool {
        self.conf.is_some()
    }

    /// Returns the flags that keep the host's files out of the image, beyond what the configuration says.
    pub(super) fn own_flags(&self) -> &'static [&'static str] {
        if self.conf.is_some() {
            &["--ipc", "--no-mount", "bind-paths"]
        } else {
            &["--containall", "--no-mount", "home,tmp,sys,devpts,hostfs,cwd,bind-paths"]
        }
    }

    /// Returns the flags for the launcher's user namespace.
    pub(super) fn user_flags(&self, users: Users) -> &'static [&'static str] {
        // The command that Apptainer would load into every program fakes what is real here.
        match (users, self.is_apptainer) {
            (Users::Own, _) | (Users::Root, false) => &[],
            (Users::Root, true) => &["--fakeroot", "--ignore-subuid", "--ignore-fakeroot-command"],
            (Users::Range, true) => &["--fakeroot", "--ignore-fakeroot-command"],
            (Users::Range, false) => &["--fakeroot"],
        }
    }
}

fn look_for(search: &OsString) -> Option<PathBuf> {
    let is_program =
        |path: &PathBuf| path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    let folders: Vec<PathBuf> = env::split_paths(search).filter(|folder| folder.is_absolute()).collect();
    NAMES.iter().find_map(|name| folders.iter().map(|folder| folder.join(name)).find(is_program))
}

/// What a launcher says of its build.
#[derive(Debug, PartialEq, Eq)]
struct Build {
    version: String,
    is_apptainer: bool,
    conf: Option<PathBuf>,
    is_setuid: bool,
}

impl Build {
    fn parse(answer: &str) -> Option<Self> {
        let value = |name: &str| answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        let package = value("PACKAGE_NAME").filter(|name| NAMES.iter().any(|known| name.starts_with(known)))?;
        let version = value("PACKAGE_VERSION").unwrap_or("of an unknown version");
        let is_apptainer = package.starts_with(NAMES[0]);
        let (prefix, folder) = if is_apptainer { ("APPTAINER", NAMES[0]) } else { ("SINGULARITY", NAMES[1]) };
        let conf = value(&format!("{prefix}_CONF_FILE")).map(PathBuf::from);
        // What was built with a set-uid part may have been installed without it.
        let starter = value("LIBEXECDIR").map(|libexec| Path::new(libexec).join(folder).join("bin/starter-suid"));
        let is_there =
            starter.and_then(|path| path.metadata().ok()).is_some_and(|meta| meta.permissions().mode() & 0o4000 != 0);
        let is_setuid = value(&format!("{prefix}_SUID_INSTALL")) == Some("1") && is_there;
        Some(Self { version: format!("{package} {version}"), is_apptainer, conf, is_setuid })
    }
}

/// Returns what the program answers to `buildcfg`. Any program may be behind the path, so it gets some time and no more.
fn ask(program: &Path) -> io::Result<String> {
    let mut child = Command::new(program)
        .arg("buildcfg")
        .env_clear()
        .env("PATH", SYSTEM_PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()?;
    let answer = listen(&mut child);
    // Reaped only here, its number is its group's as long; a program that has ended minds no signal.
    if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    // Where this process leaves its children to the kernel there is nothing to wait for.
    let _ = child.wait();
    answer
}

fn listen(child: &mut std::process::Child) -> io::Result<String> {
    let mut pipe = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?.take(MAX_ANSWER_BYTES);
    let begun = Instant::now();
    let mut answer = Vec::new();
    loop {
        let left = ANSWER.saturating_sub(begun.elapsed());
        let until = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(pipe.get_ref().as_fd(), PollFlags::POLLIN)], until) {
            Err(Errno::EINTR) => continue,
            Ok(0) => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer to 'buildcfg' in {ANSWER:?}")));
            }
            polled => polled?,
        };
        let mut bytes = [0; 4096];
        match pipe.read(&mut bytes) {
            Ok(0) => return Ok(String::from_utf8_lossy(&answer).into_owned()),
            Ok(n_read) => answer.extend_from_slice(&bytes[..n_read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_of_both_families_are_understood() {
        let apptainer = "PACKAGE_NAME=apptainer\nPACKAGE_VERSION=1.4.5\nLIBEXECDIR=/nonexistent\n\
                         APPTAINER_CONF_FILE=/etc/apptainer/apptainer.conf\nAPPTAINER_SUID_INSTALL=1\n";
        let build = Build::parse(apptainer).unwrap();
        assert_eq!(build.version, "apptainer 1.4.5");
        assert_eq!(build.conf.as_deref(), Some(Path::new("/etc/apptainer/apptainer.conf")));
        assert!(build.is_apptainer && !build.is_setuid);

        let libexec = tempfile::tempdir().unwrap();
        let starter = libexec.path().join("singularity/bin/starter-suid");
        fs::create_dir_all(starter.parent().unwrap()).unwrap();
        fs::write(&starter, "").unwrap();
        fs::set_permissions(&starter, fs::Permissions::from_mode(0o4755)).unwrap();
        let singularity = format!(
            "PACKAGE_NAME=singularity-ce\nPACKAGE_VERSION=4.2\nLIBEXECDIR={}\nSINGULARITY_SUID_INSTALL=1\n",
            libexec.path().display()
        );
        let build = Build::parse(&singularity).unwrap();
        assert_eq!(build.version, "singularity-ce 4.2");
        assert!(!build.is_apptainer && build.is_setuid && build.conf.is_none());
    }

    #[test]
    fn another_program_is_none() {
        assert_eq!(Build::parse(""), None);
        assert_eq!(Build::parse("PACKAGE_NAME=podman\n"), None);
        let error = Program::find(Some("/bin/true".into())).unwrap_err();
        assert_eq!(error.to_string(), "failed to use /bin/true as Apptainer or Singularity");
        assert!(Program::find(Some("/nonexistent/apptainer".into())).is_err());
    }
}
