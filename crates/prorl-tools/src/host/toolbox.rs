//! A set of tools, and one call of one of them.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use prorl_core::{Content, Part};
use serde_json::{Map, Value};

use super::{
    RESULT_CHARS,
    client::{ToolClient, ToolError},
    text::TextForm,
    tools::{ExecuteBash, ExecuteIpythonCell, Finish, StrReplaceEditor, Think},
};
use crate::schema::{Schema, nearest};

/// What a tool may use during a call.
#[derive(Clone, Copy, Debug)]
pub struct ToolContext<'a> {
    /// The sandbox.
    pub client: &'a ToolClient,
    /// How long the call may take; what it leaves is ended within [`ANSWER_GRACE`](super::ANSWER_GRACE) after.
    pub limit: Duration,
    /// How long a bash command may be silent before the call returns; `None` for as long as `limit`.
    pub silence: Option<Duration>,
    /// Characters that the agent reads at most of what a command or a cell prints or the editor shows, notes in brackets included.
    /// Of a longer output it reads the beginning and the end. More than a hundred thousand are never kept.
    pub output_chars: usize,
    /// In which form it reads what programs print.
    pub text: TextForm,
    /// Whether it sees images. If so, those that a cell shows are parts of the result; if not, a line tells of each.
    pub images: bool,
}

impl<'a> ToolContext<'a> {
    /// Returns what a call may use that is held to nothing but time, for a model that reads clean text and sees no images.
    pub fn new(client: &'a ToolClient, limit: Duration) -> Self {
        Self { client, limit, silence: None, output_chars: RESULT_CHARS, text: TextForm::default(), images: false }
    }
}

/// What a tool call gives back to the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolResult {
    /// What the agent reads.
    pub content: Content,
    /// Whether the tool could not do what it was called for. A command that fails is not this: it ran.
    pub is_error: bool,
    /// The last word of an agent that says it is done.
    pub finish: Option<String>,
}

impl ToolResult {
    /// Returns a result with this content.
    pub fn new(content: Content) -> Self {
        Self { content, is_error: false, finish: None }
    }

    /// Returns a result that is a text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::new(Content::Text(text.into()))
    }

    /// Adds a line in brackets to what the agent reads.
    pub fn note(&mut self, note: impl fmt::Display) {
        let line = format!("[{note}]");
        let add = |text: &mut String| {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&line);
        };
        match &mut self.content {
            Content::Text(text) => add(text),
            Content::Parts(parts) => match parts.last_mut() {
                Some(Part::Text { text }) => add(text),
                _ => parts.push(Part::Text { text: line }),
            },
        }
    }

    /// Returns a text that says what went wrong.
    pub fn error(text: impl Into<String>) -> Self {
        Self { is_error: true, ..Self::text(text) }
    }
}

/// A tool that an agent may call. A crate of your own adds one by implementing this.
#[async_trait]
pub trait Tool: Send + Sync {
    /// Returns what the model is told; its name is the tool's.
    fn schema(&self) -> Schema;

    /// Tells whether a call does something in the sandbox.
    fn needs_sandbox(&self) -> bool {
        true
    }

    /// Runs one call. `arguments` have passed [`Schema::check`].
    ///
    /// # Errors
    /// Only when the sandbox or its channel is at fault. Whatever the agent can cause is a [`ToolResult`].
    ///
    /// # Cancel safety
    /// Dropping the call ends the work inside the sandbox.
    async fn call(&self, context: &ToolContext<'_>, arguments: &Map<String, Value>) -> Result<ToolResult, ToolError>;
}

/// No tool has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no tool is named {name:?}; known: {}", NAMES.join(", "))]
pub struct UnknownTool {
    /// The name.
    pub name: String,
}

/// Names by which the tools of this crate are asked for: each tool's own and short ones.
const NAMES: [&str; 8] =
    ["bash", "execute_bash", "ipython", "execute_ipython_cell", "editor", "str_replace_editor", "think", "finish"];

/// The tools of an agent, in the order in which the model is told of them.
#[derive(Clone, Default)]
pub struct Toolbox {
    tools: Vec<(Schema, Arc<dyn Tool>)>,
}

impl fmt::Debug for Toolbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

impl Toolbox {
    /// Returns the tools of these names, each by its own name or a short one (`bash`, `ipython`, `editor`).
    ///
    /// # Errors
    /// For a name that no tool of this crate has.
    pub fn from_names<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> Result<Self, UnknownTool> {
        names.into_iter().try_fold(Self::default(), |toolbox, name| {
            let tool: Arc<dyn Tool> = match name.as_ref() {
                "bash" | "execute_bash" => Arc::new(ExecuteBash),
                "ipython" | "execute_ipython_cell" => Arc::new(ExecuteIpythonCell),
                "editor" | "str_replace_editor" => Arc::new(StrReplaceEditor),
                "think" => Arc::new(Think),
                "finish" => Arc::new(Finish),
                other => return Err(UnknownTool { name: other.to_owned() }),
            };
            Ok(toolbox.with(tool))
        })
    }

    /// Returns the set with one more tool; one of the same name is replaced in its place.
    #[must_use]
    pub fn with(mut self, tool: Arc<dyn Tool>) -> Self {
        let schema = tool.schema();
        match self.tools.iter_mut().find(|(known, _)| known.name == schema.name) {
            Some(place) => *place = (schema, tool),
            None => self.tools.push((schema, tool)),
        }
        self
    }

    /// Returns the names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().map(|(schema, _)| schema.name.as_str())
    }

    /// Returns what the model is told, in the `OpenAI` form.
    pub fn schemas(&self) -> Vec<Value> {
        self.tools.iter().map(|(schema, _)| schema.to_openai()).collect()
    }

    /// Tells whether a tool of this name does something in the sandbox.
    pub fn needs_sandbox(&self, name: &str) -> bool {
        self.tools.iter().any(|(schema, tool)| schema.name == name && tool.needs_sandbox())
    }

    /// Runs one call. An unknown tool or wrong arguments are results that say so.
    ///
    /// # Errors
    /// Only when the sandbox or its channel is at fault.
    ///
    /// # Cancel safety
    /// As [`Tool::call`].
    pub async fn call(
        &self,
        context: &ToolContext<'_>,
        name: &str,
        arguments: &Map<String, Value>,
    ) -> Result<ToolResult, ToolError> {
        let Some((schema, tool)) = self.tools.iter().find(|(schema, _)| schema.name == name) else {
            let known: Vec<String> = self.names().map(|name| format!("`{name}`")).collect();
            let meant =
                nearest(name, self.names()).map_or_else(String::new, |meant| format!(" Did you mean `{meant}`?"));
            return Ok(ToolResult::error(format!(
                "There is no tool `{name}`.{meant} The tools are: {}.",
                known.join(", ")
            )));
        };
        match schema.check(arguments) {
            Ok(()) => tool.call(context, arguments).await,
            Err(fault) => Ok(ToolResult::error(fault)),
        }
    }
}
