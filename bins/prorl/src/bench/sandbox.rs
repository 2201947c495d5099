//! `prorl bench sandbox`: start, end and size of sandboxes.

use std::{path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context;
use prorl_guest::VERSION_FLAG;
use prorl_sandbox::{Image, Runtime, Sandbox, SandboxSpec};
use prorl_tools::host::{ExecSpec, ToolClient};
use tokio::{task::JoinSet, time::Instant};

use super::{
    bare::{Folder, Tool},
    figures::{Spread, millis, ratio},
    machine::{self, Machine},
    memory::Memory,
    report::{Alive, BareFigures, Burst, Figures, Report, tell},
    runtimes::Runtimes,
};
use crate::{output, stop::Signals};

/// Starts that are not counted: they warm caches up.
const WARM_UPS: usize = 3;

/// A start through Apptainer takes some twenty times as long, so there are so many times fewer.
const SLOWER: usize = 10;

/// How long the guest may take to end everything before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// How long a sandbox may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_mins(1);

/// How many of the sandboxes alive at once are looked at for memory.
const LOOKED_AT: usize = 30;

/// Arguments of `prorl bench sandbox`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Starts of the namespace runtime, one at a time; a tenth of them with Apptainer.
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = count())]
    n: usize,
    /// Sandboxes started at the same moment.
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = count())]
    burst: usize,
    /// Sandboxes alive at once, each of which answers.
    #[arg(long, default_value_t = 300, value_name = "N", value_parser = count())]
    alive: usize,
    /// A directory image with a program `true`. When absent, the namespace runtime shows the host's programs, as it does by
    /// default, and Apptainer gets an image of a single program.
    #[arg(long, value_name = "DIR")]
    image: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

fn count() -> impl clap::builder::TypedValueParser<Value = usize> {
    use clap::builder::TypedValueParser as _;
    clap::value_parser!(u32).range(1..=100_000).map(|n| usize::try_from(n).expect("it is a small number"))
}

/// A runtime with what it is to start.
#[derive(Clone)]
struct Subject {
    runtime: Arc<dyn Runtime>,
    spec: Arc<SandboxSpec>,
    /// A program inside that ends at once.
    program: Arc<[String]>,
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::take()?;
    let report = tokio::select! {
        report = measure(&args) => report?,
        // What runs is dropped, and what is dropped is killed.
        signal = signals.next() => anyhow::bail!("ended by {signal}"),
    };
    tell(&report, args.json)?;
    Ok(ExitCode::SUCCESS)
}

async fn measure(args: &Args) -> anyhow::Result<Report> {
    let image = args.image.as_ref().map(std::path::absolute).transpose()?;
    let folder = Folder::make().context("the temporary folder takes no files")?;
    let runtimes = Runtimes::make()?;
    let mut machine = Machine::before();
    if cfg!(debug_assertions) {
        output::note("note: this build is not optimised; figures of a release build are better");
    }

    let namespace = Subject {
        runtime: Arc::clone(&runtimes.namespace),
        spec: Arc::new(runtimes.spec(image.clone().map_or(Image::Host, Image::Directory))),
        program: Arc::new(["true".to_owned()]),
    };
    let bwrap = present("bwrap", Tool::bwrap(&folder.guest(), image.as_deref()).await);
    let (namespace, bwrap) = beside(&namespace, bwrap, args.n, args).await?;

    let directory = image.clone().unwrap_or_else(|| folder.image());
    let program = match image {
        Some(_) => Arc::from(["true".to_owned()]),
        None => Arc::from(["prorl-guest".to_owned(), VERSION_FLAG.to_owned()]),
    };
    let bare_apptainer = Tool::apptainer(&folder, runtimes.singularity.as_deref().ok(), &directory);
    let apptainer = present("apptainer", bare_apptainer.await);
    let n_slow = args.n.div_ceil(SLOWER);
    let subject = match runtimes.singularity.clone() {
        Ok(runtime) => {
            let spec = Arc::new(runtimes.spec(Image::Directory(directory)));
            Subject { runtime, spec, program }.tried().await
        }
        Err(reason) => Err(reason),
    };
    let (singularity, apptainer) = match subject {
        Ok(subject) => {
            let (ours, theirs) = beside(&subject, apptainer, n_slow, args).await?;
            (Some(ours), theirs)
        }
        Err(reason) => {
            output::note(format_args!("note: singularity is null: {reason}"));
            (None, bare_alone(apptainer, n_slow).await?)
        }
    };

    machine.after();
    let p50 = |spread: &Option<Spread>| spread.as_ref().map(|spread| spread.p50_ms);
    Ok(Report {
        prorl: env!("CARGO_PKG_VERSION"),
        machine,
        image: args.image.as_ref().map_or_else(|| "host".to_owned(), |image| image.display().to_string()),
        namespace_start_by_bwrap: ratio(p50(&namespace.start), bwrap.as_ref().and_then(|bare| p50(&bare.start))),
        singularity_start_by_apptainer: ratio(
            singularity.as_ref().and_then(|ours| p50(&ours.start)),
            apptainer.as_ref().and_then(|bare| p50(&bare.start)),
        ),
        namespace,
        bwrap,
        singularity,
        apptainer,
    })
}

