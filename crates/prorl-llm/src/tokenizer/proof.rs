//! The proof, at load, that prompts of a template can be extended token-exactly.
//!
//! On trial conversations our encoding must equal the model's own tokenizer on the whole rendering, and a suffix rendered
//! behind a fixed conversation must be what the template writes behind a real one.

use prorl_core::{Role, TokenId, ToolCall};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::{ChatMessage, ChatOptions, Inner};

struct Trial {
    name: &'static str,
    messages: Vec<ChatMessage>,
    tools: Vec<Value>,
}

/// Proves the template; the error says which conversation differs and how.
pub(super) fn prove(inner: &Inner, full: &Tokenizer) -> Result<(), String> {
    added_tokens_stay_apart(inner)?;
    for enable_thinking in [true, false] {
        let options = ChatOptions { enable_thinking };
        for trial in trials() {
            let at = |problem: String| {
                format!("{} (thinking {}): {problem}", trial.name, if enable_thinking { "on" } else { "off" })
            };
            only_defined_is_written(inner, &trial, options).map_err(at)?;
            prompt_equals_full_encoding(inner, full, &trial, options).map_err(at)?;
            suffixes_fit(inner, full, &trial, options).map_err(at)?;
        }
    }
    content_is_only_broken(inner)
}

/// The vocabulary itself must not hold what looks like control: then no plain text can yield a control id.
fn added_tokens_stay_apart(inner: &Inner) -> Result<(), String> {
    for token in inner.added.tokens() {
        let ids = inner.encode_run(&token.content).map_err(|err| err.to_string())?;
        if let Some(id) = ids.into_iter().find(|id| inner.added.by_id(*id).is_some()) {
            return Err(format!("the plain text {:?} is encoded to the added token {id}", token.content));
        }
    }
    Ok(())
}

fn only_defined_is_written(inner: &Inner, trial: &Trial, options: ChatOptions) -> Result<(), String> {
    let name = inner.undefined_output(&trial.messages, &trial.tools, options).map_err(|err| err.to_string())?;
    name.map_or(Ok(()), |name| Err(format!("it writes {name}, which is not defined")))
}

fn full_encoding(full: &Tokenizer, text: &str) -> Result<Vec<TokenId>, String> {
    Ok(full.encode_fast(text, false).map_err(|err| err.to_string())?.get_ids().to_vec())
}

fn same_ids(what: &str, ours: &[TokenId], theirs: &[TokenId]) -> Result<(), String> {
    if ours == theirs {
        return Ok(());
    }
    let agreed = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
    let from = |ids: &[TokenId]| ids[agreed..].iter().take(6).copied().collect::<Vec<_>>();
    Err(format!("{what} differ at id {agreed}: {:?} instead of {:?}", from(ours), from(theirs)))
}

fn prompt_equals_full_encoding(
    inner: &Inner,
    full: &Tokenizer,
    trial: &Trial,
    options: ChatOptions,
) -> Result<(), String> {
    let ours = inner.encode_prompt(&trial.messages, &trial.tools, options).map_err(|err| err.to_string())?;
    let text = inner.render(&trial.messages, &trial.tools, options, None, true).map_err(|err| err.to_string())?;
    same_ids("ids of the prompt", &ours.ids, &full_encoding(full, &text)?)
}

