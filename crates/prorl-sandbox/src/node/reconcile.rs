//! Ends and removes what instances left behind whose server and keeper are both dead.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::fcntl::FlockArg;
use prorl_core::frame;

use super::{
    endings::Endings,
    folder::{self, Origin},
};

/// Whoever should have waited for the sandboxes is dead: those that are ending are not waited for.
const PATIENCE: Duration = Duration::ZERO;

/// Sees to every dead instance in `dir`. What cannot be ended or removed is logged, and stays for the next time.
pub(super) fn others(dir: &Path, own: &Path, here: &Origin) {
    let instances = match instances(dir) {
        Ok(instances) => instances,
        Err(error) => return tracing::warn!(dir = %dir.display(), %error, "left folders cannot be looked for"),
    };
    for instance in instances {
        if instance == own {
            continue;
        }
        match one(&instance, here) {
            Ok(Found::Removed { n_boxes }) => {
                tracing::info!(folder = %instance.display(), n_boxes, "removed what a dead process had left");
            }
            Ok(Found::Alive | Found::Elsewhere) => {}
            Ok(Found::Stuck { n_left }) => {
                tracing::warn!(folder = %instance.display(), n_left, "sandboxes of a dead process survive a kill");
            }
            Err(error) => {
                tracing::warn!(folder = %instance.display(), %error, "what a dead process left cannot be removed");
            }
        }
    }
}

/// What became of an instance folder.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// Its server or its keeper lives.
    Alive,
    /// It is another machine's, or of another pid namespace and not empty.
    Elsewhere,
    /// It is gone.
    Removed { n_boxes: usize },
    /// It is still there, with so many sandboxes.
    Stuck { n_left: usize },
}

fn instances(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(folder::PREFIX) && entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn one(instance: &Path, here: &Origin) -> io::Result<Found> {
    let lock = match folder::lock(instance, FlockArg::LockExclusiveNonblock) {
        Ok(Some(lock)) => lock,
        Ok(None) => return Ok(Found::Alive),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Removed { n_boxes: 0 }),
        Err(error) => return Err(error),
    };
    let Some(there) = origin(instance)? else {
        // Its keeper was killed while it made or removed the folder, or the disk has lost what it wrote.
        remove_unfinished(instance)?;
        return Ok(Found::Removed { n_boxes: 0 });
    };
    // The name of a boot is the machine's too; containers give it several host names.
    let is_same_boot = there.boot_id == here.boot_id;
    if !is_same_boot && there.host != here.host {
        return Ok(Found::Elsewhere);
    }
    let n_boxes = folder::boxes(instance)?.len();
    // Process numbers mean nothing in another pid namespace; what is recorded may live there, and somebody there can end it.
    if is_same_boot && there.pid_namespace != here.pid_namespace && n_boxes > 0 {
        return Ok(Found::Elsewhere);
    }
    // Nor after the next boot.
    if is_same_boot && n_boxes > 0 {
        let mut endings = Endings::new(instance.to_owned(), PATIENCE);
        endings.add_all()?;
        loop {
            endings.advance();
            if endings.is_empty() {
                break;
            }
            endings.wait([]);
        }
        if endings.n_left() > 0 {
            return Ok(Found::Stuck { n_left: endings.n_left() });
        }
    }
    folder::remove_instance(instance)?;
    drop(lock);
    Ok(Found::Removed { n_boxes })
}

/// Removes an instance that was never finished, or is no more whole. One that does not say whose it is holds nothing: if it
/// does hold something, it is left as it is.
fn remove_unfinished(instance: &Path) -> io::Result<()> {
    let folders = [folder::BOXES, folder::RUN];
    let files = [folder::GUEST, folder::NEW_ORIGIN, folder::ORIGIN];
    let mut paths = vec![instance.to_owned()];
    paths.extend(folders.map(|name| instance.join(name)).into_iter().filter(|path| path.exists()));
    for path in paths {
        for entry in fs::read_dir(&path)? {
            let name = entry?.file_name();
            if path != instance || !folders.iter().chain(&files).any(|known| name == *known) {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "it does not say whose it is, and is not empty",
                ));
            }
        }
    }
    for name in folders {
        folder::gone(fs::remove_dir(instance.join(name)))?;
    }
    for name in files {
        folder::gone(fs::remove_file(instance.join(name)))?;
    }
    folder::remove_empty(instance)
}

/// Reads whose an instance is; nothing where it was never said, or cannot be understood any more.
fn origin(instance: &Path) -> io::Result<Option<Origin>> {
    let bytes = match fs::read(instance.join(folder::ORIGIN)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes?,
    };
    let mut decoder = frame::Decoder::default();
    decoder.push(&bytes);
    Ok(decoder.pop().ok().flatten())
}
