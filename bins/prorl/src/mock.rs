//! `prorl mock-llm`: a scripted policy as an LLM server.

use std::{net::SocketAddr, path::PathBuf, process::ExitCode};

use anyhow::Context;
use prorl_llm::mock::{MockLlm, Script};
use tokio::net::TcpListener;

use crate::{output, stop::Signals, wiring};

/// Arguments of `prorl mock-llm`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The script: a JSON file that maps tasks to turns (see the README of prorl-llm).
    #[arg(long, value_name = "FILE")]
    script: PathBuf,
    /// Where to listen; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8100", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// The tokenizer's folder; the built-in small one when absent.
    #[arg(long, env = "PRORL_TOKENIZER", value_name = "DIR")]
    tokenizer: Option<PathBuf>,
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::take()?;
    let name = args.script.display();
    let text = std::fs::read_to_string(&args.script).with_context(|| format!("failed to read {name}"))?;
    let script = Script::from_json(text.as_bytes()).with_context(|| format!("{name} is no script"))?;
    let tokenizer = wiring::tokenizer(args.tokenizer.as_deref())?;
    let listener =
        TcpListener::bind(args.listen).await.with_context(|| format!("failed to listen on {}", args.listen))?;
    let mock = MockLlm::start(listener, tokenizer, script)?;
    output::say(format_args!("prorl mock-llm listening on {}", mock.address()));
    let signal = signals.next().await;
    tracing::info!(signal, "stopping");
    mock.shutdown().await?;
    Ok(ExitCode::SUCCESS)
}
