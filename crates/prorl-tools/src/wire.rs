//! What guest and host say to each other after the hello: plain types for [`prorl_core::frame`].
//!
//! Many requests are in flight at once, told apart by `id`. Each ends with exactly one [`GuestFrame::Done`], also when it was
//! cancelled or its limit passed. Lengths and times are counted by the guest, so that they hold when the host is slow.
//!
//! What a request may make the other side hold is bounded when it is made, except for [`Op::Attach`], whose three streams have
//! no end that anyone knows, and for [`Op::Upload`] and [`Op::Download`], which have one each. Each stream has a window: its writer sends that much ahead of its reader and then waits for
//! [credit](Steer::Credit), while the channel itself is always read. So a slow reader holds up its own program alone.

#[cfg(feature = "guest")]
use serde::ser::SerializeStructVariant;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Visitor};

/// A frame from the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostFrame {
    /// Asks for something.
    Request(Request),
    /// Ends a request early; its `Done` still comes.
    Cancel {
        /// The request.
        id: u64,
    },
    /// Ends everything that was started, then the guest itself.
    Shutdown,
    /// Something for an attached program, in order; nothing comes of it once the program has ended.
    Steer {
        /// The request.
        id: u64,
        /// What.
        steer: Steer,
    },
}

/// What is done to an attached program while it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Steer {
    /// It gets this to read. The host sends no more of it than the guest gave [credit](GuestFrame::Credit) for.
    Input(Bytes),
    /// One of its streams ends: its input, or an output that nobody reads any more. In a terminal the end of the input is
    /// typed, and the end of the output is a hang-up.
    Close(Stream),
    /// As many more bytes of this output may be sent.
    Credit {
        /// The output.
        stream: Stream,
        /// How many.
        bytes: u64,
    },
    /// Its terminal has another size.
    Resize(WindowSize),
    /// Its process group gets this signal; in a terminal the one in the foreground does.
    Signal(i32),
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the host; never used twice on one channel.
    pub id: u64,
    /// How long the work may take, in milliseconds. Ending it may take a few seconds more.
    pub timeout_ms: u64,
    /// The work.
    pub op: Op,
}

/// What the guest can be asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Runs a program with pipes, without a shell.
    Exec(Exec),
    /// Runs a command in a bash session, or types into the one that runs there.
    Bash(Bash),
    /// Runs a cell in a Python session.
    Ipython(Ipython),
    /// Writes a file, or a piece of one.
    WriteFile(WriteFile),
    /// Reads a file from its beginning.
    ReadFile(ReadFile),
    /// Runs a program whose input and outputs are streamed both ways.
    Attach(Attach),
    /// Views or changes a file as the `str_replace_editor` does.
    Edit(Edit),
    /// Takes in a file or a folder, whose records come as [`Steer::Input`] until its input is closed.
    Upload(Upload),
    /// Sends a file or a folder, as records on [`Stream::Stdout`].
    Download(Download),
}

/// What the editor is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edit {
    /// Absolute path.
    pub path: String,
    /// What is done with it.
    pub change: Change,
    /// Characters of the answer's text at most.
    pub output_chars: u64,
}

/// What the editor does with a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// Shows it with numbers of lines, or a folder two levels deep.
    View {
        /// First and last line, counted from 1; no last one is the end of the file.
        range: Option<(u64, Option<u64>)>,
    },
    /// Makes it, where there is none.
    Create {
        /// All of its text.
        text: String,
    },
    /// Puts one text in the place of another, which must be there exactly once.
    Replace {
        /// What is there.
        old: String,
        /// What is to be.
        new: String,
    },
    /// Puts a text behind a line.
    Insert {
        /// The line, counted from 1; 0 is the beginning.
        after: u64,
        /// The text, which becomes lines of its own.
        text: String,
    },
    /// Takes the last change of this file back.
    Undo,
}

/// Where a file or a folder goes. Its records are those of [`crate::tree`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upload {
    /// Path that it will have; folders above it are made.
    pub to: String,
    /// Whether files that are there already are replaced; without it they are an error.
    pub replace: bool,
}

