//! Token ids with what belongs to them.
//!
//! A sampled id, its log-probability, its mask and its weight version live in one value and cannot come apart: fields are
//! private and each constructor checks. Nothing here decodes an id (paper, 3.3.3).

use serde::{Deserialize, Serialize};

use crate::WeightVersion;

/// An id in a model's vocabulary.
pub type TokenId = u32;

/// Why ids and log-probabilities are no [`Completion`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LogprobError {
    /// One id, one log-probability.
    #[error("{n_ids} ids with {n_logprobs} log-probabilities")]
    LengthMismatch {
        /// How many ids came.
        n_ids: usize,
        /// How many log-probabilities came.
        n_logprobs: usize,
    },
    /// NaN or infinite.
    #[error("log-probability {value} at position {index} is not finite")]
    NotFinite {
        /// Position in the completion.
        index: usize,
        /// What came.
        value: f64,
    },
    /// A probability above one.
    #[error("log-probability {value} at position {index} is above 0")]
    Positive {
        /// Position in the completion.
        index: usize,
        /// What came.
        value: f64,
    },
}

fn check_logprobs(n_ids: usize, logprobs: &[f64]) -> Result<(), LogprobError> {
    if n_ids != logprobs.len() {
        return Err(LogprobError::LengthMismatch { n_ids, n_logprobs: logprobs.len() });
    }
    for (index, &value) in logprobs.iter().enumerate() {
        if !value.is_finite() {
            return Err(LogprobError::NotFinite { index, value });
        }
        if value > 0.0 {
            return Err(LogprobError::Positive { index, value });
        }
    }
    Ok(())
}

/// What a backend sampled in one turn: ids and, in the same order, their natural-log probabilities.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    ids: Vec<TokenId>,
    logprobs: Vec<f64>,
}

impl Completion {
    /// Joins ids and log-probabilities.
    ///
    /// # Errors
    /// When the lengths differ, or a log-probability is not finite or above 0. Such a turn is invalid as a whole.
    pub fn new(ids: Vec<TokenId>, logprobs: Vec<f64>) -> Result<Self, LogprobError> {
        check_logprobs(ids.len(), &logprobs)?;
        Ok(Self { ids, logprobs })
    }

    /// The sampled ids; never decoded and re-encoded.
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Natural-log probability of each of [`ids`](Self::ids), same length and order (paper, 3.3.3).
    pub fn logprobs(&self) -> &[f64] {
        &self.logprobs
    }
}

/// Why parts of a trace from outside do not fit together.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// Response ids, mask and log-probabilities have one length.
    #[error("{n_ids} response ids with {n_masks} mask entries and {n_logprobs} log-probabilities")]
    LengthMismatch {
        /// Number of response ids.
        n_ids: usize,
        /// Number of mask entries.
        n_masks: usize,
        /// Number of log-probabilities.
        n_logprobs: usize,
    },
    /// A mask entry is 0 or 1.
    #[error("mask {value} at position {index} is neither 0 nor 1")]
    Mask {
        /// Position in the response.
        index: usize,
        /// What came.
        value: u8,
    },
    /// A log-probability that no engine can have meant.
    #[error(transparent)]
    Logprob(#[from] LogprobError),
    /// Masked positions carry 0.0.
    #[error("log-probability {value} at masked position {index}, expected 0.0")]
    MaskedLogprob {
        /// Position in the response.
        index: usize,
        /// What came.
        value: f64,
    },
    /// The runs of weight versions cover the response.
    #[error("weight versions cover {covered} of {n_ids} response ids")]
    VersionCover {
        /// Sum of the runs.
        covered: u64,
        /// Number of response ids.
        n_ids: usize,
    },
}

/// A token sequence with a loss mask in which every turn extends the one before.
///
/// `prompt_ids` is everything before the first sampled id. In the response, sampled positions have mask 1 and the backend's
/// log-probability; fed positions (tool results, text that the template adds) have mask 0 and 0.0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawTrace")]
pub struct Trace {
    prompt_ids: Vec<TokenId>,
    response_ids: Vec<TokenId>,
    loss_mask: Vec<u8>,
    logprobs: Vec<f64>,
    weight_versions: Vec<(WeightVersion, u64)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTrace {
    prompt_ids: Vec<TokenId>,
    response_ids: Vec<TokenId>,
    loss_mask: Vec<u8>,
    logprobs: Vec<f64>,
    weight_versions: Vec<(WeightVersion, u64)>,
}

impl TryFrom<RawTrace> for Trace {
    type Error = TraceError;

    fn try_from(raw: RawTrace) -> Result<Self, TraceError> {
        let n_ids = raw.response_ids.len();
        if n_ids != raw.loss_mask.len() || n_ids != raw.logprobs.len() {
            return Err(TraceError::LengthMismatch {
                n_ids,
                n_masks: raw.loss_mask.len(),
                n_logprobs: raw.logprobs.len(),
            });
        }
        check_logprobs(n_ids, &raw.logprobs)?;
        for (index, (&mask, &value)) in raw.loss_mask.iter().zip(&raw.logprobs).enumerate() {
            if mask > 1 {
                return Err(TraceError::Mask { index, value: mask });
            }
            if mask == 0 && value != 0.0 {
                return Err(TraceError::MaskedLogprob { index, value });
            }
        }
        let covered = raw.weight_versions.iter().fold(0_u64, |sum, (_, count)| sum.saturating_add(*count));
        if covered != n_ids as u64 {
            return Err(TraceError::VersionCover { covered, n_ids });
        }
        Ok(Self {
            prompt_ids: raw.prompt_ids,
            response_ids: raw.response_ids,
            loss_mask: raw.loss_mask,
            logprobs: raw.logprobs,
            weight_versions: raw.weight_versions,
        })
    }
}

impl Trace {
    /// Starts a trace from the ids that stand before the first sampled one.
    pub fn new(prompt_ids: Vec<TokenId>) -> Self {
        Self { prompt_ids, ..Self::default() }
    }

