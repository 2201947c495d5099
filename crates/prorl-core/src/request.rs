//! A job request (API sections 1.2 and 1.6), checked before it is accepted.

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{SeqAccess, Visitor},
};
use serde_json::{Map, Value};

use crate::{GroupId, JobId, NetworkChoice, WeightVersion};

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

/// The task data of a job. Its fields are the task's own; a few are common to all handlers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Instance(pub Map<String, Value>);

/// The handler that an instance without `data_source` asks for, as in the original server.
pub const DEFAULT_DATA_SOURCE: &str = "swebench";

/// The runtime that an instance asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuntimeChoice {
    /// The server's default.
    #[default]
    Auto,
    /// The embedded one.
    Namespace,
    /// Apptainer or Singularity.
    Singularity,
}

/// Resource limits of an instance's sandbox; absent ones are the handler's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Memory of all processes together, MiB.
    pub memory_mb: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// Processors.
    pub cpus: Option<f64>,
    /// Writable layer, MiB.
    pub disk_mb: Option<u64>,
    /// `/tmp`, and `/dev/shm` by itself, MiB.
    pub tmp_mb: Option<u64>,
    /// How long the sandbox's processes may run, seconds since it started.
    pub wall_s: Option<f64>,
    /// Files that one process may have open.
    pub open_files: Option<u64>,
    /// Size of one file, MiB.
    pub file_mb: Option<u64>,
    /// Characters of one tool result.
    pub output_chars: Option<u64>,
}

/// The most characters that a tool result can be given: more than this of an output is never kept.
const MAX_OUTPUT_CHARS: u64 = 100_000;

/// The fewest, which hold what is told about an output.
const MIN_OUTPUT_CHARS: u64 = 1000;

/// The most mebibytes that can be counted in bytes.
const MAX_MIB: u64 = u64::MAX >> 20;

impl Limits {
    /// Reads the limits of an instance.
    fn read(value: &Value) -> Result<Self, Malformed> {
        let Value::Object(fields) = value else {
            return Err(Malformed::new("limits", format!("expected an object, found {}", kind_of(value))));
        };
        let mut limits = Self::default();
        for (name, value) in fields {
            let field = format!("limits.{name}");
            match name.as_str() {
                "memory_mb" => limits.memory_mb = whole(&field, value, 1, MAX_MIB)?,
                "pids" => limits.pids = whole(&field, value, 1, u64::from(u32::MAX))?,
                "cpus" => limits.cpus = above_zero(&field, value)?,
                "disk_mb" => limits.disk_mb = whole(&field, value, 1, MAX_MIB)?,
                "tmp_mb" => limits.tmp_mb = whole(&field, value, 1, MAX_MIB)?,
                "wall_s" => limits.wall_s = above_zero(&field, value)?,
                "open_files" => limits.open_files = whole(&field, value, 1, u64::MAX)?,
                "file_mb" => limits.file_mb = whole(&field, value, 1, MAX_MIB)?,
                "output_chars" => limits.output_chars = whole(&field, value, MIN_OUTPUT_CHARS, MAX_OUTPUT_CHARS)?,
                _ => {
                    let known = "memory_mb, pids, cpus, disk_mb, tmp_mb, wall_s, open_files, file_mb, output_chars";
                    return Err(Malformed::new(field, format!("no such limit; known are {known}")));
                }
            }
        }
        Ok(limits)
    }
}

/// Reads a whole number of a range; null is none.
fn whole(field: &str, value: &Value, least: u64, most: u64) -> Result<Option<u64>, Malformed> {
    if value.is_null() {
        return Ok(None);
    }
    if let Some(number) = value.as_u64().filter(|number| (least..=most).contains(number)) {
        return Ok(Some(number));
    }
    let expected = format!("expected a whole number from {least} to {most}");
    Err(Malformed::new(field, format!("{expected}, found {}", shown(value))))
}

/// Reads a number above 0; null is none.
fn above_zero(field: &str, value: &Value) -> Result<Option<f64>, Malformed> {
    if value.is_null() {
        return Ok(None);
    }
    match value.as_f64().filter(|number| *number > 0.0 && number.is_finite()) {
        Some(number) => Ok(Some(number)),
        None => Err(Malformed::new(field, format!("expected a number above 0, found {}", shown(value)))),
    }
}

/// A number as it is, or the kind of what is none.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        other => kind_of(other).to_owned(),
    }
}

