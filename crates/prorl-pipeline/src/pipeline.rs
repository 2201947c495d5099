//! The service's core: takes jobs, hands out results, stops.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt;
use parking_lot::Mutex;
use prorl_core::{
    JobId, JobRequest, JobResult, Malformed, Stage, Status,
    status::{JobCounts, SandboxCounts, ServiceState, Stages, Stuck},
};
use sha2::{Digest, Sha256};
use tokio::{sync::Notify, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::Instrument;

use crate::{
    AgentHandler, InMemoryResults, InProcessQueue, JobHandle, JobQueue, JobState, Lookup, Permit, Registry,
    ResultStore, StagePool, Ticket, conclude, drive,
    job::{CancelReason, Job},
    pool::Place,
    shared::{Groups, Key},
};

/// What happens to a job when the last client that waited for it leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDisconnect {
    /// It is cancelled, unless it is detached.
    #[default]
    Cancel,
    /// It goes on.
    Keep,
}

/// Sizes and limits of a pipeline.
#[derive(Clone, Debug)]
pub struct PipelineConfig {
    /// Jobs inside init at once.
    pub init_workers: usize,
    /// Jobs inside run at once.
    pub run_workers: usize,
    /// Jobs inside eval at once.
    pub eval_workers: usize,
    /// Jobs that may wait for their first worker; one more is refused.
    pub queue_limit: usize,
    /// Counted time of a job that names none.
    pub default_timeout: Duration,
    /// How long a sandbox may take to end by itself.
    pub close_grace: Duration,
    /// How long an exception callback or `final_result` may take.
    pub callback_limit: Duration,
    /// How long an id that was cancelled before it came is refused.
    pub tombstone_life: Duration,
    /// What a client's leaving means.
    pub on_disconnect: OnDisconnect,
    /// Whether an instance may say `"skip_eval": true`.
    pub allow_skip_eval: bool,
    /// Memory for ended jobs' results, bytes.
    pub results_bytes: usize,
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            init_workers: 64,
            run_workers: 64,
            eval_workers: 64,
            queue_limit: 65_536,
            default_timeout: Duration::from_mins(5),
            close_grace: Duration::from_secs(2),
            callback_limit: Duration::from_secs(10),
            tombstone_life: Duration::from_mins(5),
            on_disconnect: OnDisconnect::Cancel,
            allow_skip_eval: false,
            results_bytes: 512 << 20,
        }
    }
}

/// Why a job was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Not started, or stopping.
    #[error("the service is not running")]
    NotRunning,
    /// No handler of that name.
    #[error("unknown data_source {name:?}, expected one of {}", known.join(", "))]
    UnknownDataSource {
        /// What was asked for.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The request is wrong whatever the handler.
    #[error(transparent)]
    Malformed(Malformed),
    /// The instance lacks something that its handler needs.
    #[error(transparent)]
    InvalidInstance(Malformed),
    /// The id is in use for another request.
    #[error("job {0} exists with another body")]
    JobExists(JobId),
    /// The id was cancelled before it came.
    #[error("job {0} was cancelled before it was submitted")]
    JobCancelled(JobId),
    /// Too many wait.
    #[error("{limit} jobs are waiting, which is the limit")]
    QueueFull {
        /// The limit.
        limit: usize,
    },
}

/// What is known of an id that was asked to be cancelled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CancelAnswer {
    /// The job was in this state when the request came; ended jobs stay as they are.
    Found(JobState),
    /// No such job. The id is refused for a while.
    Unknown,
}

/// What a stop ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StopReport {
    /// Jobs that were cancelled by it.
    pub cancelled: usize,
    /// Sandboxes that were closed by it, each proven gone.
    pub sandboxes_killed: usize,
}

/// The three pools, and how far init may run ahead of run.
pub(crate) struct Pools {
    init: StagePool,
    run: StagePool,
    eval: StagePool,
    /// Places for jobs from the start of init until run takes them. A prepared job holds a sandbox while it waits, so
    /// without a bound a long queue before run, or no backend at all, would fill the node with idle sandboxes.
    ahead: StagePool,
}

