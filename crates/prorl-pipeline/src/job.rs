//! One accepted job: its state, who waits for it, and its one ending.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use parking_lot::Mutex;
use prorl_core::{JobId, JobRequest, JobResult, Stage};
use tokio::{
    sync::watch,
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

use crate::{AgentHandler, pipeline::Inner, shared::Group};

/// Where a job is. It moves forward only, except that an attempt may begin again; `Ended` is final.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum JobState {
    /// Waits for a worker of the stage.
    Queued(Stage),
    /// Inside the stage.
    In(Stage),
    /// Waits for something that holds no worker and costs no counted time, before or inside the stage.
    Waiting(Stage),
    /// Has its result.
    Ended,
}

impl JobState {
    /// Returns the word used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued(Stage::Init) => "init_queued",
            Self::Queued(Stage::Run) => "run_queued",
            Self::Queued(Stage::Eval) => "eval_queued",
            Self::In(Stage::Init) => "init",
            Self::In(Stage::Run) => "run",
            Self::In(Stage::Eval) => "eval",
            Self::Waiting(_) => "waiting",
            Self::Ended => "ended",
        }
    }

    /// Returns the stage that the job is in or before.
    pub fn stage(self) -> Option<Stage> {
        match self {
            Self::Queued(stage) | Self::In(stage) | Self::Waiting(stage) => Some(stage),
            Self::Ended => None,
        }
    }
}

/// Who asked for a job's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// A cancel request. The id answers the cancelled result from then on.
    Requested,
    /// The last client that waited left. A new submit starts a new attempt.
    Disconnected,
    /// The service stops. A new submit starts a new attempt.
    Stopping,
}

#[derive(Debug)]
pub(crate) struct Phase {
    pub(crate) state: JobState,
    pub(crate) since: Instant,
    pub(crate) waiting_for: Option<String>,
}

#[derive(Debug, Default)]
struct Interest {
    waiters: usize,
    detached: bool,
}

/// An accepted job.
pub(crate) struct Job {
    pub(crate) id: JobId,
    /// Tells submits of one id apart.
    pub(crate) serial: u64,
    pub(crate) request: Arc<JobRequest>,
    pub(crate) digest: [u8; 32],
    pub(crate) handler: Arc<dyn AgentHandler>,
    pub(crate) data_source: String,
    pub(crate) timeout: Duration,
    /// The number of the attempt that it is in, over all submits of the id.
    attempt: AtomicU32,
    /// What it shares with others before init, until no attempt of it can begin any more.
    group: Mutex<Option<Arc<Group>>>,
    pub(crate) cancel: CancellationToken,
    reason: Mutex<Option<CancelReason>>,
    phase: Mutex<Phase>,
    interest: Mutex<Interest>,
    result: watch::Sender<Option<Arc<JobResult>>>,
}

impl Job {
    #[expect(clippy::too_many_arguments, reason = "called in two places, which name every part")]
    pub(crate) fn new(
        id: JobId,
        serial: u64,
        request: Arc<JobRequest>,
        digest: [u8; 32],
        handler: Arc<dyn AgentHandler>,
        data_source: String,
        timeout: Duration,
        attempt: u32,
    ) -> Self {
        let phase = Phase { state: JobState::Queued(Stage::Init), since: Instant::now(), waiting_for: None };
        Self {
            id,
            serial,
            request,
            digest,
            handler,
            data_source,
            timeout,
            attempt: AtomicU32::new(attempt),
            group: Mutex::default(),
            cancel: CancellationToken::new(),
            reason: Mutex::new(None),
            phase: Mutex::new(phase),
            interest: Mutex::default(),
            result: watch::Sender::new(None),
        }
    }

    pub(crate) fn enter_group(&self, group: Arc<Group>) {
        *self.group.lock() = Some(group);
    }

    pub(crate) fn group(&self) -> Option<Arc<Group>> {
        self.group.lock().clone()
    }

    pub(crate) fn leave_group(&self) {
        let group = self.group.lock().take();
        drop(group); // outside the lock: with the last hold goes what was made
    }

    /// The one place that changes a job's state.
    pub(crate) fn enter(&self, state: JobState, waiting_for: Option<&str>) {
        let mut phase = self.phase.lock();
        if phase.state != JobState::Ended {
            tracing::debug!(job = %self.id, from = phase.state.as_str(), to = state.as_str(), "job moves");
            *phase = Phase { state, since: Instant::now(), waiting_for: waiting_for.map(str::to_owned) };
        }
    }

    pub(crate) fn attempt(&self) -> u32 {
        self.attempt.load(Ordering::Relaxed)
    }

    /// Counts one more attempt; returns its number.
    pub(crate) fn next_attempt(&self) -> u32 {
        self.attempt.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn state(&self) -> JobState {
        self.phase.lock().state
    }

    pub(crate) fn with_phase<T>(&self, look: impl FnOnce(&Phase) -> T) -> T {
        look(&self.phase.lock())
    }

    /// Hands out the result. Whoever calls it has taken the job out of the live ones, so it happens once.
    pub(crate) fn finish(&self, result: Arc<JobResult>) {
        self.enter(JobState::Ended, None);
        self.result.send_replace(Some(result));
    }

    /// Asks for the end. The first reason stays, except that a request outranks the others.
    pub(crate) fn cancel(&self, reason: CancelReason) {
        let mut first = self.reason.lock();
        if first.is_none() || reason == CancelReason::Requested {
            *first = Some(reason);
        }
        self.cancel.cancel();
    }

    pub(crate) fn cancel_reason(&self) -> Option<CancelReason> {
        *self.reason.lock()
    }

    pub(crate) fn attach(&self) {
        self.interest.lock().waiters += 1;
    }

    pub(crate) fn detach(&self) {
        self.interest.lock().detached = true;
    }

    /// Tells whether nobody wants the job any more.
    fn leave(&self) -> bool {
        let mut interest = self.interest.lock();
        interest.waiters -= 1;
        interest.waiters == 0 && !interest.detached
    }

    pub(crate) fn is_wanted(&self) -> bool {
        let interest = self.interest.lock();
        interest.waiters > 0 || interest.detached
    }

    fn subscribe(&self) -> watch::Receiver<Option<Arc<JobResult>>> {
        self.result.subscribe()
    }
}

/// A waiter's hold on a job. Dropping the last one before the end cancels a job that is not detached.
pub struct JobHandle {
    pub(crate) job: Arc<Job>,
    pub(crate) inner: Arc<Inner>,
}

impl JobHandle {
    /// Returns the job's id.
    pub fn id(&self) -> &JobId {
        &self.job.id
    }

    /// Returns where the job is.
    pub fn state(&self) -> JobState {
        self.job.state()
    }

    /// Waits for the result.
    ///
    /// # Panics
    /// Never: the result's sender lives in the job that this handle holds.
    ///
    /// # Cancel safety
    /// Dropping it changes nothing; dropping the handle may cancel the job.
    pub async fn result(&self) -> Arc<JobResult> {
        let mut ended = self.job.subscribe();
        let result = ended.wait_for(Option::is_some).await.expect("the job holds the sender");
        Arc::clone(result.as_ref().expect("waited until it is there"))
    }
}

impl Drop for JobHandle {
    fn drop(&mut self) {
        if self.job.leave() {
            self.inner.abandoned(&self.job);
        }
    }
}
