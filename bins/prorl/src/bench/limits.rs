//! `prorl bench limits`: what it costs to hold sandboxes to limits, and what that keeps from their neighbours.

mod cost;
mod goals;
mod hogs;
mod live;
mod neighbours;
mod overshoot;
mod watchdog;

use std::{num::NonZeroUsize, process::ExitCode, time::Duration};

use serde::Serialize;

use self::{hogs::Hog, live::Ground};
use super::{
    goals::Goals,
    machine::Machine,
    report::{finish, present},
};

/// Arguments of `prorl bench limits`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Starts with all limits on, each beside one without any.
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    n: u32,
    /// Tool calls in a sandbox with all limits on, each beside one in a sandbox without any.
    #[arg(long, default_value_t = 500, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    calls: u32,
    /// Sandboxes that the watchdog looks after, and that have neighbours.
    #[arg(long, default_value = "20", value_name = "N")]
    sandboxes: NonZeroUsize,
    /// Tool calls of each of them in a second.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rate: u32,
    /// How long they are looked at, idle, alone, and beside each neighbour.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Limits of memory that an allocator is stopped at, in MiB; it takes four times as much if it is not.
    #[arg(
        long,
        default_value = "256,1024",
        value_delimiter = ',',
        value_name = "N,..",
        value_parser = clap::value_parser!(u64).range(16..=1_000_000)
    )]
    memory_mb: Vec<u64>,
    /// Rounds of neighbours; figures are the middle ones of all rounds.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Neighbour to let loose; may be given again [default: each].
    #[arg(long, value_name = "NAME")]
    hog: Vec<Hog>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

impl Args {
    fn phase(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    /// How long it is waited before a phase for what is to go on in it, or for what went on before to be over.
    fn lead(&self) -> Duration {
        (self.phase() / 4).min(Duration::from_secs(1))
    }
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
struct Report {
    prorl: &'static str,
    machine: Machine,
    cost: cost::Figures,
    watchdog: Option<watchdog::Figures>,
    overshoot: Option<overshoot::Figures>,
    neighbours: neighbours::Figures,
    goals: Goals,
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    finish(Box::pin(measure(&args)), |report| &report.goals, args.json).await
}

async fn measure(args: &Args) -> anyhow::Result<Report> {
    let mut machine = Machine::before();
    let ground = Ground::make()?;
    let cost = cost::measure(args, &ground).await?;
    let overshoot = present("overshoot", overshoot::measure(args, &ground).await);
    let sandboxes = live::start_many(&ground, args.sandboxes.get()).await?;
    let watchdog = present("watchdog", watchdog::measure(args, &sandboxes).await);
    let holds = hogs::Holds::find(&ground, overshoot.as_ref()).await?;
    let neighbours = neighbours::measure(args, &ground, &sandboxes, &holds).await?;
    live::end_many(sandboxes).await?;
    machine.after();
    let goals = goals::of(&cost, watchdog.as_ref(), overshoot.as_ref(), &neighbours);
    Ok(Report { prorl: env!("CARGO_PKG_VERSION"), machine, cost, watchdog, overshoot, neighbours, goals })
}