impl Pools {
    fn new(config: &PipelineConfig) -> Self {
        Self {
            init: StagePool::new(config.init_workers),
            run: StagePool::new(config.run_workers),
            eval: StagePool::new(config.eval_workers),
            ahead: StagePool::new(config.init_workers.max(config.run_workers)),
        }
    }

    fn resize(&self, stage: Stage, workers: usize) {
        self.of(stage).resize(workers);
        self.ahead.resize(self.init.status().workers.max(self.run.status().workers));
    }

    pub(crate) fn of(&self, stage: Stage) -> &StagePool {
        match stage {
            Stage::Init => &self.init,
            Stage::Run => &self.run,
            Stage::Eval => &self.eval,
        }
    }
}

/// What a job needs to begin init: room ahead of run, and a worker.
pub(crate) struct InitPlaces {
    pub(crate) ahead: Permit,
    pub(crate) worker: Permit,
}

impl InitPlaces {
    pub(crate) async fn acquire(pools: &Pools, priority: i64) -> Self {
        let ahead = pools.ahead.acquire(priority).await;
        Self { ahead, worker: pools.init.acquire(priority).await }
    }

    /// Gives both back; returns where in their queues they were.
    pub(crate) fn give_back(self) -> (Place, Place) {
        (self.ahead.give_back(), self.worker.give_back())
    }

    /// Waits for both again, before those who came later.
    pub(crate) async fn acquire_at(pools: &Pools, (ahead, worker): (Place, Place)) -> Self {
        let ahead = pools.ahead.wait_at(ahead).await;
        Self { ahead, worker: pools.init.wait_at(worker).await }
    }
}

#[derive(Debug, Default)]
pub(crate) struct SandboxCounters {
    active: AtomicUsize,
    started: AtomicU64,
    failed: AtomicU64,
}

impl SandboxCounters {
    pub(crate) fn opened(&self) {
        self.active.fetch_add(1, Ordering::Relaxed);
        self.started.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn closed(&self) {
        self.active.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }
}

/// What is remembered of an ended job beside its result.
struct Ended {
    digest: [u8; 32],
    attempt: u32,
    reason: Option<CancelReason>,
}

struct Jobs {
    state: ServiceState,
    /// Every job that has not ended, by serial.
    live: HashMap<u64, Arc<Job>>,
    /// Those of them that nobody drives yet. Whoever takes one out, under the lock, has it driven: the dispatcher when its
    /// turn comes, or who cancels it.
    queued: HashSet<u64>,
    /// The job that an id stands for now; an abandoned one may have a successor.
    active: HashMap<JobId, Arc<Job>>,
    ended: HashMap<JobId, Ended>,
    tombstones: Tombstones,
    next_serial: u64,
    counts: JobCounts,
}

/// Ids that were cancelled before they came, oldest first.
#[derive(Default)]
struct Tombstones {
    made: HashMap<JobId, Instant>,
    order: VecDeque<(Instant, JobId)>,
}

/// Tombstones at most; the oldest goes first.
const MAX_TOMBSTONES: usize = 100_000;

impl Tombstones {
    fn put(&mut self, id: JobId, life: Duration) {
        let now = Instant::now();
        while let Some((made, oldest)) = self.order.front()
            && (now.duration_since(*made) >= life || self.order.len() >= MAX_TOMBSTONES)
        {
            // One that was made again stays until its later entry is the oldest.
            if self.made.get(oldest) == Some(made) {
                self.made.remove(oldest);
            }
            self.order.pop_front();
        }
        self.order.push_back((now, id.clone()));
        self.made.insert(id, now);
    }

