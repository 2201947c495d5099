//! What a pool is told: its configuration, and backends as a trainer names them.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    time::Duration,
};

use prorl_core::{Secret, WeightVersion};

use super::Policy;
use crate::dialect::Kind;

/// How a pool chooses and watches its backends.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Which backend a task gets.
    pub policy: Policy,
    /// Time between two health probes of a backend.
    pub probe_interval: Duration,
    /// Limit of one probe, also of the one when a backend is added.
    pub probe_timeout: Duration,
    /// Health probes that must fail in a row before a backend is given no more tasks.
    pub eject_after: NonZeroU32,
    /// Limit of making a connection.
    pub connect_timeout: Duration,
    /// The largest answer that is read, bytes.
    pub max_answer_bytes: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            probe_interval: Duration::from_secs(2),
            probe_timeout: Duration::from_secs(10),
            eject_after: NonZeroU32::new(3).expect("three is not zero"),
            connect_timeout: Duration::from_secs(5),
            max_answer_bytes: 64 << 20,
        }
    }
}

/// A backend as a trainer names it.
#[derive(Clone, Debug)]
pub struct BackendSpec {
    /// `http://HOST:PORT`, with or without `/v1`.
    pub address: String,
    /// The dialect, or how to find out.
    pub kind: Kind,
    /// The model's name; found out when absent.
    pub model: Option<String>,
    /// The checkpoint it serves; the number of clear and swap calls so far when absent.
    pub weight_version: Option<WeightVersion>,
    /// Tasks at once at most; unlimited when absent.
    pub max_concurrent: Option<NonZeroUsize>,
    /// Sent as a bearer token.
    pub api_key: Option<Secret<String>>,
    /// Whether to try it out first. Without, it counts as healthy, and a kind that is not said is `vllm` for an address with
    /// `/v1` and otherwise `generate`.
    pub probe: bool,
}

impl BackendSpec {
    /// Names a backend of which only the address is known.
    pub fn new(address: impl Into<String>) -> Self {
        Self {
            address: address.into(),
            kind: Kind::Auto,
            model: None,
            weight_version: None,
            max_concurrent: None,
            api_key: None,
            probe: true,
        }
    }
}

/// Why a backend was not added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddError {
    /// The address is none that can be used.
    #[error("address: {0}")]
    BadAddress(String),
    /// The backend answers, but not with ids and log-probabilities.
    #[error("backend {address} cannot be used: {reason}")]
    Unusable {
        /// The address.
        address: String,
        /// What it answered.
        reason: String,
    },
    /// The dialect is known by name only.
    #[error("the {} dialect is not supported yet", kind.as_str())]
    UnsupportedKind {
        /// The dialect.
        kind: Kind,
    },
}
