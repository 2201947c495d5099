//! Sandboxes of servers that are killed: what ends by itself, what the keeper ends, and what the next process ends.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::{
        prctl::{set_child_subreaper, set_pdeathsig},
        signal::{Signal, kill},
    },
    unistd::Pid,
};
use prorl_sandbox::{
    Image, NamespaceConfig, NamespaceRuntime, Node, Runtime, Sandbox, SandboxSpec, SingularityConfig,
    SingularityRuntime,
};
use rustix::process::{PidfdFlags, pidfd_open};

use crate::{
    crash::{Moments, children, n_kills, reap_all, wait_micros},
    support::{alone, assert_passed, config, folder, is_alone, names, skip},
};

/// Longer than a round of the server's work takes, in microseconds.
const SPAN_MICROS: u64 = 120_000;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

async fn start(runtime: &dyn Runtime, spec: &SandboxSpec) -> Sandbox {
    runtime.start(spec).await.unwrap_or_else(|error| panic!("{error}: {error:?}"))
}

/// Not a test: a server that starts sandboxes and lets them go in every way, until it is killed.
#[test]
fn busy_server() {
    let Some(dir) = is_alone("sandboxes::busy_server") else { return };
    set_pdeathsig(Signal::SIGKILL).unwrap(); // it does not outlive a test that is ended itself
    let config = config(&dir);
    let spec = SandboxSpec::new(&config.guest);
    println!("serving");
    runtime().block_on(async {
        loop {
            let namespace = NamespaceRuntime::new(Node::open(config.clone()).unwrap(), NamespaceConfig::default());
            let one = start(&namespace, &spec).await;
            let (two, three) = tokio::join!(start(&namespace, &spec), start(&namespace, &spec));
            drop(two);
            let dropped = tokio::time::timeout(Duration::from_millis(2), namespace.start(&spec)).await;
            one.shutdown(Duration::from_secs(1)).await.unwrap();
            drop((three, dropped));
        }
    });
}

/// Not a test: a server with one sandbox, which it tells of.
#[test]
fn idle_server() {
    let Some(dir) = is_alone("sandboxes::idle_server") else { return };
    set_pdeathsig(Signal::SIGKILL).unwrap();
    let config = config(&dir);
    let spec = SandboxSpec::new(&config.guest);
    let node = Node::open(config).unwrap();
    runtime().block_on(async {
        let squashed = dir.join("image.squashfs");
        let sandbox = if squashed.exists() {
            let singularity = SingularityRuntime::new(node, SingularityConfig::default()).unwrap();
            start(&singularity, &SandboxSpec { image: Image::File(squashed), ..spec }).await
        } else {
            start(&NamespaceRuntime::new(node, NamespaceConfig::default()), &spec).await
        };
        println!("stands {} {}", sandbox.facts().outer_pid, sandbox.facts().hello.host_pid);
        std::future::pending::<()>().await;
    });
}

/// A server with one sandbox.
pub(crate) struct Server {
    child: Child,
    pub(crate) outer: i32,
    pub(crate) inner: i32,
}

