//! Takes one job through its attempts to its one result.

use std::{
    any::Any,
    sync::{Arc, atomic::AtomicU32},
    time::Duration,
};

use prorl_core::{CriticalError, FailureClass, JobResult, Outcome, Stage, Status, Timing};
use serde_json::Value;
use tokio::{task::JoinSet, time::Instant};
use tracing::Instrument;

use crate::{
    AgentHandler, Evaluation, JobContext, JobState, PausableTimer, Permit, Prepared, RunOutput, StageError,
    job::Job,
    pipeline::{InitPlaces, Inner},
};

/// How long a callback that was told to end may take to reach its next await.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// How long closing a sandbox may take beyond its grace.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// How an attempt ended.
enum Cause {
    /// Scored, or skipped by request.
    Done,
    Failed {
        stage: Stage,
        error: StageError,
    },
    TimedOut(Stage),
    Cancelled(Stage),
}

/// What an attempt brought.
struct Attempt {
    cause: Cause,
    prepared: Option<Arc<Prepared>>,
    run: Option<Arc<RunOutput>>,
    /// Whether the run stage ended by itself.
    ran: bool,
    evaluation: Option<Evaluation>,
}

/// Seconds by stage, over all attempts.
#[derive(Default)]
struct Clock {
    init: Duration,
    run: Duration,
    eval: Duration,
    others: Duration,
}

impl Clock {
    fn of(&mut self, stage: Stage) -> &mut Duration {
        match stage {
            Stage::Init => &mut self.init,
            Stage::Run => &mut self.run,
            Stage::Eval => &mut self.eval,
        }
    }
}

/// Drives a job to its end, which it records.
pub(crate) async fn drive(inner: &Inner, job: &Arc<Job>, first: Option<InitPlaces>) {
    let timer = Arc::new(PausableTimer::new(job.timeout));
    let retries = Arc::new(AtomicU32::new(job.request.retries));
    let mut clock = Clock::default();
    let mut places = first;
    let mut number = job.attempt();
    let (context, attempt) = loop {
        let context = Arc::new(JobContext::new(
            Arc::clone(job),
            number,
            Arc::clone(&timer),
            Arc::clone(&inner.pools),
            Arc::clone(&inner.sandboxes),
            Arc::clone(&retries),
        ));
        let began = timer.used();
        let attempt = attempt(inner, &context, places.take(), &mut clock).await;
        // One that used most of the job's time cannot be repeated in what is left; its class says more than a timeout.
        let can_repeat = timer.deadline().remaining(timer.used()) > timer.used().saturating_sub(began);
        match &attempt.cause {
            // A failed eval was tried again by itself: the rollout it scores is good.
            Cause::Failed { stage: Stage::Init | Stage::Run, error }
                if error.class.is_retryable() && can_repeat && !job.cancel.is_cancelled() && context.take_retry() =>
            {
                tracing::warn!(attempt = number, class = %error.class, %error, "attempt failed, trying again");
                number = job.next_attempt();
            }
            _ => break (context, attempt),
        }
    };
    let result = conclude(inner, &context, attempt, clock).await;
    tracing::info!(status = %result.outcome.status, reward = result.reward, error = result.error, "job ended");
    inner.ended(job, result);
}

/// The result of a job whose driving itself panicked: a broken invariant of ours, or a handler's callback that has no task.
pub(crate) fn broken_by_us(job: &Job, panic: &(dyn Any + Send)) -> JobResult {
    let text = panic_text(panic);
    tracing::error!(job = %job.id, panic = text, "driving the job panicked");
    JobResult {
        instance_id: job.request.instance.id("instance_id").ok().flatten(),
        group_id: job.request.group_id.clone(),
        error: Some(format!("the service panicked: {text}")),
        critical_error: Some(CriticalError::FinalResult),
        attempt: job.attempt(),
        ..JobResult::empty(
            job.id.clone(),
            job.data_source.clone(),
            Outcome::failed(FailureClass::Internal, job.state().stage()),
        )
    }
}

