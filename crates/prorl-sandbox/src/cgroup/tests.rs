//! Control groups for real, where this machine lets this user make some. No controllers are needed for that.
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::{
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    os::{
        fd::AsFd as _,
        unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::LazyLock,
    time::Duration,
};

use nix::poll::{PollFd, PollFlags};
use prorl_guest::Guest;

use super::{
    Ceilings, Group, Groups, PROCS, SERVER, SUBTREE, below, find,
    home::{Home, own_group},
    processes,
};
use crate::{
    Image, NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime as _, SandboxSpec, SingularityConfig,
    SingularityRuntime, node::Reach,
};

/// Tells on the test's own output why nothing was tested.
fn skip(test: &str, why: &str) {
    writeln!(io::stderr().lock(), "skipped {test}: {why}").unwrap();
}

/// A group of a test's own.
struct Top(PathBuf);

impl Top {
    /// Nothing where this user can make none.
    fn make(test: &str) -> Option<Self> {
        let made = own_group().map_err(|why| why.to_string()).and_then(|own| {
            let group = own.join(format!("prorl-test-{test}-{}", std::process::id()));
            fs::create_dir(&group).map_err(|error| format!("{}: {error}", group.display()))?;
            let top = Self(group);
            find::check(&top.0, &[]).map_err(|why| why.to_string())?;
            find::check_reach(&own, &top.0).map_err(|why| why.to_string())?;
            Ok(top)
        });
        made.map_err(|why| skip(test, &why)).ok()
    }
}

/// Returns the controllers that a group offers to those below it, of a few.
fn controllers(group: &Path) -> Vec<&'static str> {
    let offered = fs::read_to_string(group.join("cgroup.controllers")).unwrap();
    let known = ["hugetlb", "memory", "pids", "cpu"];
    known.into_iter().filter(|name| offered.split_whitespace().any(|one| one == *name)).collect()
}

impl Drop for Top {
    fn drop(&mut self) {
        super::kill(&self.0);
        wait_empty(&self.0);
        super::remove_empty(&self.0).unwrap();
    }
}

/// Blocks until nothing is in a group, or for some seconds.
fn wait_empty(group: &Path) {
    let is_populated = |text: String| text.contains("populated 1");
    let events = fs::File::open(group.join("cgroup.events")).unwrap();
    // Only what has been read can change.
    while is_populated(io::read_to_string(&events).unwrap()) {
        let n_ready = crate::sys::poll_patiently(&mut [PollFd::new(events.as_fd(), PollFlags::POLLPRI)], 10_000);
        assert!(n_ready > 0, "{} is not empty: {:?}", group.display(), processes(group));
        io::Seek::rewind(&mut &events).unwrap();
    }
}

static GUEST: LazyLock<Guest> = LazyLock::new(|| Guest::install().unwrap());

fn node(dir: &Path, groups: Groups) -> Node {
    Node::open_with(NodeConfig { dir: dir.join("nodes"), ..NodeConfig::new(GUEST.path()) }, groups).unwrap()
}

fn group_of(pid: u32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    text.lines().find_map(|line| line.strip_prefix("0::")).unwrap().to_owned()
}

