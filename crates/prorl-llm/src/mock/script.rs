//! What a scripted policy says.

use std::time::Duration;

use prorl_core::{TokenId, request::kind_of};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// A scripted policy: which turns it takes for which task.
///
/// ```
/// use prorl_llm::mock::Script;
///
/// let script = Script::from_json(br#"{
///     "seed": 1,
///     "noncanonical": 0.5,
///     "tasks": [{"match": "17 * 23", "turns": [
///         "<tool_call>\n{\"name\": \"execute_ipython_cell\", \"arguments\": {\"code\": \"17 * 23\"}}\n</tool_call>",
///         {"text": "It is 391.", "latency": 0.05}
///     ]}],
///     "default": {"turns": [{"status": 500, "body": "out of memory", "times": 1, "text": "Sorry."}]}
/// }"#)?;
/// assert_eq!(script.tasks.len(), 1);
/// # Ok::<(), prorl_llm::mock::ScriptError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// Seeds splits and log-probabilities, together with the prompt and the request's own seed.
    #[serde(default)]
    pub seed: u64,
    /// Share of tokens, from 0 to 1, that are sampled as two entries which decode to the same text.
    #[serde(default)]
    pub noncanonical: f64,
    /// Turns by task; the task whose `match` is the longest one in the prompt wins.
    #[serde(default)]
    pub tasks: Vec<ScriptedTask>,
    /// Turns where no task matches. Without, such a turn is empty.
    #[serde(default)]
    pub default: Option<Turns>,
}

/// One task's turns.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedTask {
    /// Text that occurs in the task's prompt.
    #[serde(rename = "match")]
    pub matches: String,
    /// The instance that this is the script of, for whoever compares results with it; the server does not look at it.
    #[serde(default)]
    pub instance_id: Option<String>,
    /// The reward that the turns imply, likewise.
    #[serde(default)]
    pub expect: Option<f64>,
    /// Whether the answer is what the script's code prints, likewise.
    #[serde(default)]
    pub computed: bool,
    /// Its turns in order; the last one is taken again when they run out.
    pub turns: Vec<ScriptedTurn>,
}

/// Turns without a task.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turns {
    /// In order; the last one is taken again when they run out.
    pub turns: Vec<ScriptedTurn>,
}

/// One turn: a plain text, or an object with a text or ids and what else is to happen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScriptedTurn {
    /// What is said, `<tool_call>` and its like as their ids. The end-of-turn token is added.
    pub text: String,
    /// Ids instead of a text, sampled as they are.
    pub ids: Option<Vec<TokenId>>,
    /// Seconds until the answer.
    pub latency: Duration,
    /// How it ends, where that is not to follow from the length: `Length` leaves the end-of-turn token away.
    pub finish: Option<ScriptedFinish>,
    /// What goes wrong.
    pub fault: Option<Fault>,
    /// For how many calls of this turn the fault holds; for all when absent.
    pub times: Option<u32>,
    /// Share of split tokens in this turn instead of the script's.
    pub noncanonical: Option<f64>,
}

/// A turn's scripted end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScriptedFinish {
    /// With an end-of-turn token.
    Stop,
    /// Without.
    Length,
    /// As an engine does whose weights change: status 200 and the ids so far.
    Abort,
}

/// What goes wrong with a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Another status than 200.
    Status {
        /// The status.
        status: u16,
        /// The body.
        body: String,
    },
    /// The connection ends in the middle of the answer.
    Cut,
    /// There is never an answer.
    Hang,
    /// The answer is no JSON.
    Garbage,
    /// The log-probabilities are wrong.
    Logprobs(LogprobFault),
}

/// What is wrong with log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogprobFault {
    /// The last one is a bare `NaN`, as Python writes it.
    Nan,
    /// The last one is null.
    Null,
    /// There are none.
    Missing,
    /// The last one is above 0.
    Positive,
    /// There is one less than ids.
    Short,
}