/// A file or a folder to send.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Download {
    /// Its path.
    pub from: String,
    /// Bytes of content at most.
    pub max_bytes: u64,
    /// Files, folders and links at most.
    pub max_entries: u64,
    /// Bytes of records that may be sent before the first credit.
    pub window: u64,
}

/// A program to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// Program and arguments; a program without a slash is looked up along PATH.
    pub argv: Vec<String>,
    /// Variables set over the sandbox's own.
    pub env: Vec<(String, String)>,
    /// Folder to run in; the sandbox's own when absent.
    pub cwd: Option<String>,
    /// What the program reads.
    pub stdin: Bytes,
    /// Bytes kept of each of the two outputs.
    pub output_limit: u64,
}

/// A program to run with its streams attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Program and arguments; a program without a slash is looked up along PATH.
    pub argv: Vec<String>,
    /// Variables set over the sandbox's own.
    pub env: Vec<(String, String)>,
    /// Folder to run in; the sandbox's own when absent.
    pub cwd: Option<String>,
    /// A terminal of this size that the program controls, instead of three pipes. Its output is all [`Stream::Stdout`].
    pub terminal: Option<WindowSize>,
    /// Bytes of each output that may be sent before the first credit.
    pub window: u64,
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

impl Default for WindowSize {
    /// Returns the size that terminals have when nobody says: 24 lines of 80 characters.
    fn default() -> Self {
        Self { rows: 24, columns: 80 }
    }
}

/// A bash command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bash {
    /// Names the shell; one is started when the name is new.
    pub session: String,
    /// The command, or what to type.
    pub command: String,
    /// Whether `command` is typed into the command that runs: a line of text, `C-` and a letter, or `C-\`; empty only
    /// waits.
    pub is_input: bool,
    /// Returns after this many milliseconds without output, leaving the command running; 0 for never.
    pub silence_ms: u64,
}

/// A Python cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipython {
    /// Names the interpreter; one is started when the name is new.
    pub session: String,
    /// The cell.
    pub code: String,
    /// Whether tracebacks are coloured by escape sequences.
    pub color: bool,
}

/// A piece of a file to write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteFile {
    /// Path; its folders are made.
    pub path: String,
    /// The piece.
    pub bytes: Bytes,
    /// Permission bits of a file that is made.
    pub mode: u32,
    /// Appends instead of replacing.
    pub append: bool,
}

/// A file to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFile {
    /// Path.
    pub path: String,
    /// Bytes passed over at its beginning.
    pub offset: u64,
    /// Bytes sent at most.
    pub limit: u64,
}

/// A frame from the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GuestFrame {
    /// Bytes that a request produced, in order per stream.
    Output {
        /// The request.
        id: u64,
        /// Where they come from.
        stream: Stream,
        /// The bytes.
        bytes: Bytes,
    },
    /// The end of a request.
    Done {
        /// The request.
        id: u64,
        /// What came of it.
        answer: Answer,
    },
    /// The guest cannot go on and ends.
    Fatal {
        /// Why.
        message: String,
    },
    /// An attached program takes as many more bytes of input. The first of these says that it runs.
    Credit {
        /// The request.
        id: u64,
        /// How many.
        bytes: u64,
    },
    /// An attached program has closed one of its streams: no more output comes from it, or no more input is of use.
    Closed {
        /// The request.
        id: u64,
        /// Which.
        stream: Stream,
    },
    /// A cell has shown something that is more than text.
    Shown {
        /// The request.
        id: u64,
        /// How many bytes the cell had printed before.
        at: u64,
        /// What it is: `image/png`, `text/html`, `text/markdown`, `image/svg+xml`, `image/jpeg`.
        mime: String,
        /// It, as its type has it: not in base64.
        data: Bytes,
    },
}

/// A [`GuestFrame::Output`] to send, of bytes that are not its own.
#[cfg(feature = "guest")]
pub(crate) struct OutputFrame<'a> {
    pub(crate) id: u64,
    pub(crate) stream: Stream,
    pub(crate) bytes: &'a [u8],
}

