//! Claims, the keeper and reconciling, with processes that stand for sandboxes.
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod loopback;

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
    poll::{PollFd, PollFlags, poll},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use prorl_core::frame;
use prorl_guest::Guest;
use tempfile::TempDir;

use super::{
    Claim, Node, NodeConfig, Reach,
    folder::{self, Origin},
    host::origin,
    process::{Handle, Process},
    reconcile,
    record::{self, Event},
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
    Process::of(keeper_pid(node)).unwrap().open().unwrap().unwrap()
}

/// Blocks until the process has ended; tells whether it did within some seconds.
fn ends(handle: &Handle) -> bool {
    poll(&mut [PollFd::new(handle.as_fd(), PollFlags::POLLIN)], 15_000_u16).unwrap() == 1
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
        Process::of(self.0.id()).unwrap()
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
    assert_eq!(mode(dir.path().join("nodes")), open_mode);
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
    claim.stands(inner.0.id(), Vec::new()).unwrap();
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
        claim.stands(outer.0.id(), vec![1, 2]).unwrap();
    }
    assert_eq!(folder::boxes(node.folder()).unwrap().len(), 300);
    claims.iter().for_each(Claim::settle);
    let took = started.elapsed();
    assert!(folder::boxes(node.folder()).unwrap().is_empty());
    println!("{:?} for a claim from its beginning to its end", took / 300);
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
fn places_are_given_in_order_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let one = std::num::NonZeroUsize::MIN;
    let config = NodeConfig { dir: dir.path().join("nodes"), max_starting: one, ..NodeConfig::new(GUEST.path()) };
    let node = Node::open(config).unwrap();
    let place = poll_once(pin!(node.admit())).unwrap();
    let (mut second, mut third, mut last) = (Box::pin(node.admit()), Box::pin(node.admit()), Box::pin(node.admit()));
    assert!(poll_once(second.as_mut()).is_none());
    assert!(poll_once(third.as_mut()).is_none());
    assert!(poll_once(last.as_mut()).is_none());
    drop(place);
    assert!(poll_once(third.as_mut()).is_none(), "it is not its turn");
    let place = poll_once(second.as_mut()).unwrap();
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

/// An instance folder as a server and a keeper leave it that are both killed.
struct Left {
    dir: TempDir,
    instance: PathBuf,
}

impl Left {
    fn by(origin: &Origin) -> Self {
        let left = Self::unfinished();
        fs::write(left.instance.join(folder::ORIGIN), frame::encode(origin).unwrap()).unwrap();
        left
    }

    /// As one whose keeper was killed too early to say whose it is.
    fn unfinished() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let instance = dir.path().join("nodes").join("node-1-2-0");
        for name in [folder::BOXES, folder::RUN] {
            fs::create_dir_all(instance.join(name)).unwrap();
        }
        Self { dir, instance }
    }

    fn with_box(self, id: &str, record: &[Event]) -> Self {
        let bytes: Vec<u8> = record.iter().flat_map(|event| frame::encode(event).unwrap()).collect();
        fs::write(folder::record(&self.instance, id), bytes).unwrap();
        fs::create_dir(self.instance.join(folder::RUN).join(id)).unwrap();
        fs::write(self.instance.join(folder::RUN).join(id).join("file"), "x").unwrap();
        self
    }

    fn reconcile(&self) {
        reconcile::others(&self.dir.path().join("nodes"), &self.dir.path().join("nodes/node-own"), &origin().unwrap());
    }
}

fn spawned(outer: &Outer) -> [Event; 1] {
    [Event::Spawned { outer: outer.process(), reach: Reach::PidNamespace }]
}

#[test]
fn what_a_dead_instance_left_is_ended_and_removed() {
    let [outer, mut bystander] = std::array::from_fn(|_| Outer::start());
    let ended = outer.handle();
    let other_start = Process { started: bystander.process().started - 1, ..bystander.process() };
    let reused = Event::Spawned { outer: other_start, reach: Reach::Session };
    let left = Left::by(&origin().unwrap())
        .with_box("namespace-7-0", &spawned(&outer))
        .with_box("namespace-7-1", &[reused])
        .with_box("namespace-7-2", &[Event::Claimed { runtime: "namespace".to_owned() }])
        .with_box("namespace-7-3", &[]);
    fs::write(folder::record(&left.instance, "namespace-7-4"), [0xab; 999]).unwrap();
    left.reconcile();
    assert!(ended.has_ended() && bystander.is_alive());
    assert!(is_empty(&left.dir));
}

