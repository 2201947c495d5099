//! A pool's plain data: which backends there are, what is known of them, and who waits. One lock around all of it.

use std::{collections::BTreeMap, num::NonZeroUsize};

use prorl_core::{Secret, WeightVersion, status::BackendStatus};
use tokio::sync::oneshot;

use super::{
    Lease, Policy,
    address::Address,
    balance::{Balance, Slot},
    spec::BackendSpec,
};
use crate::dialect::{Dialect, Kind, Target};

/// One backend's facts.
pub(super) struct Backend {
    pub(super) address: Address,
    pub(super) kind: Kind,
    pub(super) dialect: Option<Dialect>,
    pub(super) model: Option<String>,
    pub(super) weight_version: WeightVersion,
    pub(super) api_key: Option<Secret<String>>,
    /// False once it was removed while tasks were on it. Added again by then, it keeps them.
    pub(super) registered: bool,
    /// Differs each time that it is added, so that a probe of before does not speak for it.
    pub(super) registration: u64,
    /// Why it gets no tasks; none when it is healthy.
    pub(super) reason: Option<String>,
    pub(super) failed_probes: u32,
}

impl Backend {
    pub(super) fn is_alive(&self) -> bool {
        self.registered && self.reason.is_none()
    }

    pub(super) fn target(&self) -> Target {
        Target {
            address: self.address.as_str().to_owned(),
            base: self.address.base().to_owned(),
            model: self.model.clone(),
            api_key: self.api_key.clone(),
        }
    }
}

pub(super) struct Waiter {
    pub(super) answer: oneshot::Sender<Lease>,
    pub(super) session: String,
}

/// A backend that was looked at and is ready to be registered.
pub(super) struct Checked {
    pub(super) address: Address,
    pub(super) spec: BackendSpec,
    pub(super) dialect: Option<Dialect>,
    pub(super) model: Option<String>,
    pub(super) reason: Option<String>,
}

pub(super) struct State {
    pub(super) backends: BTreeMap<Slot, Backend>,
    pub(super) balance: Balance,
    /// Tasks without a backend by the number of their ticket, first come first served.
    pub(super) waiting: BTreeMap<u64, Waiter>,
    pub(super) next_ticket: u64,
    pub(super) next_slot: Slot,
    pub(super) next_registration: u64,
    /// Clear and swap calls so far.
    pub(super) n_changes: WeightVersion,
}

impl State {
    pub(super) fn new(policy: Policy) -> Self {
        Self {
            backends: BTreeMap::new(),
            balance: Balance::new(policy),
            waiting: BTreeMap::new(),
            next_ticket: 0,
            next_slot: 0,
            next_registration: 0,
            n_changes: 0,
        }
    }

    pub(super) fn registered(&self) -> impl Iterator<Item = Slot> + '_ {
        self.backends.iter().filter(|(_, backend)| backend.registered).map(|(slot, _)| *slot)
    }

    pub(super) fn find(&self, address: &Address) -> Option<Slot> {
        self.backends.iter().find(|(_, backend)| backend.address.base() == address.base()).map(|(slot, _)| *slot)
    }

    pub(super) fn register(&mut self, checked: Checked, version: WeightVersion) -> Slot {
        let Checked { address, spec, dialect, model, reason } = checked;
        let capacity = spec.max_concurrent.map(NonZeroUsize::get);
        let slot = self.find(&address).unwrap_or_else(|| {
            let slot = self.next_slot;
            self.next_slot += 1;
            self.balance.insert(slot, capacity);
            slot
        });
        // What was known of it before stays known while it cannot be reached.
        let known = self.backends.get(&slot).filter(|known| known.kind == spec.kind);
        let backend = Backend {
            address,
            kind: spec.kind,
            dialect: dialect.or(known.and_then(|known| known.dialect)),
            model: model.or_else(|| known.and_then(|known| known.model.clone())),
            weight_version: spec.weight_version.unwrap_or(version),
            api_key: spec.api_key,
            registered: true,
            registration: self.next_registration,
            reason,
            failed_probes: 0,
        };
        self.next_registration += 1;
        self.backends.insert(slot, backend);
        self.balance.set_capacity(slot, capacity);
        self.reopen(slot);
        slot
    }

    pub(super) fn unregister(&mut self, slot: Slot) {
        if let Some(backend) = self.backends.get_mut(&slot) {
            backend.registered = false;
        }
        self.reopen(slot);
        self.forget_if_unused(slot);
    }

    /// Opens or closes a backend for tasks as its state asks.
    pub(super) fn reopen(&mut self, slot: Slot) {
        let alive = self.backends.get(&slot).is_some_and(Backend::is_alive);
        self.balance.set_open(slot, alive);
    }

    pub(super) fn forget_if_unused(&mut self, slot: Slot) {
        let unused = self.backends.get(&slot).is_some_and(|backend| !backend.registered);
        if unused && self.balance.load(slot).active == 0 {
            self.backends.remove(&slot);
            self.balance.remove(slot);
        }
    }

    /// Tells whether a task that came now would get a backend.
    pub(super) fn has_room(&self) -> bool {
        self.waiting.is_empty() && self.balance.has_room()
    }

    pub(super) fn assign_now(&mut self) -> Option<Slot> {
        // Who waits comes first, also in the moment between a place becoming free and its being granted.
        if self.waiting.is_empty() { self.balance.assign() } else { None }
    }

    pub(super) fn status(&self, slot: Slot) -> BackendStatus {
        let backend = &self.backends[&slot];
        let load = self.balance.load(slot);
        BackendStatus {
            address: backend.address.as_str().to_owned(),
            kind: backend.dialect.map_or(backend.kind, Dialect::kind).as_str().to_owned(),
            model: backend.model.clone(),
            weight_version: backend.weight_version,
            healthy: backend.reason.is_none(),
            active: load.active,
            assigned: load.assigned,
            reason: backend.reason.clone(),
        }
    }
}
