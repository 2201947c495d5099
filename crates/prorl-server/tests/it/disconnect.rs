//! Clients that leave.

use futures_util::future::join_all;
use prorl_core::JobId;
use prorl_pipeline::{OnDisconnect, PipelineConfig};
use prorl_server::ServerConfig;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use crate::support::{Service, job, small};

#[tokio::test]
async fn a_client_that_leaves_cancels_its_job_in_each_stage() {
    let service = Service::start().await;
    for stage in ["init", "run", "eval"] {
        let id = format!("job-{stage}");
        let client = service.send_raw("/process", &job(&id, json!({"at": stage, "do": "hang"}))).await;
        service.probe.reached().await;
        drop(client);
        service.probe.left().await;
        let result = service.ended(&id).await;
        assert_eq!((&result["outcome"]["status"], &result["outcome"]["stage"]), (&json!("cancelled"), &json!(stage)));
        assert_eq!(result["reward"], json!(null));
    }
    service.end().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_waiting_job() {
    let service = Service::with(ServerConfig::default(), PipelineConfig { init_workers: 1, ..small() }).await;
    service.post("/v1/jobs", job("first", json!({"at": "init", "do": "hang"}))).await;
    service.probe.reached().await;
    let mut client = service.send_raw("/process", &job("second", json!({}))).await;
    while service.pipeline.counts().accepted < 2 {
        tokio::task::yield_now().await;
    }
    client.shutdown().await.unwrap();
    assert_eq!(service.ended("second").await["outcome"]["status"], "cancelled");
    service.end().await;
}

#[tokio::test]
async fn bytes_after_the_request_hide_no_leaving() {
    let service = Service::start().await;
    for after in ["\r\n", "GET /status HTTP/1.1\r\nhost: x\r\n\r\n"] {
        let id = format!("job-{}", after.len());
        let mut client = service.send_raw("/process", &job(&id, json!({"at": "run", "do": "hang"}))).await;
        client.write_all(after.as_bytes()).await.unwrap();
        service.probe.reached().await;
        drop(client);
        service.probe.left().await;
        assert_eq!(service.ended(&id).await["outcome"]["status"], "cancelled");
    }
    service.end().await;
}

#[tokio::test]
async fn a_client_that_closes_one_http2_stream_cancels_that_job_alone() {
    let service = Service::start().await;
    let http = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let url = format!("{}/process", service.url);
    let stays = http.post(&url).json(&job("stays", json!({"at": "run", "do": "gate", "reward": 1.0}))).send();
    let leaves = http.post(&url).json(&job("leaves", json!({"at": "run", "do": "hang"}))).send();
    let leaving = async {
        tokio::select! {
            _ = leaves => panic!("a job that hangs was answered"),
            () = async { service.probe.reached().await; service.probe.reached().await } => {}
        }
        service.probe.left().await;
        assert_eq!(service.ended("leaves").await["outcome"]["status"], "cancelled");
        service.probe.open_gate(1);
    };
    let (answer, ()) = tokio::join!(stays, leaving);
    let answer = answer.unwrap();
    assert_eq!((answer.version(), answer.status().as_u16()), (reqwest::Version::HTTP_2, 200));
    assert!(answer.text().await.unwrap().contains("\"reward\":1.0"));
    service.end().await;
}

#[tokio::test]
async fn a_detached_job_goes_on() {
    let service = Service::start().await;
    let mut detached = job("j1", json!({"at": "run", "do": "gate", "reward": 1.0}));
    detached["detach"] = true.into();
    let client = service.send_raw("/process", &detached).await;
    service.probe.reached().await;
    // Another client that leaves after it, and whose leaving shows.
    let witness = service.send_raw("/process", &job("witness", json!({"at": "run", "do": "hang"}))).await;
    service.probe.reached().await;
    drop(client);
    drop(witness);
    service.ended("witness").await;
    service.probe.open_gate(1);
    assert_eq!(service.ended("j1").await["reward"], 1.0);
    service.end().await;
}

#[tokio::test]
async fn the_server_may_keep_every_job() {
    let keep = PipelineConfig { on_disconnect: OnDisconnect::Keep, ..small() };
    let service = Service::with(ServerConfig::default(), keep).await;
    let client = service.send_raw("/process", &job("j1", json!({"at": "run", "do": "gate", "reward": 1.0}))).await;
    service.probe.reached().await;
    drop(client);
    service.probe.open_gate(1);
    assert_eq!(service.ended("j1").await["reward"], 1.0);
    service.end().await;
}

#[tokio::test]
async fn only_the_last_waiter_cancels() {
    let service = Service::start().await;
    let id = JobId::new("j1").unwrap();
    let first = service.send_raw("/process", &job("j1", json!({"at": "run", "do": "hang"}))).await;
    service.probe.reached().await;
    let second = service.pipeline.attach(&id).unwrap();
    let witness = service.send_raw("/process", &job("witness", json!({"at": "run", "do": "hang"}))).await;
    service.probe.reached().await;
    drop(first);
    drop(witness);
    service.probe.left().await;
    service.ended("witness").await;
    assert_eq!(second.state().as_str(), "run");
    drop(second);
    service.probe.left().await;
    assert_eq!(service.ended("j1").await["outcome"]["status"], "cancelled");
    service.end().await;
}

#[tokio::test]
async fn one_http2_connection_holds_a_whole_batch_and_its_end_cancels_it() {
    const N_JOBS: usize = 300;
    let sizes = PipelineConfig { init_workers: N_JOBS, run_workers: N_JOBS, ..small() };
    let service = Service::with(ServerConfig::default(), sizes).await;
    let http = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let url = format!("{}/process", service.url);
    let calls = join_all(
        (0..N_JOBS)
            .map(|idx| http.post(&url).json(&job(&format!("j{idx}"), json!({"at": "run", "do": "hang"}))).send()),
    );
    tokio::select! {
        _ = calls => panic!("jobs that hang were answered"),
        () = async { for _ in 0..N_JOBS { service.probe.reached().await } } => {}
    }
    for _ in 0..N_JOBS {
        service.probe.left().await;
    }
    for idx in [0, N_JOBS - 1] {
        assert_eq!(service.ended(&format!("j{idx}")).await["outcome"]["status"], "cancelled");
    }
    service.end().await;
}