async fn attempt(inner: &Inner, context: &Arc<JobContext>, first: Option<InitPlaces>, clock: &mut Clock) -> Attempt {
    let mut attempt = Attempt { cause: Cause::Done, prepared: None, run: None, ran: false, evaluation: None };
    attempt.cause = match stages(inner, context, first, clock, &mut attempt).await {
        Ok(()) => Cause::Done,
        Err(cause) => cause,
    };
    close_sandboxes(inner, context, clock).await;
    if attempt.run.is_none()
        && let Some(progress) = context.take_progress()
    {
        let snapshot = callback(inner.config.callback_limit, "progress", async move { progress.snapshot() });
        match snapshot.await {
            Ok(run) => attempt.run = Some(Arc::new(run)),
            Err(how) => context.warn(format!("what there was is lost: {how}")),
        }
    }
    attempt
}

async fn stages(
    inner: &Inner,
    context: &Arc<JobContext>,
    first: Option<InitPlaces>,
    clock: &mut Clock,
    attempt: &mut Attempt,
) -> Result<(), Cause> {
    let handler = &context.job().handler;

    let places = if let Some(places) = first {
        places
    } else {
        let priority = context.request().priority;
        place(context, Stage::Init, InitPlaces::acquire(&inner.pools, priority)).await?
    };
    let ahead = places.ahead;
    let made = in_stage(context, Stage::Init, places.worker, clock, {
        let (handler, context) = (Arc::clone(handler), Arc::clone(context));
        async move { handler.init(&context).await }
    });
    let prepared = made.await.inspect_err(|cause| {
        if let Cause::Failed { error, .. } = cause
            && matches!(error.class, FailureClass::Sandbox | FailureClass::Image)
        {
            inner.sandboxes.failed();
        }
    })?;
    if let Some(sandbox) = &prepared.sandbox {
        context.adopt(Arc::clone(sandbox));
    }
    let prepared = Arc::new(prepared);
    attempt.prepared = Some(Arc::clone(&prepared));

    before_run(context, handler).await?;

    let permit = place(context, Stage::Run, worker(context, Stage::Run)).await?;
    drop(ahead);
    let run = in_stage(context, Stage::Run, permit, clock, {
        let (handler, context, prepared) = (Arc::clone(handler), Arc::clone(context), Arc::clone(&prepared));
        async move { handler.run(&context, &prepared).await }
    });
    let run = Arc::new(run.await?);
    attempt.run = Some(Arc::clone(&run));
    attempt.ran = true;
    close_sandboxes(inner, context, clock).await;

    if inner.config.allow_skip_eval && context.instance().get("skip_eval") == Some(&Value::Bool(true)) {
        return Ok(());
    }
    loop {
        let permit = place(context, Stage::Eval, worker(context, Stage::Eval)).await?;
        let scored = in_stage(context, Stage::Eval, permit, clock, {
            let (handler, context) = (Arc::clone(handler), Arc::clone(context));
            let (prepared, run) = (Arc::clone(&prepared), Arc::clone(&run));
            async move { handler.eval(&context, &prepared, &run).await }
        });
        match scored.await {
            Ok(evaluation) if evaluation.reward.is_finite() => {
                attempt.evaluation = Some(evaluation);
                return Ok(());
            }
            Ok(evaluation) => {
                let message = format!("the handler scored {}, expected a finite number", evaluation.reward);
                let error = StageError::text(FailureClass::Scorer, message);
                return Err(Cause::Failed { stage: Stage::Eval, error });
            }
            Err(Cause::Failed { error, .. }) if error.class.is_retryable() && context.take_retry() => {
                tracing::warn!(class = %error.class, %error, "eval failed, trying again");
                close_sandboxes(inner, context, clock).await;
            }
            Err(cause) => return Err(cause),
        }
    }
}

/// Waits for a place before the stage, in its queue.
async fn place<T>(context: &JobContext, stage: Stage, place: impl Future<Output = T>) -> Result<T, Cause> {
    context.job().enter(JobState::Queued(stage), None);
    tokio::select! {
        biased;
        () = context.stop().cancelled() => Err(Cause::Cancelled(stage)),
        place = place => Ok(place),
    }
}

