//! The process that stays behind when a server ends.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{
            fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
    process,
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::{prctl::set_name, signal::SigSet},
    unistd::{chdir, geteuid, setsid},
};
use prorl_core::frame;

use super::{
    attend::{Server, attend},
    folder::{self, Origin},
    process::now,
    raise_open_files,
    wire::{Kept, Problem, Refusal},
};
use crate::{
    setup::Keep,
    sys::{self, Fork},
};

/// How often a folder is made anew because somebody else was just removing the one above it, or has the name.
const TRIES: u32 = 1000;

/// Makes an instance folder, tells the server its name, and becomes its keeper: a process of its own, nobody's child, deaf to
/// signals, that waits for the server's end, then sees every recorded sandbox to its end and removes the folder.
///
/// The calling process ends; it must have one thread.
pub fn keep(channel: OwnedFd, keep: &Keep) -> ! {
    let forked = sys::close_all_but(channel.as_fd()).and_then(|()| sys::fork());
    let channel = UnixStream::from(channel);
    let kept = match forked {
        Ok(Fork::Parent(_)) => process::exit(0),
        Ok(Fork::Child) => serve(channel, keep),
        Err(errno) => answer(
            &channel,
            &Kept::Refused(Refusal { problem: Problem::Call, path: String::new(), errno: errno as i32 }),
        ),
    };
    process::exit(i32::from(kept.is_err()))
}

fn serve(channel: UnixStream, keep: &Keep) -> io::Result<()> {
    // Nobody's terminal, shell or service manager is to end it before its time.
    SigSet::all().thread_set_mask()?;
    setsid()?;
    set_name(c"prorl-keeper")?;
    chdir("/")?;
    // Without more, fewer sandboxes can be waited for at once.
    let _ = raise_open_files();
    let (instance, lock) = match make(keep) {
        Ok(made) => made,
        Err(refusal) => return answer(&channel, &Kept::Refused(refusal)),
    };
    let server = Server::new(channel);
    if let Some(server) = &server {
        let name = instance.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // One that is gone already is found to be so below.
        let _ = answer(server.channel(), &Kept::Made { name, pid: process::id() });
    }
    attend(&instance, server, lock, keep.groups.as_ref().map(Path::new))
}

fn answer(mut channel: &UnixStream, kept: &Kept) -> io::Result<()> {
    channel.write_all(&frame::encode(kept).map_err(io::Error::other)?)
}

/// Makes an instance folder and locks it. Leaves nothing when it cannot.
fn make(keep: &Keep) -> Result<(PathBuf, Flock<File>), Refusal> {
    let call = |path: &Path| {
        let path = path.to_string_lossy().into_owned();
        move |error: io::Error| Refusal {
            problem: Problem::Call,
            path,
            errno: error.raw_os_error().unwrap_or_default(),
        }
    };
    let mode = folder::open_mode();
    let started = now().map_err(call(Path::new("/proc")))?;
    for attempt in 0..TRIES {
        match folder::make(&keep.dir, mode | folder::OURS) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match check(&keep.dir, mode) {
                Err(Refusal { errno: libc::ENOENT, .. }) => continue, // the last instance in it has just ended
                checked => checked?,
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound && keep.dir.parent().is_some_and(Path::exists) => {
                continue; // removed between its making and the setting of its mode
            }
            result => result.map_err(call(&keep.dir))?,
        }
        let instance = keep.dir.join(format!("{}{}-{started}-{attempt}", folder::PREFIX, process::id()));
        let locked = folder::make(&instance, mode).and_then(|()| folder::lock(&instance, FlockArg::LockSharedNonblock));
        let lock = match locked {
            Ok(Some(lock)) => lock,
            // Whoever reconciles takes an instance without a keeper for a dead one.
            Ok(None) => continue,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => continue,
            Err(error) => {
                let _ = folder::remove_empty(&instance);
                return Err(call(&keep.dir)(error));
            }
        };
        return match furnish(&instance, mode, keep) {
            Ok(()) => Ok((instance, lock)),
            Err(error) => {
                let _ = folder::remove_instance(&instance);
                Err(call(&keep.dir)(error))
            }
        };
    }
    Err(Refusal { problem: Problem::Call, path: keep.dir.to_string_lossy().into_owned(), errno: libc::EBUSY })
}

/// Checks that the folder of all instances is ours alone to change.
fn check(dir: &Path, mode: u32) -> Result<(), Refusal> {
    let refuse = |problem, errno| Refusal { problem, path: dir.to_string_lossy().into_owned(), errno };
    let call = |error: io::Error| refuse(Problem::Call, error.raw_os_error().unwrap_or_default());
    let meta = fs::symlink_metadata(dir).map_err(call)?;
    if !meta.is_dir() {
        return Err(refuse(Problem::NoFolder, 0));
    }
    if meta.uid() != geteuid().as_raw() {
        return Err(refuse(Problem::Owner(meta.uid()), 0));
    }
    if meta.mode() & 0o022 != 0 {
        return Err(refuse(Problem::Open(meta.mode() & 0o7777), 0));
    }
    let passable = mode & 0o111;
    if meta.mode() & passable != passable {
        fs::set_permissions(dir, Permissions::from_mode(meta.mode() & 0o7777 | passable)).map_err(call)?;
    }
    Ok(())
}

/// Makes what is in an instance folder.
fn furnish(instance: &Path, mode: u32, keep: &Keep) -> io::Result<()> {
    folder::make(&instance.join(folder::BOXES), 0o700)?;
    folder::make(&instance.join(folder::RUN), mode)?;
    let pid_namespace = fs::metadata("/proc/self/ns/pid")?.ino();
    let origin = Origin { host: keep.host.clone(), boot_id: keep.boot_id.clone(), pid_namespace };
    let bytes = frame::encode(&origin).map_err(io::Error::other)?;
    let unfinished = instance.join(folder::NEW_ORIGIN);
    File::options().write(true).create_new(true).mode(0o600).open(&unfinished)?.write_all(&bytes)?;
    fs::rename(unfinished, instance.join(folder::ORIGIN))
}
