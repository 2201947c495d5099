//! What the jobs of a group make once.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use proptest::prelude::*;
use prorl_core::{FailureClass, GroupId, Instance, JobRequest, JobResult, Stage, Status, StopReason};
use prorl_pipeline::{
    AgentHandler, CancelAnswer, Evaluation, JobContext, JobHandle, JobState, Pipeline, PipelineConfig, Prepared,
    Registry, RunOutput, Shared, StageError, SubmitError,
};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc, oneshot};

/// What a shared init is told to do.
enum Do {
    Make,
    Fail(FailureClass),
    Panic,
    Hang,
    /// Says that it has begun to, and keeps its thread without reaching an await until the channel says something.
    Block(oneshot::Sender<()>, std::sync::mpsc::Receiver<()>),
}

/// A shared init that has begun, and how it is to go on.
struct Begun {
    job: String,
    go: oneshot::Sender<Do>,
}

/// A state that counts how many of its kind there are.
struct Counted {
    number: u64,
    alive: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Sharer {
    name: &'static str,
    begun: mpsc::UnboundedSender<Begun>,
    alive: Arc<AtomicUsize>,
    n_made: AtomicU64,
    n_begun: AtomicUsize,
    /// What each job started from, by its id.
    started_from: Mutex<HashMap<String, Vec<Option<u64>>>>,
    in_run: Semaphore,
    run_gate: Semaphore,
    in_eval: Semaphore,
    eval_gate: Semaphore,
    n_failed_runs: AtomicUsize,
}

#[async_trait]
impl AgentHandler for Sharer {
    fn name(&self) -> &str {
        self.name
    }

    fn aliases(&self) -> Vec<&str> {
        if self.name == "sharer" { vec!["alias"] } else { vec![] }
    }

    fn init_shared_by(&self, request: &JobRequest) -> Option<String> {
        request.instance.get("shares").and_then(Value::as_str).map(str::to_owned)
    }

    async fn init_shared(&self, job: &JobContext) -> Result<Shared, StageError> {
        assert!(job.shared().is_none(), "there is nothing to start from yet");
        self.n_begun.fetch_add(1, Ordering::Relaxed);
        let (go, told) = oneshot::channel();
        self.begun.send(Begun { job: job.id().to_string(), go }).unwrap();
        match told.await.unwrap_or(Do::Hang) {
            Do::Make => {}
            Do::Fail(class) => return Err(StageError::text(class, "on purpose")),
            Do::Panic => panic!("on purpose"),
            Do::Hang => std::future::pending().await,
            Do::Block(blocks, until) => {
                blocks.send(()).unwrap();
                until.recv().unwrap();
            }
        }
        self.alive.fetch_add(1, Ordering::Relaxed);
        let number = self.n_made.fetch_add(1, Ordering::Relaxed) + 1;
        let mut shared = Shared::new(Counted { number, alive: Arc::clone(&self.alive) });
        shared.warnings.push("made for all".to_owned());
        shared.metadata.insert("number".to_owned(), json!(number));
        Ok(shared)
    }

    async fn init(&self, job: &JobContext) -> Result<Prepared, StageError> {
        let shared = job.shared();
        let number = shared.as_ref().map(|shared| shared.state::<Counted>().unwrap().number);
        assert_eq!(shared.and_then(|shared| shared.metadata["number"].as_u64()), number);
        self.started_from.lock().entry(job.id().to_string()).or_default().push(number);
        if let Some(seconds) = job.instance().get("init_s").and_then(Value::as_f64) {
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        }
        Ok(Prepared::default())
    }

    async fn run(&self, job: &JobContext, _: &Prepared) -> Result<RunOutput, StageError> {
        assert!(job.shared().is_none(), "it is init that starts from it");
        if job.instance().get("fails_once").is_some() && self.n_failed_runs.fetch_add(1, Ordering::Relaxed) == 0 {
            return Err(StageError::text(FailureClass::Sandbox, "on purpose"));
        }
        if job.instance().get("gate") == Some(&json!("run")) {
            self.in_run.add_permits(1);
            self.run_gate.acquire().await.unwrap().forget();
        }
        Ok(RunOutput { stop_reason: StopReason::Finish, ..RunOutput::default() })
    }

