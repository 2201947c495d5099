//! Why a call brought no answer.

use std::time::Duration;

/// Why a call failed. A job that was accepted and failed is no error: its result says how it ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The server's address is none.
    #[error("{address:?} is no server address: expected http://HOST:PORT or unix:PATH")]
    Address {
        /// What was given.
        address: String,
    },
    /// The HTTP client could not be made.
    #[error("failed to make an HTTP client")]
    Setup(#[source] reqwest::Error),
    /// The server answered, and not with a success.
    #[error("refused with {status}{}: {detail}", named(code))]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The stable name of the reason; empty when something other than prorl answered.
        code: String,
        /// The reason, for people.
        detail: String,
        /// When the server wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// No connection, or none that lasted until the answer began.
    #[error("failed to reach the server")]
    Connect(#[source] reqwest::Error),
    /// No answer within the call's limit.
    #[error("no answer in time")]
    Timeout(#[source] reqwest::Error),
    /// The answer broke off.
    #[error("the answer broke off")]
    Body(#[source] reqwest::Error),
    /// The answer is not what this version of the client knows.
    #[error("the answer cannot be read")]
    Decode(#[source] serde_json::Error),
}

fn named(code: &str) -> String {
    if code.is_empty() { String::new() } else { format!(" {code}") }
}

impl ClientError {
    /// Tells whether the same call may succeed later. A job with a `job_id` is safe to submit again: the id attaches to
    /// the job that is there. Without one, the abandoned job is cancelled by the disconnect and a new one begins.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Timeout(_) | Self::Body(_) => true,
            Self::Refused { status, code, .. } => match status {
                408 | 429 | 503 => true,
                // A proxy's word that it could not reach the server; the server's own 502 is about a backend.
                502 | 504 => code.is_empty(),
                _ => false,
            },
            Self::Address { .. } | Self::Setup(_) | Self::Decode(_) => false,
        }
    }

    /// Returns the stable name of the server's reason, when the server gave one.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Refused { code, .. } if !code.is_empty() => Some(code),
            _ => None,
        }
    }

    pub(crate) fn sending(error: reqwest::Error) -> Self {
        if error.is_timeout() && !error.is_connect() { Self::Timeout(error) } else { Self::Connect(error) }
    }

    pub(crate) fn reading(error: reqwest::Error) -> Self {
        if error.is_timeout() { Self::Timeout(error) } else { Self::Body(error) }
    }
}
