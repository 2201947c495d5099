//! The tools of this crate, behind a channel to a guest.

use std::{any::Any, time::Duration};

use async_trait::async_trait;
use prorl_core::Content as Text;

use super::{
    case::{Call, Content, File, State, What},
    run::{Found, Seen, Session},
};
use crate::{
    host::{BashCall, CellCall, CellOutput, ExecOutput, ExecSpec, ToolClient, ToolContext, Toolbox, clean},
    wire::{BashAnswer, BashEnd, Captured, CellEnd},
};

/// How long it may take to make a file or to look at one.
const FILE_LIMIT: Duration = Duration::from_secs(30);
/// Bytes of a file that are looked at.
const FILE_BYTES: usize = 32 << 20;
/// What the editor is called.
const EDITOR: &str = "str_replace_editor";

/// A session of a guest that nobody else uses.
pub struct Ours {
    client: ToolClient,
    folder: String,
    /// What must live as long.
    _around: Box<dyn Any + Send + Sync>,
}

impl Ours {
    /// Takes over a guest whose tools begin in `folder`, with what must live as long as the session does.
    pub fn new(client: ToolClient, folder: impl Into<String>, around: impl Any + Send + Sync) -> Self {
        Self { client, folder: folder.into(), _around: Box::new(around) }
    }

    fn path(&self, path: &str) -> String {
        format!("{}/{path}", self.folder)
    }

    async fn sh(&self, script: &str, args: &[&str]) -> Result<ExecOutput, String> {
        let words = ["/bin/sh", "-c", script, "sh"].into_iter().chain(args.iter().copied());
        self.client.exec(&ExecSpec::new(words), FILE_LIMIT).await.map_err(|err| err.to_string())
    }

    async fn edit(&self, call: &Call) -> Result<Seen, String> {
        let What::Edit(arguments) = &call.what else { return Err("no arguments".to_owned()) };
        let toolbox = Toolbox::from_names([EDITOR]).map_err(|err| err.to_string())?;
        let context = ToolContext::new(&self.client, call.limit);
        let result = toolbox.call(&context, EDITOR, arguments).await.map_err(|err| err.to_string())?;
        let state = if result.is_error { State::Refused } else { State::Done };
        let output = match result.content {
            Text::Text(text) => text,
            parts @ Text::Parts(_) => parts.text(),
        };
        Ok(Seen { output, bytes: None, code: None, state, cwd: None, waits: false, parts: Vec::new() })
    }
}

#[async_trait]
impl Session for Ours {
    fn folder(&self) -> &str {
        &self.folder
    }

    async fn call(&mut self, call: &Call) -> Result<Seen, String> {
        let bash = |text: &str| BashCall { silence: call.silence, ..BashCall::new(text) };
        match &call.what {
            What::Command(text) => self.client.bash(&bash(text), call.limit).await.map(of_bash),
            What::Input(text) => {
                self.client.bash(&BashCall { is_input: true, ..bash(text) }, call.limit).await.map(of_bash)
            }
            What::Cell(code) => self.client.cell(&CellCall::new(code), call.limit).await.map(of_cell),
            What::Edit(_) => return self.edit(call).await,
        }
        .map_err(|err| err.to_string())
    }

    async fn put(&mut self, file: &File) -> Result<(), String> {
        let path = self.path(&file.path);
        let made = match &file.content {
            Content::Bytes(bytes) => {
                self.client.write_file(&path, bytes, 0o644, FILE_LIMIT).await.map_err(|err| err.to_string())?;
                return match file.mode {
                    Some(mode) => succeeded(&self.sh("chmod $1 \"$2\"", &[&format!("{mode:o}"), &path]).await?),
                    None => Ok(()),
                };
            }
            Content::Link(target) => self.sh("ln -s \"$1\" \"$2\"", &[target, &path]).await?,
            Content::Folder => self.sh("mkdir -p \"$1\"", &[&path]).await?,
            Content::Absent => self.sh("rm -f \"$1\"", &[&path]).await?,
        };
        succeeded(&made)
    }

    async fn look(&mut self, path: &str) -> Result<Found, String> {
        let path = self.path(path);
        let script = r#"if test -h "$1"; then echo "link 0 $(readlink "$1")"
            elif test -d "$1"; then echo "folder $(stat -c %a "$1")"
            elif test -e "$1"; then echo "file $(stat -c %a "$1")"
            else echo "absent 0"; fi"#;
        let said = self.sh(script, &[&path]).await?;
        succeeded(&said)?;
        let said = said.stdout.text();
        let mut words = said.trim_end_matches('\n').splitn(3, ' ');
        let kind = words.next().unwrap_or_default();
        let mode = u32::from_str_radix(words.next().unwrap_or_default(), 8).map_err(|err| format!("{path}: {err}"))?;
        let content = match kind {
            "link" => Content::Link(words.next().unwrap_or_default().to_owned()),
            "folder" => Content::Folder,
            "file" => {
                let read = self.client.read_file(&path, FILE_BYTES, FILE_LIMIT).await.map_err(|err| err.to_string())?;
                Content::Bytes(read.bytes())
            }
            _ => Content::Absent,
        };
        Ok(Found { content, mode })
    }
}

fn succeeded(done: &ExecOutput) -> Result<(), String> {
    if done.success() { Ok(()) } else { Err(done.stderr.text()) }
}

/// Returns what an agent reads of an output.
fn text(output: &Captured) -> String {
    clean(output.text().as_bytes()).text
}

fn of_bash(answer: BashAnswer) -> Seen {
    let BashAnswer { output, end, restarted, cwd, .. } = answer;
    let (state, code, waits) = match &end {
        BashEnd::Exited(code) => (State::Done, Some(*code), false),
        BashEnd::Running { wants_input, .. } => (State::Running, None, *wants_input),
        BashEnd::LimitPassed { wanted_input, .. } => (State::Limit, None, *wanted_input),
        BashEnd::Cancelled => (State::Limit, None, false),
        BashEnd::Refused(_) => (State::Refused, None, false),
    };
    let state = if restarted.is_some() && state != State::Limit { State::Reset } else { state };
    let output_text = if let BashEnd::Refused(reason) = end { reason } else { text(&output) };
    Seen { output: output_text, bytes: Some(output.total), code, state, cwd, waits, parts: Vec::new() }
}

fn of_cell(answer: CellOutput) -> Seen {
    let CellOutput { output, end, restarted, shown } = answer;
    let (state, code) = match &end {
        CellEnd::Ok => (State::Done, Some(0)),
        CellEnd::Raised => (State::Done, Some(1)),
        CellEnd::LimitPassed { .. } | CellEnd::Cancelled => (State::Limit, None),
        CellEnd::Died => (State::Reset, None),
        CellEnd::Refused(_) => (State::Refused, None),
    };
    let state = if restarted.is_some() && state != State::Limit { State::Reset } else { state };
    let output_text = if let CellEnd::Refused(reason) = end { reason } else { text(&output) };
    let parts = shown.into_iter().map(|shown| shown.mime).collect();
    Seen { output: output_text, bytes: Some(output.total), code, state, cwd: None, waits: false, parts }
}
