//! What a model is told about the tools, and the check of what it calls them with.
//!
//! Names and parameters are those that models were trained on (`OpenHands` `CodeAct`). A failed check says what to do better,
//! in words for the model.

use serde_json::{Map, Value, json};

/// One tool as a model sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Schema {
    /// The name that the model calls.
    pub name: String,
    /// What the tool does and how it is used.
    pub description: String,
    /// JSON Schema of the arguments: an object with `properties` and `required`.
    pub parameters: Value,
}

impl Schema {
    /// Returns the `OpenAI` form: `{"type": "function", "function": {..}}`.
    pub fn to_openai(&self) -> Value {
        json!({
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        })
    }

    /// Checks arguments: nothing missing, nothing unknown, the right types, one of the listed values.
    ///
    /// # Errors
    /// A sentence that names the argument and what it must be.
    pub fn check(&self, arguments: &Map<String, Value>) -> Result<(), String> {
        let empty = Map::new();
        let properties = self.parameters["properties"].as_object().unwrap_or(&empty);
        let required = self.parameters["required"].as_array().map_or(&[][..], Vec::as_slice);
        for name in required.iter().filter_map(Value::as_str) {
            if !arguments.contains_key(name) {
                return Err(format!("Missing argument `{name}` of `{}`. {}", self.name, self.usage(properties)));
            }
        }
        for (name, value) in arguments {
            let Some(property) = properties.get(name) else {
                return Err(format!("Unknown argument `{name}` of `{}`. {}", self.name, self.usage(properties)));
            };
            check_value(property, value).map_err(|wanted| {
                format!("Argument `{name}` of `{}` must be {wanted}, not {}.", self.name, show(value))
            })?;
        }
        Ok(())
    }

    fn usage(&self, properties: &Map<String, Value>) -> String {
        let required = &self.parameters["required"];
        let is_required = |name: &str| required.as_array().is_some_and(|list| list.iter().any(|item| item == name));
        let list: Vec<String> = properties
            .keys()
            .map(|name| if is_required(name) { format!("`{name}`") } else { format!("`{name}` (optional)") })
            .collect();
        match list.len() {
            0 => "It takes no arguments.".to_owned(),
            _ => format!("It takes: {}.", list.join(", ")),
        }
    }
}

/// Says what a value must be when it is not that.
fn check_value(property: &Value, value: &Value) -> Result<(), String> {
    if let Some(allowed) = property["enum"].as_array() {
        // A model that writes true for "true" means the same.
        let as_text = value.as_bool().map(|truth| Value::from(truth.to_string()));
        if allowed.contains(value) || as_text.is_some_and(|text| allowed.contains(&text)) {
            return Ok(());
        }
        let list: Vec<String> = allowed.iter().map(Value::to_string).collect();
        return Err(format!("one of {}", list.join(", ")));
    }
    let (fits, wanted) = match property["type"].as_str() {
        Some("string") => (value.is_string(), "a string"),
        Some("number") => (value.is_number(), "a number"),
        Some("integer") => (value.is_i64() || value.is_u64(), "a whole number"),
        Some("boolean") => (value.is_boolean(), "true or false"),
        Some("array") => (value.is_array(), "a list"),
        Some("object") => (value.is_object(), "an object"),
        _ => (true, ""),
    };
    if !fits {
        return Err(wanted.to_owned());
    }
    match (property["exclusiveMinimum"].as_f64(), value.as_f64()) {
        (Some(least), Some(number)) if number <= least => Err(format!("a number above {least}")),
        _ => Ok(()),
    }
}

/// Shows a value in a sentence, short.
fn show(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

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
            as a line into the command, `C-c` interrupts it and `C-d` ends its input.\n\
            * Long output is cut in the middle."
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
    use super::*;

    fn check(schema: &Schema, arguments: Value) -> Result<(), String> {
        let Value::Object(arguments) = arguments else { panic!("arguments are an object") };
        schema.check(&arguments)
    }

    #[test]
    fn right_arguments_pass() {
        check(&execute_bash(), json!({"command": "ls"})).unwrap();
        check(&execute_bash(), json!({"command": "", "is_input": "true", "timeout": 1.5})).unwrap();
        check(&execute_bash(), json!({"command": "", "is_input": true})).unwrap();
        check(&finish(), json!({"message": "done"})).unwrap();
    }

    #[test]
    fn a_wrong_argument_is_named_with_what_it_must_be() {
        let text = |schema: &Schema, arguments| check(schema, arguments).unwrap_err();
        assert_eq!(
            text(&execute_bash(), json!({"cmd": "ls"})),
            "Missing argument `command` of `execute_bash`. It takes: `command`, `is_input` (optional), `timeout` (optional)."
        );
        assert_eq!(
            text(&think(), json!({"thought": "x", "plan": 1})),
            "Unknown argument `plan` of `think`. It takes: `thought`."
        );
        assert_eq!(
            text(&execute_ipython_cell(), json!({"code": ["print(1)"]})),
            r#"Argument `code` of `execute_ipython_cell` must be a string, not ["print(1)"]."#
        );
        assert_eq!(
            text(&execute_bash(), json!({"command": "ls", "is_input": "yes"})),
            r#"Argument `is_input` of `execute_bash` must be one of "true", "false", not "yes"."#
        );
        assert_eq!(
            text(&execute_bash(), json!({"command": "ls", "timeout": 0})),
            "Argument `timeout` of `execute_bash` must be a number above 0, not 0."
        );
        assert_eq!(
            text(&execute_bash(), json!({"command": "ls", "timeout": "soon"})),
            r#"Argument `timeout` of `execute_bash` must be a number, not "soon"."#
        );
    }

    #[test]
    fn the_openai_form_is_a_function() {
        let form = finish().to_openai();
        assert_eq!(form["type"], "function");
        assert_eq!(form["function"]["name"], "finish");
        assert_eq!(form["function"]["parameters"]["required"], json!(["message"]));
    }
}
