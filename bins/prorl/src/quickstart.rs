//! `prorl quickstart`: the whole loop with nothing but this binary.
//!
//! A scripted policy with a real tokenizer stands in for the GPU; the service, its HTTP, the sandboxes, the tools and the
//! scoring are the real ones.

use std::{
    collections::HashMap,
    io::{IsTerminal, Write},
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, bail};
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use futures_util::{StreamExt, stream};
use owo_colors::{OwoColorize, Stream};
use prorl_agents::{CallLimits, EgressPolicy, PathPolicy, SandboxDefaults};
use prorl_client::Client;
use prorl_core::{Instance, JobId, JobRequest, JobResult, Message, Role, Status, request::RuntimeChoice};
use prorl_llm::{
    mock::{MockLlm, Script},
    pool::{BackendSpec, PoolConfig},
};
use prorl_pipeline::PipelineConfig;
use prorl_server::{Listen, ServerConfig};
use tokio::net::TcpListener;

use crate::{
    output,
    sandboxes::SandboxConfig,
    stop::Signals,
    verify::Totals,
    wiring::{self, Parts, Service},
};

/// Our own problems with their answers.
const PROBLEMS: &str = include_str!("../../../examples/data/math.jsonl");

/// What the scripted policy says to each, and the reward that this implies.
const SCRIPT: &str = include_str!("../../../examples/data/math.script.json");

/// Arguments of `prorl quickstart`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many problems to run.
    #[arg(long, default_value_t = 24, value_name = "N")]
    jobs: usize,
    /// Problems at once.
    #[arg(long, default_value_t = 8, value_name = "N")]
    concurrency: usize,
    /// Where to write the results, one a line.
    #[arg(long, default_value = "prorl-quickstart.jsonl", value_name = "FILE")]
    out: PathBuf,
    /// Use this LLM server instead of the scripted policy.
    #[arg(long, value_name = "URL")]
    llm: Option<String>,
    /// Tokenizer folder; needed with --llm.
    #[arg(long, env = "PRORL_TOKENIZER", value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Print one JSON object instead of the table and the trajectory.
    #[arg(long)]
    json: bool,
}

fn script() -> anyhow::Result<Script> {
    Script::from_json(SCRIPT.as_bytes()).context("the built-in script does not parse")
}

/// The reward that the script implies for each problem.
fn expectations() -> anyhow::Result<HashMap<String, f64>> {
    Ok(script()?.tasks.into_iter().filter_map(|task| Some((task.instance_id?, task.expect?))).collect())
}

fn requests(n_jobs: usize) -> anyhow::Result<Vec<JobRequest>> {
    let problems = PROBLEMS.lines().filter(|line| !line.trim().is_empty());
    let nonce: u32 = rand::random();
    let mut requests = Vec::new();
    for (idx, line) in problems.take(n_jobs).enumerate() {
        let instance: Instance = serde_json::from_str(line).context("a built-in problem does not parse")?;
        let mut request = JobRequest::new(instance);
        request.job_id = Some(JobId::new(format!("quickstart-{nonce:08x}-{:02}", idx + 1))?);
        requests.push(request);
    }
    Ok(requests)
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    if args.jobs == 0 || args.concurrency == 0 {
        return Ok(output::usage("--jobs and --concurrency: expected a number above 0, found 0"));
    }
    if args.llm.is_some() && args.tokenizer.is_none() {
        return Ok(output::usage("--llm needs --tokenizer: ids are exact only with the tokenizer of the model"));
    }
    let mut out =
        std::fs::File::create(&args.out).with_context(|| format!("failed to write {}", args.out.display()))?;
    let mut signals = Signals::take()?;

    let tokenizer = wiring::tokenizer(args.tokenizer.as_deref())?;
    let mock = if args.llm.is_none() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        Some(MockLlm::start(listener, tokenizer.clone(), script()?)?)
    } else {
        None
    };
    let parts = Parts {
        pipeline: PipelineConfig {
            init_workers: args.concurrency,
            run_workers: args.concurrency,
            eval_workers: args.concurrency,
            ..PipelineConfig::default()
        },
        pool: PoolConfig::default(),
        server: ServerConfig::default(),
        sandboxes: SandboxConfig::default(),
        runtime: RuntimeChoice::Namespace,
        image: None,
        store: None,
        tokenizer,
        limits: CallLimits::default(),
        sandbox_limits: SandboxDefaults::default(),
        paths: PathPolicy::Any,
        allow_host_network: false,
        egress: EgressPolicy::default(),
    };
    let listen = Listen::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let service = Service::start(listen, parts).await?;
    let ran = tokio::select! {
        ran = rollouts(&service, &args, mock.as_ref()) => ran,
        signal = signals.next() => Err(anyhow::anyhow!("ended by {signal}")),
    };
    // Whatever happened, nothing may be left.
    let stopped = service.stop().await;
    if let Some(mock) = mock {
        mock.shutdown().await?;
    }
    let results = ran?;
    stopped?;

    for result in &results {
        writeln!(out, "{}", serde_json::to_string(result)?)
            .with_context(|| format!("failed to write {}", args.out.display()))?;
    }
    judge(&args, &results)
}

