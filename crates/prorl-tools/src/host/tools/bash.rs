//! `execute_bash`.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value};

use super::{or_result, text};
use crate::{
    host::{
        client::{BashCall, ToolError},
        render,
        toolbox::{Tool, ToolContext, ToolResult},
    },
    schema::{self, Schema},
};

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
        let own = arguments
            .get("timeout")
            .and_then(Value::as_f64)
            .map(|secs| Duration::try_from_secs_f64(secs).unwrap_or(Duration::MAX));
        let limit = own.map_or(context.limit, |own| own.min(context.limit));
        let silence = if own.is_some() { None } else { context.silence };
        let call = BashCall { is_input, silence, ..BashCall::new(text(arguments, "command")) };
        match context.client.bash(&call, limit).await {
            Ok(answer) => Ok(render::bash(&answer, context, own.is_some_and(|own| own > limit))),
            Err(err) => or_result(err, "command"),
        }
    }
}