/// A shell with a child, that says when both are there.
fn family(group: &Group) -> Child {
    let script = "read go; sleep 1000 & echo; wait";
    let mut shell = Command::new("sh");
    let mut shell = shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    group.add(shell.id()).unwrap();
    shell.stdin.take().unwrap().write_all(b"\n").unwrap();
    BufReader::new(shell.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    shell
}

fn no_ceilings() -> Ceilings {
    let spec = SandboxSpec { limits: crate::Limits::NONE, ..SandboxSpec::new("/guest") };
    Ceilings::of(&spec, Reach::PidNamespace)
}

#[tokio::test]
async fn a_group_ends_with_all_that_is_in_it() {
    let Some(top) = Top::make("whole") else { return };
    let groups = Groups::at(&top.0, &[]).unwrap();
    let path = groups.path_of("one").unwrap();
    let group = groups.make(path.clone(), &no_ceilings()).unwrap();
    let mut shell = family(&group);
    assert_eq!(processes(&path).unwrap().len(), 2);
    group.kill();
    tokio::time::timeout(Duration::from_secs(10), group.emptied()).await.unwrap().unwrap();
    assert!(group.end().unwrap());
    assert!(group.end().unwrap(), "once more does no harm");
    assert!(!path.exists());
    group.emptied().await.unwrap();
    shell.wait().unwrap();
}

#[tokio::test]
async fn a_sandbox_is_in_its_group_from_the_first_process_on() {
    let Some(top) = Top::make("sandbox") else { return };
    let dir = tempfile::tempdir().unwrap();
    let groups = Groups::at(&top.0, &[]).unwrap();
    let folder = groups.folder().unwrap().to_owned();
    let node = node(dir.path(), groups);
    let runtime = NamespaceRuntime::new(node.clone(), NamespaceConfig::default());
    let spec = SandboxSpec::new(GUEST.path());
    let sandbox = runtime.start(&spec).await.unwrap();
    let path = folder.join(sandbox.id());
    for pid in [sandbox.facts().outer_pid, sandbox.facts().hello.host_pid] {
        assert!(path.to_string_lossy().ends_with(&group_of(pid)), "{}", group_of(pid));
        assert!(processes(&path).unwrap().contains(&pid));
    }
    sandbox.shutdown(Duration::from_secs(5)).await.unwrap();
    assert!(!path.exists());

    // Dropped, it is the keeper's to end.
    let dropped = runtime.start(&spec).await.unwrap();
    assert_eq!(below(&folder).unwrap().len(), 1);
    drop(dropped);
    drop((sandbox, runtime, node));
    assert!(!folder.exists());
}

#[tokio::test]
async fn a_launcher_and_what_serves_its_image_are_in_the_group_too() {
    let Some(top) = Top::make("launcher") else { return };
    let dir = tempfile::tempdir().unwrap();
    for folder in [dir.path(), &image(dir.path())] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let groups = Groups::at(&top.0, &[]).unwrap();
    let folder = groups.folder().unwrap().to_owned();
    let node = node(dir.path(), groups);
    let runtime = match SingularityRuntime::new(node.clone(), SingularityConfig::default()) {
        Ok(runtime) => runtime,
        Err(error) => return skip("launcher", &error.to_string()),
    };
    let image = Image::Directory(image(dir.path()));
    let spec = SandboxSpec { image, start_timeout: Duration::from_mins(1), ..SandboxSpec::new(GUEST.path()) };
    let sandbox = runtime.start(&spec).await.unwrap();
    let path = folder.join(sandbox.id());
    let members = processes(&path).unwrap();
    for pid in [sandbox.facts().outer_pid, sandbox.facts().hello.host_pid] {
        assert!(members.contains(&pid));
    }
    // The owner, the launcher, and the guest's two.
    assert!(members.len() >= 4, "{members:?}");
    sandbox.shutdown(Duration::from_secs(5)).await.unwrap();
    assert!(!path.exists());
}

/// Makes an image with nothing in it, unless it is there.
fn image(dir: &Path) -> PathBuf {
    let image = dir.join("image");
    for name in ["dev", "etc", "proc", "sys", "tmp"] {
        fs::create_dir_all(image.join(name)).unwrap();
    }
    image
}

#[tokio::test]
async fn strangers_in_a_group_go_with_the_sandbox() {
    let Some(top) = Top::make("strangers") else { return };
    let dir = tempfile::tempdir().unwrap();
    let groups = Groups::at(&top.0, &[]).unwrap();
    let folder = groups.folder().unwrap().to_owned();
    let node = node(dir.path(), groups);
    let claim = node.claim("namespace").unwrap();
    claim.limit(&no_ceilings()).unwrap();
    let mut shell = family(claim.group().unwrap());
    drop(claim);
    assert!(!shell.wait().unwrap().success());
    drop(node);
    assert!(!folder.exists());
}

#[test]
fn what_the_dead_have_left_is_removed_and_what_lives_stays() {
    let Some(top) = Top::make("tidy") else { return };
    let groups = Groups::at(&top.0, &[]).unwrap();
    let [dead, populated, other] = ["prorl-4194305-1", "prorl-4194306-1", "other"].map(|name| top.0.join(name));
    for folder in [&dead, &populated, &other] {
        fs::create_dir_all(folder.join("namespace-1-0")).unwrap();
    }
    let mut sleep = Command::new("sleep").arg("1000").spawn().unwrap();
    super::write(&populated.join("namespace-1-0"), PROCS, &sleep.id().to_string()).unwrap();
    groups.tidy();
    assert_eq!([&dead, &populated, &other].map(|folder| folder.exists()), [false, true, true]);
    assert!(groups.folder().unwrap().exists());
    // Taken for dead itself, it makes its folder anew.
    fs::remove_dir(groups.folder().unwrap()).unwrap();
    let group = groups.make(groups.path_of("one").unwrap(), &no_ceilings()).unwrap();
    assert!(group.end().unwrap());
    sleep.kill().unwrap();
    sleep.wait().unwrap();
}

/// The variable that tells a copy of this program that it was put into a group of its own, and a path.
const ALONE: &str = "PRORL_TEST_GROUP";

/// Runs a test of this program alone in a group, as a service does. The copy finds [`ALONE`] set to `told`.
fn alone(test: &str, group: &Path, told: &Path) -> Child {
    let mut shell = Command::new("sh");
    shell.args(["-c", "read go; exec \"$0\" --exact \"$1\" --nocapture --test-threads=1"]);
    shell.arg(std::env::current_exe().unwrap()).arg(format!("cgroup::tests::{test}")).env(ALONE, told);
    let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    super::write(group, PROCS, &shell.id().to_string()).unwrap();
    shell.stdin.take().unwrap().write_all(b"\n").unwrap();
    shell
}

#[test]
fn a_process_that_is_alone_moves_down_and_back() {
    let test = "a_process_that_is_alone_moves_down_and_back";
    if let Some(group) = std::env::var_os(ALONE) {
        return moves_down_and_back(Path::new(&group));
    }
    let Some(top) = Top::make("moves") else { return };
    assert!(alone(test, &top.0, &top.0).wait().unwrap().success());
    assert_eq!(below(&top.0).unwrap(), Vec::<PathBuf>::new());
}

fn moves_down_and_back(group: &Path) {
    assert_eq!(own_group().unwrap(), group);
    let controllers = controllers(group);
    let groups = Groups::of(Home::make(group, controllers.clone(), true).unwrap());
    let folder = groups.folder().unwrap().to_owned();
    assert_eq!(own_group().unwrap(), folder.join(SERVER));
    assert_eq!(processes(group).unwrap(), Vec::<u32>::new());
    for limited in [group, &folder] {
        let enabled = fs::read_to_string(limited.join(SUBTREE)).unwrap();
        assert!(controllers.iter().all(|name| enabled.contains(name)), "{enabled}");
    }
    // With a sandbox's group there, even one without a process, nobody leaves.
    let left = groups.make(groups.path_of("one").unwrap(), &no_ceilings()).unwrap();
    super::leave(&folder).unwrap();
    assert_eq!(own_group().unwrap(), folder.join(SERVER));
    assert!(left.end().unwrap());
    drop(groups);
    assert_eq!(own_group().unwrap(), group);
    assert!(!folder.exists());
}

#[test]
fn of_a_killed_process_its_keeper_leaves_nothing() {
    let test = "of_a_killed_process_its_keeper_leaves_nothing";
    if let Some(folder) = std::env::var_os(ALONE) {
        return is_killed(Path::new(&folder));
    }
    let Some(top) = Top::make("killed") else { return };
    let dir = tempfile::tempdir().unwrap();
    let status = alone(test, &top.0, dir.path()).wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
    wait_empty(&top.0);
    assert_eq!(below(&top.0).unwrap(), Vec::<PathBuf>::new());
    assert_eq!(fs::read_to_string(top.0.join(SUBTREE)).unwrap().trim(), "");
    assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
}

fn is_killed(dir: &Path) {
    let group = own_group().unwrap();
    let groups = Groups::of(Home::make(&group, controllers(&group), true).unwrap());
    let folder = groups.folder().unwrap().to_owned();
    let node = node(dir, groups);
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let runtime = NamespaceRuntime::new(node, NamespaceConfig::default());
    let sandbox = tokio.block_on(runtime.start(&SandboxSpec::new(GUEST.path()))).unwrap();
    assert!(folder.join(sandbox.id()).exists());
    nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL).unwrap();
}
