//! Takes one job through its attempts to its one result.

use std::{
    any::Any,
    sync::{Arc, atomic::AtomicU32},
    time::Duration,
};

use prorl_core::{Deadline, FailureClass, Stage};
use serde_json::Value;
use tokio::{task::JoinSet, time::Instant};
use tracing::Instrument;

use crate::{
    AgentHandler, JobContext, JobState, PausableTimer, Permit, StageError,
    conclude::{Attempt, Cause, Clock, conclude},
    job::Job,
    pipeline::{InitPlaces, Inner},
    shared::{Joined, Lead, Part},
};

/// How long a callback that was told to end may take to reach its next await.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// How long closing a sandbox may take beyond its grace.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

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
    let (places, part) = take_part(inner, context, places).await?;
    let ahead = places.ahead;
    // The lead stays here: a callback that must be left behind takes none of it along.
    let (lead, shared) = match part {
        Some(Part::Lead(lead)) => (Some(lead), None),
        Some(Part::Follow(shared)) => (None, Some(shared)),
        None => (None, None),
    };
    let work = lead.as_ref().map(Lead::work);
    let made = in_stage(context, Stage::Init, places.worker, clock, {
        let (handler, context) = (Arc::clone(handler), Arc::clone(context));
        async move {
            let shared = match work {
                Some(work) => Some(work.make(&*handler, &context).await?),
                None => shared,
            };
            if let Some(shared) = shared {
                context.start_from(shared);
            }
            handler.init(&context).await
        }
    });
    let made = made.await;
    match (lead, &made) {
        (Some(lead), Err(Cause::TimedOut(_))) => lead.ran_out(),
        (lead, _) => drop(lead),
    }
    context.drop_shared();
    let prepared = made.inspect_err(|cause| {
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
    context.job().leave_group();
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

/// Tells a job of a group that shares its part. Where that is to wait for another's work, it holds no places meanwhile.
async fn take_part(
    inner: &Inner,
    context: &JobContext,
    places: InitPlaces,
) -> Result<(InitPlaces, Option<Part>), Cause> {
    let Some(group) = context.job().group() else { return Ok((places, None)) };
    let failed = |error| Cause::Failed { stage: Stage::Init, error };
    // The clock stands still until init begins, so that this is what the job will have whenever it is given the lead.
    let now = context.used();
    let time = stage_deadline(context, Stage::Init, now).remaining(now);
    let mut wait = match group.join(time).map_err(failed)? {
        Joined::Now(part) => return Ok((places, Some(part))),
        Joined::Later(wait) => wait,
    };
    let places = places.give_back();
    context.job().enter(JobState::Waiting(Stage::Init), Some("shared init"));
    let word = tokio::select! {
        biased;
        () = context.stop().cancelled() => return Err(Cause::Cancelled(Stage::Init)),
        word = wait.word() => word,
    };
    let part = word.map_err(failed)?;
    let places = place(context, Stage::Init, InitPlaces::acquire_at(&inner.pools, places)).await?;
    Ok((places, Some(part)))
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
    let timer = context.timer();
    let began = timer.used();
    let deadline = stage_deadline(context, stage, began);
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

/// Returns when a stage that begins now must have ended.
fn stage_deadline(context: &JobContext, stage: Stage, now: Duration) -> Deadline {
    let limits = context.request().stage_timeouts;
    let limit = match stage {
        Stage::Init => limits.init,
        Stage::Run => limits.run,
        Stage::Eval => limits.eval,
    };
    context.timer().deadline().child(now, limit.map(Duration::from_secs_f64))
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

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
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
pub(crate) async fn callback<T: Send + 'static>(
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
