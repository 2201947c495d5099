//! What the watchdog costs while nothing happens.

use std::{fs, time::Duration};

use anyhow::Context;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::{Args, live::Live};
use crate::bench::figures::rounded;

/// What its thread is called.
const THREAD: &str = "prorl-watch";

/// The number of sandboxes that its cost is told for.
const TOLD_FOR: f64 = 20.0;

/// Processor time of the watchdog.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// Idle ones, each with a shell and, if there is one, an interpreter.
    sandboxes: usize,
    seconds: f64,
    /// Of one processor.
    percent: f64,
    /// The same for twenty of them, were there as many.
    pub(super) percent_for_20: f64,
}

pub(super) async fn measure(args: &Args, sandboxes: &[Live]) -> anyhow::Result<Figures> {
    sleep(args.lead()).await;
    let begun = Instant::now();
    let before = thread_time(THREAD).context("this process has no thread that looks after sandboxes")?;
    sleep(args.phase()).await;
    let after = thread_time(THREAD).context("the thread that looks after sandboxes has ended")?;
    let seconds = begun.elapsed().as_secs_f64();
    let percent = after.saturating_sub(before).as_secs_f64() / seconds * 100.0;
    Ok(Figures {
        sandboxes: sandboxes.len(),
        seconds: rounded(seconds),
        percent: rounded(percent),
        percent_for_20: rounded(percent * TOLD_FOR / sandboxes.len() as f64),
    })
}

/// Returns the time on a processor that the threads of this process with that name have had so far. There may be none.
fn thread_time(name: &str) -> Option<Duration> {
    let mut sum = None;
    for thread in fs::read_dir("/proc/self/task").ok()?.flatten() {
        // One that has just ended has no files.
        let read = |file| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        if read("comm").trim_end() == name
            && let Some(nanos) = read("schedstat").split_whitespace().next().and_then(|nanos| nanos.parse().ok())
        {
            sum = Some(sum.unwrap_or_default() + Duration::from_nanos(nanos));
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn the_time_of_a_thread_is_found_by_its_name() {
        assert_eq!(thread_time("bench-nobody"), None);
        let (end, ended) = mpsc::channel::<()>();
        let (done, is_done) = mpsc::channel();
        let busy = thread::Builder::new().name("bench-busy".to_owned()).spawn(move || {
            done.send((0..3_000_000_u64).map(std::hint::black_box).sum::<u64>()).unwrap();
            ended.recv().unwrap_err();
        });
        is_done.recv().unwrap();
        assert!(thread_time("bench-busy").unwrap() > Duration::ZERO);
        drop(end);
        busy.unwrap().join().unwrap();
    }
}