/// The fields of an instance that every handler shares.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct CommonFields {
    /// Image path or name in the store.
    pub image: Option<String>,
    /// Runtime.
    pub runtime: RuntimeChoice,
    /// Whether user 0 inside is wanted.
    pub fakeroot: bool,
    /// Resource limits.
    pub limits: Limits,
    /// Network.
    pub network: NetworkChoice,
    /// Names of the tools to offer instead of the handler's.
    pub tools: Option<Vec<String>>,
    /// The system prompt instead of the handler's.
    pub system_prompt: Option<String>,
}

impl Instance {
    /// Returns a field.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field)
    }

    /// Returns `data_source`, or the original's default when it is absent.
    ///
    /// # Errors
    /// When it is there and no text.
    pub fn data_source(&self) -> Result<&str, Malformed> {
        match self.0.get("data_source") {
            None | Some(Value::Null) => Ok(DEFAULT_DATA_SOURCE),
            Some(Value::String(name)) => Ok(name),
            Some(other) => Err(Malformed::new("data_source", format!("expected text, found {}", kind_of(other)))),
        }
    }

    /// Returns an id field, as text; numbers are written out.
    ///
    /// # Errors
    /// When it is neither text nor a number.
    pub fn id(&self, field: &str) -> Result<Option<String>, Malformed> {
        match self.0.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(id)) => Ok(Some(id.clone())),
            Some(Value::Number(id)) => Ok(Some(id.to_string())),
            Some(other) => Err(Malformed::new(field, format!("expected text or a number, found {}", kind_of(other)))),
        }
    }

    /// Returns the fields that every handler shares.
    ///
    /// # Errors
    /// Names the field that has another type or an impossible value.
    pub fn common(&self) -> Result<CommonFields, Malformed> {
        const FIELDS: [&str; 7] = ["image", "runtime", "fakeroot", "limits", "network", "tools", "system_prompt"];
        // One field at a time, so that the error can name it.
        let mut checked = Map::new();
        for field in FIELDS {
            let Some(value) = self.0.get(field).filter(|value| !value.is_null()) else { continue };
            if field == "network" {
                NetworkChoice::parse(value)?; // names the part of it that is wrong
            }
            let alone = Map::from_iter([(field.to_owned(), value.clone())]);
            if field == "limits" {
                Limits::read(value)?;
            }
            serde_json::from_value::<CommonFields>(Value::Object(alone))
                .map_err(|err| Malformed::new(field, err.to_string()))?;
            checked.insert(field.to_owned(), value.clone());
        }
        let common: CommonFields = serde_json::from_value(Value::Object(checked))
            .map_err(|err| Malformed::new("instance", err.to_string()))?;
        Ok(common)
    }
}

/// Takes null for a field's default, as the original server's clients send it.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
    of: impl FnOnce(SamplingParams) -> T,
) -> Result<T, D::Error> {
    let given = Option::deserialize(deserializer)?;
    Ok(given.unwrap_or_else(|| of(SamplingParams::default())))
}

macro_rules! nullable {
    ($($field:ident: $kind:ty),+ $(,)?) => {
        mod nullable {
            use super::{Deserializer, or_default};
            $(pub(super) fn $field<'de, D: Deserializer<'de>>(deserializer: D) -> Result<$kind, D::Error> {
                or_default(deserializer, |params| params.$field)
            })+
        }
    };
}

nullable! {
    temperature: f64, top_p: f64, top_k: i64, min_p: f64, max_tokens: u64, max_model_len: u64, max_iterations: u64,
    enable_thinking: bool, tool_parser: String,
}

/// Takes one stop string, a list of them, or null.
fn stop_strings<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    struct Stops;

    impl<'de> Visitor<'de> for Stops {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a stop string or a list of them")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(Vec::new())
        }

        fn visit_str<E>(self, stop: &str) -> Result<Self::Value, E> {
            Ok(vec![stop.to_owned()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut stops = Vec::new();
            while let Some(stop) = list.next_element()? {
                stops.push(stop);
            }
            Ok(stops)
        }
    }

    deserializer.deserialize_any(Stops)
}

