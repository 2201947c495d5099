//! The tools that every agent knows.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value};

use super::{
    client::{BashCall, ToolError},
    render,
    toolbox::{Tool, ToolContext, ToolResult},
};
use crate::schema::{self, Schema};

fn text<'a>(arguments: &'a Map<String, Value>, name: &str) -> &'a str {
    arguments.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// Turns what the guest refused into words for the agent; the rest is not the agent's to act on.
fn or_result(err: ToolError) -> Result<ToolResult, ToolError> {
    if err.is_infrastructure() {
        return Err(err);
    }
    let cause = std::error::Error::source(&err).map(|cause| format!(": {cause}")).unwrap_or_default();
    Ok(ToolResult::error(format!("{err}{cause}")))
}

/// `execute_bash`: a command in the shell that stays open for the whole task.
#[derive(Clone, Copy, Debug)]
pub struct ExecuteBash;

#[async_trait]
impl Tool for ExecuteBash {
    fn schema(&self) -> Schema {
        schema::execute_bash()
    }

    async fn call(&self, context: &ToolContext<'_>, arguments: &Map<String, Value>) -> Result<ToolResult, ToolError> {
        let is_input = match arguments.get("is_input") {
            Some(Value::Bool(truth)) => *truth,
            Some(Value::String(truth)) => truth == "true",
            _ => false,
        };
        // An own limit is total: such a command may be silent for as long.
        let own =
            arguments.get("timeout").and_then(Value::as_f64).and_then(|secs| Duration::try_from_secs_f64(secs).ok());
        let limit = own.map_or(context.limit, |own| own.min(context.limit));
        let silence = if own.is_some() { None } else { context.silence };
        let call = BashCall { is_input, silence, ..BashCall::new(text(arguments, "command")) };
        match context.client.bash(&call, limit).await {
            Ok(answer) => Ok(render::bash(&answer, context.output_chars)),
            Err(err) => or_result(err),
        }
    }
}

/// `execute_ipython_cell`: a cell in the interpreter that stays open for the whole task.
#[derive(Clone, Copy, Debug)]
pub struct ExecuteIpythonCell;

#[async_trait]
impl Tool for ExecuteIpythonCell {
    fn schema(&self) -> Schema {
        schema::execute_ipython_cell()
    }

    async fn call(&self, context: &ToolContext<'_>, arguments: &Map<String, Value>) -> Result<ToolResult, ToolError> {
        match context.client.ipython(text(arguments, "code"), context.limit).await {
            Ok(answer) => Ok(render::ipython(&answer, context.output_chars)),
            Err(err) => or_result(err),
        }
    }
}

/// `think`: a thought that changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct Think;

#[async_trait]
impl Tool for Think {
    fn schema(&self) -> Schema {
        schema::think()
    }

    fn needs_sandbox(&self) -> bool {
        false
    }

    async fn call(&self, _context: &ToolContext<'_>, _arguments: &Map<String, Value>) -> Result<ToolResult, ToolError> {
        Ok(ToolResult::text("Your thought has been logged."))
    }
}

/// `finish`: the agent's last word.
#[derive(Clone, Copy, Debug)]
pub struct Finish;

#[async_trait]
impl Tool for Finish {
    fn schema(&self) -> Schema {
        schema::finish()
    }

    fn needs_sandbox(&self) -> bool {
        false
    }

    async fn call(&self, _context: &ToolContext<'_>, arguments: &Map<String, Value>) -> Result<ToolResult, ToolError> {
        let message = text(arguments, "message").to_owned();
        Ok(ToolResult { finish: Some(message.clone()), ..ToolResult::text(message) })
    }
}
