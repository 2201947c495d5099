//! The clock of one job: it runs inside stages and stands still in queues (paper, 3.3.1).

use std::{future::Future, time::Duration};

use parking_lot::Mutex;
use prorl_core::Deadline;
use tokio::{sync::Notify, time::Instant};

/// The budget of counted time is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("counted time of {budget:?} is used up")]
pub struct BudgetExceeded {
    /// The budget.
    pub budget: Duration,
}

/// A clock with a budget that can stand still.
///
/// Queues cost nothing: only time between [`resume`](Self::resume) and the end of the returned guard is counted, on the
/// system's monotonic clock.
#[derive(Debug)]
pub struct PausableTimer {
    budget: Duration,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    used: Duration,
    running_since: Option<Instant>,
}

impl State {
    fn used(&self) -> Duration {
        self.used + self.running_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn pause(&mut self) {
        self.used = self.used();
        self.running_since = None;
    }
}

/// Keeps a [`PausableTimer`] running until it is dropped.
#[must_use = "the timer stands still again when this is dropped"]
#[derive(Debug)]
pub struct Running<'a>(&'a PausableTimer);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.pause();
    }
}

impl PausableTimer {
    /// Makes a timer that stands still and has used nothing.
    pub fn new(budget: Duration) -> Self {
        Self { budget, state: Mutex::default(), changed: Notify::new() }
    }

    /// Returns the counted time so far.
    pub fn used(&self) -> Duration {
        self.state.lock().used()
    }

    /// Returns the budget.
    pub fn budget(&self) -> Duration {
        self.budget
    }

    /// Returns the deadline of the whole budget: the root of the job's deadline tree.
    pub fn deadline(&self) -> Deadline {
        Deadline::after(Duration::ZERO, self.budget)
    }

    /// Starts counting. Counting ends with the guard, or with [`pause`](Self::pause).
    pub fn resume(&self) -> Running<'_> {
        self.restart();
        Running(self)
    }

    /// Starts counting again under a guard that is still held by somebody.
    pub(crate) fn restart(&self) {
        self.state.lock().running_since.get_or_insert_with(Instant::now);
        self.changed.notify_waiters();
    }

    /// Stops counting.
    pub fn pause(&self) {
        self.state.lock().pause();
        self.changed.notify_waiters();
    }

    /// Waits until `deadline` has passed on this clock; for ever while it stands still.
    ///
    /// # Cancel safety
    /// Dropping it changes nothing.
    pub async fn passed(&self, deadline: Deadline) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Registered before the state is read, so that no change in between is missed.
            changed.as_mut().enable();
            let left = {
                let state = self.state.lock();
                let used = state.used();
                if deadline.is_past(used) {
                    return;
                }
                state.running_since.map(|_| deadline.remaining(used))
            };
            match left {
                Some(left) => tokio::select! {
                    () = tokio::time::sleep(left) => {}
                    () = changed => {}
                },
                None => changed.await,
            }
        }
    }

    /// Runs `work` with the clock on, at most until the budget is used up.
    ///
    /// # Errors
    /// [`BudgetExceeded`] when the budget ended first; `work` is dropped then.
    ///
    /// # Cancel safety
    /// Dropping it stops the clock; what was used stays counted.
    pub async fn charge<F: Future>(&self, work: F) -> Result<F::Output, BudgetExceeded> {
        let _running = self.resume();
        tokio::select! {
            biased;
            () = self.passed(self.deadline()) => Err(BudgetExceeded { budget: self.budget }),
            output = work => Ok(output),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::sleep;

    #[tokio::test(start_paused = true)]
    async fn queue_wait_is_not_charged() {
        let timer = PausableTimer::new(Duration::from_secs(10));
        timer.charge(sleep(Duration::from_secs(4))).await.unwrap();
        sleep(Duration::from_hours(1)).await; // in a queue
        assert_eq!(timer.used(), Duration::from_secs(4));
        let late = timer.charge(sleep(Duration::from_secs(7))).await;
        assert_eq!(late, Err(BudgetExceeded { budget: Duration::from_secs(10) }));
        assert_eq!(timer.used(), Duration::from_secs(10));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_inside_a_stage_moves_its_end() {
        let timer = PausableTimer::new(Duration::from_secs(10));
        let started = Instant::now();
        let work = async {
            sleep(Duration::from_secs(6)).await;
            timer.pause();
            sleep(Duration::from_mins(10)).await;
            let _running = timer.resume();
            std::future::pending::<()>().await;
        };
        assert!(timer.charge(work).await.is_err());
        assert_eq!(started.elapsed(), Duration::from_secs(610));
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_work_stays_counted() {
        let timer = PausableTimer::new(Duration::from_secs(10));
        let dropped = tokio::time::timeout(Duration::from_secs(3), timer.charge(std::future::pending::<()>())).await;
        assert!(dropped.is_err());
        sleep(Duration::from_mins(1)).await;
        assert_eq!(timer.used(), Duration::from_secs(3));
    }
}
