//! Every way in which a sandbox ends: afterwards nothing is left.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::Stdio,
    time::Duration,
};

use prorl_sandbox::SandboxSpec;
use rustix::process::Signal;
use tokio::time::timeout;

use super::{Ground, KilledOnDrop};
use crate::support::{
    Handle, LONG, Live, adopt_orphans, alone, assert_all_end, assert_no_children, assert_passed, in_namespace,
    in_session, is_alone,
};

/// Asserts that nothing is left of a sandbox that is said to be gone.
pub(crate) fn assert_no_trace(ground: &Ground, live: &Live) {
    let facts = live.sandbox.facts();
    assert_eq!(in_namespace(facts.hello.pid_namespace), Vec::<u32>::new());
    assert_eq!(in_session(facts.outer_pid), Vec::<u32>::new());
    assert!(facts.run_dir.as_ref().is_none_or(|folder| !folder.exists()), "{:?}", facts.run_dir);
    let records = fs::read_dir(ground.node.folder().join("boxes")).unwrap();
    let id = live.sandbox.id();
    assert!(records.into_iter().all(|record| record.unwrap().file_name().to_str() != Some(id)), "{id}");
}

pub(super) async fn nothing_is_left_after_a_shutdown(ground: &Ground) {
    let mounts = || fs::read_to_string("/proc/self/mountinfo").unwrap();
    let before = mounts();
    let live = ground.start(&ground.spec()).await;
    live.leave_stubborn_children().await;
    let processes = live.processes();
    assert_eq!(mounts(), before);
    live.sandbox.shutdown(Duration::from_secs(3)).await.unwrap();
    assert_no_trace(ground, &live);
    assert_all_end(processes).await;
    live.sandbox.shutdown(Duration::ZERO).await.unwrap();
    live.sandbox.wait_dead().await;
    timeout(LONG, live.tools.closed()).await.unwrap();
}

pub(super) async fn a_guest_that_does_not_answer_is_killed_after_the_grace(ground: &Ground) {
    let live = ground.start(&ground.spec()).await;
    live.leave_stubborn_children().await;
    let processes = live.processes();
    for process in &processes {
        process.signal(Signal::STOP);
    }
    live.sandbox.shutdown(Duration::from_millis(20)).await.unwrap();
    assert_no_trace(ground, &live);
    assert_all_end(processes).await;
}

pub(super) async fn a_dropped_sandbox_dies(ground: &Ground) {
    let live = ground.start(&ground.spec()).await;
    live.leave_stubborn_children().await;
    let processes = live.processes();
    drop(live.sandbox);
    assert_all_end(processes).await;
}

/// It runs alone, as the reaper of everything that it starts.
pub(super) async fn a_start_that_is_dropped_leaves_nothing(ground: &Ground) {
    let me = format!("contract::{}::a_start_that_is_dropped_leaves_nothing", ground.name);
    if !is_alone(&me) {
        return assert_passed(&alone(&me, &[]).output().unwrap());
    }
    adopt_orphans(); // the node's keeper was started before, and is none of them
    let whole = tokio::time::Instant::now();
    let sandbox = ground.runtime.start(&ground.spec()).await.unwrap();
    let whole = whole.elapsed();
    sandbox.shutdown(LONG).await.unwrap();
    for part in 0..24 {
        let _ = timeout(whole * part / 20, ground.runtime.start(&ground.spec())).await;
    }
    assert_no_children().await;
}

pub(super) async fn the_death_of_process_1_ends_it(ground: &Ground) {
    let live = ground.start(&ground.spec()).await;
    live.leave_stubborn_children().await;
    assert!(timeout(Duration::ZERO, live.sandbox.wait_dead()).await.is_err());
    let processes = live.processes();
    Handle::open(live.sandbox.facts().hello.host_pid).unwrap().signal(Signal::KILL);
    timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
    timeout(LONG, live.tools.closed()).await.unwrap();
    assert_no_trace(ground, &live);
    assert_all_end(processes).await;
}

pub(super) async fn the_death_of_the_outer_process_ends_it(ground: &Ground) {
    let live = ground.start(&ground.spec()).await;
    live.leave_stubborn_children().await;
    let processes = live.processes();
    Handle::open(live.sandbox.facts().outer_pid).unwrap().signal(Signal::KILL);
    timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
    assert_no_trace(ground, &live);
    assert_all_end(processes).await;
    live.sandbox.shutdown(Duration::ZERO).await.unwrap();
}

/// The host is killed as the kernel kills: without a word.
pub(super) async fn the_death_of_the_host_ends_it(ground: &Ground) {
    let me = format!("contract::{}::the_death_of_the_host_ends_it", ground.name);
    if is_alone(&me) {
        let live = ground.start(&ground.spec()).await;
        live.leave_stubborn_children().await;
        let pids = live.processes().iter().map(|process| process.pid.to_string()).collect::<Vec<_>>().join(" ");
        // To the test's own output, where the other half waits for it.
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "PIDS {pids}\nFOLDER {}\nIMAGE {}",
            ground.node.folder().display(),
            ground.image.path().display()
        )
        .unwrap();
        out.flush().unwrap();
        drop(out);
        std::future::pending::<()>().await;
    }
    let mut host = KilledOnDrop(alone(&me, &[]).stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(host.0.stdout.take().unwrap()).lines();
    let mut value = |name: &str| lines.find_map(|line| Some(line.unwrap().split_once(name)?.1.to_owned())).unwrap();
    let (pids, folder, image) = (value("PIDS "), value("FOLDER "), value("IMAGE "));
    let processes: Vec<Handle> = pids.split(' ').map(|pid| Handle::open(pid.parse().unwrap()).unwrap()).collect();
    // Those left, process 1 and the one outside; whether their children have come yet is theirs.
    assert!(processes.len() >= 5, "{processes:?}");
    host.0.kill().unwrap();
    assert_eq!(host.0.wait().unwrap().signal(), Some(9));
    assert_all_end(processes).await;
    fs::remove_dir_all(image).unwrap();
    // The keeper removes the folder once it has seen to that.
    let gone = async {
        while Path::new(&folder).exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, gone).await.expect("the keeper removes the folder");
}

pub(super) async fn a_life_is_finite(ground: &Ground) {
    let live = ground.start(&SandboxSpec { max_life: Duration::from_millis(1500), ..ground.spec() }).await;
    live.leave_stubborn_children().await;
    let processes = live.processes();
    timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
    assert_no_trace(ground, &live);
    assert_all_end(processes).await;
}
