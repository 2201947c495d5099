//! What a model is told about the editor.

use serde_json::json;

use super::Schema;

/// Returns `str_replace_editor`.
pub fn str_replace_editor() -> Schema {
    Schema {
        name: "str_replace_editor".to_owned(),
        description: "Views, creates and edits text files.\n\
            * `view` shows a file with the numbers of its lines, or lists a directory two levels deep without hidden \
            items. Long files are cut: ask for a part with `view_range`.\n\
            * `create` makes a new file and the directories above it. It does not overwrite a file.\n\
            * `str_replace` replaces `old_str` by `new_str`. `old_str` must be in the file exactly once, with the same \
            spaces and line breaks and without line numbers; take some lines around it to make it unique. Without \
            `new_str` it is deleted.\n\
            * `insert` inserts `new_str` as lines of its own behind line `insert_line`.\n\
            * `undo_edit` takes back the last change that this tool has made to the file.\n\
            Encoding and line endings of a file are kept."
            .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {
                "command": {
                    "type": "string",
                    "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
                    "description": "What to do.",
                },
                "path": {
                    "type": "string",
                    "description": "Absolute path of the file or directory, such as `/workspace/file.py`.",
                },
                "file_text": {
                    "type": "string",
                    "description": "Required by `create`: the text of the file.",
                },
                "old_str": {
                    "type": "string",
                    "description": "Required by `str_replace`: the text in the file to replace.",
                },
                "new_str": {
                    "type": "string",
                    "description": "Of `str_replace`: the text to put in its place; none deletes it. Required by \
                        `insert`: the text to insert.",
                },
                "insert_line": {
                    "type": "integer",
                    "minimum": 0,
                    "description": "Required by `insert`: the line behind which to insert; 0 is the beginning.",
                },
                "view_range": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "minItems": 2,
                    "maxItems": 2,
                    "description": "Of `view` with a file: the first and last line to show, counted from 1, such as \
                        [11, 20]; [11, -1] shows all from line 11 on.",
                },
            },
            "required": ["command", "path"],
        }),
    }
}
