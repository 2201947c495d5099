//! Backends while they come, go, hang and change weights: which one a task gets, and whether it still lives.
//!
//! A task takes a [`Lease`] when its run stage needs a model and keeps it to the end, so that the engine's prefix cache
//! serves it (paper, 3.3.2). The lease is a guard: however the task ends, its place is free again.

mod address;
mod balance;
mod lease;
mod spec;
mod state;

use std::sync::Arc;

use futures_util::future::join_all;
use parking_lot::Mutex;
use prorl_core::{WeightVersion, status::BackendStatus};
use tokio::{
    sync::{Notify, oneshot},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

pub use crate::dialect::Kind;
pub use balance::Policy;
pub use lease::Lease;
pub use spec::{AddError, BackendSpec, PoolConfig};

use crate::{
    dialect::{self, Dialect, Found, Target},
    http::Http,
};
use address::Address;
use balance::Slot;
use state::{Checked, State, Waiter};

/// A place in the queue of those who wait; dropping it leaves the queue.
struct Ticket<'a> {
    pool: &'a Pool,
    number: u64,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.pool.0.state.lock().waiting.remove(&self.number);
    }
}

struct Inner {
    config: PoolConfig,
    http: Http,
    state: Mutex<State>,
    /// Told when there is room for a task.
    room: Notify,
}

/// The backends of a service. Cheap to clone; clones are one pool.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

impl Pool {
    /// Makes an empty pool. Health probes run while [`run`](Self::run) is polled.
    pub fn new(config: PoolConfig) -> Self {
        let http = Http::new(config.connect_timeout, config.max_answer_bytes);
        let state = State::new(config.policy);
        Self(Arc::new(Inner { config, http, state: Mutex::new(state), room: Notify::new() }))
    }

    /// Adds a backend, or updates the facts of one that is there; its tasks stay.
    ///
    /// One that is not reachable, or not ready, is kept with `healthy: false` and used once a health probe succeeds.
    ///
    /// # Errors
    /// [`AddError::BadAddress`]; [`AddError::Unusable`] for one that answers but cannot return ids and log-probabilities.
    /// Nothing is changed then.
    ///
    /// # Cancel safety
    /// Dropping the future adds nothing.
    pub async fn add(&self, spec: BackendSpec) -> Result<BackendStatus, AddError> {
        let checked = self.check(spec).await?;
        let status = {
            let mut state = self.0.state.lock();
            let version = state.n_changes;
            let slot = state.register(checked, version);
            state.status(slot)
        };
        self.settle();
        Ok(status)
    }

    /// Removes every backend and returns how many there were. Running calls end on their own; their leases are dead.
    pub fn clear(&self) -> usize {
        let mut state = self.0.state.lock();
        state.n_changes += 1;
        let slots: Vec<Slot> = state.registered().collect();
        for slot in &slots {
            state.unregister(*slot);
        }
        slots.len()
    }

    /// Removes one backend and tells whether it was there.
    ///
    /// # Errors
    /// [`AddError::BadAddress`] when the text is no address.
    pub fn remove(&self, address: &str) -> Result<bool, AddError> {
        let address = Address::parse(address).map_err(AddError::BadAddress)?;
        let mut state = self.0.state.lock();
        let slot = state.find(&address).filter(|slot| state.backends[slot].registered);
        if let Some(slot) = slot {
            state.unregister(slot);
        }
        Ok(slot.is_some())
    }

