//! What a handler's callbacks are given: one attempt of one job.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use prorl_core::{Deadline, Instance, JobId, JobRequest, SamplingParams, SandboxHandle, Stage};
use tokio_util::sync::CancellationToken;

use crate::{
    JobState, Permit, RunOutput, Shared, StagePool,
    job::Job,
    pipeline::{Pools, SandboxCounters},
    timer::{PausableTimer, Running},
};

/// What a running agent has so far, for a job that ends early.
pub trait Progress: Send + Sync + 'static {
    /// Returns everything up to the last whole turn.
    fn snapshot(&self) -> RunOutput;
}

/// One attempt of one job.
pub struct JobContext {
    job: Arc<Job>,
    attempt: u32,
    timer: Arc<PausableTimer>,
    pools: Arc<Pools>,
    counters: Arc<SandboxCounters>,
    retries: Arc<AtomicU32>,
    stop: CancellationToken,
    slot: Mutex<Slot>,
    shared: Mutex<Option<Arc<Shared>>>,
    adopted: Mutex<Vec<Arc<dyn SandboxHandle>>>,
    progress: Mutex<Option<Arc<dyn Progress>>>,
    warnings: Mutex<Vec<String>>,
}

/// The stage that the attempt is in and the worker that it holds.
#[derive(Default)]
struct Slot {
    stage: Option<Stage>,
    deadline: Option<Deadline>,
    permit: Option<Permit>,
}

impl JobContext {
    pub(crate) fn new(
        job: Arc<Job>,
        attempt: u32,
        timer: Arc<PausableTimer>,
        pools: Arc<Pools>,
        counters: Arc<SandboxCounters>,
        retries: Arc<AtomicU32>,
    ) -> Self {
        let stop = job.cancel.child_token();
        Self {
            job,
            attempt,
            timer,
            pools,
            counters,
            retries,
            stop,
            slot: Mutex::default(),
            shared: Mutex::default(),
            adopted: Mutex::default(),
            progress: Mutex::default(),
            warnings: Mutex::default(),
        }
    }

    /// Returns the job's id.
    pub fn id(&self) -> &JobId {
        &self.job.id
    }

    /// Returns the number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns the request.
    pub fn request(&self) -> &JobRequest {
        &self.job.request
    }

    /// Returns the task data.
    pub fn instance(&self) -> &Instance {
        &self.job.request.instance
    }

    /// Returns the sampling parameters.
    pub fn sampling(&self) -> &SamplingParams {
        &self.job.request.sampling_params
    }

    /// Returns the instance's `trajectory_id`, or the job's id. Seeds are derived from it, so a rerun repeats.
    pub fn trajectory_id(&self) -> String {
        self.instance().id("trajectory_id").ok().flatten().unwrap_or_else(|| self.id().to_string())
    }

    /// Returns a token that is cancelled when the attempt must end.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Returns the counted time so far.
    pub fn used(&self) -> Duration {
        self.timer.used()
    }

    /// Returns the counted time that the whole job may use.
    pub fn budget(&self) -> Duration {
        self.timer.budget()
    }

    /// Returns the deadline of the stage that the attempt is in, on the clock of [`used`](Self::used).
    pub fn deadline(&self) -> Deadline {
        self.slot.lock().deadline.unwrap_or_else(|| self.timer.deadline())
    }

    /// Returns how long a call may take: `limit`, or what the stage has left when that is less.
    pub fn remaining(&self, limit: Option<Duration>) -> Duration {
        let now = self.used();
        self.deadline().child(now, limit).remaining(now)
    }

    /// Takes one retry out of the job's budget; false when it is used up. Call retries and attempts share one budget.
    pub fn take_retry(&self) -> bool {
        self.retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }

    /// Waits for `work` without holding a worker or using counted time; `/status` shows `waiting_for` meanwhile.
    ///
    /// # Cancel safety
    /// As that of `work`.
    pub async fn park<T>(&self, waiting_for: &str, work: impl Future<Output = T>) -> T {
        let (stage, permit) = {
            let mut slot = self.slot.lock();
            (slot.stage.unwrap_or(Stage::Run), slot.permit.take())
        };
        self.timer.pause();
        self.job.enter(JobState::Waiting(stage), Some(waiting_for));
        let output = match permit {
            Some(permit) => {
                let arrived = async {
                    let output = work.await;
                    self.job.enter(JobState::Queued(stage), None);
                    output
                };
                let (output, permit) = self.pools.of(stage).lend(permit, arrived).await;
                self.slot.lock().permit = Some(permit);
                output
            }
            None => work.await,
        };
        self.job.enter(JobState::In(stage), None);
        self.timer.restart();
        output
    }

    /// Returns what the job's group shares, to start from: inside init, where the handler's
    /// [`init_shared_by`](crate::AgentHandler::init_shared_by) names something. Init keeps what it needs of it for longer.
    pub fn shared(&self) -> Option<Arc<Shared>> {
        self.shared.lock().clone()
    }

    /// Gives a sandbox to the pipeline, which closes it when the stage ends, however it ends.
    pub fn adopt(&self, sandbox: Arc<dyn SandboxHandle>) {
        self.counters.opened();
        self.adopted.lock().push(sandbox);
    }

    /// Says where the agent's progress can be read when the job ends early.
    pub fn set_progress(&self, progress: Arc<dyn Progress>) {
        *self.progress.lock() = Some(progress);
    }

    /// Adds a warning to the result, once.
    pub fn warn(&self, warning: impl Into<String>) {
        let warning = warning.into();
        let mut warnings = self.warnings.lock();
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }

    pub(crate) fn job(&self) -> &Arc<Job> {
        &self.job
    }

    pub(crate) fn timer(&self) -> &PausableTimer {
        &self.timer
    }

    pub(crate) fn pool(&self, stage: Stage) -> &StagePool {
        self.pools.of(stage)
    }

    pub(crate) fn enter_stage(&self, stage: Stage, permit: Permit, deadline: Deadline) -> Running<'_> {
        *self.slot.lock() = Slot { stage: Some(stage), deadline: Some(deadline), permit: Some(permit) };
        self.job.enter(JobState::In(stage), None);
        self.timer.resume()
    }

    pub(crate) fn leave_stage(&self) {
        let slot = std::mem::take(&mut *self.slot.lock());
        drop(slot); // outside the lock: a permit hands its place on
    }

    pub(crate) fn start_from(&self, shared: Arc<Shared>) {
        for warning in &shared.warnings {
            self.warn(warning);
        }
        *self.shared.lock() = Some(shared);
    }

    pub(crate) fn drop_shared(&self) {
        let shared = self.shared.lock().take();
        drop(shared); // outside the lock: what the handler's state does when it goes is not known here
    }

    pub(crate) fn take_adopted(&self) -> Vec<Arc<dyn SandboxHandle>> {
        std::mem::take(&mut *self.adopted.lock())
    }

    pub(crate) fn take_progress(&self) -> Option<Arc<dyn Progress>> {
        self.progress.lock().take()
    }

    pub(crate) fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut *self.warnings.lock())
    }
}