    fn has(&self, id: &JobId, life: Duration) -> bool {
        self.made.get(id).is_some_and(|made| made.elapsed() < life)
    }
}

pub(crate) struct Inner {
    pub(crate) config: PipelineConfig,
    registry: Registry,
    pub(crate) pools: Arc<Pools>,
    pub(crate) sandboxes: Arc<SandboxCounters>,
    groups: Arc<Groups>,
    queue: Box<dyn JobQueue>,
    results: Box<dyn ResultStore>,
    jobs: Mutex<Jobs>,
    all_ended: Notify,
    tasks: TaskTracker,
    root: CancellationToken,
}

/// Runs jobs through init, run and eval.
///
/// Clones share one pipeline. It spawns tasks on the current tokio runtime; [`stop`](Self::stop) returns when none of
/// them has a job left, [`close`](Self::close) when none is left at all.
#[derive(Clone)]
pub struct Pipeline {
    inner: Arc<Inner>,
}

impl Pipeline {
    /// Makes a stopped pipeline that keeps jobs and results in memory.
    pub fn new(config: PipelineConfig, registry: Registry) -> Self {
        let results = InMemoryResults::new(config.results_bytes);
        Self::with_stores(config, registry, Box::new(InProcessQueue::default()), Box::new(results))
    }

    /// Makes a stopped pipeline with another source of jobs and place of results.
    pub fn with_stores(
        config: PipelineConfig,
        registry: Registry,
        queue: Box<dyn JobQueue>,
        results: Box<dyn ResultStore>,
    ) -> Self {
        let pools = Pools::new(&config);
        let jobs = Jobs {
            state: ServiceState::Stopped,
            live: HashMap::new(),
            queued: HashSet::new(),
            active: HashMap::new(),
            ended: HashMap::new(),
            tombstones: Tombstones::default(),
            next_serial: 0,
            counts: JobCounts::default(),
        };
        let inner = Inner {
            config,
            registry,
            pools: Arc::new(pools),
            sandboxes: Arc::default(),
            groups: Arc::default(),
            queue,
            results,
            jobs: Mutex::new(jobs),
            all_ended: Notify::new(),
            tasks: TaskTracker::new(),
            root: CancellationToken::new(),
        };
        let inner = Arc::new(inner);
        inner.tasks.spawn(dispatch(Arc::clone(&inner)));
        Self { inner }
    }

    /// Starts taking jobs; false when it runs already or is still stopping.
    pub fn start(&self) -> bool {
        let mut jobs = self.inner.jobs.lock();
        let stopped = jobs.state == ServiceState::Stopped;
        if stopped {
            jobs.state = ServiceState::Running;
        }
        stopped
    }

    /// Cancels every job, waits until each has ended and each sandbox is proven gone; `None` when it was not running.
    ///
    /// # Cancel safety
    /// Once begun the stop goes on when the future is dropped, but the state stays `draining` until somebody calls
    /// [`stop`](Self::stop) again.
    pub async fn stop(&self) -> Option<StopReport> {
        let sandboxes_killed = self.inner.sandboxes.active.load(Ordering::Relaxed);
        let cancelled = {
            let mut jobs = self.inner.jobs.lock();
            if jobs.state == ServiceState::Stopped {
                return None;
            }
            jobs.state = ServiceState::Draining;
            let live: Vec<_> = jobs.live.values().cloned().collect();
            for job in &live {
                self.inner.cancel(&mut jobs, job, CancelReason::Stopping);
            }
            live.len()
        };
        loop {
            let ended = self.inner.all_ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            {
                let mut jobs = self.inner.jobs.lock();
                if jobs.live.is_empty() {
                    jobs.state = ServiceState::Stopped;
                    return Some(StopReport { cancelled, sandboxes_killed });
                }
            }
            ended.await;
        }
    }

    /// Stops, then ends the pipeline's own tasks. Nothing is left afterwards.
    pub async fn close(&self) -> Option<StopReport> {
        let report = self.stop().await;
        self.inner.root.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
        report
    }

    /// Looks at a request as [`submit`](Self::submit) does first, without accepting it.
    ///
    /// # Errors
    /// [`SubmitError::Malformed`], [`SubmitError::UnknownDataSource`] or [`SubmitError::InvalidInstance`].
    pub fn check(&self, request: &JobRequest) -> Result<(), SubmitError> {
        self.inner.check(request).map(drop)
    }

    /// Accepts a job, or attaches to the one that has this id and body. The handle counts as a waiter.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was accepted then.
    pub fn submit(&self, request: JobRequest) -> Result<JobHandle, SubmitError> {
        Inner::submit(&self.inner, request)
    }

