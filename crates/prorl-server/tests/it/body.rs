//! Bodies that are too long, no JSON, of another shape, or that never come.

use std::time::Duration;

use prorl_server::ServerConfig;
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::support::{Service, answer, job, read_all, refused, small};

async fn post_text(service: &Service, path: &str, body: impl Into<reqwest::Body>) -> (u16, Value) {
    answer(service.http.post(format!("{}{path}", service.url)).body(body)).await
}

#[tokio::test]
async fn a_body_of_65_mib_is_refused_and_the_server_goes_on() {
    let service = Service::start().await;
    let long = vec![b' '; 65 << 20];
    refused(&post_text(&service, "/process", long.clone()).await, 413, "body_too_large");
    // Without a length the server finds out while it reads.
    let chunks = futures_util::stream::iter(
        long.chunks(1 << 20).map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec())).collect::<Vec<_>>(),
    );
    refused(&post_text(&service, "/v1/jobs", reqwest::Body::wrap_stream(chunks)).await, 413, "body_too_large");
    assert_eq!(service.post("/process", job("j1", json!({"reward": 0.5}))).await.1["reward"], 0.5);
    service.end().await;
}

#[tokio::test]
async fn a_client_that_sends_all_before_it_listens_sees_the_answer() {
    const LIMIT: usize = 8 << 20;
    let config = ServerConfig { body_limit: LIMIT, ..ServerConfig::default() };
    let service = Service::with(config, small()).await;
    // More than the buffers between the two hold, so that an early end would break the writing.
    let length = 4 * LIMIT;
    let mut stream = TcpStream::connect(service.addr.unwrap()).await.unwrap();
    let head = format!("POST /process HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![b' '; length]).await.unwrap();
    let text = read_all(&mut stream).await;
    assert!(text.starts_with("HTTP/1.1 413") && text.contains("body_too_large"), "{text}");
    service.end().await;
}

#[tokio::test]
async fn a_client_that_asks_first_need_not_send_a_body_that_is_too_long() {
    let service = Service::start().await;
    let mut stream = TcpStream::connect(service.addr.unwrap()).await.unwrap();
    let head = "POST /process HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let text = read_all(&mut stream).await;
    assert!(text.starts_with("HTTP/1.1 413") && text.contains("body_too_large"), "{text}");
    service.end().await;
}

#[tokio::test]
async fn the_limit_is_the_configured_one_to_the_byte() {
    let config = ServerConfig { body_limit: 100, ..ServerConfig::default() };
    let service = Service::with(config, small()).await;
    let body = |length: usize| format!("{:<length$}", job("a", json!({})).to_string());
    assert_eq!(post_text(&service, "/process", body(100)).await.0, 200);
    refused(&post_text(&service, "/process", body(101)).await, 413, "body_too_large");
    service.end().await;
}

#[tokio::test]
async fn a_long_body_within_the_limit_is_taken() {
    let service = Service::start().await;
    let body = job("j1", json!({"reward": 1.0, "text": "x".repeat(8 << 20)}));
    assert_eq!(service.post("/process", body).await.1["reward"], 1.0);
    service.end().await;
}

#[tokio::test]
async fn text_that_is_no_json_is_told_from_a_wrong_shape() {
    let service = Service::start().await;
    for path in
        ["/process", "/v1/jobs", "/cancel", "/add_llm_server", "/v1/backends", "/v1/backends/swap", "/v1/stages"]
    {
        for body in ["", "{", "instance=1", "{} {}"] {
            let detail = refused(&post_text(&service, path, body).await, 400, "invalid_json");
            assert!(detail.starts_with("body: "), "{detail}");
        }
        let detail = refused(&post_text(&service, path, "[[]]").await, 422, "malformed");
        assert_eq!(detail, "body: expected an object, found a list");
        let unknown = refused(&post_text(&service, path, r#"{"nonsense":1}"#).await, 422, "malformed");
        assert!(unknown.starts_with("nonsense: unknown field"), "{unknown}");
    }
    service.end().await;
}

#[tokio::test]
async fn the_wrong_field_is_named() {
    let service = Service::start().await;
    let probe = json!({"data_source": "probe"});
    for (path, body, status, code, detail) in [
        ("/process", json!({}), 422, "malformed", "body: missing field `instance`"),
        (
            "/process",
            json!({"instance": probe, "sampling_params": {"top_p": "high"}}),
            422,
            "malformed",
            "sampling_params.top_p: expected a number, found a string",
        ),
        (
            "/process",
            json!({"instance": probe, "sampling_params": {"temprature": 1}}),
            422,
            "malformed",
            "sampling_params.temprature: unknown field",
        ),
        (
            "/process",
            json!({"instance": probe, "timeout": -1}),
            422,
            "malformed",
            "timeout: expected seconds above 0, found -1",
        ),
        (
            "/process",
            json!({"instance": {"data_source": "chess"}}),
            400,
            "unknown_data_source",
            "unknown data_source \"chess\", expected one of probe",
        ),
        (
            "/process",
            json!({"instance": {}}),
            400,
            "unknown_data_source",
            "unknown data_source \"swebench\", expected one of probe",
        ),
        (
            "/v1/jobs",
            json!({"instance": {"data_source": "probe", "reward": "1"}}),
            400,
            "invalid_instance",
            "instance.reward: expected a number, found a string",
        ),
        (
            "/v1/jobs",
            json!({"instance": {"data_source": 7}}),
            400,
            "invalid_instance",
            "instance.data_source: expected text, found a number",
        ),
        ("/cancel", json!({"job_id": 5}), 422, "malformed", "job_id: expected text, found a number"),
        ("/cancel", json!({}), 422, "malformed", "body: missing field `job_id`"),
    ] {
        assert_eq!(refused(&service.post(path, body.clone()).await, status, code), detail, "{body}");
    }
    let bad_id = refused(&service.post("/cancel", json!({"job_id": "../x"})).await, 422, "malformed");
    assert!(bad_id.starts_with("job_id: \"../x\" is no job id"), "{bad_id}");
    service.end().await;
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_waited_for_for_ever() {
    let config = ServerConfig { body_timeout: Duration::from_millis(50), ..ServerConfig::default() };
    let service = Service::with(config, small()).await;
    let mut stream = TcpStream::connect(service.addr.unwrap()).await.unwrap();
    stream.write_all(b"POST /process HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{").await.unwrap();
    let text = read_all(&mut stream).await;
    assert!(text.starts_with("HTTP/1.1 408") && text.contains("\"body_timeout\""), "{text}");
    service.end().await;
}
