//! The pipeline's promises, with handlers that misbehave on purpose.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod shared;
mod support;

use std::{sync::atomic::Ordering, time::Duration};

use prorl_core::{CriticalError, FailureClass, JobId, Stage, Status, StopReason, status::ServiceState};
use prorl_pipeline::{CancelAnswer, JobState, Lookup, OnDisconnect, PipelineConfig, SubmitError};
use serde_json::json;
use support::{Probe, pipeline, request, small};

#[tokio::test(start_paused = true)]
async fn a_job_is_run_and_scored_and_its_sandbox_is_gone_before_eval() {
    let (pipeline, probe) = pipeline(small());
    let result = pipeline.submit(request(&json!({"reward": 1.0}))).unwrap().result().await;
    assert_eq!((result.reward, result.resolved, result.success), (Some(1.0), true, true));
    assert_eq!(result.outcome.status, Status::Completed);
    assert_eq!(result.outcome.stop_reason, StopReason::Finish);
    assert_eq!(result.image, "probe");
    assert_eq!(probe.alive_in_eval.load(Ordering::Relaxed), 0);
    assert_eq!(probe.alive(), 0);
    let counts = pipeline.counts();
    assert_eq!((counts.accepted, counts.completed, counts.active), (1, 1, 0));
    assert_eq!(pipeline.sandboxes().started, 1);
}