    /// Accepts a job that goes on whether somebody waits or not.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_detached(&self, request: JobRequest) -> Result<(JobId, JobState), SubmitError> {
        let handle = Inner::submit(&self.inner, request)?;
        handle.job.detach();
        Ok((handle.job.id.clone(), handle.job.state()))
    }

    /// Returns a handle on an active job, which counts as a waiter.
    pub fn attach(&self, job_id: &JobId) -> Option<JobHandle> {
        let job = Arc::clone(self.inner.jobs.lock().active.get(job_id)?);
        job.attach();
        Some(JobHandle { job, inner: Arc::clone(&self.inner) })
    }

    /// Returns an ended job's result.
    pub fn result(&self, job_id: &JobId) -> Lookup {
        self.inner.results.get(job_id)
    }

    /// Asks for the end of a job. Returns at once; the job ends soon after.
    pub fn cancel(&self, job_id: &JobId) -> CancelAnswer {
        let mut jobs = self.inner.jobs.lock();
        if let Some(job) = jobs.active.get(job_id).cloned() {
            let state = job.state();
            self.inner.cancel(&mut jobs, &job, CancelReason::Requested);
            CancelAnswer::Found(state)
        } else if jobs.ended.contains_key(job_id) {
            CancelAnswer::Found(JobState::Ended)
        } else {
            jobs.tombstones.put(job_id.clone(), self.inner.config.tombstone_life);
            CancelAnswer::Unknown
        }
    }

    /// Returns whether jobs are taken.
    pub fn state(&self) -> ServiceState {
        self.inner.jobs.lock().state
    }

    /// Returns how many jobs wait and work in each stage.
    pub fn stages(&self) -> Stages {
        let pools = &self.inner.pools;
        let mut stages = Stages { init: pools.init.status(), run: pools.run.status(), eval: pools.eval.status() };
        // Counted by the jobs' own states: who waits inside a pool may be the dispatcher, and not every job that waits is
        // in a pool.
        (stages.init.queued, stages.run.queued, stages.eval.queued) = (0, 0, 0);
        for job in self.inner.jobs.lock().live.values() {
            match job.state() {
                JobState::Queued(Stage::Init) => stages.init.queued += 1,
                JobState::Queued(Stage::Run) => stages.run.queued += 1,
                JobState::Queued(Stage::Eval) => stages.eval.queued += 1,
                JobState::In(_) | JobState::Waiting(_) | JobState::Ended => {}
            }
        }
        stages
    }

    /// Changes the workers of one stage while it runs.
    pub fn resize(&self, stage: Stage, workers: usize) {
        self.inner.pools.resize(stage, workers);
    }

    /// Returns job counts since the pipeline was made.
    pub fn counts(&self) -> JobCounts {
        let jobs = self.inner.jobs.lock();
        JobCounts { active: jobs.live.len() as u64, ..jobs.counts }
    }

    /// Returns sandbox counts since the pipeline was made.
    pub fn sandboxes(&self) -> SandboxCounts {
        let counters = &self.inner.sandboxes;
        SandboxCounts {
            active: counters.active.load(Ordering::Relaxed),
            started: counters.started.load(Ordering::Relaxed),
            failed: counters.failed.load(Ordering::Relaxed),
        }
    }

    /// Returns the jobs that wait for something outside the pools, and those that have been in one place for longer than
    /// `patience`; the longest wait first, `limit` at most.
    pub fn stuck(&self, patience: Duration, limit: usize) -> Vec<Stuck> {
        let mut stuck: Vec<Stuck> = Vec::new();
        for job in self.inner.jobs.lock().live.values() {
            job.with_phase(|phase| {
                let waited = phase.since.elapsed();
                let waits = matches!(phase.state, JobState::Waiting(_));
                let Some(stage) = phase.state.stage().filter(|_| waits || waited >= patience) else { return };
                let waiting_for = match phase.state {
                    JobState::Queued(stage) => format!("{stage} worker"),
                    _ => phase.waiting_for.clone().unwrap_or_else(|| format!("{stage} stage to end")),
                };
                let seconds = waited.as_secs_f64();
                let job_id = job.id.to_string();
                stuck.push(Stuck { job_id, stage: stage.to_string(), waiting_for, seconds });
            });
        }
        stuck.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        stuck.truncate(limit);
        stuck
    }

