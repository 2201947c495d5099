//! The host's side: a client over the channel to a guest, and the tools as an agent loop calls them.

mod attach;
mod channel;
mod client;
mod render;
mod toolbox;
mod tools;

pub use attach::{AttachSpec, Attached, Input, Output};
pub use client::{ANSWER_GRACE, BashCall, ExecOutput, ExecSpec, ToolClient, ToolError};
pub use render::RESULT_CHARS;
pub use toolbox::{Tool, ToolContext, ToolResult, Toolbox, UnknownTool};
pub use tools::{ExecuteBash, ExecuteIpythonCell, Finish, Think};
