//! The LLM servers behind the pool.

use axum::{
    Json, Router,
    routing::{get, post},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinSet};

use crate::support::{Service, refused};

/// A `/generate` server that answers `body` to everything.
async fn generate(tasks: &mut JoinSet<()>, body: Value) -> String {
    let app = Router::new()
        .route("/generate", post(move || std::future::ready(Json(body.clone()))))
        .route("/health", get(|| async { "ok" }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tasks.spawn(async move { axum::serve(listener, app).await.unwrap() });
    address
}

#[tokio::test]
async fn backends_come_and_go() {
    let service = Service::start().await;
    let mut tasks = JoinSet::new();
    let good = generate(&mut tasks, json!({"response_ids": [1], "logprobs": [-0.5]})).await;

    let (status, added) = service.post("/add_llm_server", json!({"address": good})).await;
    assert_eq!((status, &added["status"]), (200, &json!(format!("Added LLM server address: {good}"))));
    let backend = &added["backend"];
    assert_eq!((&backend["address"], &backend["kind"]), (&json!(good), &json!("generate")));
    assert_eq!((&backend["healthy"], &backend["weight_version"]), (&json!(true), &json!(0)));
    assert_eq!(service.get("/v1/backends").await.1["backends"], json!([backend]));
    assert_eq!(service.get("/status").await.1["backends"], json!([backend]));

    // Again, with other facts.
    let (_, again) = service.post("/v1/backends", json!({"address": good, "weight_version": 7})).await;
    assert_eq!(again["backend"]["weight_version"], 7);
    assert_eq!(service.get("/v1/backends").await.1["backends"].as_array().unwrap().len(), 1);

    let (status, swapped) = service.post("/v1/backends/swap", json!({"addresses": [good], "weight_version": 8})).await;
    assert_eq!((status, &swapped["backends"][0]["weight_version"]), (200, &json!(8)));

    let encoded = good.replace(':', "%3A").replace('/', "%2F");
    assert_eq!(service.delete(&format!("/v1/backends/{encoded}")).await.0, 200);
    refused(&service.delete(&format!("/v1/backends/{encoded}")).await, 404, "backend_unknown");

    service.post("/add_llm_server", json!({"address": good})).await;
    let cleared = json!({"status": "Cleared all LLM server addresses", "cleared": 1});
    assert_eq!(service.post("/clear_llm_server", None).await, (200, cleared));
    assert_eq!(service.get("/v1/backends").await, (200, json!({"backends": []})));
    service.end().await;
}

#[tokio::test]
async fn one_that_cannot_be_used_is_refused_and_one_that_is_not_there_yet_is_kept() {
    let service = Service::start().await;
    let mut tasks = JoinSet::new();
    let bad = generate(&mut tasks, json!({"text": "hello"})).await;
    refused(
        &service.post("/add_llm_server", json!({"address": bad, "kind": "generate"})).await,
        502,
        "backend_unusable",
    );

    // A port that was ours a moment ago and has no listener.
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (status, kept) = service.post("/add_llm_server", json!({"address": format!("http://{gone}")})).await;
    assert_eq!((status, &kept["backend"]["healthy"]), (200, &json!(false)));
    assert!(kept["backend"]["reason"].is_string(), "{kept}");

    for address in ["", "nonsense", "https://h:1", "http://h:1/other", "http://u:p@h:1"] {
        let detail = refused(&service.post("/add_llm_server", json!({"address": address})).await, 422, "malformed");
        assert!(detail.starts_with("address: "), "{detail}");
    }
    for (body, field) in [
        (json!({"address": 5}), "address: expected text, found a number"),
        (json!({"address": "http://h:1", "kind": "tgi"}), "kind: unknown variant `tgi`"),
        (json!({"address": "http://h:1", "max_concurrent": 0}), "max_concurrent: "),
        (json!({"adress": "http://h:1"}), "adress: unknown field"),
        (json!({}), "body: missing field `address`"),
    ] {
        let detail = refused(&service.post("/add_llm_server", body).await, 422, "malformed");
        assert!(detail.starts_with(field), "{detail}");
    }
    service.end().await;
}

#[tokio::test]
async fn backends_are_added_in_every_state() {
    let service = Service::start().await;
    service.post("/stop", None).await;
    let later = json!({"address": "http://127.0.0.1:9", "kind": "generate", "probe": false});
    assert_eq!(service.post("/add_llm_server", later).await.0, 200);
    service.end().await;
}
