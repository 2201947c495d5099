//! What a model is told about the tools, and the check of what it calls them with.
//!
//! Names and parameters are those that models were trained on (`OpenHands` `CodeAct`). A failed check says what to do better,
//! in words for the model.

mod check;
mod editor;
mod tools;

#[cfg(feature = "host")]
pub(crate) use check::nearest;
pub use editor::str_replace_editor;
use serde_json::{Value, json};
pub use tools::{execute_bash, execute_ipython_cell, finish, think};

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
}
