//! What a task domain implements (paper, 3.2.1).

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use prorl_core::{
    FailureClass, JobResult, Malformed, Message, SandboxHandle, StopReason, Trace, Usage, request::JobRequest,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{JobContext, Shared};

/// Why a stage could not do its work: never the policy's doing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StageError {
    /// Who failed.
    pub class: FailureClass,
    /// What happened, for people.
    pub message: String,
}

impl StageError {
    /// Makes one from an error and its causes.
    pub fn new(class: FailureClass, error: &(dyn std::error::Error + 'static)) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            if !message.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
            }
            source = cause.source();
        }
        Self { class, message }
    }

    /// Makes one from a text.
    pub fn text(class: FailureClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into() }
    }
}

/// What init hands to run.
#[derive(Clone, Default)]
pub struct Prepared {
    /// The sandbox, which the pipeline closes after run.
    pub sandbox: Option<Arc<dyn SandboxHandle>>,
    /// The name of the image it was started from, for the result.
    pub image: String,
    /// What the handler wants to remember of the task.
    pub metadata: Map<String, Value>,
    /// What the handler wants to tell its run stage.
    pub config: Map<String, Value>,
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("sandbox", &self.sandbox.as_ref().map(|sandbox| sandbox.name()))
            .field("image", &self.image)
            .finish_non_exhaustive()
    }
}

/// Messages and traces of one job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    /// The conversation.
    pub messages: Vec<Message>,
    /// Token sequences to train on.
    pub traces: Vec<Trace>,
}

/// What run hands to eval. Serialisable, so that eval may run elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunOutput {
    /// Messages and traces.
    pub trajectory: Trajectory,
    /// Why the agent stopped.
    pub stop_reason: StopReason,
    /// The text given to the finish tool, when that was the last action.
    pub finish: Option<String>,
    /// What the last turn says beside its reasoning and its tool calls.
    pub said: String,
    /// Whether the last turn has no format error.
    pub end_properly: bool,
    /// Schemas of the tools offered.
    pub tools: Vec<Value>,
    /// What the handler brings out beside the trajectory.
    pub artifacts: Map<String, Value>,
    /// The change made to a repository.
    pub git_patch: Option<String>,
    /// What was used.
    pub usage: Usage,
}

impl Default for RunOutput {
    fn default() -> Self {
        Self {
            trajectory: Trajectory::default(),
            stop_reason: StopReason::Error,
            finish: None,
            said: String::new(),
            end_properly: false,
            tools: Vec::new(),
            artifacts: Map::new(),
            git_patch: None,
            usage: Usage::default(),
        }
    }
}

/// What eval found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The score.
    pub reward: f64,
    /// How it came about.
    pub report: Map<String, Value>,
}

/// What an exception callback adds to the result of a failed job. It cannot add a reward: a failure is never one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fallback {
    /// Into `report`.
    pub report: Map<String, Value>,
    /// Into `artifacts`.
    pub artifacts: Map<String, Value>,
}