/// Runs the problems over HTTP, as a trainer would.
async fn rollouts(service: &Service, args: &Args, mock: Option<&MockLlm>) -> anyhow::Result<Vec<JobResult>> {
    let client = Client::new(&service.address, None)?;
    let address = match (&args.llm, mock) {
        (Some(address), _) => address.clone(),
        (None, Some(mock)) => mock.address().clone(),
        (None, None) => bail!("there is no LLM server"),
    };
    service.pool.add(BackendSpec::new(&address)).await.context("the LLM server cannot be used")?;
    service.pipeline.start();
    let requests = requests(args.jobs)?;
    let bar = output::progress(requests.len() as u64, "rollouts");
    let mut jobs = stream::iter(requests.into_iter().enumerate().map(|(idx, request)| {
        let client = client.clone();
        async move { (idx, client.process(&request).await) }
    }))
    .buffer_unordered(args.concurrency);
    let mut results = Vec::new();
    while let Some((idx, result)) = jobs.next().await {
        results.push((idx, result?));
        bar.inc(1);
    }
    bar.finish_and_clear();
    results.sort_by_key(|(idx, _)| *idx);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

/// Shows the results and decides whether all is as it must be.
fn judge(args: &Args, results: &[JobResult]) -> anyhow::Result<ExitCode> {
    let expected = if args.llm.is_some() { HashMap::new() } else { expectations()? };
    let mut problems = Vec::new();
    let mut totals = Totals::default();
    for result in results {
        match prorl_llm::verify::verify_result(result) {
            Ok(stats) => totals.add(&stats),
            Err(broken) => problems.push(format!("{}: {broken}", result.job_id)),
        }
        let instance = result.instance_id.as_deref().unwrap_or_default();
        match expected.get(instance) {
            Some(_) if result.reward.is_none() => {
                let why = result.error.as_deref().unwrap_or("no reason given");
                problems.push(format!("{instance}: {}: {why}", result.outcome.status));
            }
            Some(expect) if result.reward != Some(*expect) => {
                problems.push(format!("{instance}: reward {:?}, the script implies {expect}", result.reward));
            }
            None if args.llm.is_none() => problems.push(format!("{instance}: the script does not know it")),
            None if result.outcome.status != Status::Completed => {
                problems.push(format!("{instance}: {}", result.error.as_deref().unwrap_or("failed")));
            }
            _ => {}
        }
    }
    if args.json {
        let rewards: Vec<_> = results.iter().map(|result| result.reward).collect();
        output::say(serde_json::json!({"ok": problems.is_empty(), "rewards": rewards, "totals": totals,
            "problems": problems, "out": args.out}));
    } else {
        output::say(table(results));
        let shown = results.iter().filter(|result| result.reward == Some(1.0)).max_by_key(|result| result.usage.turns);
        if let Some(result) = shown.or(results.first()) {
            show_trajectory(result);
        }
        let right = results.iter().filter(|result| result.resolved).count();
        output::say(format_args!(
            "{} rollouts, {right} right, {} traces verified; results in {}",
            results.len(),
            totals.traces,
            args.out.display()
        ));
    }
    for problem in &problems {
        output::note(format_args!("wrong: {problem}"));
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn table(results: &[JobResult]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(["job", "turns", "tools", "reward", "outcome", "init s", "run s", "eval s"]);
    for result in results {
        let tools: usize = result.messages.iter().filter_map(|m| m.turn.as_ref()).map(|t| t.tool_calls.len()).sum();
        let name = result.instance_id.clone().unwrap_or_else(|| result.job_id.to_string());
        table.add_row([
            name,
            result.usage.turns.to_string(),
            tools.to_string(),
            result.reward.map_or_else(|| "none".to_owned(), |reward| format!("{reward:.1}")),
            format!("{} ({})", result.outcome.status, result.outcome.stop_reason),
            format!("{:.3}", result.timing.init_time),
            format!("{:.3}", result.timing.run_time),
            format!("{:.3}", result.timing.eval_time),
        ]);
    }
    table
}

fn show_trajectory(result: &JobResult) {
    let colour = std::io::stdout().is_terminal();
    let name = result.instance_id.as_deref().unwrap_or(result.job_id.as_str());
    output::say(format_args!("\nTrajectory of {name}"));
    for message in &result.messages {
        output::say(heading(message, colour));
        for line in message.content.text().trim_end().lines() {
            output::say(format_args!("  {line}"));
        }
    }
    let reward = result.reward.map_or_else(|| "none".to_owned(), |reward| reward.to_string());
    output::say(format_args!("reward {reward}: {}\n", result.report.get("reason").unwrap_or(&serde_json::Value::Null)));
}

fn heading(message: &Message, colour: bool) -> String {
    let name = message.name.as_deref().map(|name| format!(" {name}")).unwrap_or_default();
    let ids = message.token_ids.len();
    let text = format!("{}{name} ({ids} ids)", message.role.as_str());
    if !colour {
        return text;
    }
    let out = Stream::Stdout;
    match message.role {
        Role::System => text.if_supports_color(out, |text| text.dimmed()).to_string(),
        Role::User => text.if_supports_color(out, |text| text.cyan()).to_string(),
        Role::Assistant => text.if_supports_color(out, |text| text.green()).to_string(),
        Role::Tool => text.if_supports_color(out, |text| text.yellow()).to_string(),
    }
}
