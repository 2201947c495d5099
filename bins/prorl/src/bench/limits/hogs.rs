//! What no neighbour should have: programs that take all there is of something, again and again.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use prorl_sandbox::Limits;
use prorl_tools::host::ExecSpec;
use tokio::{task::JoinSet, time::sleep};

use super::{
    live::{ALL, CALL_LIMIT, Ground, Live},
    overshoot,
};

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Hog {
    /// Every process makes others, as fast as it can.
    ForkBomb,
    /// A process takes more memory than it may have, over and over.
    Allocator,
    /// The writable layer and `/tmp` are filled and emptied.
    DiskFiller,
    /// As many threads as that never wait.
    Spinner,
}

/// How many bytes [`Hog::Allocator`] takes, which is above its limit.
const ALLOCATED: u64 = 1 << 30;

/// How many threads [`Hog::Spinner`] has.
const SPINNERS: u32 = 256;

/// How long one is loose at most.
const LIFE: Duration = Duration::from_hours(2);

/// How long it takes until one that was ended is followed by another: as long as a model thinks at the least.
const PAUSE: Duration = Duration::from_millis(500);

const FORK_BOMB: &str = "
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
";

/// Each time in a child, so that one that is killed is followed by another.
const ALLOCATOR: &str = "
import os, sys
while True:
    child = os.fork()
    if child == 0:
        bytearray(int(sys.argv[1]))
        os._exit(0)
    os.waitpid(child, 0)
";

const DISK_FILLER: &str = "while :; do \
    dd if=/dev/zero of=/workspace/filler bs=1M; dd if=/dev/zero of=/tmp/filler bs=1M; \
    rm -f /workspace/filler /tmp/filler; done 2>/dev/null";

/// Hashing lets the other threads run meanwhile.
const SPINNER: &str = "
import hashlib, sys, threading
def spin():
    while True:
        hashlib.pbkdf2_hmac('sha256', b'password', b'salt', 200_000)
for _ in range(int(sys.argv[1])):
    threading.Thread(target=spin).start()
";

impl Hog {
    pub(super) const ALL: [Self; 4] = [Self::ForkBomb, Self::Allocator, Self::DiskFiller, Self::Spinner];

    /// What it is called in figures.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ForkBomb => "fork_bomb",
            Self::Allocator => "allocator",
            Self::DiskFiller => "disk_filler",
            Self::Spinner => "spinner",
        }
    }

    fn program(self, live: &Live) -> anyhow::Result<Vec<String>> {
        match self {
            Self::ForkBomb => live.python_words(FORK_BOMB, &[]),
            Self::Allocator => live.python_words(ALLOCATOR, &[ALLOCATED.to_string()]),
            Self::DiskFiller => Ok(["sh", "-c", DISK_FILLER].map(str::to_owned).to_vec()),
            Self::Spinner => live.python_words(SPINNER, &[SPINNERS.to_string()]),
        }
    }

    /// Lets one loose in a sandbox of its own. One that is ended by a limit is followed by another.
    pub(super) async fn run(self, ground: &Ground) -> anyhow::Result<Running> {
        let live = ground.start(ALL).await?;
        let program = ExecSpec { output_limit_bytes: 1024, ..ExecSpec::new(self.program(&live)?) };
        let tools = Arc::clone(&live.tools);
        let mut task = JoinSet::new();
        task.spawn(async move {
            while !tools.is_closed() {
                let _ended_by_a_limit = tools.exec(&program, LIFE).await;
                sleep(PAUSE).await;
            }
        });
        Ok(Running { live, _task: task })
    }
}

/// A hog that is loose. Dropping it ends it.
pub(super) struct Running {
    live: Live,
    _task: JoinSet<()>,
}

impl Running {
    /// Ends it; returns what was said of the limits that it did not mind.
    pub(super) async fn end(self) -> anyhow::Result<Vec<String>> {
        let exceeded = self.live.sandbox.take_exceeded();
        self.live.end().await?;
        Ok(exceeded.iter().map(ToString::to_string).collect())
    }
}

/// Which limits hold here. Nothing is let loose that would harm the machine.
pub(super) struct Holds {
    memory: Result<(), String>,
    pids: Result<(), String>,
    python: Result<(), String>,
}

impl Holds {
    /// Tries them by something that does no harm where they do not hold.
    pub(super) async fn find(ground: &Ground, overshoot: Option<&overshoot::Figures>) -> anyhow::Result<Self> {
        let memory = match overshoot {
            Some(figures) if figures.is_held() => Ok(()),
            Some(_) => Err("the limit of memory does not hold here".to_owned()),
            None => Err("the limit of memory was not tried".to_owned()),
        };
        let counted = count_pids(ground).await?;
        let pids = match &counted {
            Ok(n) if *n < TRIED_PIDS => Ok(()),
            Ok(_) => Err("the limit of processes does not hold here".to_owned()),
            Err(reason) => Err(reason.clone()),
        };
        Ok(Self { memory, pids, python: counted.map(drop) })
    }

    /// Tells why a hog cannot be let loose, if so.
    pub(super) fn check(&self, hog: Hog) -> Result<(), &str> {
        let held = match hog {
            Hog::ForkBomb => &self.pids,
            Hog::Allocator => &self.memory,
            // Without a limit it is a nuisance, and no harm.
            Hog::Spinner => &self.python,
            // A file system of its own has an end in any case.
            Hog::DiskFiller => &Ok(()),
        };
        held.as_ref().copied().map_err(String::as_str)
    }
}

/// How many processes are tried, with a limit of half of that.
const TRIED_PIDS: u32 = 64;

/// Starts so many processes that wait, and tells how many there were when it could no more, or was made to stop.
const COUNTER: &str = "
import os, signal, sys
alive = []
try:
    for _ in range(int(sys.argv[1])):
        child = os.fork()
        if child == 0:
            signal.pause()
        alive.append(child)
except OSError:
    pass
print(len(alive))
for child in alive:
    os.kill(child, signal.SIGKILL)
";

/// Returns how many of them there could be, or why there is nothing to try it with.
async fn count_pids(ground: &Ground) -> anyhow::Result<Result<u32, String>> {
    let live = ground.start(Limits { pids: Some(TRIED_PIDS / 2), ..ALL }).await?;
    let ran = match live.python_words(COUNTER, &[TRIED_PIDS.to_string()]) {
        Ok(words) => live.tools.exec(&ExecSpec::new(words), CALL_LIMIT).await?,
        Err(reason) => return Ok(Err(reason.to_string())),
    };
    live.end().await?;
    if !ran.success() {
        return Ok(Ok(0)); // it was killed with those that it had started
    }
    let said = ran.stdout.text();
    Ok(Ok(said.trim().parse().with_context(|| format!("who counts processes said {said:?}"))?))
}
