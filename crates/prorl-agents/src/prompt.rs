//! The ways in which an instance gives its prompt (API section 1.6).

use prorl_core::{Instance, Malformed, Role, request::kind_of};
use prorl_llm::tokenizer::ChatMessage;
use serde_json::Value;

/// Reads the messages of an instance: `prompt` as text, as a list of chat messages, or as JSON text of such a list; else
/// the text of the first of `instead` that is there. The instance's `system_prompt` takes the place of every system message;
/// without it, `system` goes first unless the list has one of its own.
///
/// # Errors
/// Names the field that is missing or wrong.
pub fn messages(instance: &Instance, instead: &[&str], system: &str) -> Result<Vec<ChatMessage>, Malformed> {
    let given = std::iter::once("prompt").chain(instead.iter().copied());
    let found = given.filter_map(|field| instance.get(field).map(|value| (field, value))).find(|(_, v)| !v.is_null());
    let Some((field, value)) = found else {
        let expected = [&["prompt"], instead].concat().join(" or ");
        return Err(Malformed::new("instance.prompt", format!("missing; expected {expected}")));
    };
    let at = format!("instance.{field}");
    let mut messages = match value {
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            // veRL keeps the list as JSON text; any other text is the prompt itself.
            Ok(Value::Array(list)) if !list.is_empty() && list.iter().all(is_message) => chat(&at, &list)?,
            _ => vec![ChatMessage::new(Role::User, text.as_str())],
        },
        Value::Array(list) if field == "prompt" => chat(&at, list)?,
        other => {
            let problem = format!("expected text or a list of chat messages, found {}", kind_of(other));
            return Err(Malformed::new(at, problem));
        }
    };
    if messages.iter().all(|message| message.content.text().trim().is_empty()) {
        return Err(Malformed::new(at, "expected some text, found none"));
    }
    let own_system = instance.common().ok().and_then(|common| common.system_prompt);
    if own_system.is_some() {
        messages.retain(|message| message.role != Role::System);
    }
    if messages.iter().all(|message| message.role != Role::System) {
        let text = own_system.as_deref().unwrap_or(system).trim();
        messages.insert(0, ChatMessage::new(Role::System, text));
    }
    Ok(messages)
}

/// Tells a chat message from any other object that a prompt's text may hold.
fn is_message(value: &Value) -> bool {
    value.get("role").is_some_and(Value::is_string) && value.get("content").is_some()
}

fn chat(at: &str, list: &[Value]) -> Result<Vec<ChatMessage>, Malformed> {
    let mut messages = Vec::new();
    for (idx, entry) in list.iter().enumerate() {
        let wrong = |field: &str, problem: String| Malformed::new(format!("{at}[{idx}].{field}"), problem);
        let role = match entry.get("role").and_then(Value::as_str) {
            Some("system") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            other => {
                let found = other.map_or_else(|| "none".to_owned(), |role| format!("{role:?}"));
                return Err(wrong("role", format!("expected one of system, user, assistant, found {found}")));
            }
        };
        let content = match entry.get("content") {
            Some(Value::String(text)) => text,
            Some(other) => return Err(wrong("content", format!("expected text, found {}", kind_of(other)))),
            None => return Err(wrong("content", "missing; expected text".to_owned())),
        };
        messages.push(ChatMessage::new(role, content.as_str()));
    }
    match messages.last() {
        None => Err(Malformed::new(at, "expected at least one message, found none")),
        Some(end) if end.role == Role::Assistant => {
            Err(Malformed::new(at, "expected the last message to be the user's, found the assistant's"))
        }
        Some(_) => Ok(messages),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(fields: Value) -> Result<Vec<(Role, String)>, String> {
        let Value::Object(fields) = fields else { unreachable!("tests give objects") };
        messages(&Instance(fields), &["problem", "question"], "SYSTEM")
            .map(|list| list.into_iter().map(|message| (message.role, message.content.text())).collect())
            .map_err(|err| err.to_string())
    }

    #[test]
    fn every_form_of_a_prompt_is_read() {
        let plain = vec![(Role::System, "SYSTEM".to_owned()), (Role::User, "1+1?".to_owned())];
        assert_eq!(read(json!({"prompt": "1+1?"})).unwrap(), plain);
        assert_eq!(read(json!({"prompt": [{"role": "user", "content": "1+1?"}]})).unwrap(), plain);
        assert_eq!(read(json!({"prompt": "[{\"role\": \"user\", \"content\": \"1+1?\"}]"})).unwrap(), plain);
        assert_eq!(read(json!({"question": "1+1?"})).unwrap(), plain);
        assert_eq!(read(json!({"prompt": "1+1?", "problem": "other"})).unwrap(), plain);
        for text in ["[1, 2]", "[{\"x\": 1}]", "[]", "{\"role\": \"user\"}"] {
            assert_eq!(read(json!({"prompt": text})).unwrap()[1].1, text);
        }
        let later = read(json!({"prompt": [{"role": "user", "content": "x"}, {"role": "system", "content": "keep"},
            {"role": "user", "content": "y"}]}));
        assert_eq!(later.unwrap()[1], (Role::System, "keep".to_owned()));
        let own = read(json!({"prompt": [{"role": "system", "content": "mine"}, {"role": "user", "content": "x"}]}));
        assert_eq!(own.unwrap()[0].1, "mine");
        let named = read(json!({"system_prompt": "named", "prompt": [{"role": "system", "content": "mine"},
            {"role": "user", "content": "x"}]}));
        assert_eq!(named.unwrap(), [(Role::System, "named".to_owned()), (Role::User, "x".to_owned())]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (fields, expected) in [
            (json!({}), "instance.prompt: missing; expected prompt or problem or question"),
            (json!({"prompt": 5}), "instance.prompt: expected text or a list of chat messages, found a number"),
            (json!({"prompt": []}), "instance.prompt: expected at least one message"),
            (json!({"prompt": "  "}), "instance.prompt: expected some text"),
            (json!({"prompt": [{"role": "robot", "content": "x"}]}), "instance.prompt[0].role: expected one of system"),
            (json!({"prompt": [{"role": "user"}]}), "instance.prompt[0].content: missing"),
            (json!({"prompt": [{"role": "user", "content": [1]}]}), "instance.prompt[0].content: expected text"),
            (json!({"prompt": [{"role": "assistant", "content": "x"}]}), "to be the user's"),
        ] {
            let err = read(fields).unwrap_err();
            assert!(err.starts_with(expected) || err.contains(expected), "{err}");
        }
    }
}