#[cfg(feature = "guest")]
impl Serialize for OutputFrame<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Run<'a>(&'a [u8]);
        impl Serialize for Run<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_bytes(self.0)
            }
        }
        let mut fields = serializer.serialize_struct_variant("GuestFrame", 0, "Output", 3)?;
        fields.serialize_field("id", &self.id)?;
        fields.serialize_field("stream", &self.stream)?;
        fields.serialize_field("bytes", &Run(self.bytes))?;
        fields.end()
    }
}

/// One of the streams of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stream {
    /// Standard output, or the content of a file.
    Stdout,
    /// Standard error.
    Stderr,
    /// Standard input.
    Stdin,
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Of [`Op::Exec`].
    Exec(ExecAnswer),
    /// Of [`Op::Bash`].
    Bash(BashAnswer),
    /// Of [`Op::Ipython`].
    Ipython(IpythonAnswer),
    /// Of [`Op::WriteFile`].
    Written,
    /// Of [`Op::ReadFile`].
    Read {
        /// Size of the file, which may be more than was sent.
        total: u64,
    },
    /// It could not be done, in words that fit a tool result.
    Failed {
        /// Why.
        message: String,
    },
    /// Of [`Op::Attach`].
    Attach(AttachAnswer),
    /// Of [`Op::Edit`].
    Edit(EditAnswer),
    /// Of [`Op::Upload`] and [`Op::Download`].
    Tree(TreeSummary),
}

/// What the editor says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditAnswer {
    /// For the agent.
    pub text: String,
    /// Whether nothing was done, for the reason that the text tells.
    pub is_refused: bool,
}

/// What came over of a file or folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeSummary {
    /// Files.
    pub n_files: u64,
    /// Folders, links and files together.
    pub n_entries: u64,
    /// Bytes of the files.
    pub n_bytes: u64,
    /// SHA-256 of all records, as the sender made and the receiver found it.
    pub sha256: [u8; 32],
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl ExitStatus {
    /// Returns the code as a shell would say it: 128 and the signal's number for a signal.
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// How an [`Exec`] ended. The first bytes of each output came as [`GuestFrame::Output`]; the last ones are here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecAnswer {
    /// How the program ended.
    pub status: ExitStatus,
    /// Whether its limit passed, so that it and all that it started was killed.
    pub timed_out: bool,
    /// Last bytes of standard output after those that were sent.
    pub stdout: Rest,
    /// Last bytes of standard error after those that were sent.
    pub stderr: Rest,
}

/// How an [`Attach`] ended. All of its output has come before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachAnswer {
    /// How the program ended.
    pub status: ExitStatus,
    /// Whether its limit passed, so that it and all that it started was killed.
    pub timed_out: bool,
}

/// The end of an output whose beginning was streamed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rest {
    /// The last bytes.
    pub tail: Bytes,
    /// Bytes produced in all.
    pub total: u64,
}

/// What a bash command did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BashAnswer {
    /// What it printed since the last answer of this session.
    pub output: Captured,
    /// How it ended, or that it did not.
    pub end: BashEnd,
    /// Why the shell that ran before is gone; a new one stands in its place, in the same folder, with a fresh environment.
    pub restarted: Option<String>,
    /// The shell's folder.
    pub cwd: Option<String>,
    /// What runs in the background and was not told before; eight at most.
    pub background: Vec<Background>,
    /// Where the shell's own output goes, when a task has sent it elsewhere than to the terminal.
    pub output_elsewhere: Option<String>,
}

/// A process that a command has left running.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Background {
    /// Its number.
    pub pid: i32,
    /// Its name.
    pub name: String,
}

/// How a bash command ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BashEnd {
    /// With this exit code.
    Exited(i32),
    /// Not: it still runs and has been silent for this many milliseconds.
    Running {
        /// Milliseconds without output.
        silent_ms: u64,
        /// Whether the terminal waits to be read from.
        wants_input: bool,
    },
    /// The limit passed, and it was interrupted.
    LimitPassed {
        /// The limit in milliseconds.
        limit_ms: u64,
        /// What it took to end it.
        by: Interrupt,
        /// Whether it waited for input then.
        wanted_input: bool,
    },
    /// It was cancelled by the host, and interrupted.
    Cancelled,
    /// It was not run, in words that fit a tool result.
    Refused(String),
}