async fn worker(context: &JobContext, stage: Stage) -> Permit {
    context.pool(stage).acquire(context.request().priority).await
}

async fn before_run(context: &Arc<JobContext>, handler: &Arc<dyn AgentHandler>) -> Result<(), Cause> {
    context.job().enter(JobState::Waiting(Stage::Run), Some(handler.waits_for()));
    let wait = {
        let (handler, context) = (Arc::clone(handler), Arc::clone(context));
        async move { handler.before_run(&context).await }
    };
    let mut task = JoinSet::new();
    task.spawn(wait.in_current_span());
    tokio::select! {
        biased;
        () = context.stop().cancelled() => {
            end_task(&mut task).await;
            Err(Cause::Cancelled(Stage::Run))
        }
        ended = task.join_next() => outcome_of(Stage::Run, ended),
    }
}

/// Runs a callback as the work of a stage: with a worker, on the clock, until its deadline or the job's cancel.
async fn in_stage<T: Send + 'static>(
    context: &Arc<JobContext>,
    stage: Stage,
    permit: Permit,
    clock: &mut Clock,
    work: impl Future<Output = Result<T, StageError>> + Send + 'static,
) -> Result<T, Cause> {
    let limits = context.request().stage_timeouts;
    let limit = match stage {
        Stage::Init => limits.init,
        Stage::Run => limits.run,
        Stage::Eval => limits.eval,
    };
    let timer = context.timer();
    let began = timer.used();
    let deadline = timer.deadline().child(began, limit.map(Duration::from_secs_f64));
    if deadline.is_past(began) {
        return Err(Cause::TimedOut(stage));
    }
    let running = context.enter_stage(stage, permit, deadline);
    let mut task = JoinSet::new();
    task.spawn(work.instrument(tracing::debug_span!("stage", stage = %stage)));
    let result = tokio::select! {
        biased;
        () = context.stop().cancelled() => Err(Cause::Cancelled(stage)),
        () = timer.passed(deadline) => Err(Cause::TimedOut(stage)),
        ended = task.join_next() => outcome_of(stage, ended),
    };
    if !task.is_empty() {
        end_task(&mut task).await;
    }
    drop(running);
    *clock.of(stage) += timer.used().saturating_sub(began);
    context.leave_stage();
    result
}

fn outcome_of<T>(
    stage: Stage,
    ended: Option<Result<Result<T, StageError>, tokio::task::JoinError>>,
) -> Result<T, Cause> {
    let error = match ended {
        Some(Ok(Ok(value))) => return Ok(value),
        Some(Ok(Err(error))) => error,
        Some(Err(join)) => StageError::text(FailureClass::Handler, format!("{stage} {}", how_it_broke(join))),
        None => StageError::text(FailureClass::Internal, format!("{stage} had no task")),
    };
    Err(Cause::Failed { stage, error })
}

fn how_it_broke(error: tokio::task::JoinError) -> String {
    match error.try_into_panic() {
        Ok(panic) => format!("panicked: {}", panic_text(panic.as_ref())),
        Err(_) => "was aborted".to_owned(),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text")
}

/// Ends a callback's task. One that never reaches an await is left behind, said, and holds no worker.
async fn end_task<T: 'static>(task: &mut JoinSet<T>) {
    task.abort_all();
    let drained = async { while task.join_next().await.is_some() {} };
    if tokio::time::timeout(ABORT_GRACE, drained).await.is_err() {
        tracing::error!("a handler's callback does not yield; its thread is lost until it does");
        task.detach_all();
    }
}

