//! What threads of this process are making: each thing once, with one thread that waits for other processes.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};

use super::{SourceKey, StoredImage};

/// What is being made, by key.
#[derive(Debug, Default)]
pub(super) struct Flights(Mutex<HashMap<SourceKey, Arc<Flight>>>);

/// One thing that is being made.
#[derive(Debug, Default)]
pub(super) struct Flight {
    outcome: Mutex<Outcome>,
    is_over: Condvar,
}

/// What came of making something.
#[derive(Clone, Debug, Default)]
pub(super) enum Outcome {
    /// Nothing yet.
    #[default]
    Open,
    /// Nothing; the one who made it was told why.
    Failed,
    /// The image.
    Made(StoredImage),
}

/// What a thread that wants something has to do.
#[derive(Debug)]
pub(super) enum Seat<'a> {
    /// To make it.
    Pilot(Pilot<'a>),
    /// To wait for another thread.
    Passenger(Arc<Flight>),
}

/// Who makes it. Dropped without a result, whoever waits tries itself.
#[derive(Debug)]
pub(super) struct Pilot<'a> {
    flights: &'a Flights,
    key: SourceKey,
    flight: Arc<Flight>,
}

impl Flights {
    pub(super) fn board(&self, key: &SourceKey) -> Seat<'_> {
        match self.0.lock().entry(key.clone()) {
            Entry::Occupied(flying) => Seat::Passenger(Arc::clone(flying.get())),
            Entry::Vacant(free) => {
                let flight = Arc::clone(free.insert(Arc::default()));
                Seat::Pilot(Pilot { flights: self, key: key.clone(), flight })
            }
        }
    }
}

impl Flight {
    /// Waits for the end, so long at most.
    pub(super) fn wait(&self, limit: Duration) -> Outcome {
        let mut outcome = self.outcome.lock();
        if matches!(*outcome, Outcome::Open) {
            self.is_over.wait_for(&mut outcome, limit);
        }
        outcome.clone()
    }
}

impl Pilot<'_> {
    /// Gives what was made to all who wait.
    pub(super) fn land(self, image: &StoredImage) {
        *self.flight.outcome.lock() = Outcome::Made(image.clone());
    }
}

impl Drop for Pilot<'_> {
    fn drop(&mut self) {
        // Whoever comes now takes off anew.
        self.flights.0.lock().remove(&self.key);
        let mut outcome = self.flight.outcome.lock();
        if matches!(*outcome, Outcome::Open) {
            *outcome = Outcome::Failed;
        }
        self.flight.is_over.notify_all();
    }
}