/// How the policy is sampled, and how long its answers and conversation may be. Null is a field's default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingParams {
    /// The model's name for backends that want one.
    pub model: Option<String>,
    /// Temperature, 0 for greedy.
    #[serde(deserialize_with = "nullable::temperature")]
    pub temperature: f64,
    /// Nucleus, above 0 and at most 1.
    #[serde(deserialize_with = "nullable::top_p")]
    pub top_p: f64,
    /// The most probable ids to sample from; -1, or 0 as some engines have it, for all.
    #[serde(deserialize_with = "nullable::top_k")]
    pub top_k: i64,
    /// From 0 to 1.
    #[serde(deserialize_with = "nullable::min_p")]
    pub min_p: f64,
    /// Seed from which each call's own is derived.
    pub seed: Option<u64>,
    /// Ids sampled in one turn at most.
    #[serde(alias = "max_output_tokens", deserialize_with = "nullable::max_tokens")]
    pub max_tokens: u64,
    /// Ids of the whole conversation at most.
    #[serde(deserialize_with = "nullable::max_model_len")]
    pub max_model_len: u64,
    /// Stop strings.
    #[serde(deserialize_with = "stop_strings")]
    pub stop: Vec<String>,
    /// Turns at most.
    #[serde(deserialize_with = "nullable::max_iterations")]
    pub max_iterations: u64,
    /// Whether the template lets the model think.
    #[serde(deserialize_with = "nullable::enable_thinking")]
    pub enable_thinking: bool,
    /// How tool calls are written: `auto` or `hermes`.
    #[serde(deserialize_with = "nullable::tool_parser")]
    pub tool_parser: String,
    /// Tokenizer folder or name; the server's when absent.
    #[serde(alias = "custom_tokenizer")]
    pub tokenizer: Option<String>,
    /// Names of the original server that mean nothing here; named in the result's warnings.
    #[serde(flatten)]
    pub ignored: BTreeMap<String, Value>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            model: None,
            temperature: 1.0,
            top_p: 1.0,
            top_k: -1,
            min_p: 0.0,
            seed: None,
            max_tokens: 4096,
            max_model_len: 32_768,
            stop: Vec::new(),
            max_iterations: 30,
            enable_thinking: true,
            tool_parser: "auto".to_owned(),
            tokenizer: None,
            ignored: BTreeMap::new(),
        }
    }
}

/// Names of the original server that are taken and have no effect here.
const IGNORED: [&str; 11] = [
    "api_key",
    "base_url",
    "enable_a11y_tree",
    "enable_vision",
    "ensure_thinking_end_properly",
    "is_reasoning_task",
    "log_completions",
    "modify_params",
    "native_tool_calling",
    "num_retries",
    "strict_loop_detector",
];

impl SamplingParams {
    fn check(&self) -> Result<(), Malformed> {
        let at = |field: &str| format!("sampling_params.{field}");
        let range = |field: &str, value: f64, ok: bool, expected: &str| {
            if ok { Ok(()) } else { Err(Malformed::new(at(field), format!("expected {expected}, found {value}"))) }
        };
        range("temperature", self.temperature, self.temperature >= 0.0, "a number of 0 or more")?;
        range("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "a number above 0 and at most 1")?;
        range("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "a number from 0 to 1")?;
        range("top_k", self.top_k as f64, self.top_k >= -1, "-1 or a number of 0 or more")?;
        for (field, value) in [
            ("max_tokens", self.max_tokens),
            ("max_model_len", self.max_model_len),
            ("max_iterations", self.max_iterations),
        ] {
            range(field, value as f64, value >= 1, "a number of 1 or more")?;
        }
        if !matches!(self.tool_parser.as_str(), "auto" | "hermes") {
            let problem = format!("expected one of auto, hermes, found {:?}", self.tool_parser);
            return Err(Malformed::new(at("tool_parser"), problem));
        }
        for (name, value) in &self.ignored {
            if name == "token_level_generation" {
                if *value != Value::Bool(true) {
                    return Err(Malformed::new(at(name), "this service is token-exact and takes only true"));
                }
            } else if !IGNORED.contains(&name.as_str()) && !name.starts_with("retry_") {
                return Err(Malformed::new(at(name), "unknown field"));
            }
        }
        Ok(())
    }

    /// Returns what the trainer should know about these parameters.
    pub fn warnings(&self) -> Vec<String> {
        let ignored = self.ignored.keys().filter(|name| *name != "token_level_generation");
        let mut warnings: Vec<String> =
            ignored.map(|name| format!("sampling_params.{name} has no effect here")).collect();
        let shaped = [
            ("temperature", (self.temperature - 1.0).abs() > f64::EPSILON),
            ("top_p", self.top_p < 1.0),
            ("top_k", self.top_k > 0),
            ("min_p", self.min_p > 0.0),
        ];
        let shaped: Vec<_> = shaped.iter().filter(|(_, set)| *set).map(|(name, _)| *name).collect();
        if !shaped.is_empty() {
            warnings.push(format!(
                "logprobs are those of the raw distribution, not of the sampling policy ({} set)",
                shaped.join(", ")
            ));
        }
        warnings
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

/// What happens to earlier thinking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum History {
    /// It stays: one trace.
    #[default]
    Keep,
    /// It is dropped where the template does so: a new trace per fork.
    Strip,
}

/// What happens after a turn without a tool call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnNoToolCall {
    /// The agent is asked to go on or finish.
    #[default]
    Nudge,
    /// The job ends.
    Finish,
}

/// Policies of the agent loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentOptions {
    /// What happens to earlier thinking.
    pub history: History,
    /// What happens after a turn without a tool call.
    pub on_no_tool_call: OnNoToolCall,
    /// Whether the agent is told how many turns are left.
    pub budget_notice: bool,
    /// Whether the same call again and again ends the job.
    pub loop_detector: bool,
}

/// What an assistant message's `input_ids` holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InputIds {
    /// The ids fed since the turn before.
    #[default]
    Delta,
    /// The whole prompt of that call.
    Full,
    /// Null.
    None,
}

