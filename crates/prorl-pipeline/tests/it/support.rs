//! A handler that does what its instance says.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use prorl_core::{
    FailureClass, Instance, JobRequest, JobResult, Malformed, Message, Outcome, Role, SandboxHandle, Stage, StopReason,
};
use prorl_pipeline::{
    AgentHandler, Evaluation, Fallback, JobContext, Pipeline, PipelineConfig, Prepared, Progress, Registry, RunOutput,
    StageError, Trajectory,
};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

pub(crate) struct Probe {
    alive: Arc<AtomicUsize>,
    pub(crate) started: AtomicUsize,
    pub(crate) alive_in_eval: AtomicUsize,
    pub(crate) runs: AtomicUsize,
    active_runs: AtomicUsize,
    pub(crate) most_runs: AtomicUsize,
    failed_once: AtomicUsize,
    pub(crate) waits_for_panics: AtomicBool,
    reached: [Semaphore; 3],
    gate: Semaphore,
}

struct FakeSandbox {
    alive: Arc<AtomicUsize>,
    stays: bool,
    closed: AtomicUsize,
}

impl Drop for FakeSandbox {
    fn drop(&mut self) {
        if self.closed.load(Ordering::Relaxed) == 0 {
            self.alive.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[async_trait]
impl SandboxHandle for FakeSandbox {
    fn name(&self) -> &'static str {
        "fake"
    }
    async fn close(&self, _grace: Duration) -> Result<(), String> {
        if self.closed.fetch_add(1, Ordering::Relaxed) == 0 {
            self.alive.fetch_sub(1, Ordering::Relaxed);
        }
        if self.stays { Err("pid 7".to_owned()) } else { Ok(()) }
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Default)]
struct OneMessage {
    panics: bool,
}

impl Progress for OneMessage {
    fn snapshot(&self) -> RunOutput {
        assert!(!self.panics, "snapshot on purpose");
        RunOutput {
            trajectory: Trajectory { messages: vec![Message::fed(Role::User, "hi", vec![1])], traces: vec![] },
            stop_reason: StopReason::Finish,
            finish: Some("done".to_owned()),
            end_properly: true,
            ..RunOutput::default()
        }
    }
}

pub(crate) fn small() -> PipelineConfig {
    PipelineConfig { init_workers: 8, run_workers: 8, eval_workers: 8, ..PipelineConfig::default() }
}

pub(crate) fn pipeline(config: PipelineConfig) -> (Pipeline, Arc<Probe>) {
    let probe = Probe::new();
    let mut registry = Registry::default();
    registry.register(Arc::clone(&probe)).unwrap();
    let pipeline = Pipeline::new(config, registry);
    pipeline.start();
    (pipeline, probe)
}

pub(crate) fn request(fields: &Value) -> JobRequest {
    let mut fields = fields.as_object().unwrap().clone();
    fields.retain(|_, value| !value.is_null());
    fields.insert("data_source".into(), "probe".into());
    JobRequest::new(Instance(fields))
}

impl Probe {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            alive: Arc::default(),
            started: AtomicUsize::new(0),
            alive_in_eval: AtomicUsize::new(0),
            runs: AtomicUsize::new(0),
            active_runs: AtomicUsize::new(0),
            most_runs: AtomicUsize::new(0),
            failed_once: AtomicUsize::new(0),
            waits_for_panics: AtomicBool::new(false),
            reached: [0; 3].map(Semaphore::new),
            gate: Semaphore::new(0),
        })
    }

    pub(crate) fn alive(&self) -> usize {
        self.alive.load(Ordering::Relaxed)
    }

    /// Waits until a job that misbehaves in `stage` is there.
    pub(crate) async fn reached(&self, stage: Stage) {
        self.reached[stage as usize].acquire().await.unwrap().forget();
    }

    pub(crate) fn open_gate(&self) {
        self.gate.add_permits(1000);
    }

    async fn misbehave(&self, job: &JobContext, stage: Stage) -> Result<(), StageError> {
        let field = |name: &str| job.instance().get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let until = job.instance().get("until_attempt").and_then(Value::as_u64);
        let once = job.instance().get("fail_once").is_some();
        if field("at") != stage.as_str()
            || until.is_some_and(|until| u64::from(job.attempt()) >= until)
            || (once && self.failed_once.fetch_add(1, Ordering::Relaxed) > 0)
        {
            return Ok(());
        }
        self.reached[stage as usize].add_permits(1);
        let class = match field("do").as_str() {
            "panic" => panic!("on purpose"),
            "hang" => std::future::pending().await,
            "gate" => {
                self.gate.acquire().await.unwrap().forget();
                return Ok(());
            }
            "park" => {
                job.park("llm backend", self.gate.acquire()).await.unwrap().forget();
                return Ok(());
            }
            word => *FailureClass::ALL.iter().find(|class| class.as_str() == word).unwrap(),
        };
        Err(StageError::text(class, "on purpose"))
    }

    async fn callback(&self, job: &JobContext, name: &str) {
        match job.instance().get(name).and_then(Value::as_str) {
            Some("panic") => panic!("{name} on purpose"),
            Some("hang") => std::future::pending().await,
            _ => {}
        }
    }

    async fn exception(&self, job: &JobContext, stage: Stage) -> Fallback {
        self.callback(job, &format!("{stage}_exception")).await;
        let report = Map::from_iter([("fallback".to_owned(), json!(stage.as_str()))]);
        Fallback { report, ..Fallback::default() }
    }
}

