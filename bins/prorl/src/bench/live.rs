//! A sandbox that is measured, with somebody who asks it for things.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use prorl_sandbox::{Runtime, Sandbox, SandboxSpec};
use prorl_tools::host::ToolClient;
use tokio::task::JoinSet;

/// How long the guest may take to end everything before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// How long a call may take; far more than any takes.
pub(super) const CALL_LIMIT: Duration = Duration::from_mins(1);

/// A sandbox that stands and answers.
pub(super) struct Live {
    pub(super) tools: Arc<ToolClient>,
    pub(super) sandbox: Sandbox,
}

impl Live {
    /// Starts one.
    pub(super) async fn start(runtime: &dyn Runtime, spec: &SandboxSpec) -> anyhow::Result<Self> {
        let mut sandbox = runtime.start(spec).await.context("no sandbox")?;
        let tools = Arc::new(ToolClient::new(sandbox.take_channel().context("the channel is there after a start")?));
        Ok(Self { tools, sandbox })
    }

    /// Ends it with all that runs in it.
    pub(super) async fn end(self) -> anyhow::Result<()> {
        Ok(self.sandbox.shutdown(GRACE).await?)
    }
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