/// What a result contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Include {
    /// What `input_ids` holds; the server's default when absent.
    pub input_ids: Option<InputIds>,
    /// Whether /process returns messages and traces of a failed job.
    pub partial: bool,
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
    use serde_json::json;

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

    #[test]
    fn common_instance_fields_are_checked_by_name() {
        let common = |fields: Value| Instance(fields.as_object().unwrap().clone()).common();
        assert_eq!(common(json!({"runtime": "namespace", "image": null})).unwrap().runtime, RuntimeChoice::Namespace);
        for (fields, name) in [
            (json!({"runtime": "docker"}), "runtime"),
            (json!({"fakeroot": "yes"}), "fakeroot"),
            (json!({"limits": {"memory_mb": 0}}), "limits.memory_mb"),
            (json!({"limits": {"cpus": -1.0}}), "limits.cpus"),
            (json!({"limits": {"memory": 5}}), "limits.memory"),
            (json!({"limits": {"pids": "many"}}), "limits.pids"),
            (json!({"limits": {"disk_mb": -5}}), "limits.disk_mb"),
            (json!({"limits": {"file_mb": 1.5}}), "limits.file_mb"),
            (json!({"limits": {"tmp_mb": u64::MAX}}), "limits.tmp_mb"),
            (json!({"limits": {"wall_s": [1]}}), "limits.wall_s"),
            (json!({"limits": {"output_chars": 10}}), "limits.output_chars"),
            (json!({"limits": [1]}), "limits"),
            (json!({"network": "allow"}), "network"),
            (json!({"network": {"run": "host"}}), "network.run"),
            (json!({"tools": "bash"}), "tools"),
            (json!({"image": 5}), "image"),
        ] {
            assert_eq!(common(fields.clone()).unwrap_err().field, name, "{fields}");
        }
    }

    #[test]
    fn wrong_limits_say_what_was_expected() {
        let problem = |limits: Value| {
            let instance = Instance(json!({"limits": limits}).as_object().unwrap().clone());
            instance.common().map(|common| common.limits).map_err(|problem| problem.to_string())
        };
        let given = problem(json!({"memory_mb": 512, "cpus": 0.5, "pids": null})).unwrap();
        assert_eq!(given, Limits { memory_mb: Some(512), cpus: Some(0.5), ..Limits::default() });
        for (limits, said) in [
            (json!({"pids": 0}), "limits.pids: expected a whole number from 1 to 4294967295, found 0"),
            (json!({"memory_mb": "512"}), "limits.memory_mb: expected a whole number from 1 to"),
            (json!({"cpus": 0}), "limits.cpus: expected a number above 0, found 0"),
            (json!({"wall_s": "1h"}), "limits.wall_s: expected a number above 0, found a string"),
            (json!({"ram": 1}), "limits.ram: no such limit; known are memory_mb, pids"),
            (json!(5), "limits: expected an object, found a number"),
        ] {
            let found = problem(limits).unwrap_err();
            assert!(found.starts_with(said), "{found}");
        }
    }

    #[test]
    fn sampling_that_shapes_the_distribution_is_said() {
        let params = SamplingParams { temperature: 0.7, min_p: 0.1, ..SamplingParams::default() };
        assert!(params.warnings()[0].contains("temperature, min_p"));
    }
}
