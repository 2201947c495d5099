//! Messages of a conversation, as they are returned.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{TokenId, WeightVersion};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions.
    System,
    /// The task, or a word from the agent loop.
    User,
    /// The policy.
    Assistant,
    /// A tool's result.
    Tool,
}

impl Role {
    /// Returns the word used on the wire and in chat templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One part of a message: today text, later images of graphical tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Part {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// An image that a tool returned.
    Image {
        /// Media type, such as `image/png`.
        mime: String,
        /// The bytes in base 64.
        data: String,
    },
}

/// What a message says: plain text, or typed parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Text alone.
    Text(String),
    /// Typed parts in order.
    Parts(Vec<Part>),
}

impl Content {
    /// Returns the text of all parts, in order.
    pub fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Parts(parts) => parts
                .iter()
                .filter_map(|part| match part {
                    Part::Text { text } => Some(text.as_str()),
                    Part::Image { .. } => None,
                })
                .collect(),
        }
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// A tool call as it was read from sampled text: a view, never re-encoded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// Names the call inside its job.
    pub id: String,
    /// The tool.
    pub name: String,
    /// The arguments, a JSON object.
    pub arguments: Map<String, Value>,
}

/// How a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end-of-turn token or a stop string.
    Stop,
    /// The token limit.
    Length,
    /// The engine gave up on it: not a finished turn.
    Abort,
}

/// The part of a message that only the policy's turns have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnInfo {
    /// Tool calls read from the text, in order.
    #[serde(default)]
    pub tool_calls: Vec<ToolCall>,
    /// How the generation ended.
    pub finish_reason: FinishReason,
    /// The weight version that sampled it.
    pub weight_version: WeightVersion,
    /// Address of the backend that sampled it.
    pub backend: String,
}

/// One message of a trajectory with the ids that stand for it (API section 1.3).
///
/// On the policy's turns `token_ids` and `output_ids` are the sampled ids and `logprobs` their log-probabilities. On every
/// other message `token_ids` are the exact ids fed for it and the rest is null. Over a job with one trace, the `token_ids`
/// of all messages in order are the trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; on the policy's turns the text without its tool calls' markup is not cut out: this is all of it.
    pub content: Content,
    /// The call that a tool message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The tool that a tool message comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The policy's turns only.
    #[serde(flatten)]
    pub turn: Option<TurnInfo>,
    /// What the call was given, by `include.input_ids`: the ids since the turn before, the whole prompt, or null.
    pub input_ids: Option<Vec<TokenId>>,
    /// Sampled ids, on the policy's turns.
    pub output_ids: Option<Vec<TokenId>>,
    /// Sampled ids on the policy's turns, otherwise the ids fed for this message.
    pub token_ids: Vec<TokenId>,
    /// Log-probability of each sampled id.
    pub logprobs: Option<Vec<f64>>,
}

impl Message {
    /// A message that was fed: `token_ids` are the exact ids that stand for it.
    pub fn fed(role: Role, content: impl Into<Content>, token_ids: Vec<TokenId>) -> Self {
        Self {
            role,
            content: content.into(),
            tool_call_id: None,
            name: None,
            turn: None,
            input_ids: None,
            output_ids: None,
            token_ids,
            logprobs: None,
        }
    }

    /// Tells whether the policy made this message.
    pub fn is_turn(&self) -> bool {
        self.turn.is_some()
    }
}
