//! The server is killed at any moment, over jobs in every stage and over both runtimes: nothing of it is left.
//!
//! This process is the subreaper of everything that a server starts, however detached, so that leftovers are found as its
//! own descendants and not by any name. `PRORL_KILLS` sets how many moments are tried; 60 by default.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::{fs, path::Path, process::Stdio, time::Duration};

use nix::{
    sys::{
        prctl::set_child_subreaper,
        signal::Signal,
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};
use prorl_llm::mock::MockLlm;
use serde_json::{Value, json};
use support::{call, descendants, finish, gone, image, mock, prorl, signal};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::Mutex,
    task::JoinSet,
    time::sleep,
};

/// Whoever holds it owns every descendant of this process.
static DESCENDANTS: Mutex<()> = Mutex::const_new(());

/// Servers that are killed at about the same time.
const AT_ONCE: usize = 4;

/// How long after a kill something may still be there: the owners' own ladder of signals, on a busy machine.
const VANISH: Duration = Duration::from_secs(20);

/// A sequence of numbers that is the same in every run.
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// A policy whose jobs stay in each stage for a while: a call that hangs, a tool with children that left their session,
/// and jobs that start, run, score and end.
async fn policy() -> MockLlm {
    let escape = "for i in 1 2; do setsid sh -c 'trap \"\" TERM HUP INT; sleep 300' >/dev/null 2>&1 & done; sleep 300";
    let tool = call("execute_bash", &json!({"command": escape}));
    let quick = call("execute_bash", &json!({"command": "echo 4"}));
    mock(&json!({"tasks": [
        {"match": "hang", "turns": [{"hang": true}]},
        {"match": "tool", "turns": [tool]},
        {"match": "quick", "turns": [quick, finish("4")]},
    ]}))
    .await
}

fn job(kind: &str, idx: usize, image: Option<&Path>) -> Value {
    let mut instance = json!({"data_source": "math", "prompt": format!("{kind} {idx}"), "ground_truth": "4",
        "tools": ["execute_bash", "finish"]});
    if let Some(image) = image {
        instance["image"] = json!(image);
    }
    json!({"instance": instance, "sampling_params": {}})
}

fn serve(temp: &Path, runtime: &str, mock: &MockLlm) -> Child {
    Command::new(prorl())
        .args(["serve", "--listen", "127.0.0.1:0", "--runtime", runtime, "--llm", &mock.address()])
        .env("TMPDIR", temp)
        // Packed images go to Apptainer as they are, and nothing is made in anybody's home.
        .env("PRORL_STORE", "none")
        .env("PRORL_LOG", "error") // there are hundreds of them
        .env_remove("PRORL_TOKEN")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

async fn address(server: &mut Child) -> Option<String> {
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let line = lines.next_line().await.ok()??;
    line.strip_prefix("prorl serve listening on ").map(str::to_owned)
}

/// Sends jobs of every kind for as long as the server lives.
async fn keep_busy(address: &str, image: Option<&Path>) {
    let client = reqwest::Client::new();
    let mut waiting = JoinSet::new();
    for idx in 0..usize::MAX {
        let kind = ["hang", "tool", "quick", "quick"][idx % 4];
        let send = client.post(format!("{address}/process")).json(&job(kind, idx, image)).send();
        waiting.spawn(send);
        if waiting.len() >= 10 && waiting.join_next().await.is_some_and(|sent| !matches!(sent, Ok(Ok(_)))) {
            return;
        }
    }
}

/// When a server is killed: so long after its own start, or after that of its first sandbox.
#[derive(Clone, Copy)]
enum Moment {
    OfServer(Duration),
    OfSandboxes(Duration),
}

impl Moment {
    async fn comes(self, pid: u32) {
        match self {
            Self::OfServer(after) => sleep(after).await,
            Self::OfSandboxes(after) => {
                support::until("a sandbox", || async { !descendants(pid).is_empty() }).await;
                sleep(after).await;
            }
        }
    }
}

/// Starts a server, kills it at the moment, and tells how many processes it had then, with itself.
async fn start_and_kill(temp: &Path, runtime: &str, mock: &MockLlm, image: Option<&Path>, moment: Moment) -> usize {
    let mut server = serve(temp, runtime, mock);
    let pid = server.id().unwrap();
    tokio::select! {
        () = moment.comes(pid) => {}
        () = async {
            if let Some(address) = address(&mut server).await {
                keep_busy(&address, image).await;
            }
            panic!("the server ended by itself");
        } => {}
    }
    let n_processes = descendants(pid).len() + 1;
    signal(pid, Signal::SIGKILL);
    server.wait().await.unwrap();
    n_processes
}

/// Checks that nothing is left of servers that had these temporary folders.
async fn assert_nothing_left(temps: &[tempfile::TempDir]) {
    gone_all().await;
    for temp in temps {
        let left: Vec<_> = walk(temp.path());
        assert!(left.is_empty(), "left in the temporary folder: {left:?}");
        for table in ["/proc/self/mountinfo", "/proc/net/unix"] {
            let text = fs::read_to_string(table).unwrap();
            assert!(!text.contains(temp.path().to_str().unwrap()), "left in {table}: {text}");
        }
    }
}

/// Waits until this process has no descendant any more.
async fn gone_all() {
    let began = tokio::time::Instant::now();
    loop {
        let left = descendants(std::process::id());
        gone(&left, VANISH).await;
        // The dead are this process's to reap, as it has taken them on; servers are waited for where they were started.
        for (pid, _) in &left {
            let _ = waitpid(Pid::from_raw(pid.cast_signed()), Some(WaitPidFlag::WNOHANG));
        }
        if support::alive(&descendants(std::process::id())).is_empty() {
            return;
        }
        assert!(began.elapsed() < VANISH, "still there: {:?}", command_lines());
    }
}

/// What is left, for the message of a failed test.
fn command_lines() -> Vec<String> {
    let line = |(pid, _): (u32, String)| {
        let text = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        format!("{pid}: {}", String::from_utf8_lossy(&text).replace('\0', " "))
    };
    descendants(std::process::id()).into_iter().map(line).collect()
}

fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(walk(&entry.path()));
        }
        found.push(entry.path());
    }
    found
}