/// The code for one task domain.
///
/// Each callback runs in a task of its own: a panic ends that job alone, with failure class `handler`. A callback is
/// dropped at its next await when the job is cancelled or its time is up, so what it holds must be freed by `Drop`.
#[async_trait]
pub trait AgentHandler: Send + Sync + 'static {
    /// The name that instances ask for in `data_source`.
    fn name(&self) -> &str;

    /// Other names for it.
    fn aliases(&self) -> Vec<&str> {
        Vec::new()
    }

    /// Looks at a request before it is accepted.
    ///
    /// # Errors
    /// Names the field that is missing or wrong by its whole path, such as `instance.ground_truth` or
    /// `sampling_params.tokenizer`.
    fn check(&self, request: &JobRequest) -> Result<(), Malformed> {
        let _ = request;
        Ok(())
    }

    /// Names what a job can share with the others of its group: jobs of one `group_id` for which this says the same have
    /// it made once, by [`init_shared`](Self::init_shared). So the text holds everything of the request that decides what
    /// is made. `None`, as for jobs without a group, makes nothing. [`Shared`] says how often it is tried when it takes too
    /// long.
    fn init_shared_by(&self, request: &JobRequest) -> Option<String> {
        let _ = request;
        None
    }

    /// Makes what the jobs of a group share, within the init stage of one of them, before its own [`init`](Self::init).
    /// `job` is that one; nothing that is its alone may show in the outcome.
    ///
    /// The others wait meanwhile, without a worker or counted time. When it fails, each of them fails with this error. When
    /// `job` is cancelled or its time is up, another one begins anew, unless two have run out of as much time as any of the
    /// others has (see [`Shared`]).
    ///
    /// # Errors
    /// When it cannot be made.
    async fn init_shared(&self, job: &JobContext) -> Result<Shared, StageError> {
        let _ = job;
        Ok(Shared::default())
    }

    /// Makes the sandbox and whatever the task needs in it, starting from [`JobContext::shared`] where there is something.
    ///
    /// # Errors
    /// When it cannot be made.
    async fn init(&self, job: &JobContext) -> Result<Prepared, StageError>;

    /// Waits for what run needs before it takes a worker, such as a backend. Not counted by the job's time; while it waits,
    /// [`waits_for`](Self::waits_for) is what `/status` shows.
    ///
    /// # Errors
    /// When it will not come.
    async fn before_run(&self, job: &JobContext) -> Result<(), StageError> {
        let _ = job;
        Ok(())
    }

    /// Names what [`before_run`](Self::before_run) waits for.
    fn waits_for(&self) -> &'static str {
        "llm backend"
    }

    /// Drives the agent.
    ///
    /// # Errors
    /// When something other than the policy failed. What the agent causes is a tool result, never an error.
    async fn run(&self, job: &JobContext, prepared: &Prepared) -> Result<RunOutput, StageError>;

    /// Scores. The sandbox of run is gone by now; a handler that needs one starts it here and gives it to
    /// [`JobContext::adopt`].
    ///
    /// # Errors
    /// When there can be no score. A wrong answer is a score.
    async fn eval(&self, job: &JobContext, prepared: &Prepared, run: &RunOutput) -> Result<Evaluation, StageError>;

    /// Adds to the result of a job whose init failed.
    async fn init_exception(&self, job: &JobContext, error: &StageError) -> Fallback {
        let _ = (job, error);
        Fallback::default()
    }

    /// Adds to the result of a job whose run failed.
    async fn run_exception(&self, job: &JobContext, error: &StageError) -> Fallback {
        let _ = (job, error);
        Fallback::default()
    }

    /// Adds to the result of a job whose eval failed.
    async fn eval_exception(&self, job: &JobContext, error: &StageError) -> Fallback {
        let _ = (job, error);
        Fallback::default()
    }

    /// Has the last word on the result.
    async fn final_result(&self, job: &JobContext, draft: JobResult) -> JobResult {
        let _ = job;
        draft
    }
}

/// A shared handler is a handler, for a caller that keeps a hold on it.
#[async_trait]
impl<H: AgentHandler + ?Sized> AgentHandler for Arc<H> {
    fn name(&self) -> &str {
        (**self).name()
    }
    fn aliases(&self) -> Vec<&str> {
        (**self).aliases()
    }
    fn check(&self, request: &JobRequest) -> Result<(), Malformed> {
        (**self).check(request)
    }
    fn init_shared_by(&self, request: &JobRequest) -> Option<String> {
        (**self).init_shared_by(request)
    }
    async fn init_shared(&self, job: &JobContext) -> Result<Shared, StageError> {
        (**self).init_shared(job).await
    }
    async fn init(&self, job: &JobContext) -> Result<Prepared, StageError> {
        (**self).init(job).await
    }
    async fn before_run(&self, job: &JobContext) -> Result<(), StageError> {
        (**self).before_run(job).await
    }
    fn waits_for(&self) -> &'static str {
        (**self).waits_for()
    }
    async fn run(&self, job: &JobContext, prepared: &Prepared) -> Result<RunOutput, StageError> {
        (**self).run(job, prepared).await
    }
    async fn eval(&self, job: &JobContext, prepared: &Prepared, run: &RunOutput) -> Result<Evaluation, StageError> {
        (**self).eval(job, prepared, run).await
    }
    async fn init_exception(&self, job: &JobContext, error: &StageError) -> Fallback {
        (**self).init_exception(job, error).await
    }
    async fn run_exception(&self, job: &JobContext, error: &StageError) -> Fallback {
        (**self).run_exception(job, error).await
    }
    async fn eval_exception(&self, job: &JobContext, error: &StageError) -> Fallback {
        (**self).eval_exception(job, error).await
    }
    async fn final_result(&self, job: &JobContext, draft: JobResult) -> JobResult {
        (**self).final_result(job, draft).await
    }
}
