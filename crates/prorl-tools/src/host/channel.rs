//! What runs on the channel: a task that reads, and the table of who waits for what. What is written goes by the
//! [outbox](super::outbox).
//!
//! The reader never waits for anybody, so a slow caller holds up no other. What can become much has a limit that the guest
//! knows before it sends.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use prorl_core::frame::Decoder;
use tokio::{
    io::AsyncReadExt,
    net::unix::OwnedReadHalf,
    sync::{Notify, oneshot},
};
use tokio_util::sync::CancellationToken;

use super::{attach::Link, client::ToolError};
use crate::wire::{Answer, GuestFrame, HostFrame, Stream};

/// Bytes that are taken in before others get their turn on this thread: at most, and where somebody was answered among them.
const TURN_BYTES: usize = 256 * 1024;
const SOME_BYTES: usize = 4 * 1024;

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
    pub(super) shown: Vec<Shown>,
}

/// Something that a cell has shown and that is more than text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// How many bytes the cell had printed before.
    pub at: u64,
    /// What it is: `image/png`, `text/html`, `text/markdown` and the like.
    pub mime: String,
    /// It, as its type has it: not in base64.
    pub data: Vec<u8>,
}

/// What a guest may have shown of one cell.
const MAX_SHOWN: usize = 32;
const MAX_SHOWN_BYTES: usize = 8 * 1024 * 1024;

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

    /// Waits until there are notes.
    pub(super) async fn noted(&self) {
        self.noted.notified().await;
    }

    pub(super) fn take_notes(&self) -> Vec<HostFrame> {
        std::mem::take(&mut self.state.lock().notes)
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

    /// Takes one frame in. Tells whether somebody has waited for it.
    ///
    /// # Errors
    /// Says what the guest did wrong.
    fn accept(&self, frame: GuestFrame) -> Result<bool, String> {
        let is_answer = matches!(frame, GuestFrame::Done { .. });
        self.take(frame).map(|()| is_answer)
    }

    fn take(&self, frame: GuestFrame) -> Result<(), String> {
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
            GuestFrame::Shown { id, at, mime, data } => {
                let mut state = self.state.lock();
                let Some(call) = state.calls.get_mut(&id) else { return Ok(()) };
                let shown = &mut call.streams.shown;
                let n_bytes = shown.iter().map(|one| one.data.len()).sum::<usize>() + data.0.len();
                if shown.len() >= MAX_SHOWN || n_bytes > MAX_SHOWN_BYTES {
                    return Err(format!(
                        "guest showed more of a cell than {MAX_SHOWN} things or {MAX_SHOWN_BYTES} bytes"
                    ));
                }
                shown.push(Shown { at, mime, data: data.0 });
                Ok(())
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
    let mut n_taken = 0;
    let reason = 'closed: loop {
        match channel.read(&mut buffer).await {
            Ok(0) => break "end of file".to_owned(),
            Ok(n) => {
                decoder.push(&buffer[..n]);
                n_taken += n;
            }
            Err(err) => break err.to_string(),
        }
        let mut has_answered = false;
        loop {
            match decoder.pop::<GuestFrame>() {
                Ok(Some(frame)) => match shared.accept(frame) {
                    Ok(is_answer) => has_answered |= is_answer,
                    Err(fault) => break 'closed fault,
                },
                Ok(None) => break,
                Err(err) => break 'closed format!("guest sent no frame: {err}"),
            }
        }
        // While a guest floods the channel there is always more to read, and whoever was answered may be behind this task.
        if n_taken >= if has_answered { SOME_BYTES } else { TURN_BYTES } {
            n_taken = 0;
            tokio::task::yield_now().await;
        }
    };
    tracing::debug!(reason, "tool channel closed");
    shared.close(reason);
}
