//! A sandbox that takes all that it can get of one thing, beside healthy ones whose calls go on. How much slower they get is a figure
//! (`prorl bench limits`); here is what holds on any machine, however busy.

use std::time::Duration;

use prorl_sandbox::{Limits, SandboxSpec};
use prorl_tools::host::ExecSpec;
use tokio::{task::JoinSet, time::Instant};

use crate::{
    escape::has_python,
    support::{LONG, Live, spec},
};

/// That of the machine.
const PYTHON: &str = "/usr/bin/python3";

const MIB: u64 = 1 << 20;

/// Healthy sandboxes.
const HEALTHY: usize = 6;

/// Calls of each of them in one phase.
const CALLS: usize = 30;

/// How often phases beside the hog are compared with phases before it, until one shows that it is held.
const TRIES: usize = 5;

/// How much longer a call in the middle may take beside a hog: far above what is measured, and far below what a hog does that is not
/// held.
const MOST: u32 = 2;

fn with_limits() -> SandboxSpec {
    let limits = Limits {
        memory_bytes: Some(128 * MIB),
        pids: Some(64),
        cpus: Some(1.0),
        open_files: Some(256),
        file_bytes: Some(64 * MIB),
        ..Limits::default()
    };
    SandboxSpec { limits, layer_bytes: 64 * MIB, tmp_bytes: 32 * MIB, ..spec() }
}

/// Returns how long a call in the middle took, of the same number by each sandbox at once. Each must be right.
async fn middle(healthy: &mut Vec<Live>) -> Duration {
    let mut calls = JoinSet::new();
    for live in healthy.drain(..) {
        calls.spawn(async move {
            let mut times = Vec::new();
            for _ in 0..CALLS {
                let begun = Instant::now();
                let done = live.tools.exec(&ExecSpec::new(["sh", "-c", "echo here; ls / >/dev/null"]), LONG).await;
                let done = done.unwrap();
                assert_eq!((done.stdout.text().as_str(), done.success()), ("here\n", true), "{done:?}");
                times.push(begun.elapsed());
            }
            (live, times)
        });
    }
    let mut all = Vec::new();
    for (live, times) in calls.join_all().await {
        healthy.push(live);
        all.extend(times);
    }
    all.sort_unstable();
    all[all.len() / 2]
}

/// Lets the script loose in a sandbox of its own and compares.
async fn beside(hog: &str) {
    let mut healthy = Vec::new();
    for _ in 0..HEALTHY {
        healthy.push(Live::start(&with_limits()).await);
    }
    let mut ratios = Vec::new();
    for _ in 0..TRIES {
        let alone = middle(&mut healthy).await;
        let live = Live::start(&with_limits()).await;
        // Whoever is ended by a limit is followed by another.
        let hog = format!("open(\"/workspace/loose\", \"w\"){hog}");
        live.sh(&format!("setsid sh -c 'while :; do {PYTHON} -c \"$0\"; done' '{hog}' >/dev/null 2>&1 &")).await;
        live.sh("until [ -e /workspace/loose ]; do :; done").await;
        let beside = middle(&mut healthy).await;
        live.shut().await;
        ratios.push(beside.as_secs_f64() / alone.as_secs_f64());
        if beside <= alone * MOST {
            break;
        }
    }
    for live in healthy {
        live.shut().await;
    }
    assert!(
        ratios.last().is_some_and(|ratio| *ratio <= f64::from(MOST)),
        "a call takes so many times as long: {ratios:?}"
    );
}

macro_rules! hogs {
    ($($name:ident: $hog:expr;)*) => {$(
        #[tokio::test]
        async fn $name() {
            if has_python(concat!("neighbours::", stringify!($name))).is_some() {
                beside($hog).await;
            }
        }
    )*};
}

hogs! {
    a_fork_bomb_is_held: "
import os
while True:
    try: os.fork()
    except OSError: pass";
    an_allocator_is_held: "
while True: bytearray(1 << 30)";
    a_filler_of_disks_is_held: "
import os
while True:
    for path in (\"/workspace/full\", \"/tmp/full\"):
        try:
            with open(path, \"wb\") as file:
                while True: file.write(bytes(1 << 20))
        except OSError: os.truncate(path, 0)";
    spinning_threads_are_held: "
import hashlib, threading
def spin():
    while True: hashlib.pbkdf2_hmac(\"sha256\", b\"a\", b\"b\", 200000)
for _ in range(50): threading.Thread(target=spin).start()";
    who_opens_all_files_is_held: "
import os
while True:
    files = []
    try:
        while True: files.append(os.open(\"/dev/null\", os.O_RDONLY))
    except OSError:
        for file in files: os.close(file)";
    who_leaves_sockets_full_is_held: "
import socket
while True:
    pairs = []
    try:
        while True:
            one, other = socket.socketpair()
            pairs.append((one, other))
            one.setblocking(False)
            while True:
                try: one.send(bytes(1 << 16))
                except BlockingIOError: break
    except OSError: pass";
}
