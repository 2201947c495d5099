//! vLLM's `/v1/completions` with token ids.

use prorl_core::{SamplingParams, TokenId};
use serde::{Deserialize, Serialize};

use super::{Dialect, Found, GenerateRequest, LlmError, Sampled, Target, answer, is_missing, judge, probe_request};
use crate::http::Http;

#[derive(Serialize)]
struct Body<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    prompt: &'a [TokenId],
    max_tokens: u64,
    temperature: f64,
    top_p: f64,
    top_k: i64,
    min_p: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    stop: &'a [String],
    /// 0 asks for the sampled token's alone.
    logprobs: u32,
    return_token_ids: bool,
}

#[derive(Deserialize)]
struct Reply {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    token_ids: Option<Vec<i64>>,
    prompt_token_ids: Option<Vec<i64>>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Logprobs {
    token_logprobs: Option<Vec<Option<f64>>>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

pub(super) fn body(request: &GenerateRequest<'_>, model: Option<&str>) -> Vec<u8> {
    let params = request.params;
    let body = Body {
        model: params.model.as_deref().or(model),
        prompt: request.prompt_ids,
        max_tokens: request.max_tokens,
        temperature: params.temperature,
        top_p: params.top_p,
        top_k: params.top_k,
        min_p: params.min_p,
        // vLLM keeps a seed in a signed 64-bit number.
        seed: request.seed.map(|seed| seed & (u64::MAX >> 1)),
        stop: &params.stop,
        logprobs: 0,
        return_token_ids: true,
    };
    serde_json::to_vec(&body).expect("plain numbers and texts have a JSON form")
}

pub(super) fn read(target: &Target, request: &GenerateRequest<'_>, body: &[u8]) -> Result<Sampled, LlmError> {
    let reply: Reply = answer::parse(target, body)?;
    let [choice] = <[Choice; 1]>::try_from(reply.choices)
        .map_err(|choices| target.malformed(format!("{} choices instead of 1", choices.len())))?;
    if choice.finish_reason.is_none() {
        return Err(target.malformed("no finish_reason"));
    }
    // Checked before the ids: ids sampled upon another prompt are worthless, however well-formed.
    if let Some(echoed) = &choice.prompt_token_ids {
        answer::check_echo(target, request.prompt_ids, echoed)?;
    }
    let parts = answer::Parts {
        ids: choice.token_ids,
        logprobs: choice.logprobs.and_then(|logprobs| logprobs.token_logprobs),
        finish_reason: choice.finish_reason,
    };
    answer::check(target, request, parts)
}

/// Asks for the model's name first, where the server can say it. One that cannot is asked without: vLLM then takes its own.
pub(super) async fn probe(http: &Http, target: &Target) -> Found {
    match named(http, target).await {
        Ok(model) => probe_as(http, target, model).await,
        Err(found) => found,
    }
}

/// Returns the model's name, `None` when the server does not list any, or why it cannot be used.
pub(super) async fn named(http: &Http, target: &Target) -> Result<Option<String>, Found> {
    match &target.model {
        Some(model) => Ok(Some(model.clone())),
        None => first_model(http, target).await,
    }
}

/// Asks for one id of this model.
pub(super) async fn probe_as(http: &Http, target: &Target, model: Option<String>) -> Found {
    let target = Target { model: model.clone(), ..target.clone() };
    let params = SamplingParams::default();
    let result = super::generate(http, &target, Dialect::Vllm, &probe_request(&params)).await;
    judge(result, Dialect::Vllm, model)
}

async fn first_model(http: &Http, target: &Target) -> Result<Option<String>, Found> {
    let answer = http.get(&format!("{}/v1/models", target.base), target.api_key.as_ref()).await;
    let answer = answer.map_err(|err| Found::Unreachable(target.call_error(err).to_string()))?;
    if matches!(answer.status, 408 | 425 | 429 | 502..=504) {
        return Err(Found::Unreachable(target.refusal(&answer, 0).to_string()));
    }
    let unusable = |problem: String| Found::Unusable(format!("GET /v1/models: {problem}"));
    if is_missing(answer.status) {
        return Ok(None);
    }
    if !answer.is_success() {
        return Err(unusable(format!("{} {}", answer.status, answer.excerpt())));
    }
    let models: Models = serde_json::from_slice(&answer.body).map_err(|err| unusable(err.to_string()))?;
    models.data.into_iter().next().map(|model| Some(model.id)).ok_or_else(|| unusable("no model".to_owned()))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use bytes::Bytes;
    use prorl_core::{FailureClass, TokenId, message::FinishReason};
    use serde_json::Value;

    use super::*;
    use crate::{dialect::IntegrityError, http::Answer};

    /// Qwen3's tokenizer, by which the recordings were made.
    const VOCAB_SIZE: usize = 151_669;

    fn target() -> Target {
        Target { address: "http://h:1".into(), base: "http://h:1".into(), model: None, api_key: None }
    }

    fn recording(name: &str) -> Value {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/vllm-0.32.0");
        serde_json::from_slice(&fs::read(dir.join(name).with_extension("json")).unwrap()).unwrap()
    }

    /// Reads a recorded answer as if we had sent the recorded prompt.
    fn replay_changed(name: &str, change: impl FnOnce(&mut Value)) -> Result<Sampled, LlmError> {
        let mut recording = recording(name);
        change(&mut recording["response"]["body"]);
        let prompt: Vec<TokenId> =
            serde_json::from_value(recording["request"]["body"]["prompt"].clone()).unwrap_or_default();
        let params = SamplingParams::default();
        let max_tokens = recording["request"]["body"]["max_tokens"].as_u64().unwrap_or(16);
        let request =
            GenerateRequest { prompt_ids: &prompt, vocab_size: VOCAB_SIZE, max_tokens, ..probe_request(&params) };
        let body = serde_json::to_vec(&recording["response"]["body"]).unwrap();
        let status = u16::try_from(recording["response"]["status"].as_u64().unwrap()).unwrap();
        let answer = Answer { status, body: Bytes::from(body) };
        if answer.is_success() {
            read(&target(), &request, &answer.body)
        } else {
            Err(target().refusal(&answer, prompt.len()))
        }
    }

    fn replay(name: &str) -> Result<Sampled, LlmError> {
        replay_changed(name, |_| {})
    }

    fn integrity(result: Result<Sampled, LlmError>) -> IntegrityError {
        match result.unwrap_err() {
            err @ LlmError::Integrity { .. } => {
                assert_eq!(err.failure_class(), FailureClass::TokenIntegrity);
                let LlmError::Integrity { problem, .. } = err else { unreachable!() };
                problem
            }
            other => panic!("{other}"),
        }
    }

    #[test]
    fn ids_and_logprobs_are_the_recorded_ones_bit_for_bit() {
        for name in [
            "completions-ids-logprobs0",
            "completions-ids-logprobs1",
            "completions-stop-string",
            "completions-partial-utf8",
        ] {
            let sampled = replay(name).unwrap();
            let choice = &recording(name)["response"]["body"]["choices"][0];
            assert_eq!(serde_json::json!(sampled.completion.ids()), choice["token_ids"], "{name}");
            let recorded: Vec<f64> = serde_json::from_value(choice["logprobs"]["token_logprobs"].clone()).unwrap();
            let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(sampled.completion.logprobs()), bits(&recorded), "{name}");
        }
        assert_eq!(replay("completions-eos").unwrap().finish_reason, FinishReason::Stop);
        assert_eq!(replay("completions-ignore-eos-length").unwrap().finish_reason, FinishReason::Length);
    }

    #[test]
    fn an_aborted_generation_is_no_turn() {
        let err = replay("inflight-completions-at-abort-all").unwrap_err();
        assert!(matches!(err, LlmError::Aborted { n_ids: 66, .. }), "{err}");
        assert!(err.is_retryable() && err.failure_class() == FailureClass::LlmBackend);
    }

    #[test]
    fn refusals_are_told_apart() {
        let too_long = replay("completions-err-too-long").unwrap_err();
        assert!(matches!(too_long, LlmError::PromptTooLong { .. }) && !too_long.is_retryable(), "{too_long}");
        for (name, status) in [
            ("completions-err-unknown-model", 404),
            ("completions-err-out-of-vocab", 400),
            ("plain-no-key", 401),
            ("err-not-found", 404),
        ] {
            let err = replay(name).unwrap_err();
            assert!(matches!(err, LlmError::Refused { status: got, .. } if got == status), "{name}: {err}");
            assert!(!err.is_retryable() && err.failure_class() == FailureClass::LlmBackend);
        }
    }

    #[test]
    fn what_cannot_be_trusted_is_named() {
        assert_eq!(integrity(replay("completions-no-return-token-ids")), IntegrityError::NoIds);
        assert_eq!(
            integrity(replay("completions-padding-vocab-id")),
            IntegrityError::OutOfVocabulary { index: 0, id: 151_800, vocab_size: VOCAB_SIZE }
        );
        let change = |field: &'static str, value: Value| {
            integrity(replay_changed("completions-ids-logprobs0", |body| body["choices"][0][field] = value))
        };
        assert_eq!(change("logprobs", Value::Null), IntegrityError::NoLogprobs);
        assert_eq!(change("token_ids", serde_json::json!([])), IntegrityError::NoIds);
        assert_eq!(
            change("token_ids", serde_json::json!([-1, 2])),
            IntegrityError::OutOfVocabulary { index: 0, id: -1, vocab_size: VOCAB_SIZE }
        );
        assert!(matches!(change("token_ids", serde_json::json!([1])), IntegrityError::Logprobs(_)));
        assert_eq!(
            change("prompt_token_ids", serde_json::json!([151_644, 1])),
            IntegrityError::PromptEcho { index: 1 }
        );
        let logprobs = |value| serde_json::json!({"token_logprobs": [-0.5, value]});
        let two = |logprobs: Value| {
            integrity(replay_changed("completions-ids-logprobs0", |body| {
                body["choices"][0]["token_ids"] = serde_json::json!([1, 2]);
                body["choices"][0]["logprobs"] = logprobs;
            }))
        };
        let too_many = replay_changed("completions-ids-logprobs0", |body| {
            body["choices"][0]["token_ids"] = serde_json::json!(vec![1; 9]);
            body["choices"][0]["logprobs"] = serde_json::json!({"token_logprobs": vec![-0.5; 9]});
        });
        assert_eq!(integrity(too_many), IntegrityError::TooManyIds { n_ids: 9, max_tokens: 8 });
        assert_eq!(two(logprobs(Value::Null)), IntegrityError::MissingLogprob { index: 1 });
        assert!(matches!(two(logprobs(serde_json::json!(0.25))), IntegrityError::Logprobs(_)));
    }

    #[test]
    fn an_answer_of_another_shape_is_malformed() {
        assert!(matches!(replay("completions-n2-seed").unwrap_err(), LlmError::Malformed { .. }));
        for (field, value) in [("finish_reason", Value::Null), ("finish_reason", "error".into())] {
            let err =
                replay_changed("completions-ids-logprobs0", |body| body["choices"][0][field] = value).unwrap_err();
            assert!(matches!(err, LlmError::Malformed { .. }) && err.is_retryable(), "{err}");
        }
    }

    #[test]
    fn the_request_asks_for_ids_and_the_sampled_logprob() {
        let params = SamplingParams { min_p: 0.1, stop: vec!["x".into()], ..SamplingParams::default() };
        let request =
            GenerateRequest { prompt_ids: &[5, 6], max_tokens: 8, seed: Some(u64::MAX), ..probe_request(&params) };
        let body: Value = serde_json::from_slice(&body(&request, Some("m"))).unwrap();
        assert_eq!(
            body,
            serde_json::json!({"model": "m", "prompt": [5, 6], "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
                "min_p": 0.1, "seed": i64::MAX, "stop": ["x"], "logprobs": 0, "return_token_ids": true})
        );
    }
}
