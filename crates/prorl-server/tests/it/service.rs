//! Start, stop, status, sizes, health, and what is not there.

use prorl_core::status::ServiceStatus;
use prorl_server::ServerConfig;
use serde_json::json;

use crate::support::{Service, job, refused, small};

#[tokio::test]
async fn stop_ends_every_job_and_start_begins_again() {
    let service = Service::start().await;
    assert_eq!(service.get("/readyz").await, (200, json!({"status": "ok"})));
    refused(&service.post("/start", None).await, 400, "already_running");

    let body = job("j1", json!({"at": "run", "do": "hang"}));
    let (waited, stopped) = tokio::join!(service.post("/process", body), async {
        service.probe.reached().await;
        service.post("/stop", None).await
    });
    assert_eq!((waited.0, &waited.1["outcome"]["status"]), (200, &json!("cancelled")));
    let expected = json!({"status": "Server stopped successfully", "cancelled": 1, "sandboxes_killed": 0});
    assert_eq!(stopped, (200, expected));

    refused(&service.post("/stop", None).await, 503, "not_running");
    refused(&service.get("/readyz").await, 503, "not_running");
    assert_eq!(service.get("/healthz").await, (200, json!({"status": "ok"})));
    refused(&service.post("/process", job("j2", json!({}))).await, 503, "not_running");
    refused(&service.post("/v1/jobs", job("j2", json!({}))).await, 503, "not_running");
    assert_eq!(service.get("/status").await.1["state"], "stopped");

    assert_eq!(service.post("/start", json!({})).await, (200, json!({"status": "Server started successfully"})));
    assert_eq!(service.post("/process", job("j2", json!({"reward": 1.0}))).await.1["reward"], 1.0);
    service.end().await;
}

#[tokio::test]
async fn a_stop_goes_on_when_the_client_leaves() {
    let service = Service::start().await;
    service.post("/v1/jobs", job("j1", json!({"at": "run", "do": "hang", "final": "gate"}))).await;
    service.probe.reached().await;
    let client = service.send_raw("/stop", &json!({})).await;
    service.probe.left().await;
    drop(client);
    for _ in 0..10 {
        assert_eq!(service.get("/status").await.1["state"], "draining");
    }
    refused(&service.get("/readyz").await, 503, "not_running");
    refused(&service.post("/start", None).await, 400, "already_running");
    service.probe.open_gate(1);
    while service.get("/status").await.1["state"] != "stopped" {}
    service.end().await;
}

#[tokio::test]
async fn status_is_whole_and_the_flat_fields_are_the_same_numbers() {
    let service =
        Service::with(ServerConfig::default(), prorl_pipeline::PipelineConfig { run_workers: 1, ..small() }).await;
    service.post("/v1/jobs", job("j1", json!({"at": "run", "do": "hang"}))).await;
    service.probe.reached().await;
    service.post("/v1/jobs", job("j2", json!({}))).await;
    service.post("/process", job("j3", json!({"at": "init", "do": "image"}))).await;
    while service.pipeline.stages().run.queued == 0 {
        tokio::task::yield_now().await;
    }

    let (code, json) = service.get("/status").await;
    assert_eq!(code, 200);
    let names: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = "running state uptime version stages jobs backends sandboxes stuck \
                    init_queue run_queue eval_queue active_init active_run active_eval total";
    assert_eq!(names, expected.split_whitespace().collect::<Vec<_>>());
    let status: ServiceStatus = serde_json::from_value(json).unwrap();
    assert!(status.running && status.uptime > 0.0);
    assert_eq!(status.version, env!("CARGO_PKG_VERSION"));
    assert_eq!((status.run_queue, status.active_run, status.total), (1, 1, 3));
    assert_eq!((status.stages.run.queued, status.stages.run.active, status.stages.run.workers), (1, 1, 1));
    assert_eq!((status.jobs.accepted, status.jobs.active, status.jobs.failed), (3, 2, 1));
    service.end().await;
}

#[tokio::test]
async fn pools_are_resized_while_they_run() {
    let service = Service::start().await;
    let (code, body) = service.post("/v1/stages", json!({"run": 3, "eval": 5})).await;
    let workers = |stage: &str| body["stages"][stage]["workers"].clone();
    assert_eq!((code, workers("init"), workers("run"), workers("eval")), (200, json!(8), json!(3), json!(5)));
    for (body, field) in [(json!({"run": 0}), "run"), (json!({"init": "2"}), "init"), (json!({"ran": 1}), "ran")] {
        let detail = refused(&service.post("/v1/stages", body).await, 422, "malformed");
        assert!(detail.starts_with(&format!("{field}: ")), "{detail}");
    }
    assert_eq!(service.get("/v1/handlers").await, (200, json!({"handlers": ["probe"]})));
    service.end().await;
}

#[tokio::test]
async fn what_is_not_there_is_said_in_the_one_shape() {
    let service = Service::start().await;
    for path in ["/nothing", "/", "/status/", "/v1/jobs/a/b", "/openapi.json"] {
        refused(&service.get(path).await, 404, "not_found");
    }
    refused(&service.get("/process").await, 405, "method_not_allowed");
    refused(&service.post("/status", None).await, 405, "method_not_allowed");
    let response = service.http.put(format!("{}/v1/jobs/a", service.url)).send().await.unwrap();
    assert_eq!(response.status().as_u16(), 405);
    let allow = response.headers()["allow"].to_str().unwrap();
    assert!(allow.contains("GET") && allow.contains("DELETE"), "{allow}");
    service.end().await;
}
