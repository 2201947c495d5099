//! The watchdog: what is more than a sandbox may have is ended and told, and nothing else is.

use std::time::Duration;

use prorl_sandbox::{DiskPlace, Exceeded, Limits, SandboxSpec};
use prorl_tools::host::ExecSpec;
use tokio::time::{Instant, sleep};

use crate::support::{LONG, Live, skip, spec};

pub(crate) const MIB: u64 = 1 << 20;

/// Python of the host, which is what takes memory here as fast as the kernel gives it.
pub(crate) const PYTHON: &str = "/usr/bin/python3";

pub(crate) fn limited(limits: Limits) -> SandboxSpec {
    SandboxSpec { limits, ..spec() }
}

pub(crate) fn with_memory(mib: u64) -> SandboxSpec {
    limited(Limits { memory_bytes: Some(mib * MIB), ..Limits::default() })
}

/// Tells whether there is a Python to test with.
pub(crate) fn has_python(test: &str) -> bool {
    let found = std::path::Path::new(PYTHON).exists();
    if !found {
        skip(test, "no /usr/bin/python3 here");
    }
    found
}

impl Live {
    /// Runs a Python script inside, and returns what it wrote, and how it ended.
    pub(crate) async fn run_python(&self, script: &str) -> String {
        let done = self.tools.exec(&ExecSpec::new([PYTHON, "-u", "-c", script]), LONG).await.unwrap();
        assert!(!done.timed_out, "{script}");
        format!("{}{}", done.stdout.text(), done.stderr.text())
    }

    /// Returns what was told, but for processors: how many there are for what a test starts is the machine's.
    pub(crate) fn told_so_far(&self) -> Vec<Exceeded> {
        let mut told = self.sandbox.take_exceeded();
        told.retain(|one| !matches!(one, Exceeded::Cpus { .. }));
        told
    }

