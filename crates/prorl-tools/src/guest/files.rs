//! Files in and out.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use super::{post::Post, serve::Shared};
use crate::wire::{Answer, ReadFile, Stream, WriteFile};

/// Bytes of one frame of a file that is read.
const PIECE_BYTES: usize = 256 * 1024;

pub(super) fn write(shared: &Shared, id: u64, write: &WriteFile) {
    match put(write, shared.terms.limits.file_bytes) {
        Ok(()) => shared.post.done(id, Answer::Written),
        Err(err) => shared.post.failed(id, format!("cannot write {}: {err}", write.path)),
    }
}

fn put(write: &WriteFile, file_bytes: Option<u64>) -> io::Result<()> {
    let path = Path::new(&write.path);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let file = OpenOptions::new()
        .create(true)
        .append(write.append)
        .write(!write.append)
        .truncate(!write.append)
        .mode(write.mode)
        .custom_flags(libc::O_NONBLOCK) // a pipe without a reader is an error and not a wait
        .open(path)?;
    let mut file = regular(&file)?;
    // The kernel holds tasks to this and not the guest.
    let size = file.metadata()?.len().saturating_add(write.bytes.0.len() as u64);
    if file_bytes.is_some_and(|most| size > most) {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    file.write_all(&write.bytes.0)
}

/// A pipe or a device may never come to an end.
fn regular(file: &File) -> io::Result<&File> {
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a regular file")) }
}

pub(super) fn read(post: &Post, id: u64, read: &ReadFile) {
    match get(post, id, read) {
        Ok(total) => post.done(id, Answer::Read { total }),
        Err(err) => post.failed(id, format!("cannot read {}: {err}", read.path)),
    }
}

fn get(post: &Post, id: u64, read: &ReadFile) -> io::Result<u64> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&read.path)?;
    let mut left = regular(&file)?.take(read.limit);
    let mut buffer = vec![0; PIECE_BYTES];
    let mut sent = 0;
    loop {
        match left.read(&mut buffer)? {
            0 => return Ok(file.metadata()?.len().max(sent)),
            n => {
                post.output(id, Stream::Stdout, &buffer[..n]);
                sent += n as u64;
            }
        }
    }
}