    /// Returns the registered handler names.
    pub fn handler_names(&self) -> Vec<String> {
        self.inner.registry.names().map(str::to_owned).collect()
    }
}

fn digest_of(request: &JobRequest) -> [u8; 32] {
    let mut body = serde_json::to_value(request).expect("a request that was read from JSON has a JSON form");
    body.sort_all_objects(); // the order of keys means nothing
    Sha256::digest(body.to_string()).into()
}

impl Inner {
    /// Checks everything that does not depend on other jobs; returns the handler and the name it was asked for by.
    fn check(&self, request: &JobRequest) -> Result<(Arc<dyn AgentHandler>, String), SubmitError> {
        request.check().map_err(SubmitError::Malformed)?;
        let instance_field = |problem: Malformed| {
            let field = format!("instance.{}", problem.field);
            SubmitError::InvalidInstance(Malformed { field, ..problem })
        };
        let data_source = request.instance.data_source().map_err(instance_field)?.to_owned();
        let Some(handler) = self.registry.get(&data_source).cloned() else {
            let known = self.registry.names().map(str::to_owned).collect();
            return Err(SubmitError::UnknownDataSource { name: data_source, known });
        };
        for field in ["instance_id", "trajectory_id"] {
            request.instance.id(field).map_err(instance_field)?;
        }
        request.instance.common().map_err(instance_field)?;
        handler.check(request).map_err(|problem| {
            let of_instance = problem.field.starts_with("instance");
            if of_instance { SubmitError::InvalidInstance(problem) } else { SubmitError::Malformed(problem) }
        })?;
        Ok((handler, data_source))
    }

    fn submit(self: &Arc<Self>, mut request: JobRequest) -> Result<JobHandle, SubmitError> {
        let (handler, data_source) = self.check(&request)?;

        let id = request.job_id.clone().unwrap_or_else(new_job_id);
        request.job_id = Some(id.clone());
        let digest = digest_of(&request);
        let timeout = request.timeout.map_or(self.config.default_timeout, Duration::from_secs_f64);
        let detached = request.detach || self.config.on_disconnect == OnDisconnect::Keep;
        let priority = request.priority;
        let shares = request.group_id.clone().zip(handler.init_shared_by(&request));
        let shares = shares.map(|(group_id, text)| Key { handler: handler.name().to_owned(), group_id, text });

        let mut jobs = self.jobs.lock();
        let mut first_attempt = 1;
        if let Some(job) = jobs.active.get(&id) {
            if job.digest != digest {
                return Err(SubmitError::JobExists(id));
            }
            if job.cancel_reason().is_none_or(|reason| reason == CancelReason::Requested) {
                job.attach();
                return Ok(JobHandle { job: Arc::clone(job), inner: Arc::clone(self) });
            }
            // Abandoned and on its way out: the new submit is a new attempt under the same id.
            first_attempt = job.attempt() + 1;
        }
        if let Some(ended) = jobs.ended.get(&id) {
            if ended.digest != digest {
                return Err(SubmitError::JobExists(id));
            }
            match (ended.reason, self.results.get(&id)) {
                (None | Some(CancelReason::Requested), Lookup::Found(result)) => {
                    let request = Arc::new(request);
                    let job = Job::new(id, 0, request, digest, handler, data_source, timeout, ended.attempt);
                    job.finish(result);
                    job.attach();
                    return Ok(JobHandle { job: Arc::new(job), inner: Arc::clone(self) });
                }
                _ => first_attempt = ended.attempt + 1,
            }
        }
        if jobs.state != ServiceState::Running {
            return Err(SubmitError::NotRunning);
        }
        if jobs.tombstones.has(&id, self.config.tombstone_life) {
            return Err(SubmitError::JobCancelled(id));
        }
        // Those that wait for another of their group have left the queue for a moment only.
        if self.queue.len() + self.groups.n_waiting() >= self.config.queue_limit {
            return Err(SubmitError::QueueFull { limit: self.config.queue_limit });
        }
        jobs.ended.remove(&id);
        self.results.forget(&id);
        jobs.next_serial += 1;
        let serial = jobs.next_serial;
        let request = Arc::new(request);
        let job = Arc::new(Job::new(id.clone(), serial, request, digest, handler, data_source, timeout, first_attempt));
        if let Some(key) = shares {
            job.enter_group(self.groups.of(key));
        }
        job.attach();
        if detached {
            job.detach();
        }
        jobs.active.insert(id.clone(), Arc::clone(&job));
        jobs.live.insert(serial, Arc::clone(&job));
        jobs.queued.insert(serial);
        jobs.counts.accepted += 1;
        self.queue.push(Ticket { job_id: id, serial, priority });
        Ok(JobHandle { job, inner: Arc::clone(self) })
    }