impl Server {
    pub(crate) fn start(dir: &Path) -> Self {
        let mut child = alone("sandboxes::idle_server", dir, &[]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let told = lines.find_map(|line| Some(line.split_once("stands ")?.1.to_owned()));
        let told = told.expect("the server did not start");
        let (outer, inner) = told.split_once(' ').unwrap();
        Self { child, outer: outer.parse().unwrap(), inner: inner.parse().unwrap() }
    }

    /// Makes the sandbox deaf to the end of its channel, as a machine that hangs would.
    pub(crate) fn freeze(&self) {
        for pid in [self.outer, self.inner] {
            kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
        }
    }

    pub(crate) fn handles(&self) -> [OwnedFd; 2] {
        [self.outer, self.inner].map(watch)
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

pub(crate) fn watch(pid: i32) -> OwnedFd {
    pidfd_open(rustix::process::Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap()
}

pub(crate) fn has_ended(handle: &OwnedFd) -> bool {
    poll(&mut [PollFd::new(handle.as_fd(), PollFlags::POLLIN)], 0_u8).unwrap() == 1
}

/// Kills the keeper of the only node, and waits for its end. Its number is in the name of its folder.
fn kill_keeper(dir: &Path) {
    let folder = names(&dir.join("nodes")).pop().unwrap();
    let pid = folder.split('-').nth(1).unwrap().parse().unwrap();
    let keeper = watch(pid);
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    assert_eq!(poll(&mut [PollFd::new(keeper.as_fd(), PollFlags::POLLIN)], 5000_u16).unwrap(), 1);
}

/// Runs the rest of `test` in a process of its own, which adopts whatever loses its parent; there it returns the folder.
fn adopting(test: &str) -> Option<PathBuf> {
    let Some(dir) = is_alone(test) else {
        let dir = folder();
        assert_passed(&alone(test, dir.path(), &[]).output().unwrap());
        return None;
    };
    set_child_subreaper(true).unwrap();
    Some(dir)
}

#[test]
fn a_server_killed_over_its_sandboxes_leaves_nothing() {
    let Some(dir) = adopting("sandboxes::a_server_killed_over_its_sandboxes_leaves_nothing") else { return };
    let mut moments = Moments::of(3, SPAN_MICROS);
    for kill_idx in 0..n_kills(30) {
        let mut server = alone("sandboxes::busy_server", &dir, &[]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.ends_with("serving")), "the server did not start");
        let moment = moments.next();
        wait_micros(moment);
        server.kill().unwrap();
        server.wait().unwrap();
        reap_all();
        assert!(names(&dir).is_empty(), "kill {kill_idx} after {moment} µs left {:?}", names(&dir));
    }
}

#[test]
fn the_keeper_ends_a_sandbox_that_does_not() {
    let Some(dir) = adopting("sandboxes::the_keeper_ends_a_sandbox_that_does_not") else { return };
    let server = Server::start(&dir);
    server.freeze();
    let handles = server.handles();
    server.kill();
    reap_all(); // the keeper too
    assert!(handles.iter().all(has_ended));
    assert!(names(&dir).is_empty());
}

#[test]
fn the_next_node_ends_a_sandbox_whose_server_and_keeper_are_dead() {
    let test = "sandboxes::the_next_node_ends_a_sandbox_whose_server_and_keeper_are_dead";
    let Some(dir) = adopting(test) else { return };
    let server = Server::start(&dir);
    server.freeze();
    let handles = server.handles();
    kill_keeper(&dir);
    server.kill();
    assert!(!handles.iter().any(has_ended));
    let node = Node::open(config(&dir)).unwrap();
    assert!(handles.iter().all(has_ended), "opening a node ends them");
    assert_eq!(names(&dir.join("nodes")).len(), 1);
    drop(node);
    reap_all();
    assert!(names(&dir).is_empty());
}

#[test]
fn a_node_leaves_the_sandboxes_of_a_server_without_a_keeper_alone() {
    let test = "sandboxes::a_node_leaves_the_sandboxes_of_a_server_without_a_keeper_alone";
    let Some(dir) = adopting(test) else { return };
    let server = Server::start(&dir);
    let handles = server.handles();
    kill_keeper(&dir);
    drop(Node::open(config(&dir)).unwrap());
    assert!(!handles.iter().any(has_ended));
    assert_eq!(names(&dir.join("nodes")).len(), 1);
    server.kill();
    drop(Node::open(config(&dir)).unwrap());
    reap_all();
    assert!(names(&dir).is_empty());
}

/// Makes an image file of a shell alone, or says why a sandbox cannot be made of one.
pub(crate) fn squash(dir: &Path) -> Result<(), String> {
    fs::File::options().read(true).write(true).open("/dev/fuse").map_err(|_refused| "no FUSE for this user")?;
    Command::new("apptainer").arg("--version").output().map_err(|_missing| "no apptainer")?;
    let root = dir.join("root");
    for name in ["bin", "dev", "proc", "sys", "tmp", "etc"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    fs::copy(busybox.ok_or("no busybox")?, root.join("bin/sh")).unwrap();
    let mut squash = Command::new("mksquashfs");
    squash.arg(&root).arg(dir.join("image.squashfs")).args(["-all-root", "-no-progress", "-quiet"]);
    let squashed = squash.output().map_err(|error| format!("mksquashfs: {error}"))?;
    fs::remove_dir_all(root).unwrap();
    // A sandbox user other than this one may read it, and what it is in.
    fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    if squashed.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&squashed.stderr).into_owned()) }
}

/// Processes that this one could have to reap, and theirs: whoever is left of a server.
fn descendants() -> Vec<i32> {
    let mut found = children();
    let mut idx = 0;
    while let Some(pid) = found.get(idx) {
        let lists = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
        let lists = lists.filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok());
        let more: Vec<i32> =
            lists.flat_map(|list| list.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect();
        found.extend(more);
        idx += 1;
    }
    found
}

#[test]
#[expect(unsafe_code, reason = "no safe function changes what a signal does")]
fn a_file_systems_helper_goes_where_the_server_is_told_of_no_childs_end() {
    let test = "sandboxes::a_file_systems_helper_goes_where_the_server_is_told_of_no_childs_end";
    let Some(dir) = is_alone(test) else {
        let dir = folder();
        match squash(dir.path()) {
            Ok(()) => assert_passed(&alone(test, dir.path(), &[]).output().unwrap()),
            Err(why) => skip(test, &why),
        }
        return;
    };
    // SAFETY: no code runs for a signal that is ignored.
    unsafe { nix::sys::signal::signal(Signal::SIGCHLD, nix::sys::signal::SigHandler::SigIgn) }.unwrap();
    assert_eq!(Command::new("true").status().unwrap_err().raw_os_error(), Some(libc::ECHILD));
    let config = config(&dir);
    let spec = SandboxSpec { image: Image::File(dir.join("image.squashfs")), ..SandboxSpec::new(&config.guest) };
    let singularity = SingularityRuntime::new(Node::open(config).unwrap(), SingularityConfig::default()).unwrap();
    let name = |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    runtime().block_on(async {
        let sandbox = start(&singularity, &spec).await;
        let (helpers, minders): (Vec<_>, Vec<_>) =
            descendants().into_iter().partition(|pid| name(*pid).starts_with("squashfuse"));
        let helper = watch(*helpers.first().expect("an image file is mounted by a helper"));
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            for pid in &minders {
                let _ = kill(Pid::from_raw(*pid), signal); // process 1 takes others along
            }
        }
        tokio::time::timeout(Duration::from_secs(10), sandbox.wait_dead()).await.unwrap();
        assert!(has_ended(&helper));
    });
    drop(singularity);
    assert_eq!(names(&dir), ["image.squashfs"]);
}

