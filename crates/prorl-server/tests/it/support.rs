//! A served pipeline with one handler whose stages wait for the test.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use prorl_core::{FailureClass, JobRequest, JobResult, Malformed, Message, Role, Stage, StopReason, Trace};
use prorl_llm::pool::{Pool, PoolConfig};
use prorl_pipeline::{
    AgentHandler, Evaluation, JobContext, Pipeline, PipelineConfig, Prepared, Progress, Registry, RunOutput,
    StageError, Trajectory,
};
use prorl_server::{Error, Listen, Server, ServerConfig};
use serde_json::{Map, Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Semaphore,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

/// Fields of its instances: `at` a stage, `do` `hang`, `panic`, `gate` or a failure class; `final`: `gate`; `reward`.
#[derive(Default)]
pub(crate) struct Probe {
    reached: Counter,
    left: Counter,
    gate: Counter,
    active: AtomicUsize,
    pub(crate) most_active: AtomicUsize,
}

struct Counter(Semaphore);

impl Default for Counter {
    fn default() -> Self {
        Self(Semaphore::new(0))
    }
}

impl Counter {
    fn add(&self, n: usize) {
        self.0.add_permits(n);
    }

    async fn take(&self) {
        self.0.acquire().await.unwrap().forget();
    }
}

/// Says that a job's stage was left, however that came.
struct Stay<'a>(&'a Probe);

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::SeqCst);
        self.0.left.add(1);
    }
}

impl Probe {
    /// Waits until a job has come to the stage in which it does something.
    pub(crate) async fn reached(&self) {
        self.reached.take().await;
    }

    /// Waits until such a job has left that stage.
    pub(crate) async fn left(&self) {
        self.left.take().await;
    }

    pub(crate) fn open_gate(&self, n: usize) {
        self.gate.add(n);
    }

    async fn act(&self, job: &JobContext, stage: Stage) -> Result<(), StageError> {
        let field = |name: &str| job.instance().get(name).and_then(Value::as_str);
        if field("at") != Some(stage.as_str()) {
            return Ok(());
        }
        let active = self.active.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_active.fetch_max(active, Ordering::SeqCst);
        let _stay = Stay(self);
        self.reached.add(1);
        match field("do") {
            Some("hang") => std::future::pending().await,
            Some("gate") => {
                self.gate.take().await;
                Ok(())
            }
            Some("panic") => panic!("on purpose"),
            Some(word) => {
                let class = FailureClass::ALL.iter().find(|class| class.as_str() == word).unwrap();
                Err(StageError::text(*class, "on purpose"))
            }
            None => Ok(()),
        }
    }
}

struct OneMessage;

impl Progress for OneMessage {
    fn snapshot(&self) -> RunOutput {
        let messages = vec![Message::fed(Role::User, "hi", vec![1, 2])];
        let trajectory = Trajectory { messages, traces: vec![Trace::new(vec![1, 2])] };
        RunOutput { trajectory, stop_reason: StopReason::Finish, ..RunOutput::default() }
    }
}

#[async_trait]
impl AgentHandler for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn check(&self, request: &JobRequest) -> Result<(), Malformed> {
        match request.instance.get("reward") {
            None | Some(Value::Number(_)) => Ok(()),
            Some(other) => {
                let problem = format!("expected a number, found {}", prorl_core::request::kind_of(other));
                Err(Malformed::new("instance.reward", problem))
            }
        }
    }

    async fn init(&self, job: &JobContext) -> Result<Prepared, StageError> {
        self.act(job, Stage::Init).await?;
        Ok(Prepared::default())
    }

    async fn run(&self, job: &JobContext, _prepared: &Prepared) -> Result<RunOutput, StageError> {
        job.set_progress(Arc::new(OneMessage));
        self.act(job, Stage::Run).await?;
        Ok(OneMessage.snapshot())
    }

    async fn eval(&self, job: &JobContext, _: &Prepared, _: &RunOutput) -> Result<Evaluation, StageError> {
        self.act(job, Stage::Eval).await?;
        let reward = job.instance().get("reward").and_then(Value::as_f64).unwrap_or(0.0);
        let input_ids = json!(job.request().include.input_ids);
        Ok(Evaluation { reward, report: Map::from_iter([("input_ids".to_owned(), input_ids)]) })
    }

    async fn final_result(&self, job: &JobContext, draft: JobResult) -> JobResult {
        if job.instance().get("final").is_some() {
            self.gate.take().await;
        }
        draft
    }
}

