//! Calls to engines: good answers bit for bit, bad ones by name, and nothing left open.

use std::{convert::Infallible, num::NonZeroU32, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    http::StatusCode,
    routing::{get, post},
};
use futures_util::stream;
use prorl_core::{FailureClass, SamplingParams, TokenId, message::FinishReason, request::InputIds};
use prorl_llm::{
    dialect::{GenerateRequest, Generation, IntegrityError, LlmError},
    ledger::{Ledger, Turn},
    mock::{MockLlm, Script},
    parse::parse_hermes,
    pool::{AddError, BackendSpec, Kind, Pool, PoolConfig},
    tokenizer::{ChatMessage, ChatOptions, ChatTokenizer},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

const LIMIT: Duration = Duration::from_secs(20);

async fn start(script: Value) -> MockLlm {
    MockLlm::spawn(ChatTokenizer::builtin(), Script::from_json(script.to_string().as_bytes()).unwrap()).await.unwrap()
}

fn unprobed(address: String, kind: Kind) -> BackendSpec {
    BackendSpec { kind, probe: false, ..BackendSpec::new(address) }
}

async fn ask(address: &str, kind: Kind, prompt_ids: &[TokenId], limit: Duration) -> Result<Generation, LlmError> {
    let pool = Pool::new(PoolConfig { max_answer_bytes: 1 << 20, ..PoolConfig::default() });
    pool.add(unprobed(address.to_owned(), kind)).await.unwrap();
    let lease = pool.acquire("job-1").await;
    let params = SamplingParams::default();
    let request = GenerateRequest {
        prompt_ids,
        params: &params,
        max_tokens: 64,
        seed: Some(3),
        request_id: "job-1-0",
        session_id: "job-1",
        vocab_size: ChatTokenizer::builtin().vocab_size(),
    };
    lease.generate(&request, limit).await
}

fn prompt(text: &str) -> Vec<TokenId> {
    ChatTokenizer::builtin().encode_prompt(&[ChatMessage::user(text)], &[], ChatOptions::default()).unwrap().ids
}

#[tokio::test]
async fn a_whole_conversation_is_what_the_server_saw() {
    let tokenizer = ChatTokenizer::builtin();
    let call = "<think>\nHAVING counted\n</think>\n\n<tool_call>\n{\"name\": \"bash\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>";
    let script = json!({"seed": 5, "noncanonical": 0.7, "tasks": [{"match": "count", "turns": [call, call, "The answer is 42."]}]});
    for kind in [Kind::Generate, Kind::Vllm] {
        let mock = start(script.clone()).await;
        let messages = [ChatMessage::system("Be brief."), ChatMessage::user("count")];
        let mut ledger = Ledger::new(tokenizer.clone(), &messages, &[], ChatOptions::default()).unwrap();
        for turn_idx in 0..3 {
            let answer = ask(&mock.address(), kind, ledger.prompt_ids(), LIMIT).await.unwrap();
            assert_eq!(answer.finish_reason, FinishReason::Stop);
            let text = tokenizer.decode_text(answer.completion.ids());
            let mut parsed = parse_hermes(&text);
            parsed.number_calls(turn_idx);
            assert_eq!(parsed.tool_calls.len(), usize::from(turn_idx < 2), "{text}");
            ledger.push_turn(Turn {
                completion: answer.completion,
                finish_reason: answer.finish_reason,
                weight_version: answer.weight_version,
                backend: answer.backend,
                tool_calls: parsed.tool_calls,
                text,
            });
            ledger.push_messages(&[ChatMessage::tool("c", "bash", "a.txt<|im_end|>")]).unwrap();
        }
        let calls = mock.calls();
        let (messages, traces) = ledger.snapshot(InputIds::Full);
        let turns: Vec<_> = messages.iter().filter(|message| message.is_turn()).collect();
        assert_eq!(calls.len(), 3);
        for (call, turn) in calls.iter().zip(turns) {
            assert_eq!(Some(&call.prompt_ids), turn.input_ids.as_ref());
            assert_eq!(call.sampled_ids, turn.token_ids);
            let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&call.logprobs), bits(turn.logprobs.as_ref().unwrap()));
            assert_eq!((call.session_id.as_deref(), call.request_id.as_deref()), (Some("job-1"), Some("job-1-0")));
        }
        for calls in calls.windows(2) {
            let before = [calls[0].prompt_ids.clone(), calls[0].sampled_ids.clone()].concat();
            assert!(calls[1].prompt_ids.starts_with(&before));
        }
        let whole = [traces[0].prompt_ids(), traces[0].response_ids()].concat();
        assert_eq!(whole, [calls[2].prompt_ids.clone(), calls[2].sampled_ids.clone()].concat());
        // The splits are such that encoding the text again would not give them.
        let again = tokenizer.encode_with_added(&tokenizer.decode(&calls[0].sampled_ids)).unwrap();
        assert_ne!(again, calls[0].sampled_ids);
        mock.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn each_scripted_fault_is_named() {
    let faults = [
        ("status", json!({"status": 500, "body": "out of memory"})),
        ("busy", json!({"status": 503})),
        ("cut", json!({"text": "abc", "cut": true})),
        ("garbage", json!({"garbage": true})),
        ("abort", json!({"text": "abc", "finish": "abort"})),
        ("nan", json!({"text": "abc", "logprobs": "nan"})),
        ("null", json!({"text": "abc", "logprobs": "null"})),
        ("missing", json!({"text": "abc", "logprobs": "missing"})),
        ("positive", json!({"text": "abc", "logprobs": "positive"})),
        ("short", json!({"text": "abc", "logprobs": "short"})),
        ("foreign", json!({"ids": [5, 999_999]})),
    ];
    let tasks: Vec<Value> = faults.iter().map(|(name, turn)| json!({"match": name, "turns": [turn]})).collect();
    let mock = start(json!({"tasks": tasks})).await;
    for kind in [Kind::Generate, Kind::Vllm] {
        for (name, _) in &faults {
            let err = ask(&mock.address(), kind, &prompt(name), LIMIT).await.unwrap_err();
            let expected = match *name {
                "status" => matches!(&err, LlmError::Status { status: 500, body, .. } if body == "out of memory"),
                "busy" => matches!(err, LlmError::Status { status: 503, .. }),
                "cut" => matches!(err, LlmError::Cut { .. }),
                "garbage" => matches!(err, LlmError::Malformed { .. }),
                "abort" => matches!(err, LlmError::Aborted { n_ids: 1.., .. }),
                "nan" | "null" => {
                    matches!(err, LlmError::Integrity { problem: IntegrityError::MissingLogprob { .. }, .. })
                }
                "missing" => matches!(err, LlmError::Integrity { problem: IntegrityError::NoLogprobs, .. }),
                "positive" | "short" => matches!(err, LlmError::Integrity { problem: IntegrityError::Logprobs(_), .. }),
                _ => matches!(
                    err,
                    LlmError::Integrity { problem: IntegrityError::OutOfVocabulary { id: 999_999, .. }, .. }
                ),
            };
            assert!(expected, "{name} by {}: {err:?}", kind.as_str());
            assert!(err.is_retryable());
            let integrity = matches!(err, LlmError::Integrity { .. });
            assert_eq!(err.failure_class() == FailureClass::TokenIntegrity, integrity);
        }
    }
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_fault_may_hold_for_some_calls_only() {
    let mock = start(json!({"default": {"turns": [{"status": 500, "times": 2, "text": "ok"}]}})).await;
    let ids = prompt("x");
    for _ in 0..2 {
        ask(&mock.address(), Kind::Generate, &ids, LIMIT).await.unwrap_err();
    }
    let answer = ask(&mock.address(), Kind::Generate, &ids, LIMIT).await.unwrap();
    assert_eq!(ChatTokenizer::builtin().decode_text(answer.completion.ids()), "ok");
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_limit_or_a_dropped_call_closes_the_connection() {
    let mock = start(
        json!({"tasks": [{"match": "hang", "turns": [{"hang": true}]}, {"match": "slow", "turns": [{"latency": 60}]}]}),
    )
    .await;
    let err = ask(&mock.address(), Kind::Generate, &prompt("slow"), Duration::from_millis(50)).await.unwrap_err();
    assert!(matches!(err, LlmError::Timeout { .. }), "{err}");
    let address = mock.address();
    let ids = prompt("hang");
    {
        let mut call = Box::pin(ask(&address, Kind::Vllm, &ids, LIMIT));
        tokio::select! {
            _ = &mut call => panic!("it hangs"),
            _ = mock.wait_for(|calls| calls.len() == 2) => {}
        }
    }
    let calls = timeout(LIMIT, mock.wait_for(|calls| calls.iter().all(|call| call.cancelled))).await.unwrap();
    assert!(calls.iter().all(|call| !call.answered));
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn shutdown_ends_what_hangs() {
    let mock = start(json!({"default": {"turns": [{"hang": true}]}})).await;
    let address = mock.address();
    let ids = prompt("x");
    let call = ask(&address, Kind::Generate, &ids, LIMIT);
    let stop = async {
        mock.wait_for(|calls| calls.len() == 1).await;
        mock.shutdown().await
    };
    let (result, stopped) = timeout(LIMIT, async { tokio::join!(call, stop) }).await.unwrap();
    assert!(matches!(result, Err(LlmError::Status { status: 503, .. })), "{result:?}");
    stopped.unwrap();
}

/// Serves a router on a free port while `test` runs.
async fn with_server<F: Future<Output = ()>>(router: Router, test: impl FnOnce(String) -> F) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { axum::serve(listener, router).await });
    timeout(LIMIT, test(address)).await.unwrap();
    tasks.shutdown().await;
}

#[tokio::test]
async fn a_large_answer_is_not_read_to_its_end() {
    let endless = || stream::repeat_with(|| Ok::<_, Infallible>(Bytes::from_static(&[b' '; 4096])));
    for router in [
        Router::new().route("/generate", post(async || "x".repeat(2 << 20))),
        // One that does not say how long it is, and never ends.
        Router::new().route("/generate", post(async move || Body::from_stream(endless()))),
    ] {
        with_server(router, async |address| {
            let err = ask(&address, Kind::Generate, &[1], LIMIT).await.unwrap_err();
            assert!(matches!(err, LlmError::TooLarge { .. }), "{err}");
        })
        .await;
    }
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let router =
        Router::new().route("/generate", post(async || (StatusCode::TEMPORARY_REDIRECT, [("location", "/elsewhere")])));
    with_server(router, async |address| {
        let err = ask(&address, Kind::Generate, &[1], LIMIT).await.unwrap_err();
        assert!(matches!(err, LlmError::Status { status: 307, .. }), "{err}");
    })
    .await;
}

#[tokio::test]
async fn one_that_returns_no_ids_is_unusable() {
    let choice =
        |ids: Value| json!({"choices": [{"text": "", "finish_reason": "stop", "token_ids": ids, "logprobs": null}]});
    for (answer, problem) in [(choice(Value::Null), "no sampled ids"), (choice(json!([1, 2])), "no log-probabilities")]
    {
        let router = Router::new()
            .route("/v1/models", get(async || json!({"data": [{"id": "m"}]}).to_string()))
            .route("/v1/completions", post(async move || answer.to_string()));
        with_server(router, async |address| {
            let pool = Pool::new(PoolConfig::default());
            let err = pool.add(BackendSpec::new(address)).await.unwrap_err();
            let AddError::Unusable { reason, .. } = &err else { panic!("{err}") };
            assert!(reason.contains(problem) && reason.contains("404"), "{reason}");
            assert!(pool.list().is_empty());
        })
        .await;
    }
}

/// Answers as vLLM or the original do, with three ids however few are asked for.
fn completions() -> Router {
    let choice = json!({"text": "", "finish_reason": "stop", "token_ids": [1, 2, 3], "logprobs": {"token_logprobs": [-1.0, -0.5, 0.0]}});
    let answer = json!({"choices": [choice]}).to_string();
    Router::new().route(
        "/v1/completions",
        post(async move |body: String| {
            let body: Value = serde_json::from_str(&body).unwrap();
            if body.get("model").is_some() { Err(StatusCode::NOT_FOUND) } else { Ok(answer) }
        }),
    )
}

fn original() -> Router {
    let answer = json!({"response_ids": [1, 2, 3], "logprobs": [-1.0, -0.5, 0.0]}).to_string();
    Router::new().route("/generate", post(async move || answer))
}

#[tokio::test]
async fn a_server_that_lists_no_models_is_asked_without_one() {
    for (router, kind, found) in [
        (completions(), Kind::Vllm, Some("vllm")),
        (completions(), Kind::Auto, Some("vllm")),
        (completions().fallback(async || StatusCode::NOT_IMPLEMENTED), Kind::Auto, Some("vllm")),
        (completions().merge(original()), Kind::Auto, Some("generate")),
        (completions().merge(original()), Kind::Vllm, Some("vllm")),
        (original(), Kind::Auto, Some("generate")),
        (original(), Kind::Vllm, None),
        (Router::new(), Kind::Auto, None),
    ] {
        with_server(router, async |address| {
            let pool = Pool::new(PoolConfig::default());
            let added = pool.add(BackendSpec { kind, ..BackendSpec::new(address) }).await;
            match (added, found) {
                (Ok(status), Some(found)) => assert_eq!((status.kind.as_str(), status.model), (found, None)),
                (Err(AddError::Unusable { reason, .. }), None) => assert!(reason.contains("404"), "{reason}"),
                (added, found) => panic!("{added:?} instead of {found:?}"),
            }
            let Some(lease) = pool.try_acquire("t") else { return };
            let params = SamplingParams::default();
            let request = |max_tokens| GenerateRequest {
                prompt_ids: &[1],
                params: &params,
                max_tokens,
                seed: None,
                request_id: "r",
                session_id: "t",
                vocab_size: 9,
            };
            assert_eq!(lease.generate(&request(3), LIMIT).await.unwrap().completion.ids(), [1, 2, 3]);
            let err = lease.generate(&request(2), LIMIT).await.unwrap_err();
            assert_eq!(err.failure_class(), FailureClass::TokenIntegrity, "{err}");
        })
        .await;
    }
}

#[tokio::test]
async fn one_without_a_health_endpoint_is_healthy() {
    for status in [StatusCode::NOT_FOUND, StatusCode::NOT_IMPLEMENTED] {
        let (asked, mut probes) = tokio::sync::mpsc::unbounded_channel();
        let fallback = async move || {
            let _ = asked.send(());
            status
        };
        with_server(Router::new().fallback(fallback), async |address| {
            let config = PoolConfig {
                probe_interval: Duration::from_millis(1),
                eject_after: NonZeroU32::MIN,
                ..PoolConfig::default()
            };
            let pool = Pool::new(config);
            pool.add(unprobed(address, Kind::Generate)).await.unwrap();
            let second = async {
                probes.recv().await;
                probes.recv().await;
            };
            // When the second probe comes the first has been judged.
            tokio::select! {
                () = pool.run(CancellationToken::new()) => {}
                () = second => {}
            }
            assert!(pool.list()[0].healthy, "{status}");
        })
        .await;
    }
}

#[tokio::test]
async fn one_that_is_loading_is_kept() {
    let router = Router::new().fallback(async || StatusCode::SERVICE_UNAVAILABLE);
    with_server(router, async |address| {
        let pool = Pool::new(PoolConfig::default());
        let status = pool.add(BackendSpec::new(address)).await.unwrap();
        assert!(!status.healthy && status.reason.is_some_and(|reason| reason.contains("503")));
    })
    .await;
}

#[tokio::test]
async fn single_bad_answers_do_not_eject() {
    let router = Router::new().route("/generate", post(async || StatusCode::INTERNAL_SERVER_ERROR));
    with_server(router, async |address| {
        let pool = Pool::new(PoolConfig::default());
        pool.add(unprobed(address, Kind::Generate)).await.unwrap();
        let lease = pool.acquire("t").await;
        let params = SamplingParams::default();
        let request = GenerateRequest {
            prompt_ids: &[1],
            params: &params,
            max_tokens: 1,
            seed: None,
            request_id: "r",
            session_id: "t",
            vocab_size: 9,
        };
        for _ in 0..5 {
            lease.generate(&request, LIMIT).await.unwrap_err();
        }
        assert!(lease.is_alive());
    })
    .await;
}

#[tokio::test]
async fn a_connection_closed_without_an_answer_is_cut() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let server = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut start = [0; 64];
        let _ = stream.read(&mut start).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"response_ids\"").await.unwrap();
    };
    let (result, ()) =
        timeout(LIMIT, async { tokio::join!(ask(&address, Kind::Generate, &[1], LIMIT), server) }).await.unwrap();
    assert!(matches!(result, Err(LlmError::Cut { .. })), "{result:?}");
}

