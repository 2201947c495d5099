//! The sandboxes that are measured, with somebody who asks them for things.

use std::time::Duration;

use anyhow::{Context, ensure};
use prorl_sandbox::{Image, Limits, SandboxSpec};
use prorl_tools::{
    host::{BashCall, ExecOutput, ExecSpec, ToolClient},
    wire::BashEnd,
};
use tokio::time::Instant;

pub(super) use crate::bench::live::{CALL_LIMIT, Live, end_many};
use crate::bench::runtimes::Runtimes;

/// Every limit there is. None is near to what is measured by them, but for what is to run into them.
pub(super) const ALL: Limits = Limits {
    memory_bytes: Some(512 << 20),
    pids: Some(512),
    cpus: Some(1.0),
    open_files: Some(1024),
    file_bytes: Some(1 << 30),
    wall: Some(Duration::from_hours(2)),
};

/// Sizes of the writable layer and of `/tmp`, in bytes: what fills them does so often.
const LAYER_BYTES: u64 = 256 << 20;
const TMP_BYTES: u64 = 128 << 20;

/// Where they come from.
pub(super) struct Ground {
    runtimes: Runtimes,
}

impl Ground {
    pub(super) fn make() -> anyhow::Result<Self> {
        Ok(Self { runtimes: Runtimes::make()? })
    }

    /// Starts one of the host's programs.
    pub(super) async fn start(&self, limits: Limits) -> anyhow::Result<Live> {
        let spec =
            SandboxSpec { layer_bytes: LAYER_BYTES, tmp_bytes: TMP_BYTES, limits, ..self.runtimes.spec(Image::Host) };
        Live::start(&*self.runtimes.namespace, &spec).await
    }
}

impl Live {
    /// Runs a Python script to its end.
    pub(super) async fn python(&self, script: &str, args: &[String]) -> anyhow::Result<ExecOutput> {
        Ok(self.tools.exec(&ExecSpec::new(self.python_words(script, args)?), CALL_LIMIT).await?)
    }

    /// Returns the words by which a Python script is run, where there is an interpreter.
    pub(super) fn python_words(&self, script: &str, args: &[String]) -> anyhow::Result<Vec<String>> {
        let python = self.sandbox.facts().hello.python.as_ref().context("this machine has no python3")?;
        let words = [python.path.as_str(), "-c", script].map(str::to_owned);
        Ok(words.into_iter().chain(args.iter().cloned()).collect())
    }

    fn has_python(&self) -> bool {
        self.sandbox.facts().hello.python.is_some()
    }
}

/// Runs a command in the session of a sandbox; returns how long it took.
pub(super) async fn bash(tools: &ToolClient, command: &str) -> anyhow::Result<Duration> {
    let call = BashCall::new(command);
    let begun = Instant::now();
    let answer = tools.bash(&call, CALL_LIMIT).await?;
    let took = begun.elapsed();
    ensure!(answer.end == BashEnd::Exited(0), "{command}: {:?}: {}", answer.end, answer.output.text());
    Ok(took)
}

/// Starts several with all limits on, and what tools need in each: a shell and, if there is one, an interpreter.
pub(super) async fn start_many(ground: &Ground, n: usize) -> anyhow::Result<Vec<Live>> {
    let mut all = Vec::with_capacity(n);
    for _ in 0..n {
        let live = ground.start(ALL).await?;
        bash(&live.tools, "true").await?;
        if live.has_python() {
            live.tools.ipython("1", CALL_LIMIT).await?;
        }
        all.push(live);
    }
    Ok(all)
}
