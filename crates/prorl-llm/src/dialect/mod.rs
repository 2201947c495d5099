//! What LLM servers speak: ids in, ids and log-probabilities out.
//!
//! An answer is taken as it is or refused as a whole. A missing or impossible log-probability never becomes 0.0, and ids
//! never pass through text.

mod answer;
mod error;
mod generate;
mod vllm;

use prorl_core::{Completion, SamplingParams, Secret, TokenId, WeightVersion, message::FinishReason};
use serde::{Deserialize, Serialize};

pub use error::{IntegrityError, LlmError};

use crate::http::{Answer, CallError, Http, Names};

/// The dialect of a backend, as a trainer names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Found out by asking: `vllm`, then `generate`; the other way round where no models are listed.
    #[default]
    Auto,
    /// vLLM's `/v1/completions` with `return_token_ids`.
    Vllm,
    /// vLLM's `/inference/v1/generate`.
    VllmGenerate,
    /// `SGLang`'s `/generate`.
    Sglang,
    /// The original server's `/generate`: `prompt_ids` to `response_ids` and `logprobs`.
    Generate,
}

impl Kind {
    /// Returns the word used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Vllm => "vllm",
            Self::VllmGenerate => "vllm_generate",
            Self::Sglang => "sglang",
            Self::Generate => "generate",
        }
    }
}

/// A dialect that is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Generate,
    Vllm,
}

impl Dialect {
    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::Generate => Kind::Generate,
            Self::Vllm => Kind::Vllm,
        }
    }
}

/// One call for one turn.
#[derive(Clone, Copy, Debug)]
pub struct GenerateRequest<'a> {
    /// The whole prompt.
    pub prompt_ids: &'a [TokenId],
    /// How to sample. `max_tokens` and `seed` in here are the job's; those below count.
    pub params: &'a SamplingParams,
    /// Ids to sample at most.
    pub max_tokens: u64,
    /// This call's seed; the lower 63 bits are sent.
    pub seed: Option<u64>,
    /// Names the call, for the engine's log.
    pub request_id: &'a str,
    /// Names the job, so that a router before several engines can keep it on one.
    pub session_id: &'a str,
    /// Sampled ids must be below this.
    pub vocab_size: usize,
}

/// A finished generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Sampled ids and log-probabilities, as the backend gave them.
    pub completion: Completion,
    /// `Stop` or `Length`; an aborted generation is an error.
    pub finish_reason: FinishReason,
    /// The backend's weight version when the call was made.
    pub weight_version: WeightVersion,
    /// The backend's address.
    pub backend: String,
}

/// What a call needs to know of a backend.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) address: String,
    pub(crate) base: String,
    pub(crate) model: Option<String>,
    pub(crate) api_key: Option<Secret<String>>,
}

impl Target {
    fn call_error(&self, err: CallError) -> LlmError {
        let backend = self.address.clone();
        match err {
            CallError::Connect(detail) => LlmError::Connect { backend, detail },
            CallError::Cut(detail) => LlmError::Cut { backend, detail },
            CallError::TooLarge(limit_bytes) => LlmError::TooLarge { backend, limit_bytes },
        }
    }

    fn malformed(&self, detail: impl Into<String>) -> LlmError {
        LlmError::Malformed { backend: self.address.clone(), detail: detail.into() }
    }

    fn integrity(&self, problem: impl Into<IntegrityError>) -> LlmError {
        LlmError::Integrity { backend: self.address.clone(), problem: problem.into() }
    }

    /// An answer without success as an error.
    fn refusal(&self, answer: &Answer, n_prompt_ids: usize) -> LlmError {
        let (backend, status, body) = (self.address.clone(), answer.status, answer.excerpt());
        match status {
            400 | 413 | 422 if names_prompt_length(&answer.body) => {
                LlmError::PromptTooLong { backend, n_ids: n_prompt_ids, body }
            }
            // Too early, too many, took too long: the request is as good as before.
            408 | 425 | 429 => LlmError::Status { backend, status, body },
            400..=499 => LlmError::Refused { backend, status, body },
            _ => LlmError::Status { backend, status, body },
        }
    }
}

/// vLLM names the parameter; its wording changes, this does not.
fn names_prompt_length(body: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(body).is_ok_and(|body| body["error"]["param"] == "input_tokens")
}

/// A generation as a dialect read it.
#[derive(Debug, PartialEq)]
pub(crate) struct Sampled {
    pub(crate) completion: Completion,
    pub(crate) finish_reason: FinishReason,
}

