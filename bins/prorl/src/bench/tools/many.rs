//! Many sandboxes at once, each with a command at a time. Every answer is compared with what it must be.

use std::{sync::Arc, time::Duration};

use prorl_tools::{
    host::{BashCall, ToolClient},
    wire::BashEnd,
};
use serde::Serialize;
use tokio::{task::JoinSet, time::Instant};

use super::live::{CALL_LIMIT, Live};
use crate::{
    bench::figures::{Spread, ratio, rounded},
    output,
};

/// What came of many commands at once.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    sessions: usize,
    commands: usize,
    /// Answers with another output or another exit code than the command's, or none.
    pub(super) wrong: usize,
    seconds: f64,
    pub(super) commands_per_second: f64,
    /// Of each command, from the call to the answer.
    call: Option<Spread>,
    pub(super) p99_by_p50: Option<f64>,
}

/// What a session has seen.
#[derive(Default)]
struct Seen {
    times: Vec<Duration>,
    wrong: Vec<String>,
}

pub(super) async fn measure(all: &[Live], n_commands: u32) -> anyhow::Result<Figures> {
    // Their shells are there before.
    let mut working = JoinSet::new();
    for live in all {
        let tools = Arc::clone(&live.tools);
        working.spawn(async move { tools.bash(&BashCall::new("true"), CALL_LIMIT).await });
    }
    while let Some(begun) = working.join_next().await {
        begun.expect("a call does not panic")?;
    }
    let begun = Instant::now();
    let mut working = JoinSet::new();
    for (idx, live) in all.iter().enumerate() {
        working.spawn(session(Arc::clone(&live.tools), idx, n_commands));
    }
    let mut sum = Seen::default();
    while let Some(seen) = working.join_next().await {
        let Seen { times, wrong } = seen.expect("a call does not panic");
        sum.times.extend(times);
        sum.wrong.extend(wrong);
    }
    let seconds = begun.elapsed().as_secs_f64();
    if let Some(first) = sum.wrong.first() {
        output::note(format_args!("note: a wrong answer: {first}"));
    }
    let commands = all.len() * n_commands as usize;
    let call = Spread::of(sum.times);
    Ok(Figures {
        sessions: all.len(),
        commands,
        wrong: sum.wrong.len(),
        seconds: rounded(seconds),
        commands_per_second: rounded(commands as f64 / seconds),
        p99_by_p50: ratio(call.as_ref().map(|call| call.p99_ms), call.as_ref().map(|call| call.p50_ms)),
        call,
    })
}

/// Runs commands in one sandbox. None is like another, and half of them fail.
async fn session(tools: Arc<ToolClient>, session: usize, n_commands: u32) -> Seen {
    let mut seen = Seen::default();
    for n in 0..n_commands {
        let (word, code) = if n % 2 == 0 { ("true", 0) } else { ("false", 1) };
        let call = BashCall::new(format!("echo answer {session}:{n}; {word}"));
        let begun = Instant::now();
        let answer = tools.bash(&call, CALL_LIMIT).await;
        seen.times.push(begun.elapsed());
        let right = format!("answer {session}:{n}\n");
        match answer {
            Ok(answer) if answer.end == BashEnd::Exited(code) && answer.output.text() == right => {}
            other => seen.wrong.push(format!("{}: {other:?}", call.command)),
        }
    }
    seen
}