#[test]
fn opening_a_node_reconciles() {
    let left = Left::by(&origin().unwrap());
    let node = open(&left.dir);
    assert!(!left.instance.exists());
    drop(node);
    assert!(is_empty(&left.dir));
}

#[test]
fn of_another_boot_only_the_files_are_removed() {
    let mut outer = Outer::start();
    let there = Origin { boot_id: "another".to_owned(), ..origin().unwrap() };
    let left = Left::by(&there).with_box("namespace-7-0", &spawned(&outer));
    left.reconcile();
    assert!(outer.is_alive() && is_empty(&left.dir));
}

#[test]
fn of_another_pid_namespace_only_the_files_are_removed() {
    let mut outer = Outer::start();
    let there = Origin { pid_namespace: 1, host: "a-container".to_owned(), ..origin().unwrap() };
    let left = Left::by(&there).with_box("namespace-7-0", &spawned(&outer));
    left.reconcile();
    assert!(outer.is_alive() && is_empty(&left.dir));
}

#[test]
fn what_another_machine_has_is_left_alone() {
    let mut outer = Outer::start();
    let there = Origin { boot_id: "another".to_owned(), host: "elsewhere".to_owned(), ..origin().unwrap() };
    let left = Left::by(&there).with_box("namespace-7-0", &spawned(&outer));
    left.reconcile();
    assert!(outer.is_alive() && folder::boxes(&left.instance).unwrap() == ["namespace-7-0"]);
    assert!(left.instance.join(folder::RUN).join("namespace-7-0/file").exists());
}

#[test]
fn what_a_living_process_has_is_left_alone() {
    let mut outer = Outer::start();
    let left = Left::by(&origin().unwrap()).with_box("namespace-7-0", &spawned(&outer));
    let lock = folder::lock(&left.instance, FlockArg::LockSharedNonblock).unwrap().unwrap();
    left.reconcile();
    assert!(outer.is_alive() && folder::boxes(&left.instance).unwrap() == ["namespace-7-0"]);
    drop(lock);
    left.reconcile();
    assert!(!outer.is_alive() && is_empty(&left.dir));
}

#[test]
fn an_unfinished_instance_is_removed() {
    let left = Left::unfinished();
    fs::write(left.instance.join(folder::NEW_ORIGIN), "").unwrap();
    left.reconcile();
    assert!(is_empty(&left.dir));
    // Killed even before the first file.
    fs::create_dir_all(&left.instance).unwrap();
    left.reconcile();
    assert!(is_empty(&left.dir));
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let left = Left::unfinished();
    fs::write(left.instance.join(folder::ORIGIN), "not a frame at all").unwrap();
    let nodes = left.dir.path().join("nodes");
    fs::create_dir_all(nodes.join("photos/boxes")).unwrap();
    fs::write(nodes.join("photos/boxes/1.jpg"), "x").unwrap();
    // One that has the name only, and one with a file more than ours have.
    fs::create_dir_all(nodes.join("node-js/src")).unwrap();
    let more = nodes.join("node-1-3-0");
    fs::create_dir(&more).unwrap();
    fs::write(more.join(folder::ORIGIN), frame::encode(&origin().unwrap()).unwrap()).unwrap();
    fs::write(more.join("letter"), "x").unwrap();
    std::os::unix::fs::symlink(nodes.join("photos"), nodes.join("node-1-4-0")).unwrap();
    left.reconcile();
    assert!(left.instance.join(folder::BOXES).exists());
    assert!(nodes.join("photos/boxes/1.jpg").exists() && nodes.join("node-js/src").exists());
    assert!(more.join("letter").exists() && nodes.join("node-1-4-0").exists());
}

#[test]
fn ids_are_names_and_never_paths() {
    let left = Left::by(&origin().unwrap());
    fs::write(left.dir.path().join("letter"), "x").unwrap();
    let mut endings = super::endings::Endings::new(left.instance.clone(), std::time::Duration::ZERO);
    for id in ["", ".", "..", "../../letter", "../../../letter", "/etc/passwd"] {
        endings.add(id.to_owned());
    }
    assert!(endings.is_empty());
    assert!(record::create(&folder::record(&left.instance, "a/b"), &spawned(&Outer::start())[0]).is_err());
}
