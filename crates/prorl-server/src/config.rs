//! What the server is told when it starts.

use std::time::Duration;

use prorl_core::{Secret, request::InputIds};

/// Settings of a [`Server`](crate::Server).
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The bearer token that every endpoint but the health checks asks for.
    pub token: Option<Secret<String>>,
    /// Whether to listen off loopback without a token all the same.
    pub insecure_no_auth: bool,
    /// How long a job may wait for a backend. Here only zero matters: a job is refused while there is no backend at all.
    /// Longer waits are the handler's, and `None` has no end.
    pub wait_for_llm: Option<Duration>,
    /// What `input_ids` holds where a request does not say.
    pub default_input_ids: InputIds,
    /// The longest request body, bytes.
    pub body_limit: usize,
    /// How long a request body may take to arrive.
    pub body_timeout: Duration,
    /// How long the end of the server may take: jobs are cancelled at once, and what is left after this is cut off.
    pub stop_grace: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            token: None,
            insecure_no_auth: false,
            wait_for_llm: None,
            default_input_ids: InputIds::Delta,
            body_limit: 64 << 20,
            body_timeout: Duration::from_mins(5),
            stop_grace: Duration::from_secs(30),
        }
    }
}
