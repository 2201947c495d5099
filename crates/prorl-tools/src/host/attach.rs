//! Programs whose streams are attached.

use std::{sync::Arc, task::Poll};

use parking_lot::Mutex;
use prorl_core::frame;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{
    channel::Shared,
    client::{ToolError, wrong},
    outbox::Outbox,
};
use crate::wire::{Answer, AttachAnswer, Bytes, HostFrame, Steer, Stream, WindowSize};

/// Bytes of each output that the guest may send ahead of its reader.
pub(super) const WINDOW_BYTES: u64 = 256 * 1024;

/// Bytes of input that travel in one frame.
const PIECE_BYTES: usize = 64 * 1024;

/// A program to run in the sandbox with its streams attached, without a shell.
#[derive(Clone, Debug)]
pub struct AttachSpec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables set over the sandbox's own.
    pub env: Vec<(String, String)>,
    /// Folder to run in; the sandbox's own when absent.
    pub cwd: Option<String>,
    /// A terminal of this size, which is the program's controlling one, instead of three pipes. It echoes and edits lines,
    /// and what is written to standard error comes with the rest.
    pub terminal: Option<WindowSize>,
}

impl AttachSpec {
    /// Returns a program with arguments and pipes.
    pub fn new<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        Self { argv: argv.into_iter().map(Into::into).collect(), env: Vec::new(), cwd: None, terminal: None }
    }
}

/// A program that runs with its streams attached.
///
/// Dropping it has the guest kill the program with all that it started. The streams may be taken out, to be used side by
/// side; those that are not are closed with it.
#[derive(Debug)]
pub struct Attached {
    /// What the program reads. Dropping it is the end of the program's input.
    pub stdin: Option<Input>,
    /// What it writes to standard output or to its terminal.
    pub stdout: Option<Output>,
    /// What it writes to standard error; absent in a terminal.
    pub stderr: Option<Output>,
    handle: Handle,
}

/// What every part of an attached program needs.
#[derive(Clone, Debug)]
struct Handle {
    id: u64,
    link: Arc<Link>,
    shared: Arc<Shared>,
}

impl Handle {
    fn steer(&self, steer: Steer) {
        if !self.link.done.is_cancelled() {
            self.shared.note(HostFrame::Steer { id: self.id, steer });
        }
    }
}

impl Attached {
    pub(super) fn new(id: u64, link: Arc<Link>, shared: Arc<Shared>, outbox: Arc<Outbox>) -> Self {
        let outputs = link.n_outputs;
        let handle = Handle { id, link, shared };
        let output = |stream| Output { handle: handle.clone(), stream, owed: 0 };
        Self {
            stdin: Some(Input { handle: handle.clone(), outbox }),
            stdout: Some(output(Stream::Stdout)),
            stderr: (outputs == Outputs::Two).then(|| output(Stream::Stderr)),
            handle,
        }
    }

    /// Waits until the guest says that the program runs.
    pub(super) async fn started(&self) -> Result<(), ToolError> {
        let Handle { link, shared, .. } = &self.handle;
        loop {
            match link.input() {
                InputState::Open => return Ok(()),
                InputState::Full => link.input_moved.notified().await,
                InputState::Lost => return Err(shared.closed()),
                // It has ended already, or was never there.
                InputState::Closed => return self.wait().await.map(drop),
            }
        }
    }

    /// Tells the program's terminal its size, at which the kernel sends the foreground a SIGWINCH. Without a terminal, or
    /// after the end, it does nothing.
    pub fn resize(&self, size: WindowSize) {
        self.handle.steer(Steer::Resize(size));
    }

    /// Sends a signal to the program's process group, or to the one in the foreground of its terminal. After the end it does
    /// nothing.
    pub fn signal(&self, number: i32) {
        self.handle.steer(Steer::Signal(number));
    }

    /// Waits for the end of the program. All of its output has come by then, so somebody has to read the outputs meanwhile,
    /// or to drop them. What children in the background write later is not waited for.
    ///
    /// # Errors
    /// [`ToolError::ChannelClosed`] when the sandbox is gone.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing, and several may wait.
    pub async fn wait(&self) -> Result<AttachAnswer, ToolError> {
        match self.answer().await? {
            Answer::Attach(answer) => Ok(answer),
            other => Err(wrong(other)),
        }
    }