/// A served pipeline.
pub(crate) struct Service {
    pub(crate) url: String,
    pub(crate) addr: Option<SocketAddr>,
    pub(crate) pipeline: Pipeline,
    pub(crate) probe: Arc<Probe>,
    pub(crate) http: reqwest::Client,
    stop: CancellationToken,
    serving: JoinSet<Result<(), Error>>,
}

impl Service {
    pub(crate) async fn start() -> Self {
        Self::with(ServerConfig::default(), small()).await
    }

    pub(crate) async fn with(config: ServerConfig, pipeline: PipelineConfig) -> Self {
        let listen = "127.0.0.1:0".parse().unwrap();
        Self::on(listen, config, pipeline).await.unwrap()
    }

    pub(crate) async fn on(listen: Listen, config: ServerConfig, pipeline: PipelineConfig) -> Result<Self, Error> {
        let probe = Arc::<Probe>::default();
        let mut registry = Registry::default();
        registry.register(Arc::clone(&probe)).unwrap();
        let pipeline = Pipeline::new(pipeline, registry);
        pipeline.start();
        let bound = Server::bind(listen, config, pipeline.clone(), Pool::new(PoolConfig::default())).await;
        let server = match bound {
            Ok(server) => server,
            Err(err) => {
                pipeline.close().await;
                return Err(err);
            }
        };
        let (url, addr) = (server.address(), server.local_addr());
        let stop = CancellationToken::new();
        let mut serving = JoinSet::new();
        serving.spawn(server.serve(stop.clone()));
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        Ok(Self { url, addr, pipeline, probe, http, stop, serving })
    }

    /// Asks the server to end and returns when nothing of it is left.
    pub(crate) async fn end(mut self) {
        self.stop.cancel();
        self.serving.join_next().await.unwrap().unwrap().unwrap();
        self.pipeline.close().await;
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        answer(self.http.get(format!("{}{path}", self.url))).await
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<Option<Value>>) -> (u16, Value) {
        let call = self.http.post(format!("{}{path}", self.url));
        answer(match body.into() {
            Some(body) => call.json(&body),
            None => call,
        })
        .await
    }

    pub(crate) async fn delete(&self, path: &str) -> (u16, Value) {
        answer(self.http.delete(format!("{}{path}", self.url))).await
    }

    /// Opens a connection of one's own and sends a request whole; the answer is left unread.
    pub(crate) async fn send_raw(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr.unwrap()).await.unwrap();
        let body = body.to_string();
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        stream
    }

    /// Waits for a job's end.
    pub(crate) async fn ended(&self, id: &str) -> Value {
        let (status, look) = self.get(&format!("/v1/jobs/{id}?wait=60")).await;
        assert_eq!((status, &look["state"]), (200, &json!("ended")), "{look}");
        look["result"].clone()
    }
}

pub(crate) async fn answer(call: reqwest::RequestBuilder) -> (u16, Value) {
    let response = call.send().await.unwrap();
    let status = response.status().as_u16();
    assert_eq!(response.headers()["content-type"], "application/json");
    (status, response.json().await.unwrap())
}

/// Reads until the server closes the connection.
pub(crate) async fn read_all(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await.unwrap();
    String::from_utf8(text).unwrap()
}

pub(crate) fn small() -> PipelineConfig {
    PipelineConfig { init_workers: 8, run_workers: 8, eval_workers: 8, ..PipelineConfig::default() }
}

/// A job of the probe, with further fields of its instance.
pub(crate) fn job(id: &str, instance: Value) -> Value {
    let mut instance = instance;
    instance["data_source"] = "probe".into();
    json!({"job_id": id, "instance": instance})
}

/// Asserts the code of an error and that its body has the one shape; returns the detail.
pub(crate) fn refused(answer: &(u16, Value), status: u16, code: &str) -> String {
    assert_eq!((answer.0, &answer.1["code"]), (status, &json!(code)), "{answer:?}");
    let body = answer.1.as_object().unwrap();
    assert_eq!(body.len(), 2, "{body:?}");
    body["detail"].as_str().unwrap().to_owned()
}
