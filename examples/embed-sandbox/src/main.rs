//! A trainer's reward function: 50 programs, as a policy would have written them, each tested in a sandbox of its own, all at
//! once, with no server. See the README.

mod reward;
mod samples;

use std::{fs, io::Write, path::Path, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context;
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use prorl_guest::Guest;
use prorl_sandbox::{NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime, SandboxSpec};
use tokio::{task::JoinSet, time::Instant};

use crate::reward::{Scored, score};

/// Sandboxes at once.
const N_SAMPLES: usize = 50;

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let guest = Guest::install().context("the guest program cannot be made executable")?;
    // The node's keeper sees to it that nothing is left, should this process be killed.
    let node = Node::open(NodeConfig::new(guest.path()))?;
    let runtime: Arc<dyn Runtime> = Arc::new(NamespaceRuntime::new(node, NamespaceConfig::default()));
    let spec = Arc::new(SandboxSpec {
        layer_bytes: 64 << 20,
        tmp_bytes: 16 << 20,
        max_life: Duration::from_mins(5),
        // 50 at once on few cores are slower than one.
        start_timeout: Duration::from_mins(1),
        ..SandboxSpec::new(guest.path())
    });

    let begun = Instant::now();
    let mut running = JoinSet::new();
    for (idx, sample) in samples::samples(N_SAMPLES).into_iter().enumerate() {
        let (runtime, spec) = (Arc::clone(&runtime), Arc::clone(&spec));
        running.spawn(async move { (idx, score(&*runtime, &spec, &sample).await, sample) });
    }
    let mut ended = running.join_all().await;
    ended.sort_by_key(|(idx, ..)| *idx);
    let took = begun.elapsed();

    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header(["sample", "task", "verdict", "reward", "start", "run"]);
    let (mut rewards, mut failures) = (Vec::new(), Vec::new());
    let mut left = Vec::new();
    for (idx, scored, sample) in &ended {
        match scored {
            Ok(Scored { verdict, started_in, ran_in, pid_namespace, gone_at }) => {
                rewards.push(verdict.reward());
                left.extend(processes_left(*pid_namespace, *gone_at)?);
                table.add_row([
                    idx.to_string(),
                    sample.task.to_owned(),
                    verdict.to_string(),
                    verdict.reward().to_string(),
                    format!("{} ms", started_in.as_millis()),
                    format!("{} ms", ran_in.as_millis()),
                ]);
            }
            // The sandbox failed and not the policy: there is no reward, and the trainer drops or repeats the sample.
            Err(error) => failures.push(format!("sample {idx}: {error:#}")),
        }
    }

    let mut out = std::io::stdout().lock();
    writeln!(out, "{table}")?;
    let mean = rewards.iter().sum::<f64>() / rewards.len().max(1) as f64;
    writeln!(out, "{} samples in {} ms, mean reward {mean:.2}", rewards.len(), took.as_millis())?;
    writeln!(out, "processes left: {}, samples without a reward: {}", left.len(), failures.len())?;
    for failure in &failures {
        writeln!(out, "{failure}")?;
    }
    Ok(if failures.is_empty() && left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Looks for processes in a sandbox's pid namespace, without asking the library that says there are none.
///
/// One that began later is in another namespace, which has been given the same number.
fn processes_left(pid_namespace: u64, gone_at: u64) -> anyhow::Result<Vec<u32>> {
    let namespace = format!("pid:[{pid_namespace}]");
    let is_inside = |pid: &u32| {
        // A process of another user cannot be looked at, and is none of ours.
        fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|link| link == Path::new(&namespace))
            && began_at(*pid).is_some_and(|began| began < gone_at)
    };
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(pids.filter(is_inside).collect())
}

/// Returns when a process began, in hundredths of a second since boot; nothing if it has ended meanwhile.
fn began_at(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}
