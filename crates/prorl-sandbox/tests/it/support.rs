//! What the tests share: sandboxes with a client, and ways to look for leftovers that do not trust the code under test.

use std::{
    fs,
    io::{self, Write as _},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::LazyLock,
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use prorl_guest::Guest;
use prorl_sandbox::{NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime, Sandbox, SandboxSpec};
use prorl_tools::host::{ExecSpec, ToolClient};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// More than anything here takes.
pub(crate) const LONG: Duration = Duration::from_secs(20);

static GUEST: LazyLock<Guest> = LazyLock::new(|| Guest::install().unwrap());

static NODE: LazyLock<Node> = LazyLock::new(fresh_node);

/// A node of a test's own.
pub(crate) fn fresh_node() -> Node {
    Node::open(NodeConfig::new(GUEST.path())).unwrap()
}

pub(crate) fn node() -> Node {
    NODE.clone()
}

pub(crate) fn runtime() -> NamespaceRuntime {
    NamespaceRuntime::new(node(), NamespaceConfig::default())
}

pub(crate) fn spec() -> SandboxSpec {
    SandboxSpec::new(GUEST.path())
}

pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// The user that sandboxes run as, as the host sees it.
pub(crate) fn sandbox_uid() -> u32 {
    if is_root() { 65534 } else { nix::unistd::geteuid().as_raw() }
}

/// A sandbox and a client of its tools.
pub(crate) struct Live {
    pub(crate) sandbox: Sandbox,
    pub(crate) tools: ToolClient,
}

impl Live {
    pub(crate) async fn start(spec: &SandboxSpec) -> Self {
        Self::start_on(&runtime(), spec).await
    }

    pub(crate) async fn start_on(runtime: &dyn Runtime, spec: &SandboxSpec) -> Self {
        Self::of(runtime.start(spec).await.unwrap_or_else(|error| panic!("{error}: {error:?}")))
    }

    pub(crate) fn of(mut sandbox: Sandbox) -> Self {
        let tools = ToolClient::new(sandbox.take_channel().unwrap());
        Self { sandbox, tools }
    }

    /// Runs a script of `sh` inside; returns what it wrote to both outputs, without the last newline.
    pub(crate) async fn sh(&self, script: &str) -> String {
        let spec = ExecSpec::new(["sh", "-c", &format!("exec 2>&1\n{script}")]);
        let done = self.tools.exec(&spec, LONG).await.unwrap();
        assert!(!done.timed_out, "{script}");
        done.stdout.text().trim_end().to_owned()
    }

    /// Leaves processes inside that a mere hang-up does not end: in a session of their own, deaf to signals.
    pub(crate) async fn leave_stubborn_children(&self) {
        self.sh(
            "for i in 1 2 3; do setsid sh -c 'trap \"\" HUP TERM INT; sleep 1000; sleep 1000' >/dev/null 2>&1 & done",
        )
        .await;
        let inside = self.processes();
        assert!(inside.len() >= 3, "{inside:?}");
    }

    /// Handles of every process of the sandbox that can be found, a launcher and its helpers included.
    pub(crate) fn processes(&self) -> Vec<Handle> {
        let facts = self.sandbox.facts();
        let mut pids = in_namespace(facts.hello.pid_namespace);
        pids.extend([facts.hello.host_pid, facts.outer_pid]);
        pids.extend(in_session(facts.outer_pid));
        pids.into_iter().filter_map(Handle::open).collect()
    }

    pub(crate) async fn shut(self) {
        self.sandbox.shutdown(Duration::from_secs(2)).await.unwrap();
        assert_eq!(in_namespace(self.sandbox.facts().hello.pid_namespace), Vec::<u32>::new());
    }
}

/// Numbers of the live processes in a pid namespace, as far as this user may look.
pub(crate) fn in_namespace(inode: u64) -> Vec<u32> {
    let of_namespace = |pid: &u32| {
        let link = fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap_or_default();
        link == Path::new(&format!("pid:[{inode}]")) && is_alive(*pid)
    };
    all_pids().filter(of_namespace).collect()
}

/// Numbers of the live processes in a session.
pub(crate) fn in_session(session: u32) -> Vec<u32> {
    let session = session.to_string();
    let is_in = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name in brackets is followed by state, parent, group and session.
        let field = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(3));
        field == Some(&session) && is_alive(*pid)
    };
    all_pids().filter(is_in).collect()
}

