//! How threads of the guest hand things on: frames to the host, and mail to a thread that sleeps in `poll`.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
};

use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::{Mutex, MutexGuard};
use prorl_core::frame;

use crate::wire::{Answer, Bytes, GuestFrame, OutputFrame, Request, Steer, Stream};

/// What a working thread is told.
#[derive(Debug)]
pub(super) enum Mail {
    /// A request of its kind.
    Request(Request),
    /// The host no longer wants this request.
    Cancel(u64),
    /// Something for the attached program that this thread works for.
    Steer(Steer),
}

/// A thread's mail, with a descriptor that is readable while there is some.
#[derive(Debug)]
pub(super) struct Mailbox {
    mail: Mutex<VecDeque<Mail>>,
    event: EventFd,
}

impl Mailbox {
    /// Makes an empty one.
    ///
    /// # Errors
    /// When there can be no more descriptors.
    pub(super) fn new() -> io::Result<Arc<Self>> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Arc::new(Self { mail: Mutex::default(), event }))
    }

    /// Puts mail in and wakes the thread.
    pub(super) fn put(&self, mail: Mail) {
        self.mail.lock().push_back(mail);
        // It fails only when its counter is full, and then it is readable.
        let _counted = self.event.write(1);
    }

    /// Takes all mail out.
    pub(super) fn take(&self) -> VecDeque<Mail> {
        // Emptied first: what comes in between is taken now and found empty later, which is harmless.
        let _emptied = self.event.read();
        std::mem::take(&mut *self.mail.lock())
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// The way to the host, and who works on what.
///
/// Output, of which there may be a flood, has a lane of its own: of all threads that have some, one at a time waits for the
/// channel, and hands it to whoever else waits after each piece. So an answer waits for one piece of output and for what the
/// channel itself holds, whatever else goes on.
#[derive(Debug)]
pub(super) struct Post {
    channel: Mutex<UnixStream>,
    output: Mutex<()>,
    working: Mutex<HashMap<u64, Arc<Mailbox>>>,
}

impl Post {
    pub(super) fn new(channel: UnixStream) -> Self {
        Self { channel: Mutex::new(channel), output: Mutex::default(), working: Mutex::default() }
    }

    /// Sends a frame, waiting while the host does not read.
    pub(super) fn send(&self, frame: &GuestFrame) {
        match frame::encode(frame) {
            // A channel that is gone is seen by the thread that reads from it, which ends the guest.
            Ok(bytes) => self.write(&bytes),
            Err(err) => {
                let GuestFrame::Done { id, .. } = frame else { return };
                let answer = Answer::Failed { message: format!("the answer cannot be sent: {err}") };
                if let Ok(bytes) = frame::encode(&GuestFrame::Done { id: *id, answer }) {
                    self.write(&bytes);
                }
            }
        }
    }

    /// Sends a piece of output.
    pub(super) fn output(&self, id: u64, stream: Stream, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        // A piece is far from the limit of a frame.
        if let Ok(frame) = frame::encode_sized(&OutputFrame { id, stream, bytes }, bytes.len()) {
            let lane = self.output.lock();
            self.write(&frame);
            MutexGuard::unlock_fair(lane);
        }
    }

    fn write(&self, frame: &[u8]) {
        let mut channel = self.channel.lock();
        let _gone = channel.write_all(frame);
        MutexGuard::unlock_fair(channel);
    }

    /// Sends something that a cell has shown.
    pub(super) fn shown(&self, id: u64, at: u64, mime: &str, data: &[u8]) {
        self.send(&GuestFrame::Shown { id, at, mime: mime.to_owned(), data: Bytes(data.to_vec()) });
    }

    /// Ends a request.
    pub(super) fn done(&self, id: u64, answer: Answer) {
        self.working.lock().remove(&id);
        self.send(&GuestFrame::Done { id, answer });
    }

    /// Ends a request that could not be done.
    pub(super) fn failed(&self, id: u64, message: impl Into<String>) {
        self.done(id, Answer::Failed { message: message.into() });
    }

    /// Remembers who works on a request.
    pub(super) fn assign(&self, id: u64, to: &Arc<Mailbox>) {
        self.working.lock().insert(id, Arc::clone(to));
    }

    /// Tells who works on a request that it is not wanted; one that has ended needs nothing.
    pub(super) fn cancel(&self, id: u64) {
        if let Some(mailbox) = self.working.lock().get(&id) {
            mailbox.put(Mail::Cancel(id));
        }
    }

    /// Hands something to who works on a request; for one that has ended it means nothing.
    pub(super) fn steer(&self, id: u64, steer: Steer) {
        if let Some(mailbox) = self.working.lock().get(&id) {
            mailbox.put(Mail::Steer(steer));
        }
    }
}
