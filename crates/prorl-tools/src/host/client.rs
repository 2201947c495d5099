//! The client: one channel, many calls in flight.

use std::{
    net::Shutdown,
    ops::Range,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prorl_core::frame::{self, FrameError};
use tokio::{net::UnixStream, task::JoinSet, time::timeout};

use super::{
    attach::{AttachSpec, Attached, Link, Outputs, WINDOW_BYTES},
    channel::{CancelOnDrop, Shared, Shown, Streams, read},
    outbox::{Outbox, outbox},
};
use crate::tree::TreeError;
use crate::wire::{
    Answer, Attach, Bash, BashAnswer, Bytes, Captured, CellEnd, Edit, EditAnswer, Exec, ExitStatus, HostFrame, Ipython,
    IpythonAnswer, Op, ReadFile, Request, Rest, WriteFile,
};

/// How long after its limit a call's answer comes at the latest: the time in which a guest interrupts, kills and reports.
///
/// A caller with a deadline keeps this much free (`Deadline::reserve`). Past it the guest is taken for dead.
pub const ANSWER_GRACE: Duration = Duration::from_secs(5);

/// Bytes of a file that travel in one frame.
const PIECE_BYTES: usize = 1024 * 1024;

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// The channel is gone, and with it the sandbox.
    #[error("channel to the guest closed: {reason}")]
    ChannelClosed {
        /// What was seen.
        reason: String,
    },
    /// The guest is there and says nothing.
    #[error("guest gave no answer in {waited:?}")]
    NoAnswer {
        /// How long it was waited for: the call's limit and [`ANSWER_GRACE`].
        waited: Duration,
    },
    /// The request has no frame, most likely because it is too large.
    #[error("request cannot be sent")]
    Request(#[source] FrameError),
    /// The guest answered that it could not be done: a program or file that is not there, a full disk. Its words.
    #[error("{message}")]
    Failed {
        /// Why.
        message: String,
    },
    /// An attached program has ended or closed its input.
    #[error("program reads no more input")]
    InputClosed,
    /// A file or folder cannot be read or made on this side.
    #[error("file or folder cannot be sent or made here")]
    Tree(#[source] TreeError),
    /// The answer is of another kind than the request.
    #[error("guest answered with something else")]
    WrongAnswer,
}

impl ToolError {
    /// Tells whether the guest or the channel is at fault, and not what was asked for.
    pub fn is_infrastructure(&self) -> bool {
        match self {
            Self::Failed { .. } | Self::Request(_) | Self::InputClosed => false,
            Self::Tree(err) => matches!(err, TreeError::Record(_)),
            Self::ChannelClosed { .. } | Self::NoAnswer { .. } | Self::WrongAnswer => true,
        }
    }
}

/// A program to run in the sandbox, without a shell.
#[derive(Clone, Debug)]
pub struct ExecSpec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables set over the sandbox's own.
    pub env: Vec<(String, String)>,
    /// Folder to run in; the sandbox's own when absent.
    pub cwd: Option<String>,
    /// What the program reads from standard input.
    pub stdin: Vec<u8>,
    /// Bytes kept of each output, half from its beginning and half from its end.
    pub output_limit_bytes: usize,
}

impl ExecSpec {
    /// Returns a program with arguments, no input, and 1 MiB kept of each output.
    pub fn new<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            cwd: None,
            stdin: Vec::new(),
            output_limit_bytes: 1024 * 1024,
        }
    }
}

/// What a program did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecOutput {
    /// How it ended.
    pub status: ExitStatus,
    /// Whether its limit passed, so that it was killed with all that it had started.
    pub timed_out: bool,
    /// Standard output.
    pub stdout: Captured,
    /// Standard error.
    pub stderr: Captured,
}

impl ExecOutput {
    /// Tells whether it ended by itself with code 0.
    pub fn success(&self) -> bool {
        self.status == ExitStatus::Code(0) && !self.timed_out
    }

    /// Tells whether bytes of either output are missing.
    pub fn truncated(&self) -> bool {
        self.stdout.omitted() + self.stderr.omitted() > 0
    }
}

