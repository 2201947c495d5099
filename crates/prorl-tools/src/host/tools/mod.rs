//! The tools that every agent knows.

mod bash;
mod editor;
mod ipython;
mod talk;

pub use bash::ExecuteBash;
pub use editor::StrReplaceEditor;
pub use ipython::ExecuteIpythonCell;
use prorl_core::frame::{FrameError, MAX_FRAME_BYTES};
use serde_json::{Map, Value};
pub use talk::{Finish, Think};

use super::{client::ToolError, toolbox::ToolResult};

fn text<'a>(arguments: &'a Map<String, Value>, name: &str) -> &'a str {
    arguments.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// Turns what the guest refused into words for the agent; the rest is not the agent's to act on. `what` is what was sent.
fn or_result(err: ToolError, what: &str) -> Result<ToolResult, ToolError> {
    if err.is_infrastructure() {
        return Err(err);
    }
    if let ToolError::Request(FrameError::TooLarge { len }) = &err {
        return Ok(ToolResult::error(format!(
            "The {what} is too long: it has about {len} bytes, and at most {} MiB can be sent. Nothing was done. Write it to \
             a file in several pieces.",
            MAX_FRAME_BYTES >> 20
        )));
    }
    let cause = std::error::Error::source(&err).map(|cause| format!(": {cause}")).unwrap_or_default();
    Ok(ToolResult::error(format!("{err}{cause}")))
}
