//! What runs on the channel: a task that reads, a task that writes, and the table of who waits for what.
//!
//! The reader never waits for anybody, so a slow caller holds up no other. What can become much has a limit that the guest
//! knows before it sends.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use prorl_core::frame::{self, Decoder};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::unix::{OwnedReadHalf, OwnedWriteHalf},
    sync::{Notify, mpsc, oneshot},
};
use tokio_util::sync::CancellationToken;

use super::{attach::Link, client::ToolError};
use crate::wire::{Answer, GuestFrame, HostFrame, Stream};

/// Frames that wait to be written; a full queue makes callers wait.
pub(super) const QUEUE_FRAMES: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    noted: Notify,
    pub(super) dead: CancellationToken,
}

#[derive(Debug, Default)]
struct State {
    calls: HashMap<u64, Pending>,
    links: HashMap<u64, Arc<Link>>,
    /// Small frames that nobody waits for.
    notes: Vec<HostFrame>,
    closed: Option<String>,
}

#[derive(Debug)]
struct Pending {
    answer: oneshot::Sender<(Answer, Streams)>,
    streams: Streams,
    limit: usize,
}

/// What was streamed for a call so far.
#[derive(Debug, Default)]
pub(super) struct Streams {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
}

impl Shared {
    /// Enters a call that is about to be sent.
    ///
    /// # Errors
    /// When the channel is gone.
    pub(super) fn expect(
        &self,
        id: u64,
        limit_bytes: usize,
    ) -> Result<oneshot::Receiver<(Answer, Streams)>, ToolError> {
        let (answer, answered) = oneshot::channel();
        let mut state = self.state.lock();
        if state.closed.is_some() {
            drop(state);
            return Err(self.closed());
        }
        state.calls.insert(id, Pending { answer, streams: Streams::default(), limit: limit_bytes });
        Ok(answered)
    }

    /// Enters a program that is about to be attached.
    ///
    /// # Errors
    /// When the channel is gone.
    pub(super) fn link(&self, id: u64, link: &Arc<Link>) -> Result<(), ToolError> {
        let mut state = self.state.lock();
        if state.closed.is_some() {
            drop(state);
            return Err(self.closed());
        }
        state.links.insert(id, Arc::clone(link));
        Ok(())
    }

    /// Forgets a program, and has the guest end it if it still runs.
    pub(super) fn unlink(&self, id: u64) {
        let known = self.state.lock().links.remove(&id);
        if let Some(link) = known {
            link.lost();
            self.note(HostFrame::Cancel { id });
        }
    }

    /// Has a small frame sent soon, behind all that waits in the queue already.
    pub(super) fn note(&self, frame: HostFrame) {
        self.state.lock().notes.push(frame);
        self.noted.notify_one();
    }

    /// Ends every call; the first reason stays.
    pub(super) fn close(&self, reason: String) {
        let (calls, links) = {
            let mut state = self.state.lock();
            state.closed.get_or_insert(reason);
            (std::mem::take(&mut state.calls), std::mem::take(&mut state.links))
        };
        drop(calls);
        for link in links.values() {
            link.lost();
        }
        self.dead.cancel();
    }

    /// Returns the error that says why the channel is gone.
    pub(super) fn closed(&self) -> ToolError {
        let reason = self.state.lock().closed.clone();
        ToolError::ChannelClosed { reason: reason.unwrap_or_else(|| "end of file".to_owned()) }
    }

    /// Takes one frame in.
    ///
    /// # Errors
    /// Says what the guest did wrong.
    fn accept(&self, frame: GuestFrame) -> Result<(), String> {
        // What comes for somebody who has gone is of no use.
        match frame {
            GuestFrame::Output { id, stream, bytes } => {
                let mut state = self.state.lock();
                if let Some(call) = state.calls.get_mut(&id) {
                    return call.take(stream, &bytes.0);
                }
                let link = state.links.get(&id).cloned();
                drop(state);
                link.map_or(Ok(()), |link| link.output(stream, &bytes.0))
            }
            GuestFrame::Done { id, answer } => {
                let (call, link) = {
                    let mut state = self.state.lock();
                    (state.calls.remove(&id), state.links.remove(&id))
                };
                match (call, link) {
                    // The caller may have gone just now.
                    (Some(call), _) => drop(call.answer.send((answer, call.streams))),
                    (None, Some(link)) => link.ended(answer),
                    (None, None) => {}
                }
                Ok(())
            }
            GuestFrame::Credit { id, bytes } => {
                if let Some(link) = self.linked(id) {
                    link.credit(bytes);
                }
                Ok(())
            }
            GuestFrame::Closed { id, stream } => {
                if let Some(link) = self.linked(id) {
                    link.closed(stream);
                }
                Ok(())
            }
            GuestFrame::Fatal { message } => Err(format!("guest gave up: {message}")),
        }
    }

    fn linked(&self, id: u64) -> Option<Arc<Link>> {
        self.state.lock().links.get(&id).cloned()
    }
}

impl Pending {
    fn take(&mut self, stream: Stream, bytes: &[u8]) -> Result<(), String> {
        let kept = match stream {
            Stream::Stdout => &mut self.streams.stdout,
            Stream::Stderr => &mut self.streams.stderr,
            Stream::Stdin => return Err("guest sent output from an input".to_owned()),
        };
        if kept.len() + bytes.len() > self.limit {
            return Err(format!("guest sent more than the {} bytes that were asked for", self.limit));
        }
        kept.extend_from_slice(bytes);
        Ok(())
    }
}

/// Forgets a call when its caller goes away, and has the guest end it.
pub(super) struct CancelOnDrop<'a> {
    pub(super) shared: &'a Shared,
    pub(super) id: u64,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        let known = self.shared.state.lock().calls.remove(&self.id).is_some();
        if known {
            self.shared.note(HostFrame::Cancel { id: self.id });
        }
    }
}

/// Reads frames until the channel ends.
pub(super) async fn read(mut channel: OwnedReadHalf, shared: Arc<Shared>) {
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 * 1024];
    let reason = 'closed: loop {
        match channel.read(&mut buffer).await {
            Ok(0) => break "end of file".to_owned(),
            Ok(n) => decoder.push(&buffer[..n]),
            Err(err) => break err.to_string(),
        }
        loop {
            match decoder.pop::<GuestFrame>() {
                Ok(Some(frame)) => {
                    if let Err(fault) = shared.accept(frame) {
                        break 'closed fault;
                    }
                }
                Ok(None) => break,
                Err(err) => break 'closed format!("guest sent no frame: {err}"),
            }
        }
    };
    tracing::debug!(reason, "tool channel closed");
    shared.close(reason);
}

/// Writes frames and notes until the channel ends.
pub(super) async fn write(mut channel: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>, shared: Arc<Shared>) {
    let mut frames = Vec::new();
    loop {
        tokio::select! {
            () = shared.dead.cancelled() => return,
            n_taken = queue.recv_many(&mut frames, QUEUE_FRAMES) => if n_taken == 0 { return },
            () = shared.noted.notified() => {}
        }
        // A note is about a request that was queued before it was made. What is in the queue once the notes are taken, which
        // is no more than it holds, goes first.
        let notes = std::mem::take(&mut shared.state.lock().notes);
        frames.extend(std::iter::from_fn(|| queue.try_recv().ok()).take(QUEUE_FRAMES));
        frames.push(notes.iter().filter_map(|note| frame::encode(note).ok()).flatten().collect());
        for bytes in frames.drain(..) {
            if let Err(err) = channel.write_all(&bytes).await {
                return shared.close(err.to_string());
            }
        }
    }
}
