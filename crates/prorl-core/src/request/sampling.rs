//! How the policy of a job is sampled.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{SeqAccess, Visitor},
};
use serde_json::Value;

use super::Malformed;

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
    pub(super) fn check(&self) -> Result<(), Malformed> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_that_shapes_the_distribution_is_said() {
        let params = SamplingParams { temperature: 0.7, min_p: 0.1, ..SamplingParams::default() };
        assert!(params.warnings()[0].contains("temperature, min_p"));
    }
}