async fn close_sandboxes(inner: &Inner, context: &JobContext, clock: &mut Clock) {
    let began = Instant::now();
    for sandbox in context.take_adopted() {
        let mut closing = JoinSet::new();
        let (name, grace) = (sandbox.name().to_owned(), inner.config.close_grace);
        closing.spawn(async move { sandbox.close(grace).await }.in_current_span());
        // A close has limits of its own; this one is for a kind of sandbox that does not keep them.
        let closed = tokio::time::timeout(grace + CLOSE_LIMIT, closing.join_next()).await;
        match closed.unwrap_or_else(|_| Some(Ok(Err("closing it takes too long".to_owned())))) {
            Some(Ok(Ok(()))) | None => {}
            Some(Ok(Err(left))) => {
                tracing::error!(sandbox = %name, %left, "sandbox is not proven gone");
                context.warn(format!("sandbox {name} is not proven gone: {left}"));
            }
            Some(Err(join)) => {
                let how = how_it_broke(join);
                tracing::error!(sandbox = %name, %how, "closing a sandbox broke");
                context.warn(format!("closing sandbox {name} {how}"));
            }
        }
        inner.sandboxes.closed();
    }
    clock.others += began.elapsed();
}

/// Runs a callback outside the stages: bounded, and its panic is an error.
async fn callback<T: Send + 'static>(
    limit: Duration,
    name: &str,
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, String> {
    let mut task = JoinSet::new();
    task.spawn(work.in_current_span());
    match tokio::time::timeout(limit, task.join_next()).await {
        Ok(Some(Ok(value))) => Ok(value),
        Ok(Some(Err(join))) => Err(format!("{name} {}", how_it_broke(join))),
        Ok(None) => Err(format!("{name} had no task")),
        Err(_elapsed) => {
            end_task(&mut task).await;
            Err(format!("{name} did not return within {limit:?}"))
        }
    }
}

/// Makes the result: whole, whatever happened.
async fn conclude(inner: &Inner, context: &Arc<JobContext>, mut attempt: Attempt, mut clock: Clock) -> JobResult {
    let began = Instant::now();
    let limit = inner.config.callback_limit;
    let handler = Arc::clone(&context.job().handler);
    let mut draft = draft(context, &mut attempt);
    let mut broken = None;
    if let Cause::Failed { stage, error } = attempt.cause {
        let (handler, context) = (Arc::clone(&handler), Arc::clone(context));
        let name = format!("{stage}_exception");
        let fallback = callback(limit, &name, async move {
            match stage {
                Stage::Init => handler.init_exception(&context, &error).await,
                Stage::Run => handler.run_exception(&context, &error).await,
                Stage::Eval => handler.eval_exception(&context, &error).await,
            }
        });
        match fallback.await {
            Ok(fallback) => {
                draft.report.extend(fallback.report);
                draft.artifacts.extend(fallback.artifacts);
            }
            Err(how) => broken = Some(how),
        }
    }
    if broken.is_none() {
        let (handler, context, given) = (handler, Arc::clone(context), draft.clone());
        let last_word = callback(limit, "final_result", async move { handler.final_result(&context, given).await });
        match last_word.await.and_then(|last_word| sealed(&draft, last_word)) {
            Ok(result) => draft = result,
            Err(how) => broken = Some(how),
        }
    }
    if let Some(how) = broken {
        tracing::error!(%how, "a handler's callback broke");
        let stage = draft.outcome.stage;
        draft.outcome = Outcome::failed(FailureClass::Handler, stage);
        draft.error = Some(draft.error.map_or_else(|| how.clone(), |error| format!("{error}; then {how}")));
        draft.critical_error = Some(CriticalError::FinalResult);
        (draft.reward, draft.resolved, draft.filter) = (None, false, true);
    }
    clock.others += began.elapsed();
    draft.timing = Timing {
        init_time: clock.init.as_secs_f64(),
        run_time: clock.run.as_secs_f64(),
        eval_time: clock.eval.as_secs_f64(),
        others_time: clock.others.as_secs_f64(),
        counted_elapsed: context.used().as_secs_f64(),
        timeout: context.job().timeout.as_secs_f64(),
        timeout_triggered: draft.outcome.status == Status::Timeout,
    };
    draft
}

