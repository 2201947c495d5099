//! A task's place on a backend.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::timeout;

use super::{Pool, balance::Slot, state::Backend};
use crate::dialect::{self, GenerateRequest, Generation, LlmError};

/// How long a backend that broke off may take to show that it is alive.
const CUT_PROBE_LIMIT: Duration = Duration::from_secs(1);

/// A task's place on one backend, kept for all of its turns. Dropping it frees the place.
#[must_use = "dropping a lease frees its place"]
pub struct Lease {
    pool: Pool,
    slot: Slot,
    address: Arc<str>,
    session: String,
}

impl Lease {
    pub(super) fn new(pool: Pool, slot: Slot, address: Arc<str>, session: String) -> Self {
        Self { pool, slot, address, session }
    }

    /// Returns the backend's address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the name of the task that holds it.
    pub fn session(&self) -> &str {
        &self.session
    }

    /// Tells whether the backend still takes turns: false once it was removed or ejected. The task then drops the lease and
    /// takes another, with its ids.
    pub fn is_alive(&self) -> bool {
        let state = self.pool.0.state.lock();
        state.backends.get(&self.slot).is_some_and(Backend::is_alive)
    }

    /// Asks the backend for one turn and waits for it for `limit` at most.
    ///
    /// A backend that cannot be connected to is ejected until a health probe succeeds. One that broke off may have died or
    /// may have cut this call alone, so it is probed at once and ejected when that fails. No other error does that.
    ///
    /// # Errors
    /// See [`LlmError`]; each says whether a fresh call may help and whose failure it is.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection, by which the engine ends the generation.
    pub async fn generate(&self, request: &GenerateRequest<'_>, limit: Duration) -> Result<Generation, LlmError> {
        let inner = &self.pool.0;
        let (target, dialect, weight_version) = {
            let state = inner.state.lock();
            // A backend stays in the table while a lease is on it, and had a dialect when it took its first task; only one
            // that was added again as another kind, and is not reachable as that, has none.
            let backend = &state.backends[&self.slot];
            let Some(dialect) = backend.dialect else {
                let detail = "not reachable since it was added again".to_owned();
                return Err(LlmError::Connect { backend: self.address.to_string(), detail });
            };
            (backend.target(), dialect, backend.weight_version)
        };
        let call = dialect::generate(&inner.http, &target, dialect, request);
        let result = match timeout(limit, call).await {
            Ok(result) => result,
            Err(_elapsed) => Err(LlmError::Timeout { backend: target.address.clone(), limit }),
        };
        match result {
            Ok(sampled) => Ok(Generation {
                completion: sampled.completion,
                finish_reason: sampled.finish_reason,
                weight_version,
                backend: target.address,
            }),
            Err(err) => {
                match &err {
                    LlmError::Connect { detail, .. } => self.eject(detail),
                    LlmError::Cut { .. } => {
                        let limit = inner.config.probe_timeout.min(CUT_PROBE_LIMIT);
                        let health = timeout(limit, self.pool.health(&target)).await;
                        if let Err(why) = health.unwrap_or_else(|_| Err(format!("no answer within {limit:?}"))) {
                            self.eject(&why);
                        }
                    }
                    _ => {}
                }
                Err(err)
            }
        }
    }

    fn eject(&self, reason: &str) {
        let mut state = self.pool.0.state.lock();
        if let Some(backend) = state.backends.get_mut(&self.slot)
            && backend.reason.is_none()
        {
            tracing::warn!(backend = backend.address.as_str(), reason, "backend ejected");
            backend.reason = Some(reason.to_owned());
        }
        state.reopen(self.slot);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        {
            let mut state = self.pool.0.state.lock();
            state.balance.release(self.slot);
            state.forget_if_unused(self.slot);
        }
        self.pool.settle();
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("address", &self.address).field("session", &self.session).finish_non_exhaustive()
    }
}