    async fn eval(&self, job: &JobContext, _: &Prepared, _: &RunOutput) -> Result<Evaluation, StageError> {
        if job.instance().get("gate") == Some(&json!("eval")) {
            self.in_eval.add_permits(1);
            self.eval_gate.acquire().await.unwrap().forget();
        }
        Ok(Evaluation { reward: 1.0, ..Evaluation::default() })
    }
}

struct Rig {
    pipeline: Pipeline,
    sharer: Arc<Sharer>,
    begun: mpsc::UnboundedReceiver<Begun>,
    n_jobs: usize,
}

fn sharer(name: &'static str) -> (Arc<Sharer>, mpsc::UnboundedReceiver<Begun>) {
    let (begun, beginnings) = mpsc::unbounded_channel();
    let sharer = Sharer {
        name,
        begun,
        alive: Arc::default(),
        n_made: AtomicU64::new(0),
        n_begun: AtomicUsize::new(0),
        started_from: Mutex::default(),
        in_run: Semaphore::new(0),
        run_gate: Semaphore::new(0),
        in_eval: Semaphore::new(0),
        eval_gate: Semaphore::new(0),
        n_failed_runs: AtomicUsize::new(0),
    };
    (Arc::new(sharer), beginnings)
}

fn rig(init_workers: usize) -> Rig {
    let (sharer, begun) = sharer("sharer");
    let mut registry = Registry::default();
    registry.register(Arc::clone(&sharer)).unwrap();
    let config = PipelineConfig { init_workers, run_workers: init_workers, ..PipelineConfig::default() };
    let pipeline = Pipeline::new(config, registry);
    pipeline.start();
    Rig { pipeline, sharer, begun, n_jobs: 0 }
}

fn request(group: &str, fields: &Value) -> JobRequest {
    let mut fields = fields.as_object().unwrap().clone();
    fields.entry("data_source").or_insert_with(|| json!("sharer"));
    fields.entry("shares").or_insert_with(|| json!("base"));
    let mut request = JobRequest::new(Instance(fields));
    request.group_id = (!group.is_empty()).then(|| GroupId::new(group).unwrap());
    request.retries = 0;
    request
}

impl Rig {
    fn submit(&mut self, mut job: JobRequest) -> JobHandle {
        self.n_jobs += 1;
        job.job_id = Some(prorl_core::JobId::new(format!("job-{}", self.n_jobs)).unwrap());
        self.pipeline.submit(job).unwrap()
    }

    fn group(&mut self, n_jobs: usize) -> Vec<JobHandle> {
        (0..n_jobs).map(|_| self.submit(request("g", &json!({})))).collect()
    }

    async fn begun(&mut self) -> Begun {
        // Where time is paused, one that never comes is a failure at once.
        let begun = tokio::time::timeout(Duration::from_hours(1), self.begun.recv()).await;
        begun.expect("no shared init has begun").unwrap()
    }

    /// Lets everything go on that can go on by itself: paused time moves when nothing else does.
    async fn settle(&self) {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }

    fn started_from(&self, job: &JobHandle) -> Vec<Option<u64>> {
        self.sharer.started_from.lock().get(job.id().as_str()).cloned().unwrap_or_default()
    }

