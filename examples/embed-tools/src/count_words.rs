//! A tool of one's own.

use async_trait::async_trait;
use prorl_tools::{
    host::{Tool, ToolContext, ToolError, ToolResult},
    schema::Schema,
};
use serde_json::{Map, Value, json};

/// Bytes of a file that are read.
const MAX_BYTES: usize = 1 << 20;

/// `count_words`: counts the words of a file in the sandbox.
pub(crate) struct CountWords;

#[async_trait]
impl Tool for CountWords {
    fn schema(&self) -> Schema {
        Schema {
            name: "count_words".to_owned(),
            description: "Counts the words of a text file.".to_owned(),
            parameters: json!({
                "type": "object",
                "properties": {"path": {"type": "string", "description": "The file."}},
                "required": ["path"],
            }),
        }
    }

    async fn call(&self, context: &ToolContext<'_>, arguments: &Map<String, Value>) -> Result<ToolResult, ToolError> {
        // The schema has seen to it that there is one.
        let path = arguments.get("path").and_then(Value::as_str).unwrap_or_default();
        match context.client.read_file(path, MAX_BYTES, context.limit).await {
            Ok(file) if file.total > MAX_BYTES as u64 => {
                Ok(ToolResult::error(format!("{path} has {} bytes, more than {MAX_BYTES}.", file.total)))
            }
            Ok(file) => Ok(ToolResult::text(format!("{path} has {} words.", file.text().split_whitespace().count()))),
            // The model's to act on, unless the sandbox is gone.
            Err(err) if !err.is_infrastructure() => Ok(ToolResult::error(err.to_string())),
            Err(err) => Err(err),
        }
    }
}
