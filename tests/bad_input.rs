//! Bad input: the status and code that were promised, and a server that goes on.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use reqwest::Method;
use serde_json::{Value, json};
use support::{Serve, finish, math, mock};

#[tokio::test]
async fn each_mistake_is_named_and_the_server_keeps_serving() {
    let mock = mock(&json!({"default": {"turns": [finish("4")]}})).await;
    let serve = Serve::with_mock(&[], &mock).await;
    let with = |field: &str, value: Value| {
        let mut request = math("What is 2+2?", "4");
        match field.split_once('.') {
            Some((outer, inner)) => request[outer][inner] = value,
            None => request[field] = value,
        }
        request
    };
    let cases = [
        (with("instance.data_source", json!("nope")), 400, "unknown_data_source", "math"),
        (with("instance.data_source", json!(5)), 400, "invalid_instance", "data_source"),
        (with("instance.ground_truth", Value::Null), 400, "invalid_instance", "ground_truth"),
        (with("instance.ground_truth", json!([1])), 400, "invalid_instance", "a list"),
        (with("instance.prompt", json!(5)), 400, "invalid_instance", "prompt"),
        (with("instance.tools", json!(["ipython", "hammer"])), 400, "invalid_instance", "hammer"),
        (with("instance.runtime", json!("docker")), 400, "invalid_instance", "runtime"),
        (with("instance.network", json!("host")), 400, "invalid_instance", "network"),
        (with("instance.image", json!("/no/such/image")), 400, "invalid_instance", "image"),
        (with("instance", json!("x")), 422, "malformed", "instance"),
        (with("timeout", json!("soon")), 422, "malformed", "timeout"),
        (with("timeout", json!(0)), 422, "malformed", "timeout"),
        (with("timeot", json!(1)), 422, "malformed", "timeot"),
        (with("job_id", json!("../x")), 422, "malformed", "job_id"),
        (with("sampling_params.temperature", json!("hot")), 422, "malformed", "sampling_params.temperature"),
        (with("sampling_params.temprature", json!(1)), 422, "malformed", "temprature"),
        (with("sampling_params.token_level_generation", json!(false)), 422, "malformed", "token_level_generation"),
        (with("sampling_params.tokenizer", json!("/no/such")), 422, "malformed", "tokenizer"),
    ];
    for path in ["/process", "/v1/jobs"] {
        for (request, status, code, named) in &cases {
            let (got, body) = serve.post(path, request).await;
            assert_eq!((got, body["code"].as_str()), (*status, Some(*code)), "{request} → {body}");
            assert!(body["detail"].as_str().unwrap().contains(named), "{named}: {body}");
            assert_eq!(body.as_object().unwrap().len(), 2);
        }
        for (body, status, code) in [
            ("{\"instance\": ", 400, "invalid_json"),
            ("", 400, "invalid_json"),
            ("\u{0}", 400, "invalid_json"),
            ("[]", 422, "malformed"),
            ("null", 422, "malformed"),
        ] {
            let (got, answer) = serve.send(Method::POST, path, Some(body.to_owned())).await;
            assert_eq!((got, answer["code"].as_str()), (status, Some(code)), "{body:?} → {answer}");
        }
    }
    for (body, status, code) in [
        (json!({"address": "not an address"}), 422, "malformed"),
        (json!({"address": 5}), 422, "malformed"),
        (json!({"addres": "http://127.0.0.1:1"}), 422, "malformed"),
        (json!({}), 422, "malformed"),
    ] {
        let (got, answer) = serve.post("/add_llm_server", &body).await;
        assert_eq!((got, answer["code"].as_str()), (status, Some(code)), "{body} → {answer}");
    }
    assert_eq!(serve.get("/nowhere").await.1["code"], "not_found");
    assert_eq!(serve.get("/process").await.0, 405);
    assert_eq!(serve.post("/cancel", &json!({"job_id": "a b"})).await.0, 422);
    assert_eq!(serve.get("/v1/jobs/unknown").await.0, 404);

    let big = format!("{{\"instance\": {{\"prompt\": \"{}\"}}}}", "x".repeat(65 << 20));
    let (status, answer) = serve.send(Method::POST, "/process", Some(big)).await;
    assert_eq!((status, answer["code"].as_str()), (413, Some("body_too_large")));

    let (status, result) = serve.post("/process", &math("What is 2+2?", "4")).await;
    assert_eq!((status, &result["reward"]), (200, &json!(1.0)));
    let (_, status) = serve.get("/status").await;
    assert_eq!((&status["jobs"]["accepted"], &status["total"]), (&json!(1), &json!(1)), "nothing bad was accepted");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn backends_that_cannot_be_used_are_refused_and_absent_ones_are_kept_for_later() {
    let serve = Serve::start(&["--wait-for-llm", "0"]).await;
    let (status, refused) = serve.post("/process", &math("2+2", "4")).await;
    assert_eq!((status, &refused["code"]), (503, &json!("no_llm_server")));
    let (status, refused) = serve.post("/process", &json!({"instance": {"data_source": "nope"}})).await;
    assert_eq!((status, &refused["code"]), (400, &json!("unknown_data_source")), "what is wrong is told first");

    // Not reachable yet: kept.
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (status, added) = serve.post("/add_llm_server", &json!({"address": format!("http://{free}")})).await;
    assert_eq!((status, &added["backend"]["healthy"]), (200, &json!(false)), "{added}");
    assert_eq!(added["status"], format!("Added LLM server address: http://{free}"));

    // Answers, but is no LLM server: this very server.
    let (status, refused) = serve.post("/add_llm_server", &json!({"address": serve.address})).await;
    assert_eq!((status, &refused["code"]), (502, &json!("backend_unusable")), "{refused}");

    let (_, state) = serve.get("/status").await;
    assert_eq!(state["backends"].as_array().unwrap().len(), 1);
    let (status, cleared) = serve.post("/clear_llm_server", &json!(null)).await;
    assert_eq!((status, cleared), (200, json!({"status": "Cleared all LLM server addresses", "cleared": 1})));
    serve.stop().await;
}