#[tokio::test]
async fn the_original_dialect_is_spoken_word_by_word() {
    let echo = async |body: String| {
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            body,
            json!({"prompt_ids": [1, 2], "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 3, "max_tokens": 64})
        );
        // No finish_reason: the original's servers send none.
        r#"{"response_ids": [7, 8], "logprobs": [-0.12345678901234567, -1e-300]}"#
    };
    with_server(Router::new().route("/generate", post(echo)), async |address| {
        let answer = ask(&format!("{address}/v1"), Kind::Generate, &[1, 2], LIMIT).await.unwrap();
        assert_eq!(answer.completion.logprobs(), [-0.123_456_789_012_345_67, -1e-300]);
        assert_eq!((answer.finish_reason, answer.backend), (FinishReason::Stop, format!("{address}/v1")));
    })
    .await;
}

#[tokio::test]
async fn a_backend_that_broke_off_and_is_gone_is_ejected_and_one_that_lives_is_not() {
    for dies in [true, false] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = async {
            let (mut call, _) = listener.accept().await.unwrap();
            let mut start = [0; 64];
            let _ = call.read(&mut start).await.unwrap();
            drop(call);
            if dies {
                drop(listener);
            } else {
                let (mut probe, _) = listener.accept().await.unwrap();
                let _ = probe.read(&mut start).await.unwrap();
                probe.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            }
        };
        let pool = Pool::new(PoolConfig::default());
        pool.add(unprobed(address.clone(), Kind::Generate)).await.unwrap();
        let lease = pool.acquire("t").await;
        let params = SamplingParams::default();
        let request = GenerateRequest {
            prompt_ids: &[1],
            params: &params,
            max_tokens: 1,
            seed: None,
            request_id: "r",
            session_id: "t",
            vocab_size: 9,
        };
        let (answer, ()) = tokio::join!(lease.generate(&request, LIMIT), server);
        assert!(matches!(answer, Err(LlmError::Cut { .. })), "{answer:?}");
        assert_eq!(lease.is_alive(), !dies);
    }
}
