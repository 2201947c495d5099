//! Implementations of others, each behind a program that speaks JSON on its standard streams, one object a line.
//!
//! ```text
//! > {"start": {"tool": "bash", "cwd": "/tmp/x"}}
//! < {"ready": {"name": "..", "version": "..", "lacks": ["input"]}}     or {"skip": "why"}
//! > {"id": 1, "call": {"command": "echo hi", "is_input": false, "timeout": 60.0, "silence": null}}
//! < {"id": 1, "output": "hi\n", "code": 0, "state": "done"}
//! > {"stop": true}
//! ```
//!
//! A call of `ipython` has `code` and `timeout`, one of `editor` the editor's arguments. `state` is `done`, `running`, `limit`,
//! `reset`, `refused` or `unsupported`. An answer may have `output_b64` (bytes in base64, instead of `output`), `bytes` (how many
//! there were in all), `cwd`, `wants_input` and `parts` (a list of objects with `mime`). `lacks` names what it cannot do by its
//! nature: `input`, `silence`, `rich`.

use std::{collections::BTreeSet, io::Read as _, process::Stdio, time::Duration};

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout},
    time::timeout,
};

use super::{
    case::{Call, File, Need, State, Suite, What},
    host::Ground,
    run::{Found, Seen, Session, Subject, Unopened},
};

/// How long an adapter may take to be ready.
const START_LIMIT: Duration = Duration::from_mins(1);
/// How long after the limit of a call its answer may come.
const GRACE: Duration = Duration::from_secs(10);
/// How long it may take to stop before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// A program that speaks the protocol, with its arguments. A new one is started for each session.
#[derive(Clone, Debug)]
pub struct Adapter {
    name: String,
    words: Vec<String>,
}

