//! Starting, shutting down, and every way of dying: afterwards nothing is left.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::ExitStatusExt as _,
    process::Stdio,
    time::Duration,
};

use prorl_core::SandboxHandle as _;
use prorl_sandbox::{Runtime as _, SandboxSpec};
use rustix::process::Signal;
use tokio::{task::JoinSet, time::timeout};

use crate::support::{
    Handle, LONG, Live, adopt_orphans, alone, assert_all_end, assert_no_children, assert_passed, in_namespace,
    is_alone, runtime, script, spec,
};

#[tokio::test]
async fn a_sandbox_starts_runs_and_leaves_nothing() {
    let live = Live::start(&spec()).await;
    let facts = live.sandbox.facts().clone();
    assert_eq!(facts.hello.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(live.sh("echo $((6 * 7)); sleep 0 & wait; echo end").await, "42\nend");
    live.leave_stubborn_children().await;
    let processes = live.processes();
    live.sandbox.shutdown(Duration::from_secs(2)).await.unwrap();
    assert_all_end(processes).await;
    assert_eq!(in_namespace(facts.hello.pid_namespace), Vec::<u32>::new());
    // Once more, and by the pipeline's name for it.
    live.sandbox.shutdown(Duration::ZERO).await.unwrap();
    live.sandbox.close(Duration::ZERO).await.unwrap();
    live.sandbox.wait_dead().await;
    timeout(LONG, live.tools.closed()).await.unwrap();
}

#[tokio::test]
async fn nothing_is_mounted_or_left_outside() {
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let before = mounts();
    let live = Live::start(&spec()).await;
    assert_eq!(mounts(), before);
    live.shut().await;
}

#[tokio::test]
async fn facts_name_the_namespaces_of_the_sandbox() {
    let live = Live::start(&spec()).await;
    let hello = &live.sandbox.facts().hello;
    assert_eq!(live.sh("readlink /proc/self/ns/pid").await, format!("pid:[{}]", hello.pid_namespace));
    assert_eq!(live.sh("readlink /proc/self/ns/user").await, format!("user:[{}]", hello.user_namespace));
    assert_eq!(live.sh("id -u").await, hello.uid.to_string());
    let status = std::fs::read_to_string(format!("/proc/{}/status", hello.host_pid)).unwrap();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    assert_eq!(numbers.split_whitespace().collect::<Vec<_>>(), [hello.host_pid.to_string().as_str(), "1"]);
    live.shut().await;
}

#[tokio::test]
async fn the_channel_is_given_out_once() {
    let mut sandbox = runtime().start(&spec()).await.unwrap();
    assert!(sandbox.take_channel().is_some());
    assert!(sandbox.take_channel().is_none());
    sandbox.shutdown(LONG).await.unwrap();
}

#[tokio::test]
async fn dropping_a_sandbox_kills_it() {
    let live = Live::start(&spec()).await;
    live.leave_stubborn_children().await;
    let processes = live.processes();
    drop(live.sandbox);
    assert_all_end(processes).await;
}

#[tokio::test]
async fn two_shutdowns_at_once_both_return() {
    let live = Live::start(&spec()).await;
    let (one, two) = tokio::join!(live.sandbox.shutdown(LONG), live.sandbox.shutdown(Duration::ZERO));
    one.unwrap();
    two.unwrap();
}

#[tokio::test]
async fn a_shutdown_that_is_dropped_can_be_made_again() {
    let live = Live::start(&spec()).await;
    let processes = live.processes();
    let _ = timeout(Duration::ZERO, live.sandbox.shutdown(LONG)).await;
    live.sandbox.shutdown(LONG).await.unwrap();
    assert_all_end(processes).await;
}

#[tokio::test]
async fn a_guest_that_does_not_answer_is_killed_after_the_grace() {
    let live = Live::start(&spec()).await;
    live.leave_stubborn_children().await;
    let processes = live.processes();
    // The outer process is stopped too, so even the last resort is needed.
    for process in &processes {
        process.signal(Signal::STOP);
    }
    live.sandbox.shutdown(Duration::from_millis(20)).await.unwrap();
    assert_all_end(processes).await;
}

#[tokio::test]
async fn the_death_of_process_1_is_seen() {
    let live = Live::start(&spec()).await;
    live.leave_stubborn_children().await;
    assert!(timeout(Duration::ZERO, live.sandbox.wait_dead()).await.is_err());
    let processes = live.processes();
    let guest = Handle::open(live.sandbox.facts().hello.host_pid).unwrap();
    guest.signal(Signal::KILL);
    timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
    timeout(LONG, live.tools.closed()).await.unwrap();
    assert_all_end(processes).await;
    live.sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn the_death_of_the_outer_process_ends_the_sandbox() {
    let live = Live::start(&spec()).await;
    live.leave_stubborn_children().await;
    let processes = live.processes();
    Handle::open(live.sandbox.facts().outer_pid).unwrap().signal(Signal::KILL);
    timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
    assert_all_end(processes).await;
    live.sandbox.shutdown(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_does_not_outlive_its_life() {
    let mut spec = spec();
    spec.max_life = Duration::from_millis(300);
    let live = Live::start(&spec).await;
    let processes = live.processes();
    timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
    assert_all_end(processes).await;
}

/// An embedder may start sandboxes on one tokio runtime and end them on another.
#[test]
fn a_sandbox_outlives_the_tokio_runtime_that_started_it() {
    let fresh = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = fresh();
    let [one, two] = std::array::from_fn(|_| first.block_on(runtime().start(&spec())).unwrap());
    drop(first);
    fresh().block_on(async {
        one.shutdown(LONG).await.unwrap();
        Handle::open(two.facts().hello.host_pid).unwrap().signal(Signal::KILL);
        timeout(LONG, two.wait_dead()).await.unwrap();
    });
}

#[tokio::test]
#[expect(unsafe_code, reason = "a fork is what is tested")]
async fn a_forked_process_that_drops_its_copy_changes_nothing() {
    let sandbox = runtime().start(&spec()).await.unwrap();
    // SAFETY: the child drops what is tested, which takes no lock that another thread of the test could hold, and ends.
    let sandbox = match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            drop(sandbox);
            // SAFETY: nothing of this process is to run in the child any more.
            unsafe { libc::_exit(0) }
        }
        nix::unistd::ForkResult::Parent { child } => {
            nix::sys::wait::waitpid(child, None).unwrap();
            sandbox
        }
    };
    let live = Live::of(sandbox);
    assert_eq!(live.sh("echo here").await, "here");
    let processes = live.processes();
    Handle::open(live.sandbox.facts().hello.host_pid).unwrap().signal(Signal::KILL);
    timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
    assert_all_end(processes).await;
}

#[tokio::test]
async fn twenty_at_once() {
    let mut starts = JoinSet::new();
    for number in 0..20 {
        starts.spawn(async move {
            let live = Live::start(&spec()).await;
            let said = live.sh(&format!("echo {number} > note; cat note; uname -n")).await;
            assert_eq!(said, format!("{number}\nsandbox"));
            let inode = live.sandbox.facts().hello.pid_namespace;
            live.shut().await;
            inode
        });
    }
    assert_eq!(starts.join_all().await.len(), 20);
}

/// Drops starts at moments all over their course. It runs alone, as the reaper of everything that it starts.
#[tokio::test]
async fn dropping_a_start_kills_what_there_is_so_far() {
    const ME: &str = "life::dropping_a_start_kills_what_there_is_so_far";
    if !is_alone(ME) {
        return assert_passed(&alone(ME, &[]).output().unwrap());
    }
    adopt_orphans();
    let whole = tokio::time::Instant::now();
    drop(runtime().start(&spec()).await.unwrap());
    let whole = whole.elapsed();
    for part in 0..60 {
        let _ = timeout(whole * part / 50, runtime().start(&spec())).await;
    }
    // A guest ends as its channel closes; something else in its place may not.
    let folder = tempfile::tempdir().unwrap();
    let deaf = SandboxSpec::new(script(folder.path(), "trap '' TERM HUP; sleep 1000 & while :; do sleep 1000; done"));
    let _ = timeout(Duration::from_millis(100), runtime().start(&deaf)).await;
    assert_no_children().await;
}

/// The host is killed as the kernel kills: without a word. Then its sandboxes end by themselves, stuck or not.
#[tokio::test]
async fn the_death_of_the_host_ends_its_sandboxes() {
    const ME: &str = "life::the_death_of_the_host_ends_its_sandboxes";
    if is_alone(ME) {
        let live = Live::start(&spec()).await;
        live.leave_stubborn_children().await;
        let inside = live.processes().iter().map(|process| process.pid.to_string()).collect::<Vec<_>>().join(" ");
        // To the test's own output, where the other half waits for it.
        writeln_out(&format!("PIDS {} {inside}", live.sandbox.facts().hello.host_pid));
        std::future::pending::<()>().await;
    }
    for stuck in [false, true] {
        let mut host = alone(ME, &[]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(host.stdout.take().unwrap()).lines();
        let pids = lines.find_map(|line| Some(line.unwrap().split_once("PIDS ")?.1.to_owned())).unwrap();
        let processes: Vec<Handle> = pids.split(' ').map(|pid| Handle::open(pid.parse().unwrap()).unwrap()).collect();
        assert!(processes.len() >= 6, "{processes:?}");
        if stuck {
            processes[0].signal(Signal::STOP);
        }
        host.kill().unwrap();
        assert_eq!(host.wait().unwrap().signal(), Some(9));
        assert_all_end(processes).await;
    }
}

fn writeln_out(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}
