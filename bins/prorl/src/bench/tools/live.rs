//! The sandboxes that are measured, with somebody who asks them for things.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use prorl_sandbox::{Runtime, Sandbox, SandboxSpec};
use prorl_tools::host::ToolClient;
use tokio::task::JoinSet;

/// How long the guest may take to end everything before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// How long a call may take; far more than any takes.
pub(super) const CALL_LIMIT: Duration = Duration::from_mins(1);

/// Where they come from.
pub(super) struct Ground {
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) spec: SandboxSpec,
}

impl Ground {
    pub(super) async fn start(&self) -> anyhow::Result<Live> {
        start(Arc::clone(&self.runtime), self.spec.clone()).await
    }
}

async fn start(runtime: Arc<dyn Runtime>, spec: SandboxSpec) -> anyhow::Result<Live> {
    let mut sandbox = runtime.start(&spec).await.context("no sandbox")?;
    let tools = Arc::new(ToolClient::new(sandbox.take_channel().context("the channel is there after a start")?));
    Ok(Live { tools, sandbox })
}

/// A sandbox that stands and answers.
pub(super) struct Live {
    pub(super) tools: Arc<ToolClient>,
    pub(super) sandbox: Sandbox,
}

impl Live {
    /// Ends it with all that runs in it.
    pub(super) async fn end(self) -> anyhow::Result<()> {
        Ok(self.sandbox.shutdown(GRACE).await?)
    }
}

/// Starts several at the same moment.
pub(super) async fn start_many(ground: &Ground, n: usize) -> anyhow::Result<Vec<Live>> {
    let mut starting = JoinSet::new();
    for _ in 0..n {
        starting.spawn(start(Arc::clone(&ground.runtime), ground.spec.clone()));
    }
    let mut all = Vec::with_capacity(n);
    while let Some(started) = starting.join_next().await {
        all.push(started.expect("a start does not panic")?);
    }
    Ok(all)
}

/// Ends several at the same moment.
pub(super) async fn end_many(all: Vec<Live>) -> anyhow::Result<()> {
    let mut ending = JoinSet::new();
    for live in all {
        ending.spawn(live.end());
    }
    while let Some(ended) = ending.join_next().await {
        ended.expect("an end does not panic")?;
    }
    Ok(())
}
