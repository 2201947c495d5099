//! Jobs: submit, wait, look, cancel.

use std::{sync::atomic::Ordering, time::Duration};

use futures_util::future::join_all;
use prorl_core::{JobResult, request::InputIds};
use prorl_pipeline::PipelineConfig;
use prorl_server::ServerConfig;
use serde_json::{Value, json};

use crate::support::{Service, job, refused, small};

#[tokio::test]
async fn process_answers_the_whole_result() {
    let service = Service::start().await;
    let (status, body) = service.post("/process", job("j1", json!({"reward": 1.0, "instance_id": 7}))).await;
    assert_eq!(status, 200);
    let result: JobResult = serde_json::from_value(body.clone()).unwrap();
    assert_eq!((result.job_id.as_str(), result.reward, result.resolved), ("j1", Some(1.0), true));
    assert_eq!((result.instance_id.as_deref(), result.messages.len(), result.traces.len()), (Some("7"), 1, 1));
    let fields = body.as_object().unwrap();
    for field in ["error", "critical_error", "group_id", "git_patch", "tools", "timing", "usage", "attempt", "warnings"]
    {
        assert!(fields.contains_key(field), "{field}");
    }
    // Without an id one is made.
    let (_, body) = service.post("/process", json!({"instance": {"data_source": "probe"}})).await;
    assert!(body["job_id"].as_str().unwrap().starts_with("job-"));
    service.end().await;
}

#[tokio::test]
async fn a_broken_job_has_no_conversation_unless_it_was_asked_for() {
    let service = Service::start().await;
    let mut body = job("j1", json!({"at": "run", "do": "sandbox"}));
    body["retries"] = 0.into();
    let (status, result) = service.post("/process", body.clone()).await;
    assert_eq!((status, &result["outcome"]["failure_class"]), (200, &json!("sandbox")));
    assert_eq!((&result["messages"], &result["traces"], &result["reward"]), (&json!([]), &json!([]), &json!(null)));
    assert_eq!((&result["error"], &result["filter"]), (&json!("on purpose"), &json!(true)));
    // The other way of looking keeps what there was.
    assert_eq!(service.ended("j1").await["messages"].as_array().unwrap().len(), 1);

    body["job_id"] = "j2".into();
    body["include"] = json!({"partial": true});
    let (_, result) = service.post("/process", body).await;
    assert_eq!((result["messages"].as_array().unwrap().len(), result["traces"].as_array().unwrap().len()), (1, 1));

    let (_, result) = service.post("/process", job("j3", json!({"at": "eval", "do": "panic"}))).await;
    assert_eq!(result["outcome"]["failure_class"], "handler");
    // A job that ran out of time is no broken one.
    let mut body = job("j4", json!({"at": "run", "do": "hang"}));
    body["timeout"] = 0.05.into();
    let (_, result) = service.post("/process", body).await;
    assert_eq!((&result["outcome"]["status"], result["messages"].as_array().unwrap().len()), (&json!("timeout"), 1));
    service.end().await;
}

#[tokio::test]
async fn ids_are_idempotent() {
    let service = Service::start().await;
    let body = job("j1", json!({"at": "run", "do": "gate", "reward": 1.0}));
    let twice = async { tokio::join!(service.post("/process", body.clone()), service.post("/process", body.clone())) };
    let opening = async {
        service.probe.reached().await;
        service.probe.open_gate(1);
    };
    let ((first, second), ()) = tokio::join!(twice, opening);
    assert_eq!((first.0, &first.1), (200, &second.1));
    assert_eq!(service.post("/process", body.clone()).await, first);
    assert_eq!(service.post("/v1/jobs", body.clone()).await, (202, json!({"job_id": "j1", "state": "ended"})));
    assert_eq!(service.pipeline.counts().accepted, 1);
    refused(&service.post("/process", job("j1", json!({"reward": 0.0}))).await, 409, "job_exists");
    service.end().await;
}

#[tokio::test]
async fn submit_never_waits_and_the_result_is_there_for_the_asking() {
    let service = Service::start().await;
    let body = job("j1", json!({"at": "run", "do": "gate", "reward": 1.0}));
    let (status, submitted) = service.post("/v1/jobs", body).await;
    assert_eq!((status, &submitted["job_id"]), (202, &json!("j1")));
    assert!(submitted["state"].is_string());
    service.probe.reached().await;
    for query in ["", "?wait=0", "?wait=0.01"] {
        let look = service.get(&format!("/v1/jobs/j1{query}")).await;
        assert_eq!(look, (200, json!({"job_id": "j1", "state": "run", "result": null})));
    }
    let (result, ()) = tokio::join!(service.ended("j1"), async { service.probe.open_gate(1) });
    assert_eq!(result["reward"], 1.0);
    assert_eq!(service.get("/v1/jobs/j1").await.1["result"], result);

    refused(&service.get("/v1/jobs/unknown").await, 404, "job_unknown");
    for (path, name) in [
        ("/v1/jobs/..%2Fx", "job_id: "),
        ("/v1/jobs/j1?wait=x", "query: wait: "),
        ("/v1/jobs/j1?wait=-1", "query: wait: "),
        ("/v1/jobs/j1?wait=NaN", "query: wait: "),
        ("/v1/jobs/j1?wiat=1", "query: "),
    ] {
        let detail = refused(&service.get(path).await, 422, "malformed");
        assert!(detail.starts_with(name), "{path}: {detail}");
    }
    refused(&service.get("/v1/jobs/%ff").await, 422, "malformed");
    service.end().await;
}

