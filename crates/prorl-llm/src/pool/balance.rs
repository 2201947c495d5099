//! Which backend takes the next task: an ordered set by count, so that choosing is choosing its least (paper, 3.3.2).

use std::collections::{BTreeMap, BTreeSet};

/// A backend's number in its pool. Never used again.
pub(crate) type Slot = u64;

/// What is counted when a task looks for a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Tasks on a backend now: a slow backend gets fewer.
    #[default]
    Active,
    /// Tasks ever assigned to it, the paper's count. A backend that is new or back starts at the least count of the others,
    /// where in the paper every task would go to it until it has caught up.
    Assigned,
}

/// The counts of one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) active: usize,
    pub(crate) assigned: u64,
    /// The count of [`Policy::Assigned`]; differs from `assigned` by where it started.
    rank: u64,
    /// Number of its last assignment among those of all backends; 0 before its first.
    last: u64,
    capacity: Option<usize>,
    open: bool,
}

/// Counts of all backends, and the order in which they take tasks.
#[derive(Debug)]
pub(crate) struct Balance {
    policy: Policy,
    loads: BTreeMap<Slot, Load>,
    /// Open backends with room, by policy's count; the one that was assigned to least recently, then the older one, wins a
    /// tie, so that jobs one after the other go round.
    order: BTreeSet<(u64, u64, Slot)>,
    /// Assignments so far.
    n_assigned: u64,
}

impl Balance {
    pub(crate) fn new(policy: Policy) -> Self {
        Self { policy, loads: BTreeMap::new(), order: BTreeSet::new(), n_assigned: 0 }
    }

    /// Changes one backend's counts and puts it where it now belongs.
    fn update(&mut self, slot: Slot, change: impl FnOnce(&mut Load)) {
        let Some(load) = self.loads.get_mut(&slot) else { return };
        let key = |load: &Load| {
            let count = match self.policy {
                Policy::Active => load.active as u64,
                Policy::Assigned => load.rank,
            };
            (count, load.last, slot)
        };
        self.order.remove(&key(load));
        change(load);
        if load.open && load.capacity.is_none_or(|capacity| load.active < capacity) {
            self.order.insert(key(load));
        }
    }

    /// Adds a closed backend without tasks.
    pub(crate) fn insert(&mut self, slot: Slot, capacity: Option<usize>) {
        self.loads.insert(slot, Load { capacity, ..Load::default() });
    }

    pub(crate) fn remove(&mut self, slot: Slot) {
        self.update(slot, |load| load.open = false);
        self.loads.remove(&slot);
    }

    pub(crate) fn set_capacity(&mut self, slot: Slot, capacity: Option<usize>) {
        self.update(slot, |load| load.capacity = capacity);
    }

    /// Lets a backend take tasks, or no more of them.
    pub(crate) fn set_open(&mut self, slot: Slot, open: bool) {
        let least = self.loads.values().filter(|load| load.open).map(|load| load.rank).min();
        self.update(slot, |load| {
            if open && !load.open {
                load.rank = load.rank.max(least.unwrap_or(0));
            }
            load.open = open;
        });
    }

    /// Tells whether a backend could take a task.
    pub(crate) fn has_room(&self) -> bool {
        !self.order.is_empty()
    }

    /// Assigns a task: chooses the least loaded backend and counts it there.
    pub(crate) fn assign(&mut self) -> Option<Slot> {
        let (.., slot) = *self.order.first()?;
        self.n_assigned += 1;
        let number = self.n_assigned;
        self.update(slot, |load| {
            load.last = number;
            load.active += 1;
            load.assigned += 1;
            load.rank += 1;
        });
        Some(slot)
    }

    /// Takes a task off its backend.
    pub(crate) fn release(&mut self, slot: Slot) {
        self.update(slot, |load| load.active = load.active.saturating_sub(1));
    }

    pub(crate) fn load(&self, slot: Slot) -> Load {
        self.loads.get(&slot).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn balance(policy: Policy, n: u64) -> Balance {
        let mut balance = Balance::new(policy);
        for slot in 0..n {
            balance.insert(slot, None);
            balance.set_open(slot, true);
        }
        balance
    }

    #[test]
    fn a_new_backend_starts_at_the_least_count() {
        let mut balance = balance(Policy::Assigned, 2);
        for _ in 0..100 {
            balance.assign().unwrap();
        }
        balance.insert(2, None);
        balance.set_open(2, true);
        let next: Vec<_> = (0..30).map(|_| balance.assign().unwrap()).collect();
        assert_eq!(next.iter().filter(|slot| **slot == 2).count(), 10);
    }

    #[test]
    fn tasks_one_after_the_other_go_round() {
        for policy in [Policy::Active, Policy::Assigned] {
            let mut balance = balance(policy, 2);
            let next = |balance: &mut Balance| {
                let slot = balance.assign().unwrap();
                balance.release(slot);
                slot
            };
            let slots: Vec<_> = (0..6).map(|_| next(&mut balance)).collect();
            assert_eq!(slots, [0, 1, 0, 1, 0, 1], "{policy:?}");
            // A new backend takes its turn, not every turn until it has caught up.
            balance.insert(2, None);
            balance.set_open(2, true);
            let slots: Vec<_> = (0..6).map(|_| next(&mut balance)).collect();
            assert_eq!(slots, [2, 0, 1, 2, 0, 1], "{policy:?}");
        }
    }

    #[test]
    fn active_avoids_the_backend_that_keeps_its_tasks() {
        let mut balance = balance(Policy::Active, 2);
        for _ in 0..10 {
            if balance.assign() == Some(1) {
                balance.release(1);
            }
        }
        assert!(balance.load(0).active <= 2, "{balance:?}");
    }

    #[test]
    fn capacity_and_closing_hold() {
        let mut balance = balance(Policy::Active, 1);
        balance.set_capacity(0, Some(1));
        assert_eq!(balance.assign(), Some(0));
        assert_eq!(balance.assign(), None);
        balance.release(0);
        balance.set_open(0, false);
        assert_eq!(balance.assign(), None);
        balance.set_open(0, true);
        assert_eq!(balance.assign(), Some(0));
    }

    proptest! {
        #[test]
        fn counts_stay_level(n in 1_u64..6, steps in proptest::collection::vec(0_u8..3, 0..200), assigned in any::<bool>()) {
            let policy = if assigned { Policy::Assigned } else { Policy::Active };
            let mut balance = balance(policy, n);
            let mut held = Vec::new();
            for step in steps {
                if step > 0 {
                    held.push(balance.assign().unwrap());
                } else if policy == Policy::Assigned && !held.is_empty() {
                    balance.release(held.swap_remove(0));
                }
                let counts: Vec<u64> = (0..n).map(|slot| match policy {
                    Policy::Active => balance.load(slot).active as u64,
                    Policy::Assigned => balance.load(slot).assigned,
                }).collect();
                let (most, least) = (counts.iter().max().unwrap(), counts.iter().min().unwrap());
                prop_assert!(most - least <= 1, "{counts:?}");
            }
            let active: usize = (0..n).map(|slot| balance.load(slot).active).sum();
            prop_assert_eq!(active, held.len());
        }
    }
}
