//! Files in and out.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::Path,
};

use nix::poll::PollFlags;

use super::{
    clock::{Instant, after, now},
    post::{Mail, Mailbox, Post},
    serve::Shared,
    wait::wait,
};
use crate::wire::{Answer, ReadFile, Steer, Stream, WriteFile};

/// Bytes of one frame of a file that is read. So much of it goes before what another has to say.
const PIECE_BYTES: usize = 64 * 1024;

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

pub(super) fn read(post: &Post, mailbox: &Mailbox, id: u64, timeout_ms: u64, read: &ReadFile) {
    match get(post, &Watch::new(mailbox, timeout_ms), id, read) {
        Ok(total) => post.done(id, Answer::Read { total }),
        Err(err) => post.failed(id, format!("cannot read {}: {err}", read.path)),
    }
}

fn get(post: &Post, watch: &Watch<'_>, id: u64, read: &ReadFile) -> io::Result<u64> {
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&read.path)?;
    regular(&file)?;
    file.seek(SeekFrom::Start(read.offset))?;
    let mut left = (&file).take(read.limit);
    let mut buffer = vec![0; PIECE_BYTES];
    let mut end = 0;
    loop {
        match left.read(&mut buffer)? {
            0 => return Ok(file.metadata()?.len().max(end)),
            n => {
                watch.look().map_err(io::Error::other)?;
                post.output(id, Stream::Stdout, &buffer[..n]);
                end = end.max(read.offset).saturating_add(n as u64);
            }
        }
    }
}

/// Looks whether a request is still wanted and its limit has not passed.
pub(super) struct Watch<'a> {
    mailbox: &'a Mailbox,
    limit_ms: u64,
    until: Instant,
}

impl<'a> Watch<'a> {
    pub(super) fn new(mailbox: &'a Mailbox, limit_ms: u64) -> Self {
        Self { mailbox, limit_ms, until: after(now(), limit_ms) }
    }

    /// Returns what has come for it.
    ///
    /// # Errors
    /// Says why it has to end.
    pub(super) fn look(&self) -> Result<Vec<Steer>, String> {
        self.mail(now())
    }

    /// Waits for something to come for it.
    ///
    /// # Errors
    /// As [`look`](Self::look).
    pub(super) fn wait(&self) -> Result<Vec<Steer>, String> {
        self.mail(self.until)
    }

    fn mail(&self, until: Instant) -> Result<Vec<Steer>, String> {
        let [has_mail] = wait([Some((self.mailbox.as_fd(), PollFlags::POLLIN))], Some(until));
        if self.until <= now() {
            return Err(format!("its limit of {} ms has passed", self.limit_ms));
        }
        let mut steers = Vec::new();
        for mail in has_mail.then(|| self.mailbox.take()).into_iter().flatten() {
            match mail {
                Mail::Steer(steer) => steers.push(steer),
                Mail::Cancel(_) => return Err("it is no longer wanted".to_owned()),
                Mail::Request(_) => {}
            }
        }
        Ok(steers)
    }
}
