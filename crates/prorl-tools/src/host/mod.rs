//! The host's side: a client over the channel to a guest, and the tools as an agent loop calls them.

mod attach;
mod channel;
mod client;
mod files;
mod outbox;
mod render;
mod text;
mod toolbox;
mod tools;

pub use attach::{AttachSpec, Attached, Input, Output};
pub use channel::Shown;
pub use client::{ANSWER_GRACE, BashCall, CellCall, CellOutput, ExecOutput, ExecSpec, FilePart, ToolClient, ToolError};
pub use files::TreeOptions;
pub use render::RESULT_CHARS;
pub use text::{Cleaned, TextForm, clean};
pub use toolbox::{Tool, ToolContext, ToolResult, Toolbox, UnknownTool};
pub use tools::{ExecuteBash, ExecuteIpythonCell, Finish, StrReplaceEditor, Think};
