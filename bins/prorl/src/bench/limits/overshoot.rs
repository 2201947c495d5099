//! How far above its limit memory comes before it is taken away.

use anyhow::{Context, ensure};
use prorl_sandbox::Limits;
use serde::Serialize;

use super::{
    Args,
    live::{ALL, Ground},
};
use crate::{
    bench::{
        figures::{ratio, rounded},
        machine::meminfo,
    },
    output,
};

/// How often each limit is tried.
const TRIES: usize = 3;

/// How many times its limit an allocator takes if nobody stops it. Less is not a test, and more harms the machine.
const TAKES: u64 = 4;

/// What an allocator takes that has no limit, in bytes.
const FREE_TAKES: u64 = 512 << 20;

/// A child takes as many bytes as it is told, all at once, and holds them for a while; its parent tells how it ended, the most
/// kibibytes that it ever had by the kernel's own account, and how many seconds it took them in.
const SCRIPT: &str = r#"
import os, sys, time
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    begun = time.monotonic()
    taken = bytearray(int(sys.argv[1]))
    os.write(writer, str(time.monotonic() - begun).encode())
    time.sleep(float(sys.argv[2]))
    os._exit(0)
os.close(writer)
took = os.read(reader, 64).decode() or "-"
_, status, usage = os.wait4(child, 0)
print(int(os.WIFSIGNALED(status)), usage.ru_maxrss, took)
"#;

/// What came of allocators that did not mind their limit.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// How fast one takes memory that nobody hinders, in 10^9 bytes in a second.
    unhindered_gb_per_s: f64,
    limits: Vec<Held>,
}

impl Figures {
    /// Tells whether every allocator was stopped.
    pub(super) fn is_held(&self) -> bool {
        !self.limits.is_empty() && self.limits.iter().all(|held| held.stopped == held.tries)
    }

    /// Returns the most that any came to, as a part of its limit.
    pub(super) fn most_by_limit(&self) -> Option<f64> {
        self.limits.iter().filter_map(|held| held.peak_by_limit).max_by(f64::total_cmp)
    }
}

/// What came of one limit.
#[derive(Debug, Serialize)]
struct Held {
    limit_bytes: u64,
    tries: usize,
    stopped: usize,
    /// The most of all tries.
    peak_bytes: u64,
    peak_by_limit: Option<f64>,
}

/// What a child did.
struct Told {
    is_killed: bool,
    peak_bytes: u64,
    seconds: Option<f64>,
}

pub(super) async fn measure(args: &Args, ground: &Ground) -> anyhow::Result<Figures> {
    let room = meminfo("MemAvailable").context("the machine does not say how much memory it has left")? / 2;
    ensure!(room >= FREE_TAKES, "the machine has too little memory left");
    let free = take(ground, Limits::NONE, FREE_TAKES, "0").await?;
    let seconds = free.seconds.filter(|seconds| *seconds > 0.0).context("nothing was taken")?;
    let mut limits = Vec::new();
    for limit_bytes in args.memory_mb.iter().map(|mebibytes| mebibytes << 20) {
        if limit_bytes * TAKES > room {
            output::note(format_args!("note: a limit of {limit_bytes} bytes is not tried: so much memory is not left"));
            continue;
        }
        let mut held = Held { limit_bytes, tries: TRIES, stopped: 0, peak_bytes: 0, peak_by_limit: None };
        for _ in 0..TRIES {
            let limits = Limits { memory_bytes: Some(limit_bytes), ..ALL };
            let told = take(ground, limits, limit_bytes * TAKES, "1").await?;
            held.stopped += usize::from(told.is_killed);
            held.peak_bytes = held.peak_bytes.max(told.peak_bytes);
        }
        held.peak_by_limit = ratio(Some(held.peak_bytes as f64), Some(limit_bytes as f64));
        limits.push(held);
    }
    Ok(Figures { unhindered_gb_per_s: rounded(FREE_TAKES as f64 / seconds / 1e9), limits })
}

async fn take(ground: &Ground, limits: Limits, n_bytes: u64, hold_secs: &str) -> anyhow::Result<Told> {
    let live = ground.start(limits).await?;
    let ran = live.python(SCRIPT, &[n_bytes.to_string(), hold_secs.to_owned()]).await?;
    live.end().await?;
    let said = ran.stdout.text();
    told(&said).with_context(|| format!("an allocator's parent said {said:?} and {:?}", ran.stderr.text()))
}

fn told(said: &str) -> Option<Told> {
    let mut words = said.split_whitespace();
    let is_killed = words.next()? == "1";
    let peak_bytes = words.next()?.parse::<u64>().ok()? * 1024;
    Some(Told { is_killed, peak_bytes, seconds: words.next()?.parse().ok() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_allocators_parent_says_is_understood() {
        let killed = told("1 2048 -\n").unwrap();
        assert_eq!((killed.is_killed, killed.peak_bytes, killed.seconds), (true, 2 << 20, None));
        assert_eq!(told("0 1 0.5").unwrap().seconds, Some(0.5));
        assert!(told("").is_none() && told("1 x -").is_none());
    }
}
