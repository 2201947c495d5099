//! The watchdog of memory, where somebody hides it or keeps the watchdog busy.

use std::time::Duration;

use prorl_sandbox::{Exceeded, NamespaceConfig, NamespaceRuntime};
use prorl_tools::host::ExecSpec;
use tokio::time::{Instant, sleep};

use crate::{
    support::{LONG, Live},
    watch::{PEAK, PYTHON, has_python, numbers, with_memory},
};

/// What scripts begin with. `told` writes how many MiB there are so far.
const HEADER: &str = "
import ctypes, mmap, os, select, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
SHARED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
MIB = 1 << 20
def mapped(size, fd=-1, flags=SHARED):
    at = libc.mmap(None, ctypes.c_size_t(size), 3, flags, fd, ctypes.c_long(0))
    assert at not in (None, 2 ** 64 - 1), ctypes.get_errno()
    return at
def fill(at, size): ctypes.memset(ctypes.c_void_p(at), 1, ctypes.c_size_t(size))
def call(function, *numbers): return function(*[ctypes.c_size_t(number) for number in numbers])
n_told = 0
def told(mib):
    global n_told
    n_told += mib
    os.write(1, b'%d ' % int(n_told))
";

/// Ways to have shared memory that no process has mapped. Each takes a GiB if it is let.
const HIDING: [(&str, &str); 7] = [
    (
        "given up",
        "
at = mapped(1024 * MIB)
for mib in range(1024):
    fill(at + mib * MIB, MIB)
    call(libc.madvise, at + mib * MIB, MIB, 4)
    told(1)",
    ),
    (
        "unmapped but for a page",
        "
for _ in range(64):
    at = mapped(16 * MIB)
    fill(at, 16 * MIB)
    call(libc.munmap, at + 4096, 16 * MIB - 4096)
    told(16)",
    ),
    (
        "in very many pieces",
        "
for _ in range(8192):
    at = mapped(MIB // 8)
    fill(at, MIB // 8)
    call(libc.munmap, at + 4096, MIB // 8 - 4096)
    told(1 / 8)",
    ),
    (
        "of a device",
        "
at = mapped(1024 * MIB, os.open('/dev/zero', os.O_RDWR), mmap.MAP_SHARED)
for mib in range(1024):
    fill(at + mib * MIB, MIB)
    call(libc.madvise, at + mib * MIB, MIB, 4)
    told(1)",
    ),
    (
        "under a name",
        "
at = mapped(1024 * MIB)
call(libc.prctl, 0x53564d41, 0, at, 1024 * MIB, ctypes.addressof(ctypes.create_string_buffer(b'mine')))
for mib in range(1024):
    fill(at + mib * MIB, MIB)
    call(libc.madvise, at + mib * MIB, MIB, 4)
    told(1)",
    ),
    (
        "filled by others that take their count along",
        "
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
at = mapped(1024 * MIB)
for mib in range(0, 1024, 4):
    if os.fork() == 0:
        fill(at + mib * MIB, 4 * MIB)
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
    told(4)",
    ),
    (
        "held by those that sleep",
        "
at = mapped(1024 * MIB)
for _ in range(4):
    if os.fork() == 0: time.sleep(1000)
for mib in range(1024):
    fill(at + mib * MIB, MIB)
    call(libc.madvise, at + mib * MIB, MIB, 4)
    told(1)
time.sleep(5)",
    ),
];

impl Live {
    /// Runs a script that tells how much it takes, and returns that.
    async fn mib_taken(&self, script: &str) -> i64 {
        let done = self.tools.exec(&ExecSpec::new([PYTHON, "-c", &format!("{HEADER}{script}")]), LONG).await.unwrap();
        let (out, err) = (done.stdout.text(), done.stderr.text());
        assert!(!done.timed_out && !err.contains("Error"), "{script}: {err}");
        numbers(&out).last().copied().unwrap_or(0)
    }
}

#[tokio::test]
async fn memory_that_nobody_maps_counts() {
    if !has_python("watch_memory::memory_that_nobody_maps_counts") {
        return;
    }
    let limit = 64;
    let live = Live::start(&with_memory(limit)).await;
    for (way, script) in HIDING {
        let taken = live.mib_taken(script).await;
        println!("{way}: {:.2} of the limit", taken as f64 / limit as f64);
        let told = live.told_so_far();
        assert!(!told.is_empty() && told.iter().all(|one| matches!(one, Exceeded::Memory { .. })), "{way}: {told:?}");
        assert!(taken < 4 * 64, "{way}: {taken} MiB");
    }
    assert_eq!(live.sh("echo here").await, "here");
    live.shut().await;
}

/// Shared memory as servers have it: large and hardly filled, filled and used by many, and in many small pieces.
#[tokio::test]
async fn shared_memory_within_the_limit_is_let_alone_beside_one_that_hides_it() {
    let test = "watch_memory::shared_memory_within_the_limit_is_let_alone_beside_one_that_hides_it";
    if !has_python(test) {
        return;
    }
    let script = format!(
        "{HEADER}
sparse, full = mapped(40 * MIB), mapped(80 * MIB)
for at in range(0, 40 * MIB, MIB): fill(sparse + at, 4096)
fill(full, 80 * MIB)
for _ in range(100): fill(mapped(4096), 4096)
for _ in range(4):
    if os.fork() == 0:
        fill(full, 80 * MIB)
        sys.stdin.read()
        os._exit(0)
os.write(1, b'ready')
while not os.path.exists('/tmp/over'):
    block = bytearray(MIB)
    time.sleep(0.001)
for _ in range(4): os.wait()
print(' done')"
    );
    let runtime = NamespaceRuntime::new(crate::support::fresh_node(), NamespaceConfig::default());
    let honest = Live::start_on(&runtime, &with_memory(160)).await;
    let attacker = Live::start_on(&runtime, &with_memory(64)).await;
    let spec = ExecSpec::new([PYTHON, "-c", &script]);
    let server = honest.tools.exec(&spec, LONG);
    let attack = async {
        for (_, script) in HIDING {
            attacker.mib_taken(script).await;
        }
        honest.sh("touch /tmp/over").await;
    };
    let (done, ()) = tokio::join!(server, attack);
    let done = done.unwrap();
    assert_eq!(done.stdout.text(), "ready done\n", "{} {:?}", done.stderr.text(), honest.told_so_far());
    assert_eq!(honest.told_so_far(), []);
    assert!(!attacker.told_so_far().is_empty());
    honest.shut().await;
    attacker.shut().await;
}

/// A crowd that shares pages, each of which takes long to divide.
const CROWD: &str = "
at = mapped(150 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
fill(at, 150 * MIB)
for _ in range(60):
    if os.fork() == 0:
        os.setsid()
        for fd in range(3): os.close(fd)
        time.sleep(1000)
os.write(1, b'0 ')
open('/tmp/ready', 'w').close()
";

#[tokio::test]
async fn a_crowd_that_shares_memory_hides_nobody_who_takes_it() {
    if !has_python("watch_memory::a_crowd_that_shares_memory_hides_nobody_who_takes_it") {
        return;
    }
    let runtime = NamespaceRuntime::new(crate::support::fresh_node(), NamespaceConfig::default());
    let live = Live::start_on(&runtime, &with_memory(256)).await;
    // Those that take it have less than the limit each, and are among the crowd.
    let takers = "
while not os.path.exists('/tmp/others'): time.sleep(0.01)
read, write = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        at = mapped(240 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for mib in range(240):
            fill(at + mib * MIB, MIB)
            os.write(write, b'.')
        time.sleep(1000)
os.close(write)
n = 150
# Until all are ended that take more, or those that are left have enough.
while select.select([read], [], [], 1)[0] and (some := os.read(read, 65536)):
    n += len(some)
    os.write(1, b'%d ' % n)
";
    let script = format!("{CROWD}{takers}");
    let crowd = live.mib_taken(&script);
    let other = Live::start_on(&runtime, &with_memory(64)).await;
    let greedy = async {
        while live.sh("test -e /tmp/ready && echo ready").await != "ready" {
            sleep(Duration::from_millis(10)).await;
        }
        let mut ratios = Vec::new();
        for _ in 0..5 {
            let text = other.run_python(&format!("{PEAK}\nprint(run('b = bytearray(8 << 30)'))")).await;
            let [-9, peak_kib] = numbers(&text)[..] else { panic!("{text}") };
            ratios.push(peak_kib as f64 / (64.0 * 1024.0));
            live.sh("touch /tmp/others").await;
        }
        ratios
    };
    let begun = Instant::now();
    let (taken, ratios) = tokio::join!(crowd, greedy);
    println!(
        "beside a crowd: {:.2} of the limit after {:?}; in another sandbox: {ratios:.2?}",
        taken as f64 / 256.0,
        begun.elapsed()
    );
    assert!(ratios.iter().all(|ratio| *ratio < 3.0), "{ratios:?}");
    assert!(taken < 3 * 256, "{taken} MiB");
    assert!(!live.told_so_far().is_empty());
    assert!(begun.elapsed() < LONG + Duration::from_secs(10));
    other.shut().await;
    live.shut().await;
}
