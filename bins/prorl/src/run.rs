//! `prorl run`: every task of a file through a server.

use std::{
    collections::HashSet,
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, bail};
use prorl_client::{Client, ClientError};
use prorl_core::{Instance, JobId, JobRequest, JobResult, Status};
use sha2::{Digest, Sha256};
use tokio::task::JoinSet;

use crate::{output, remote::ServerArgs, stop::Signals};

/// Arguments of `prorl run`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    server: ServerArgs,
    /// Tasks, one JSON object a line: an instance, or a whole request with an `instance`.
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Results, one a line as jobs end.
    #[arg(long, default_value = "prorl-results.jsonl", value_name = "FILE")]
    out: PathBuf,
    /// Jobs at the server at once.
    #[arg(long, default_value_t = 16, value_name = "N")]
    concurrency: usize,
    /// Keep the results that --out holds already and run only what is missing or may end better in another try.
    #[arg(long)]
    resume: bool,
    /// Print a summary as JSON.
    #[arg(long)]
    json: bool,
}

/// How often a job is offered again to a server that could not take it.
const MAX_OFFERS: u32 = 30;

/// One line of the data file.
struct Task {
    request: JobRequest,
    /// Names the line whatever run it is in: its own job id, or a digest of its text and place.
    key: String,
    /// Whether the line says the job id.
    own_id: bool,
}

fn read_tasks(path: &Path) -> anyhow::Result<Vec<Task>> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("failed to open {name}"))?;
    let nonce: u32 = rand::random();
    let mut tasks = Vec::new();
    let mut keys = HashSet::new();
    for (idx, line) in BufReader::new(file).lines().enumerate() {
        let at = || format!("{name} line {}", idx + 1);
        let line = line.with_context(at)?;
        if line.trim().is_empty() {
            continue;
        }
        let value: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&line).with_context(|| format!("{} is no JSON object", at()))?;
        let mut request = if value.contains_key("instance") {
            serde_json::from_value(value.into()).with_context(|| format!("{} is no request", at()))?
        } else {
            JobRequest::new(Instance(value))
        };
        request.check().with_context(at)?;
        let own_id = request.job_id.is_some();
        let key = if let Some(id) = &request.job_id {
            id.to_string()
        } else {
            let digest = Sha256::digest(format!("{idx}:{}", line.trim()));
            let start = digest.first_chunk().expect("a digest of 32 bytes has 8");
            let key = format!("{:016x}", u64::from_be_bytes(*start));
            request.job_id = Some(JobId::new(format!("run-{nonce:08x}.{key}")).with_context(at)?);
            key
        };
        if !keys.insert(key.clone()) {
            bail!("{}: job_id {key} is there twice", at());
        }
        tasks.push(Task { request, key, own_id });
    }
    if tasks.is_empty() {
        bail!("{name} holds no task");
    }
    Ok(tasks)
}

/// The key of the task that a result came from; see [`Task::key`].
fn key_of(job_id: &str) -> &str {
    let is_hex = |text: &str, len: usize| text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if let Some((nonce, key)) = job_id.strip_prefix("run-").and_then(|rest| rest.split_once('.'))
        && is_hex(nonce, 8)
        && is_hex(key, 16)
    {
        return key;
    }
    match job_id.rsplit_once(RETRY) {
        Some((own, nonce)) if is_hex(nonce, 8) => own,
        _ => job_id,
    }
}

/// Stands between a task's own job id and a number when the id's first job failed: a server answers a known id with the
/// result that it has.
const RETRY: &str = ":again-";

/// What an earlier run left.
#[derive(Default)]
struct Earlier {
    /// Results that stand.
    standing: Vec<JobResult>,
    /// Keys of those that may end better in another try.
    again: HashSet<String>,
}

/// Reads the results of an earlier run; a torn last line is left out.
fn read_earlier(path: &Path) -> anyhow::Result<Earlier> {
    let name = path.display();
    let file = match File::open(path) {
        Ok(file) => file,
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Ok(Earlier::default()),
        Err(err) => return Err(err).with_context(|| format!("failed to open {name}")),
    };
    let lines: Vec<String> =
        BufReader::new(file).lines().collect::<Result<_, _>>().with_context(|| format!("failed to read {name}"))?;
    let mut earlier = Earlier::default();
    for (idx, line) in lines.iter().enumerate() {
        match serde_json::from_str::<JobResult>(line) {
            Ok(result) if result.outcome.retryable => {
                earlier.again.insert(key_of(result.job_id.as_str()).to_owned());
            }
            Ok(result) => earlier.standing.push(result),
            Err(_) if idx + 1 == lines.len() => {}
            Err(err) => return Err(err).with_context(|| format!("{name} line {} is no result", idx + 1)),
        }
    }
    Ok(earlier)
}

