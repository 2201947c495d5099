//! Messages as they go into a prompt.

use prorl_core::{Content, Part, Role, ToolCall};
use serde_json::{Value, json};

use super::{
    EncodeError,
    added::{AddedTokens, Break, texts_of},
};

/// One message of a conversation on its way into a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// What is said. Images are refused by name.
    pub content: Content,
    /// Calls that an assistant message quoted in a prompt makes.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool message answers.
    pub tool_call_id: Option<String>,
    /// The tool that a tool message comes from.
    pub name: Option<String>,
}

impl ChatMessage {
    /// A message of `role` that says `content`.
    pub fn new(role: Role, content: impl Into<Content>) -> Self {
        Self { role, content: content.into(), tool_calls: Vec::new(), tool_call_id: None, name: None }
    }

    /// Instructions.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new(Role::System, content)
    }

    /// The task, or a word from an agent loop.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new(Role::User, content)
    }

    /// A word of the model's, quoted in a prompt.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// What the tool `name` answered to the call `call_id`.
    pub fn tool(call_id: impl Into<String>, name: impl Into<String>, content: impl Into<Content>) -> Self {
        Self { tool_call_id: Some(call_id.into()), name: Some(name.into()), ..Self::new(Role::Tool, content) }
    }

    /// Returns the text, or the error that names an image.
    pub(super) fn text(&self, message_idx: usize) -> Result<String, EncodeError> {
        if let Content::Parts(parts) = &self.content
            && let Some(Part::Image { mime, .. }) = parts.iter().find(|part| matches!(part, Part::Image { .. }))
        {
            return Err(EncodeError::Image { message_idx, mime: mime.clone() });
        }
        Ok(self.content.text())
    }

    /// Calls `visit` with each text in this message, contents and all.
    pub(super) fn visit_texts<'a>(&'a self, out: &mut Vec<&'a str>) {
        match &self.content {
            Content::Text(text) => out.push(text),
            Content::Parts(parts) => out.extend(parts.iter().filter_map(|part| match part {
                Part::Text { text } => Some(text.as_str()),
                Part::Image { .. } => None,
            })),
        }
        out.extend(self.tool_call_id.as_deref());
        out.extend(self.name.as_deref());
        for call in &self.tool_calls {
            out.extend([call.id.as_str(), call.name.as_str()]);
            for (key, value) in &call.arguments {
                out.push(key);
                texts_of(value, out);
            }
        }
    }

    /// The message as templates want it, with added tokens in its texts broken by `marker`.
    pub(super) fn to_value(
        &self,
        message_idx: usize,
        added: &AddedTokens,
        marker: Option<char>,
    ) -> Result<Value, EncodeError> {
        let mut value = json!({"role": self.role.as_str(), "content": self.text(message_idx)?});
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(
                |call| json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}),
            );
            value["tool_calls"] = calls.collect();
        }
        for (field, text) in [("tool_call_id", &self.tool_call_id), ("name", &self.name)] {
            if let Some(text) = text {
                value[field] = json!(text);
            }
        }
        let which = if self.role == Role::Assistant { Break::Special } else { Break::All };
        Ok(match marker {
            Some(marker) => added.break_value(&value, marker, which),
            None => value,
        })
    }
}
