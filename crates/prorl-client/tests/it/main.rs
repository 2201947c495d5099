//! The client against a real server.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use prorl_client::{AddBackend, BackendKind, Client, ClientError};
use prorl_core::{Instance, JobId, JobRequest, Secret, Status, StopReason, request::InputIds, status::ServiceState};
use prorl_llm::pool::{Pool, PoolConfig};
use prorl_pipeline::{
    AgentHandler, Evaluation, JobContext, Pipeline, PipelineConfig, Prepared, Registry, RunOutput, StageError,
};
use prorl_server::{Error, Listen, Server, ServerConfig};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::Semaphore,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

/// A handler whose run stage takes until the test lets it go.
struct Gated {
    reached: Semaphore,
    gate: Semaphore,
}

#[async_trait]
impl AgentHandler for Gated {
    fn name(&self) -> &'static str {
        "gated"
    }

    async fn init(&self, _job: &JobContext) -> Result<Prepared, StageError> {
        Ok(Prepared::default())
    }

    async fn run(&self, _job: &JobContext, _prepared: &Prepared) -> Result<RunOutput, StageError> {
        self.reached.add_permits(1);
        self.gate.acquire().await.unwrap().forget();
        Ok(RunOutput { stop_reason: StopReason::Finish, ..RunOutput::default() })
    }

    async fn eval(&self, _: &JobContext, _: &Prepared, _: &RunOutput) -> Result<Evaluation, StageError> {
        Ok(Evaluation { reward: 0.1, ..Evaluation::default() })
    }
}

struct Service {
    client: Client,
    address: String,
    handler: Arc<Gated>,
    pipeline: Pipeline,
    stop: CancellationToken,
    serving: JoinSet<Result<(), Error>>,
}

impl Service {
    async fn start(listen: Listen, token: Option<&str>) -> Self {
        let token = token.map(|token| Secret::new(token.to_owned()));
        let handler = Arc::new(Gated { reached: Semaphore::new(0), gate: Semaphore::new(0) });
        let mut registry = Registry::default();
        registry.register(Arc::clone(&handler)).unwrap();
        let pipeline =
            Pipeline::new(PipelineConfig { queue_limit: 1, init_workers: 1, ..Default::default() }, registry);
        let config = ServerConfig { token: token.clone(), ..ServerConfig::default() };
        let pool = Pool::new(PoolConfig::default());
        let server = Server::bind(listen, config, pipeline.clone(), pool).await.unwrap();
        let address = server.address();
        let client = Client::new(&address, token).unwrap();
        let stop = CancellationToken::new();
        let mut serving = JoinSet::new();
        serving.spawn(server.serve(stop.clone()));
        Self { client, address, handler, pipeline, stop, serving }
    }

    async fn started() -> Self {
        let service = Self::start(any_port(), None).await;
        service.client.start().await.unwrap();
        service
    }

    async fn reached(&self) {
        self.handler.reached.acquire().await.unwrap().forget();
    }

    fn let_go(&self) {
        self.handler.gate.add_permits(1);
    }

    async fn end(mut self) {
        self.stop.cancel();
        self.serving.join_next().await.unwrap().unwrap().unwrap();
        self.pipeline.close().await;
    }
}

fn any_port() -> Listen {
    "127.0.0.1:0".parse().unwrap()
}

fn id(text: &str) -> JobId {
    JobId::new(text).unwrap()
}

fn request(name: &str) -> JobRequest {
    let instance = Instance(json!({"data_source": "gated"}).as_object().unwrap().clone());
    JobRequest { job_id: Some(id(name)), ..JobRequest::new(instance) }
}

#[track_caller]
fn code<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> String {
    let error = answer.unwrap_err();
    error.code().unwrap_or_else(|| panic!("{error:?}")).to_owned()
}

#[tokio::test]
async fn a_job_is_processed_and_its_numbers_arrive_bit_for_bit() {
    let service = Service::started().await;
    let request = request("j1");
    let (result, ()) = tokio::join!(service.client.process(&request), async {
        service.reached().await;
        service.let_go();
    });
    let result = result.unwrap();
    assert_eq!((result.job_id.as_str(), result.outcome.status), ("j1", Status::Completed));
    assert_eq!(result.reward.map(f64::to_bits), Some(0.1_f64.to_bits()));
    // The same id and body bring the same result, which shows that the request survives the wire.
    assert_eq!(service.client.process(&request).await.unwrap(), result);
    service.end().await;
}

#[tokio::test]
async fn a_job_is_submitted_looked_at_and_cancelled() {
    let service = Service::started().await;
    let full = JobRequest {
        timeout: Some(60.0),
        labels: [("step".to_owned(), "3".to_owned())].into(),
        include: prorl_core::request::Include { input_ids: Some(InputIds::Full), partial: true },
        ..request("j1")
    };
    assert_eq!(service.client.submit(&full).await.unwrap().job_id, id("j1"));
    service.reached().await;
    let view = service.client.job(&id("j1"), Duration::ZERO).await.unwrap();
    assert_eq!((view.state.as_str(), view.result), ("run", None));
    assert_eq!(service.client.cancel(&id("j1")).await.unwrap().state, "run");
    let view = service.client.job(&id("j1"), Duration::from_mins(1)).await.unwrap();
    assert_eq!((view.state.as_str(), view.result.unwrap().outcome.status), ("ended", Status::Cancelled));
    service.end().await;
}