/// Writes results as they come; each is whole on disk before the next.
struct Sink {
    file: File,
}

impl Sink {
    fn open(path: &Path, standing: &[JobResult]) -> anyhow::Result<Self> {
        let name = path.display();
        if !standing.is_empty() {
            // Written beside and renamed, so that a crash loses nothing.
            let beside = path.with_extension("jsonl.new");
            let mut text = String::new();
            for result in standing {
                text.push_str(&serde_json::to_string(result)?);
                text.push('\n');
            }
            std::fs::write(&beside, text).with_context(|| format!("failed to write {}", beside.display()))?;
            std::fs::rename(&beside, path).with_context(|| format!("failed to replace {name}"))?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .truncate(false)
            .open(path)
            .with_context(|| format!("failed to open {name} for writing"))?;
        if standing.is_empty() {
            file.set_len(0).with_context(|| format!("failed to empty {name}"))?;
        }
        Ok(Self { file })
    }

    fn put(&mut self, result: &JobResult) -> anyhow::Result<()> {
        let line = format!("{}\n", serde_json::to_string(result)?);
        self.file.write_all(line.as_bytes()).context("failed to write a result")
    }
}

async fn offer(client: &Client, request: &JobRequest) -> Result<JobResult, ClientError> {
    let mut pause = Duration::from_millis(200);
    for _ in 1..MAX_OFFERS {
        match client.process(request).await {
            Err(error) if error.is_retryable() => tracing::debug!(%error, "offered again later"),
            answered => return answered,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
    }
    client.process(request).await
}

#[derive(Default, serde::Serialize)]
struct Summary {
    tasks: usize,
    kept: usize,
    kept_failed: usize,
    completed: usize,
    resolved: usize,
    failed: usize,
    refused: usize,
    mean_reward: Option<f64>,
    seconds: f64,
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    if args.concurrency == 0 {
        return Ok(output::usage("--concurrency: expected a number above 0, found 0"));
    }
    let mut tasks = read_tasks(&args.data)?;
    let earlier = if args.resume { read_earlier(&args.out)? } else { Earlier::default() };
    let done: HashSet<&str> = earlier.standing.iter().map(|result| key_of(result.job_id.as_str())).collect();
    let n_tasks = tasks.len();
    tasks.retain(|task| !done.contains(task.key.as_str()));
    for task in &mut tasks {
        if task.own_id && earlier.again.contains(&task.key) {
            let again = format!("{}{RETRY}{:08x}", task.key, rand::random::<u32>());
            task.request.job_id = Some(JobId::new(again).context("the job id has no room for another try")?);
        }
    }
    let client = args.server.client()?;
    client.status().await.context("the server does not answer")?;

    let mut sink = Sink::open(&args.out, &earlier.standing)?;
    let mut signals = Signals::take()?;
    let started = tokio::time::Instant::now();
    let bar = output::progress(tasks.len() as u64, "jobs");
    let mut summary = Summary { tasks: n_tasks, kept: n_tasks - tasks.len(), ..Summary::default() };
    summary.kept_failed = earlier.standing.iter().filter(|result| result.outcome.status != Status::Completed).count();
    let (mut rewards, mut problems) = (Vec::new(), Vec::new());
    let mut running = JoinSet::new();
    let mut left = tasks.into_iter();
    loop {
        while running.len() < args.concurrency
            && let Some(task) = left.next()
        {
            let client = client.clone();
            running.spawn(async move { (offer(&client, &task.request).await, task.key) });
        }
        let ended = tokio::select! {
            ended = running.join_next() => ended,
            signal = signals.next() => {
                bar.abandon();
                running.shutdown().await;
                bail!("ended by {signal}; {} holds what was done, --resume goes on", args.out.display());
            }
        };
        let Some(ended) = ended else { break };
        match ended.context("a request task broke")? {
            (Ok(result), _) => {
                sink.put(&result)?;
                match result.outcome.status {
                    Status::Completed => summary.completed += 1,
                    _ => summary.failed += 1,
                }
                summary.resolved += usize::from(result.resolved);
                rewards.extend(result.reward);
                bar.set_message(format!("{} resolved, {} failed", summary.resolved, summary.failed));
            }
            (Err(error), key) => {
                summary.refused += 1;
                problems.push(format!("{key}: {:#}", anyhow::Error::new(error)));
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    summary.seconds = started.elapsed().as_secs_f64();
    summary.mean_reward = (!rewards.is_empty()).then(|| rewards.iter().sum::<f64>() / rewards.len() as f64);
    for problem in &problems {
        output::note(problem);
    }
    if args.json {
        output::say(serde_json::to_string(&summary)?);
    } else {
        let mean = summary.mean_reward.map_or_else(|| "none".to_owned(), |mean| format!("{mean:.3}"));
        output::say(format_args!(
            "{} tasks in {:.1} s: {} kept ({} of them failed), {} completed, {} failed, {} refused; {} resolved, mean \
             reward {mean}; {}",
            summary.tasks,
            summary.seconds,
            summary.kept,
            summary.kept_failed,
            summary.completed,
            summary.failed,
            summary.refused,
            summary.resolved,
            args.out.display()
        ));
    }
    let missing = summary.failed + summary.kept_failed + summary.refused;
    Ok(if missing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;
    use prorl_core::{FailureClass, Outcome, StopReason};

    #[test]
    fn tasks_have_keys_that_another_run_finds_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        let text = "{\"prompt\": \"a\"}\n\n{\"prompt\": \"a\"}\n{\"job_id\": \"mine\", \"instance\": {}}\n";
        std::fs::write(&path, text).unwrap();
        let (first, second) = (read_tasks(&path).unwrap(), read_tasks(&path).unwrap());
        assert_eq!(first.len(), 3);
        for (a, b) in first.iter().zip(&second) {
            assert_eq!(a.key, b.key);
            assert_eq!(key_of(a.request.job_id.as_ref().unwrap().as_str()), a.key);
        }
        assert_ne!(first[0].key, first[1].key);
        assert_eq!(first[2].key, "mine");
        assert!(first[2].own_id && !first[0].own_id);
        for (job_id, key) in [("mine:again-0123abcd", "mine"), ("run-a.b", "run-a.b"), ("mine:again-x", "mine:again-x")]
        {
            assert_eq!(key_of(job_id), key);
        }
    }

    #[test]
    fn bad_data_is_named_by_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        for (text, expected) in [
            ("{\"prompt\": 1}\nnope\n", "line 2 is no JSON object"),
            ("{\"instance\": {}, \"timeot\": 1}\n", "line 1 is no request"),
            ("{\"instance\": {}, \"timeout\": -1}\n", "line 1"),
            (
                "{\"job_id\": \"a\", \"instance\": {}}\n{\"job_id\": \"a\", \"instance\": {}}\n",
                "line 2: job_id a is there twice",
            ),
            ("\n", "holds no task"),
        ] {
            std::fs::write(&path, text).unwrap();
            let err = format!("{:#}", read_tasks(&path).err().unwrap());
            assert!(err.contains(expected), "{err}");
        }
    }

    #[test]
    fn a_resume_keeps_what_stands_and_forgets_what_may_end_better() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        let result = |id: &str, outcome| JobResult::empty(JobId::new(id).unwrap(), "math", outcome);
        let good = result("run-00000000.0123456789abcdef", Outcome::completed(StopReason::Finish));
        let lost = result("run-00000000.fedcba9876543210", Outcome::failed(FailureClass::LlmBackend, None));
        let lines = [&good, &lost].map(|result| serde_json::to_string(result).unwrap());
        std::fs::write(&path, format!("{}\n{}\n{{\"job_id\": \"ru", lines[0], lines[1])).unwrap();
        let Earlier { standing, again } = read_earlier(&path).unwrap();
        assert_eq!(standing, [good]);
        assert!(again.contains(key_of(lost.job_id.as_str())));
        let mut sink = Sink::open(&path, &standing).unwrap();
        sink.put(&lost).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 2);
        assert!(read_earlier(&folder.path().join("none")).unwrap().standing.is_empty());
    }
}
