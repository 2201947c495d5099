//! `execute_ipython_cell`.

use async_trait::async_trait;
use serde_json::{Map, Value};

use super::{or_result, text};
use crate::{
    host::{
        client::{CellCall, ToolError},
        render,
        text::TextForm,
        toolbox::{Tool, ToolContext, ToolResult},
    },
    schema::{self, Schema},
};

/// `execute_ipython_cell`: a cell in the interpreter that stays open for the whole task.
#[derive(Clone, Copy, Debug)]
pub struct ExecuteIpythonCell;

#[async_trait]
impl Tool for ExecuteIpythonCell {
    fn schema(&self) -> Schema {
        schema::execute_ipython_cell()
    }

    async fn call(&self, context: &ToolContext<'_>, arguments: &Map<String, Value>) -> Result<ToolResult, ToolError> {
        let color = context.text == TextForm::Raw;
        let call = CellCall { color, ..CellCall::new(text(arguments, "code")) };
        match context.client.cell(&call, context.limit).await {
            Ok(answer) => Ok(render::ipython(&answer, context)),
            Err(err) => or_result(err, "cell"),
        }
    }
}
