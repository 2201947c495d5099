//! Why a call gave no turn, and whose failure that is.

use std::time::Duration;

use prorl_core::{FailureClass, LogprobError};

/// Why a call gave no turn.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LlmError {
    /// The backend is not there.
    #[error("backend {backend}: no connection: {detail}")]
    Connect {
        /// Its address.
        backend: String,
        /// The system's words.
        detail: String,
    },
    /// The connection broke before the answer was whole.
    #[error("backend {backend} broke off: {detail}")]
    Cut {
        /// Its address.
        backend: String,
        /// How.
        detail: String,
    },
    /// No whole answer in time.
    #[error("backend {backend} did not answer within {limit:?}")]
    Timeout {
        /// Its address.
        backend: String,
        /// The call's limit.
        limit: Duration,
    },
    /// Another status than success, which may pass.
    #[error("backend {backend} answered {status}: {body}")]
    Status {
        /// Its address.
        backend: String,
        /// HTTP status.
        status: u16,
        /// The start of the body.
        body: String,
    },
    /// The request itself was refused and would be again.
    #[error("backend {backend} refused the request with {status}: {body}")]
    Refused {
        /// Its address.
        backend: String,
        /// HTTP status.
        status: u16,
        /// The start of the body.
        body: String,
    },
    /// The prompt does not fit the model.
    #[error("prompt of {n_ids} ids is too long for backend {backend}: {body}")]
    PromptTooLong {
        /// Its address.
        backend: String,
        /// Ids in the prompt.
        n_ids: usize,
        /// The start of the body.
        body: String,
    },
    /// An answer that is no answer of its dialect.
    #[error("backend {backend} gave a malformed answer: {detail}")]
    Malformed {
        /// Its address.
        backend: String,
        /// What is wrong with it.
        detail: String,
    },
    /// An answer beyond any size that a turn can have.
    #[error("backend {backend} answered with more than {limit_bytes} bytes")]
    TooLarge {
        /// Its address.
        backend: String,
        /// The bound.
        limit_bytes: usize,
    },
    /// The engine gave up on the generation, as it does when its weights change. What it had sampled is no turn.
    #[error("backend {backend} aborted the generation after {n_ids} ids")]
    Aborted {
        /// Its address.
        backend: String,
        /// Ids sampled up to then.
        n_ids: usize,
    },
    /// Ids or log-probabilities that cannot be trusted.
    #[error("backend {backend}: {problem}")]
    Integrity {
        /// Its address.
        backend: String,
        /// What is wrong with them.
        problem: IntegrityError,
    },
}

/// Why ids and log-probabilities of an answer cannot be trusted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum IntegrityError {
    /// No ids in the answer, or none at all sampled.
    #[error("no sampled ids in the answer")]
    NoIds,
    /// No log-probabilities in the answer.
    #[error("no log-probabilities in the answer")]
    NoLogprobs,
    /// One of them is null, or no number at all.
    #[error("log-probability at position {index} is missing or not a number")]
    MissingLogprob {
        /// Position in the completion.
        index: usize,
    },
    /// Lengths differ, or a value that no log-probability has.
    #[error(transparent)]
    Logprobs(#[from] LogprobError),
    /// An id that the tokenizer does not have.
    #[error("sampled id {id} at position {index} is outside of the vocabulary of {vocab_size}")]
    OutOfVocabulary {
        /// Position in the completion.
        index: usize,
        /// What came.
        id: i64,
        /// The tokenizer's size.
        vocab_size: usize,
    },
    /// More ids than were asked for.
    #[error("{n_ids} sampled ids in the answer, and at most {max_tokens} were asked for")]
    TooManyIds {
        /// What came.
        n_ids: usize,
        /// What was asked for.
        max_tokens: u64,
    },
    /// The engine echoed another prompt than was sent.
    #[error("the echoed prompt differs from the one sent at position {index}")]
    PromptEcho {
        /// The first difference.
        index: usize,
    },
}

impl LlmError {
    /// Returns whose failure this is.
    pub fn failure_class(&self) -> FailureClass {
        match self {
            Self::Integrity { .. } => FailureClass::TokenIntegrity,
            _ => FailureClass::LlmBackend,
        }
    }

    /// Tells whether a fresh call can end better. A refused request would be refused again.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::PromptTooLong { .. })
    }
}