#[tokio::test]
async fn dropping_the_call_cancels_the_job() {
    let service = Service::started().await;
    let request = request("j1");
    tokio::select! {
        _ = service.client.process(&request) => panic!("a job that waits was answered"),
        () = service.reached() => {}
    }
    let view = service.client.job(&id("j1"), Duration::from_mins(1)).await.unwrap();
    assert_eq!(view.result.unwrap().outcome.status, Status::Cancelled);
    service.end().await;
}

#[tokio::test]
async fn refusals_are_typed() {
    let service = Service::start(any_port(), None).await;
    let client = &service.client;
    let stopped = client.submit(&request("j1")).await.unwrap_err();
    assert!(matches!(&stopped, ClientError::Refused { status: 503, code, .. } if code == "not_running"), "{stopped}");
    assert!(stopped.is_retryable());
    assert_eq!(code(client.stop().await), "not_running");
    client.start().await.unwrap();
    assert_eq!(code(client.start().await), "already_running");
    assert_eq!(client.status().await.unwrap().state, ServiceState::Running);

    assert_eq!(code(client.cancel(&id("late")).await), "job_unknown");
    assert_eq!(code(client.submit(&request("late")).await), "job_cancelled");
    assert_eq!(code(client.job(&id("none"), Duration::ZERO).await), "job_unknown");
    let wrong = JobRequest { timeout: Some(-1.0), ..request("j1") };
    let malformed = client.process(&wrong).await.unwrap_err();
    assert_eq!(malformed.to_string(), "refused with 422 malformed: timeout: expected seconds above 0, found -1");
    assert!(!malformed.is_retryable());
    service.end().await;
}

#[tokio::test]
async fn a_stop_says_what_it_ended() {
    let service = Service::started().await;
    service.client.submit(&request("j1")).await.unwrap();
    service.reached().await;
    let stopped = service.client.stop().await.unwrap();
    assert_eq!((stopped.cancelled, stopped.sandboxes_killed), (1, 0));
    assert!(!service.client.status().await.unwrap().running);
    service.end().await;
}

#[tokio::test]
async fn backends_are_added_and_cleared() {
    let service = Service::started().await;
    let backend = AddBackend {
        kind: BackendKind::Generate,
        weight_version: Some(4),
        max_concurrent: Some(2),
        api_key: Some(Secret::new("key".to_owned())),
        probe: false,
        ..AddBackend::new("http://127.0.0.1:9")
    };
    let added = service.client.add_llm_server(&backend).await.unwrap().backend;
    assert_eq!(
        (added.address.as_str(), added.kind.as_str(), added.weight_version),
        ("http://127.0.0.1:9", "generate", 4)
    );
    assert_eq!(service.client.status().await.unwrap().backends, [added]);
    assert_eq!(code(service.client.add_llm_server(&AddBackend::new("nonsense")).await), "malformed");
    assert_eq!(service.client.clear_llm_server().await.unwrap(), 1);
    assert_eq!(service.client.clear_llm_server().await.unwrap(), 0);
    service.end().await;
}

#[tokio::test]
async fn the_token_is_sent() {
    let service = Service::start(any_port(), Some("s3cret")).await;
    service.client.start().await.unwrap();
    let stranger = Client::new(&service.address, None).unwrap();
    assert_eq!(code(stranger.status().await), "unauthorized");
    service.end().await;
}

#[tokio::test]
async fn a_socket_file_serves_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::start(Listen::Unix(folder.path().join("p.sock")), None).await;
    assert!(service.address.starts_with("unix:"));
    service.client.start().await.unwrap();
    assert!(service.client.status().await.unwrap().running);
    service.end().await;
}

#[tokio::test]
async fn a_server_that_is_not_there_is_worth_another_try() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let client = Client::new(&format!("http://{gone}"), None).unwrap();
    let error = client.status().await.unwrap_err();
    assert!(matches!(error, ClientError::Connect(_)) && error.is_retryable(), "{error:?}");
}

/// Answers one request with `bytes` and closes.
async fn answered_with(bytes: &'static str) -> ClientError {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(&format!("http://{}", listener.local_addr().unwrap()), None).unwrap();
    let answering = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 4096];
        assert!(stream.read(&mut head).await.unwrap() > 0);
        stream.write_all(bytes.as_bytes()).await.unwrap();
    };
    let (answer, ()) = tokio::join!(client.status(), answering);
    answer.unwrap_err()
}

#[tokio::test]
async fn broken_answers_are_told_apart() {
    let cut = answered_with("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"runn").await;
    assert!(matches!(cut, ClientError::Body(_)) && cut.is_retryable(), "{cut:?}");
    let none = answered_with("").await;
    assert!(matches!(none, ClientError::Connect(_)) && none.is_retryable(), "{none:?}");
    let foreign = answered_with("HTTP/1.1 502 Bad\r\ncontent-length: 12\r\n\r\n<h1>bad</h1>").await;
    assert_eq!(foreign.to_string(), "refused with 502: <h1>bad</h1>");
    assert!(foreign.code().is_none() && foreign.is_retryable());
    let strange = answered_with("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    assert!(matches!(strange, ClientError::Decode(_)) && !strange.is_retryable(), "{strange:?}");
}

#[test]
fn requests_carry_what_was_asked_and_nothing_unknown_to_the_server() {
    let text = serde_json::to_string(&request("j1")).unwrap();
    let back: JobRequest = serde_json::from_str(&text).unwrap();
    assert_eq!(back, request("j1"));
    assert!(serde_json::from_str::<Value>(&text).unwrap()["sampling_params"].is_object());
}
