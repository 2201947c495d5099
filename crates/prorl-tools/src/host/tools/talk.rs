//! `think` and `finish`, which need no sandbox.

use async_trait::async_trait;
use serde_json::{Map, Value};

use super::text;
use crate::{
    host::{
        client::ToolError,
        toolbox::{Tool, ToolContext, ToolResult},
    },
    schema::{self, Schema},
};

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
