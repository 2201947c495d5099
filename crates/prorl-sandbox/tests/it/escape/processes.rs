//! Processes outside, process 1, and those of other sandboxes.

use std::{
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
};

use super::{Den, Proof, attack, outside};
use crate::{
    contract::KilledOnDrop,
    support::{Live, is_root, sandbox_uid},
};

/// What would leave the guest unable to answer, by which a model could have a rollout thrown away that it is losing.
pub(super) async fn the_guest_is_not_crippled(den: &Den) {
    let code = "
import resource
def refused(what, act):
    try: act()
    except PermissionError: return
    print('DONE', what)
for pid in [1] + [int(tid) for tid in os.listdir('/proc/1/task')]:
    for limit in range(16):
        refused(limit, lambda: resource.prlimit(pid, limit, (0, 0)))
    refused('nice', lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
    refused('idle', lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
refused('processors', lambda: os.sched_setaffinity(1, os.sched_getaffinity(0)))
print('tried')
";
    for (runtime, spec) in &den.cells {
        let live = Live::start_on(&**runtime, spec).await;
        assert_eq!(live.python(code).await, "tried", "{}", den.name);
        assert_eq!(live.sh("echo alive").await, "alive");
        live.shut().await;
    }
}

/// A process of the sandboxes' own user with a secret in its environment.
fn bystander() -> KilledOnDrop {
    let mut command = Command::new("sleep");
    command.arg("1000").env("PRORL_CANARY", "secret").stdout(Stdio::null());
    if is_root() {
        command.uid(sandbox_uid()).gid(sandbox_uid());
    }
    KilledOnDrop(command.spawn().unwrap())
}

pub(super) async fn others_are_neither_seen_nor_signalled(den: &Den) {
    let mut bystander = bystander();
    let pid = bystander.0.id();
    let environments = "
def environments():
    found = 0
    for pid in os.listdir('/proc'):
        try: found += b'PRORL_CANARY=secret' in open('/proc/%s/environ' % pid, 'rb').read()
        except OSError: pass
    return 'found' if found else 'nothing'
";
    let attacks = [
        attack("signal", format!("os.kill({pid}, 0)"), &["ESRCH"], Proof::Anybody),
        attack("signal_group", format!("os.killpg(os.getpgid({pid}), 0)"), &["ESRCH"], Proof::Anybody),
        attack("handle", format!("os.pidfd_open({pid})"), &["ESRCH"], Proof::Anybody),
        attack("priority", format!("os.setpriority(os.PRIO_PROCESS, {pid}, 19)"), &["EPERM"], Proof::Anybody),
        attack(
            "schedule",
            format!("os.sched_setaffinity({pid}, os.sched_getaffinity({pid}))"),
            &["ESRCH"],
            Proof::Anybody,
        ),
        attack("look", format!("read('/proc/{pid}/status')"), &["ENOENT"], Proof::Anybody),
        attack(
            "own_by_signal",
            format!("(lambda end: (__import__('fcntl').fcntl(end, 8, {pid}), 'owned')[1])(os.pipe()[0])"),
            &["ESRCH"],
            Proof::Anybody,
        ),
        attack("environments", "environments()", &["nothing"], Proof::Anybody),
    ];
    let code: String = format!("{environments}{}", super::all(&attacks));
    for (runtime, spec) in &den.cells {
        let live = Live::start_on(&**runtime, spec).await;
        let said = live.python(&code).await;
        for attack in &attacks {
            let came = super::came_of(attack, &said);
            assert!(attack.refusals.contains(&came), "{}: {}: {came}", den.name, attack.code);
        }
        // Everybody that it can see, and a try to end process 1.
        live.sh("trap '' TERM; kill -TERM -1; kill -KILL 1; setsid sh -c 'kill -KILL -1'").await;
        assert_eq!(live.sh("echo alive").await, "alive");
        assert!(bystander.0.try_wait().unwrap().is_none());
        live.shut().await;
    }
    let said = outside(&code);
    for attack in &attacks {
        assert!(!attack.refusals.contains(&super::came_of(attack, &said)), "outside: {}: {said}", attack.code);
    }
}

pub(super) async fn nothing_is_read_from_the_memory_of_others(den: &Den) {
    let ptrace = libc::SYS_ptrace;
    // Seized, which stops nobody.
    let trace = |pid: &str| format!("call({ptrace}, 0x4206, {pid}, 0, 0)");
    let closed: &[&str] = &["EPERM", "EACCES"];
    let attacks = [
        attack("trace", trace("1"), closed, Proof::Nobody),
        attack("attach", format!("call({ptrace}, 16, 1, 0, 0)"), closed, Proof::Nobody),
        attack("copy", "copy(1)", closed, Proof::Nobody),
        attack("memory", "open('/proc/1/mem', 'rb')", closed, Proof::Nobody),
        attack("maps", "read('/proc/1/maps') or 'nothing'", closed, Proof::Nobody),
        attack("environment", "read('/proc/1/environ') or 'nothing'", closed, Proof::Nobody),
        attack("program", "os.readlink('/proc/1/exe')", closed, Proof::Nobody),
        attack("root", "os.listdir('/proc/1/root')", closed, Proof::Nobody),
        attack("syscall", "read('/proc/1/syscall')", closed, Proof::Nobody),
        attack("stack", "read('/proc/1/stack') or 'nothing'", &["EPERM", "EACCES", "ENOENT"], Proof::Nobody),
    ];
    // The same on a child of one's own works, inside and outside.
    let own = format!(
        "child = os.fork()
if child == 0: signal.pause()
attempt('trace', lambda: {})
attempt('copy', lambda: copy(child))
attempt('memory', lambda: open('/proc/%d/mem' % child, 'rb').close())
attempt('program', lambda: os.readlink('/proc/%d/exe' % child) and None)
os.kill(child, 9)
os.waitpid(child, 0)",
        trace("child")
    );
    let works = "trace done\ncopy done\nmemory done\nprogram done";
    for (runtime, spec) in &den.cells {
        let live = Live::start_on(&**runtime, spec).await;
        den.holds(&live, &attacks).await;
        assert_eq!(live.python(&own).await, works, "{}", den.name);
        live.shut().await;
    }
    assert_eq!(outside(&own), works);
}

/// What the filter refuses is not missed by ordinary programs.
pub(super) async fn common_programs_work(den: &Den) {
    let code = "
import multiprocessing, subprocess, threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
numbers = (ctypes.c_int * 3)(3, 1, 2)
libc.qsort(numbers, 3, 4, compare(lambda one, other: one[0] - other[0]))
def double(number): return 2 * number
context = multiprocessing.get_context('fork')
with context.Pool(2) as pool: print(list(numbers), pool.map(double, [1, 2]))
block = shared_memory.SharedMemory(create=True, size=4096)
block.close()
block.unlink()
with ThreadPoolExecutor(4) as threads: print(sum(threads.map(double, range(4))))
print(subprocess.run(['/bin/sh', '-c', 'echo started'], capture_output=True, text=True).stdout.strip())
server = socket.socket()
server.bind(('127.0.0.1', 0))
server.listen()
client = socket.create_connection(server.getsockname())
print(server.accept()[0].send(b'x'), client.recv(1))
";
    for (runtime, spec) in &den.cells {
        let live = Live::start_on(&**runtime, spec).await;
        assert_eq!(live.python(code).await, "[1, 2, 3] [2, 4]\n12\nstarted\n1 b'x'", "{}", den.name);
        // Those that are here, each with threads and collectors of its own.
        for program in ["node -p '1 + 1'", "perl -e 'print 1 + 1'", "java -version >/dev/null 2>&1 && echo 2"] {
            let name = program.split(' ').next().unwrap();
            let said = live.sh(&format!("command -v {name} >/dev/null || {{ echo 2; exit; }}\n{program}")).await;
            assert_eq!(said, "2", "{program}");
        }
        live.shut().await;
    }
}
