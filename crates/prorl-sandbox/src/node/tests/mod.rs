//! Claims and the keeper, with processes that stand for sandboxes.
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod loopback;
mod reconcile;

use std::{
    fs,
    io::{self, Write as _},
    os::{fd::AsFd, unix::fs::PermissionsExt},
    path::PathBuf,
    pin::{Pin, pin},
    process::{Child, Command, Stdio},
    sync::LazyLock,
    task::{Context, Poll, Waker},
};

use nix::{
    fcntl::FlockArg,
    poll::{PollFd, PollFlags},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use prorl_guest::Guest;
use tempfile::TempDir;

use super::{
    Claim, Node, NodeConfig, Reach, folder,
    process::{Handle, Process},
};

static GUEST: LazyLock<Guest> = LazyLock::new(|| Guest::install().unwrap());

/// Tells on the test's own output why nothing was tested.
pub(super) fn skip(test: &str, why: &str) {
    let mut out = io::stderr().lock(); // unlike `eprintln`, shown of a test that passes
    writeln!(out, "skipped {test}: {why}").unwrap();
}

fn open(dir: &TempDir) -> Node {
    Node::open(NodeConfig { dir: dir.path().join("nodes"), ..NodeConfig::new(GUEST.path()) }).unwrap()
}

/// The keeper's number is in the name of its folder.
fn keeper_pid(node: &Node) -> u32 {
    let name = node.folder().file_name().unwrap().to_str().unwrap();
    name.split('-').nth(1).unwrap().parse().unwrap()
}

fn keeper(node: &Node) -> Handle {
    Handle::of(keeper_pid(node)).unwrap().unwrap()
}

/// Blocks until the process has ended; tells whether it did within some seconds.
fn ends(handle: &Handle) -> bool {
    crate::sys::poll_patiently(&mut [PollFd::new(handle.as_fd(), PollFlags::POLLIN)], 15_000) == 1
}

fn is_empty(dir: &TempDir) -> bool {
    fs::read_dir(dir.path()).unwrap().next().is_none()
}

/// A process that stands for an outer one. It ends with the test, if by nothing else.
struct Outer(Child);

impl Outer {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap())
    }

    fn process(&self) -> Process {
        Process::of(self.0.id()).unwrap().unwrap()
    }

    fn handle(&self) -> Handle {
        self.process().open().unwrap().unwrap()
    }

    fn is_alive(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Outer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_dropped_node_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let open_mode = if nix::unistd::geteuid().is_root() { 0o711 } else { 0o700 };
    assert_eq!(mode(dir.path().join("nodes")), open_mode | 0o1000, "marked as made by us");
    assert_eq!(mode(node.folder().to_owned()), open_mode);
    assert_eq!(mode(node.folder().join("run")), open_mode);
    assert_eq!(mode(node.folder().join("boxes")), 0o700);
    let keeper = keeper(&node);
    let clone = node.clone();
    drop(node);
    assert!(clone.folder().exists() && !keeper.has_ended());
    drop(clone);
    assert!(keeper.has_ended() || ends(&keeper));
    assert!(is_empty(&dir));
}

#[test]
fn a_keeper_stands_apart() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let (pid, keeper) = (keeper_pid(&node), keeper(&node));
    assert_eq!(super::process::Stat::of(pid).unwrap().session, pid);
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/comm")).unwrap(), "prorl-keeper\n");
    assert_eq!(fs::read(format!("/proc/{pid}/environ")).unwrap(), b"");
    assert_eq!(fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), PathBuf::from("/"));
    // Its channel and its lock, the server's process, and /dev/null three times.
    assert_eq!(fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(), 6);
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGTSTP, Signal::SIGUSR1] {
        kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
    }
    // It still does its work, which nobody else does here.
    let outer = Outer::start();
    let claim = node.claim("namespace").unwrap();
    claim.spawned(outer.0.id(), Reach::PidNamespace).unwrap();
    drop((claim, node));
    outer.handle().kill();
    assert!(ends(&keeper));
    assert!(is_empty(&dir));
}