pub(crate) fn all_pids() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Children of this process that are alive, threads' children included.
fn children() -> Vec<u32> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok());
    let pids = lists.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>());
    pids.filter(|pid| is_alive(*pid)).collect()
}

/// A zombie counts as dead: it runs nothing, and whoever must reap it may be slow.
fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    !matches!(state, None | Some("Z" | "X"))
}

/// A process that cannot be mistaken for a later one of the same number.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) pid: u32,
    fd: OwnedFd,
}

impl Handle {
    pub(crate) fn open(pid: u32) -> Option<Self> {
        let fd = pidfd_open(Pid::from_raw(pid.try_into().unwrap())?, PidfdFlags::empty()).ok()?;
        Some(Self { pid, fd })
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::pidfd_send_signal(&self.fd, signal).unwrap();
    }

    /// Blocks until the process has ended; tells whether it did within two seconds.
    pub(crate) fn ends(&self) -> bool {
        let mut fds = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::from(2000_u16)).unwrap() == 1
    }
}

/// Asserts that all of them end, without blocking the runtime that has to reap some.
pub(crate) async fn assert_all_end(handles: Vec<Handle>) {
    assert!(!handles.is_empty());
    let left = tokio::task::spawn_blocking(move || handles.into_iter().filter(|one| !one.ends()).collect::<Vec<_>>());
    let left = left.await.unwrap();
    assert!(left.is_empty(), "still there: {left:?}");
}

/// Makes this process the reaper of everything that it starts from now on, so that an orphan becomes a child of ours. The
/// node's keeper, which is to outlive this process, is none: it was started before.
pub(crate) fn adopt_orphans() {
    drop(node());
    nix::sys::prctl::set_child_subreaper(true).unwrap();
}

/// Asserts that every child of this process ends, and every orphan that becomes its child as they do.
pub(crate) async fn assert_no_children() {
    loop {
        let left: Vec<Handle> = children().into_iter().filter_map(Handle::open).collect();
        if left.is_empty() {
            return;
        }
        assert_all_end(left).await;
    }
}

/// Tells on the test's own output why nothing was tested.
pub(crate) fn skip(test: &str, why: &str) {
    let mut out = io::stderr().lock(); // unlike `eprintln`, shown of a test that passes
    writeln!(out, "skipped {test}: {why}").unwrap();
}

/// The variable that tells a copy of this program which test it runs alone.
const ALONE: &str = "PRORL_TEST_ALONE";

/// Tells whether this process runs `test` alone, started by [`alone`].
pub(crate) fn is_alone(test: &str) -> bool {
    std::env::var(ALONE).is_ok_and(|name| name == test)
}

/// A command that runs one test of this program in a process of its own, through `wrapper` if there is one.
pub(crate) fn alone(test: &str, wrapper: &[&str]) -> Command {
    let me = std::env::current_exe().unwrap();
    let mut command = match wrapper.split_first() {
        Some((program, args)) => {
            let mut command = Command::new(program);
            command.args(args).arg(me);
            command
        }
        None => Command::new(me),
    };
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(ALONE, test);
    command
}

pub(crate) fn assert_passed(output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.contains("1 passed"), "{out}\n{err}");
}

/// What the image has; all of it is on every machine.
const IMAGE_PROGRAMS: [&str; 19] = [
    "bash", "cat", "chmod", "chown", "env", "head", "id", "ls", "mkdir", "mount", "readlink", "rm", "setsid", "sleep",
    "stat", "tail", "touch", "umount", "unshare",
];

/// A small image: a shell, a few programs and the libraries that they ask for. Open to every user, as images are.
pub(crate) fn image() -> tempfile::TempDir {
    image_of(&IMAGE_PROGRAMS)
}

/// The same with more programs, as far as they are here.
pub(crate) fn image_with(more: &[&str]) -> tempfile::TempDir {
    let more = more.iter().filter(|program| find_program(program).is_some()).copied();
    image_of(&IMAGE_PROGRAMS.into_iter().chain(more).collect::<Vec<_>>())
}

/// Programs that Debian packages are installed by, and their scripts written in.
const PACKAGE_PROGRAMS: [&str; 9] =
    ["chgrp", "diff", "dpkg", "dpkg-deb", "dpkg-query", "dpkg-split", "ldconfig", "start-stop-daemon", "tar"];

