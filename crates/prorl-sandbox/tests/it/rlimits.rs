//! Limits that the kernel holds tasks to by itself.

use std::{sync::Arc, time::Duration};

use prorl_sandbox::{Limits, NamespaceConfig, NamespaceRuntime, Runtime, SandboxSpec};
use prorl_tools::{
    host::BashCall,
    wire::{BashEnd, ExitStatus},
};

use crate::{
    contract::Ground,
    escape::{has_python, with_python},
    fakeroot::user_with_range,
    support::{LONG, Live, is_root, node, spec},
};

fn limited(pids: u32) -> SandboxSpec {
    SandboxSpec { limits: Limits { pids: Some(pids), ..Limits::NONE }, ..spec() }
}

impl Live {
    /// Runs a command in a shell that stays; returns what it said, and how it ended.
    async fn bash(&self, command: &str, limit: Duration) -> (String, BashEnd) {
        let answer = self.tools.bash(&BashCall::new(command), limit).await.unwrap();
        (answer.output.text().trim_end().to_owned(), answer.end)
    }

    /// Starts processes until no more can be, and tells how many there were. They stay.
    async fn fill(&self) -> u32 {
        let script = "n = 0
try:
    while n < 500:
        if os.fork() == 0: signal.pause()
        n += 1
except BlockingIOError: pass
print(n)";
        self.python(script).await.parse().unwrap()
    }
}

#[tokio::test]
async fn a_fork_bomb_ends_with_its_call_and_the_session_goes_on() {
    for fakeroot in [false, true] {
        let live = Live::start(&SandboxSpec { fakeroot, ..limited(64) }).await;
        // It goes on when its call has ended, or is ended at its limit; either way the next call finds room.
        for (bomb, limit) in
            [(":(){ :|:& };:; wait; while :; do :; done", Duration::from_secs(2)), (":(){ :|:& };:", LONG)]
        {
            let (_, end) = live.bash(bomb, limit).await;
            assert_eq!(matches!(end, BashEnd::LimitPassed { .. }), limit < LONG, "{end:?}");
            // The bomb is full grown. Nothing but the shell itself may be needed to see that.
            let count = "set -- /proc/[0-9]*; echo $#";
            while limit == LONG && live.sh(count).await.parse::<u32>().unwrap() < 60 {}
            let mut answer = live.bash("/bin/echo works", LONG).await;
            if limit < LONG && answer.1 != BashEnd::Exited(0) {
                // Few were left when the call was ended, and they have grown again. Now it is full, and they are ended.
                answer = live.bash("/bin/echo works", LONG).await;
            }
            let (said, end) = answer;
            assert_eq!(end, BashEnd::Exited(0), "{said}");
            // What the bomb said last may be heard still.
            assert!(said.lines().any(|line| line == "works"), "{said}");
            if limit == LONG {
                // Process 1, the shell, and what counts.
                assert_eq!(live.sh(count).await, "3");
            }
        }
        live.shut().await;
    }
}

/// The kernel counts the processes of each user namespace by themselves, though all are one user's outside.
#[tokio::test]
async fn sandboxes_at_their_limit_do_not_count_for_each_other() {
    if has_python("sandboxes_at_their_limit_do_not_count_for_each_other").is_none() {
        return;
    }
    let mut full = Vec::new();
    for _ in 0..4 {
        let live = Live::start(&limited(40)).await;
        let n_started = live.fill().await;
        assert!((36..=40).contains(&n_started), "{n_started}");
        full.push(live);
    }
    // The guest can start something in a full one still, and that can start nothing.
    for live in full {
        let said = live.sh("echo here; echo $(echo nowhere)").await;
        assert!(said.starts_with("here") && !said.contains("nowhere"), "{said}");
        live.shut().await;
    }
}