/// Makes one call. The caller bounds its time.
///
/// # Cancel safety
/// Dropping the future closes the connection, by which the engine ends the generation.
pub(crate) async fn generate(
    http: &Http,
    target: &Target,
    dialect: Dialect,
    request: &GenerateRequest<'_>,
) -> Result<Sampled, LlmError> {
    let (path, body) = match dialect {
        Dialect::Generate => ("/generate", generate::body(request)),
        Dialect::Vllm => ("/v1/completions", vllm::body(request, target.model.as_deref())),
    };
    let names = Names { request_id: request.request_id, session_id: request.session_id };
    let url = format!("{}{path}", target.base);
    let answer = http.post(&url, body, Some(&names), target.api_key.as_ref()).await;
    let answer = answer.map_err(|err| target.call_error(err))?;
    if !answer.is_success() {
        return Err(target.refusal(&answer, request.prompt_ids.len()));
    }
    match dialect {
        Dialect::Generate => generate::read(target, request, &answer.body),
        Dialect::Vllm => vllm::read(target, request, &answer.body),
    }
}

/// What a first look at a backend found.
#[derive(Debug)]
pub(crate) enum Found {
    /// It speaks a dialect and returns ids and log-probabilities.
    Usable { dialect: Dialect, model: Option<String> },
    /// It is not there, or not ready.
    Unreachable(String),
    /// It answers, but not what is needed.
    Unusable(String),
}

/// Asks a backend for one id in each dialect that comes into question.
pub(crate) async fn probe(http: &Http, target: &Target, kind: Kind) -> Found {
    match kind {
        Kind::Vllm => vllm::probe(http, target).await,
        Kind::Generate => generate::probe(http, target).await,
        Kind::VllmGenerate | Kind::Sglang => {
            Found::Unusable(format!("the {} dialect is not supported yet", kind.as_str()))
        }
        Kind::Auto => probe_any(http, target).await,
    }
}

async fn probe_any(http: &Http, target: &Target) -> Found {
    let vllm = match vllm::named(http, target).await {
        // A server that lists no models is more likely to be the original's, if it has that endpoint.
        Ok(None) => match generate::probe_if_there(http, target).await {
            Some(found) => return found,
            None => vllm::probe_as(http, target, None).await,
        },
        Ok(model) => vllm::probe_as(http, target, model).await,
        Err(found) => found,
    };
    match vllm {
        Found::Unusable(vllm) => match generate::probe(http, target).await {
            Found::Unusable(generate) => Found::Unusable(format!("as vllm: {vllm}; as generate: {generate}")),
            found => found,
        },
        found => found,
    }
}

/// Whether a status says that there is no such endpoint. Python's plain server says 501 where it knows no GET at all.
pub(crate) fn is_missing(status: u16) -> bool {
    matches!(status, 404 | 405 | 501)
}

/// The smallest request that shows whether a backend returns what is needed.
fn probe_request(params: &SamplingParams) -> GenerateRequest<'_> {
    GenerateRequest {
        // The first id of a vocabulary is an ordinary token in every tokenizer at hand.
        prompt_ids: &[0],
        params,
        max_tokens: 1,
        seed: None,
        request_id: "probe",
        session_id: "probe",
        // The tokenizer is not known here; each turn checks its own ids.
        vocab_size: usize::MAX,
    }
}

/// Sorts the outcome of a probing call.
fn judge(result: Result<Sampled, LlmError>, dialect: Dialect, model: Option<String>) -> Found {
    match result {
        // A server with a script may say more than it was asked for. Ids and log-probabilities are there all the same, and
        // each turn checks its own.
        Ok(_) | Err(LlmError::Integrity { problem: IntegrityError::TooManyIds { .. }, .. }) => {
            Found::Usable { dialect, model }
        }
        // Not there, or what a proxy or an engine says that is still loading or is paused.
        Err(
            err @ (LlmError::Connect { .. }
            | LlmError::Cut { .. }
            | LlmError::Aborted { .. }
            | LlmError::Status { status: 408 | 425 | 429 | 502..=504, .. }),
        ) => Found::Unreachable(err.to_string()),
        Err(err) => Found::Unusable(err.to_string()),
    }
}

/// Derives the seed of one call, so that rollouts of a group differ and a rerun repeats. Below 2^63.
pub fn derive_seed(seed: u64, trajectory_id: &str, turn: u64) -> u64 {
    // FNV-1a over the parts, then a finaliser that spreads every input bit: stable over versions and machines.
    let bytes = seed.to_le_bytes().into_iter().chain(turn.to_le_bytes()).chain(trajectory_id.bytes());
    let mut hash =
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    for multiplier in [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb] {
        hash = (hash ^ (hash >> 31)).wrapping_mul(multiplier);
    }
    (hash ^ (hash >> 31)) >> 1
}