#[async_trait]
impl AgentHandler for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn aliases(&self) -> Vec<&str> {
        vec!["other-name"]
    }

    fn check(&self, request: &JobRequest) -> Result<(), Malformed> {
        match request.instance.get("refuse") {
            Some(_) => Err(Malformed::new("instance.refuse", "expected no such field")),
            None => Ok(()),
        }
    }

    async fn init(&self, job: &JobContext) -> Result<Prepared, StageError> {
        self.started.fetch_add(1, Ordering::Relaxed);
        self.alive.fetch_add(1, Ordering::Relaxed);
        let stays = job.instance().get("close").is_some();
        let sandbox = Arc::new(FakeSandbox { alive: Arc::clone(&self.alive), stays, closed: AtomicUsize::new(0) });
        self.misbehave(job, Stage::Init).await?;
        Ok(Prepared { sandbox: Some(sandbox), image: "probe".to_owned(), ..Prepared::default() })
    }

    fn waits_for(&self) -> &'static str {
        assert!(!self.waits_for_panics.load(Ordering::Relaxed), "waits_for on purpose");
        "a word"
    }

    async fn run(&self, job: &JobContext, _prepared: &Prepared) -> Result<RunOutput, StageError> {
        self.runs.fetch_add(1, Ordering::Relaxed);
        let active = self.active_runs.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_runs.fetch_max(active, Ordering::Relaxed);
        let panics = job.instance().get("snapshot").is_some();
        job.set_progress(Arc::new(OneMessage { panics }));
        tokio::task::yield_now().await;
        let outcome = self.misbehave(job, Stage::Run).await;
        self.active_runs.fetch_sub(1, Ordering::Relaxed);
        outcome.map(|()| OneMessage::default().snapshot())
    }

    async fn eval(&self, job: &JobContext, _: &Prepared, _run: &RunOutput) -> Result<Evaluation, StageError> {
        let only_mine = job.instance().get("n").is_none();
        if only_mine {
            self.alive_in_eval.fetch_max(self.alive(), Ordering::Relaxed);
        }
        self.misbehave(job, Stage::Eval).await?;
        let reward = job.instance().get("reward").map_or(0.0, |reward| reward.as_f64().unwrap_or(f64::NAN));
        Ok(Evaluation { reward, ..Evaluation::default() })
    }

    async fn init_exception(&self, job: &JobContext, _: &StageError) -> Fallback {
        self.exception(job, Stage::Init).await
    }

    async fn run_exception(&self, job: &JobContext, _: &StageError) -> Fallback {
        self.exception(job, Stage::Run).await
    }

    async fn eval_exception(&self, job: &JobContext, _: &StageError) -> Fallback {
        self.exception(job, Stage::Eval).await
    }

    async fn final_result(&self, job: &JobContext, mut draft: JobResult) -> JobResult {
        self.callback(job, "final_result").await;
        match job.instance().get("final_result").and_then(Value::as_str) {
            Some("forge") => {
                draft.reward = Some(1.0);
                draft.error = None;
                draft.outcome = Outcome::completed(StopReason::Finish);
            }
            Some("lose") => draft.reward = None,
            _ => {}
        }
        draft
    }
}
