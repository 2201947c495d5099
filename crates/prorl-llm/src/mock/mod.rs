//! A scripted LLM server with a real tokenizer, for tests and for trying things without a GPU.
//!
//! It speaks `POST /generate` and vLLM's `POST /v1/completions` with ids, and `GET /health`, `/v1/models` and `/version`. A
//! [`Script`] says what it answers to which task and what goes wrong. It keeps no conversation: which turn is asked for is
//! counted on the prompt's ids. It samples splits that no tokenizer would make, so that a client that decodes and encodes
//! again is caught, and it remembers every call, so that both sides can be compared.

mod policy;
mod script;

use std::{collections::HashMap, fmt, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::{DefaultBodyLimit, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::Bytes;
use futures_util::stream;
use parking_lot::Mutex;
use prorl_core::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch, task::JoinSet, time::sleep};
use tokio_util::sync::CancellationToken;

pub use script::{Fault, LogprobFault, Script, ScriptError, ScriptedFinish, ScriptedTask, ScriptedTurn, Turns};

use crate::tokenizer::ChatTokenizer;
use policy::{Policy, Sample};

/// The model's name on `/v1/models`.
pub const MODEL: &str = "prorl-mock";

/// How long open connections get at shutdown.
const GRACE: Duration = Duration::from_secs(5);

/// A call as the server saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// `/generate` or `/v1/completions`.
    pub path: &'static str,
    /// `X-Session-ID`, if sent.
    pub session_id: Option<String>,
    /// `X-Request-ID`, if sent.
    pub request_id: Option<String>,
    /// The prompt.
    pub prompt_ids: Vec<TokenId>,
    /// What was sampled, in the answer or not.
    pub sampled_ids: Vec<TokenId>,
    /// Log-probabilities of the sampled ids, before any scripted fault.
    pub logprobs: Vec<f64>,
    /// The number of assistant turns before this one in the prompt.
    pub turn_idx: usize,
    /// Whether an answer, good or bad, was handed to the connection.
    pub answered: bool,
    /// Whether the client went away before that.
    pub cancelled: bool,
}

struct Shared {
    policy: Policy,
    script: Script,
    calls: Mutex<Vec<Call>>,
    /// Counts changes of `calls`.
    changed: watch::Sender<u64>,
    /// Calls of a turn with a fault that holds for some calls only.
    n_faults: Mutex<HashMap<(Option<usize>, usize), u32>>,
    stop: CancellationToken,
}

/// A running mock server. Dropping it stops it; [`shutdown`](Self::shutdown) also waits.
pub struct MockLlm {
    address: SocketAddr,
    shared: Arc<Shared>,
    tasks: JoinSet<io::Result<()>>,
}

impl MockLlm {
    /// Starts a server on a free port of 127.0.0.1.
    ///
    /// # Errors
    /// When no port can be bound, or the tokenizer cannot render a turn.
    pub async fn spawn(tokenizer: ChatTokenizer, script: Script) -> io::Result<Self> {
        Self::start(TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?, tokenizer, script)
    }

    /// Starts a server on a listener.
    ///
    /// # Errors
    /// When the listener has no address, or the tokenizer cannot render a turn.
    pub fn start(listener: TcpListener, tokenizer: ChatTokenizer, script: Script) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            policy: Policy::new(tokenizer).map_err(io::Error::other)?,
            script,
            calls: Mutex::default(),
            changed: watch::Sender::new(0),
            n_faults: Mutex::default(),
            stop: stop.clone(),
        });
        let router = Router::new()
            .route("/generate", post(generate))
            .route("/v1/completions", post(completions))
            .route("/health", get(async || StatusCode::OK))
            .route("/version", get(async || Json(json!({"version": env!("CARGO_PKG_VERSION")}))))
            .route(
                "/v1/models",
                get(async || Json(json!({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))),
            )
            .layer(DefaultBodyLimit::max(64 << 20))
            .with_state(Arc::clone(&shared));
        let mut tasks = JoinSet::new();
        let server = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
        tasks.spawn(async move { server.await });
        Ok(Self { address, shared, tasks })
    }

    /// Returns `http://IP:PORT`.
    pub fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns every call so far, in order of arrival.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.calls.lock().clone()
    }

    /// Waits until the calls so far satisfy `enough`, and returns them.
    ///
    /// # Cancel safety
    /// Dropping the future does nothing.
    pub async fn wait_for(&self, enough: impl Fn(&[Call]) -> bool) -> Vec<Call> {
        let mut changed = self.shared.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let calls = self.calls();
            if enough(&calls) {
                return calls;
            }
            if changed.changed().await.is_err() {
                return self.calls();
            }
        }
    }

    /// Stops the server and waits until it is gone; calls that hang are answered 503.
    ///
    /// # Errors
    /// What the listener's loop ended with.
    pub async fn shutdown(mut self) -> io::Result<()> {
        self.shared.stop.cancel();
        match tokio::time::timeout(GRACE, self.tasks.join_next()).await {
            Ok(Some(Ok(ended))) => ended,
            Ok(Some(Err(err))) => Err(io::Error::other(err)),
            Ok(None) => Ok(()),
            Err(_elapsed) => {
                self.tasks.shutdown().await;
                Ok(())
            }
        }
    }
}

