//! `prorl doctor`: what this machine allows, and what to do about the rest.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context;
use owo_colors::{OwoColorize, Stream};
use prorl_guest::Guest;
use prorl_sandbox::doctor::{Check, Config, Report, State, examine};

use crate::output;

/// Arguments of `prorl doctor`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    /// Apptainer's or Singularity's program, where it is not on PATH.
    #[arg(long, value_name = "FILE")]
    apptainer: Option<PathBuf>,
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    let guest = Guest::install().context("the guest program cannot be made executable")?;
    let mut config = Config::new(guest.path());
    if let Some(path) = std::env::var_os("PATH") {
        config.search = std::env::split_paths(&path).filter(|folder| folder.is_absolute()).collect();
    }
    config.launcher = args.apptainer;
    let examined = tokio::task::spawn_blocking(move || examine(&config)).await;
    let report = examined.context("the examination broke")?;
    if args.json {
        output::say(serde_json::to_string(&report)?);
    } else {
        report.checks.iter().for_each(|check| output::say(line(check)));
    }
    Ok(verdict(&report))
}

fn line(check: &Check) -> String {
    // Padded before it is coloured, which takes no width.
    let state = match check.state {
        State::Ok => "ok    ".if_supports_color(Stream::Stdout, |text| text.green()).to_string(),
        State::Warn => "warn  ".if_supports_color(Stream::Stdout, |text| text.yellow()).to_string(),
        State::Bad => "bad   ".if_supports_color(Stream::Stdout, |text| text.red()).to_string(),
        State::Absent => "absent".if_supports_color(Stream::Stdout, |text| text.dimmed()).to_string(),
    };
    let Check { name, found, meaning, remedy, .. } = check;
    let remedy = remedy.as_ref().map(|remedy| format!("; remedy: {remedy}")).unwrap_or_default();
    format!("{state} {name}: {found} ({meaning}){remedy}")
}

fn verdict(report: &Report) -> ExitCode {
    if report.can_run() {
        return ExitCode::SUCCESS;
    }
    output::note("error: no runtime works on this machine; see the lines above that say bad");
    ExitCode::FAILURE
}
