//! Where the sandboxes come from that are measured.

use std::sync::Arc;

use prorl_sandbox::{Runtime, SandboxSpec};
use tokio::task::JoinSet;

pub(super) use crate::bench::live::{CALL_LIMIT, Live, end_many};

pub(super) struct Ground {
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) spec: SandboxSpec,
}

impl Ground {
    pub(super) async fn start(&self) -> anyhow::Result<Live> {
        Live::start(&*self.runtime, &self.spec).await
    }
}

/// Starts several at the same moment.
pub(super) async fn start_many(ground: &Ground, n: usize) -> anyhow::Result<Vec<Live>> {
    let mut starting = JoinSet::new();
    for _ in 0..n {
        let (runtime, spec) = (Arc::clone(&ground.runtime), ground.spec.clone());
        starting.spawn(async move { Live::start(&*runtime, &spec).await });
    }
    let mut all = Vec::with_capacity(n);
    while let Some(started) = starting.join_next().await {
        all.push(started.expect("a start does not panic")?);
    }
    Ok(all)
}
