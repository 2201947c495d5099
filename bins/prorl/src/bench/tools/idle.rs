//! What sessions cost that nobody uses.

use std::{fs, io, time::Duration};

use serde::Serialize;
use tokio::time::sleep;

use super::live::Live;
use crate::bench::{machine::kibibytes, memory::children};

/// How long they are left alone before they are looked at.
const LEAD: Duration = Duration::from_secs(1);

/// Idle sandboxes with a shell each.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    sessions: usize,
    seconds: u64,
    /// How often any thread in any of them was given a processor.
    pub(super) wakeups: u64,
    /// Mean of each, all of its processes together; nothing where only root may look.
    pss_bytes_each: Option<u64>,
    /// The same without bash.
    pub(super) pss_bytes_each_beyond_bash: Option<u64>,
}

/// What all processes of a sandbox have together.
#[derive(Default)]
struct Sum {
    switches: u64,
    pss_bytes: Option<u64>,
    beyond_bash: Option<u64>,
}

pub(super) async fn measure(all: &[Live], phase: Duration) -> anyhow::Result<Figures> {
    sleep(LEAD).await;
    let look = || all.iter().map(|live| look(live.sandbox.facts().outer_pid)).collect::<io::Result<Vec<_>>>();
    let before = look()?;
    sleep(phase).await;
    let after = look()?;
    let n = all.len() as u64;
    let mean = |pick: fn(&Sum) -> Option<u64>| after.iter().map(pick).sum::<Option<u64>>().map(|sum| sum / n.max(1));
    let switches = |sums: &[Sum]| sums.iter().map(|sum| sum.switches).sum::<u64>();
    Ok(Figures {
        sessions: all.len(),
        seconds: phase.as_secs(),
        wakeups: switches(&after).saturating_sub(switches(&before)),
        pss_bytes_each: mean(|sum| sum.pss_bytes),
        pss_bytes_each_beyond_bash: mean(|sum| sum.beyond_bash),
    })
}

fn look(root: u32) -> io::Result<Sum> {
    let mut sum = Sum { pss_bytes: Some(0), beyond_bash: Some(0), ..Sum::default() };
    let mut waiting = vec![root];
    while let Some(pid) = waiting.pop() {
        waiting.extend(children(pid)?);
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            sum.switches += switches(&fs::read_to_string(thread?.path().join("status"))?);
        }
        let pages = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let pss = kibibytes(&pages, "Pss");
        let is_bash = fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "bash");
        sum.pss_bytes = sum.pss_bytes.zip(pss).map(|(sum, more)| sum + more);
        sum.beyond_bash = sum.beyond_bash.zip(pss).map(|(sum, more)| if is_bash { sum } else { sum + more });
    }
    Ok(sum)
}

/// Returns how often a thread has gone to sleep or was made to give way.
fn switches(status: &str) -> u64 {
    let named = |line: &str| line.split_once("voluntary_ctxt_switches:")?.1.trim().parse::<u64>().ok();
    status.lines().filter_map(named).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_switches_count() {
        assert_eq!(switches("Name: x\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t5\n"), 12);
        assert!(switches(&fs::read_to_string("/proc/self/status").unwrap()) > 0);
    }
}