/// What it took to end work whose limit had passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Interrupt {
    /// An interrupt signal.
    Signal,
    /// Killing the processes that the command had started.
    Kill,
    /// Killing the shell or interpreter itself.
    Restart,
}

/// What a Python cell did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpythonAnswer {
    /// What it printed: standard output, standard error, the last expression's value and tracebacks, in order.
    pub output: Captured,
    /// How it ended.
    pub end: CellEnd,
    /// Why the interpreter that ran before is gone; the next cell finds a new one.
    pub restarted: Option<String>,
}

/// How a Python cell ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CellEnd {
    /// To its end.
    Ok,
    /// By an exception, which is in the output.
    Raised,
    /// The limit passed, and it was interrupted.
    LimitPassed {
        /// The limit in milliseconds.
        limit_ms: u64,
        /// What it took to end it.
        by: Interrupt,
    },
    /// With the interpreter's own end.
    Died,
    /// It was cancelled by the host, and interrupted.
    Cancelled,
    /// It was not run, in words that fit a tool result.
    Refused(String),
}

/// An output of which the beginning and the end are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Captured {
    /// The first bytes.
    pub head: Bytes,
    /// The last bytes, empty when `head` is all.
    pub tail: Bytes,
    /// Bytes produced in all.
    pub total: u64,
}

impl Captured {
    /// Returns how many bytes between beginning and end are missing.
    pub fn omitted(&self) -> u64 {
        self.total.saturating_sub((self.head.0.len() + self.tail.0.len()) as u64)
    }

    /// Returns what is kept, with the missing middle left out without a word.
    pub fn bytes(&self) -> Vec<u8> {
        [self.head.0.as_slice(), &self.tail.0].concat()
    }

    /// Returns it as text; bytes that are not UTF-8 become U+FFFD, and a line tells how many bytes are missing, if any.
    pub fn text(&self) -> String {
        match self.omitted() {
            0 => String::from_utf8_lossy(&self.bytes()).into_owned(),
            omitted => format!(
                "{}\n[... {omitted} of {} bytes left out ...]\n{}",
                String::from_utf8_lossy(&self.head.0),
                self.total,
                String::from_utf8_lossy(&self.tail.0)
            ),
        }
    }
}

/// Bytes that travel as one run and not as a list of numbers.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "b\"{}\"", self.0.escape_ascii())
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Run;
        impl Visitor<'_> for Run {
            type Value = Bytes;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes(bytes.to_vec()))
            }

            fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
        }
        deserializer.deserialize_byte_buf(Run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prorl_core::frame;

    #[test]
    fn frames_come_back_as_they_were() {
        let sent = GuestFrame::Output { id: 7, stream: Stream::Stderr, bytes: Bytes((0..=255).collect()) };
        let bytes = frame::encode(&sent).unwrap();
        assert_eq!(frame::decode::<GuestFrame>(&bytes[frame::HEADER_BYTES..]).unwrap(), sent);
        #[cfg(feature = "guest")]
        {
            let borrowed: Vec<u8> = (0..=255).collect();
            let borrowed = OutputFrame { id: 7, stream: Stream::Stderr, bytes: &borrowed };
            assert_eq!(frame::encode_sized(&borrowed, 256).unwrap(), bytes);
        }
        let sent = HostFrame::Steer { id: 7, steer: Steer::Input(Bytes((0..=255).collect())) };
        let bytes = frame::encode(&sent).unwrap();
        assert_eq!(frame::decode::<HostFrame>(&bytes[frame::HEADER_BYTES..]).unwrap(), sent);
    }

    #[test]
    fn a_missing_middle_is_counted_and_said() {
        let whole = Captured { head: Bytes(b"caf\xc3".to_vec()), tail: Bytes(b"\xa9".to_vec()), total: 5 };
        assert_eq!(whole.text(), "caf\u{e9}");
        let cut = Captured { total: 105, ..whole };
        assert_eq!(cut.omitted(), 100);
        assert_eq!(cut.text(), "caf\u{fffd}\n[... 100 of 105 bytes left out ...]\n\u{fffd}");
    }
}
