//! Puts the crates together: one service of pool, sandboxes, handlers, pipeline and HTTP.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use prorl_agents::{CallLimits, EgressPolicy, Environment, Math, PathPolicy, SandboxDefaults};
use prorl_core::request::RuntimeChoice;
use prorl_llm::{
    pool::{Pool, PoolConfig},
    tokenizer::ChatTokenizer,
};
use prorl_pipeline::{Pipeline, PipelineConfig, Registry};
use prorl_server::{Listen, Server, ServerConfig};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    sandboxes::{SandboxConfig, Sandboxes},
    stores::ServedStore,
};

/// How long the last jobs may take to end once the server has stopped.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);

/// How long the sandbox of a trial may take to end by itself.
const TRIAL_GRACE: Duration = Duration::from_secs(2);

/// Everything that a service is made of.
pub(crate) struct Parts {
    pub(crate) pipeline: PipelineConfig,
    pub(crate) pool: PoolConfig,
    pub(crate) server: ServerConfig,
    pub(crate) sandboxes: SandboxConfig,
    pub(crate) runtime: RuntimeChoice,
    pub(crate) image: Option<PathBuf>,
    /// Where images are kept that jobs name or bring; without it packed ones need Apptainer.
    pub(crate) store: Option<ServedStore>,
    pub(crate) tokenizer: ChatTokenizer,
    pub(crate) limits: CallLimits,
    pub(crate) sandbox_limits: SandboxDefaults,
    pub(crate) paths: PathPolicy,
    pub(crate) allow_host_network: bool,
    pub(crate) egress: EgressPolicy,
}

/// A running service and the tasks that it owns.
pub(crate) struct Service {
    pub(crate) pipeline: Pipeline,
    pub(crate) pool: Pool,
    pub(crate) address: String,
    stop: CancellationToken,
    tasks: JoinSet<anyhow::Result<()>>,
    /// Kept for last: nothing of a sandbox outlives it.
    _sandboxes: Sandboxes,
}

/// Loads a tokenizer folder, or the built-in one.
pub(crate) fn tokenizer(folder: Option<&Path>) -> anyhow::Result<ChatTokenizer> {
    match folder {
        None => Ok(ChatTokenizer::builtin()),
        Some(folder) => {
            ChatTokenizer::load(folder).with_context(|| format!("tokenizer {} does not load", folder.display()))
        }
    }
}

/// Starts and ends one sandbox as instances get it that ask for nothing, so that a server with which no job could run says so
/// at once. A server whose instances have to name an image has nothing to try. From here on the environment holds the image.
async fn try_out(env: &Environment) -> anyhow::Result<()> {
    let Some((runtime, spec)) = env.default_sandbox().await.context("the image of instances that name none")? else {
        return Ok(());
    };
    let failed = || format!("no sandbox of the {} runtime can be started here (see `prorl doctor`)", runtime.name());
    let sandbox = runtime.start(&spec).await.with_context(failed)?;
    sandbox.shutdown(TRIAL_GRACE).await.with_context(failed)
}

impl Service {
    /// Builds the service and starts listening; jobs are taken after [`Pipeline::start`].
    pub(crate) async fn start(listen: Listen, parts: Parts) -> anyhow::Result<Self> {
        let sandboxes = Sandboxes::open(parts.sandboxes)?;
        let runtimes = sandboxes.runtimes(parts.runtime, parts.image)?;
        let pool = Pool::new(parts.pool);
        let mut env = Environment::new(runtimes, sandboxes.guest.path(), pool.clone(), parts.tokenizer);
        (env.paths, env.limits, env.sandboxes) = (parts.paths, parts.limits, parts.sandbox_limits);
        (env.allow_host_network, env.egress) = (parts.allow_host_network, parts.egress);
        env.unpacker = parts.store.map(|store| store.unpacker(&sandboxes)).transpose()?.flatten();
        try_out(&env).await?;
        let env = Arc::new(env);
        let mut registry = Registry::default();
        registry.register(Math::new(Arc::clone(&env)))?;
        let pipeline = Pipeline::new(parts.pipeline, registry);

        let server = Server::bind(listen, parts.server, pipeline.clone(), pool.clone()).await?;
        let address = server.address();
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let probing = pool.clone();
        let until = stop.child_token();
        tasks.spawn(async move {
            probing.run(until).await;
            Ok(())
        });
        let until = stop.child_token();
        tasks.spawn(async move { server.serve(until).await.context("the server broke") });
        Ok(Self { pipeline, pool, address, stop, tasks, _sandboxes: sandboxes })
    }

    /// Waits until one of the service's tasks ends by itself, which only a failure makes it do.
    pub(crate) async fn broken(&mut self) -> anyhow::Error {
        match self.tasks.join_next().await {
            Some(Ok(Err(error))) => error,
            Some(Err(join)) => anyhow::Error::new(join).context("a task of the service broke"),
            Some(Ok(Ok(()))) | None => anyhow::anyhow!("a task of the service ended early"),
        }
    }

    /// Ends every job, proves every sandbox gone, closes every connection.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        // The server first, so that nobody can start the pipeline again behind our back.
        self.stop.cancel();
        let mut ended = Ok(());
        while let Some(task) = self.tasks.join_next().await {
            ended = ended.and(task.context("a task of the service broke").and_then(|ended| ended));
        }
        let closed = tokio::time::timeout(CLOSE_LIMIT, self.pipeline.close()).await;
        closed.context("jobs did not end; their sandboxes end with this process")?;
        ended
    }
}
