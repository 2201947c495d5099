//! Where accepted jobs wait for their first worker.

use std::{cmp::Reverse, collections::BTreeMap, collections::HashMap};

use async_trait::async_trait;
use parking_lot::Mutex;
use prorl_core::JobId;
use tokio::sync::Notify;

/// A job that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The job.
    pub job_id: JobId,
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

    /// Takes one job out; tells whether it was there. Exactly one of this and [`pop`](Self::pop) gets a job.
    fn remove(&self, job_id: &JobId) -> bool;

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
    order: BTreeMap<(Reverse<i64>, u64), JobId>,
    places: HashMap<JobId, (Reverse<i64>, u64)>,
}

#[async_trait]
impl JobQueue for InProcessQueue {
    fn push(&self, ticket: Ticket) {
        let mut state = self.state.lock();
        state.next += 1;
        let place = (Reverse(ticket.priority), state.next);
        state.places.insert(ticket.job_id.clone(), place);
        state.order.insert(place, ticket.job_id);
        drop(state);
        self.pushed.notify_one();
    }

    fn pop(&self) -> Option<Ticket> {
        let mut state = self.state.lock();
        let ((Reverse(priority), _), job_id) = state.order.pop_first()?;
        state.places.remove(&job_id);
        Some(Ticket { job_id, priority })
    }

    fn remove(&self, job_id: &JobId) -> bool {
        let mut state = self.state.lock();
        let place = state.places.remove(job_id);
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

    fn ticket(name: &str, priority: i64) -> Ticket {
        Ticket { job_id: JobId::new(name).unwrap(), priority }
    }

    #[tokio::test]
    async fn jobs_leave_by_priority_then_age_and_once() {
        let queue = InProcessQueue::default();
        for (name, priority) in [("a", 0), ("b", 1), ("c", 0), ("d", 1)] {
            queue.push(ticket(name, priority));
        }
        queue.ready().await;
        assert!(queue.remove(&JobId::new("b").unwrap()));
        assert!(!queue.remove(&JobId::new("b").unwrap()));
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [ticket("d", 1), ticket("a", 0), ticket("c", 0)]);
        assert!(!queue.remove(&JobId::new("a").unwrap()));
    }
}