#[tokio::test(start_paused = true)]
async fn an_exception_of_any_kind_ends_one_job_with_its_class_and_the_worker_goes_on() {
    let (pipeline, probe) = pipeline(PipelineConfig { init_workers: 1, run_workers: 1, eval_workers: 1, ..small() });
    for stage in Stage::ALL {
        for (how, class) in [
            ("panic", FailureClass::Handler),
            ("sandbox", FailureClass::Sandbox),
            ("llm_backend", FailureClass::LlmBackend),
            ("token_integrity", FailureClass::TokenIntegrity),
        ] {
            let job = request(&json!({"at": stage.as_str(), "do": how, "reward": 1.0}));
            let result = pipeline.submit(job).unwrap().result().await;
            let outcome = &result.outcome;
            assert_eq!(outcome.status, Status::Failed, "{how} in {stage}");
            assert_eq!((outcome.failure_class, outcome.stage), (Some(class), Some(*stage)));
            assert_eq!((result.reward, result.resolved, result.filter), (None, false, true));
            assert!(!outcome.trainable && !outcome.in_baseline);
            assert_eq!(result.critical_error, Some((*stage).into()));
            assert!(result.error.is_some());
            assert_eq!(result.success, *stage == Stage::Eval);
            assert_eq!(result.report.get("fallback"), Some(&json!(stage.as_str())), "{how} in {stage}");
            assert_eq!(probe.alive(), 0);
            let next = pipeline.submit(request(&json!({"reward": 0.5}))).unwrap().result().await;
            assert_eq!(next.reward, Some(0.5));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_score_that_is_no_number_is_no_reward() {
    let (pipeline, _) = pipeline(small());
    let result = pipeline.submit(request(&json!({"reward": "nan"}))).unwrap().result().await;
    assert_eq!((result.reward, result.outcome.failure_class), (None, Some(FailureClass::Scorer)));
}

#[tokio::test(start_paused = true)]
async fn broken_callbacks_still_yield_a_whole_result() {
    let (pipeline, _) = pipeline(small());
    for callback in ["final_result", "init_exception", "run_exception", "eval_exception"] {
        for how in ["panic", "hang"] {
            let at = callback.strip_suffix("_exception");
            let job = request(&json!({"at": at, "do": at.map(|_| "sandbox"), callback: how, "reward": 1.0}));
            let result = pipeline.submit(job).unwrap().result().await;
            assert_eq!(result.outcome.failure_class, Some(FailureClass::Handler), "{callback} {how}");
            assert_eq!(result.critical_error, Some(CriticalError::FinalResult));
            assert_eq!((result.reward, result.resolved), (None, false));
            assert!(result.error.as_deref().unwrap().contains(callback), "{:?}", result.error);
            if at != Some("init") {
                assert_eq!(result.messages.len(), 1, "{callback} {how}: what there was is kept");
            }
            serde_json::to_string(&*result).unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn final_result_cannot_make_a_reward_up() {
    let (pipeline, _) = pipeline(small());
    let job = request(&json!({"at": "run", "do": "sandbox", "final_result": "forge"}));
    let result = pipeline.submit(job).unwrap().result().await;
    assert_eq!((result.reward, result.outcome.status), (None, Status::Failed));
    assert!(result.error.is_some() && result.critical_error == Some(CriticalError::Run));
    // One that was scored may be changed, but not lost.
    let job = request(&json!({"reward": 0.0, "final_result": "forge"}));
    let result = pipeline.submit(job).unwrap().result().await;
    assert_eq!((result.reward, result.resolved), (Some(1.0), true));
    let job = request(&json!({"reward": 1.0, "final_result": "lose"}));
    let result = pipeline.submit(job).unwrap().result().await;
    assert_eq!((result.reward, result.outcome.failure_class), (None, Some(FailureClass::Handler)));
    assert!(!result.outcome.in_baseline);
}

#[tokio::test(start_paused = true)]
async fn a_panic_outside_of_any_stage_ends_the_job_all_the_same() {
    let (pipeline, probe) = pipeline(small());
    let job = request(&json!({"at": "run", "do": "sandbox", "snapshot": "panics"}));
    let result = pipeline.submit(job).unwrap().result().await;
    assert_eq!(result.outcome.failure_class, Some(FailureClass::Sandbox));
    assert!(result.warnings.iter().any(|warning| warning.contains("progress panicked")), "{:?}", result.warnings);
    probe.waits_for_panics.store(true, Ordering::Relaxed);
    let result = pipeline.submit(request(&json!({"reward": 1.0}))).unwrap().result().await;
    assert_eq!((result.outcome.failure_class, result.reward), (Some(FailureClass::Internal), None));
    assert_eq!(probe.alive(), 0);
    assert!(pipeline.close().await.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn leaving_and_coming_back_under_one_id_loses_no_job() {
    let (pipeline, probe) = pipeline(PipelineConfig { init_workers: 2, run_workers: 2, ..small() });
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..4 {
        let pipeline = pipeline.clone();
        clients.spawn(async move {
            for round in 0..300 {
                let mut job = request(&json!({"reward": 1.0, "n": 1}));
                job.job_id = Some(JobId::new(format!("job-{client}-{round}")).unwrap());
                // Leaving may meet the job in the queue, on its way to a worker, or inside a stage.
                let first = pipeline.submit(job.clone()).unwrap();
                for _ in 0..round % 7 {
                    tokio::task::yield_now().await;
                }
                let left = tokio::task::spawn_blocking(move || drop(first));
                let again = pipeline.submit(job).unwrap();
                let result = again.result().await;
                assert_eq!(result.outcome.status, Status::Completed, "who waits gets no other's cancel");
                left.await.unwrap();
            }
        });
    }
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    assert!(pipeline.close().await.is_some());
    let counts = pipeline.counts();
    assert_eq!(counts.accepted, counts.completed + counts.cancelled, "each accepted job ends once: {counts:?}");
    assert_eq!((counts.active, probe.alive()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn queues_are_counted_by_the_jobs_in_them() {
    let (pipeline, probe) = pipeline(PipelineConfig { init_workers: 1, run_workers: 1, ..small() });
    let hang = || pipeline.submit(request(&json!({"at": "init", "do": "hang"}))).unwrap();
    let _jobs = [hang(), hang(), hang()];
    probe.reached(Stage::Init).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let init = pipeline.stages().init;
    assert_eq!((init.queued, init.active, init.workers), (2, 1, 1));
    pipeline.close().await;
}

#[tokio::test(start_paused = true)]
async fn the_order_of_keys_makes_no_other_request() {
    let (pipeline, _) = pipeline(small());
    let submit = |text: &str| {
        let mut job = request(&serde_json::from_str(text).unwrap());
        job.job_id = Some(JobId::new("j").unwrap());
        pipeline.submit(job).unwrap()
    };
    let first = submit(r#"{"reward": 1.0, "more": {"a": 1, "b": 2}}"#);
    let second = submit(r#"{"more": {"b": 2, "a": 1}, "reward": 1.0}"#);
    assert_eq!(first.result().await, second.result().await);
}

#[tokio::test(start_paused = true)]
async fn a_retry_is_a_fresh_attempt_and_the_budget_is_the_jobs() {
    let (pipeline, probe) = pipeline(small());
    let mut job = request(&json!({"at": "run", "do": "sandbox", "until_attempt": 3, "reward": 1.0}));
    job.retries = 2;
    let result = pipeline.submit(job).unwrap().result().await;
    assert_eq!((result.attempt, result.reward, result.messages.len()), (3, Some(1.0), 1));
    assert_eq!(probe.started.load(Ordering::Relaxed), 3);

    let mut job = request(&json!({"at": "run", "do": "sandbox", "until_attempt": 3, "reward": 1.0}));
    job.retries = 1;
    let result = pipeline.submit(job).unwrap().result().await;
    assert_eq!((result.attempt, result.outcome.failure_class), (2, Some(FailureClass::Sandbox)));

    // A panic repeats: no second attempt.
    let result = pipeline.submit(request(&json!({"at": "run", "do": "panic"}))).unwrap().result().await;
    assert_eq!(result.attempt, 1);

    // A scorer that could not run is tried again on the same rollout.
    let runs = probe.runs.load(Ordering::Relaxed);
    let result = pipeline
        .submit(request(&json!({"at": "eval", "do": "scorer", "fail_once": true, "reward": 1.0})))
        .unwrap()
        .result()
        .await;
    assert_eq!((result.reward, probe.runs.load(Ordering::Relaxed)), (Some(1.0), runs + 1));
}

#[tokio::test(start_paused = true)]
async fn time_limits_end_a_stage_and_keep_what_there_is() {
    let (pipeline, probe) = pipeline(small());
    for stage in Stage::ALL {
        let mut job = request(&json!({"at": stage.as_str(), "do": "hang"}));
        job.timeout = Some(5.0);
        let result = pipeline.submit(job).unwrap().result().await;
        assert_eq!((result.outcome.status, result.outcome.stage), (Status::Timeout, Some(*stage)));
        assert_eq!((result.reward, result.critical_error), (None, Some(CriticalError::Timeout)));
        assert!(result.timing.timeout_triggered);
        assert!((result.timing.counted_elapsed - 5.0).abs() < 0.1, "{:?}", result.timing);
        assert_eq!(result.messages.len(), usize::from(*stage != Stage::Init));
        assert_eq!(probe.alive(), 0);
    }
    let mut job = request(&json!({"at": "run", "do": "hang"}));
    job.stage_timeouts.run = Some(2.0);
    let result = pipeline.submit(job).unwrap().result().await;
    assert!((result.timing.run_time - 2.0).abs() < 0.1 && result.timing.timeout_triggered);
}

#[tokio::test(start_paused = true)]
async fn cancel_in_each_stage_and_queue_frees_everything() {
    let config = PipelineConfig { init_workers: 1, run_workers: 1, eval_workers: 1, ..small() };
    for at in [Stage::Init, Stage::Run, Stage::Eval] {
        let (pipeline, probe) = pipeline(config.clone());
        let running = pipeline.submit(request(&json!({"at": at.as_str(), "do": "hang", "reward": 1.0}))).unwrap();
        probe.reached(at).await;
        let queued = pipeline.submit(request(&json!({"reward": 1.0}))).unwrap();
        if at == Stage::Init {
            assert_eq!(pipeline.cancel(queued.id()), CancelAnswer::Found(JobState::Queued(Stage::Init)));
            let result = queued.result().await;
            assert_eq!((result.outcome.status, result.reward), (Status::Cancelled, None));
        }
        assert_eq!(pipeline.cancel(running.id()), CancelAnswer::Found(JobState::In(at)));
        let result = running.result().await;
        assert_eq!((result.outcome.status, result.outcome.stage), (Status::Cancelled, Some(at)));
        assert_eq!(result.critical_error, Some(CriticalError::Cancelled));
        assert_eq!(result.outcome.failure_class, None);
        // The id keeps its cancelled result, and the workers are free.
        assert_eq!(pipeline.cancel(running.id()), CancelAnswer::Found(JobState::Ended));
        if at != Stage::Init {
            assert_eq!(queued.result().await.reward, Some(1.0));
        }
        assert_eq!(probe.alive(), 0);
        assert_eq!(pipeline.submit(request(&json!({"reward": 1.0}))).unwrap().result().await.reward, Some(1.0));
    }
}

#[tokio::test(start_paused = true)]
async fn ids_are_idempotent() {
    let (pipeline, probe) = pipeline(small());
    let with_id = |id: &str, reward: f64| {
        let mut job = request(&json!({"at": "run", "do": "gate", "reward": reward}));
        job.job_id = Some(JobId::new(id).unwrap());
        job
    };
    let first = pipeline.submit(with_id("j", 1.0)).unwrap();
    let second = pipeline.submit(with_id("j", 1.0)).unwrap();
    assert_eq!(pipeline.submit(with_id("j", 0.0)).err(), Some(SubmitError::JobExists(JobId::new("j").unwrap())));
    probe.reached(Stage::Run).await;
    drop(first); // the other waiter keeps it alive
    probe.open_gate();
    assert_eq!(second.result().await.reward, Some(1.0));
    let again = pipeline.submit(with_id("j", 1.0)).unwrap();
    assert_eq!((again.state(), again.result().await.attempt), (JobState::Ended, 1));
    assert_eq!(pipeline.submit(with_id("j", 0.0)).err(), Some(SubmitError::JobExists(JobId::new("j").unwrap())));
    assert_eq!(probe.runs.load(Ordering::Relaxed), 1);
    assert!(matches!(pipeline.result(&JobId::new("j").unwrap()), Lookup::Found(_)));
}

#[tokio::test(start_paused = true)]
async fn the_last_waiter_leaving_cancels_and_a_new_submit_is_a_new_attempt() {
    let (pipeline, probe) = pipeline(small());
    let hang = || {
        let mut job = request(&json!({"at": "run", "do": "gate", "reward": 1.0}));
        job.job_id = Some(JobId::new("j").unwrap());
        job
    };
    let waiter = pipeline.submit(hang()).unwrap();
    probe.reached(Stage::Run).await;
    drop(waiter);
    probe.open_gate();
    let again = pipeline.submit(hang()).unwrap();
    let result = again.result().await;
    assert_eq!((result.attempt, result.reward), (2, Some(1.0)));
    assert_eq!(pipeline.counts().cancelled, 1);

    // A detached job goes on.
    let mut job = request(&json!({"at": "run", "do": "gate", "reward": 1.0}));
    job.detach = true;
    job.job_id = Some(JobId::new("d").unwrap());
    drop(pipeline.submit(job.clone()).unwrap());
    assert_eq!(pipeline.submit(job).unwrap().result().await.attempt, 1);
}

#[tokio::test(start_paused = true)]
async fn with_keep_a_disconnect_changes_nothing() {
    let (pipeline, _) = pipeline(PipelineConfig { on_disconnect: OnDisconnect::Keep, ..small() });
    let waiter = pipeline.submit(request(&json!({"reward": 1.0}))).unwrap();
    let id = waiter.id().clone();
    drop(waiter);
    let result = pipeline.attach(&id).unwrap().result().await;
    assert_eq!(result.outcome.status, Status::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_comes_first_leaves_a_tombstone_for_a_while() {
    let (pipeline, _) = pipeline(small());
    let id = JobId::new("late").unwrap();
    assert_eq!(pipeline.cancel(&id), CancelAnswer::Unknown);
    let mut job = request(&json!({"reward": 1.0}));
    job.job_id = Some(id.clone());
    assert_eq!(pipeline.submit(job.clone()).err(), Some(SubmitError::JobCancelled(id)));
    tokio::time::advance(Duration::from_secs(301)).await;
    assert_eq!(pipeline.submit(job).unwrap().result().await.reward, Some(1.0));
}

#[tokio::test(start_paused = true)]
async fn bad_submits_are_refused_and_named() {
    let (pipeline, _) = pipeline(PipelineConfig { queue_limit: 1, init_workers: 1, ..small() });
    let refused = |instance: serde_json::Value| {
        let instance = serde_json::from_value(instance).unwrap();
        pipeline.submit(prorl_core::JobRequest::new(instance)).err().unwrap()
    };
    assert_eq!(
        refused(json!({"data_source": "nope"})).to_string(),
        "unknown data_source \"nope\", expected one of other-name, probe"
    );
    assert_eq!(refused(json!({})).to_string(), "unknown data_source \"swebench\", expected one of other-name, probe");
    assert!(matches!(refused(json!({"data_source": 5})), SubmitError::InvalidInstance(_)));
    assert!(matches!(refused(json!({"data_source": "probe", "limits": 5})), SubmitError::InvalidInstance(_)));
    assert!(matches!(refused(json!({"data_source": "probe", "refuse": true})), SubmitError::InvalidInstance(_)));
    let mut job = request(&json!({}));
    job.timeout = Some(-1.0);
    assert!(matches!(pipeline.submit(job), Err(SubmitError::Malformed(_))));

    let _running = pipeline.submit(request(&json!({"at": "init", "do": "hang"}))).unwrap();
    let (_queued, full) = loop {
        // The dispatcher takes the first job off the queue in its own time.
        match pipeline.submit(request(&json!({}))) {
            Ok(queued) => break (queued, pipeline.submit(request(&json!({})))),
            Err(SubmitError::QueueFull { limit: 1 }) => tokio::task::yield_now().await,
            Err(other) => panic!("{other}"),
        }
    };
    assert!(matches!(full, Err(SubmitError::QueueFull { limit: 1 })));
    pipeline.close().await;
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_backend_costs_no_worker_and_no_time() {
    let (pipeline, probe) = pipeline(PipelineConfig { run_workers: 1, ..small() });
    let mut job = request(&json!({"at": "run", "do": "park", "reward": 1.0}));
    job.timeout = Some(5.0);
    let parked = pipeline.submit(job).unwrap();
    probe.reached(Stage::Run).await;
    // The only run worker is free for others meanwhile.
    assert_eq!(pipeline.submit(request(&json!({"reward": 0.0}))).unwrap().result().await.reward, Some(0.0));
    tokio::time::advance(Duration::from_hours(1)).await;
    let stuck = pipeline.stuck(Duration::from_secs(30), 10);
    assert_eq!((stuck[0].waiting_for.as_str(), stuck[0].stage.as_str()), ("llm backend", "run"));
    assert!(stuck[0].seconds >= 3600.0);
    probe.open_gate();
    let result = parked.result().await;
    assert_eq!((result.reward, result.timing.timeout_triggered), (Some(1.0), false));
    assert!(result.timing.counted_elapsed < 1.0, "{:?}", result.timing);
}

#[tokio::test(start_paused = true)]
async fn stop_ends_every_job_and_start_works_again() {
    let (pipeline, probe) = pipeline(PipelineConfig { init_workers: 2, run_workers: 2, ..small() });
    let jobs: Vec<_> =
        (0..10).map(|_| pipeline.submit(request(&json!({"at": "run", "do": "hang"}))).unwrap()).collect();
    probe.reached(Stage::Run).await;
    let report = pipeline.stop().await.unwrap();
    assert_eq!(report.cancelled, 10);
    assert!(report.sandboxes_killed >= 1);
    assert_eq!((probe.alive(), pipeline.state()), (0, ServiceState::Stopped));
    for job in &jobs {
        assert_eq!(job.result().await.outcome.status, Status::Cancelled);
    }
    assert!(pipeline.stop().await.is_none());
    assert_eq!(pipeline.submit(request(&json!({}))).err(), Some(SubmitError::NotRunning));
    assert!(pipeline.start() && !pipeline.start());
    assert_eq!(pipeline.submit(request(&json!({"reward": 1.0}))).unwrap().result().await.reward, Some(1.0));
    pipeline.close().await;
}

#[tokio::test]
async fn two_hundred_jobs_share_few_workers_and_each_ends_once() {
    let (pipeline, probe) = pipeline(PipelineConfig { init_workers: 16, run_workers: 16, eval_workers: 4, ..small() });
    let jobs: Vec<_> = (0..200)
        .map(|idx| pipeline.submit(request(&json!({"reward": f64::from(idx % 2), "n": idx}))).unwrap())
        .collect();
    for (idx, job) in jobs.iter().enumerate() {
        assert_eq!(job.result().await.reward, Some((idx % 2) as f64));
    }
    assert!(probe.most_runs.load(Ordering::Relaxed) <= 16);
    let counts = pipeline.counts();
    assert_eq!((counts.accepted, counts.completed, counts.active), (200, 200, 0));
    assert_eq!((probe.alive(), pipeline.sandboxes().active), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn prepared_jobs_do_not_pile_up_before_run() {
    let (pipeline, probe) = pipeline(PipelineConfig { init_workers: 2, run_workers: 1, ..small() });
    let jobs: Vec<_> = (0..50)
        .map(|n| pipeline.submit(request(&json!({"at": "run", "do": "gate", "reward": 1.0, "n": n}))).unwrap())
        .collect();
    probe.reached(Stage::Run).await;
    // Everything that can go on by itself does so before paused time moves.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(probe.alive(), 3, "one in run and two ahead of it");
    pipeline.resize(Stage::Run, 4);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(probe.alive(), 8, "four in run and four ahead of it");
    probe.open_gate();
    for job in &jobs {
        assert_eq!(job.result().await.reward, Some(1.0));
    }
    assert_eq!(probe.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_will_not_go_is_said() {
    let (pipeline, _) = pipeline(small());
    let result = pipeline.submit(request(&json!({"reward": 1.0, "close": "stays"}))).unwrap().result().await;
    assert_eq!(result.reward, Some(1.0));
    assert!(result.warnings.iter().any(|warning| warning.contains("not proven gone: pid 7")), "{:?}", result.warnings);
}

#[tokio::test(start_paused = true)]
async fn eval_can_be_skipped_where_the_server_allows_it() {
    let (pipeline, _) = pipeline(PipelineConfig { allow_skip_eval: true, ..small() });
    let result = pipeline.submit(request(&json!({"reward": 1.0, "skip_eval": true}))).unwrap().result().await;
    assert_eq!((result.reward, result.outcome.status), (None, Status::Completed));
    assert!(!result.outcome.in_baseline);
    let (pipeline, _) = support::pipeline(small());
    let result = pipeline.submit(request(&json!({"reward": 1.0, "skip_eval": true}))).unwrap().result().await;
    assert_eq!(result.reward, Some(1.0));
}

#[test]
fn names_are_registered_once() {
    let mut registry = prorl_pipeline::Registry::default();
    registry.register(Probe::new()).unwrap();
    assert_eq!(
        registry.register(Probe::new()).unwrap_err().to_string(),
        "handler name \"probe\" is registered already"
    );
}