/// Why a script cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("script: {0}")]
pub struct ScriptError(#[from] serde_json::Error);

impl Script {
    /// Reads a script.
    ///
    /// # Errors
    /// When it is no JSON or has a field that no script has; the text says where.
    pub fn from_json(json: &[u8]) -> Result<Self, ScriptError> {
        Ok(serde_json::from_slice(json)?)
    }

    /// The turns of the task that this prompt is of, and the task's position.
    pub(super) fn turns_for(&self, prompt: &str) -> (Option<usize>, &[ScriptedTurn]) {
        let matching = self.tasks.iter().enumerate().filter(|(_, task)| prompt.contains(&task.matches));
        match matching.max_by_key(|(_, task)| task.matches.len()) {
            Some((idx, task)) => (Some(idx), &task.turns),
            None => (None, self.default.as_ref().map_or(&[], |default| &default.turns)),
        }
    }
}

/// The object form, before its faults are made one.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct Fields {
    text: String,
    ids: Option<Vec<TokenId>>,
    latency: f64,
    finish: Option<ScriptedFinish>,
    times: Option<u32>,
    noncanonical: Option<f64>,
    status: Option<u16>,
    body: String,
    cut: bool,
    hang: bool,
    garbage: bool,
    logprobs: Option<LogprobFault>,
}

impl From<&str> for ScriptedTurn {
    fn from(text: &str) -> Self {
        Self { text: text.to_owned(), ..Self::default() }
    }
}

impl<'de> Deserialize<'de> for ScriptedTurn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let fields = match Value::deserialize(deserializer)? {
            Value::String(text) => return Ok(Self::from(text.as_str())),
            object @ Value::Object(_) => serde_json::from_value::<Fields>(object).map_err(D::Error::custom)?,
            other => {
                let kind = kind_of(&other);
                return Err(D::Error::custom(format!("a turn is text or an object, found {kind}")));
            }
        };
        let latency = Duration::try_from_secs_f64(fields.latency)
            .map_err(|err| D::Error::custom(format!("latency {}: {err}", fields.latency)))?;
        let faults = [
            fields.status.map(|status| Fault::Status { status, body: fields.body }),
            fields.cut.then_some(Fault::Cut),
            fields.hang.then_some(Fault::Hang),
            fields.garbage.then_some(Fault::Garbage),
            fields.logprobs.map(Fault::Logprobs),
        ];
        let mut faults = faults.into_iter().flatten();
        let fault = faults.next();
        if faults.next().is_some() {
            return Err(D::Error::custom("a turn has one fault at most"));
        }
        if let Some(Fault::Status { status, .. }) = fault
            && !(100..1000).contains(&status)
        {
            return Err(D::Error::custom(format!("{status} is no HTTP status")));
        }
        Ok(Self {
            text: fields.text,
            ids: fields.ids,
            latency,
            finish: fields.finish,
            fault,
            times: fields.times,
            noncanonical: fields.noncanonical,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_in_a_script_are_named() {
        for (json, problem) in [
            (r#"{"tasks": [{"match": "a", "turns": [5]}]}"#, "found a number"),
            (r#"{"tasks": [{"match": "a", "turns": [{"txt": "x"}]}]}"#, "unknown field `txt`"),
            (r#"{"taks": []}"#, "unknown field `taks`"),
            (r#"{"default": {"turns": [{"cut": true, "hang": true}]}}"#, "one fault"),
            (r#"{"default": {"turns": [{"latency": -1}]}}"#, "latency -1"),
            (r#"{"default": {"turns": [{"status": 5}]}}"#, "5 is no HTTP status"),
            ("{", "EOF"),
        ] {
            let err = Script::from_json(json.as_bytes()).unwrap_err().to_string();
            assert!(err.contains(problem), "{json}: {err}");
        }
    }

    #[test]
    fn the_longest_match_wins() {
        let script = Script::from_json(
            br#"{"tasks": [{"match": "1+1", "turns": ["a"]}, {"match": "1+1 = 10", "turns": ["b"]}], "default": {"turns": ["c"]}}"#,
        )
        .unwrap();
        assert_eq!(script.turns_for("is 1+1 = 10?").1[0].text, "b");
        assert_eq!(script.turns_for("1+1?").1[0].text, "a");
        assert_eq!(script.turns_for("2+2?").1[0].text, "c");
    }
}
