//! `prorl bench images`: unpacking, forking and building, beside the bare tools.

mod build;
mod fork;
mod material;
mod unpack;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context;
use serde::Serialize;

use self::material::Material;
use super::{
    machine::Machine,
    report::{present, tell},
};
use crate::{output, stop::Signals};

/// Arguments of `prorl bench images`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rounds of unpacking and building; each tool has its turn in each.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    n: u32,
    /// Size of the image that is unpacked and built, in MiB; it is made of this machine's own programs.
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    size_mb: u64,
    /// Threads for unpacking and packing [default: as many as processors].
    #[arg(long, value_name = "N")]
    threads: Option<std::num::NonZeroUsize>,
    /// Processes that ask for one image at the same moment.
    #[arg(long, default_value_t = 50, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    processes: u32,
    /// Files in the layer that sandboxes are forked from.
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    files: u32,
    /// Starts of a plain sandbox and of a fork, in turns.
    #[arg(long, default_value_t = 50, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    starts: u32,
    /// Folder to work in [default: TMPDIR].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

impl Args {
    fn threads(&self) -> std::num::NonZeroUsize {
        self.threads.or_else(|| std::thread::available_parallelism().ok()).unwrap_or(std::num::NonZeroUsize::MIN)
    }
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
struct Report {
    prorl: &'static str,
    machine: Machine,
    threads: usize,
    image: material::About,
    /// One for each way of packing.
    unpack: Vec<unpack::Figures>,
    hit: Option<super::figures::Spread>,
    once: unpack::Once,
    fork: Option<fork::Figures>,
    build: Option<build::Figures>,
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::take()?;
    let report = tokio::select! {
        report = measure(&args) => report?,
        signal = signals.next() => anyhow::bail!("ended by {signal}"),
    };
    tell(&report, args.json)?;
    Ok(ExitCode::SUCCESS)
}

async fn measure(args: &Args) -> anyhow::Result<Report> {
    let mut machine = Machine::before();
    if cfg!(debug_assertions) {
        output::note("note: this build is not optimised; figures of a release build are better");
    }
    let material = Material::make(args).context("there is no image to measure with")?;
    let (unpack, hit, once) = unpack::measure(args, &material).await?;
    let fork = present("fork", fork::measure(args, &material).await);
    let build = present("build", build::measure(args, &material).await);
    machine.after();
    Ok(Report {
        prorl: env!("CARGO_PKG_VERSION"),
        machine,
        threads: args.threads().get(),
        image: material.about().clone(),
        unpack,
        hit,
        once,
        fork,
        build,
    })
}
