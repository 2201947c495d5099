//! The original server's `/generate`.

use prorl_core::{SamplingParams, TokenId};
use serde::{Deserialize, Serialize};

use super::{Dialect, Found, GenerateRequest, LlmError, Sampled, Target, answer, is_missing, judge, probe_request};
use crate::http::Http;

#[derive(Serialize)]
struct Body<'a> {
    prompt_ids: &'a [TokenId],
    temperature: f64,
    top_p: f64,
    top_k: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    max_tokens: u64,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    stop: &'a [String],
}

#[derive(Deserialize)]
struct Reply {
    response_ids: Option<Vec<i64>>,
    logprobs: Option<Vec<Option<f64>>>,
    finish_reason: Option<String>,
}

pub(super) fn body(request: &GenerateRequest<'_>) -> Vec<u8> {
    let params = request.params;
    let body = Body {
        prompt_ids: request.prompt_ids,
        temperature: params.temperature,
        top_p: params.top_p,
        top_k: params.top_k,
        // Not among the original's fields: sent only where a trainer set them.
        min_p: Some(params.min_p).filter(|min_p| *min_p > 0.0),
        stop: &params.stop,
        seed: request.seed.map(|seed| seed & (u64::MAX >> 1)),
        max_tokens: request.max_tokens,
    };
    serde_json::to_vec(&body).expect("plain numbers and texts have a JSON form")
}

pub(super) fn read(target: &Target, request: &GenerateRequest<'_>, body: &[u8]) -> Result<Sampled, LlmError> {
    let Reply { response_ids, logprobs, finish_reason } = answer::parse(target, body)?;
    answer::check(target, request, answer::Parts { ids: response_ids, logprobs, finish_reason })
}

/// Asks for one id; `None` when there is no `/generate`.
pub(super) async fn probe_if_there(http: &Http, target: &Target) -> Option<Found> {
    let result = probe_call(http, target).await;
    let missing =
        matches!(result, Err(LlmError::Refused { status, .. } | LlmError::Status { status, .. }) if is_missing(status));
    (!missing).then(|| judge(result, Dialect::Generate, target.model.clone()))
}

pub(super) async fn probe(http: &Http, target: &Target) -> Found {
    judge(probe_call(http, target).await, Dialect::Generate, target.model.clone())
}

async fn probe_call(http: &Http, target: &Target) -> Result<Sampled, LlmError> {
    let params = SamplingParams::default();
    super::generate(http, target, Dialect::Generate, &probe_request(&params)).await
}