#[tokio::test]
async fn every_kind_of_sandbox_is_limited() {
    const ME: &str = "every_kind_of_sandbox_is_limited";
    if has_python(ME).is_none() {
        return;
    }
    let namespace = |sandbox_user| -> Arc<dyn Runtime> {
        Arc::new(NamespaceRuntime::new(node(), NamespaceConfig { sandbox_user }))
    };
    let limits = limited(40).limits;
    let mut kinds = vec![(namespace(None), SandboxSpec { fakeroot: true, ..limited(40) })];
    if let Some(user) = user_with_range().filter(|_user| is_root()) {
        kinds.push((namespace(Some(user)), SandboxSpec { fakeroot: true, ..limited(40) }));
    }
    let ground = Ground::singularity(ME);
    if let Some(ground) = &ground {
        for fakeroot in [false, true] {
            kinds.push((Arc::clone(&ground.runtime), SandboxSpec { fakeroot, limits, ..with_python(ground.spec()) }));
        }
    }
    for (runtime, spec) in kinds {
        let live = Live::start_on(&*runtime, &spec).await;
        let n_started = live.fill().await;
        // A launcher may have processes of its own in the same user namespace.
        assert!((25..=40).contains(&n_started), "{n_started} {:?}", spec.image);
        live.shut().await;
    }
}

#[tokio::test]
async fn open_files_and_sizes_end_in_the_systems_words() {
    let limits = Limits { open_files: Some(64), file_bytes: Some(8192), ..Limits::NONE };
    let live = Live::start(&SandboxSpec { limits, ..spec() }).await;
    assert_eq!(live.sh("ulimit -n; ulimit -Hn; ulimit -f").await, "64\n64\n16");
    let (said, _) = live.bash("for i in $(seq 99); do exec {fd}</dev/null; done", LONG).await;
    assert!(said.contains("Too many open files"), "{said}");
    let (said, end) = live.bash("head -c 10000 /dev/zero > /tmp/x; echo $? $(stat -c %s /tmp/x)", LONG).await;
    assert!(said.ends_with("153 8192") && end == BashEnd::Exited(0), "{said} {end:?}");
    if live.sandbox.facts().hello.python.is_some() {
        let said = live.sh("python3 -c 'open(\"/tmp/y\", \"wb\", 0).write(bytes(8192)); open(\"/tmp/y\", \"ab\", 0).write(b\"x\")'").await;
        assert!(said.contains("File too large"), "{said}");
    }
    let refused = live.tools.write_file("/tmp/z", &[0; 8193], 0o644, LONG).await.unwrap_err();
    assert!(
        refused.to_string().contains("File too large") || format!("{refused:?}").contains("File too large"),
        "{refused:?}"
    );
    live.tools.write_file("/tmp/z", &[0; 8192], 0o644, LONG).await.unwrap();
    // A command may be longer than that.
    let (said, end) = live.bash(&format!("echo {} | wc -c", "x".repeat(20_000)), LONG).await;
    assert_eq!((said.as_str(), end), ("20001", BashEnd::Exited(0)));
    live.shut().await;
}

#[tokio::test]
async fn a_higher_limit_of_open_files_can_be_taken() {
    let limits = Limits { open_files: Some(5000), ..Limits::NONE };
    let live = Live::start(&SandboxSpec { limits, ..spec() }).await;
    assert_eq!(
        live.sh("ulimit -n; ulimit -n 5000; ulimit -n; ulimit -Hn 6000 2>/dev/null || echo no").await,
        "4096\n5000\nno"
    );
    live.shut().await;
}