#[test]
fn a_file_systems_helper_goes_even_when_everybody_who_minds_it_is_killed() {
    let test = "sandboxes::a_file_systems_helper_goes_even_when_everybody_who_minds_it_is_killed";
    let Some(dir) = adopting(test) else { return };
    if let Err(why) = squash(&dir) {
        return skip(test, &why);
    }
    let name = |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let server = Server::start(&dir);
    let helper = descendants().into_iter().find(|pid| name(*pid).starts_with("squashfuse"));
    let helper = watch(helper.expect("an image file is mounted by a helper"));
    let server_pid = i32::try_from(server.child.id()).unwrap();
    let mut minders = descendants();
    minders.retain(|pid| *pid != server_pid && !name(*pid).starts_with("squashfuse"));
    let ends: Vec<_> = minders.iter().map(|pid| watch(*pid)).collect();
    // The keeper, the owner, the launcher and process 1, before any of them can do a thing about the others' end.
    for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
        for pid in &minders {
            let _ = kill(Pid::from_raw(*pid), signal); // process 1 takes others along
        }
    }
    for end in &ends {
        poll(&mut [PollFd::new(end.as_fd(), PollFlags::POLLIN)], 5000_u16).unwrap();
    }
    server.kill();
    assert!(!has_ended(&helper), "nobody is there to end it");
    drop(Node::open(config(&dir)).unwrap());
    assert!(has_ended(&helper));
    reap_all();
    assert_eq!(names(&dir), ["image.squashfs"]);
}
