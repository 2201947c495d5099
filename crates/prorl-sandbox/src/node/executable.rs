//! The guest as a file that other programs can execute, such as a launcher that binds it into an image.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::folder;
use crate::SandboxError;

/// How often a busy program is tried.
const BUSY_TRIES: u32 = 10_000;

/// Copies the guest into `instance` and executes it once.
pub(super) fn install(guest: &Path, instance: &Path) -> Result<PathBuf, SandboxError> {
    let path = instance.join(folder::GUEST);
    let installed = copy(guest, &path).and_then(|()| try_out(&path));
    if let Err(error) = installed {
        // Nothing half made; what cannot be removed goes with the folder.
        let _ = fs::remove_file(&path);
        return Err(error);
    }
    Ok(path)
}

fn copy(guest: &Path, path: &Path) -> Result<(), SandboxError> {
    let mut from = fs::File::open(guest).map_err(|source| SandboxError::Guest { path: guest.to_owned(), source })?;
    let written = fs::File::create(path).and_then(|mut to| {
        io::copy(&mut from, &mut to)?;
        to.set_permissions(Permissions::from_mode(0o755))
    });
    written.map_err(|source| {
        let problem = "cannot take the guest's program".to_owned();
        let advice =
            "about 3 MB of space are needed: make room, or name another folder (--run-dir or TMPDIR)".to_owned();
        SandboxError::Folder { path: path.to_owned(), problem, advice, source }
    })
}

fn try_out(path: &Path) -> Result<(), SandboxError> {
    // A child that another thread is just starting holds a copy of the writing handle until it executes its own program, and
    // until then the kernel refuses to execute what was written.
    let mut tried = run(path);
    for _ in 0..BUSY_TRIES {
        match &tried {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            _ => break,
        }
        tried = run(path);
    }
    tried.map_err(|source| {
        let folder = path.parent().unwrap_or(path).to_owned();
        let problem = "is on a file system that forbids programs, or the guest does not run here".to_owned();
        let advice = "name a folder on one that is not mounted noexec (--run-dir or TMPDIR)".to_owned();
        SandboxError::Folder { path: folder, problem, advice, source }
    })
}

fn run(path: &Path) -> io::Result<()> {
    let status = Command::new(path)
        .arg("--version")
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match status {
        // Where this process leaves its children to the kernel nobody knows how it ended; it was executed, which is in doubt.
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(()),
        Ok(status) if !status.success() => Err(io::Error::other(format!("guest ended with {status}"))),
        tried => tried.map(drop),
    }
}
