//! Reading a sampled turn: reasoning, prose and tool calls in the hermes form that Qwen models write.
//!
//! What is read here is a view for the agent loop. The ids of the turn stay as they were sampled.

use prorl_core::ToolCall;
use serde_json::{Map, Value};

pub(crate) const THINK: &str = "<think>";
pub(crate) const END_THINK: &str = "</think>";
const CALL: &str = "<tool_call>";
const END_CALL: &str = "</tool_call>";

/// What a turn starts in; the generation prompt decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TurnStart {
    /// The turn opens its reasoning itself, if it has any.
    #[default]
    Answer,
    /// The generation prompt opened reasoning: calls count only behind `</think>`.
    Reasoning,
}

/// A turn, read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedTurn {
    /// What is said outside of reasoning and calls, without white space around it.
    pub content: String,
    /// The reasoning, without its tags; `None` when the turn has none.
    pub reasoning: Option<String>,
    /// Well-formed calls in order. Their ids are empty until [`ParsedTurn::number_calls`] gives them some.
    pub tool_calls: Vec<ToolCall>,
    /// Calls that cannot be made, in order, for the model to be told.
    pub malformed: Vec<MalformedCall>,
}

/// A tool call that is no call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedCall {
    /// What the model wrote, from the opening tag on.
    pub text: String,
    /// What is wrong with it.
    pub problem: String,
}

impl ParsedTurn {
    /// Gives the calls the ids `call_{turn}_{position}`.
    pub fn number_calls(&mut self, turn: usize) {
        for (idx, call) in self.tool_calls.iter_mut().enumerate() {
            call.id = format!("call_{turn}_{idx}");
        }
    }
}

/// Reads a turn's text: `<think>…</think>` is reasoning, in which calls do not count; each
/// `<tool_call>{"name": …, "arguments": {…}}</tool_call>` is a call; the rest is prose.
///
/// Without a call before it, a `</think>` that lacks its opening tag closes reasoning that the generation prompt opened; who
/// knows whether it did uses [`parse_hermes_from`]. Arguments may be a JSON text that holds an object. Nothing is repaired:
/// what is not a call is named in [`ParsedTurn::malformed`].
pub fn parse_hermes(text: &str) -> ParsedTurn {
    parse_hermes_from(TurnStart::Answer, text)
}

/// Reads a turn's text as [`parse_hermes`] does, knowing what it starts in.
///
/// Reasoning that is never closed is all there is: the turn was cut, and what looks like a call in it was only thought of.
pub fn parse_hermes_from(start: TurnStart, text: &str) -> ParsedTurn {
    let mut turn = ParsedTurn::default();
    let mut prose = String::new();
    let mut rest = text;
    let closed = text.split_once(END_THINK);
    let opened_by_prompt = match start {
        TurnStart::Reasoning => Some(closed.unwrap_or((text, ""))),
        TurnStart::Answer => closed.filter(|(reasoning, _)| !reasoning.contains(THINK) && !reasoning.contains(CALL)),
    };
    if let Some((reasoning, answer)) = opened_by_prompt {
        // Some models open it once more.
        let reasoning = reasoning.trim();
        turn.reasoning = Some(reasoning.strip_prefix(THINK).unwrap_or(reasoning).trim().to_owned());
        rest = answer;
    }
    loop {
        let (think_at, call_at) = (rest.find(THINK), rest.find(CALL));
        let Some(at) = think_at.into_iter().chain(call_at).min() else { break };
        prose.push_str(&rest[..at]);
        if think_at == Some(at) {
            let inside = &rest[at + THINK.len()..];
            let (reasoning, answer) = inside.split_once(END_THINK).unwrap_or((inside, ""));
            let all = turn.reasoning.get_or_insert_default();
            if !all.is_empty() {
                all.push('\n');
            }
            all.push_str(reasoning.trim());
            rest = answer;
        } else {
            let (call, length) = read_call(&rest[at..]);
            match call {
                Ok(call) => turn.tool_calls.push(call),
                Err(problem) => {
                    turn.malformed.push(MalformedCall { text: rest[at..at + length].to_owned(), problem });
                }
            }
            rest = &rest[at + length..];
        }
    }
    prose.push_str(rest);
    prose.trim().clone_into(&mut turn.content);
    turn
}