    /// The last waiter of a job left.
    pub(crate) fn abandoned(self: &Arc<Self>, job: &Arc<Job>) {
        let mut jobs = self.jobs.lock();
        // Under the lock nobody attaches in between: who comes later sees the reason and begins a new attempt.
        if !job.is_wanted() && jobs.live.contains_key(&job.serial) {
            self.cancel(&mut jobs, job, CancelReason::Disconnected);
        }
    }

    fn cancel(self: &Arc<Self>, jobs: &mut Jobs, job: &Arc<Job>, reason: CancelReason) {
        job.cancel(reason);
        if jobs.queued.remove(&job.serial) {
            self.queue.remove(job.serial);
            self.spawn_job(Arc::clone(job), None);
        }
    }

    fn spawn_job(self: &Arc<Self>, job: Arc<Job>, places: Option<InitPlaces>) {
        let span = tracing::info_span!("job", job = %job.id, handler = %job.data_source);
        let inner = Arc::clone(self);
        let driven = async move {
            let drive = AssertUnwindSafe(drive::drive(&inner, &job, places)).catch_unwind();
            if let Err(panic) = drive.await {
                inner.ended(&job, conclude::broken_by_us(&job, panic.as_ref()));
            }
        };
        self.tasks.spawn(driven.instrument(span));
    }

    /// Records the one ending of a job and hands its result to those who wait.
    pub(crate) fn ended(&self, job: &Arc<Job>, result: JobResult) {
        let result = Arc::new(result);
        job.leave_group();
        let mut jobs = self.jobs.lock();
        if jobs.live.remove(&job.serial).is_none() {
            return; // it has its one ending
        }
        match result.outcome.status {
            Status::Completed => jobs.counts.completed += 1,
            Status::Failed => jobs.counts.failed += 1,
            Status::Timeout => jobs.counts.timeout += 1,
            Status::Cancelled => jobs.counts.cancelled += 1,
        }
        // A job that was abandoned may have a successor under its id, whose result is the one to keep.
        if jobs.active.get(&job.id).is_some_and(|active| Arc::ptr_eq(active, job)) {
            jobs.active.remove(&job.id);
            let reason = job.cancel_reason().filter(|_| result.outcome.status == Status::Cancelled);
            jobs.ended.insert(job.id.clone(), Ended { digest: job.digest, attempt: result.attempt, reason });
            for dropped in self.results.put(Arc::clone(&result)) {
                jobs.ended.remove(&dropped);
            }
        }
        job.finish(result);
        drop(jobs);
        self.all_ended.notify_waiters();
    }
}

/// Gives each free init worker the next job.
async fn dispatch(inner: Arc<Inner>) {
    loop {
        let next = async {
            inner.queue.ready().await;
            // After those that try again: they were accepted first.
            InitPlaces::acquire(&inner.pools, i64::MIN).await
        };
        let places = tokio::select! {
            biased;
            () = inner.root.cancelled() => return,
            places = next => places,
        };
        if let Some(ticket) = inner.queue.pop() {
            let mut jobs = inner.jobs.lock();
            if jobs.queued.remove(&ticket.serial)
                && let Some(job) = jobs.live.get(&ticket.serial).cloned()
            {
                inner.spawn_job(job, Some(places));
            }
        }
    }
}

fn new_job_id() -> JobId {
    JobId::new(format!("job-{:016x}", rand::random::<u64>())).expect("a letter, then letters, digits and a dash")
}
