//! What is allowed at this moment.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::{Rules, host::Destination};

/// What a sandbox may reach at this moment. A clone is the same gate.
#[derive(Clone, Debug)]
pub struct Gate(Arc<watch::Sender<Rules>>);

impl Gate {
    /// Makes one that allows these, or nothing.
    pub fn new(rules: Option<Rules>) -> Self {
        Self(Arc::new(watch::Sender::new(rules.unwrap_or_default())))
    }

    /// Allows these from now on, or nothing. What is open and no longer allowed ends at once; the rest goes on.
    pub fn set(&self, rules: Option<Rules>) {
        self.0.send_replace(rules.unwrap_or_default());
    }

    pub(super) fn rules(&self) -> Rules {
        self.0.borrow().clone()
    }

    /// Waits until what passes is no longer allowed.
    pub(super) async fn shuts_on(&self, passing: &Passing) {
        let mut changes = self.0.subscribe();
        loop {
            let rules = changes.borrow_and_update().clone();
            if passing.0.lock().upgrade().is_some_and(|to| !rules.allows(&to)) {
                return;
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Where one connection of the sandbox is being passed on to, as long as it is.
///
/// It is noted before the rules are asked: so they are either asked after a change, or there is a note when the change is seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Passing(Arc<Mutex<Weak<Destination>>>);

impl Passing {
    /// Notes where to, until what this returns is dropped.
    pub(super) fn to(&self, destination: Destination) -> Passage {
        let passage = Arc::new(destination);
        *self.0.lock() = Arc::downgrade(&passage);
        passage
    }
}

/// That something is passed on to this destination.
pub(super) type Passage = Arc<Destination>;