/// A bash command, or what to type into the one that runs.
#[derive(Clone, Debug)]
pub struct BashCall {
    /// Names the shell.
    pub session: String,
    /// The command, or a line of text, `C-c` or `C-d`.
    pub command: String,
    /// Whether it is typed into the running command.
    pub is_input: bool,
    /// Returns after this long without output, leaving the command running.
    pub silence: Option<Duration>,
}

impl BashCall {
    /// Returns a command for the session `main`, without a silence limit.
    pub fn new(command: impl Into<String>) -> Self {
        Self { session: "main".to_owned(), command: command.into(), is_input: false, silence: None }
    }

    /// Returns text to type into the command that runs in the session `main`.
    pub fn input(text: impl Into<String>) -> Self {
        Self { is_input: true, ..Self::new(text) }
    }
}

/// A Python cell.
#[derive(Clone, Debug)]
pub struct CellCall {
    /// Names the interpreter.
    pub session: String,
    /// The cell.
    pub code: String,
    /// Whether tracebacks are coloured by escape sequences.
    pub color: bool,
}

impl CellCall {
    /// Returns a cell for the session `main`, without colours.
    pub fn new(code: impl Into<String>) -> Self {
        Self { session: "main".to_owned(), code: code.into(), color: false }
    }
}

/// What a Python cell did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellOutput {
    /// What it printed: standard output, standard error, the last expression's value and tracebacks, in order.
    pub output: Captured,
    /// How it ended.
    pub end: CellEnd,
    /// Why the interpreter that ran before is gone; the next cell finds a new one.
    pub restarted: Option<String>,
    /// What it has shown that is more than text, in order.
    pub shown: Vec<Shown>,
}

/// Some of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePart {
    /// What was read.
    pub bytes: Vec<u8>,
    /// Bytes that the whole file has.
    pub size: u64,
}

/// A guest at the other end of a channel, after its hello was read.
///
/// Calls run side by side. Dropping the client closes the channel, at which the guest ends everything inside.
#[derive(Debug)]
pub struct ToolClient {
    shared: Arc<Shared>,
    outbox: Arc<Outbox>,
    next_id: AtomicU64,
    /// The channel itself, to shut it down at once when the client is dropped: the tasks only end when the runtime comes to
    /// them. Absent when there were no descriptors left for it.
    channel: Option<std::os::unix::net::UnixStream>,
    /// Reader and writer; dropping the set ends both.
    _tasks: JoinSet<()>,
}

impl Drop for ToolClient {
    fn drop(&mut self) {
        if let Some(channel) = &self.channel {
            // One that is already gone is what was wanted.
            let _shut = channel.shutdown(Shutdown::Both);
        }
        // The tasks that would see it end with this client.
        self.shared.close("client was dropped".to_owned());
    }
}

impl ToolClient {
    /// Takes over a channel whose hello has been read. Call it inside a tokio runtime.
    pub fn new(channel: UnixStream) -> Self {
        let shared = Arc::new(Shared::default());
        let handle = channel.as_fd().try_clone_to_owned().ok().map(Into::into);
        let (reader, writer) = channel.into_split();
        let (outbox, writer) = outbox(writer);
        let mut tasks = JoinSet::new();
        tasks.spawn(read(reader, Arc::clone(&shared)));
        tasks.spawn(writer.run(Arc::clone(&shared)));
        Self { shared, outbox: Arc::new(outbox), next_id: AtomicU64::new(1), channel: handle, _tasks: tasks }
    }

    /// Resolves when the channel is gone, and at once when it already is.
    pub async fn closed(&self) {
        self.shared.dead.cancelled().await;
    }

    /// Tells whether the channel is gone.
    pub fn is_closed(&self) -> bool {
        self.shared.dead.is_cancelled()
    }

