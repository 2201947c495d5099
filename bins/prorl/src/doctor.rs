//! `prorl doctor`: what this machine allows, and what to do about the rest.

use std::{path::Path, process::ExitCode, sync::Arc};

use anyhow::Context;
use nix::sys::signal::Signal;
use owo_colors::{OwoColorize, Stream};
use prorl_guest::Guest;
use prorl_sandbox::doctor::{Check, Config, Report, State, examine};
use tokio::signal::unix::{SignalKind, signal};

use crate::{output, sandboxes::SandboxConfig};

/// Arguments of `prorl doctor`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sandboxes: SandboxConfig,
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    // A write beyond the limit of file sizes is to fail, not to end what is to tell of that limit.
    let _handled =
        signal(SignalKind::from_raw(Signal::SIGXFSZ as i32)).context("the signal SIGXFSZ cannot be handled")?;
    let guest = Guest::install().map_err(Arc::new);
    let mut config = Config::new(guest.as_ref().map_or(Path::new(""), Guest::path));
    config.guest = guest.as_ref().map(|guest| guest.path().to_owned()).map_err(Arc::clone);
    if let Some(path) = std::env::var_os("PATH") {
        config.search = std::env::split_paths(&path).filter(|folder| folder.is_absolute()).collect();
    }
    config.sandbox_user = args.sandboxes.user();
    config.launcher = args.sandboxes.apptainer;
    if let Some(dir) = args.sandboxes.run_dir {
        config.run_dir = dir;
    }
    // Here, not on another thread: there may be none.
    let report = tokio::task::block_in_place(|| examine(&config));
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
