//! `str_replace_editor`.

use async_trait::async_trait;
use serde_json::{Map, Value};

use super::{or_result, text};
use crate::{
    host::{
        client::ToolError,
        toolbox::{Tool, ToolContext, ToolResult},
    },
    schema::{self, Schema},
    wire::{Change, Edit},
};

/// `str_replace_editor`: looks at files and changes them by exact edits.
#[derive(Clone, Copy, Debug)]
pub struct StrReplaceEditor;

#[async_trait]
impl Tool for StrReplaceEditor {
    fn schema(&self) -> Schema {
        schema::str_replace_editor()
    }

    async fn call(&self, context: &ToolContext<'_>, arguments: &Map<String, Value>) -> Result<ToolResult, ToolError> {
        let change = match change(arguments) {
            Ok(change) => change,
            Err(fault) => return Ok(ToolResult::error(fault)),
        };
        let path = text(arguments, "path").to_owned();
        let edit = Edit { path, change, output_chars: context.output_chars as u64 };
        match context.client.edit(&edit, context.limit).await {
            Ok(answer) => Ok(ToolResult { is_error: answer.is_refused, ..ToolResult::text(answer.text) }),
            Err(err) => or_result(err, "text"),
        }
    }
}

/// Returns a whole number, which may be written as 3.0.
fn whole(value: &Value) -> Option<i64> {
    #[expect(clippy::cast_possible_truncation, reason = "what is too large for a line is the largest, and refused")]
    value.as_i64().or_else(|| value.as_f64().map(|number| number as i64))
}

/// Reads what is to be done. The error names what this command lacks, which the schema cannot say.
fn change(arguments: &Map<String, Value>) -> Result<Change, String> {
    let command = text(arguments, "command");
    let needed: &[&str] = match command {
        "create" => &["file_text"],
        "str_replace" => &["old_str"],
        "insert" => &["insert_line", "new_str"],
        _ => &[],
    };
    let is_given = |name: &str| arguments.get(name).is_some_and(|value| !value.is_null());
    let missing: Vec<String> = needed.iter().filter(|name| !is_given(name)).map(|name| format!("`{name}`")).collect();
    if !missing.is_empty() {
        return Err(format!("Missing argument {} of the command `{command}`.", missing.join(" and ")));
    }
    let owned = |name| text(arguments, name).to_owned();
    Ok(match command {
        "create" => Change::Create { text: owned("file_text") },
        "str_replace" => Change::Replace { old: owned("old_str"), new: owned("new_str") },
        "insert" => {
            let after = arguments.get("insert_line").and_then(whole).and_then(|line| u64::try_from(line).ok());
            Change::Insert { after: after.unwrap_or(u64::MAX), text: owned("new_str") }
        }
        "undo_edit" => Change::Undo,
        _ => Change::View { range: range(arguments.get("view_range"))? },
    })
}

fn range(given: Option<&Value>) -> Result<Option<(u64, Option<u64>)>, String> {
    let Some(given) = given.and_then(Value::as_array) else { return Ok(None) };
    let lines: Vec<i64> = given.iter().filter_map(whole).collect();
    match lines[..] {
        [first, -1] if first >= 1 => Ok(Some((first.unsigned_abs(), None))),
        [first, last] if first >= 1 && last >= first => Ok(Some((first.unsigned_abs(), Some(last.unsigned_abs())))),
        _ => Err(format!(
            "`view_range` must be [first, last] with lines counted from 1 and first <= last, or -1 as last, not {}.",
            Value::from(lines)
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(arguments: &Value) -> Result<Change, String> {
        change(arguments.as_object().unwrap())
    }

    #[test]
    fn arguments_are_read_as_each_command_takes_them() {
        let view = |range| Ok(Change::View { range });
        assert_eq!(read(&json!({"command": "view"})), view(None));
        assert_eq!(read(&json!({"command": "view", "view_range": null})), view(None));
        assert_eq!(read(&json!({"command": "view", "view_range": [2, -1]})), view(Some((2, None))));
        assert_eq!(read(&json!({"command": "view", "view_range": [2.0, 3]})), view(Some((2, Some(3)))));
        assert_eq!(
            read(&json!({"command": "str_replace", "old_str": "a"})),
            Ok(Change::Replace { old: "a".to_owned(), new: String::new() })
        );
        assert_eq!(
            read(&json!({"command": "insert", "insert_line": 0, "new_str": "a"})),
            Ok(Change::Insert { after: 0, text: "a".to_owned() })
        );
    }

    #[test]
    fn what_a_command_lacks_is_named() {
        let fault = |arguments: Value| read(&arguments).unwrap_err();
        assert_eq!(fault(json!({"command": "create"})), "Missing argument `file_text` of the command `create`.");
        assert_eq!(
            fault(json!({"command": "insert", "new_str": null})),
            "Missing argument `insert_line` and `new_str` of the command `insert`."
        );
        for range in [json!([0, 5]), json!([5, 4]), json!([3, -2])] {
            let told = fault(json!({"command": "view", "view_range": range}));
            assert!(told.starts_with("`view_range` must be [first, last]"), "{told}");
        }
    }
}