async fn kill_at_many_moments(runtime: &str, image: Option<&Path>, span: Duration) {
    let _owner = DESCENDANTS.lock().await;
    set_child_subreaper(true).unwrap();
    let n_kills: usize = std::env::var("PRORL_KILLS").map_or(60, |text| text.parse().expect("PRORL_KILLS is a number"));
    let mock = policy().await;
    let mut seeded = Seeded(20_261_129);
    let (mut n_done, mut n_busy, mut most) = (0, 0, 0);
    while n_done < n_kills {
        let n_servers = AT_ONCE.min(n_kills - n_done);
        let temps: Vec<_> = (0..n_servers).map(|_| image::open_temp()).collect();
        let mut moment = || Duration::from_micros(seeded.below(span.as_micros().try_into().unwrap()));
        // A quarter hits servers that are just starting.
        let moments = (0..n_servers).map(|idx| match idx {
            0 => Moment::OfServer(moment()),
            _ => Moment::OfSandboxes(moment()),
        });
        let moments: Vec<_> = moments.collect();
        let kills = temps.iter().zip(moments);
        let kills = kills.map(|(temp, moment)| start_and_kill(temp.path(), runtime, &mock, image, moment));
        for n_processes in futures_util::future::join_all(kills).await {
            n_busy += usize::from(n_processes > 1);
            most = most.max(n_processes);
        }
        assert_nothing_left(&temps).await;
        n_done += n_servers;
    }
    support::note(&format!("{runtime}: {n_kills} kills, {n_busy} of them over sandboxes, {most} processes at most"));
    assert!(n_busy * 2 >= n_kills, "only {n_busy} of {n_kills} kills met a sandbox: the moments are wrong");
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_server_killed_at_any_moment_leaves_nothing_of_the_namespace_runtime() {
    kill_at_many_moments("namespace", None, Duration::from_millis(800)).await;
}

#[tokio::test]
async fn a_server_killed_at_any_moment_leaves_nothing_of_the_singularity_runtime() {
    if !image::has_apptainer() {
        return support::note("skipped: apptainer is not installed");
    }
    let unpacked = image::image();
    kill_at_many_moments("singularity", Some(unpacked.path()), Duration::from_secs(2)).await;
}

#[tokio::test]
async fn a_server_killed_over_a_packed_image_leaves_no_fuse_helper() {
    if !image::has_apptainer() {
        return support::note("skipped: apptainer is not installed");
    }
    let Some(packed) = image::packed_image() else {
        return support::note("skipped: mksquashfs or /dev/fuse is not there for this user");
    };
    let _owner = DESCENDANTS.lock().await;
    set_child_subreaper(true).unwrap();
    let mock = policy().await;
    let temp = image::open_temp();
    let mut server = serve(temp.path(), "singularity", &mock);
    let pid = server.id().unwrap();
    let address = address(&mut server).await.unwrap();
    let client = reqwest::Client::new();
    for idx in 0..3 {
        let sent = client.post(format!("{address}/v1/jobs")).json(&job("tool", idx, Some(packed.path())));
        assert_eq!(sent.send().await.unwrap().status().as_u16(), 202);
    }
    // Each: an owner, Apptainer, its FUSE helper, the guest twice, the shell and the children that left their session.
    let serves_files = |process: &support::Process| {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", process.0)).into_iter().flatten().flatten();
        fds.into_iter().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|file| file == Path::new("/dev/fuse")))
    };
    support::until("the tools", || async {
        let ours = descendants(pid);
        support::job_calls(&mock).len() == 3
            && ours.len() >= 3 * 8
            && ours.iter().filter(|one| serves_files(one)).count() >= 3
    })
    .await;
    signal(pid, Signal::SIGKILL);
    server.wait().await.unwrap();
    assert_nothing_left(&[temp]).await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn what_a_killed_keeper_could_not_take_away_goes_with_the_next_start() {
    let _owner = DESCENDANTS.lock().await;
    set_child_subreaper(true).unwrap();
    let mock = policy().await;
    let temp = image::open_temp();
    let mut server = serve(temp.path(), "namespace", &mock);
    let pid = server.id().unwrap();
    let first = address(&mut server).await.unwrap();
    let sent = reqwest::Client::new().post(format!("{first}/v1/jobs")).json(&job("tool", 0, None)).send().await;
    assert_eq!(sent.unwrap().status().as_u16(), 202);
    support::until("the tool", || async { descendants(pid).len() >= 5 }).await;
    // The keeper is no child of the server's.
    let of_server = descendants(pid);
    let others = support::alive(&descendants(std::process::id())).into_iter();
    let others: Vec<_> = others.filter(|one| one.0 != pid && !of_server.contains(one)).collect();
    assert_eq!(others.len(), 1, "{others:?} {:?}", command_lines());
    signal(others[0].0, Signal::SIGKILL);
    signal(pid, Signal::SIGKILL);
    server.wait().await.unwrap();
    gone_all().await;
    assert!(!walk(temp.path()).is_empty(), "nobody was there to take the files away");

    let mut next = serve(temp.path(), "namespace", &mock);
    address(&mut next).await.unwrap();
    signal(next.id().unwrap(), Signal::SIGTERM);
    assert!(next.wait().await.unwrap().success());
    assert_nothing_left(&[temp]).await;
    mock.shutdown().await.unwrap();
}