    fn alive(&self) -> usize {
        self.sharer.alive.load(Ordering::Relaxed)
    }
}

/// A job that shares and has this much time for init, and any for the rest.
fn limited(init_secs: f64) -> JobRequest {
    let mut request = request("g", &json!({}));
    request.stage_timeouts.init = Some(init_secs);
    request
}

/// What those say for whom two others ran out of five seconds.
const TWICE: &str = "shared init: took longer than init may (5.000 s), twice";

fn is_waiting(job: &JobHandle) -> bool {
    job.state() == JobState::Waiting(Stage::Init)
}

fn assert_failed(result: &JobResult, class: FailureClass, message: &str) {
    assert_eq!((result.outcome.failure_class, result.outcome.stage), (Some(class), Some(Stage::Init)));
    assert_eq!((result.error.as_deref(), result.reward), (Some(message), None));
    assert_eq!(result.group_id.as_ref().map(GroupId::as_str), Some("g"));
}

#[tokio::test(start_paused = true)]
async fn a_group_makes_it_once_and_all_start_from_it() {
    let mut rig = rig(8);
    let jobs = rig.group(64);
    let begun = rig.begun().await;
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_eq!(jobs.iter().filter(|job| is_waiting(job)).count(), 63);
    let waits = rig.pipeline.stuck(Duration::from_hours(1), 100);
    assert!(waits.len() == 63 && waits.iter().all(|wait| wait.waiting_for == "shared init" && wait.stage == "init"));
    assert_eq!(rig.pipeline.stages().init.active, 1);
    begun.go.send(Do::Make).ok().unwrap();
    for job in &jobs {
        let result = job.result().await;
        assert_eq!((result.outcome.status, rig.started_from(job)), (Status::Completed, vec![Some(1)]));
        assert!(result.warnings.iter().any(|warning| warning == "made for all"), "{:?}", result.warnings);
        let seconds = if job.id().as_str() == begun.job { 100.0 } else { 0.0 };
        assert!((result.timing.init_time - seconds).abs() < 0.1, "{:?}", result.timing);
        assert!((result.timing.counted_elapsed - seconds).abs() < 0.1, "{:?}", result.timing);
    }
    assert_eq!((rig.sharer.n_begun.load(Ordering::Relaxed), rig.alive()), (1, 0));
    // The group is over; another of it begins anew.
    let later = rig.group(1);
    rig.begun().await.go.send(Do::Make).ok().unwrap();
    later[0].result().await;
    assert_eq!((rig.started_from(&later[0]), rig.alive()), (vec![Some(2)], 0));
}

#[tokio::test(start_paused = true)]
async fn those_who_wait_hold_no_worker_and_come_back_to_their_places() {
    let mut rig = rig(2);
    let mut jobs = rig.group(4);
    let begun = rig.begun().await;
    let other = rig.submit(request("other", &json!({"shares": null})));
    assert_eq!(other.result().await.outcome.status, Status::Completed, "one worker is free for another group");
    // With both workers taken and one more in the queue before them, those who waited come first.
    let busy = rig.submit(request("", &json!({"init_s": 1000.0})));
    rig.settle().await;
    let late = rig.submit(request("", &json!({"init_s": 1000.0})));
    rig.settle().await;
    assert_eq!((busy.state(), late.state()), (JobState::In(Stage::Init), JobState::Queued(Stage::Init)));
    begun.go.send(Do::Make).ok().unwrap();
    for job in jobs.drain(..) {
        job.result().await;
    }
    assert_eq!(late.state(), JobState::In(Stage::Init));
    assert_eq!(busy.state(), JobState::In(Stage::Init), "nobody waited for it");
}

#[tokio::test(start_paused = true)]
async fn one_worker_is_enough() {
    let mut rig = rig(1);
    let jobs = rig.group(5);
    rig.begun().await.go.send(Do::Make).ok().unwrap();
    for job in &jobs {
        assert_eq!(job.result().await.outcome.status, Status::Completed);
    }
    // Those who wait leave the one worker to the leader's successor, too.
    let mut jobs = rig.group(3);
    let begun = rig.begun().await;
    rig.settle().await;
    rig.pipeline.resize(Stage::Init, 2);
    rig.settle().await;
    rig.pipeline.resize(Stage::Init, 1);
    assert_eq!(jobs.iter().filter(|job| is_waiting(job)).count(), 2);
    drop(jobs.remove(0));
    let next = rig.begun().await;
    assert_ne!(next.job, begun.job);
    next.go.send(Do::Make).ok().unwrap();
    for job in &jobs {
        assert_eq!(job.result().await.outcome.status, Status::Completed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_goes_away_hands_on_and_fails_nobody() {
    let mut rig = rig(8);
    let jobs = rig.group(5);
    let cancel = |rig: &Rig, idx: usize| rig.pipeline.cancel(jobs[idx].id());
    let first = rig.begun().await;
    rig.settle().await;
    assert_eq!(cancel(&rig, 0), CancelAnswer::Found(JobState::In(Stage::Init)));
    let second = rig.begun().await;
    // The next is passed over when it has gone itself.
    assert_eq!(cancel(&rig, 2), CancelAnswer::Found(JobState::Waiting(Stage::Init)));
    assert_eq!(cancel(&rig, 1), CancelAnswer::Found(JobState::In(Stage::Init)));
    let third = rig.begun().await;
    let leaders = [&first, &second, &third].map(|begun| begun.job.as_str());
    assert_eq!(leaders, [0, 1, 3].map(|idx: usize| jobs[idx].id().as_str()));
    third.go.send(Do::Make).ok().unwrap();
    for (idx, job) in jobs.iter().enumerate() {
        let expected = if idx < 3 { Status::Cancelled } else { Status::Completed };
        assert_eq!(job.result().await.outcome.status, expected);
    }
    assert_eq!(rig.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_leader_out_of_time_hands_on_with_nothing_counted_to_the_others() {
    let mut rig = rig(2);
    let mut first = request("g", &json!({}));
    first.timeout = Some(5.0);
    let mut second = request("g", &json!({}));
    second.timeout = Some(20.0);
    let jobs = [rig.submit(first), rig.submit(second)];
    let _hangs = rig.begun().await;
    let begun = rig.begun().await;
    assert_eq!(begun.job, jobs[1].id().as_str());
    let timed_out = jobs[0].result().await;
    assert_eq!(timed_out.outcome.status, Status::Timeout);
    assert!((timed_out.timing.init_time - 5.0).abs() < 0.1);
    tokio::time::sleep(Duration::from_secs(18)).await;
    begun.go.send(Do::Make).ok().unwrap();
    let result = jobs[1].result().await;
    assert_eq!(result.outcome.status, Status::Completed, "its own time began with its own work: {:?}", result.error);
}

#[tokio::test(start_paused = true)]
async fn what_hangs_takes_two_jobs_their_time_and_fails_the_others() {
    for workers in [1, 2, 8] {
        let mut rig = rig(workers);
        let began = tokio::time::Instant::now();
        let jobs: Vec<_> = (0..16).map(|_| rig.submit(limited(5.0))).collect();
        for (idx, job) in jobs.iter().enumerate() {
            let result = job.result().await;
            if idx < 2 {
                assert_eq!((result.outcome.status, result.outcome.stage), (Status::Timeout, Some(Stage::Init)));
            } else {
                assert_failed(&result, FailureClass::Handler, TWICE);
                assert!(result.timing.counted_elapsed < 0.1, "{:?}", result.timing);
            }
            assert!(began.elapsed() < Duration::from_millis(10_100), "{workers} workers: {:?}", began.elapsed());
        }
        assert_eq!(rig.sharer.n_begun.load(Ordering::Relaxed), 2);
        assert_eq!((rig.pipeline.counts().active, rig.pipeline.stages().init.active), (0, 0));
        // What is submitted then begins anew: one that runs out of time is not the third.
        let jobs = [rig.submit(limited(5.0)), rig.submit(limited(5.0))];
        while rig.begun().await.job != jobs[0].id().as_str() {}
        rig.begun().await.go.send(Do::Make).ok().unwrap();
        let ended = [jobs[0].result().await.outcome.status, jobs[1].result().await.outcome.status];
        assert_eq!(ended, [Status::Timeout, Status::Completed]);
    }
}

#[tokio::test(start_paused = true)]
async fn one_submitted_when_the_first_has_failed_begins_anew_beside_the_others() {
    let mut rig = rig(1);
    let jobs: Vec<_> = (0..16).map(|_| rig.submit(limited(5.0))).collect();
    let _hang = [rig.begun().await, rig.begun().await];
    jobs[2].result().await;
    assert_ne!(jobs[15].state(), JobState::Ended, "it holds the group that has failed");
    let later = rig.submit(limited(5.0));
    rig.begun().await.go.send(Do::Make).ok().unwrap();
    assert_eq!(later.result().await.outcome.status, Status::Completed);
    assert_failed(&*jobs[15].result().await, FailureClass::Handler, TWICE);
}

#[tokio::test(start_paused = true)]
async fn one_with_more_time_has_its_try_and_the_others_wait_for_it() {
    for makes in [true, false] {
        let mut rig = rig(2);
        let jobs = [5.0, 5.0, 5.0, 60.0, 4.0].map(|limit| rig.submit(limited(limit)));
        let (_first, _second) = (rig.begun().await, rig.begun().await);
        let begun = rig.begun().await;
        assert_eq!(begun.job, jobs[3].id().as_str());
        tokio::time::sleep(Duration::from_secs(50)).await;
        assert!(is_waiting(&jobs[2]) && is_waiting(&jobs[4]));
        if makes {
            begun.go.send(Do::Make).ok().unwrap();
        }
        for idx in [2, 3, 4] {
            let result = jobs[idx].result().await;
            match (makes, idx) {
                (true, _) => assert_eq!((idx, result.outcome.status), (idx, Status::Completed)),
                (false, 3) => assert_eq!(result.outcome.status, Status::Timeout),
                (false, _) => assert_failed(&result, FailureClass::Handler, TWICE),
            }
        }
        assert_eq!((rig.sharer.n_begun.load(Ordering::Relaxed), rig.alive()), (3, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_leader_does_not_count_as_out_of_time() {
    let mut rig = rig(2);
    let jobs: Vec<_> = (0..6).map(|_| rig.submit(limited(5.0))).collect();
    let _hangs = rig.begun().await;
    for job in &jobs[1..4] {
        let begun = rig.begun().await;
        assert_eq!(begun.job, job.id().as_str());
        tokio::time::sleep(Duration::from_secs(4)).await;
        rig.pipeline.cancel(job.id());
    }
    let begun = rig.begun().await;
    assert_eq!(begun.job, jobs[4].id().as_str());
    drop(begun);
    assert_eq!(jobs[4].result().await.outcome.status, Status::Timeout);
    assert_failed(&*jobs[5].result().await, FailureClass::Handler, TWICE);
}

#[tokio::test(start_paused = true)]
async fn a_failure_makes_those_who_try_again_forget_who_ran_out_of_time() {
    let mut rig = rig(2);
    let jobs: Vec<_> = (0..6)
        .map(|_| {
            let mut job = limited(5.0);
            job.retries = 1;
            rig.submit(job)
        })
        .collect();
    let _hangs = rig.begun().await;
    rig.begun().await.go.send(Do::Fail(FailureClass::Sandbox)).ok().unwrap();
    let _hangs_too = rig.begun().await;
    rig.begun().await.go.send(Do::Make).ok().unwrap();
    let mut ended = Vec::new();
    for job in &jobs {
        ended.push(job.result().await.outcome.status);
    }
    assert_eq!(ended.iter().filter(|status| **status == Status::Timeout).count(), 2);
    assert_eq!(ended.iter().filter(|status| **status == Status::Completed).count(), 4, "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_each_ones_own_result() {
    let mut rig = rig(3);
    for (what, class, message) in [
        (Do::Fail(FailureClass::Sandbox), FailureClass::Sandbox, "shared init: on purpose"),
        (Do::Fail(FailureClass::Image), FailureClass::Image, "shared init: on purpose"),
        (Do::Panic, FailureClass::Handler, "shared init: panicked: on purpose"),
    ] {
        let jobs = rig.group(16);
        let begun = rig.begun().await;
        rig.settle().await;
        begun.go.send(what).ok().unwrap();
        for job in &jobs {
            let result = job.result().await;
            assert_eq!(&result.job_id, job.id());
            assert_failed(&result, class, message);
            assert!(rig.started_from(job).is_empty());
        }
    }
    assert_eq!(rig.sharer.n_begun.load(Ordering::Relaxed), 3);
    assert_eq!(rig.pipeline.counts().failed, 48);
}

#[tokio::test(start_paused = true)]
async fn retries_make_it_anew_together_and_as_often_as_each_may() {
    let mut rig = rig(4);
    let jobs: Vec<_> = (0..6)
        .map(|idx| {
            let mut job = request("g", &json!({}));
            job.retries = idx % 3;
            rig.submit(job)
        })
        .collect();
    for what in [Do::Fail(FailureClass::Sandbox), Do::Fail(FailureClass::Resource), Do::Make] {
        let begun = rig.begun().await;
        rig.settle().await;
        begun.go.send(what).ok().unwrap();
    }
    for (idx, job) in jobs.iter().enumerate() {
        let result = job.result().await;
        match idx % 3 {
            0 => assert_failed(&result, FailureClass::Sandbox, "shared init: on purpose"),
            1 => assert_failed(&result, FailureClass::Resource, "shared init: on purpose"),
            _ => assert_eq!((result.outcome.status, result.attempt), (Status::Completed, 3)),
        }
    }
    assert_eq!((rig.sharer.n_begun.load(Ordering::Relaxed), rig.alive()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn an_attempt_after_a_failed_run_starts_from_what_was_made() {
    let mut rig = rig(4);
    let mut job = request("g", &json!({"fails_once": true}));
    job.retries = 1;
    let job = rig.submit(job);
    rig.begun().await.go.send(Do::Make).ok().unwrap();
    assert_eq!(job.result().await.attempt, 2);
    assert_eq!((rig.started_from(&job), rig.alive()), (vec![Some(1), Some(1)], 0));
}

#[tokio::test(start_paused = true)]
async fn it_lives_until_no_job_can_start_from_it() {
    let mut rig = rig(4);
    let in_run = rig.submit(request("g", &json!({"gate": "run"})));
    rig.begun().await.go.send(Do::Make).ok().unwrap();
    rig.sharer.in_run.acquire().await.unwrap().forget();
    // A late one starts from what the others still hold.
    let in_eval = rig.submit(request("g", &json!({"gate": "eval"})));
    rig.sharer.in_eval.acquire().await.unwrap().forget();
    assert_eq!((rig.started_from(&in_eval), rig.alive()), (vec![Some(1)], 1));
    rig.sharer.run_gate.add_permits(1);
    in_run.result().await;
    assert_eq!(rig.alive(), 0, "eval needs none of it");
    let later = rig.group(1);
    rig.begun().await.go.send(Do::Make).ok().unwrap();
    later[0].result().await;
    assert_eq!(rig.started_from(&later[0]), [Some(2)]);
    rig.sharer.eval_gate.add_permits(1);
    in_eval.result().await;
    assert_eq!(rig.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn only_jobs_of_one_group_handler_and_word_share() {
    let (first, mut begun) = sharer("sharer");
    let (second, mut begun_too) = sharer("second");
    let mut registry = Registry::default();
    registry.register(Arc::clone(&first)).unwrap();
    registry.register(Arc::clone(&second)).unwrap();
    let pipeline = Pipeline::new(PipelineConfig::default(), registry);
    pipeline.start();
    let jobs: Vec<_> = [
        request("g", &json!({})),
        request("g", &json!({"data_source": "alias"})),
        request("h", &json!({})),
        request("g", &json!({"shares": "else"})),
        request("g", &json!({"data_source": "second"})),
        request("", &json!({})),
        request("", &json!({})),
        request("g", &json!({"shares": null})),
    ]
    .map(|job| pipeline.submit(job).unwrap())
    .into();
    for _ in 0..3 {
        begun.recv().await.unwrap().go.send(Do::Make).ok().unwrap();
    }
    begun_too.recv().await.unwrap().go.send(Do::Make).ok().unwrap();
    for job in &jobs {
        assert_eq!(job.result().await.outcome.status, Status::Completed);
    }
    let from = |sharer: &Sharer, idx: usize| sharer.started_from.lock()[jobs[idx].id().as_str()][0];
    assert_eq!(from(&first, 0), from(&first, 1), "an alias is the same handler");
    assert_eq!(from(&second, 4), Some(1));
    for alone in 5..8 {
        assert_eq!(from(&first, alone), None);
    }
    assert_eq!((first.n_begun.load(Ordering::Relaxed), second.n_begun.load(Ordering::Relaxed)), (3, 1));
}

#[tokio::test(start_paused = true)]
async fn stop_ends_those_who_wait_at_once() {
    let mut rig = rig(2);
    let jobs = rig.group(20);
    let _hangs = rig.begun().await;
    rig.settle().await;
    let asked = tokio::time::Instant::now();
    assert_eq!(rig.pipeline.stop().await.unwrap().cancelled, 20);
    assert!(asked.elapsed() < Duration::from_millis(10));
    for job in &jobs {
        assert_eq!(job.result().await.outcome.status, Status::Cancelled);
    }
    rig.pipeline.start();
    let jobs = rig.group(2);
    let mut begun = rig.begun().await;
    while begun.go.is_closed() {
        begun = rig.begun().await; // the lead went from one to the next as they ended
    }
    begun.go.send(Do::Make).ok().unwrap();
    for job in &jobs {
        assert_eq!(job.result().await.outcome.status, Status::Completed);
    }
    assert_eq!(rig.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn those_who_wait_count_to_the_limit_of_the_queue() {
    let (sharer, mut begun) = sharer("sharer");
    let mut registry = Registry::default();
    registry.register(Arc::clone(&sharer)).unwrap();
    let pipeline = Pipeline::new(PipelineConfig { queue_limit: 3, ..PipelineConfig::default() }, registry);
    pipeline.start();
    let mut jobs = Vec::new();
    for _ in 0..4 {
        jobs.push(pipeline.submit(request("g", &json!({}))).unwrap());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let full = pipeline.submit(request("g", &json!({})));
    assert!(matches!(full, Err(SubmitError::QueueFull { limit: 3 })));
    begun.recv().await.unwrap().go.send(Do::Make).ok().unwrap();
    for job in &jobs {
        job.result().await;
    }
    pipeline.submit(request("", &json!({}))).unwrap().result().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_callback_that_does_not_yield_keeps_the_lead_from_nobody() {
    let mut rig = rig(2);
    let jobs = rig.group(3);
    let (unblock, until) = std::sync::mpsc::channel();
    let blocked = rig.begun().await;
    let (blocks, has_begun) = oneshot::channel();
    blocked.go.send(Do::Block(blocks, until)).ok().unwrap();
    has_begun.await.unwrap();
    rig.pipeline.cancel(&prorl_core::JobId::new(blocked.job.as_str()).unwrap());
    let next = rig.begun().await;
    assert_ne!(next.job, blocked.job);
    // What the blocked one makes in the end is nobody's.
    unblock.send(()).unwrap();
    next.go.send(Do::Make).ok().unwrap();
    for job in &jobs {
        let result = job.result().await;
        let expected = if job.id().as_str() == blocked.job { Status::Cancelled } else { Status::Completed };
        assert_eq!(result.outcome.status, expected);
    }
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_many_threads_each_of_many_groups_makes_it_once() {
    let mut rig = rig(8);
    let makes = async {
        for _ in 0..50 {
            rig.begun.recv().await.unwrap().go.send(Do::Make).ok().unwrap();
        }
    };
    let jobs: Vec<_> = (0..1600)
        .map(|idx| rig.pipeline.submit(request(&format!("g{}", idx % 50), &json!({"n": idx}))).unwrap())
        .collect();
    makes.await;
    for job in &jobs {
        assert_eq!(job.result().await.outcome.status, Status::Completed);
    }
    assert_eq!((rig.sharer.n_begun.load(Ordering::Relaxed), rig.alive()), (50, 0));
    rig.pipeline.close().await;
}

/// Something that happens while jobs of a few groups go on.
#[derive(Clone, Copy, Debug)]
enum Step {
    Submit { group: usize, retries: u32 },
    Cancel(usize),
    Leave(usize),
    Tell(u8),
    Wait,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_usize..3, 0_u32..3).prop_map(|(group, retries)| Step::Submit { group, retries }),
        1 => (0_usize..40).prop_map(Step::Cancel),
        1 => (0_usize..40).prop_map(Step::Leave),
        2 => (0_u8..4).prop_map(Step::Tell),
        1 => Just(Step::Wait),
    ]
}

fn what(number: u8) -> Do {
    match number {
        0 => Do::Fail(FailureClass::Sandbox),
        1 => Do::Panic,
        _ => Do::Make,
    }
}

async fn each_ends_once(workers: usize, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let mut rig = rig(workers);
    let (mut jobs, mut begun) = (Vec::new(), Vec::new());
    for step in steps {
        match step {
            Step::Submit { group, retries } => {
                let mut job = request(&format!("g{group}"), &json!({}));
                job.timeout = Some(1000.0);
                job.retries = retries;
                jobs.push(Some(rig.submit(job)));
            }
            Step::Cancel(idx) => {
                if let Some(Some(job)) = jobs.get(idx) {
                    rig.pipeline.cancel(job.id());
                }
            }
            Step::Leave(idx) => drop(jobs.get_mut(idx).and_then(Option::take)),
            Step::Tell(number) => {
                if let Some(Begun { go, .. }) = begun.pop() {
                    let _gone = go.send(what(number));
                }
            }
            Step::Wait => tokio::time::sleep(Duration::from_millis(10)).await,
        }
        for _ in 0..usize::from(matches!(step, Step::Tell(_))) + 2 {
            tokio::task::yield_now().await;
        }
        while let Ok(one) = rig.begun.try_recv() {
            begun.push(one);
        }
        // At most one of each group makes it.
        let making = begun.iter().filter(|begun| !begun.go.is_closed()).count();
        prop_assert!(making <= 3.min(workers), "{making} make it at once");
    }
    for Begun { go, .. } in begun {
        let _gone = go.send(Do::Make);
    }
    let all = async {
        for job in jobs.iter().flatten() {
            let result = job.result().await;
            let ended = result.outcome.status;
            assert!(ended != Status::Timeout, "waiting is not counted: {:?}", result.error);
        }
    };
    let serve = async {
        while let Some(Begun { go, .. }) = rig.begun.recv().await {
            let _gone = go.send(Do::Make);
        }
    };
    tokio::select! {
        () = all => {}
        () = serve => {}
    }
    rig.pipeline.close().await;
    let counts = rig.pipeline.counts();
    prop_assert_eq!(counts.accepted, counts.completed + counts.failed + counts.cancelled + counts.timeout);
    prop_assert_eq!(counts.accepted, rig.n_jobs as u64);
    prop_assert_eq!((counts.active, rig.sharer.alive.load(Ordering::Relaxed)), (0, 0));
    let stages = rig.pipeline.stages();
    prop_assert_eq!((stages.init.active, stages.run.active), (0, 0));
    Ok(())
}

/// Submits a group with these limits, in seconds, to a shared init that hangs.
async fn none_gives_up_early(workers: usize, limits: &[u32]) -> Result<(), TestCaseError> {
    let mut rig = rig(workers);
    let jobs: Vec<_> = limits.iter().map(|limit| rig.submit(limited(f64::from(*limit)))).collect();
    let (mut tried, mut spared) = (Vec::new(), Vec::new());
    for (job, limit) in jobs.iter().zip(limits) {
        let result = job.result().await;
        if result.outcome.status == Status::Timeout { tried.push(*limit) } else { spared.push(*limit) }
    }
    for limit in limits {
        let n_tries = |limit: u32| tried.iter().filter(|tried| **tried >= limit).count();
        prop_assert!(tried.iter().filter(|tried| *tried == limit).count() <= 2, "{limit} of {tried:?}");
        prop_assert!(!spared.contains(limit) || n_tries(*limit) >= 2, "{limit} of {spared:?} after {tried:?}");
    }
    prop_assert_eq!(rig.sharer.n_begun.load(Ordering::Relaxed), tried.len());
    rig.pipeline.close().await;
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_each_job_ends_once_and_nothing_is_left(
        workers in 1_usize..4,
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(each_ends_once(workers, steps))?;
    }

    #[test]
    fn two_of_those_with_as_much_time_run_out_of_it_before_one_gives_up(
        workers in 1_usize..4,
        limits in proptest::collection::vec(1_u32..6, 1..20),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(none_gives_up_early(workers, &limits))?;
    }
}
