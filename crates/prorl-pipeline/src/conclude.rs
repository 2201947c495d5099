//! Makes a job's one result out of what its last attempt brought.

use std::{any::Any, sync::Arc, time::Duration};

use prorl_core::{CriticalError, FailureClass, JobResult, Outcome, Stage, Status, Timing};
use tokio::time::Instant;

use crate::{
    Evaluation, JobContext, Prepared, RunOutput, StageError,
    drive::{callback, panic_text},
    job::Job,
    pipeline::Inner,
};

/// How an attempt ended.
pub(crate) enum Cause {
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
pub(crate) struct Attempt {
    pub(crate) cause: Cause,
    pub(crate) prepared: Option<Arc<Prepared>>,
    pub(crate) run: Option<Arc<RunOutput>>,
    /// Whether the run stage ended by itself.
    pub(crate) ran: bool,
    pub(crate) evaluation: Option<Evaluation>,
}

/// Seconds by stage, over all attempts.
#[derive(Default)]
pub(crate) struct Clock {
    pub(crate) init: Duration,
    pub(crate) run: Duration,
    pub(crate) eval: Duration,
    pub(crate) others: Duration,
}

impl Clock {
    pub(crate) fn of(&mut self, stage: Stage) -> &mut Duration {
        match stage {
            Stage::Init => &mut self.init,
            Stage::Run => &mut self.run,
            Stage::Eval => &mut self.eval,
        }
    }
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

/// Makes the result: whole, whatever happened.
pub(crate) async fn conclude(
    inner: &Inner,
    context: &Arc<JobContext>,
    mut attempt: Attempt,
    mut clock: Clock,
) -> JobResult {
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