impl Drop for MockLlm {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

impl fmt::Debug for MockLlm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockLlm").field("address", &self.address).finish_non_exhaustive()
    }
}

/// A call that is being answered; dropped before that, its client went away.
struct Answering<'a> {
    shared: &'a Shared,
    call_idx: usize,
}

impl Answering<'_> {
    fn update(&self, change: impl FnOnce(&mut Call)) {
        change(&mut self.shared.calls.lock()[self.call_idx]);
        self.shared.changed.send_modify(|count| *count += 1);
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.update(|call| call.cancelled = !call.answered);
    }
}

/// What both dialects ask for.
struct Ask {
    path: &'static str,
    prompt_ids: Vec<TokenId>,
    max_tokens: usize,
    seed: Option<u64>,
}

#[derive(Deserialize)]
struct GenerateBody {
    prompt_ids: Vec<TokenId>,
    #[serde(default)]
    seed: Option<u64>,
    #[serde(default = "sixteen")]
    max_tokens: usize,
}

#[derive(Deserialize)]
struct CompletionsBody {
    #[serde(default)]
    model: Option<String>,
    prompt: Vec<TokenId>,
    #[serde(default)]
    seed: Option<u64>,
    #[serde(default = "sixteen")]
    max_tokens: usize,
    #[serde(default)]
    logprobs: Option<u32>,
    #[serde(default)]
    return_token_ids: bool,
}

fn sixteen() -> usize {
    16
}

async fn generate(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    let body: GenerateBody = match serde_json::from_slice(&body) {
        Ok(body) => body,
        Err(err) => return (StatusCode::BAD_REQUEST, Json(json!({"detail": err.to_string()}))).into_response(),
    };
    let ask = Ask { path: "/generate", prompt_ids: body.prompt_ids, max_tokens: body.max_tokens, seed: body.seed };
    respond(&shared, &headers, ask, |sample, logprobs| {
        let mut answer = json!({"response_ids": sample.ids, "finish_reason": sample.finish});
        if let Some(logprobs) = logprobs {
            answer["logprobs"] = logprobs;
        }
        answer
    })
    .await
}

async fn completions(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    let refuse = |status: StatusCode, message: String, param: Option<&str>| {
        let error =
            json!({"error": {"message": message, "type": "BadRequestError", "param": param, "code": status.as_u16()}});
        (status, Json(error)).into_response()
    };
    let body: CompletionsBody = match serde_json::from_slice(&body) {
        Ok(body) => body,
        Err(err) => return refuse(StatusCode::BAD_REQUEST, err.to_string(), None),
    };
    if body.model.as_deref().is_some_and(|model| model != MODEL) {
        return refuse(StatusCode::NOT_FOUND, "The model does not exist.".to_owned(), Some("model"));
    }
    let prompt_ids = body.prompt.clone();
    let ask = Ask { path: "/v1/completions", prompt_ids: body.prompt, max_tokens: body.max_tokens, seed: body.seed };
    let text = |ids: &[TokenId]| shared.policy.text(ids);
    respond(&shared, &headers, ask, |sample, logprobs| {
        let with_ids = |ids: &[TokenId]| if body.return_token_ids { json!(ids) } else { Value::Null };
        let logprobs = logprobs.filter(|_| body.logprobs.is_some());
        json!({
            "object": "text_completion",
            "model": MODEL,
            "choices": [{
                "index": 0,
                "text": text(&sample.ids),
                "logprobs": logprobs.map(|logprobs| json!({"token_logprobs": logprobs})),
                "finish_reason": sample.finish,
                "stop_reason": null,
                "token_ids": with_ids(&sample.ids),
                "prompt_token_ids": with_ids(&prompt_ids),
            }],
            "usage": {"prompt_tokens": prompt_ids.len(), "completion_tokens": sample.ids.len(),
                "total_tokens": prompt_ids.len() + sample.ids.len()},
        })
    })
    .await
}