#[tokio::test]
async fn a_result_that_had_to_make_room_is_told_from_one_that_never_was() {
    let service = Service::with(ServerConfig::default(), PipelineConfig { results_bytes: 1, ..small() }).await;
    for id in ["j1", "j2"] {
        service.post("/process", job(id, json!({}))).await;
    }
    refused(&service.get("/v1/jobs/j1").await, 410, "result_dropped");
    assert_eq!(service.get("/v1/jobs/j2").await.0, 200);
    service.end().await;
}

#[tokio::test]
async fn cancel_answers_before_the_job_ends() {
    let service = Service::start().await;
    for (id, at) in [("a", "init"), ("b", "run"), ("c", "eval")] {
        let body = job(id, json!({"at": at, "do": "hang"}));
        let (waited, cancelled) = tokio::join!(service.post("/process", body.clone()), async {
            service.probe.reached().await;
            if at == "init" {
                service.delete(&format!("/v1/jobs/{id}")).await
            } else {
                service.post("/cancel", json!({"job_id": id})).await
            }
        });
        let expected = json!({"status": format!("Cancel requested for job {id}"), "state": at});
        assert_eq!(cancelled, (200, expected));
        assert_eq!(waited.1["outcome"]["status"], "cancelled");
        assert_eq!(waited.1["critical_error"], "cancelled");
        service.probe.left().await;
        // An ended job answers too, and its id keeps its cancelled result.
        assert_eq!(service.post("/cancel", json!({"job_id": id})).await.1["state"], "ended");
        assert_eq!(service.post("/process", body).await, waited);
    }
    service.end().await;
}

#[tokio::test]
async fn an_unknown_id_is_refused_after_its_cancel() {
    let service = Service::start().await;
    refused(&service.post("/cancel", json!({"job_id": "late"})).await, 404, "job_unknown");
    refused(&service.post("/process", job("late", json!({}))).await, 409, "job_cancelled");
    refused(&service.post("/v1/jobs", job("late", json!({}))).await, 409, "job_cancelled");
    service.end().await;
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_back() {
    let config = PipelineConfig { init_workers: 1, queue_limit: 1, ..small() };
    let service = Service::with(ServerConfig::default(), config).await;
    service.post("/v1/jobs", job("j1", json!({"at": "init", "do": "hang"}))).await;
    service.probe.reached().await;
    assert_eq!(service.post("/v1/jobs", job("j2", json!({}))).await.0, 202);
    let call = service.http.post(format!("{}/process", service.url)).json(&job("j3", json!({})));
    let response = call.send().await.unwrap();
    assert_eq!(response.headers()["retry-after"], "5");
    let answer = (response.status().as_u16(), response.json::<Value>().await.unwrap());
    refused(&answer, 429, "queue_full");
    service.end().await;
}

#[tokio::test]
async fn the_servers_default_for_input_ids_reaches_the_handler() {
    let config = ServerConfig { default_input_ids: InputIds::None, ..ServerConfig::default() };
    let service = Service::with(config, small()).await;
    let (_, result) = service.post("/process", job("j1", json!({}))).await;
    assert_eq!(result["report"]["input_ids"], "none");
    let mut body = job("j2", json!({}));
    body["include"] = json!({"input_ids": "full"});
    assert_eq!(service.post("/process", body).await.1["report"]["input_ids"], "full");
    service.end().await;
}

#[tokio::test]
async fn a_server_that_may_not_wait_refuses_while_there_is_no_backend() {
    let config = ServerConfig { wait_for_llm: Some(Duration::ZERO), ..ServerConfig::default() };
    let service = Service::with(config, small()).await;
    for path in ["/process", "/v1/jobs"] {
        refused(&service.post(path, job("j1", json!({}))).await, 503, "no_llm_server");
    }
    let nobody = json!({"address": "http://127.0.0.1:9", "kind": "generate", "probe": false});
    assert_eq!(service.post("/add_llm_server", nobody).await.0, 200);
    let done = service.post("/process", job("j1", json!({"reward": 1.0}))).await;
    assert_eq!(done.1["reward"], 1.0);
    // A job that has ended is answered all the same.
    service.post("/clear_llm_server", None).await;
    assert_eq!(service.post("/process", job("j1", json!({"reward": 1.0}))).await, done);
    service.end().await;
}

#[tokio::test]
async fn two_hundred_jobs_at_once_all_end() {
    let config = PipelineConfig { run_workers: 16, ..small() };
    let service = Service::with(ServerConfig::default(), config).await;
    let jobs = (0..200).map(|idx| {
        let body = job(&format!("j{idx}"), json!({"at": "run", "do": "gate", "reward": f64::from(idx % 2)}));
        service.post("/process", body)
    });
    let all = async {
        for _ in 0..200 {
            service.probe.reached().await;
            service.probe.open_gate(1);
        }
    };
    let (answers, ()) = tokio::join!(join_all(jobs), all);
    for (idx, (status, result)) in (0..200).zip(&answers) {
        assert_eq!((*status, &result["job_id"]), (200, &json!(format!("j{idx}"))));
        assert_eq!(result["reward"], json!(f64::from(idx % 2)));
    }
    assert!(service.probe.most_active.load(Ordering::SeqCst) <= 16);
    let counts = service.pipeline.counts();
    assert_eq!((counts.accepted, counts.completed, counts.active), (200, 200, 0));
    service.end().await;
}
