//! Reading squashfs 4.0, and unpacking it on several threads.
//!
//! The calling thread walks the tree and makes folders and links; others write files. Nothing that an image claims is believed
//! further than its bytes go: tables are read where they are needed and never as a whole, blocks are unpacked into buffers of
//! the size that they may have, and whatever can go on without end is counted by the [`Meter`].

mod codec;
mod files;
mod fragments;
mod inode;
mod metadata;
mod names;
mod packed;
mod shared;
mod tables;
#[cfg(test)]
mod tests;
mod tree;

use std::{
    fs::File,
    io,
    num::NonZeroUsize,
    panic,
    path::Path,
    sync::{Arc, mpsc},
    thread,
};

use parking_lot::Mutex;

use self::{files::Writer, metadata::Metadata, packed::Packed, shared::Shared, tree::Walker};
use super::{ImageError, meter::Meter, notes::Notes};
use crate::SandboxUser;

/// More threads than this only wait for each other, and a process may not have very many.
const MAX_THREADS: usize = 64;

/// How many folders are worth a thread's while.
const MIN_FOLDERS: usize = 256;

/// Unpacks the squashfs that fills `len` bytes of `file` from `offset` on into the folder `root`, which exists and is empty.
/// Nothing else touches that folder meanwhile. All files are given to `owner`, if there is one. Blocks.
///
/// Everything is counted by `meter`, whose progress begins the part `unpack` and advances by packed bytes. No thread is left
/// when it returns. On an error what was unpacked so far stays, for the caller to remove.
///
/// # Errors
/// When the image is no squashfs, damaged, refused or too large, or the system refuses something.
pub(crate) fn unpack(
    file: &File,
    offset: u64,
    len: u64,
    root: &Path,
    owner: Option<SandboxUser>,
    threads: NonZeroUsize,
    meter: &Meter<'_>,
) -> Result<Notes, ImageError> {
    let shared = Shared::new(Packed::new(file, offset, len), meter, root, owner)?;
    meter.progress.begin("unpack", Some(len));
    let threads = threads.get().min(MAX_THREADS);
    let mut notes = Notes::default();
    let mut folders = None;
    thread::scope(|scope| {
        let (jobs, queue) = mpsc::sync_channel(threads);
        let queue = Arc::new(Mutex::new(queue));
        let mut writers = Vec::new();
        for _ in 0..threads {
            let started = shared.superblock.codec.decoder().and_then(|decoder| {
                let (shared, queue) = (&shared, Arc::clone(&queue));
                let write = move || Writer::new(shared, decoder).work(&queue);
                thread::Builder::new().name("unpack".to_owned()).spawn_scoped(scope, write)
            });
            match started {
                Ok(thread) => writers.push(thread),
                Err(error) => shared.stop(not_started(meter, error)),
            }
        }
        drop(queue);
        let walked = match shared.superblock.codec.decoder() {
            Ok(decoder) => Walker::new(&shared, Metadata::new(&shared.packed, decoder), jobs).walk(),
            Err(error) => Err(not_started(meter, error)),
        };
        match walked {
            Ok((all, told)) => {
                folders = Some(all);
                notes.merge(told);
            }
            Err(error) => shared.stop(error),
        }
        for thread in writers {
            notes.merge(thread.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked)));
        }
    });
    if let Some(error) = shared.take_error() {
        return Err(error);
    }
    let Some(folders) = folders else { return Ok(notes) };
    let each = folders.len().div_ceil(threads).max(MIN_FOLDERS);
    thread::scope(|scope| {
        let (folders, shared) = (&folders, &shared);
        for start in (0..folders.len()).step_by(each) {
            let which = start..folders.len().min(start + each);
            let finish = move || {
                if let Err(error) = folders.finish(shared, which) {
                    shared.stop(error);
                }
            };
            if start + each >= folders.len() {
                finish(); // the last ones on this thread
            } else if let Err(error) = thread::Builder::new().name("unpack".to_owned()).spawn_scoped(scope, finish) {
                shared.stop(not_started(meter, error));
            }
        }
    });
    match shared.take_error() {
        Some(error) => Err(error),
        None => Ok(notes),
    }
}

fn not_started(meter: &Meter<'_>, error: io::Error) -> ImageError {
    ImageError::at("start a thread for", meter.image, error)
}
