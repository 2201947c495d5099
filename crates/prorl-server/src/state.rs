//! What every request can reach.

use std::{fmt, sync::Arc};

use prorl_core::status::{ServiceState, ServiceStatus};
use prorl_llm::pool::Pool;
use prorl_pipeline::{Pipeline, StopReport};
use tokio::{
    task::JoinHandle,
    time::{Duration, Instant},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{ServerConfig, auth::Token, problem::Problem};

/// A job that has been in one place for longer than this is listed in `/status` as stuck.
const PATIENCE: Duration = Duration::from_secs(30);

/// The most jobs that `/status` lists as stuck.
const STUCK_LISTED: usize = 100;

/// The pipeline and the backends behind the endpoints. Clones share them.
#[derive(Clone)]
pub struct AppState {
    inner: Arc<Inner>,
}

struct Inner {
    config: ServerConfig,
    token: Option<Token>,
    pipeline: Pipeline,
    pool: Pool,
    started: Instant,
    tasks: TaskTracker,
    closing: CancellationToken,
}

impl AppState {
    /// Brings together what the endpoints need. Uptime counts from here.
    pub fn new(config: ServerConfig, pipeline: Pipeline, pool: Pool) -> Self {
        let token = config.token.as_ref().map(|token| Token::new(token.expose()));
        let (tasks, closing) = (TaskTracker::new(), CancellationToken::new());
        let inner = Inner { config, token, pipeline, pool, started: Instant::now(), tasks, closing };
        Self { inner: Arc::new(inner) }
    }

    /// Returns the settings.
    pub fn config(&self) -> &ServerConfig {
        &self.inner.config
    }

    /// Returns the pipeline.
    pub fn pipeline(&self) -> &Pipeline {
        &self.inner.pipeline
    }

    /// Returns the backends.
    pub fn pool(&self) -> &Pool {
        &self.inner.pool
    }

    pub(crate) fn token(&self) -> Option<&Token> {
        self.inner.token.as_ref()
    }

    /// Returns what `GET /status` answers. The original's flat fields are the same numbers as the nested ones.
    pub fn status(&self) -> ServiceStatus {
        let pipeline = self.pipeline();
        let (state, stages, jobs) = (pipeline.state(), pipeline.stages(), pipeline.counts());
        ServiceStatus {
            running: state == ServiceState::Running,
            state,
            uptime: self.inner.started.elapsed().as_secs_f64(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            stages,
            jobs,
            backends: self.pool().list(),
            sandboxes: pipeline.sandboxes(),
            stuck: pipeline.stuck(PATIENCE, STUCK_LISTED),
            init_queue: stages.init.queued,
            run_queue: stages.run.queued,
            eval_queue: stages.eval.queued,
            active_init: stages.init.active,
            active_run: stages.run.active,
            active_eval: stages.eval.active,
            total: jobs.accepted,
        }
    }

    /// Runs work in a task that ends with the server at the latest; its output is `None` then.
    pub(crate) fn spawn<F>(&self, work: F) -> JoinHandle<Option<F::Output>>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let closing = self.inner.closing.clone();
        self.inner.tasks.spawn(async move { closing.run_until_cancelled(work).await })
    }

    /// Stops the pipeline, to its end even when the client that asked leaves.
    pub(crate) async fn stop_pipeline(&self) -> Result<StopReport, Problem> {
        let pipeline = self.pipeline().clone();
        let stopping = self.spawn(async move { pipeline.stop().await });
        let report = stopping.await.map_err(|err| Problem::internal("the stop broke", &err))?;
        report.flatten().ok_or_else(Problem::not_running)
    }

    /// Ends the tasks that requests have left behind and waits until they are gone. The pipeline and the backends are the
    /// caller's to end.
    pub async fn close(&self) {
        self.inner.closing.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }
}

impl fmt::Debug for AppState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AppState").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