#[tokio::test]
async fn nobody_inside_comes_before_others() {
    let live = Live::start(&spec()).await;
    let read = |pid: u32, name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap();
    for pid in [live.sandbox.facts().hello.host_pid, live.sandbox.facts().outer_pid] {
        let score: i32 = read(pid, "oom_score_adj").trim().parse().unwrap();
        assert!(score >= 500, "{score}");
    }
    assert_eq!(live.sh("bash -c 'cat /proc/self/oom_score_adj; ulimit -e; ulimit -r'").await, "500\n0\n0");
    assert_eq!(live.sh("(echo 0 > /proc/self/oom_score_adj) 2>/dev/null; cat /proc/self/oom_score_adj").await, "500");
    if live.sandbox.facts().hello.python.is_some() {
        let script = "import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
for policy in (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_FIFO):
    try: os.sched_setscheduler(0, policy, os.sched_param(int(policy == os.SCHED_FIFO))); print(\"back\")
    except PermissionError: print(\"no\")";
        assert_eq!(live.sh(&format!("python3 -c '{script}'")).await, "no\nno\nno");
    }
    live.shut().await;
}

/// What one sandbox may take of what its user has in all of them.
#[tokio::test]
async fn a_share_of_the_users_is_ones_own() {
    let live = Live::start(&spec()).await;
    let host = |name: &str| -> u64 {
        std::fs::read_to_string(format!("/proc/sys/fs/inotify/max_user_{name}")).unwrap().trim().parse().unwrap()
    };
    let inside = live.sh("cat /proc/sys/user/max_inotify_instances /proc/sys/user/max_inotify_watches").await;
    assert_eq!(inside, format!("{}\n{}", host("instances") / 4, host("watches") / 4));
    live.shut().await;
}

/// System V objects are in no file system and in no process while nobody uses them.
#[tokio::test]
async fn objects_without_a_place_are_bounded() {
    for fakeroot in [false, true] {
        let live = Live::start(&SandboxSpec { fakeroot, tmp_bytes: 1 << 20, ..spec() }).await;
        if live.sandbox.facts().hello.python.is_none() {
            return crate::support::skip("objects_without_a_place_are_bounded", "no python3 here");
        }
        let script = "import ctypes
libc = ctypes.CDLL(None)
print(libc.shmget(0, ctypes.c_size_t(4096), 0o1600) >= 0, libc.semget(0, 17, 0o1600) >= 0)
print(libc.shmget(0, ctypes.c_size_t(2 << 20), 0o1600) >= 0, libc.semget(0, 30000, 0o1600) >= 0)
print(sum(libc.msgget(0, 0o1600) >= 0 for _ in range(100)) <= 32)";
        assert_eq!(live.sh(&format!("python3 -c '{script}'")).await, "True True\nFalse False\nTrue");
        live.shut().await;
    }
}

#[tokio::test]
async fn a_program_that_is_too_greedy_is_told_by_its_signal() {
    let limits = Limits { file_bytes: Some(4096), ..Limits::NONE };
    let live = Live::start(&SandboxSpec { limits, ..spec() }).await;
    let spec = prorl_tools::host::ExecSpec::new(["head", "-c", "5000", "/dev/zero"]);
    assert!(live.tools.exec(&spec, LONG).await.unwrap().success(), "a pipe has no size");
    let spec = prorl_tools::host::ExecSpec::new(["dd", "if=/dev/zero", "of=/tmp/x", "bs=5000", "count=2"]);
    let done = live.tools.exec(&spec, LONG).await.unwrap();
    assert_eq!(done.status, ExitStatus::Signal(libc::SIGXFSZ), "{}", done.stderr.text());
    live.shut().await;
}

/// The kernel counts open files that are on their way for a user, whatever sandbox they are in, and a hello sends some.
#[tokio::test]
async fn files_on_their_way_keep_no_other_sandbox_from_starting() {
    if has_python("files_on_their_way_keep_no_other_sandbox_from_starting").is_none() {
        return;
    }
    let live = Live::start(&spec()).await;
    let script = "import array, os, resource, socket, time
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
pairs, n = [], 0
try:
    while n < 100_000:
        pairs.append(socket.socketpair())
        files = array.array('i', [0] * 250).tobytes()
        for _ in range(50):
            pairs[-1][0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)], socket.MSG_DONTWAIT)
            n += 250
except BlockingIOError: pass
except OSError as err: print(os.strerror(err.errno))
print('full' if n > 1000 else n, flush=True)
time.sleep(1000)";
    live.tools.write_file("/tmp/fill.py", script.as_bytes(), 0o600, LONG).await.unwrap();
    live.sh("setsid /usr/bin/python3 /tmp/fill.py > /tmp/said 2>&1 &").await;
    loop {
        let said = live.sh("cat /tmp/said").await;
        if said.contains("full") {
            break;
        }
        assert!(said.is_empty(), "{said}");
    }
    let other = Live::start(&spec()).await;
    assert_eq!(other.sh("echo stands").await, "stands");
    other.shut().await;
    live.shut().await;
}