impl Adapter {
    /// Returns an adapter by its name in reports and the words that start it, of which there is at least one.
    pub fn new(name: impl Into<String>, words: Vec<String>) -> Self {
        Self { name: name.into(), words }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Begun {
    Ready(Ready),
    Skip(String),
}

#[derive(Debug, Deserialize)]
struct Ready {
    version: Option<String>,
    #[serde(default)]
    lacks: BTreeSet<Need>,
}

#[derive(Debug, Deserialize)]
struct Reply {
    id: u64,
    output: Option<String>,
    output_b64: Option<String>,
    bytes: Option<u64>,
    code: Option<i32>,
    state: State,
    cwd: Option<String>,
    wants_input: Option<bool>,
    #[serde(default)]
    parts: Vec<Part>,
}

#[derive(Debug, Deserialize)]
struct Part {
    mime: String,
}

#[async_trait]
impl Subject for Adapter {
    fn name(&self) -> &str {
        &self.name
    }

    async fn open(&self, suite: Suite) -> Result<Box<dyn Session>, Unopened> {
        let broken = |err: std::io::Error| Unopened::Broken(format!("{}: {err}", self.name));
        let ground = Ground::make().map_err(broken)?;
        let complaints = tempfile::tempfile().map_err(broken)?;
        let (program, args) = self.words.split_first().ok_or_else(|| Unopened::Broken("no adapter".to_owned()))?;
        let mut command = ground.command(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(complaints.try_clone().map_err(broken)?);
        let mut child = match command.spawn() {
            Err(err) if err.kind() == std::io::ErrorKind::NotFound => {
                return Err(Unopened::Absent(format!("there is no {program}")));
            }
            child => child.map_err(broken)?,
        };
        let input = child.stdin.take().expect("it is piped");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let ready = Ready { version: None, lacks: BTreeSet::new() };
        let mut session = Running { ground, child, input, output, complaints, ready, next_id: 1 };
        let start = json!({"start": {"tool": suite.name(), "cwd": session.ground.path()}});
        match session.ask(&start, START_LIMIT).await.map_err(Unopened::Broken)? {
            Begun::Ready(ready) => session.ready = ready,
            Begun::Skip(reason) => return Err(Unopened::Absent(reason)),
        }
        Ok(Box::new(session))
    }
}

/// An adapter that runs.
struct Running {
    // The first to go, so that what holds the streams is gone when they are.
    ground: Ground,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    complaints: std::fs::File,
    ready: Ready,
    next_id: u64,
}

impl Running {
    /// Sends a line and reads the answer to it.
    async fn ask<T: for<'de> Deserialize<'de>>(&mut self, line: &Value, limit: Duration) -> Result<T, String> {
        let asking = async {
            // One that has gone says why below.
            let _sent = self.input.write_all(format!("{line}\n").as_bytes()).await;
            let mut answer = String::new();
            self.output.read_line(&mut answer).await.map(|_n_bytes| answer)
        };
        let answer = match timeout(limit, asking).await {
            Err(_elapsed) => return Err(format!("hangs: no answer in {limit:?}")),
            Ok(answer) => answer.map_err(|err| format!("the adapter's answer: {err}"))?,
        };
        if answer.is_empty() {
            return Err(format!("the adapter ended: {}", self.last_complaint()));
        }
        serde_json::from_str(&answer).map_err(|err| format!("the adapter's answer: {err}: {}", answer.trim_end()))
    }

    /// Returns the last line that the adapter wrote to its standard error.
    fn last_complaint(&mut self) -> String {
        let mut text = Vec::new();
        let _read = std::io::Seek::rewind(&mut self.complaints).and_then(|()| self.complaints.read_to_end(&mut text));
        String::from_utf8_lossy(&text).trim_end().lines().last().unwrap_or("without a word").to_owned()
    }
}

#[async_trait]
impl Session for Running {
    fn lacks(&self) -> BTreeSet<Need> {
        self.ready.lacks.clone()
    }

    fn version(&self) -> Option<String> {
        self.ready.version.clone()
    }

    fn folder(&self) -> &str {
        self.ground.path()
    }

    async fn call(&mut self, call: &Call) -> Result<Seen, String> {
        let (timeout, silence) = (call.limit.as_secs_f64(), call.silence.map(|silence| silence.as_secs_f64()));
        let bash = |text: &str, is_input| json!({"command": text, "is_input": is_input, "timeout": timeout, "silence": silence});
        let arguments = match &call.what {
            What::Command(text) => bash(text, false),
            What::Input(text) => bash(text, true),
            What::Cell(code) => json!({"code": code, "timeout": timeout}),
            What::Edit(arguments) => Value::Object(arguments.clone()),
        };
        let id = self.next_id;
        self.next_id += 1;
        let reply: Reply = self.ask(&json!({"id": id, "call": arguments}), call.limit + GRACE).await?;
        if reply.id != id {
            return Err(format!("the adapter answered call {} and not {id}", reply.id));
        }
        let output = match reply.output_b64 {
            Some(text) => String::from_utf8_lossy(&from_base64(&text)).into_owned(),
            None => reply.output.unwrap_or_default(),
        };
        Ok(Seen {
            output,
            bytes: reply.bytes,
            code: reply.code,
            state: reply.state,
            cwd: reply.cwd,
            waits: reply.wants_input.unwrap_or(false),
            parts: reply.parts.into_iter().map(|part| part.mime).collect(),
        })
    }

    async fn put(&mut self, file: &File) -> Result<(), String> {
        self.ground.put(file)
    }

    async fn look(&mut self, path: &str) -> Result<Found, String> {
        self.ground.look(path)
    }

    async fn close(mut self: Box<Self>) {
        let stopping = async {
            self.input.write_all(b"{\"stop\": true}\n").await?;
            self.child.wait().await
        };
        // What does not stop is killed with what it has started.
        let _stopped = timeout(STOP_LIMIT, stopping).await;
        self.ground.close().await;
    }
}

/// Decodes base64; what is not of its alphabet is passed over.
fn from_base64(text: &str) -> Vec<u8> {
    let (mut bytes, mut bits, mut n_bits) = (Vec::with_capacity(text.len() / 4 * 3), 0_u32, 0);
    for digit in text.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => continue,
        };
        bits = bits << 6 | u32::from(value);
        n_bits += 6;
        if n_bits >= 8 {
            n_bits -= 8;
            bytes.push((bits >> n_bits).to_le_bytes()[0]);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{Case, Shape, Verdict, run};

    #[test]
    fn base64_is_bytes() {
        for (text, bytes) in
            [("", b"".as_slice()), ("AA==", b"\0"), ("/+8=", b"\xff\xef"), ("aGkh", b"hi!"), ("aGkhIQ==", b"hi!!")]
        {
            assert_eq!(from_base64(text), bytes, "{text}");
        }
    }

    fn adapter(script: &str) -> Adapter {
        Adapter::new("scripted", ["sh", "-c", script].map(str::to_owned).to_vec())
    }

    async fn verdict(script: &str, case: &str) -> (Option<String>, Verdict) {
        let case = Case::read(&format!("[[case]]\nname = 'a'\nabout = 'b.'\n{case}")).unwrap();
        let (version, outcomes) = run(&adapter(script), Suite::Bash, &case, Shape { at_once: 1 }, |_| ()).await;
        (version, outcomes.into_iter().next().unwrap().verdict)
    }

    #[tokio::test]
    async fn an_adapter_is_asked_line_by_line() {
        let script = r#"read start; echo '{"ready": {"name": "x", "version": "7", "lacks": ["input"]}}'
            read call; case $call in *'"command":"echo hi"'*) echo '{"id": 1, "output_b64": "aGkK", "code": 0, "state": "done"}';; esac
            read stop"#;
        let (version, passed) = verdict(script, "steps = [{ run = 'echo hi', output = 'hi', code = 0 }]").await;
        assert_eq!((version.as_deref(), passed), (Some("7"), Verdict::Passed));
        let (_, unsupported) = verdict(script, "needs = ['input']\nsteps = [{ input = 'x' }]").await;
        assert_eq!(unsupported, Verdict::Unsupported);
    }

    #[tokio::test]
    async fn what_an_adapter_does_wrong_is_told() {
        let ready = r#"read start; echo '{"ready": {"name": "x"}}'"#;
        let steps = "steps = [{ run = 'x', timeout = 0.1 }]";
        let fails = async |script: String| match verdict(&script, steps).await.1 {
            Verdict::Failed(reason) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(fails("echo no such module >&2".to_owned()).await, "the adapter ended: no such module");
        assert_eq!(fails(format!("{ready}; read call")).await, "step 1: the adapter ended: without a word");
        let reason = fails(format!("{ready}; read call; echo what")).await;
        assert!(reason.starts_with("step 1: the adapter's answer: expected value"), "{reason}");
        let reason = fails(format!(r#"{ready}; read call; echo '{{"id": 2, "output": "", "state": "done"}}'"#)).await;
        assert_eq!(reason, "step 1: the adapter answered call 2 and not 1");
        let absent = verdict(r#"read start; echo '{"skip": "not installed"}'"#, steps).await.1;
        assert_eq!(absent, Verdict::Absent("not installed".to_owned()));
        let none = Adapter::new("none", vec!["/nonexistent/adapter".to_owned()]);
        assert!(matches!(none.open(Suite::Bash).await, Err(Unopened::Absent(_))));
    }

    #[tokio::test]
    async fn an_adapter_that_hangs_fails_the_case() {
        let script = r#"read start; echo '{"ready": {"name": "x"}}'; exec sleep 1000"#;
        let hangs = verdict(script, "steps = [{ run = 'x', timeout = 0.1 }]").await.1;
        assert_eq!(hangs, Verdict::Failed("step 1: hangs: no answer in 10.1s".to_owned()));
    }
}