/// Moves what the attempt brought into a result: messages and traces are large, and nobody else needs them now.
fn draft(context: &JobContext, attempt: &mut Attempt) -> JobResult {
    let request = context.request();
    let stop_reason = attempt.run.as_ref().map_or(prorl_core::StopReason::Error, |run| run.stop_reason);
    let (outcome, error, critical_error) = match &attempt.cause {
        Cause::Done => (Outcome::completed(stop_reason), None, None),
        Cause::Failed { stage, error } => {
            (Outcome::failed(error.class, Some(*stage)), Some(error.message.clone()), Some((*stage).into()))
        }
        Cause::TimedOut(stage) => {
            let used = context.used().as_secs_f64();
            let error = format!("counted time ran out in {stage} after {used:.3} s");
            (Outcome::timed_out(Some(*stage)), Some(error), Some(CriticalError::Timeout))
        }
        Cause::Cancelled(stage) => {
            let error = format!("cancelled in or before {stage}");
            (Outcome::cancelled(Some(*stage)), Some(error), Some(CriticalError::Cancelled))
        }
    };
    let mut warnings = request.sampling_params.warnings();
    for (field, given) in
        [("callback_url", request.callback_url.is_some()), ("weight_version", request.weight_version.is_some())]
    {
        if given {
            warnings.push(format!("{field} has no effect in this version"));
        }
    }
    warnings.extend(context.take_warnings());
    let mut result = JobResult {
        instance_id: context.instance().id("instance_id").ok().flatten(),
        trajectory_id: context.trajectory_id(),
        group_id: request.group_id.clone(),
        success: attempt.ran,
        error,
        critical_error,
        warnings,
        attempt: context.attempt(),
        image: match &attempt.prepared {
            Some(prepared) => prepared.image.clone(),
            // Init came to nothing, so that all there is to tell is what was asked for.
            None => context.instance().common().ok().and_then(|common| common.image).unwrap_or_default(),
        },
        ..JobResult::empty(context.id().clone(), context.job().data_source.clone(), outcome)
    };
    if let Some(run) = attempt.run.take().map(Arc::unwrap_or_clone) {
        result.finish = run.finish.is_some();
        result.end_properly = run.end_properly;
        result.messages = run.trajectory.messages;
        result.traces = run.trajectory.traces;
        result.tools = run.tools;
        result.artifacts = run.artifacts;
        result.git_patch = run.git_patch;
        result.usage = run.usage;
    }
    if result.outcome.trainable && result.traces.iter().all(|trace| trace.response_ids().is_empty()) {
        // A prompt that did not fit, say: no turn was made, so there is nothing to train on, and no policy to judge.
        (result.outcome.trainable, result.outcome.in_baseline, result.filter) = (false, false, true);
    }
    if let Some(evaluation) = &attempt.evaluation {
        result.reward = Some(evaluation.reward);
        result.resolved = evaluation.reward > 0.99;
        result.report.clone_from(&evaluation.report);
    } else if matches!(attempt.cause, Cause::Done) {
        // Eval was skipped by request: there is no reward for a baseline.
        result.outcome.in_baseline = false;
    }
    result
}

/// Takes a handler's last word, but for what is not the handler's to say: how the job ended, and a reward that nobody scored.
fn sealed(draft: &JobResult, last_word: JobResult) -> Result<JobResult, String> {
    let reward = match (draft.reward, last_word.reward) {
        (Some(_), Some(reward)) if reward.is_finite() => Some(reward),
        (Some(_), other) => return Err(format!("final_result gave the reward {other:?}, expected a finite number")),
        (None, _) => None,
    };
    Ok(JobResult {
        job_id: draft.job_id.clone(),
        trajectory_id: draft.trajectory_id.clone(),
        data_source: draft.data_source.clone(),
        group_id: draft.group_id.clone(),
        success: draft.success,
        reward,
        resolved: reward.is_some_and(|reward| reward > 0.99),
        filter: !draft.outcome.trainable,
        error: draft.error.clone(),
        critical_error: draft.critical_error,
        outcome: draft.outcome.clone(),
        attempt: draft.attempt,
        ..last_word
    })
}