    /// Waits for something to be told.
    pub(crate) async fn told(&self) -> Vec<Exceeded> {
        let begun = Instant::now();
        loop {
            let told = self.sandbox.take_exceeded();
            if !told.is_empty() {
                return told;
            }
            assert!(begun.elapsed() < LONG, "nothing is told");
            sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Starts children that take memory and returns what the greatest of them had, in KiB.
pub(crate) const PEAK: &str = "
import subprocess, resource, sys
def run(*scripts):
    children = [subprocess.Popen([sys.executable, '-c', script]) for script in scripts]
    codes = [child.wait() for child in children]
    return codes, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
";

/// Returns the numbers in a text.
pub(crate) fn numbers(text: &str) -> Vec<i64> {
    text.split(|c: char| !c.is_ascii_digit() && c != '-').filter_map(|word| word.parse().ok()).collect()
}

#[tokio::test]
async fn what_takes_memory_at_full_speed_is_killed_before_it_has_half_as_much_again() {
    if !has_python("watch::what_takes_memory_at_full_speed_is_killed_before_it_has_half_as_much_again") {
        return;
    }
    for limit in [64, 256, 1024] {
        let live = Live::start(&with_memory(limit)).await;
        let text = live.run_python(&format!("{PEAK}\nprint(run('b = bytearray(8 << 30)'))")).await;
        let [code, peak_kib] = numbers(&text)[..] else { panic!("{text}") };
        assert_eq!(code, -9, "{text}");
        let ratio = peak_kib as f64 / (limit as f64 * 1024.0);
        println!("limit {limit} MiB: peak {ratio:.3} of it");
        assert!(ratio < 1.5, "limit {limit} MiB: {ratio}");
        let told = live.told_so_far();
        let [Exceeded::Memory { limit_bytes, name, .. }] = &told[..] else { panic!("{told:?}") };
        assert_eq!((*limit_bytes, name.as_str()), (limit * MIB, "python3"));
        assert!(live.told_so_far().is_empty());
        live.shut().await;
    }
}

#[tokio::test]
async fn the_greediest_goes_and_the_others_stay() {
    if !has_python("watch::the_greediest_goes_and_the_others_stay") {
        return;
    }
    let live = Live::start(&with_memory(256)).await;
    // Each is below the limit; together they are not.
    let script = "
import os, signal, time
children = []
for mib in (40, 150, 60, 50):
    pid = os.fork()
    if pid == 0:
        block = bytearray(mib << 20)
        time.sleep(1000)
    children.append((mib, pid))
dead, status = os.wait()
print([mib for mib, pid in children if pid == dead], os.WTERMSIG(status))
time.sleep(0.3)
print([mib for mib, pid in children if pid != dead and os.waitpid(pid, os.WNOHANG) == (0, 0)])
[os.kill(pid, signal.SIGKILL) for mib, pid in children if pid != dead]
";
    assert_eq!(live.run_python(script).await, "[150] 9\n[40, 60, 50]\n");
    let told = live.told_so_far();
    assert!(matches!(told[..], [Exceeded::Memory { .. }]), "{told:?}");
    live.shut().await;
}

#[tokio::test]
async fn four_at_once_are_all_stopped_and_the_shell_stays() {
    if !has_python("watch::four_at_once_are_all_stopped_and_the_shell_stays") {
        return;
    }
    let live = Live::start(&with_memory(256)).await;
    let bystander = live.sh("sleep 1000 >/dev/null 2>&1 & echo $!").await;
    let text = live.run_python(&format!("{PEAK}\nprint(run(*['b = bytearray(8 << 30)'] * 4))")).await;
    let numbers = numbers(&text);
    assert_eq!(numbers[..4], [-9; 4], "{text}");
    let told = live.told_so_far();
    assert!(told.len() == 4 && told.iter().all(|one| matches!(one, Exceeded::Memory { .. })), "{told:?}");
    assert_eq!(live.sh(&format!("kill -0 {bystander} && echo there")).await, "there");
    live.shut().await;
}

#[tokio::test]
async fn memory_that_many_share_counts_once() {
    if !has_python("watch::memory_that_many_share_counts_once") {
        return;
    }
    let live = Live::start(&with_memory(128)).await;
    let script = "
import os, time
block = bytearray(40 << 20)
children = []
for nth in range(8):
    pid = os.fork()
    if pid == 0:
        time.sleep(1)
        os._exit(0)
    children.append(pid)
print(sum(os.waitpid(pid, 0)[1] for pid in children))
";
    assert_eq!(live.run_python(script).await, "0\n");
    assert_eq!(live.told_so_far(), []);
    // Until each writes to what it shares.
    let script = script.replace("time.sleep(1)", "time.sleep(0.05 * nth); block[:] = bytes(len(block)); time.sleep(2)");
    assert_ne!(live.run_python(&script).await, "0\n");
    let told = live.told_so_far();
    assert!(!told.is_empty() && told.iter().all(|one| matches!(one, Exceeded::Memory { .. })), "{told:?}");
    live.shut().await;
}

#[tokio::test]
async fn children_by_vfork_are_not_counted_twice() {
    if !has_python("watch::children_by_vfork_are_not_counted_twice") {
        return;
    }
    let live = Live::start(&with_memory(256)).await;
    let script = "
import os, threading, time
block = bytearray(170 << 20)
end = time.time() + 2
n = 0
def storm():
    global n
    while time.time() < end:
        pid = os.posix_spawn('/bin/true', ['true'], {})
        os.waitpid(pid, 0)
        n += 1
threads = [threading.Thread(target=storm) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('done', n > 10)
";
    assert_eq!(live.run_python(script).await, "done True\n");
    assert_eq!(live.told_so_far(), []);
    live.shut().await;
}

#[tokio::test]
async fn nobody_hides_memory() {
    if !has_python("watch::nobody_hides_memory") {
        return;
    }
    let live = Live::start(&with_memory(128)).await;
    let header = "
import ctypes, mmap, os, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def fill(memory):
    for at in range(0, len(memory), 4096): memory[at] = 1
";
    let ways = [
        ("undumpable", "libc.prctl(4, 0, 0, 0, 0)\nfill(bytearray(2 << 30))"),
        ("shared", "fill(mmap.mmap(-1, 2 << 30))"),
        (
            "in a thread whose leader has ended",
            "
def late():
    time.sleep(0.2)
    fill(mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    time.sleep(5)
threading.Thread(target=late).start()
libc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)",
        ),
        (
            "tables of pages",
            "
memory = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
for at in range(0, 1 << 40, 2 << 20): memory[at]
time.sleep(5)",
        ),
        (
            "under a name",
            r"
libc.prctl(15, b'a\n\x1b[31mb c)', 0, 0, 0)
fill(bytearray(2 << 30))",
        ),
    ];
    for (way, script) in ways {
        let text = live.run_python(&format!("{PEAK}\nprint(run({:?}))", format!("{header}{script}"))).await;
        assert!(text.starts_with("([-9]"), "{way}: {text}");
        let told = live.told().await;
        let [Exceeded::Memory { name, .. }] = &told[..] else { panic!("{way}: {told:?}") };
        let expected = if way == "under a name" { r"a\n?[31mb?c)" } else { "python3" };
        assert_eq!(name, expected, "{way}");
    }
    live.shut().await;
}

#[tokio::test]
async fn time_is_over_for_all_and_for_what_comes_later() {
    let live = Live::start(&limited(Limits { wall: Some(Duration::from_secs(1)), ..Limits::default() })).await;
    let begun = Instant::now();
    let done = live.tools.exec(&ExecSpec::new(["sleep", "1000"]), LONG).await.unwrap();
    assert!(!done.timed_out && begun.elapsed() < Duration::from_secs(5));
    assert_eq!(live.told_so_far(), [Exceeded::Wall { limit: Duration::from_secs(1) }]);
    let again = Instant::now();
    let done = live.tools.exec(&ExecSpec::new(["sleep", "1000"]), LONG).await.unwrap();
    assert!(!done.timed_out && again.elapsed() < Duration::from_secs(2));
    assert!(live.told_so_far().is_empty());
    live.shut().await;
}

#[tokio::test]
async fn what_keeps_forking_ends_with_the_time_too() {
    let live = Live::start(&limited(Limits { wall: Some(Duration::from_secs(1)), ..Limits::default() })).await;
    let bomb = "ulimit -u 200; f() { f | f & }; f 2>/dev/null; sleep 1000";
    let done = live.tools.exec(&ExecSpec::new(["bash", "-c", bomb]), LONG).await.unwrap();
    assert!(!done.timed_out);
    let begun = Instant::now();
    while crate::support::in_namespace(live.sandbox.facts().hello.pid_namespace).len() > 1 {
        assert!(begun.elapsed() < LONG, "it goes on");
        sleep(Duration::from_millis(20)).await;
    }
    live.shut().await;
}

#[tokio::test]
async fn a_full_disk_is_told_at_once_and_once() {
    let live = Live::start(&SandboxSpec { layer_bytes: 4 * MIB, tmp_bytes: 2 * MIB, ..spec() }).await;
    assert!(live.told_so_far().is_empty());
    live.sh("head -c 8000000 /dev/zero > /tmp/full").await;
    let full = |place, limit_bytes| Exceeded::Disk { place, limit_bytes };
    assert_eq!(live.sandbox.take_exceeded(), [full(DiskPlace::Tmp, 2 * MIB)]);
    live.sh("head -c 8000000 /dev/zero > /workspace/full").await;
    assert_eq!(live.sandbox.take_exceeded(), [full(DiskPlace::Layer, 4 * MIB)]);
    live.sh("head -c 8000000 /dev/zero > /workspace/full").await;
    assert!(live.told_so_far().is_empty());
    live.shut().await;
}

#[tokio::test]
async fn many_that_want_to_run_give_way_and_are_told_once() {
    let live = Live::start(&limited(Limits { cpus: Some(1.0), ..Limits::default() })).await;
    let spinners = "for i in 1 2 3 4 5 6; do (while :; do :; done) & done >/dev/null 2>&1; echo $$; sleep 1000";
    let spec = ExecSpec::new(["sh", "-c", spinners]);
    let hog = live.tools.exec(&spec, Duration::from_secs(4));
    let watch = async {
        let told = live.told().await;
        let [Exceeded::Cpus { limit, threads }] = told[..] else { panic!("{told:?}") };
        assert!((limit - 1.0).abs() < f64::EPSILON && threads > 1, "{told:?}");
        let inside = crate::support::in_namespace(live.sandbox.facts().hello.pid_namespace);
        // They are told before they are slowed.
        let begun = Instant::now();
        while inside.iter().filter(|pid| Scheduled::of(**pid).is_idle()).count() < 6 {
            assert!(begun.elapsed() < LONG);
            sleep(Duration::from_millis(10)).await;
        }
        let guest = live.sandbox.facts().hello.host_pid;
        assert!(!Scheduled::of(guest).is_idle(), "process 1 is as ever");
    };
    let ((), done) = tokio::join!(watch, hog);
    assert!(done.unwrap().timed_out);
    assert!(live.told_so_far().is_empty());
    live.shut().await;
}

/// How a process is scheduled.
#[derive(Debug)]
struct Scheduled {
    /// Its first thread's policy, as `sched.h` numbers them.
    policy: Option<String>,
    /// What its session's weight is as a nice value, where sessions have weights.
    nice: Option<String>,
}

impl Scheduled {
    fn of(pid: u32) -> Self {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let policy = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(38)).map(str::to_owned);
        let session = std::fs::read_to_string(format!("/proc/{pid}/autogroup")).ok();
        let nice = session.and_then(|session| Some(session.trim().rsplit_once(' ')?.1.to_owned()));
        Self { policy, nice }
    }

    fn is_idle(&self) -> bool {
        self.policy.as_deref() == Some("5")
    }

    fn is_usual(&self) -> bool {
        self.policy.as_deref() == Some("0") && self.is_light() != Some(true)
    }

    fn is_light(&self) -> Option<bool> {
        self.nice.as_deref().map(|nice| nice != "0")
    }
}

#[tokio::test]
async fn when_it_is_over_all_is_as_before() {
    let live = Live::start(&limited(Limits { cpus: Some(1.0), ..Limits::default() })).await;
    let script = "sleep 1000 & for i in 1 2 3 4; do (while :; do :; done) & done; sleep 1001";
    let spec = ExecSpec::new(["bash", "-c", script]);
    let hog = live.tools.exec(&spec, 3 * LONG);
    let watch = async {
        live.told().await;
        let inside = || {
            let mut pids = crate::support::in_namespace(live.sandbox.facts().hello.pid_namespace);
            pids.retain(|pid| *pid != live.sandbox.facts().hello.host_pid);
            pids.into_iter().map(Scheduled::of).collect::<Vec<_>>()
        };
        let until = async |what: &str, is_so: &dyn Fn(&[Scheduled]) -> bool| {
            let begun = Instant::now();
            while !is_so(&inside()) {
                assert!(begun.elapsed() < LONG, "{what}: {:?}", inside());
                sleep(Duration::from_millis(20)).await;
            }
        };
        let is_slow = |one: &&Scheduled| one.is_idle() && one.is_light() != Some(false);
        until("slowed", &|all| all.iter().filter(is_slow).count() >= 4).await;
        let spins = |pid: &u32| {
            let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
            let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            children.is_empty() && command.starts_with("bash")
        };
        let mut pids = crate::support::in_namespace(live.sandbox.facts().hello.pid_namespace);
        pids.retain(spins);
        assert_eq!(pids.len(), 4);
        for spinner in pids.into_iter().filter_map(crate::support::Handle::open) {
            spinner.signal(rustix::process::Signal::KILL);
        }
        // What was idle by itself is there, and what the shell has become; they are as before.
        until("restored", &|all| all.len() == 2 && all.iter().all(Scheduled::is_usual)).await;
    };
    tokio::select! {
        () = watch => {}
        done = hog => panic!("{done:?}"),
    }
    live.shut().await;
}

#[tokio::test]
async fn a_fake_root_has_no_more_processes_for_having_many_users() {
    let test = "watch::a_fake_root_has_no_more_processes_for_having_many_users";
    let sandbox_user = if crate::support::is_root() { crate::fakeroot::user_with_range() } else { None };
    let config = prorl_sandbox::NamespaceConfig { sandbox_user };
    let runtime = prorl_sandbox::NamespaceRuntime::new(crate::support::node(), config);
    let limits = Limits { pids: Some(40), ..Limits::default() };
    let live = Live::start_on(&runtime, &SandboxSpec { fakeroot: true, ..limited(limits) }).await;
    if live.sandbox.facts().hello.fakeroot != Some(prorl_core::hello::FakeRoot::Range) || !has_python(test) {
        skip(test, "no range of user ids here");
        return live.shut().await;
    }
    let script = "
import os, time
for uid in range(1, 6):
    for _ in range(20):
        if os.fork() == 0:
            os.setuid(uid)
            time.sleep(1000)
time.sleep(1000)
";
    let hog = ExecSpec::new([PYTHON, "-c", script]);
    let hog = live.tools.exec(&hog, Duration::from_secs(3));
    let watch = async {
        let told = live.told().await;
        let [Exceeded::Pids { limit: 40, killed: 1.. }] = told[..] else { panic!("{told:?}") };
    };
    let (_, ()) = tokio::join!(hog, watch);
    assert_eq!(live.sh("echo here").await, "here");
    let left = crate::support::in_namespace(live.sandbox.facts().hello.pid_namespace).len();
    assert!(left <= 41, "{left}");
    live.shut().await;
}

/// Each waits as for a child by `vfork`, which it did not share its memory with, and looks like the one before.
#[tokio::test]
async fn processes_that_look_as_started_by_vfork_count_all_the_same() {
    if !has_python("watch::processes_that_look_as_started_by_vfork_count_all_the_same") {
        return;
    }
    let live = Live::start(&with_memory(64)).await;
    let script = "import ctypes, os, platform, threading, time
libc = ctypes.CDLL(None)
number = {'x86_64': 56, 'aarch64': 220}[platform.machine()]
def wait():
    if libc.syscall(number, 0x4000 | 17, 0, 0, 0, 0) == 0: time.sleep(1000)
def chain(depth):
    block = bytearray(os.urandom(1) * (30 << 20))
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.05)
    if depth and os.fork() == 0:
        block[:] = os.urandom(1) * len(block)
        chain(depth - 1)
    time.sleep(1000)
chain(8)";
    live.tools.write_file("/tmp/chain.py", script.as_bytes(), 0o600, LONG).await.unwrap();
    live.sh(&format!("setsid {PYTHON} /tmp/chain.py > /dev/null 2>&1 &")).await;
    let told = live.told().await;
    assert!(told.iter().any(|one| matches!(one, Exceeded::Memory { .. })), "{told:?}");
    live.shut().await;
}

#[tokio::test]
async fn a_limit_of_processes_that_is_reached_is_told() {
    let live = Live::start(&limited(Limits { pids: Some(20), ..Limits::default() })).await;
    assert!(live.told_so_far().is_empty());
    // bash waits and tries again when it is refused.
    live.sh("bash -c 'for i in $(seq 30); do sleep 2 & done 2>/dev/null; wait'").await;
    assert_eq!(live.sandbox.take_exceeded(), [Exceeded::Pids { limit: 20, killed: 0 }]);
    live.shut().await;
}

/// Programs that end as soon as they are refused a process or a thread, and leave fewer than there were.
#[tokio::test]
async fn a_limit_of_processes_is_told_when_whoever_was_refused_has_ended() {
    let script = |body: &str| format!("{PYTHON} -c '{body}' 2>&1; true");
    let refused = [
        "sh -c 'for i in $(seq 60); do sleep 1000 & done' 2>&1; kill -9 -1; true".to_owned(),
        script(
            "import threading, time\nfor _ in range(60): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        ),
        script(
            "import subprocess\nall = []\ntry:\n  for _ in range(60): all.append(subprocess.Popen([\"sleep\", \"1000\"]))\nfinally:\n  for one in all: one.kill(), one.wait()",
        ),
    ];
    for command in refused {
        let live = Live::start(&limited(Limits { pids: Some(40), ..Limits::default() })).await;
        let said = live.sh(&command).await;
        let told = live.sandbox.take_exceeded_after(&said);
        assert_eq!(told, [Exceeded::Pids { limit: 40, killed: 0 }], "{command}: {said}");
        assert_eq!(live.sandbox.take_exceeded_after(&said), [], "{command}: it is told once");
        live.shut().await;
    }
}

#[tokio::test]
async fn what_is_within_its_limits_is_let_alone() {
    let live = Live::start(&with_memory(256)).await;
    assert_eq!(live.sh("for i in $(seq 50); do /bin/true; done; echo done").await, "done");
    live.sh("head -c 100000000 /dev/zero > /tmp/large; sleep 1; cat /tmp/large | wc -c").await;
    assert!(live.told_so_far().is_empty());
    live.shut().await;
}

/// What the watchdog costs while nothing happens: twenty sandboxes, each with a shell and a Python that wait.
#[tokio::test]
#[ignore = "a measurement: cargo test -- --ignored --nocapture watch::cost"]
async fn cost_of_sandboxes_that_are_idle() {
    for memory_bytes in [4 << 30, 512 * MIB, 64 * MIB] {
        let node = crate::support::fresh_node();
        let runtime = prorl_sandbox::NamespaceRuntime::new(node.clone(), prorl_sandbox::NamespaceConfig::default());
        let mut all = Vec::new();
        for _ in 0..20 {
            let live =
                Live::start_on(&runtime, &limited(Limits { memory_bytes: Some(memory_bytes), ..Limits::default() }))
                    .await;
            live.sh("setsid bash -c 'read x < <(sleep 1000)' >/dev/null 2>&1 &").await;
            live.sh(&format!("setsid {PYTHON} -c 'import time; time.sleep(1000)' >/dev/null 2>&1 &")).await;
            all.push(live);
        }
        sleep(Duration::from_secs(2)).await;
        let (before, begun) = (node.watch_cpu_time(), Instant::now());
        sleep(Duration::from_secs(10)).await;
        let share = node.watch_cpu_time().saturating_sub(before).as_secs_f64() / begun.elapsed().as_secs_f64();
        println!("limit {} MiB: {:.3} % of a core", memory_bytes / MIB, share * 100.0);
        for live in all {
            live.shut().await;
        }
    }
}

#[tokio::test]
async fn the_thread_is_there_as_long_as_its_node_and_sleeps_while_nothing_is_watched() {
    let threads = |name: &str| {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|comm| comm.trim() == name).count()
    };
    let test = "watch::the_thread_is_there_as_long_as_its_node_and_sleeps_while_nothing_is_watched";
    if !crate::support::is_alone(test) {
        let output = crate::support::alone(test, &[]).output().unwrap();
        return crate::support::assert_passed(&output);
    }
    let node = crate::support::fresh_node();
    assert_eq!(threads("prorl-watch"), 0);
    let runtime = prorl_sandbox::NamespaceRuntime::new(node.clone(), prorl_sandbox::NamespaceConfig::default());
    let (one, two) = (Live::start_on(&runtime, &spec()).await, Live::start_on(&runtime, &spec()).await);
    assert_eq!(threads("prorl-watch"), 1);
    let (before, begun) = (node.watch_cpu_time(), Instant::now());
    while node.watch_cpu_time() == before {
        assert!(begun.elapsed() < LONG, "nothing is looked at");
        sleep(Duration::from_millis(10)).await;
    }
    drop(one);
    two.shut().await;
    let begun = Instant::now();
    loop {
        let before = node.watch_cpu_time();
        sleep(Duration::from_millis(500)).await;
        if node.watch_cpu_time() == before {
            break;
        }
        assert!(begun.elapsed() < LONG, "something is looked at");
    }
    drop((runtime, node));
    assert_eq!(threads("prorl-watch"), 0);
}
