//! What a model is told about each tool but the editor.

use serde_json::json;

use super::Schema;

/// Returns `execute_bash`.
pub fn execute_bash() -> Schema {
    Schema {
        name: "execute_bash".to_owned(),
        description: "Runs a bash command in a terminal and returns what it prints, with its exit code.\n\
            * One shell stays open for the whole task: the working directory, variables, functions and background \
            processes are kept from call to call.\n\
            * One command at a time. To run several, join them with `&&` or `;`, or write several lines.\n\
            * A command that runs for long: send it to the background and its output to a file, such as \
            `python3 app.py > server.log 2>&1 &`.\n\
            * When a command is still running after a while without output, the call returns what it printed so far. \
            Then call again with `is_input` set to `true`: an empty `command` waits for more output, a text is typed \
            as a line into the command, `C-c` interrupts it and `C-d` ends its input. The same goes for a command that \
            is waiting for input, such as a question or a password.\n\
            * Output is shown without colours, and a progress bar as it is at the end. Long output is cut in the middle."
            .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {
                "command": {
                    "type": "string",
                    "description": "The bash command to run. With `is_input`: the text to type into the running \
                        command, `C-c`, `C-d`, or empty to wait for more output.",
                },
                "is_input": {
                    "type": "string",
                    "enum": ["true", "false"],
                    "description": "Whether `command` is input for the command that is running. Default: false.",
                },
                "timeout": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "description": "Seconds after which the command is interrupted. Optional.",
                },
            },
            "required": ["command"],
        }),
    }
}

/// Returns `execute_ipython_cell`.
pub fn execute_ipython_cell() -> Schema {
    Schema {
        name: "execute_ipython_cell".to_owned(),
        description:
            "Runs a cell of Python code in an IPython environment and returns what it prints and the value of \
            its last expression. Variables, functions and imports are kept from cell to cell; import and define \
            whatever you use first."
                .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
        }),
    }
}

/// Returns `think`.
pub fn think() -> Schema {
    Schema {
        name: "think".to_owned(),
        description:
            "Writes down a thought. It runs nothing and changes nothing; use it to reason about what you have \
            found, to weigh several ways to go on, or to plan the next steps."
                .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {"thought": {"type": "string", "description": "The thought to write down."}},
            "required": ["thought"],
        }),
    }
}

/// Returns `finish`.
pub fn finish() -> Schema {
    Schema {
        name: "finish".to_owned(),
        description:
            "Ends the task. Call it when the task is solved, or when you cannot go on, and give your answer or \
            a summary of what was done in `message`."
                .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {
                "message": {"type": "string", "description": "The final answer, or what was done and what is left."},
            },
            "required": ["message"],
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_openai_form_is_a_function() {
        let form = finish().to_openai();
        assert_eq!(form["type"], "function");
        assert_eq!(form["function"]["name"], "finish");
        assert_eq!(form["function"]["parameters"]["required"], json!(["message"]));
    }

    #[test]
    fn models_are_told_this() {
        let all = [execute_bash(), execute_ipython_cell(), super::super::str_replace_editor(), think(), finish()];
        let told: Value = serde_json::from_str(include_str!("told.json")).unwrap();
        let is = json!(all.map(|schema| schema.to_openai()));
        assert_eq!(is, told, "told.json has to say: {is:#}");
    }
}