#[test]
fn a_settled_claim_leaves_nothing_while_the_node_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let one = node.claim("namespace").unwrap();
    let two = node.claim("namespace").unwrap();
    assert_ne!(one.id(), two.id());
    assert_eq!(one.made_run_dir(), None);
    let run_dir = one.run_dir().unwrap();
    assert_eq!((one.run_dir().unwrap(), one.made_run_dir()), (run_dir.clone(), Some(run_dir.clone())));
    fs::create_dir(run_dir.join("binds")).unwrap();
    fs::write(run_dir.join("binds/0"), "x").unwrap();
    one.settle();
    one.settle();
    drop(one);
    assert!(!run_dir.exists());
    assert_eq!(folder::boxes(node.folder()).unwrap(), [two.id()]);
    drop(two); // it never had a process
    assert!(folder::boxes(node.folder()).unwrap().is_empty());
}

#[test]
fn the_keeper_sees_a_dropped_claim_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let mut outer = Outer::start();
    let claim = node.claim("namespace").unwrap();
    let run_dir = claim.run_dir().unwrap();
    claim.spawned(outer.0.id(), Reach::PidNamespace).unwrap();
    let record = folder::record(node.folder(), claim.id());
    let other = node.claim("namespace").unwrap();
    let handle = outer.handle();
    drop(claim);
    assert!(outer.is_alive() && record.exists(), "it has a moment to end by itself");
    assert!(ends(&handle), "it does not, and is killed");
    assert!(!keeper(&node).has_ended());
    let keeper = keeper(&node);
    drop((other, node));
    assert!(ends(&keeper));
    assert!(is_empty(&dir), "{run_dir:?}");
}

#[test]
fn the_keeper_waits_for_what_ends_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let keeper = keeper(&node);
    let mut outer = Outer::start();
    let claim = node.claim("singularity").unwrap();
    claim.spawned(outer.0.id(), Reach::Session).unwrap();
    claim.run_dir().unwrap();
    let started = tokio::time::Instant::now();
    drop((claim, node));
    assert!(started.elapsed().as_millis() > 900, "the last user waits a second before it gives up");
    assert!(outer.is_alive() && !keeper.has_ended() && !is_empty(&dir));
    outer.0.kill().unwrap();
    assert!(ends(&keeper));
    assert!(is_empty(&dir));
}

#[test]
fn kill_rest_kills_what_was_written_down_only() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let [mut outer, mut inner, mut other] = std::array::from_fn(|_| Outer::start());
    let claim = node.claim("namespace").unwrap();
    assert!(claim.kill_rest().unwrap().is_empty());
    claim.spawned(outer.0.id(), Reach::PidNamespace).unwrap();
    claim.stands(inner.process(), Vec::new()).unwrap();
    let killed = claim.kill_rest().unwrap();
    assert_eq!(killed.len(), 2);
    assert!(killed.iter().all(ends));
    assert!(claim.kill_rest().unwrap().is_empty());
    claim.settle();
    assert!(!outer.is_alive() && !inner.is_alive() && other.is_alive());
}

#[test]
fn hundreds_of_claims_cost_little() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let outer = Outer::start();
    let started = tokio::time::Instant::now();
    let claims: Vec<_> = (0..300).map(|_| node.claim("namespace").unwrap()).collect();
    for claim in &claims {
        claim.spawned(outer.0.id(), Reach::PidNamespace).unwrap();
        claim.stands(outer.process(), vec![1, 2]).unwrap();
    }
    assert_eq!(folder::boxes(node.folder()).unwrap().len(), 300);
    claims.iter().for_each(Claim::settle);
    let took = started.elapsed();
    assert!(folder::boxes(node.folder()).unwrap().is_empty());
    println!("{:?} for a claim from its beginning to its end", took / 300);
}

#[test]
fn a_folder_that_somebody_else_has_made_stays() {
    let dir = tempfile::tempdir().unwrap();
    let chosen = dir.path().join("nodes");
    folder::make(&chosen, 0o755).unwrap();
    drop(open(&dir));
    assert_eq!(fs::read_dir(&chosen).unwrap().count(), 0);
}

#[test]
fn two_nodes_in_one_process_leave_each_other_alone() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = [open(&dir), open(&dir)];
    let claims = nodes.each_ref().map(|node| node.claim("namespace").unwrap());
    assert_ne!(nodes[0].folder(), nodes[1].folder());
    let [first, second] = nodes;
    let [of_first, of_second] = claims;
    drop((of_first, first));
    assert!(second.folder().exists() && folder::boxes(second.folder()).unwrap() == [of_second.id()]);
    drop((of_second, second));
    assert!(is_empty(&dir));
}