    /// Appends a sampled turn: mask 1, the backend's log-probabilities, one weight version.
    pub fn push_sampled(&mut self, turn: &Completion, version: WeightVersion) {
        self.response_ids.extend_from_slice(turn.ids());
        self.logprobs.extend_from_slice(turn.logprobs());
        self.extend(1, turn.ids().len(), version);
    }

    /// Appends context that was fed, not sampled: mask 0, log-probability 0.0, the version of the turn before.
    pub fn push_fed(&mut self, ids: &[TokenId]) {
        self.response_ids.extend_from_slice(ids);
        self.logprobs.resize(self.response_ids.len(), 0.0);
        let version = self.weight_versions.last().map_or(0, |run| run.0);
        self.extend(0, ids.len(), version);
    }

    fn extend(&mut self, mask: u8, n_ids: usize, version: WeightVersion) {
        self.loss_mask.resize(self.response_ids.len(), mask);
        match self.weight_versions.last_mut() {
            _ if n_ids == 0 => {}
            Some(run) if run.0 == version => run.1 += n_ids as u64,
            _ => self.weight_versions.push((version, n_ids as u64)),
        }
    }

    /// Everything before the first sampled id.
    pub fn prompt_ids(&self) -> &[TokenId] {
        &self.prompt_ids
    }

    /// Sampled and fed ids after the prompt.
    pub fn response_ids(&self) -> &[TokenId] {
        &self.response_ids
    }

    /// 1 where the id was sampled, 0 where it was fed; one entry per response id.
    pub fn loss_mask(&self) -> &[u8] {
        &self.loss_mask
    }

    /// Natural-log probabilities, 0.0 where the mask is 0; one entry per response id.
    pub fn logprobs(&self) -> &[f64] {
        &self.logprobs
    }

    /// Run-length list of (weight version, number of response ids).
    pub fn weight_versions(&self) -> &[(WeightVersion, u64)] {
        &self.weight_versions
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_completion_takes_only_log_probabilities() {
        assert_eq!(
            Completion::new(vec![1, 2], vec![-1.0]),
            Err(LogprobError::LengthMismatch { n_ids: 2, n_logprobs: 1 })
        );
        assert!(matches!(
            Completion::new(vec![1], vec![f64::NEG_INFINITY]),
            Err(LogprobError::NotFinite { index: 0, .. })
        ));
        assert!(matches!(Completion::new(vec![1], vec![0.1]), Err(LogprobError::Positive { index: 0, .. })));
        assert!(Completion::new(vec![1], vec![0.0]).is_ok());
    }

    #[test]
    fn each_broken_trace_is_named() {
        let good = serde_json::json!({"prompt_ids": [1], "response_ids": [2, 3], "loss_mask": [1, 0],
            "logprobs": [-0.5, 0.0], "weight_versions": [[1, 2]]});
        assert!(serde_json::from_value::<Trace>(good.clone()).is_ok());
        for (field, value, message) in [
            ("loss_mask", serde_json::json!([1]), "2 response ids with 1 mask entries"),
            ("loss_mask", serde_json::json!([2, 0]), "mask 2 at position 0"),
            ("logprobs", serde_json::json!([0.5, 0.0]), "above 0"),
            ("logprobs", serde_json::json!([-0.5, -0.5]), "masked position 1"),
            ("weight_versions", serde_json::json!([[1, 1]]), "cover 1 of 2"),
        ] {
            let mut bad = good.clone();
            bad[field] = value;
            let err = serde_json::from_value::<Trace>(bad).unwrap_err().to_string();
            assert!(err.contains(message), "{err}");
        }
    }

    proptest! {
        #[test]
        fn parts_stay_aligned_and_survive_json(
            prompt in proptest::collection::vec(any::<u32>(), 0..5),
            turns in proptest::collection::vec(
                (proptest::collection::vec((any::<u32>(), -1e3_f64..=0.0), 0..6), 0_u64..3, proptest::collection::vec(any::<u32>(), 0..4)), 0..6),
        ) {
            let mut trace = Trace::new(prompt.clone());
            let mut sampled = Vec::new();
            for (tokens, version, fed) in turns {
                let (ids, logprobs): (Vec<_>, Vec<_>) = tokens.into_iter().unzip();
                sampled.extend_from_slice(&ids);
                trace.push_sampled(&Completion::new(ids, logprobs).unwrap(), version);
                trace.push_fed(&fed);
            }
            let n_ids = trace.response_ids().len();
            prop_assert_eq!(trace.loss_mask().len(), n_ids);
            prop_assert_eq!(trace.logprobs().len(), n_ids);
            prop_assert_eq!(trace.weight_versions().iter().map(|run| run.1).sum::<u64>(), n_ids as u64);
            prop_assert!(trace.weight_versions().windows(2).all(|runs| runs[0].0 != runs[1].0));
            let masked: Vec<_> = trace.response_ids().iter().zip(trace.loss_mask()).filter(|(_, m)| **m == 1).map(|(id, _)| *id).collect();
            prop_assert_eq!(masked, sampled);
            let json = serde_json::to_string(&trace).unwrap();
            prop_assert_eq!(serde_json::from_str::<Trace>(&json).unwrap(), trace);
        }
    }
}