/// Tells why a tool is not there.
fn present(name: &str, tool: anyhow::Result<Tool>) -> Option<Tool> {
    tool.inspect_err(|error| output::note(format_args!("note: {name} is null: {error:#}"))).ok()
}

/// Takes every figure of a runtime; its starts and those of the bare tool one after the other in turns, so that both meet the
/// same machine.
async fn beside(
    subject: &Subject,
    tool: Option<Tool>,
    n: usize,
    args: &Args,
) -> anyhow::Result<(Figures, Option<BareFigures>)> {
    let name = subject.runtime.name().to_owned();
    let bar = output::progress(n as u64, "starts");
    let (mut starts, mut shutdowns, mut bare) = (Vec::new(), Vec::new(), Vec::new());
    let mut alone = None;
    for idx in 0..n + WARM_UPS {
        let begun = Instant::now();
        let sandbox = subject.start().await?;
        let start = begun.elapsed();
        if idx == 0 {
            alone = Memory::of(sandbox.facts().outer_pid).ok();
        }
        let begun = Instant::now();
        sandbox.shutdown(GRACE).await?;
        let shutdown = begun.elapsed();
        let their_run = match &tool {
            Some(tool) => Some(tool.run().await?),
            None => None,
        };
        if idx >= WARM_UPS {
            starts.push(start);
            shutdowns.push(shutdown);
            bare.extend(their_run);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if alone.is_some_and(|memory| memory.pss_bytes.is_none()) {
        output::note(format_args!("note: pss_bytes of {name} is null: only root may look at a guest's memory"));
    }
    let burst = burst(subject, args.burst).await?;
    let alive = alive(subject, args.alive).await?;
    let figures = Figures {
        start: Spread::of(starts),
        shutdown: Spread::of(shutdowns),
        alone,
        burst: Some(burst),
        alive: Some(alive),
    };
    Ok((figures, tool.map(|tool| BareFigures::of(tool, &bare))))
}

/// Takes the figures of a tool that has nothing of ours beside it.
async fn bare_alone(tool: Option<Tool>, n: usize) -> anyhow::Result<Option<BareFigures>> {
    let Some(tool) = tool else { return Ok(None) };
    let mut bare = Vec::new();
    for idx in 0..n + WARM_UPS {
        let run = tool.run().await?;
        if idx >= WARM_UPS {
            bare.push(run);
        }
    }
    Ok(Some(BareFigures::of(tool, &bare)))
}

impl Subject {
    /// Tells whether it makes sandboxes on this machine at all, and if not, why.
    async fn tried(self) -> Result<Self, String> {
        let sandbox = self.start().await.map_err(|error| format!("{error:#}"))?;
        sandbox.shutdown(GRACE).await.map_err(|error| error.to_string())?;
        Ok(self)
    }

    async fn start(&self) -> anyhow::Result<Sandbox> {
        let name = self.runtime.name();
        self.runtime.start(&self.spec).await.with_context(|| format!("no sandbox of the {name} runtime"))
    }

    /// Starts `n` sandboxes at the same moment. Those that fail are counted, and the first of them is told.
    async fn start_many(&self, n: usize) -> Started {
        let begun = Instant::now();
        let mut starting = JoinSet::new();
        for _ in 0..n {
            let subject = self.clone();
            starting.spawn(async move { (subject.start().await, begun.elapsed()) });
        }
        let mut started = Started { sandboxes: Vec::with_capacity(n), times: Vec::with_capacity(n), failed: 0 };
        while let Some(ended) = starting.join_next().await {
            let (sandbox, took) = ended.expect("a start does not panic");
            match sandbox {
                Ok(sandbox) => {
                    started.sandboxes.push(sandbox);
                    started.times.push(took);
                }
                Err(error) => {
                    if started.failed == 0 {
                        output::note(format_args!("note: {error:#}"));
                    }
                    started.failed += 1;
                }
            }
        }
        started
    }
}

/// Sandboxes that stand, and what each took.
struct Started {
    sandboxes: Vec<Sandbox>,
    times: Vec<Duration>,
    failed: usize,
}

async fn burst(subject: &Subject, n: usize) -> anyhow::Result<Burst> {
    let Started { sandboxes, times, failed } = subject.start_many(n).await;
    let total_ms = times.iter().max().copied().map_or(0.0, millis);
    let admitted = sandboxes.iter().map(|sandbox| sandbox.facts().start_time).collect();
    shut_all(sandboxes).await?;
    Ok(Burst { n, failed, total_ms, start: Spread::of(times), admitted_start: Spread::of(admitted) })
}

async fn alive(subject: &Subject, n: usize) -> anyhow::Result<Alive> {
    let available = || machine::meminfo("MemAvailable").and_then(|bytes| i64::try_from(bytes).ok());
    let before = available();
    let Started { mut sandboxes, failed, .. } = subject.start_many(n).await;

    let begun = Instant::now();
    let mut asked = JoinSet::new();
    for sandbox in &mut sandboxes {
        let tools = ToolClient::new(sandbox.take_channel().context("the channel is there after a start")?);
        let program = Arc::clone(&subject.program);
        asked.spawn(async move {
            let answer = tools.exec(&ExecSpec::new(program.iter().cloned()), ANSWER_LIMIT).await;
            // The client goes back: without it the sandbox ends.
            (answer, begun.elapsed(), tools)
        });
    }
    let (mut clients, mut times, mut problem) = (Vec::new(), Vec::new(), None);
    while let Some(ended) = asked.join_next().await {
        let (answer, took, tools) = ended.expect("a call does not panic");
        clients.push(tools);
        match answer {
            Ok(done) if done.success() => times.push(took),
            Ok(done) => problem = Some(format!("{}: {:?}", subject.program.join(" "), done.status)),
            Err(error) => problem = Some(error.to_string()),
        }
    }
    if let Some(problem) = problem {
        output::note(format_args!(
            "note: a sandbox of the {} runtime gave no answer: {problem}",
            subject.runtime.name()
        ));
    }

    let stand = i64::try_from(sandboxes.len()).ok().filter(|n| *n > 0);
    let lost = before.zip(available()).zip(stand).map(|((before, after), stand)| (before - after) / stand);
    let looked: Vec<Memory> =
        sandboxes.iter().take(LOOKED_AT).filter_map(|sandbox| Memory::of(sandbox.facts().outer_pid).ok()).collect();
    let begun = Instant::now();
    shut_all(sandboxes).await?;
    let shutdown_total_ms = millis(begun.elapsed());
    drop(clients);
    Ok(Alive {
        n,
        failed,
        answered: times.len(),
        answers_total_ms: times.iter().max().copied().map_or(0.0, millis),
        answer: Spread::of(times),
        memory_each: Memory::mean(&looked),
        available_lost_bytes_each: lost,
        shutdown_total_ms,
    })
}

/// Ends sandboxes at the same moment, and waits for the proof that nothing of any is left.
async fn shut_all(sandboxes: Vec<Sandbox>) -> anyhow::Result<()> {
    let mut ending = JoinSet::new();
    for sandbox in sandboxes {
        ending.spawn(async move { sandbox.shutdown(GRACE).await });
    }
    while let Some(ended) = ending.join_next().await {
        ended.expect("an end does not panic")?;
    }
    Ok(())
}
