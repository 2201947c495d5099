//! The one command that people install: flags, configuration, logging, signals, wiring. Nothing is decided here.

mod bench;
mod config;
mod doctor;
mod egress;
mod image;
mod limits;
mod mock;
mod output;
mod quickstart;
mod remote;
mod run;
mod sandbox;
mod sandboxes;
mod serve;
mod stop;
mod stores;
mod verify;
mod wiring;

use std::{process::ExitCode, time::Duration};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// How long what is left of the work on an image may take.
const CLEAN_UP: Duration = Duration::from_secs(30);

/// Open files that a few hundred jobs at once need.
const MANY_FILES: u64 = 4096;

/// Rollout-as-a-service for reinforcement learning of multi-turn LLM agents.
#[derive(Parser)]
#[command(name = "prorl", version, max_term_width = 110)]
struct Cli {
    /// How much to log, such as `info` or `prorl_pipeline=debug`.
    #[arg(long, global = true, env = "PRORL_LOG", value_name = "FILTER")]
    log: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the rollout service.
    Serve(Box<serve::Args>),
    /// Run real rollouts end to end, with nothing but this binary.
    Quickstart(quickstart::Args),
    /// Send every task of a file to a server and write the results.
    Run(run::Args),
    /// Check every trace of a results file.
    Verify(verify::Args),
    /// Try out a sandbox.
    Sandbox(sandbox::Args),
    /// Build, unpack and look after the images that sandboxes start from.
    Image(image::Args),
    /// Serve a scripted policy with a real tokenizer, for tests without a GPU.
    MockLlm(mock::Args),
    /// Take figures of this machine.
    Bench(bench::Args),
    /// Tell what this machine allows, and what to do about the rest.
    Doctor(doctor::Args),
    /// Show what a server is doing.
    Status(remote::StatusArgs),
    /// Cancel a job on a server.
    Cancel(remote::CancelArgs),
}

/// Raises the soft limit of open files to the hard one: a sandbox holds about five, a waiting client one.
fn raise_open_files() {
    match prorl_sandbox::node::raise_open_files() {
        Ok(limit) if limit < MANY_FILES => {
            tracing::warn!(limit, "few open files are allowed here (ulimit -Hn): many jobs at once will fail");
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "the limit of open files cannot be raised"),
    }
}

/// Lets every flag with a value take a negative number, so that the flag says what is wrong with it. Without this `-1`
/// is taken for a flag of its own.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let takes_value = !arg.is_positional() && arg.get_action().takes_values();
        arg.allow_negative_numbers(takes_value)
    });
    command.mut_subcommands(with_negative_numbers)
}

fn main() -> ExitCode {
    let matches = with_negative_numbers(Cli::command()).get_matches();
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(err) => err.exit(),
    };
    let is_on_images = matches!(cli.command, Command::Image(_));
    let is_service = matches!(cli.command, Command::Serve(_) | Command::MockLlm(_));
    output::start_logging(cli.log.as_deref().unwrap_or(if is_service { "warn,prorl=info" } else { "warn" }));
    raise_open_files();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(err) => return output::failure(&anyhow::Error::new(err).context("the async runtime does not start")),
    };
    let ended = runtime.block_on(async {
        let given = matches.subcommand().map(|(_, given)| given);
        match cli.command {
            Command::Serve(args) => serve::main(*args, given.expect("serve was given")).await,
            Command::Quickstart(args) => quickstart::main(args).await,
            Command::Run(args) => run::main(args).await,
            Command::Verify(args) => verify::main(&args),
            Command::Sandbox(args) => sandbox::main(args).await,
            Command::Image(args) => image::main(args).await,
            Command::MockLlm(args) => mock::main(args).await,
            Command::Bench(args) => bench::main(args).await,
            Command::Doctor(args) => doctor::main(args),
            Command::Status(args) => remote::status(args).await,
            Command::Cancel(args) => remote::cancel(args).await,
        }
    });
    if is_on_images {
        // Work on an image that was cancelled takes its files away before it ends.
        runtime.shutdown_timeout(CLEAN_UP);
    } else {
        // Blocking work that a handler left behind must not keep the process.
        runtime.shutdown_background();
    }
    ended.unwrap_or_else(|err| output::failure(&err))
}