/// For each assistant turn in the conversation: what we would append behind it is what the template writes behind it.
fn suffixes_fit(inner: &Inner, full: &Tokenizer, trial: &Trial, options: ChatOptions) -> Result<(), String> {
    let whole = inner.render(&trial.messages, &trial.tools, options, None, true).map_err(|err| err.to_string())?;
    for (idx, turn) in trial.messages.iter().enumerate() {
        let new = &trial.messages[idx + 1..];
        if turn.role != Role::Assistant || new.is_empty() {
            continue;
        }
        let suffix = inner.encode_suffix(new, &trial.tools, options).map_err(|err| err.to_string())?;
        let suffix_text = inner.decode(&suffix.ids, true);
        for message in new {
            if !suffix_text.contains(message.content.text().trim()) {
                return Err(format!("behind an assistant message a {} message is missing", message.role.as_str()));
            }
        }
        let Some(before) = whole.strip_suffix(&suffix_text) else {
            let roles: Vec<_> = new.iter().map(|message| message.role.as_str()).collect();
            return Err(format!("behind another conversation the messages {roles:?} are rendered as {suffix_text:?}"));
        };
        if !before.ends_with(&inner.end_of_turn_text) {
            return Err(format!("an assistant message does not end with {:?}", inner.end_of_turn_text));
        }
        // Text that moves, such as tools before the last user message, would be in the next prompt but not in ours.
        let history =
            inner.render(&trial.messages[..idx], &trial.tools, options, None, false).map_err(|err| err.to_string())?;
        if !whole.starts_with(&history) {
            let problem = "an assistant message and those behind it change what is rendered before them";
            return Err(problem.to_owned());
        }
        // Where the template only appends, history, turn and suffix together are the full encoding.
        let prompt =
            inner.render(&trial.messages[..idx], &trial.tools, options, None, true).map_err(|err| err.to_string())?;
        if let Some(sampled) = before.strip_prefix(&prompt) {
            let mut ids = full_encoding(full, &prompt)?;
            ids.extend(full_encoding(full, sampled)?);
            ids.extend(&suffix.ids);
            same_ids("ids of the extended prompt", &ids, &full_encoding(full, &whole)?)?;
        }
    }
    Ok(())
}

/// A template that counts, compares or rewrites contents might treat a broken one differently.
fn content_is_only_broken(inner: &Inner) -> Result<(), String> {
    let options = ChatOptions::default();
    let looks_like_control: Vec<&str> = inner.added.tokens().iter().map(|token| token.content.as_str()).collect();
    let content = format!("a {} b", looks_like_control.join(" "));
    for role in [Role::User, Role::Tool] {
        let conversation = |content: &str| {
            let said = match role {
                Role::Tool => ChatMessage::tool("call_0_0", "bash", content),
                role => ChatMessage::new(role, content),
            };
            vec![ChatMessage::user("go"), call("", 1), said]
        };
        let messages = conversation(&content);
        let marker = super::encode::marker_for(&messages, &[]).map_err(|err| err.to_string())?;
        let render = |marker| inner.render(&messages, &[], options, marker, true).map_err(|err| err.to_string());
        if render(Some(marker))?.replace(marker, "") != render(None)? {
            return Err(format!("the template changes a {} message that holds added tokens' text", role.as_str()));
        }
        let n_control = |messages: &[ChatMessage]| {
            let ids = inner.encode_prompt(messages, &[], options).map_err(|err| err.to_string())?.ids;
            Ok::<_, String>(ids.iter().filter(|id| inner.added.by_id(**id).is_some()).count())
        };
        if n_control(&messages)? != n_control(&conversation("a b"))? {
            return Err(format!("the text of a {} message becomes control ids", role.as_str()));
        }
    }
    Ok(())
}

fn call(content: &str, n_calls: usize) -> ChatMessage {
    let call = |idx| ToolCall {
        id: format!("call_0_{idx}"),
        name: "bash".to_owned(),
        arguments: json!({"command": "ls -l\n", "n": idx}).as_object().cloned().unwrap_or_default(),
    };
    ChatMessage { tool_calls: (0..n_calls).map(call).collect(), ..ChatMessage::assistant(content) }
}

fn trials() -> Vec<Trial> {
    let user = || ChatMessage::user("Two lines\n\n  and 12.5% more?\n");
    let system = || ChatMessage::system("Be brief.\n");
    let result = |idx, text: &str| ChatMessage::tool(format!("call_0_{idx}"), "bash", text);
    let tools = || {
        vec![json!({"type": "function", "function": {"name": "bash", "description": "Runs <a> \"command\" & more.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}})]
    };
    let answer = || ChatMessage::assistant("It is 13.");
    let trial = |name, tools, messages| Trial { name, messages, tools };
    vec![
        trial("user", vec![], vec![user()]),
        trial("system and user", vec![], vec![system(), user()]),
        trial("tools", tools(), vec![system(), user()]),
        trial("second question", vec![], vec![user(), answer(), user()]),
        trial("tool result", tools(), vec![system(), user(), call("Let me see.", 1), result(0, "a\n\n b\n")]),
        trial(
            "several tool results",
            tools(),
            vec![user(), call("", 2), result(0, "one\n"), result(1, "\n\ntwo"), answer(), user()],
        ),
        trial(
            "several turns",
            tools(),
            vec![system(), user(), call("", 1), result(0, "{\"x\": [1]}"), call("More.", 1), result(0, ""), user()],
        ),
    ]
}
