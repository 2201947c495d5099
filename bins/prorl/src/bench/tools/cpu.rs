//! Time on processors, ours and that of everything in the sandbox.

use std::{fs, io, time::Duration};

use anyhow::{Context, ensure};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeVal,
};
use prorl_tools::{host::BashCall, wire::BashEnd};
use serde::Serialize;

use super::{
    Args,
    live::{CALL_LIMIT, Ground},
};
use crate::bench::{figures::rounded, memory::children};

/// Processor time of commands, one after the other.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    commands: u32,
    /// Of this process.
    host_s_per_1000: f64,
    /// Of the guest and its shell, and whatever else is in the sandbox.
    sandbox_s_per_1000: f64,
    pub(super) s_per_1000: f64,
}

pub(super) async fn measure(args: &Args, ground: &Ground) -> anyhow::Result<Figures> {
    let live = ground.start().await?;
    let root = live.sandbox.facts().outer_pid;
    let call = BashCall::new("echo hello");
    live.tools.bash(&call, CALL_LIMIT).await?;
    let before = (own()?, of_tree(root).context("no times of the sandbox")?);
    for _ in 0..args.n {
        let answer = live.tools.bash(&call, CALL_LIMIT).await?;
        ensure!(answer.end == BashEnd::Exited(0), "{:?}", answer.end);
    }
    let after = (own()?, of_tree(root).context("no times of the sandbox")?);
    live.end().await?;
    let each =
        |before: Duration, after: Duration| after.saturating_sub(before).as_secs_f64() * 1000.0 / f64::from(args.n);
    let (host, sandbox) = (each(before.0, after.0), each(before.1, after.1));
    Ok(Figures {
        commands: args.n,
        host_s_per_1000: rounded(host),
        sandbox_s_per_1000: rounded(sandbox),
        s_per_1000: rounded(host + sandbox),
    })
}

fn own() -> anyhow::Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let time = |value: TimeVal| {
        let micros = value.tv_sec() * 1_000_000 + value.tv_usec();
        Duration::from_micros(u64::try_from(micros).unwrap_or(0))
    };
    Ok(time(usage.user_time()) + time(usage.system_time()))
}

/// Returns the time that the threads of a process and of all below it have had so far.
fn of_tree(root: u32) -> io::Result<Duration> {
    let mut sum = Duration::ZERO;
    let mut waiting = vec![root];
    while let Some(pid) = waiting.pop() {
        waiting.extend(children(pid)?);
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            let text = fs::read_to_string(thread?.path().join("schedstat"))?;
            let nanos = text.split_whitespace().next().and_then(|nanos| nanos.parse().ok());
            sum += Duration::from_nanos(nanos.unwrap_or(0));
        }
    }
    Ok(sum)
}