    /// Runs a program to its end, or kills it with all that it started when `limit` passes.
    ///
    /// # Errors
    /// [`ToolError::Failed`] when the program cannot be started.
    ///
    /// # Cancel safety
    /// Dropping the call has the guest kill what it started.
    pub async fn exec(&self, spec: &ExecSpec, limit: Duration) -> Result<ExecOutput, ToolError> {
        let op = Op::Exec(Exec {
            argv: spec.argv.clone(),
            env: spec.env.clone(),
            cwd: spec.cwd.clone(),
            stdin: Bytes(spec.stdin.clone()),
            output_limit: spec.output_limit_bytes as u64,
        });
        let (answer, streams) = self.call(op, limit, spec.output_limit_bytes).await?;
        let Answer::Exec(done) = answer else { return Err(wrong(answer)) };
        let captured = |head: Vec<u8>, rest: Rest| Captured { head: Bytes(head), tail: rest.tail, total: rest.total };
        Ok(ExecOutput {
            status: done.status,
            timed_out: done.timed_out,
            stdout: captured(streams.stdout, done.stdout),
            stderr: captured(streams.stderr, done.stderr),
        })
    }

    /// Runs a bash command, or types into the one that runs.
    ///
    /// # Errors
    /// Only for the channel and the guest: what a command can do to itself or its shell is in the answer.
    ///
    /// # Cancel safety
    /// Dropping the call has the guest interrupt the command; the session stays.
    pub async fn bash(&self, call: &BashCall, limit: Duration) -> Result<BashAnswer, ToolError> {
        let op = Op::Bash(Bash {
            session: call.session.clone(),
            command: call.command.clone(),
            is_input: call.is_input,
            silence_ms: call.silence.map_or(0, millis),
        });
        match self.call(op, limit, 0).await? {
            (Answer::Bash(answer), _) => Ok(answer),
            (other, _) => Err(wrong(other)),
        }
    }

    /// Runs a Python cell in the session `main`, without colours.
    ///
    /// # Errors
    /// As [`bash`](Self::bash).
    ///
    /// # Cancel safety
    /// As [`bash`](Self::bash).
    pub async fn ipython(&self, code: &str, limit: Duration) -> Result<CellOutput, ToolError> {
        self.cell(&CellCall::new(code), limit).await
    }

    /// Runs a Python cell.
    ///
    /// # Errors
    /// As [`bash`](Self::bash).
    ///
    /// # Cancel safety
    /// As [`bash`](Self::bash).
    pub async fn cell(&self, call: &CellCall, limit: Duration) -> Result<CellOutput, ToolError> {
        let CellCall { session, code, color } = call.clone();
        match self.call(Op::Ipython(Ipython { session, code, color }), limit, 0).await? {
            (Answer::Ipython(IpythonAnswer { output, end, restarted }), streams) => {
                Ok(CellOutput { output, end, restarted, shown: streams.shown })
            }
            (other, _) => Err(wrong(other)),
        }
    }

    /// Views or changes a file as the `str_replace_editor` does.
    ///
    /// # Errors
    /// As [`bash`](Self::bash): what cannot be done is in the answer.
    ///
    /// # Cancel safety
    /// A dropped call may have been carried out or not, and nothing in between.
    pub async fn edit(&self, edit: &Edit, limit: Duration) -> Result<EditAnswer, ToolError> {
        match self.call(Op::Edit(edit.clone()), limit, 0).await? {
            (Answer::Edit(answer), _) => Ok(answer),
            (other, _) => Err(wrong(other)),
        }
    }

    /// Writes a file, making its folders. `mode` is for a file that is made. Each of its pieces has `limit`.
    ///
    /// # Errors
    /// [`ToolError::Failed`] with the system's words when it cannot be written.
    ///
    /// # Cancel safety
    /// A dropped call may leave the beginning of the file.
    pub async fn write_file(&self, path: &str, bytes: &[u8], mode: u32, limit: Duration) -> Result<(), ToolError> {
        let mut append = false;
        let mut rest = bytes;
        loop {
            let (piece, after) = rest.split_at(rest.len().min(PIECE_BYTES));
            let op = Op::WriteFile(WriteFile { path: path.to_owned(), bytes: Bytes(piece.to_vec()), mode, append });
            match self.call(op, limit, 0).await?.0 {
                Answer::Written => {}
                other => return Err(wrong(other)),
            }
            if after.is_empty() {
                return Ok(());
            }
            (rest, append) = (after, true);
        }
    }

