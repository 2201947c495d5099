//! The workers of one stage: a resizable number of places and a queue before them.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use prorl_core::status::StageStatus;
use tokio::sync::oneshot;

/// Higher priority first; equal priority in order of asking.
pub(crate) type Place = (Reverse<i64>, u64);

/// The places of one stage. Clones share them.
#[derive(Clone, Debug)]
pub struct StagePool {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    workers: usize,
    active: usize,
    next: u64,
    waiting: BTreeMap<Place, oneshot::Sender<Permit>>,
}

/// One place in a stage, given back when dropped.
#[derive(Debug)]
pub struct Permit {
    state: Option<Arc<Mutex<State>>>,
    place: Place,
}

impl Permit {
    /// Gives it back; returns the place in the queue that it was given at.
    pub(crate) fn give_back(self) -> Place {
        self.place
    }

    fn disarm(mut self) {
        self.state = None;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(state) = self.state.take() {
            state.lock().active -= 1;
            hand_out(&state);
        }
    }
}

/// Gives free places to those who wait, in order.
fn hand_out(shared: &Arc<Mutex<State>>) {
    let mut state = shared.lock();
    while state.active < state.workers
        && let Some((place, waiter)) = state.waiting.pop_first()
    {
        state.active += 1;
        if let Err(unwanted) = waiter.send(Permit { state: Some(Arc::clone(shared)), place }) {
            // The waiter left; its permit must not take the lock that is held here.
            unwanted.disarm();
            state.active -= 1;
        }
    }
}

/// Takes a waiter out of the queue when its future is dropped.
struct Waiting<'a> {
    state: &'a Mutex<State>,
    place: Place,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.state.lock().waiting.remove(&self.place);
    }
}

impl StagePool {
    /// Makes a pool of `workers` places.
    pub fn new(workers: usize) -> Self {
        let state = State { workers, active: 0, next: 0, waiting: BTreeMap::new() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Waits for a place: higher priority first, equal priority in order of asking.
    ///
    /// # Cancel safety
    /// Dropping it leaves the queue; a place that was already given goes to the next.
    pub async fn acquire(&self, priority: i64) -> Permit {
        let place = {
            let mut state = self.state.lock();
            state.next += 1;
            (Reverse(priority), state.next)
        };
        self.wait_at(place).await
    }

    /// Gives a place back for the time of `work` and waits for one again, before those who asked later.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    pub async fn lend<T>(&self, permit: Permit, work: impl Future<Output = T>) -> (T, Permit) {
        let place = permit.give_back();
        let output = work.await;
        (output, self.wait_at(place).await)
    }

    /// Waits for a place where it once was in the queue.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    pub(crate) async fn wait_at(&self, place: Place) -> Permit {
        let (sender, receiver) = oneshot::channel();
        let _waiting = Waiting { state: &self.state, place };
        self.state.lock().waiting.insert(place, sender);
        hand_out(&self.state);
        receiver.await.expect("a queued sender is dropped only together with this future")
    }

    /// Changes the number of places. Running work is not ended; fewer places take effect as it ends.
    pub fn resize(&self, workers: usize) {
        self.state.lock().workers = workers;
        hand_out(&self.state);
    }

    /// Returns how many wait and work.
    pub fn status(&self) -> StageStatus {
        let state = self.state.lock();
        StageStatus { queued: state.waiting.len(), active: state.active, workers: state.workers }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{FutureExt, future::poll_immediate};
    use proptest::prelude::*;

    #[tokio::test]
    async fn equal_priority_is_first_come_and_higher_goes_first() {
        let pool = StagePool::new(1);
        let held = pool.acquire(0).await;
        let mut first = Box::pin(pool.acquire(0));
        let mut second = Box::pin(pool.acquire(0));
        let mut urgent = Box::pin(pool.acquire(5));
        for waiter in [&mut first, &mut second, &mut urgent] {
            assert!(waiter.as_mut().now_or_never().is_none());
        }
        assert_eq!(pool.status(), StageStatus { queued: 3, active: 1, workers: 1 });
        drop(held);
        let permit = urgent.as_mut().now_or_never().unwrap();
        assert!(first.as_mut().now_or_never().is_none());
        drop(permit);
        assert!(second.as_mut().now_or_never().is_none());
        let permit = first.as_mut().now_or_never().unwrap();
        drop(permit);
        drop(second.as_mut().now_or_never().unwrap());
        drop((first, second, urgent));
        assert_eq!(pool.status(), StageStatus { queued: 0, active: 0, workers: 1 });
    }

    #[tokio::test]
    async fn a_lent_place_serves_others_and_comes_back_before_them() {
        let pool = StagePool::new(1);
        let permit = pool.acquire(0).await;
        let (go, gone) = oneshot::channel::<()>();
        let mut lent = Box::pin(pool.lend(permit, gone));
        assert!(lent.as_mut().now_or_never().is_none());
        let other = pool.acquire(0).await;
        let mut later = Box::pin(pool.acquire(0));
        assert!(later.as_mut().now_or_never().is_none());
        go.send(()).unwrap();
        assert!(lent.as_mut().now_or_never().is_none());
        drop(other);
        assert!(later.as_mut().now_or_never().is_none());
        assert!(lent.as_mut().now_or_never().is_some());
    }

    proptest! {
        #[test]
        fn places_are_never_lost_nor_exceeded(steps in proptest::collection::vec((0_u8..5, 0_usize..8), 1..80)) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let pool = StagePool::new(2);
                let (mut held, mut waiting) = (Vec::new(), Vec::new());
                let mut most = 2;
                for (step, idx) in steps {
                    match step {
                        0 | 1 => {
                            let pool = pool.clone();
                            waiting.push(Box::pin(async move { pool.acquire(i64::from(step)).await }));
                        }
                        2 if !waiting.is_empty() => drop(waiting.remove(idx % waiting.len())),
                        3 if !held.is_empty() => drop(held.remove(idx % held.len())),
                        4 => {
                            pool.resize(idx % 4);
                            most = most.max(idx % 4);
                        }
                        _ => {}
                    }
                    let mut still = Vec::new();
                    for mut waiter in waiting.drain(..) {
                        match poll_immediate(waiter.as_mut()).await {
                            Some(permit) => held.push(permit),
                            None => still.push(waiter),
                        }
                    }
                    waiting = still;
                    let status = pool.status();
                    prop_assert_eq!(status.active, held.len());
                    prop_assert_eq!(status.queued, waiting.len());
                    prop_assert!(status.active <= most);
                    prop_assert!(status.queued == 0 || status.active >= status.workers);
                }
                drop((held, waiting));
                prop_assert_eq!(pool.status().active, 0);
                Ok(())
            })?;
        }
    }
}
