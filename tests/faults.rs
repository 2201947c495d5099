//! What breaks on purpose: each ends with its class, a null reward, and a server that goes on.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use support::{Serve, descendants, finish, gone, job_calls, math, mock, python, until};
use tokio::time::Instant;

/// Checks a failed result from end to end.
fn assert_failed(result: &Value, class: &str, stage: &str) {
    let outcome = &result["outcome"];
    assert_eq!((&outcome["status"], &outcome["failure_class"]), (&json!("failed"), &json!(class)), "{result}");
    assert_eq!((&outcome["stage"], &result["critical_error"]), (&json!(stage), &json!(stage)));
    assert_eq!(
        (&result["reward"], &result["resolved"], &result["filter"]),
        (&Value::Null, &json!(false), &json!(true))
    );
    assert_eq!((&outcome["trainable"], &outcome["in_baseline"]), (&json!(false), &json!(false)));
    assert!(result["error"].as_str().is_some_and(|error| !error.is_empty()));
    for field in ["job_id", "trajectory_id", "messages", "traces", "tools", "report", "artifacts", "timing", "usage"] {
        assert!(result.get(field).is_some(), "{field} is absent");
    }
}

#[tokio::test]
async fn a_backend_that_misbehaves_fails_its_job_by_name_and_the_next_one_runs() {
    let mut tasks = vec![json!({"match": "good", "turns": [finish("4")]})];
    let cases = [
        ("five hundred", json!({"status": 500, "body": "oops"}), "llm_backend"),
        ("garbage", json!({"garbage": true}), "llm_backend"),
        ("hang up", json!({"cut": true}), "llm_backend"),
        ("say nothing", json!({"hang": true}), "llm_backend"),
        ("not a number", json!({"text": "hi", "logprobs": "nan"}), "token_integrity"),
        ("none at all", json!({"text": "hi", "logprobs": "missing"}), "token_integrity"),
        ("too few", json!({"text": "hi", "logprobs": "short"}), "token_integrity"),
        ("above zero", json!({"text": "hi", "logprobs": "positive"}), "token_integrity"),
    ];
    for (name, turn, _) in &cases {
        tasks.push(json!({"match": name, "turns": [turn]}));
        tasks.push(json!({"match": format!("late {name}"), "turns": [python("1"), turn]}));
    }
    let mock = mock(&json!({"tasks": tasks})).await;
    let serve = Serve::with_mock(&["--max-run-workers", "1", "--llm-timeout", "1"], &mock).await;
    for (name, _, class) in &cases {
        for (prompt, kept) in [((*name).to_owned(), 0), (format!("late {name}"), 1)] {
            let mut request = math(&prompt, "4");
            request["include"] = json!({"partial": true});
            let (status, result) = serve.post("/process", &request).await;
            assert_eq!(status, 200);
            assert_failed(&result, class, "run");
            let turns = result["messages"].as_array().unwrap().iter().filter(|m| m["role"] == "assistant").count();
            assert_eq!(turns, kept, "{prompt}: what there was is kept");
            let (_, good) = serve.post("/process", &math("good", "4")).await;
            assert_eq!(good["reward"], 1.0, "after {prompt}: {good}");
        }
    }
    // Without `partial`, the original's clients get empty lists and retry.
    let (_, result) = serve.post("/process", &math("late five hundred", "4")).await;
    assert_eq!((&result["messages"], &result["traces"]), (&json!([]), &json!([])));
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_job_that_ends_in_init_has_a_whole_result_too() {
    let mock = mock(&json!({"default": {"turns": [finish("4")]}})).await;
    let serve = Serve::with_mock(&["--max-init-workers", "1"], &mock).await;
    let good = serve.post("/process", &math("good", "4")).await.1;
    let mut request = math("good", "4");
    request["stage_timeouts"] = json!({"init": 0.000_001});
    let (status, result) = serve.post("/process", &request).await;
    assert_eq!((status, &result["outcome"]["status"]), (200, &json!("timeout")), "{result}");
    assert_eq!((&result["outcome"]["stage"], &result["critical_error"]), (&json!("init"), &json!("timeout")));
    assert_eq!((&result["reward"], &result["filter"]), (&Value::Null, &json!(true)));
    let names = |result: &Value| result.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&result), names(&good), "every field is there, whatever happened");
    until("the sandboxes' end", || async { descendants(serve.pid()).is_empty() }).await;
    assert_eq!(serve.post("/process", &math("good", "4")).await.1["reward"], 1.0);
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_sandbox_that_dies_fails_its_job_by_name() {
    let mock = mock(&json!({"tasks": [
        {"match": "die", "turns": [python("import time\nprint('up', flush=True)\ntime.sleep(60)")]},
        {"match": "good", "turns": [finish("4")]},
    ]}))
    .await;
    let serve = Serve::with_mock(&["--max-run-workers", "1"], &mock).await;
    let mut request = math("die", "4");
    request["retries"] = json!(0);
    let killed = async {
        until("the cell", || async { job_calls(&mock).len() == 1 && descendants(serve.pid()).len() >= 3 }).await;
        for (pid, _) in descendants(serve.pid()) {
            // One may be gone already: the end of process 1 ends the others.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        }
    };
    let ((_, result), ()) = tokio::join!(serve.post("/process", &request), killed);
    assert_failed(&result, "sandbox", "run");
    assert_eq!(serve.post("/process", &math("good", "4")).await.1["reward"], 1.0);
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn killing_the_server_leaves_no_sandbox() {
    let mock = mock(&json!({"default": {"turns": [python(
        "import subprocess, time\nsubprocess.Popen(['setsid', 'sleep', '300'])\nprint('up', flush=True)\ntime.sleep(300)",
    )]}}))
    .await;
    let mut serve = Serve::with_mock(&[], &mock).await;
    for idx in 0..8 {
        let (status, _) = serve.post("/v1/jobs", &math(&format!("job {idx}"), "4")).await;
        assert_eq!(status, 202);
    }
    // Eight sandboxes, each with its guest, an outer process, Python and a child that left its session.
    until("the sandboxes", || async { descendants(serve.pid()).len() >= 8 * 4 }).await;
    let ours = descendants(serve.pid());
    serve.child.kill().await.unwrap();
    gone(&ours, Duration::from_secs(2)).await;
    // The keeper removes the files once it has seen the last process end.
    until("the folder's end", || async { std::fs::read_dir(serve.temp.path()).unwrap().next().is_none() }).await;
    serve.nothing_left();
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn cancel_is_answered_at_once_and_frees_the_sandbox_and_the_backend() {
    let mock = mock(&json!({"tasks": [
        {"match": "in a call", "turns": [{"hang": true}]},
        {"match": "in a tool", "turns": [python("import time\ntime.sleep(300)")]},
        {"match": "good", "turns": [finish("4")]},
    ]}))
    .await;
    let serve = Serve::with_mock(&["--max-init-workers", "2", "--max-run-workers", "1"], &mock).await;
    let mut quickest = Duration::MAX;
    for (prompt, processes) in [("in a call", 2), ("in a tool", 3), ("in a call", 2), ("in a tool", 3)] {
        let (_, job) = serve.post("/v1/jobs", &math(prompt, "4")).await;
        let job_id = job["job_id"].as_str().unwrap().to_owned();
        let call_of = |job_id: &str| job_calls(&mock).into_iter().find(|c| c.session_id.as_deref() == Some(job_id));
        until("the call", || async { call_of(&job_id).is_some() && descendants(serve.pid()).len() >= processes }).await;
        let (_, behind) = serve.post("/v1/jobs", &math("good", "4")).await;
        let began = Instant::now();
        let (status, answer) = serve.post("/cancel", &json!({"job_id": job_id})).await;
        quickest = quickest.min(began.elapsed());
        assert_eq!((status, &answer["status"]), (200, &json!(format!("Cancel requested for job {job_id}"))));
        let (_, ended) = serve.get(&format!("/v1/jobs/{job_id}?wait=10")).await;
        let result = &ended["result"];
        assert_eq!((&result["outcome"]["status"], &result["reward"]), (&json!("cancelled"), &Value::Null), "{ended}");
        assert_eq!(result["critical_error"], "cancelled");
        if prompt == "in a call" {
            until("the backend's notice", || async { call_of(&job_id).unwrap().cancelled }).await;
        }
        // Its worker runs the job behind it.
        let behind = behind["job_id"].as_str().unwrap();
        let (_, ended) = serve.get(&format!("/v1/jobs/{behind}?wait=10")).await;
        assert_eq!(ended["result"]["reward"], 1.0, "{ended}");
        until("the sandboxes' end", || async { descendants(serve.pid()).is_empty() }).await;
    }
    assert!(quickest < Duration::from_millis(100), "cancel answered after {quickest:?}");
    // Ended jobs answer too; unknown ones leave a tombstone.
    assert_eq!(serve.post("/cancel", &json!({"job_id": "never-seen"})).await.0, 404);
    let mut late = math("good", "4");
    late["job_id"] = json!("never-seen");
    let (status, refused) = serve.post("/process", &late).await;
    assert_eq!((status, &refused["code"]), (409, &json!("job_cancelled")));
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn jobs_in_every_queue_can_be_cancelled() {
    let mock = mock(&json!({"tasks": [{"match": "job", "turns": [{"hang": true}]}]})).await;
    let serve = Serve::with_mock(&["--max-init-workers", "1", "--max-run-workers", "1"], &mock).await;
    let mut jobs = Vec::new();
    for idx in 0..30 {
        let (_, job) = serve.post("/v1/jobs", &math(&format!("job {idx}"), "4")).await;
        jobs.push(job["job_id"].as_str().unwrap().to_owned());
    }
    let mut took = Vec::new();
    for job in &jobs {
        let began = Instant::now();
        assert_eq!(serve.post("/cancel", &json!({"job_id": job})).await.0, 200);
        took.push(began.elapsed());
    }
    // The middle one: a busy machine may hold up a few.
    took.sort();
    assert!(took[jobs.len() / 2] < Duration::from_millis(100), "cancels answered after {took:?}");
    for job in &jobs {
        let (_, ended) = serve.get(&format!("/v1/jobs/{job}?wait=10")).await;
        assert_eq!(ended["result"]["outcome"]["status"], "cancelled", "{ended}");
    }
    until("the sandboxes' end", || async { descendants(serve.pid()).is_empty() }).await;
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn stop_ends_everything_and_start_works_again() {
    let mock = mock(&json!({"tasks": [{"match": "good", "turns": [finish("4")]},
        {"match": "stalled task", "turns": [{"hang": true}]}]}))
    .await;
    let serve = Serve::with_mock(&["--manual-start"], &mock).await;
    assert_eq!(serve.get("/readyz").await.0, 503);
    let (status, refused) = serve.post("/process", &math("good", "4")).await;
    assert_eq!((status, &refused["code"]), (503, &json!("not_running")));
    assert_eq!(serve.post("/start", &json!(null)).await.1, json!({"status": "Server started successfully"}));
    assert_eq!(serve.post("/start", &json!(null)).await.0, 400);
    for idx in 0..4 {
        serve.post("/v1/jobs", &math(&format!("stalled task {idx}"), "4")).await;
    }
    until("the calls", || async { job_calls(&mock).len() == 4 }).await;
    let (status, stopped) = serve.post("/stop", &json!(null)).await;
    assert_eq!((status, &stopped["cancelled"], &stopped["sandboxes_killed"]), (200, &json!(4), &json!(4)));
    assert!(descendants(serve.pid()).is_empty());
    assert_eq!(serve.post("/stop", &json!(null)).await.0, 503);
    assert_eq!(serve.post("/start", &json!(null)).await.0, 200);
    assert_eq!(serve.post("/process", &math("good", "4")).await.1["reward"], 1.0);
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_job_waits_for_its_first_backend_and_moves_when_one_dies() {
    let script = json!({"tasks": [{"match": "slow", "turns": [{"text": python("1 + 1"), "latency": 0.3},
        {"text": finish("4"), "latency": 0.3}]}]});
    let (first, second) = (mock(&script).await, mock(&script).await);
    let serve = Serve::start(&[]).await;
    let (_, job) = serve.post("/v1/jobs", &math("slow", "4")).await;
    until("the wait", || async {
        let (_, status) = serve.get("/status").await;
        status["stuck"][0]["waiting_for"] == "llm backend"
    })
    .await;
    let (_, status) = serve.get("/status").await;
    assert_eq!(status["active_run"], 0, "a job that waits holds no run worker");
    let (code, _) = serve.post("/add_llm_server", &json!({"address": first.address()})).await;
    assert_eq!(code, 200);
    until("the first call", || async { !job_calls(&first).is_empty() }).await;
    first.shutdown().await.unwrap();
    serve.post("/add_llm_server", &json!({"address": second.address()})).await;
    let job_id = job["job_id"].as_str().unwrap();
    let (_, ended) = serve.get(&format!("/v1/jobs/{job_id}?wait=30")).await;
    assert_eq!(ended["result"]["reward"], 1.0, "{ended}");
    prorl_llm::verify::verify_result(&serde_json::from_value(ended["result"].clone()).unwrap()).unwrap();
    serve.stop().await;
    second.shutdown().await.unwrap();
}
