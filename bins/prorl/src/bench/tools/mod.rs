//! `prorl bench tools`: what a tool call takes, beside what others take for the same; or who keeps which promises.

mod conformance;
mod cpu;
mod goals;
mod idle;
mod live;
mod many;
mod paths;
mod pty;
mod python;
mod tmux;

use std::{num::NonZeroUsize, process::ExitCode, time::Duration};

use prorl_sandbox::Image;
use serde::Serialize;

use super::{
    goals::Goals,
    machine::Machine,
    report::{finish, present},
    runtimes::Runtimes,
};
use crate::stop::Signals;

/// Arguments of `prorl bench tools`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Calls of each kind, ours and others' in turns; a hundredth of it with tmux, a tenth with Python.
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    n: u32,
    /// Sandboxes that run commands at once, a command at a time in each.
    #[arg(long, default_value = "50", value_name = "N")]
    sessions: NonZeroUsize,
    /// Commands of each of them.
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    commands: u32,
    /// The same with more sandboxes and a tenth of the commands.
    #[arg(long, default_value = "300", value_name = "N")]
    many: NonZeroUsize,
    /// How long idle sessions are looked at.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Hold implementations to the cases of the conformance suite instead: ours, `bash -c`, and each adapter.
    #[arg(long)]
    conformance: bool,
    #[command(flatten)]
    held: conformance::Held,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
struct Report {
    prorl: &'static str,
    machine: Machine,
    /// Bytes of the guest's program.
    guest_bytes: usize,
    call: paths::Figures,
    cpu: Option<cpu::Figures>,
    sessions: many::Figures,
    idle: Option<idle::Figures>,
    many: many::Figures,
    python: Option<python::Figures>,
    goals: Goals,
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    if args.conformance {
        let mut signals = Signals::take()?;
        return tokio::select! {
            code = conformance::main(&args.held, args.json) => code,
            signal = signals.next() => anyhow::bail!("ended by {signal}"),
        };
    }
    finish(Box::pin(measure(&args)), |report| &report.goals, args.json).await
}

async fn measure(args: &Args) -> anyhow::Result<Report> {
    let mut machine = Machine::before();
    let runtimes = Runtimes::make()?;
    let spec = runtimes.spec(Image::Host);
    let ground = live::Ground { runtime: runtimes.namespace, spec };
    let call = paths::measure(args, &ground).await?;
    let cpu = present("cpu", cpu::measure(args, &ground).await);
    let python = present("python", python::measure(args, &ground).await);
    let few = live::start_many(&ground, args.sessions.get()).await?;
    let sessions = many::measure(&few, args.commands).await?;
    let idle = present("idle", idle::measure(&few, Duration::from_secs(args.seconds)).await);
    live::end_many(few).await?;
    let more = live::start_many(&ground, args.many.get()).await?;
    let many = many::measure(&more, (args.commands / 10).max(1)).await?;
    live::end_many(more).await?;
    machine.after();
    let guest_bytes = prorl_guest::bytes().len();
    let goals = goals::of(guest_bytes, &call, cpu.as_ref(), python.as_ref(), &sessions, idle.as_ref(), &many);
    Ok(Report {
        prorl: env!("CARGO_PKG_VERSION"),
        machine,
        guest_bytes,
        call,
        cpu,
        sessions,
        idle,
        many,
        python,
        goals,
    })
}