/// An image that Debian packages can be installed in. Nothing where this machine has no such programs to make it of.
pub(crate) fn package_image() -> Option<tempfile::TempDir> {
    find_program("dpkg")?;
    let image = image_of(&[&IMAGE_PROGRAMS[..], &PACKAGE_PROGRAMS].concat());
    let users = "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1::/:/bin/sh\nwww-data:x:33:33::/:/bin/sh\n";
    fs::write(image.path().join("etc/passwd"), users).unwrap();
    fs::write(image.path().join("etc/group"), "root:x:0:\ndaemon:x:1:\nwww-data:x:33:\n").unwrap();
    Some(image)
}

fn find_program(name: &str) -> Option<PathBuf> {
    let folders = ["/bin", "/usr/bin", "/sbin", "/usr/sbin"];
    folders.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.exists())
}

fn image_of(programs: &[&str]) -> tempfile::TempDir {
    let image = tempfile::tempdir().unwrap();
    for folder in ["bin", "etc", "usr/share", "var/data"] {
        fs::create_dir_all(image.path().join(folder)).unwrap();
    }
    let programs = programs.iter().map(|program| {
        let found = find_program(program);
        let found = found.unwrap_or_else(|| panic!("{program} is on every machine"));
        fs::copy(&found, image.path().join("bin").join(program)).unwrap();
        found
    });
    let libraries = Command::new("ldd").args(programs).output().unwrap();
    // A line without a blank before it names the program.
    let lines = String::from_utf8(libraries.stdout).unwrap();
    let words = lines.lines().filter(|line| line.starts_with('\t')).flat_map(str::split_whitespace);
    for word in words.filter(|word| word.starts_with('/')) {
        let target = image.path().join(&word[1..]);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(word, target).unwrap();
    }
    for (link, target) in [
        ("bin/sh", "bash"),
        ("share", "usr/share"),
        ("var/absolute", "/var/data"),
        ("var/missing", "data/missing/deep"),
        ("var/process", "/proc"),
        ("var/upwards", "../../../../../usr/share"),
    ] {
        std::os::unix::fs::symlink(target, image.path().join(link)).unwrap();
    }
    fs::write(image.path().join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\nimage:x:4242:4242::/:/bin/sh\n")
        .unwrap();
    fs::write(image.path().join("etc/settings"), "of the image\n").unwrap();
    let opened = Command::new("chmod").arg("-R").arg("a+rX").arg(image.path()).status().unwrap();
    assert!(opened.success());
    image
}

/// Packs an image into a squashfs and a `.sif`, both in `folder`; says so where the tools for it are missing.
pub(crate) fn pack(test: &str, image: &Path, folder: &Path) -> Option<[PathBuf; 2]> {
    let [squashfs, sif] = ["image.squashfs", "image.sif"].map(|name| folder.join(name));
    let mut mksquashfs = Command::new("mksquashfs");
    mksquashfs.arg(image).arg(&squashfs).args(["-all-root", "-noappend", "-quiet", "-no-progress"]);
    if !mksquashfs.output().is_ok_and(|output| output.status.success()) {
        skip(test, "no mksquashfs here");
        return None;
    }
    let program = ["apptainer", "singularity"]
        .into_iter()
        .find(|program| Command::new(program).arg("version").output().is_ok_and(|output| output.status.success()))?;
    // The number of the processor's kind, as a `.sif` knows it.
    let arch = if cfg!(target_arch = "x86_64") { "2" } else { "4" };
    let (sif_path, squashfs_path) = (sif.to_str()?, squashfs.to_str()?);
    let partition =
        ["--datatype", "4", "--parttype", "2", "--partfs", "1", "--partarch", arch, sif_path, squashfs_path];
    for args in [&["sif", "new", sif_path][..], &[&["sif", "add"][..], &partition].concat()] {
        let made_part = Command::new(program).args(args).output().unwrap();
        assert!(made_part.status.success(), "{}", String::from_utf8_lossy(&made_part.stderr));
    }
    Some([squashfs, sif])
}

/// Writes a program. Another process does it, because a handle of ours could leak into a child that another test is just
/// starting, and a program that is open for writing cannot be executed.
pub(crate) fn script(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("guest");
    let write = "printf '#!/bin/sh\\n%s\\n' \"$2\" > \"$1\" && chmod 755 \"$1\"";
    let status = Command::new("sh").args(["-c", write, "sh"]).arg(&path).arg(text).status().unwrap();
    assert!(status.success());
    path
}
