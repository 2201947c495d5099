//! Where accepted jobs wait for their first worker.

use std::{cmp::Reverse, collections::BTreeMap, collections::HashMap};

use async_trait::async_trait;
use parking_lot::Mutex;
use prorl_core::JobId;
use tokio::sync::Notify;

/// A job that waits. An id that was abandoned and submitted again has two tickets for a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The job.
    pub job_id: JobId,
    /// Tells submits of one id apart; never used twice.
    pub serial: u64,
    /// Higher goes first.
    pub priority: i64,
}

/// The source of jobs for the init stage: in process here; a journal or a message broker elsewhere.
///
/// A queue holds names only. The pipeline bounds how many jobs there are, so it never refuses one.
#[async_trait]
pub trait JobQueue: Send + Sync + 'static {
    /// Appends a job.
    fn push(&self, ticket: Ticket);

    /// Takes the next job, if there is one: highest priority, then oldest.
    fn pop(&self) -> Option<Ticket>;

    /// Takes a job out; tells whether it was there.
    fn remove(&self, serial: u64) -> bool;

    /// Returns how many wait.
    fn len(&self) -> usize;

    /// Tells whether none waits.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until a job may be there.
    ///
    /// # Cancel safety
    /// Dropping it takes nothing.
    async fn ready(&self);
}

/// A queue in this process's memory.
#[derive(Debug, Default)]
pub struct InProcessQueue {
    state: Mutex<State>,
    pushed: Notify,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    order: BTreeMap<(Reverse<i64>, u64), Ticket>,
    places: HashMap<u64, (Reverse<i64>, u64)>,
}

#[async_trait]
impl JobQueue for InProcessQueue {
    fn push(&self, ticket: Ticket) {
        let mut state = self.state.lock();
        state.next += 1;
        let place = (Reverse(ticket.priority), state.next);
        state.places.insert(ticket.serial, place);
        state.order.insert(place, ticket);
        drop(state);
        self.pushed.notify_one();
    }

    fn pop(&self) -> Option<Ticket> {
        let mut state = self.state.lock();
        let (_, ticket) = state.order.pop_first()?;
        state.places.remove(&ticket.serial);
        Some(ticket)
    }

    fn remove(&self, serial: u64) -> bool {
        let mut state = self.state.lock();
        let place = state.places.remove(&serial);
        place.is_some_and(|place| state.order.remove(&place).is_some())
    }

    fn len(&self) -> usize {
        self.state.lock().order.len()
    }

    async fn ready(&self) {
        while self.is_empty() {
            self.pushed.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(serial: u64, name: &str, priority: i64) -> Ticket {
        Ticket { job_id: JobId::new(name).unwrap(), serial, priority }
    }

    #[tokio::test]
    async fn jobs_leave_by_priority_then_age_and_once() {
        let queue = InProcessQueue::default();
        let all = [ticket(1, "a", 0), ticket(2, "b", 1), ticket(3, "a", 0), ticket(4, "d", 1)];
        for ticket in &all {
            queue.push(ticket.clone());
        }
        queue.ready().await;
        assert!(queue.remove(2));
        assert!(!queue.remove(2));
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [all[3].clone(), all[0].clone(), all[2].clone()]);
        assert!(!queue.remove(1));
        assert!(queue.is_empty());
    }
}