/// Reads the call at the start of `text` and says how long it is.
fn read_call(text: &str) -> (Result<ToolCall, String>, usize) {
    let body = &text[CALL.len()..];
    // The JSON says where it ends, so that a closing tag inside an argument does not end the call.
    let mut values = serde_json::Deserializer::from_str(body).into_iter::<Value>();
    let value = values.next();
    let (value, behind) = match value {
        Some(Ok(value)) => (Ok(value), values.byte_offset()),
        Some(Err(_)) if body.trim_start().starts_with(END_CALL) => (Err("no JSON between the tags".to_owned()), 0),
        Some(Err(err)) => (Err(format!("invalid JSON: {err}")), 0),
        None => (Err("no JSON behind the tag".to_owned()), 0),
    };
    let Some(gap) = body[behind..].find(END_CALL) else {
        return (Err(format!("{CALL} is not closed by {END_CALL}")), text.len());
    };
    let length = CALL.len() + behind + gap + END_CALL.len();
    let call = value.and_then(|value| {
        let between = body[behind..behind + gap].trim();
        if between.is_empty() { to_call(value) } else { Err(format!("{between:?} follows the JSON object")) }
    });
    (call, length)
}

fn to_call(value: Value) -> Result<ToolCall, String> {
    let Value::Object(mut fields) = value else {
        return Err("expected a JSON object with name and arguments".to_owned());
    };
    let name = match fields.remove("name") {
        Some(Value::String(name)) if !name.is_empty() => name,
        Some(_) => return Err("name is no text".to_owned()),
        None => return Err("no name".to_owned()),
    };
    let arguments = match fields.remove("arguments") {
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => serde_json::from_str::<Map<String, Value>>(&text)
            .map_err(|err| format!("arguments is a text that holds no JSON object: {err}"))?,
        Some(_) => return Err("arguments is no object".to_owned()),
        None => return Err("no arguments".to_owned()),
    };
    Ok(ToolCall { id: String::new(), name, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn calls(turn: &ParsedTurn) -> Vec<(&str, Value)> {
        turn.tool_calls.iter().map(|call| (call.name.as_str(), json!(call.arguments))).collect()
    }

    #[test]
    fn calls_prose_and_reasoning_are_told_apart() {
        let mut turn = parse_hermes(
            "<think>\nmaybe <tool_call>{\"name\": \"no\", \"arguments\": {}}</tool_call>\n</think>\n\nLet me see.\n\
             <tool_call>\n{\"name\": \"a\", \"arguments\": {\"x\": 1}}\n</tool_call>\nand\n\
             <tool_call>{\"name\":\"b\",\"arguments\":\"{\\\"y\\\": \\\"</tool_call>\\\"}\"}</tool_call>",
        );
        assert_eq!(calls(&turn), [("a", json!({"x": 1})), ("b", json!({"y": "</tool_call>"}))]);
        assert_eq!(turn.content, "Let me see.\n\nand");
        assert!(turn.reasoning.as_deref().is_some_and(|text| text.starts_with("maybe")));
        assert_eq!(turn.malformed, []);
        turn.number_calls(3);
        assert_eq!(turn.tool_calls[1].id, "call_3_1");
    }

    #[test]
    fn reasoning_may_be_opened_by_the_prompt_or_never_closed() {
        let turn = parse_hermes("so it is 4\n</think>\n\n4");
        assert_eq!((turn.reasoning.as_deref(), turn.content.as_str()), (Some("so it is 4"), "4"));
        let cut = parse_hermes("<think>so <tool_call>{\"name\": \"a\", \"arguments\": {}}</tool_call>");
        assert_eq!((cut.tool_calls.len(), cut.malformed.len(), cut.content.as_str()), (0, 0, ""));
    }

    #[test]
    fn a_call_thought_of_behind_a_prompt_that_opens_reasoning_is_no_call() {
        let call = |name: &str| format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{}}}}</tool_call>");
        let read = |text: &str| parse_hermes_from(TurnStart::Reasoning, text);
        let turn = read(&format!("I might call {} but no.\n</think>\n\nSo: {}", call("rm"), call("ls")));
        assert_eq!(calls(&turn), [("ls", json!({}))]);
        assert_eq!((turn.content.as_str(), turn.malformed.len()), ("So:", 0));
        assert!(turn.reasoning.as_deref().is_some_and(|text| text.ends_with("but no.")));
        // Cut while it thought.
        let turn = read(&format!("I might call {}", call("rm")));
        assert_eq!((turn.tool_calls.len(), turn.malformed.len(), turn.content.as_str()), (0, 0, ""));
        // Opened a second time by the turn itself.
        let turn = read("<think>\nhm\n</think>4");
        assert_eq!((turn.reasoning.as_deref(), turn.content.as_str()), (Some("hm"), "4"));
    }

    #[test]
    fn a_closing_think_tag_inside_an_argument_is_an_argument() {
        let turn = parse_hermes("<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": \"</think>\"}}</tool_call>");
        assert_eq!(calls(&turn), [("a", json!({"x": "</think>"}))]);
    }

    #[test]
    fn each_malformed_call_says_why_and_the_next_one_counts() {
        for (body, problem) in [
            ("{\"name\": \"a\", \"arguments\": {}", "invalid JSON: expected `,` or `}`"),
            ("{'name': 'a'}", "invalid JSON: key must be"),
            ("", "no JSON"),
            ("[1]", "expected a JSON object"),
            ("{\"arguments\": {}}", "no name"),
            ("{\"name\": \"\", \"arguments\": {}}", "name is no text"),
            ("{\"name\": 5, \"arguments\": {}}", "name is no text"),
            ("{\"name\": \"a\"}", "no arguments"),
            ("{\"name\": \"a\", \"arguments\": [1]}", "arguments is no object"),
            ("{\"name\": \"a\", \"arguments\": \"ls\"}", "arguments is a text"),
            ("{\"name\": \"a\", \"arguments\": {}} {}", "\"{}\" follows"),
            ("{\"name\": \"a\", \"arguments\": {\"x\": \"\\ud800\"}}", "invalid JSON"),
        ] {
            let turn = parse_hermes(&format!(
                "hm <tool_call>{body}</tool_call> <tool_call>{{\"name\": \"b\", \"arguments\": {{}}}}</tool_call>"
            ));
            assert_eq!(turn.malformed.len(), 1, "{body}");
            assert!(turn.malformed[0].problem.contains(problem), "{body}: {}", turn.malformed[0].problem);
            assert_eq!(calls(&turn), [("b", json!({}))], "{body}");
            assert_eq!(turn.content, "hm");
        }
        let open = parse_hermes("<tool_call>\n{\"name\": \"a\", \"arguments\": {}}");
        assert!(open.malformed[0].problem.contains("not closed"));
        assert!(open.malformed[0].text.starts_with("<tool_call>"));
    }

    proptest::proptest! {
        #[test]
        fn no_text_breaks_the_parser(parts in proptest::collection::vec(
            proptest::sample::select(vec!["<think>", "</think>", "<tool_call>", "</tool_call>", "{\"name\": \"a\", \"arguments\": {}}", "{", "é", "\n", "x"]), 0..12)) {
            let text = parts.concat();
            let turn = parse_hermes(&text);
            proptest::prop_assert!(turn.content.len() <= text.len());
            proptest::prop_assert!(turn.tool_calls.len() + turn.malformed.len() <= text.matches("<tool_call>").count());
        }
    }
}