/// Follows the script for one call; `write` puts a sample and its log-probabilities into a dialect's answer.
async fn respond(
    shared: &Shared,
    headers: &HeaderMap,
    ask: Ask,
    write: impl Fn(&Sample, Option<Value>) -> Value,
) -> Response {
    let turn_idx = shared.policy.turn_idx(&ask.prompt_ids);
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let answering = {
        let mut calls = shared.calls.lock();
        calls.push(Call {
            path: ask.path,
            session_id: header("x-session-id"),
            request_id: header("x-request-id"),
            prompt_ids: ask.prompt_ids.clone(),
            sampled_ids: Vec::new(),
            logprobs: Vec::new(),
            turn_idx,
            answered: false,
            cancelled: false,
        });
        Answering { shared, call_idx: calls.len() - 1 }
    };
    answering.update(|_| {});

    let (task_idx, turns) = shared.script.turns_for(&shared.policy.prompt_text(&ask.prompt_ids));
    let empty = ScriptedTurn::default();
    let last = turns.len().saturating_sub(1);
    let turn = turns.get(turn_idx.min(last)).unwrap_or(&empty);
    let sample = match shared.policy.sample(&shared.script, turn, &ask.prompt_ids, ask.seed, ask.max_tokens) {
        Ok(sample) => sample,
        Err(err) => return (StatusCode::INTERNAL_SERVER_ERROR, err.to_string()).into_response(),
    };
    answering.update(|call| {
        call.sampled_ids.clone_from(&sample.ids);
        call.logprobs.clone_from(&sample.logprobs);
    });
    let fault = turn.fault.as_ref().filter(|_| shared.fault_holds((task_idx, turn_idx.min(last)), turn.times));
    let wait = async {
        sleep(turn.latency).await;
        if fault == Some(&Fault::Hang) {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = wait => {}
        () = shared.stop.cancelled() => return StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
    answering.update(|call| call.answered = true);
    match fault {
        Some(Fault::Status { status, body }) => {
            let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (status, body.clone()).into_response()
        }
        Some(Fault::Garbage) => (StatusCode::OK, "<html>all is well</html>").into_response(),
        Some(Fault::Cut) => cut(to_json(&write(&sample, Some(json!(sample.logprobs))))),
        Some(Fault::Logprobs(fault)) => json_response(to_json(&write(&sample, broken(&sample.logprobs, *fault)))),
        Some(Fault::Hang) | None => json_response(to_json(&write(&sample, Some(json!(sample.logprobs))))),
    }
}

impl Shared {
    /// Tells whether a turn's fault holds for this call, and counts the call.
    fn fault_holds(&self, turn: (Option<usize>, usize), times: Option<u32>) -> bool {
        let Some(times) = times else { return true };
        let mut n_faults = self.n_faults.lock();
        let n_before = n_faults.entry(turn).or_default();
        *n_before += 1;
        *n_before <= times
    }
}

/// Stands for a bare `NaN` until the answer is text, since no JSON value is one.
const NAN_MARK: &str = "\u{0}nan\u{0}";

fn broken(logprobs: &[f64], fault: LogprobFault) -> Option<Value> {
    let mut values: Vec<Value> = logprobs.iter().map(|value| json!(value)).collect();
    let last = values.pop();
    match fault {
        LogprobFault::Missing => return None,
        LogprobFault::Short => {}
        LogprobFault::Nan => values.extend(last.map(|_| json!(NAN_MARK))),
        LogprobFault::Null => values.extend(last.map(|_| Value::Null)),
        LogprobFault::Positive => values.extend(last.map(|_| json!(0.5))),
    }
    Some(values.into())
}

fn to_json(answer: &Value) -> String {
    answer.to_string().replace(&json!(NAN_MARK).to_string(), "NaN")
}

fn json_response(body: String) -> Response {
    ([("content-type", "application/json")], body).into_response()
}

/// Half of an answer, and then the connection ends.
fn cut(body: String) -> Response {
    let mut half = Bytes::from(body);
    half.truncate(half.len() / 2);
    let broken = stream::iter([Ok(half), Err(io::Error::other("cut by the script"))]);
    (StatusCode::OK, Body::from_stream(broken)).into_response()
}
