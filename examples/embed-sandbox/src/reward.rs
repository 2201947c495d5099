//! One sample, one sandbox, one reward.

use std::{fmt, time::Duration};

use anyhow::Context;
use prorl_sandbox::{Runtime, SandboxSpec};
use prorl_tools::host::{ExecSpec, ToolClient};
use tokio::time::Instant;

use crate::samples::Sample;

/// How long one test may run.
const TEST_LIMIT: Duration = Duration::from_secs(5);

/// How long a file may take to be written.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// How long the guest may take to end everything before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// Where the program is put.
const PROGRAM: &str = "/workspace/program.sh";

/// What became of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Every test passed.
    Right,
    /// A test had another output.
    Wrong,
    /// A test ended with a failure.
    Broken,
    /// A test did not end.
    Endless,
}

impl Verdict {
    /// Returns the reward.
    pub(crate) fn reward(self) -> f64 {
        f64::from(u8::from(self == Self::Right))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Right => "right",
            Self::Wrong => "wrong",
            Self::Broken => "broken",
            Self::Endless => "endless",
        })
    }
}

/// A sample whose sandbox is gone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scored {
    /// What became of it.
    pub(crate) verdict: Verdict,
    /// From the call to the guest's hello.
    pub(crate) started_in: Duration,
    /// All of its tests.
    pub(crate) ran_in: Duration,
    /// The pid namespace that the sandbox had, to look for what could be left of it.
    pub(crate) pid_namespace: u64,
    /// When it was gone, in hundredths of a second since boot: the kernel may give that namespace's number to a later one.
    pub(crate) gone_at: u64,
}

/// Tests a program in a sandbox of its own.
///
/// # Errors
/// When the sandbox or the channel to it fails. Nothing that the program does is an error.
pub(crate) async fn score(runtime: &dyn Runtime, spec: &SandboxSpec, sample: &Sample) -> anyhow::Result<Scored> {
    let begun = Instant::now();
    let mut sandbox = runtime.start(spec).await.context("there is no sandbox")?;
    let started_in = begun.elapsed();
    let tools = ToolClient::new(sandbox.take_channel().context("the channel is there after a start")?);

    let begun = Instant::now();
    let verdict = judge(&tools, sample).await;
    let ran_in = begun.elapsed();

    // Whatever the tests said: it returns when the kernel has said that nothing is left inside.
    sandbox.shutdown(GRACE).await?;
    let (gone_at, pid_namespace) = (since_boot()?, sandbox.facts().hello.pid_namespace);
    Ok(Scored { verdict: verdict?, started_in, ran_in, pid_namespace, gone_at })
}

/// Returns the time since boot, in the unit in which `/proc` tells when a process began.
fn since_boot() -> anyhow::Result<u64> {
    let uptime = std::fs::read_to_string("/proc/uptime").context("there is no clock")?;
    let hundredths: String = uptime.chars().take_while(|c| *c != ' ').filter(|c| *c != '.').collect();
    hundredths.parse().context("the clock tells no time")
}

async fn judge(tools: &ToolClient, sample: &Sample) -> anyhow::Result<Verdict> {
    tools.write_file(PROGRAM, sample.program.as_bytes(), 0o644, WRITE_LIMIT).await?;
    for (input, expected) in sample.tests {
        let run = ExecSpec { stdin: format!("{input}\n").into_bytes(), ..ExecSpec::new(["sh", PROGRAM]) };
        let done = tools.exec(&run, TEST_LIMIT).await?;
        if done.timed_out {
            return Ok(Verdict::Endless);
        }
        if !done.success() {
            return Ok(Verdict::Broken);
        }
        if done.stdout.text().trim_end() != *expected {
            return Ok(Verdict::Wrong);
        }
    }
    Ok(Verdict::Right)
}
