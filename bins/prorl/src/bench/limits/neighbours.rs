//! What healthy sandboxes see of a neighbour that takes all that it can get.

use std::{sync::Arc, time::Duration};

use prorl_tools::host::ToolClient;
use serde::Serialize;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use super::{
    Args,
    hogs::{Hog, Holds},
    live::{Ground, Live, bash},
};
use crate::{
    bench::{
        figures::{Spread, middle, ratio, rounded},
        machine::Ticks,
    },
    output,
};

/// A tool call of a healthy sandbox: the shell itself, and a program.
const CALL: &str = "echo called; ls / >/dev/null";

/// How many different things are told of the limits of a hog.
const MAX_TOLD: usize = 4;

/// What healthy sandboxes see.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    sandboxes: usize,
    calls_per_second: u64,
    /// Of all phases without a hog.
    alone: Phase,
    /// The greatest p95 of such a phase by the least: what the machine does by itself.
    alone_by_alone: Option<f64>,
    pub(super) beside: Vec<Beside>,
}

/// Tool calls at a steady pace.
#[derive(Debug, Serialize)]
struct Phase {
    /// How long calls took.
    tool: Option<Spread>,
    /// How many got no answer, or failed inside.
    failed: usize,
    /// How much of all processors was in use.
    busy_percent: Option<f64>,
}

/// Tool calls beside a hog, compared with the phases right before and after. Nothing is there of a hog that was not let loose.
#[derive(Debug, Serialize)]
pub(super) struct Beside {
    pub(super) hog: &'static str,
    phase: Option<Phase>,
    p50_by_alone: Option<f64>,
    pub(super) p95_by_alone: Option<f64>,
    /// Some of what is told of its limits.
    told: Vec<String>,
}

/// What was seen in one or several phases.
#[derive(Clone, Default)]
struct Seen {
    times: Vec<Duration>,
    failed: usize,
    busy: Vec<f64>,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.times.extend(other.times);
        self.failed += other.failed;
        self.busy.extend(other.busy);
    }

    fn spread(&self) -> Option<Spread> {
        Spread::of(self.times.clone())
    }

    fn phase(&self) -> Phase {
        Phase { tool: self.spread(), failed: self.failed, busy_percent: middle(self.busy.clone()) }
    }
}

/// What was seen beside one hog in all rounds.
#[derive(Default)]
struct Rounds {
    seen: Seen,
    p50_by_alone: Vec<f64>,
    p95_by_alone: Vec<f64>,
    told: Vec<String>,
}

pub(super) async fn measure(
    args: &Args,
    ground: &Ground,
    sandboxes: &[Live],
    holds: &Holds,
) -> anyhow::Result<Figures> {
    let tools: Vec<_> = sandboxes.iter().map(|live| Arc::clone(&live.tools)).collect();
    let period = Duration::from_secs(1) / args.rate;
    let loose: Vec<Hog> = Hog::ALL
        .into_iter()
        .filter(|hog| args.hog.is_empty() || args.hog.contains(hog))
        .filter(|hog| {
            let held = holds.check(*hog);
            held.inspect_err(|why| output::note(format_args!("note: {} is null: {why}", hog.name()))).is_ok()
        })
        .collect();
    let mut rounds: Vec<(Hog, Rounds)> = Hog::ALL.map(|hog| (hog, Rounds::default())).into();

    let bar = output::progress(u64::from(args.rounds) * (2 * loose.len() as u64 + 1), "phases");
    let (mut alone, mut p95_alone) = (Seen::default(), Vec::new());
    for _ in 0..args.rounds {
        let mut before = calls(&tools, period, args.phase()).await?;
        bar.inc(1);
        for (hog, round) in rounds.iter_mut().filter(|(hog, _)| loose.contains(hog)) {
            let running = hog.run(ground).await?;
            sleep(args.lead()).await;
            let beside = calls(&tools, period, args.phase()).await?;
            bar.inc(1);
            round.told.extend(running.end().await?);
            sleep(args.lead()).await;
            let after = calls(&tools, period, args.phase()).await?;
            bar.inc(1);
            let by_alone = |pick: fn(&Spread) -> f64| {
                let of = |seen: &Seen| seen.spread().as_ref().map(pick);
                let both = of(&before).zip(of(&after)).map(|(before, after)| f64::midpoint(before, after));
                ratio(of(&beside), both)
            };
            round.p50_by_alone.extend(by_alone(|spread| spread.p50_ms));
            round.p95_by_alone.extend(by_alone(|spread| spread.p95_ms));
            round.seen.add(beside);
            p95_alone.extend(before.spread().map(|spread| spread.p95_ms));
            alone.add(std::mem::replace(&mut before, after));
        }
        p95_alone.extend(before.spread().map(|spread| spread.p95_ms));
        alone.add(before);
    }
    bar.finish_and_clear();

    let most = p95_alone.iter().copied().max_by(f64::total_cmp);
    let least = p95_alone.iter().copied().min_by(f64::total_cmp);
    let beside = rounds.into_iter().map(|(hog, mut round)| {
        round.told.sort();
        round.told.dedup();
        round.told.truncate(MAX_TOLD);
        Beside {
            hog: hog.name(),
            phase: loose.contains(&hog).then(|| round.seen.phase()),
            p50_by_alone: middle(round.p50_by_alone),
            p95_by_alone: middle(round.p95_by_alone),
            told: round.told,
        }
    });
    Ok(Figures {
        sandboxes: sandboxes.len(),
        calls_per_second: u64::from(args.rate) * sandboxes.len() as u64,
        alone: alone.phase(),
        alone_by_alone: ratio(most, least),
        beside: beside.collect(),
    })
}

/// Calls a tool of each sandbox once in a period, each at a time of its own, for a while. A call that comes late because the
/// one before took long is made at once, and those that it has left no time for are left out.
async fn calls(tools: &[Arc<ToolClient>], period: Duration, length: Duration) -> anyhow::Result<Seen> {
    let ticks = Ticks::now();
    let (begun, apart) = (Instant::now(), period / u32::try_from(tools.len())?);
    let mut all = JoinSet::new();
    for (idx, tools) in (0..).zip(tools) {
        let (tools, mut due) = (Arc::clone(tools), begun + apart * idx);
        all.spawn(async move {
            let mut seen = Seen::default();
            while due < begun + length {
                sleep_until(due).await;
                match bash(&tools, CALL).await {
                    Ok(took) => seen.times.push(took),
                    Err(_) => seen.failed += 1,
                }
                due += period;
                let now = Instant::now();
                if due + period < now {
                    due = now;
                }
            }
            seen
        });
    }
    let mut seen = Seen::default();
    while let Some(ended) = all.join_next().await {
        seen.add(ended.expect("a call does not panic"));
    }
    let busy = ticks.zip(Ticks::now()).and_then(|(before, after)| before.busy_until(&after));
    seen.busy.extend(busy.map(|share| rounded(share * 100.0)));
    Ok(seen)
}
