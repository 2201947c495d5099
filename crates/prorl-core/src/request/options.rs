//! What a request says of the agent loop and of its result.

use serde::{Deserialize, Serialize};

/// What happens to earlier thinking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum History {
    /// It stays: one trace.
    #[default]
    Keep,
    /// It is dropped where the template does so: a new trace per fork.
    Strip,
}

/// What happens after a turn without a tool call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnNoToolCall {
    /// The agent is asked to go on or finish.
    #[default]
    Nudge,
    /// The job ends.
    Finish,
}

/// Policies of the agent loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentOptions {
    /// What happens to earlier thinking.
    pub history: History,
    /// What happens after a turn without a tool call.
    pub on_no_tool_call: OnNoToolCall,
    /// Whether the agent is told how many turns are left.
    pub budget_notice: bool,
    /// Whether the same call again and again ends the job.
    pub loop_detector: bool,
}

/// What an assistant message's `input_ids` holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InputIds {
    /// The ids fed since the turn before.
    #[default]
    Delta,
    /// The whole prompt of that call.
    Full,
    /// Null.
    None,
}

/// What a result contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Include {
    /// What `input_ids` holds; the server's default when absent.
    pub input_ids: Option<InputIds>,
    /// Whether /process returns messages and traces of a failed job.
    pub partial: bool,
}
