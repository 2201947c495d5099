//! The way from callers to the channel: a queue, and a way past it while it is empty.

use std::sync::Arc;

use parking_lot::Mutex;
use prorl_core::frame;
use tokio::{
    net::unix::OwnedWriteHalf,
    sync::mpsc::{self, Permit},
};

use super::channel::Shared;
use crate::wire::HostFrame;

/// Frames that wait to be written; a full queue makes callers wait.
const QUEUE_FRAMES: usize = 64;

/// What callers send through.
///
/// A frame that finds nothing before it is written by its caller, which spares it a task that has to wake up first. All others
/// are queued, in the order in which they came.
#[derive(Debug)]
pub(super) struct Outbox {
    channel: Arc<OwnedWriteHalf>,
    queue: mpsc::Sender<Vec<u8>>,
    lane: Arc<Lane>,
}

/// Whether the writer has something to write, or is about to take it: nothing may be written past it then.
#[derive(Debug, Default)]
struct Lane(Mutex<bool>);

/// A place in the queue.
pub(super) struct Place<'a> {
    outbox: &'a Outbox,
    permit: Permit<'a, Vec<u8>>,
}

/// Writes what callers could not.
#[derive(Debug)]
pub(super) struct Writer {
    channel: Arc<OwnedWriteHalf>,
    queue: mpsc::Receiver<Vec<u8>>,
    lane: Arc<Lane>,
}

/// Returns both ends.
pub(super) fn outbox(channel: OwnedWriteHalf) -> (Outbox, Writer) {
    let channel = Arc::new(channel);
    let lane = Arc::new(Lane::default());
    let (sender, queue) = mpsc::channel(QUEUE_FRAMES);
    let outbox = Outbox { channel: Arc::clone(&channel), queue: sender, lane: Arc::clone(&lane) };
    (outbox, Writer { channel, queue, lane })
}

impl Outbox {
    /// Waits for a place; `None` when nothing is written any more.
    ///
    /// # Cancel safety
    /// Dropping the future, or the place, sends nothing.
    pub(super) async fn reserve(&self) -> Option<Place<'_>> {
        let permit = self.queue.reserve().await.ok()?;
        Some(Place { outbox: self, permit })
    }
}

impl Place<'_> {
    /// Sends a frame behind all that was sent before.
    pub(super) fn send(self, mut frame: Vec<u8>) {
        let Outbox { channel, lane, .. } = self.outbox;
        let mut is_busy = lane.0.lock();
        if !*is_busy {
            match channel.try_write(&frame) {
                Ok(n) if n == frame.len() => return,
                Ok(n) => drop(frame.drain(..n)),
                // It is full, or gone, which the writer sees too.
                Err(_) => {}
            }
            *is_busy = true;
        }
        self.permit.send(frame);
    }
}

impl Writer {
    /// Writes frames and notes until the channel ends.
    pub(super) async fn run(mut self, shared: Arc<Shared>) {
        let mut frames = Vec::new();
        loop {
            tokio::select! {
                () = shared.dead.cancelled() => return,
                n_taken = self.queue.recv_many(&mut frames, QUEUE_FRAMES) => if n_taken == 0 { return },
                () = shared.noted() => {}
            }
            *self.lane.0.lock() = true;
            // A note is about a request that was sent before it was made. What is in the queue once the notes are taken, which
            // is no more than it holds, goes first.
            let notes = shared.take_notes();
            frames.extend(std::iter::from_fn(|| self.queue.try_recv().ok()).take(QUEUE_FRAMES));
            frames.push(notes.iter().filter_map(|note: &HostFrame| frame::encode(note).ok()).flatten().collect());
            for bytes in frames.drain(..) {
                if let Err(err) = self.write(&bytes).await {
                    return shared.close(err.to_string());
                }
            }
            let mut is_busy = self.lane.0.lock();
            *is_busy = !self.queue.is_empty();
        }
    }

    async fn write(&self, mut bytes: &[u8]) -> std::io::Result<()> {
        while !bytes.is_empty() {
            match self.channel.try_write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(err) if err.kind() == std::io::ErrorKind::WouldBlock => self.channel.writable().await?,
                Err(err) => return Err(err),
            }
        }
        Ok(())
    }
}