    /// Waits for the answer, of whatever kind.
    pub(super) async fn answer(&self) -> Result<Answer, ToolError> {
        let link = &self.handle.link;
        link.done.cancelled().await;
        let end = link.state.lock().end.clone();
        end.ok_or_else(|| self.handle.shared.closed())
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.handle.shared.unlink(self.handle.id);
    }
}

/// The input of an attached program. Dropping it is the end of the input.
#[derive(Debug)]
pub struct Input {
    handle: Handle,
    outbox: Arc<Outbox>,
}

impl Input {
    /// Sends bytes, waiting while the program does not read.
    ///
    /// # Errors
    /// [`ToolError::InputClosed`] when the program has ended or closed its input, as a broken pipe;
    /// [`ToolError::ChannelClosed`] when the sandbox is gone.
    ///
    /// # Cancel safety
    /// A dropped call may have sent the beginning.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), ToolError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            self.writable().await?;
            // Credit only grows meanwhile: nobody else writes.
            let place = self.outbox.reserve().await.ok_or_else(|| self.handle.shared.closed())?;
            let piece = self.handle.link.spend(rest.len().min(PIECE_BYTES));
            let (piece, after) = rest.split_at(piece);
            let input = Steer::Input(Bytes(piece.to_vec()));
            place.send(
                frame::encode(&HostFrame::Steer { id: self.handle.id, steer: input }).map_err(ToolError::Request)?,
            );
            rest = after;
        }
        Ok(())
    }

    /// Waits until the program takes something.
    async fn writable(&self) -> Result<(), ToolError> {
        let Handle { link, shared, .. } = &self.handle;
        loop {
            match link.input() {
                InputState::Open => return Ok(()),
                InputState::Full => link.input_moved.notified().await,
                InputState::Lost => return Err(shared.closed()),
                InputState::Closed => return Err(ToolError::InputClosed),
            }
        }
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        self.handle.steer(Steer::Close(Stream::Stdin));
    }
}

/// An output of an attached program. Dropping it closes the program's end too, as that of a pipe without a reader.
#[derive(Debug)]
pub struct Output {
    handle: Handle,
    stream: Stream,
    /// Bytes read that the guest has not been given credit for.
    owed: u64,
}

impl Output {
    /// Waits for the next bytes; `None` at the end, which is that of the program, of the sandbox, or of this output alone.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Poll::Ready(found) = self.take() {
                return found;
            }
            self.handle.link.moved(self.stream).notified().await;
        }
    }

    /// Takes what is there, or the end.
    fn take(&mut self) -> Poll<Option<Vec<u8>>> {
        let mut state = self.handle.link.state.lock();
        let held = state.held(self.stream);
        if held.bytes.is_empty() {
            return if held.is_closed { Poll::Ready(None) } else { Poll::Pending };
        }
        let bytes = std::mem::take(&mut held.bytes);
        self.owed += bytes.len() as u64;
        if self.owed >= WINDOW_BYTES / 4 {
            let bytes = std::mem::take(&mut self.owed);
            held.credit += bytes;
            drop(state);
            self.handle.steer(Steer::Credit { stream: self.stream, bytes });
        }
        Poll::Ready(Some(bytes))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let mut state = self.handle.link.state.lock();
        let held = state.held(self.stream);
        held.bytes = Vec::new();
        if !std::mem::replace(&mut held.is_closed, true) {
            drop(state);
            self.handle.steer(Steer::Close(self.stream));
        }
    }
}

/// How many outputs there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outputs {
    One,
    Two,
}

/// What came for an attached program, between the channel and those who use it.
#[derive(Debug)]
pub(super) struct Link {
    n_outputs: Outputs,
    state: Mutex<LinkState>,
    input_moved: Notify,
    stdout_moved: Notify,
    stderr_moved: Notify,
    /// Nothing comes any more.
    done: CancellationToken,
}

