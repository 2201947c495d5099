//! What the endpoints take and answer, beside the types of prorl-core.

use prorl_core::{JobId, JobResult, Secret, WeightVersion, status::BackendStatus};
use serde::{Deserialize, Serialize, Serializer};

/// The dialect of an LLM server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BackendKind {
    /// Found out by asking it.
    #[default]
    Auto,
    /// vLLM's completions with ids.
    Vllm,
    /// vLLM's generate endpoint.
    VllmGenerate,
    /// SGLang.
    Sglang,
    /// Plain `/generate`.
    Generate,
}

/// An LLM server to add.
#[derive(Clone, Debug, Serialize)]
pub struct AddBackend {
    /// `http://HOST:PORT`, with or without `/v1`.
    pub address: String,
    /// Its dialect.
    pub kind: BackendKind,
    /// The model to ask for; its only one when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The checkpoint it serves; the number of clear and swap calls so far when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_version: Option<WeightVersion>,
    /// Jobs on it at once; no limit when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<u64>,
    /// What it wants as a bearer token.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "exposed")]
    pub api_key: Option<Secret<String>>,
    /// Whether it is asked for a token before it is used.
    pub probe: bool,
}

impl AddBackend {
    /// A backend with every default.
    pub fn new(address: impl Into<String>) -> Self {
        Self {
            address: address.into(),
            kind: BackendKind::Auto,
            model: None,
            weight_version: None,
            max_concurrent: None,
            api_key: None,
            probe: true,
        }
    }
}

/// This request is the one place where the key must be written out.
#[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
fn exposed<S: Serializer>(key: &Option<Secret<String>>, serializer: S) -> Result<S::Ok, S::Error> {
    key.as_ref().map(Secret::expose).serialize(serializer)
}

/// The answer to an added LLM server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Added {
    /// What is known of it. It may not be healthy yet.
    pub backend: BackendStatus,
}

/// The answer to a submit.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Submitted {
    /// The job's id, which the server made when the request had none.
    pub job_id: JobId,
    /// Where the job is.
    pub state: String,
}

/// A job as seen from outside.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct JobView {
    /// The job.
    pub job_id: JobId,
    /// Where it is.
    pub state: String,
    /// Its result, once it has ended.
    pub result: Option<JobResult>,
}

/// The answer to a cancel.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct CancelRequested {
    /// Where the job was when the cancel came; `ended` jobs stay as they are.
    pub state: String,
}

/// What a stop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Stopped {
    /// Jobs that were cancelled by it.
    pub cancelled: u64,
    /// Sandboxes that were closed by it, each proven gone.
    pub sandboxes_killed: u64,
}

#[derive(Deserialize)]
pub(crate) struct Cleared {
    pub(crate) cleared: u64,
}

/// The body of every error.
#[derive(Deserialize)]
pub(crate) struct Problem {
    pub(crate) detail: String,
    pub(crate) code: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_added_backend_carries_its_key_and_nothing_that_was_not_said() {
        let plain = serde_json::to_value(AddBackend::new("http://h:1")).unwrap();
        assert_eq!(plain, serde_json::json!({"address": "http://h:1", "kind": "auto", "probe": true}));
        let keyed = AddBackend {
            api_key: Some(Secret::new("k".to_owned())),
            kind: BackendKind::VllmGenerate,
            ..AddBackend::new("http://h:1")
        };
        assert!(!format!("{keyed:?}").contains("\"k\""));
        let keyed = serde_json::to_value(keyed).unwrap();
        assert_eq!((&keyed["api_key"], &keyed["kind"]), (&"k".into(), &"vllm_generate".into()));
    }
}