    /// Reads a file from its beginning, `limit_bytes` at most. The answer's `total` is the size of the file.
    ///
    /// # Errors
    /// [`ToolError::Failed`] with the system's words when it cannot be read.
    pub async fn read_file(&self, path: &str, limit_bytes: usize, limit: Duration) -> Result<Captured, ToolError> {
        let FilePart { bytes, size } = self.read_range(path, 0..limit_bytes as u64, limit).await?;
        Ok(Captured { head: Bytes(bytes), tail: Bytes::default(), total: size })
    }

    /// Reads the bytes of a file from one place to another, as far as it has them.
    ///
    /// # Errors
    /// As [`read_file`](Self::read_file).
    pub async fn read_range(&self, path: &str, range: Range<u64>, limit: Duration) -> Result<FilePart, ToolError> {
        let n_bytes = range.end.saturating_sub(range.start);
        let limit_bytes = usize::try_from(n_bytes).unwrap_or(usize::MAX);
        let op = Op::ReadFile(ReadFile { path: path.to_owned(), offset: range.start, limit: n_bytes });
        match self.call(op, limit, limit_bytes).await? {
            (Answer::Read { total: size }, streams) => Ok(FilePart { bytes: streams.stdout, size }),
            (other, _) => Err(wrong(other)),
        }
    }

    /// Starts a program whose input and outputs are streamed, through pipes or in a terminal, and which may run for `limit`.
    ///
    /// Each stream has its own window of a quarter of a mebibyte: a reader that is slow holds up this program as a full pipe
    /// would, and no other call.
    ///
    /// # Errors
    /// [`ToolError::Failed`] when the program cannot be started.
    ///
    /// # Cancel safety
    /// Dropping the call has the guest kill what it started.
    pub async fn attach(&self, spec: &AttachSpec, limit: Duration) -> Result<Attached, ToolError> {
        let op = Op::Attach(Attach {
            argv: spec.argv.clone(),
            env: spec.env.clone(),
            cwd: spec.cwd.clone(),
            terminal: spec.terminal,
            window: WINDOW_BYTES,
        });
        let outputs = if spec.terminal.is_some() { Outputs::One } else { Outputs::Two };
        let starting = async {
            let attached = self.open(op, outputs, limit).await?;
            attached.started().await?;
            Ok(attached)
        };
        timeout(ANSWER_GRACE, starting).await.unwrap_or(Err(ToolError::NoAnswer { waited: ANSWER_GRACE }))
    }

    /// Sends a request whose streams are attached.
    pub(super) async fn open(&self, op: Op, outputs: Outputs, limit: Duration) -> Result<Attached, ToolError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let request = HostFrame::Request(Request { id, timeout_ms: millis(limit), op });
        let bytes = frame::encode(&request).map_err(ToolError::Request)?;
        let place = self.outbox.reserve().await.ok_or_else(|| self.shared.closed())?;
        let link = Arc::new(Link::new(outputs));
        self.shared.link(id, &link)?;
        let attached = Attached::new(id, link, Arc::clone(&self.shared), Arc::clone(&self.outbox));
        place.send(bytes);
        Ok(attached)
    }

    async fn call(&self, op: Op, limit: Duration, limit_bytes: usize) -> Result<(Answer, Streams), ToolError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let request = HostFrame::Request(Request { id, timeout_ms: millis(limit), op });
        let bytes = frame::encode(&request).map_err(ToolError::Request)?;
        let waited = limit.saturating_add(ANSWER_GRACE);
        let work = async {
            let place = self.outbox.reserve().await.ok_or_else(|| self.shared.closed())?;
            let answered = self.shared.expect(id, limit_bytes)?;
            let _cancel = CancelOnDrop { shared: &self.shared, id };
            place.send(bytes);
            answered.await.map_err(|_gone| self.shared.closed())
        };
        match timeout(waited, work).await {
            Ok(result) => result,
            Err(_elapsed) => Err(ToolError::NoAnswer { waited }),
        }
    }
}

pub(super) fn wrong(answer: Answer) -> ToolError {
    match answer {
        Answer::Failed { message } => ToolError::Failed { message },
        _ => ToolError::WrongAnswer,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
