//! Parts of an answer that all dialects check alike.

use std::borrow::Cow;

use prorl_core::{Completion, TokenId, message::FinishReason};
use serde::de::DeserializeOwned;

use super::{GenerateRequest, IntegrityError, LlmError, Sampled, Target};

/// Ids and log-probabilities as they stand in an answer.
pub(super) struct Parts {
    pub(super) ids: Option<Vec<i64>>,
    pub(super) logprobs: Option<Vec<Option<f64>>>,
    pub(super) finish_reason: Option<String>,
}

/// Parses an answer. Bare `NaN` and `Infinity`, which Python writes and JSON does not have, are read as null, so that the
/// log-probability is named and not the JSON.
pub(super) fn parse<T: DeserializeOwned>(target: &Target, body: &[u8]) -> Result<T, LlmError> {
    let err = match serde_json::from_slice(body) {
        Ok(answer) => return Ok(answer),
        Err(err) => err,
    };
    if let Cow::Owned(body) = with_null_for_not_finite(body)
        && let Ok(answer) = serde_json::from_slice(&body)
    {
        return Ok(answer);
    }
    Err(target.malformed(err.to_string()))
}

/// Checks an answer's parts and joins them.
pub(super) fn check(target: &Target, request: &GenerateRequest<'_>, parts: Parts) -> Result<Sampled, LlmError> {
    let finish_reason = match parts.finish_reason.as_deref() {
        Some("stop") => Some(FinishReason::Stop),
        Some("length") => Some(FinishReason::Length),
        Some("abort") => {
            let n_ids = parts.ids.map_or(0, |ids| ids.len());
            return Err(LlmError::Aborted { backend: target.address.clone(), n_ids });
        }
        Some(other) => return Err(target.malformed(format!("unknown finish_reason {other:?}"))),
        None => None,
    };
    let ids = parts.ids.filter(|ids| !ids.is_empty()).ok_or_else(|| target.integrity(IntegrityError::NoIds))?;
    let logprobs = parts.logprobs.ok_or_else(|| target.integrity(IntegrityError::NoLogprobs))?;
    let ids = ids.into_iter().enumerate().map(|(index, id)| {
        TokenId::try_from(id)
            .ok()
            .filter(|id| (*id as usize) < request.vocab_size)
            .ok_or(IntegrityError::OutOfVocabulary { index, id, vocab_size: request.vocab_size })
    });
    let ids: Vec<TokenId> = ids.collect::<Result<_, _>>().map_err(|err| target.integrity(err))?;
    let logprobs = logprobs.into_iter().enumerate();
    let logprobs: Vec<f64> = logprobs
        .map(|(index, value)| value.ok_or(IntegrityError::MissingLogprob { index }))
        .collect::<Result<_, _>>()
        .map_err(|err| target.integrity(err))?;
    // An answer that does not say how it ended was cut exactly when it has all the ids it might have.
    let finish_reason = finish_reason.unwrap_or(if ids.len() as u64 >= request.max_tokens {
        FinishReason::Length
    } else {
        FinishReason::Stop
    });
    let completion = Completion::new(ids, logprobs).map_err(|err| target.integrity(err))?;
    // Last, so that an answer which fails by nothing else is known to be whole.
    let n_ids = completion.ids().len();
    if n_ids as u64 > request.max_tokens {
        return Err(target.integrity(IntegrityError::TooManyIds { n_ids, max_tokens: request.max_tokens }));
    }
    Ok(Sampled { completion, finish_reason })
}

/// Checks that the engine saw the prompt that was sent.
pub(super) fn check_echo(target: &Target, sent: &[TokenId], echoed: &[i64]) -> Result<(), LlmError> {
    let agreed = sent.iter().zip(echoed).take_while(|(sent, echoed)| i64::from(**sent) == **echoed).count();
    if agreed == sent.len() && agreed == echoed.len() {
        return Ok(());
    }
    Err(target.integrity(IntegrityError::PromptEcho { index: agreed }))
}

fn with_null_for_not_finite(body: &[u8]) -> Cow<'_, [u8]> {
    let mut out: Option<Vec<u8>> = None;
    let mut at = 0;
    let mut in_text = false;
    while let Some(&byte) = body.get(at) {
        let rest = &body[at..];
        let word = [&b"NaN"[..], b"-NaN", b"Infinity", b"-Infinity"].into_iter().find(|word| rest.starts_with(word));
        let length = match (byte, word) {
            (b'\\', _) if in_text => 2.min(rest.len()),
            (b'"', _) => {
                in_text = !in_text;
                1
            }
            (_, Some(word)) if !in_text => {
                out.get_or_insert_with(|| body[..at].to_vec()).extend_from_slice(b"null");
                at += word.len();
                continue;
            }
            _ => 1,
        };
        if let Some(out) = &mut out {
            out.extend_from_slice(&rest[..length]);
        }
        at += length;
    }
    out.map_or(Cow::Borrowed(body), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bare_words_become_null() {
        let fix = |text: &str| String::from_utf8(with_null_for_not_finite(text.as_bytes()).into_owned()).unwrap();
        assert_eq!(
            fix(r#"[NaN, -Infinity, "NaN \" NaN", -0.5, Infinity]"#),
            r#"[null, null, "NaN \" NaN", -0.5, null]"#
        );
        assert_eq!(fix(r#"{"a": "\"#), r#"{"a": "\"#);
    }
}
