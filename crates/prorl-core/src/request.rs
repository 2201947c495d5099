//! A job request (API sections 1.2 and 1.6), checked before it is accepted.

mod instance;
mod limits;
mod options;
mod sampling;

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::{
    instance::{CommonFields, DEFAULT_DATA_SOURCE, Instance, RuntimeChoice},
    limits::Limits,
    options::{AgentOptions, History, Include, InputIds, OnNoToolCall},
    sampling::SamplingParams,
};
use crate::{GroupId, JobId, WeightVersion};

/// A request that is JSON but not a job: names the field, what came, and what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Malformed {
    /// Path of the field, such as `sampling_params.top_p`.
    pub field: String,
    /// What came and what was expected.
    pub problem: String,
}

impl Malformed {
    /// Makes one.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// Names the kind of a JSON value for an error message.
pub fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
/// Limits of single stages, seconds; null is the job's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StageTimeouts {
    /// Init, seconds.
    pub init: Option<f64>,
    /// Run, seconds.
    pub run: Option<f64>,
    /// Eval, seconds.
    pub eval: Option<f64>,
}

/// One rollout request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobRequest {
    /// The job's id; one is made when absent.
    #[serde(default)]
    pub job_id: Option<JobId>,
    /// The task data.
    pub instance: Instance,
    /// How the policy is sampled.
    #[serde(default)]
    pub sampling_params: SamplingParams,
    /// Counted time of the whole job, seconds; the server's default when absent.
    #[serde(default)]
    pub timeout: Option<f64>,
    /// Counted time of single stages.
    #[serde(default)]
    pub stage_timeouts: StageTimeouts,
    /// Attempts after the first, for failures that are not the policy's.
    #[serde(default = "one")]
    pub retries: u32,
    /// Higher goes first.
    #[serde(default)]
    pub priority: i64,
    /// The jobs that share this prompt.
    #[serde(default)]
    pub group_id: Option<GroupId>,
    /// The trainer's own words, for listing and cancelling.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The weight version at which the trainer made the request.
    #[serde(default)]
    pub weight_version: Option<WeightVersion>,
    /// Whether the job goes on when the client disconnects.
    #[serde(default)]
    pub detach: bool,
    /// Where to post the result.
    #[serde(default)]
    pub callback_url: Option<String>,
    /// Policies of the agent loop.
    #[serde(default)]
    pub agent: AgentOptions,
    /// What the result contains.
    #[serde(default)]
    pub include: Include,
}

fn one() -> u32 {
    1
}

impl JobRequest {
    /// A request with every default.
    pub fn new(instance: Instance) -> Self {
        Self {
            job_id: None,
            instance,
            sampling_params: SamplingParams::default(),
            timeout: None,
            stage_timeouts: StageTimeouts::default(),
            retries: 1,
            priority: 0,
            group_id: None,
            labels: BTreeMap::new(),
            weight_version: None,
            detach: false,
            callback_url: None,
            agent: AgentOptions::default(),
            include: Include::default(),
        }
    }

    /// Checks what types alone do not: ranges and names.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn check(&self) -> Result<(), Malformed> {
        let limits = [
            ("timeout", self.timeout),
            ("stage_timeouts.init", self.stage_timeouts.init),
            ("stage_timeouts.run", self.stage_timeouts.run),
            ("stage_timeouts.eval", self.stage_timeouts.eval),
        ];
        for (field, limit) in limits {
            if let Some(secs) = limit
                && !(secs > 0.0 && Duration::try_from_secs_f64(secs).is_ok())
            {
                return Err(Malformed::new(field, format!("expected seconds above 0, found {secs}")));
            }
        }
        self.sampling_params.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, json};

    fn parse(value: Value) -> Result<JobRequest, String> {
        let request: JobRequest = serde_json::from_value(value).map_err(|err| err.to_string())?;
        request.check().map_err(|err| err.to_string())?;
        Ok(request)
    }

    #[test]
    fn the_original_servers_request_is_taken() {
        let request = parse(json!({
            "instance": {"data_source": "math", "prompt": "1+1?", "ground_truth": "2", "anything": [1]},
            "sampling_params": {"max_output_tokens": 100, "custom_tokenizer": "q", "token_level_generation": true,
                "api_key": "k", "native_tool_calling": true, "retry_min_wait": 3, "temperature": 1},
        }))
        .unwrap();
        assert_eq!(request.sampling_params.max_tokens, 100);
        assert_eq!(request.sampling_params.tokenizer.as_deref(), Some("q"));
        assert_eq!(
            request.sampling_params.warnings(),
            [
                "sampling_params.api_key has no effect here",
                "sampling_params.native_tool_calling has no effect here",
                "sampling_params.retry_min_wait has no effect here"
            ]
        );
        assert_eq!(request.retries, 1);
    }

    #[test]
    fn null_is_the_default_and_one_stop_string_is_a_list() {
        let names = [
            "model",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "max_tokens",
            "max_model_len",
            "stop",
            "max_iterations",
            "enable_thinking",
            "tool_parser",
            "tokenizer",
        ];
        let nulls: Map<String, Value> = names.iter().map(|name| ((*name).to_owned(), Value::Null)).collect();
        let request = parse(json!({"instance": {}, "sampling_params": nulls})).unwrap();
        assert_eq!(request.sampling_params, SamplingParams::default());
        let request = parse(json!({"instance": {}, "sampling_params": {"stop": "END", "top_k": 0}})).unwrap();
        assert_eq!(request.sampling_params.stop, ["END"]);
    }

    #[test]
    fn mistakes_are_named() {
        let with = |field: &str, value: Value| {
            let mut request = json!({"instance": {}, "sampling_params": {}});
            match field.strip_prefix("sampling_params.") {
                Some(inner) => request["sampling_params"][inner] = value,
                None => request[field] = value,
            }
            parse(request)
        };
        for (field, value, message) in [
            ("timeot", json!(1), "unknown field `timeot`"),
            ("timeout", json!(0), "timeout: expected seconds above 0, found 0"),
            ("timeout", json!(1e300), "timeout: expected seconds above 0"),
            ("timeout", json!("5"), "invalid type: string \"5\""),
            ("job_id", json!("../x"), "no job id"),
            ("retries", json!(-1), "expected u32"),
            ("sampling_params.temprature", json!(1), "sampling_params.temprature: unknown field"),
            ("sampling_params.token_level_generation", json!(false), "token-exact"),
            ("sampling_params.temperature", json!(-0.5), "sampling_params.temperature: expected a number of 0 or more"),
            ("sampling_params.top_p", json!(0), "sampling_params.top_p"),
            ("sampling_params.top_k", json!(-2), "sampling_params.top_k"),
            ("sampling_params.stop", json!(5), "a stop string or a list of them"),
            ("sampling_params.max_tokens", json!(0), "sampling_params.max_tokens"),
            ("sampling_params.tool_parser", json!("xml"), "auto, hermes"),
        ] {
            let err = with(field, value).unwrap_err();
            assert!(err.contains(message), "{field}: {err}");
        }
        assert!(parse(json!({"sampling_params": {}})).unwrap_err().contains("missing field `instance`"));
        assert!(parse(json!({"instance": 3})).is_err());
    }
}