    /// Replaces all backends by these in one step, after looking at each of them. One that stays keeps its tasks.
    ///
    /// A backend without a weight version of its own gets `weight_version`, or the number of clear and swap calls, this one
    /// counted.
    ///
    /// # Errors
    /// As [`add`](Self::add), for the first backend that cannot be used; nothing is changed then.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn swap(
        &self,
        specs: Vec<BackendSpec>,
        weight_version: Option<WeightVersion>,
    ) -> Result<Vec<BackendStatus>, AddError> {
        let checked = join_all(specs.into_iter().map(|spec| self.check(spec))).await;
        let checked: Vec<Checked> = checked.into_iter().collect::<Result<_, _>>()?;
        let statuses = {
            let mut state = self.0.state.lock();
            state.n_changes += 1;
            let version = weight_version.unwrap_or(state.n_changes);
            let before: Vec<Slot> = state.registered().collect();
            let slots: Vec<Slot> = checked.into_iter().map(|checked| state.register(checked, version)).collect();
            for slot in before.into_iter().filter(|slot| !slots.contains(slot)) {
                state.unregister(slot);
            }
            slots.into_iter().map(|slot| state.status(slot)).collect()
        };
        self.settle();
        Ok(statuses)
    }

    /// Returns the backends in the order in which they were added.
    pub fn list(&self) -> Vec<BackendStatus> {
        let state = self.0.state.lock();
        state.registered().map(|slot| state.status(slot)).collect()
    }

    /// Returns the number of tasks that wait for a backend.
    pub fn n_waiting(&self) -> usize {
        self.0.state.lock().waiting.len()
    }

    /// Takes a place on the least loaded healthy backend, waiting for one in turn if need be. `session` names the task.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the place in the queue; no count is left behind.
    pub async fn acquire(&self, session: &str) -> Lease {
        loop {
            let (_ticket, answer) = {
                let mut state = self.0.state.lock();
                if let Some(slot) = state.assign_now() {
                    return self.lease(slot, session.to_owned(), &state);
                }
                let (sender, answer) = oneshot::channel();
                let number = state.next_ticket;
                state.next_ticket += 1;
                state.waiting.insert(number, Waiter { answer: sender, session: session.to_owned() });
                (Ticket { pool: self, number }, answer)
            };
            // A waiter leaves the queue with a lease, or by its ticket, which is still here.
            if let Ok(lease) = answer.await {
                return lease;
            }
        }
    }

    /// Waits until some healthy backend could take a task, without taking a place: nothing is assigned or counted, and by the
    /// time that the caller acts another task may have come first.
    ///
    /// # Cancel safety
    /// Dropping the future leaves nothing behind.
    pub async fn ready(&self) {
        loop {
            // Made before looking, so that room that comes in between is not missed.
            let told = self.0.room.notified();
            if self.0.state.lock().has_room() {
                return;
            }
            told.await;
        }
    }

    /// Takes a place if one is free now and nobody waits for it.
    pub fn try_acquire(&self, session: &str) -> Option<Lease> {
        let mut state = self.0.state.lock();
        let slot = state.assign_now()?;
        Some(self.lease(slot, session.to_owned(), &state))
    }

    /// Watches the backends until `stop`: ejects those whose health probes fail, takes back those that answer again.
    ///
    /// # Cancel safety
    /// Dropping the future ends the watching and nothing else.
    pub async fn run(&self, stop: CancellationToken) {
        loop {
            let round = async {
                sleep(self.0.config.probe_interval).await;
                self.probe_all().await;
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = round => {}
            }
        }
    }

    async fn probe_all(&self) {
        let slots: Vec<Slot> = self.0.state.lock().registered().collect();
        let probes = slots.into_iter().map(|slot| async move {
            self.probe_one(slot).await;
            self.settle();
        });
        join_all(probes).await;
    }

    /// Probes one backend's health and, where that is not known yet, its dialect.
    async fn probe_one(&self, slot: Slot) {
        let (target, kind, dialect, registration) = {
            let state = self.0.state.lock();
            let Some(backend) = state.backends.get(&slot) else { return };
            (backend.target(), backend.kind, backend.dialect, backend.registration)
        };
        let probing = async {
            self.health(&target).await?;
            match dialect {
                Some(dialect) => Ok((dialect, target.model.clone())),
                None => match dialect::probe(&self.0.http, &target, kind).await {
                    Found::Usable { dialect, model } => Ok((dialect, model)),
                    Found::Unreachable(reason) | Found::Unusable(reason) => Err(reason),
                },
            }
        };
        let limit = self.0.config.probe_timeout;
        let result = timeout(limit, probing).await.unwrap_or_else(|_| Err(format!("no answer within {limit:?}")));
        let mut state = self.0.state.lock();
        let backend = state.backends.get_mut(&slot).filter(|backend| backend.registration == registration);
        let Some(backend) = backend else { return };
        match result {
            Ok((dialect, model)) => {
                backend.failed_probes = 0;
                backend.dialect = Some(dialect);
                backend.model = model;
                if backend.reason.take().is_some() {
                    tracing::info!(backend = backend.address.as_str(), "backend is healthy");
                }
            }
            Err(reason) => {
                backend.failed_probes += 1;
                if backend.reason.is_some() {
                    backend.reason = Some(reason);
                } else if backend.failed_probes >= self.0.config.eject_after.get() {
                    tracing::warn!(backend = backend.address.as_str(), reason, "backend ejected");
                    backend.reason = Some(reason);
                }
            }
        }
        state.reopen(slot);
    }

    /// Asks a backend whether it is alive: any answer below 500 says so, and one that there is no such endpoint.
    async fn health(&self, target: &Target) -> Result<(), String> {
        let url = format!("{}/health", target.base);
        let answer = self.0.http.get(&url, target.api_key.as_ref()).await.map_err(|err| err.to_string())?;
        if answer.status >= 500 && !dialect::is_missing(answer.status) {
            Err(format!("GET /health: {}", answer.status))
        } else {
            Ok(())
        }
    }

    /// Parses an address and looks at the backend there.
    async fn check(&self, spec: BackendSpec) -> Result<Checked, AddError> {
        let address = Address::parse(&spec.address).map_err(AddError::BadAddress)?;
        if matches!(spec.kind, Kind::VllmGenerate | Kind::Sglang) {
            return Err(AddError::UnsupportedKind { kind: spec.kind });
        }
        let model = spec.model.clone();
        if !spec.probe {
            let dialect = match spec.kind {
                Kind::Vllm => Dialect::Vllm,
                Kind::Auto if address.has_v1() => Dialect::Vllm,
                _ => Dialect::Generate,
            };
            return Ok(Checked { address, spec, dialect: Some(dialect), model, reason: None });
        }
        let target = Target {
            address: address.as_str().to_owned(),
            base: address.base().to_owned(),
            model: model.clone(),
            api_key: spec.api_key.clone(),
        };
        let limit = self.0.config.probe_timeout;
        let found = timeout(limit, dialect::probe(&self.0.http, &target, spec.kind)).await;
        match found.unwrap_or_else(|_| Found::Unreachable(format!("no answer within {limit:?}"))) {
            Found::Usable { dialect, model } => {
                Ok(Checked { address, spec, dialect: Some(dialect), model, reason: None })
            }
            Found::Unreachable(reason) => Ok(Checked { address, spec, dialect: None, model, reason: Some(reason) }),
            Found::Unusable(reason) => Err(AddError::Unusable { address: target.address, reason }),
        }
    }

    fn lease(&self, slot: Slot, session: String, state: &State) -> Lease {
        Lease::new(self.clone(), slot, state.backends[&slot].address.as_str().into(), session)
    }

    /// Gives free places to those who wait, first come first served. Called whenever there may be more room.
    fn settle(&self) {
        let mut granted = Vec::new();
        let has_room = {
            let mut state = self.0.state.lock();
            while let Some((number, _)) = state.waiting.first_key_value()
                && let number = *number
                && let Some(slot) = state.balance.assign()
                && let Some(waiter) = state.waiting.remove(&number)
            {
                granted.push((waiter.answer, self.lease(slot, waiter.session, &state)));
            }
            state.has_room()
        };
        if has_room {
            self.0.room.notify_waiters();
        }
        for (answer, lease) in granted {
            // Should the waiter be gone by now, the lease comes back, is dropped, and frees the place again.
            drop(answer.send(lease));
        }
    }
}