#[derive(Debug)]
struct LinkState {
    /// Bytes of input that the guest takes.
    credit: u64,
    is_input_closed: bool,
    outputs: [Held; 2],
    end: Option<Answer>,
    /// Whether the channel is gone, or the program given up.
    is_lost: bool,
}

/// Whether a program takes input.
enum InputState {
    Open,
    /// Not before there is credit again.
    Full,
    Closed,
    /// The channel is gone, or nobody wants the program any more.
    Lost,
}

/// Output that was not read yet.
#[derive(Debug)]
struct Held {
    bytes: Vec<u8>,
    /// Bytes that the guest may still send.
    credit: u64,
    is_closed: bool,
}

impl LinkState {
    fn held(&mut self, stream: Stream) -> &mut Held {
        &mut self.outputs[usize::from(stream == Stream::Stderr)]
    }
}

impl Link {
    pub(super) fn new(n_outputs: Outputs) -> Self {
        let held = || Held { bytes: Vec::new(), credit: WINDOW_BYTES, is_closed: false };
        let state =
            LinkState { credit: 0, is_input_closed: false, outputs: [held(), held()], end: None, is_lost: false };
        Self {
            n_outputs,
            state: Mutex::new(state),
            input_moved: Notify::new(),
            stdout_moved: Notify::new(),
            stderr_moved: Notify::new(),
            done: CancellationToken::new(),
        }
    }

    fn moved(&self, stream: Stream) -> &Notify {
        match stream {
            Stream::Stdin => &self.input_moved,
            Stream::Stdout => &self.stdout_moved,
            Stream::Stderr => &self.stderr_moved,
        }
    }

    fn input(&self) -> InputState {
        let state = self.state.lock();
        match *state {
            LinkState { is_lost: true, .. } => InputState::Lost,
            LinkState { is_input_closed: true, .. } | LinkState { end: Some(_), .. } => InputState::Closed,
            LinkState { credit: 0, .. } => InputState::Full,
            LinkState { .. } => InputState::Open,
        }
    }

    /// Takes as much credit as there is for `wanted` bytes; returns how much.
    fn spend(&self, wanted: usize) -> usize {
        let mut state = self.state.lock();
        let spent = wanted.min(usize::try_from(state.credit).unwrap_or(usize::MAX));
        state.credit -= spent as u64;
        spent
    }

    /// Takes output in.
    ///
    /// # Errors
    /// When it is more than was asked for.
    pub(super) fn output(&self, stream: Stream, bytes: &[u8]) -> Result<(), String> {
        let mut state = self.state.lock();
        let held = state.held(stream);
        let len = bytes.len() as u64;
        let Some(left) = held.credit.checked_sub(len).filter(|_| stream != Stream::Stdin) else {
            return Err(format!("guest sent {len} bytes of output where {} were asked for", held.credit));
        };
        held.credit = left;
        if !held.is_closed {
            held.bytes.extend_from_slice(bytes);
            drop(state);
            self.moved(stream).notify_one();
        }
        Ok(())
    }

    pub(super) fn credit(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.credit = state.credit.saturating_add(bytes);
        drop(state);
        self.input_moved.notify_one();
    }

    pub(super) fn closed(&self, stream: Stream) {
        let mut state = self.state.lock();
        match stream {
            Stream::Stdin => state.is_input_closed = true,
            output => state.held(output).is_closed = true,
        }
        drop(state);
        self.moved(stream).notify_one();
    }

    pub(super) fn ended(&self, answer: Answer) {
        self.finish(|state| state.end = Some(answer));
    }

    /// The channel is gone, or nobody wants the program any more.
    pub(super) fn lost(&self) {
        self.finish(|state| state.is_lost = true);
    }

    fn finish(&self, how: impl FnOnce(&mut LinkState)) {
        let mut state = self.state.lock();
        how(&mut state);
        for held in &mut state.outputs {
            held.is_closed = true;
        }
        drop(state);
        self.done.cancel();
        for stream in [Stream::Stdin, Stream::Stdout, Stream::Stderr] {
            self.moved(stream).notify_one();
        }
    }
}
