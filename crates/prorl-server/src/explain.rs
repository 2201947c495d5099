//! Says what is wrong with a JSON body in words that need no Rust: the field, the kind of value found, what was expected.

use serde::de::{DeserializeOwned, IgnoredAny};

use crate::problem::Problem;

/// The longest piece of a message, in characters: a client's own text comes back in it, and that can be long.
const LONGEST_PIECE: usize = 300;

/// Reads an object out of a body.
///
/// # Errors
/// `invalid_json` for text that is no JSON, `malformed` for JSON of another shape.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let text = str::from_utf8(body).map_err(|err| {
        Problem::invalid_json(format!("body: expected UTF-8, found another byte at {}", err.valid_up_to()))
    })?;
    if let Some(kind) = text.trim_ascii_start().bytes().next().and_then(kind_by_first_byte)
        && serde_json::from_str::<IgnoredAny>(text).is_ok()
    {
        // Serde would take a list for an object whose fields come in order.
        return Err(Problem::malformed(format!("body: expected an object, found {kind}")));
    }
    let not_json = |err: &serde_json::Error| Problem::invalid_json(format!("body: {}", shorten(&err.to_string())));
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|err| {
        if !err.inner().is_data() {
            return not_json(err.inner());
        }
        // A wrong field may stand before the place where the text stops being JSON, and the latter is the error to tell.
        match serde_json::from_str::<IgnoredAny>(text) {
            Err(syntax) => not_json(&syntax),
            Ok(_) => Problem::malformed(explain(&err.path().to_string(), &err.inner().to_string())),
        }
    })?;
    json.end().map_err(|err| not_json(&err))?;
    Ok(value)
}

/// Turns serde's path and message into ours.
fn explain(path: &str, message: &str) -> String {
    // serde_json appends the place; the path says it better.
    let message = message.rsplit_once(" at line ").map_or(message, |(message, _)| message);
    let problem = match (message.rsplit_once(", expected "), message.split_once(": ")) {
        (Some((found, expected)), Some(("invalid type", _))) => {
            let found = found.strip_prefix("invalid type: ").unwrap_or(found);
            format!("expected {}, found {}", words_for(expected), kind_of(found))
        }
        (Some((found, expected)), Some(("invalid value" | "invalid length", _))) => {
            let found = found.split_once(": ").map_or(found, |(_, found)| found);
            format!("expected {}, found {}", words_for(expected), shorten(found))
        }
        _ => shorten(message),
    };
    let path = if matches!(path, "." | "?") { "body" } else { path };
    format!("{}: {problem}", shorten(path))
}

/// Says in words what a Rust type stands for.
fn words_for(expected: &str) -> &str {
    match expected {
        "f64" | "f32" => "a number",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number of 0 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "a nonzero u32" | "a nonzero u64" | "a nonzero usize" => "a whole number of 1 or more",
        "a sequence" => "a list",
        "a map" => "an object",
        "a string" => "text",
        other if other.starts_with("struct ") => "an object",
        other => other,
    }
}

/// Says in words what serde found.
fn kind_of(found: &str) -> &'static str {
    match found.split([' ', ',']).next() {
        Some("boolean") => "a boolean",
        Some("integer" | "floating") => "a number",
        Some("string") => "a string",
        Some("null" | "unit" | "Option") => "null",
        Some("sequence") => "a list",
        Some("map") => "an object",
        _ => "another kind of value",
    }
}

/// Says what JSON text that is no object is, by its first byte.
fn kind_by_first_byte(first: u8) -> Option<&'static str> {
    match first {
        b'[' => Some("a list"),
        b'"' => Some("a string"),
        b't' | b'f' => Some("a boolean"),
        b'n' => Some("null"),
        b'-' | b'0'..=b'9' => Some("a number"),
        _ => None,
    }
}

/// Cuts a text that may hold a client's own words.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(LONGEST_PIECE) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prorl_core::JobRequest;
    use std::{collections::BTreeMap, num::NonZeroUsize};

    fn problem(body: impl AsRef<[u8]>) -> String {
        let problem = parse::<JobRequest>(body.as_ref()).unwrap_err();
        format!("{} {}", problem.code(), problem.detail())
    }

    #[test]
    fn text_that_is_no_json_is_told_from_json_of_another_shape() {
        for body in ["", " ", "{", "nonsense", "{\"instance\":{}} x", "{\"timeout\":\"5\"", "[1,]"] {
            assert!(problem(body).starts_with("invalid_json body: "), "{body:?}: {}", problem(body));
        }
        assert_eq!(problem(b"{\"a\":\"\xff\"}"), "invalid_json body: expected UTF-8, found another byte at 6");
        let deep = format!("{{\"instance\":{{\"a\":{}1{}}}}}", "[".repeat(500), "]".repeat(500));
        assert!(problem(deep).starts_with("invalid_json body: recursion limit"));
    }

    #[test]
    fn the_field_the_kind_and_the_expectation_are_named() {
        for (body, expected) in [
            ("[]", "body: expected an object, found a list"),
            (" 3 ", "body: expected an object, found a number"),
            ("\"{}\"", "body: expected an object, found a string"),
            ("null", "body: expected an object, found null"),
            ("true", "body: expected an object, found a boolean"),
            ("{}", "body: missing field `instance`"),
            (r#"{"instance":3}"#, "instance: expected an object, found a number"),
            (r#"{"instance":{},"timeout":"5"}"#, "timeout: expected a number, found a string"),
            (r#"{"instance":{},"retries":-1}"#, "retries: expected a whole number of 0 or more, found integer `-1`"),
            (r#"{"instance":{},"detach":null}"#, "detach: expected a boolean, found null"),
            (
                r#"{"instance":{},"sampling_params":{"top_p":{}}}"#,
                "sampling_params.top_p: expected a number, found an object",
            ),
            (
                r#"{"instance":{},"sampling_params":{"stop":["a",1.5]}}"#,
                "sampling_params.stop[1]: expected text, found a number",
            ),
        ] {
            assert_eq!(problem(body), format!("malformed {expected}"), "{body}");
        }
        let unknown = problem(r#"{"instance":{},"timeot":1}"#);
        assert!(unknown.starts_with("malformed timeot: unknown field `timeot`, expected one of `job_id`"), "{unknown}");
        let word = problem(r#"{"instance":{},"agent":{"history":"drop"}}"#);
        assert_eq!(word, "malformed agent.history: unknown variant `drop`, expected `keep` or `strip`");
        let zero = parse::<BTreeMap<String, NonZeroUsize>>(br#"{"n":0}"#).unwrap_err();
        assert_eq!(zero.detail(), "n: expected a whole number of 1 or more, found integer `0`");
    }

    #[test]
    fn a_long_value_does_not_come_back_whole() {
        let long = "x".repeat(1 << 20);
        for body in [
            format!(r#"{{"instance":{{}},"timeout":"{long}"}}"#),
            format!(r#"{{"instance":{{}},"{long}":1}}"#),
            format!(r#"{{"instance":{{}},"job_id":"{long}"}}"#),
            format!(r#"{{"instance":{{}},"agent":{{"history":"{long}"}}}}"#),
        ] {
            assert!(problem(body).len() < 1000);
        }
    }
}
