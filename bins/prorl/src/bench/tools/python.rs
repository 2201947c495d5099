//! A cell from end to end, beside the same cell in a kernel of Jupyter that is driven over `ZeroMQ`.

use std::{path::Path, process::Stdio, time::Duration};

use anyhow::{Context, bail, ensure};
use prorl_tools::{
    host::{CellCall, ToolClient},
    wire::CellEnd,
};
use serde::Serialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::{Instant, timeout},
};

use super::{
    Args,
    live::{CALL_LIMIT, Ground},
    present,
};
use crate::{
    bench::{
        figures::{Spread, ratio},
        machine,
    },
    output,
};

/// What drives Jupyter.
const SCRIPT: &str = include_str!("jupyter.py");

/// Where to look for an interpreter that has Jupyter, besides along PATH.
const SYSTEM_PYTHON: &str = "/usr/bin/python3";

/// How many interpreters are started, and how often much is printed, for a hundred cells.
const STARTS_BY_CELLS: u32 = 20;
const MEGABYTES_BY_CELLS: u32 = 5;

/// Our cells beside Jupyter's.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// `IPython` or, where the image has none, the interpreter itself.
    interpreter: String,
    jupyter_client: Option<String>,
    /// `1 + 1`.
    pub(super) value: Beside,
    /// A line of a megabyte.
    pub(super) megabyte: Beside,
    /// From the call to the answer of a first cell.
    pub(super) start: Beside,
}

/// One kind of cell, in turns.
#[derive(Debug, Serialize)]
pub(super) struct Beside {
    pub(super) ours: Option<Spread>,
    pub(super) jupyter: Option<Spread>,
    pub(super) jupyter_by_ours: Option<f64>,
}

pub(super) async fn measure(args: &Args, ground: &Ground) -> anyhow::Result<Figures> {
    let live = ground.start().await?;
    ensure!(live.sandbox.facts().hello.python.is_some(), "this machine has no python3");
    let tools = live.tools.as_ref();
    let (interpreter, _) = cell(tools, "main", "'IPython' if 'get_ipython' in globals() else 'python'").await?;
    let mut jupyter = present("jupyter", Jupyter::start().await);
    let n = args.n.div_ceil(10);
    let value = beside(tools, &mut jupyter, "value", n).await?;
    let megabyte = beside(tools, &mut jupyter, "megabyte", n.div_ceil(MEGABYTES_BY_CELLS)).await?;
    let start = beside(tools, &mut jupyter, "start", n.div_ceil(STARTS_BY_CELLS)).await?;
    let jupyter_client = match jupyter {
        Some(jupyter) => Some(jupyter.end().await?),
        None => None,
    };
    live.end().await?;
    let interpreter = interpreter.trim().trim_matches('\'').to_owned();
    Ok(Figures { interpreter, jupyter_client, value, megabyte, start })
}

/// Runs a cell; returns what it printed, and how long it took.
async fn cell(tools: &ToolClient, session: &str, code: &str) -> anyhow::Result<(String, Duration)> {
    let call = CellCall { session: session.to_owned(), ..CellCall::new(code) };
    let begun = Instant::now();
    let answer = tools.cell(&call, CALL_LIMIT).await?;
    let took = begun.elapsed();
    ensure!(answer.end == CellEnd::Ok, "{code}: {:?}: {}", answer.end, answer.output.text());
    if code.starts_with("print") {
        ensure!(answer.output.total == 1_000_000, "{code}: {} bytes", answer.output.total);
    }
    Ok((answer.output.text(), took))
}

async fn beside(
    tools: &ToolClient,
    jupyter: &mut Option<Jupyter>,
    name: &'static str,
    n: u32,
) -> anyhow::Result<Beside> {
    let bar = output::progress(u64::from(n), name);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    // The first round warms up, and another `main` stands already.
    for round in 0..=n {
        let session = if name == "start" { format!("start {round}") } else { "main".to_owned() };
        let code = match name {
            "megabyte" => "print('x' * 999_999)",
            "value" => "1 + 1",
            _ => "1",
        };
        let (printed, our_time) = cell(tools, &session, code).await?;
        ensure!(name != "value" || printed.trim_end() == "2", "{code}: {printed}");
        let their_time = match jupyter {
            Some(jupyter) => Some(jupyter.time(name).await?),
            None => None,
        };
        if round > 0 {
            ours.push(our_time);
            theirs.extend(their_time);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let [ours, jupyter] = [ours, theirs].map(Spread::of);
    let p50 = |spread: &Option<Spread>| spread.as_ref().map(|spread| spread.p50_ms);
    Ok(Beside { jupyter_by_ours: ratio(p50(&jupyter), p50(&ours)), ours, jupyter })
}

/// A script that drives Jupyter.
struct Jupyter {
    version: String,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Jupyter {
    /// Starts it with the first interpreter that has what it takes.
    async fn start() -> anyhow::Result<Self> {
        let along_path = machine::find_program("python3").context("python3 is absent")?;
        match Self::start_with(Path::new(SYSTEM_PYTHON)).await {
            Ok(started) => Ok(started),
            Err(_absent) => Self::start_with(&along_path).await,
        }
    }

    async fn start_with(python: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new(python);
        command.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().with_context(|| python.display().to_string())?;
        let input = child.stdin.take().expect("it is piped");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut complaints = child.stderr.take().expect("it is piped");
        let mut jupyter = Self { version: String::new(), child, input, output };
        match jupyter.line().await {
            Ok(line) => jupyter.version = serde_json::from_str(&line)?,
            Err(ended) => {
                let mut text = String::new();
                complaints.read_to_string(&mut text).await?;
                let last = text.trim_end().lines().last().unwrap_or_default().to_owned();
                return Err(ended.context(last));
            }
        }
        Ok(jupyter)
    }

    async fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        timeout(CALL_LIMIT, self.output.read_line(&mut line)).await.context("no answer")??;
        if line.is_empty() {
            bail!("it ended");
        }
        Ok(line)
    }

    /// Has it run something; returns how long that took, as it says.
    async fn time(&mut self, name: &str) -> anyhow::Result<Duration> {
        self.input.write_all(format!("{name}\n").as_bytes()).await?;
        let millis: f64 = self.line().await?.trim().parse()?;
        Ok(Duration::try_from_secs_f64(millis / 1e3)?)
    }

    /// Ends it with its kernel; returns its version.
    async fn end(mut self) -> anyhow::Result<String> {
        drop(self.input);
        timeout(CALL_LIMIT, self.child.wait()).await.context("it did not end")??;
        Ok(self.version)
    }
}