#[test]
fn a_server_goes_on_without_its_keeper_and_cleans_up_itself() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let keeper = keeper(&node);
    keeper.kill();
    assert!(ends(&keeper));
    let claim = node.claim("namespace").unwrap();
    let other = open(&dir);
    assert!(node.folder().exists() && folder::boxes(node.folder()).unwrap() == [claim.id()]);
    drop(other);
    claim.settle();
    drop((claim, node));
    assert!(is_empty(&dir));
}

#[test]
fn what_a_killed_keeper_was_to_end_is_ended_without_it() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let [asked_before, asked_after] = std::array::from_fn(|_| Outer::start());
    let [before, after] = [&asked_before, &asked_after].map(|outer| {
        let claim = node.claim("namespace").unwrap();
        claim.spawned(outer.0.id(), Reach::PidNamespace).unwrap();
        claim.run_dir().unwrap();
        claim
    });
    let keeper = keeper(&node);
    drop(before); // it has some seconds
    keeper.kill();
    assert!(ends(&keeper));
    let record = folder::record(node.folder(), after.id());
    drop(after);
    assert!(ends(&asked_after.handle()), "the server goes on, and sees to it");
    let gone = (0..500).any(|_| {
        crate::sys::poll_patiently(&mut [], 10);
        !record.exists()
    });
    assert!(gone);
    asked_before.handle().kill();
    drop(node);
    assert!(is_empty(&dir));
}

#[test]
fn a_stopped_keeper_goes_on_when_its_server_ends() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let keeper = keeper(&node);
    kill(Pid::from_raw(keeper_pid(&node).try_into().unwrap()), Signal::SIGSTOP).unwrap();
    drop(node);
    assert!(ends(&keeper) && is_empty(&dir));
}

#[test]
fn a_forked_process_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&dir);
    let outer = Outer::start();
    let claim = node.claim("namespace").unwrap();
    claim.spawned(outer.0.id(), Reach::PidNamespace).unwrap();
    let unstarted = node.claim("namespace").unwrap();
    let keeper = keeper(&node);
    let (claim, unstarted, node) = drop_in_a_fork((claim, unstarted, node));
    assert!(!keeper.has_ended());
    assert_eq!(folder::boxes(node.folder()).unwrap().len(), 2);
    // Without a keeper it is this process's lock alone that keeps others away.
    keeper.kill();
    assert!(ends(&keeper));
    let node = drop_in_a_fork(node);
    assert!(folder::lock(node.folder(), FlockArg::LockExclusiveNonblock).unwrap().is_none());
    outer.handle().kill();
    drop((claim, unstarted, node));
    assert!(is_empty(&dir));
}

/// Drops a forked process's copy of something, and returns the original.
#[expect(unsafe_code, reason = "a fork is what is tested")]
fn drop_in_a_fork<T>(original: T) -> T {
    // SAFETY: the child drops what is tested, which takes no lock that another thread of a test could hold, and ends.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            drop(original);
            // SAFETY: nothing of this process is to run in the child any more.
            unsafe { libc::_exit(0) }
        }
        nix::unistd::ForkResult::Parent { child } => {
            nix::sys::wait::waitpid(child, None).unwrap();
            original
        }
    }
}

#[test]
fn places_are_given_in_order_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let one = std::num::NonZeroUsize::MIN;
    let config = NodeConfig { dir: dir.path().join("nodes"), max_starting: one, ..NodeConfig::new(GUEST.path()) };
    let node = Node::open(config).unwrap();
    let admit = || node.admit(std::time::Duration::ZERO);
    let place = poll_once(pin!(admit())).unwrap().unwrap();
    let (mut second, mut third, mut last) = (Box::pin(admit()), Box::pin(admit()), Box::pin(admit()));
    assert!(poll_once(second.as_mut()).is_none());
    assert!(poll_once(third.as_mut()).is_none());
    assert!(poll_once(last.as_mut()).is_none());
    drop(place);
    assert!(poll_once(third.as_mut()).is_none(), "it is not its turn");
    let place = poll_once(second.as_mut()).unwrap().unwrap();
    drop(third); // gives its turn to the next
    assert!(poll_once(last.as_mut()).is_none());
    drop(place);
    assert!(poll_once(last.as_mut()).is_some());
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}
