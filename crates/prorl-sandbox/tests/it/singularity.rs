//! What only the Singularity runtime does: image files, FUSE helpers, and a program of somebody else's.

use std::{
    ffi::OsStr,
    fs::{self, File},
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use prorl_core::FailureClass;
use prorl_sandbox::{
    Image, LauncherFault, NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime as _, SandboxError, SandboxSpec,
    SingularityConfig, SingularityRuntime,
};
use prorl_tools::host::ExecSpec;
use rustix::process::Signal;
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};

use crate::{
    contract::{Ground, assert_no_trace, open_folder},
    support::{
        Handle, LONG, Live, alone, assert_all_end, assert_passed, fresh_node, in_session, is_alone, is_root, node,
        pack, script, skip, spec,
    },
};

fn of_file(ground: &Ground, path: &Path) -> SandboxSpec {
    SandboxSpec { image: Image::File(path.to_owned()), ..ground.spec() }
}

/// Starts a sandbox from an image file; says so where FUSE cannot be had.
async fn start_file(test: &str, ground: &Ground, path: &Path) -> Option<Live> {
    match ground.runtime.start(&of_file(ground, path)).await {
        Ok(sandbox) => Some(Live::of(sandbox)),
        Err(error @ SandboxError::Launcher { fault: LauncherFault::Fuse, .. }) => {
            skip(test, &error.to_string());
            None
        }
        Err(error) => panic!("{error}: {error:?}"),
    }
}

/// Numbers of a sandbox's processes outside that are FUSE helpers.
fn fuse_helpers(live: &Live) -> Vec<u32> {
    let is_helper = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().contains("fuse");
    in_session(live.sandbox.facts().outer_pid).into_iter().filter(is_helper).collect()
}

/// The process that the owner has started.
fn launcher(live: &Live) -> Handle {
    let owner = live.sandbox.facts().outer_pid;
    let children = fs::read_to_string(format!("/proc/{owner}/task/{owner}/children")).unwrap();
    Handle::open(children.trim().parse().expect("an owner has one child")).unwrap()
}

#[tokio::test]
async fn image_files_are_roots_like_any_other() {
    const ME: &str = "singularity::image_files_are_roots_like_any_other";
    let Some(ground) = Ground::singularity(ME) else { return };
    let folder = open_folder();
    let Some(files) = pack(ME, ground.image.path(), folder.path()) else { return };
    for (file, name) in files.iter().zip([&b"a:b,c\nd \xff.squashfs"[..], b"e:f,g\nh \xff"]) {
        let file = {
            let renamed = folder.path().join(OsStr::from_bytes(name));
            fs::rename(file, &renamed).unwrap();
            renamed
        };
        let Some(live) = start_file(ME, &ground, &file).await else { return };
        assert_eq!(fuse_helpers(&live).len(), 1);
        assert_eq!(live.sh("cat /etc/settings; touch /newly /workspace/x /etc/x && echo ok").await, "of the image\nok");
        assert_eq!(live.sh("rm /etc/settings; ls /etc/settings 2>/dev/null; id -un").await, "agent");
        live.leave_stubborn_children().await;
        let processes = live.processes();
        live.sandbox.shutdown(Duration::from_secs(3)).await.unwrap();
        assert_no_trace(&ground, &live);
        assert_all_end(processes).await;
    }
}

#[tokio::test]
async fn no_death_leaves_a_fuse_helper() {
    const ME: &str = "singularity::no_death_leaves_a_fuse_helper";
    let Some(ground) = Ground::singularity(ME) else { return };
    let folder = open_folder();
    let Some([file, _]) = pack(ME, ground.image.path(), folder.path()) else { return };
    for death in ["drop", "launcher", "owner", "guest", "helper"] {
        let Some(live) = start_file(ME, &ground, &file).await else { return };
        live.leave_stubborn_children().await;
        let helpers = fuse_helpers(&live);
        assert_eq!(helpers.len(), 1);
        let processes = live.processes();
        let kill = |pid: u32| Handle::open(pid).unwrap().signal(Signal::KILL);
        match death {
            "drop" => {
                drop(live);
                assert_all_end(processes).await;
                continue;
            }
            "launcher" => launcher(&live).signal(Signal::KILL),
            "owner" => kill(live.sandbox.facts().outer_pid),
            "guest" => kill(live.sandbox.facts().hello.host_pid),
            _ => kill(helpers[0]),
        }
        timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
        assert_no_trace(&ground, &live);
        assert_all_end(processes).await;
    }
}

/// What is in the image cannot be read any more, so that what a task makes of that is no result.
#[tokio::test]
async fn the_death_of_a_fuse_helper_is_the_sandboxs() {
    const ME: &str = "singularity::the_death_of_a_fuse_helper_is_the_sandboxs";
    let Some(ground) = Ground::singularity(ME) else { return };
    let folder = open_folder();
    let Some([file, _]) = pack(ME, ground.image.path(), folder.path()) else { return };
    let Some(live) = start_file(ME, &ground, &file).await else { return };
    // A task that is not there to read from the image goes on as if nothing had happened.
    let busy = ExecSpec::new(["sh", "-c", "while :; do :; done"]);
    let mut call = std::pin::pin!(live.tools.exec(&busy, LONG));
    assert!(timeout(Duration::from_millis(200), &mut call).await.is_err());
    Handle::open(fuse_helpers(&live)[0]).unwrap().signal(Signal::KILL);
    let ended = timeout(Duration::from_secs(5), call).await.unwrap();
    assert!(ended.is_err(), "{ended:?}");
    timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
    assert!(live.tools.exec(&ExecSpec::new(["true"]), LONG).await.is_err());
    assert_no_trace(&ground, &live);
}

/// A wrapper on the way to the launcher that drops what it was told.
#[tokio::test]
async fn a_launcher_that_makes_no_user_namespace_is_refused() {
    let folder = open_folder();
    let deed = "for arg; do case $arg in *:/.prorl/guest:ro) exec \"${arg%:/.prorl/guest:ro}\" --launched;; esac; done";
    let runtime = stand_in(folder.path(), deed);
    let error = runtime.start(&of_empty_image(folder.path())).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("it started the guest without a user namespace around it; name Apptainer's"), "{text}");
    assert_eq!(error.failure_class(), FailureClass::Sandbox);
}

#[tokio::test]
async fn a_folder_that_the_sandboxs_user_cannot_pass_is_named() {
    const ME: &str = "singularity::a_folder_that_the_sandboxs_user_cannot_pass_is_named";
    let (true, Some(ground)) = (is_root(), Ground::singularity(ME)) else {
        return skip(ME, "only root runs sandboxes as somebody else, by Apptainer");
    };
    let closed = tempfile::tempdir().unwrap();
    fs::set_permissions(closed.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let dir = closed.path().join("deep/prorl");
    fs::create_dir(closed.path().join("deep")).unwrap();
    let node = Node::open(NodeConfig { dir, ..NodeConfig::new(spec().guest) }).unwrap();
    let runtime = SingularityRuntime::new(node, SingularityConfig::default()).unwrap();
    let error = runtime.start(&ground.spec()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "folder {} is closed to user 65534, who sandboxes run as; let everybody pass through it (chmod o+x), or name \
             another folder for the node (--run-dir or TMPDIR)",
            closed.path().display()
        )
    );
}

/// As in a program that does not care how its children end: the kernel forgets them at once.
#[tokio::test]
async fn a_host_that_ignores_its_childrens_ends_will_do() {
    const ME: &str = "singularity::a_host_that_ignores_its_childrens_ends_will_do";
    if !is_alone(ME) {
        let ignoring = ["env", "--ignore-signal=CHLD"];
        if !Command::new(ignoring[0]).args([ignoring[1], "true"]).output().is_ok_and(|ran| ran.status.success()) {
            return skip(ME, "the program env has no --ignore-signal here");
        }
        return assert_passed(&alone(ME, &ignoring).output().unwrap());
    }
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() >> 16 & 1, 1, "{ignored}");
    let error = of_program("/bin/true".into()).unwrap_err();
    assert!(matches!(&error, SandboxError::Program { source, .. } if source.raw_os_error().is_none()), "{error:?}");
    let runtime = match SingularityRuntime::new(node(), SingularityConfig::default()) {
        Ok(runtime) => runtime,
        Err(error @ SandboxError::Program { .. }) => return skip(ME, &format!("{error:?}")),
        Err(error) => panic!("{error:?}"),
    };
    let image = open_folder();
    fs::create_dir(image.path().join("dev")).unwrap();
    fs::create_dir(image.path().join("proc")).unwrap();
    Live::start_on(&runtime, &of_empty_image(image.path())).await.shut().await;
}

#[tokio::test]
async fn the_death_of_a_launcher_ends_the_sandbox() {
    let Some(ground) = Ground::singularity("singularity::the_death_of_a_launcher_ends_the_sandbox") else { return };
    for signal in [Signal::KILL, Signal::TERM] {
        let live = ground.start(&ground.spec()).await;
        live.leave_stubborn_children().await;
        let processes = live.processes();
        launcher(&live).signal(signal);
        if signal == Signal::TERM {
            // It passes that on to process 1 of its namespace, which nothing but a hang-up or a kill ends.
            live.sandbox.shutdown(Duration::from_secs(3)).await.unwrap();
        }
        timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
        assert_no_trace(&ground, &live);
        assert_all_end(processes).await;
    }
}

#[tokio::test]
async fn eight_at_once() {
    let Some(ground) = Ground::singularity("singularity::eight_at_once") else { return };
    let mut starts = JoinSet::new();
    for number in 0..8 {
        let (runtime, spec) = (ground.runtime.clone(), ground.spec());
        starts.spawn(async move {
            let live = Live::start_on(&*runtime, &spec).await;
            assert_eq!(live.sh(&format!("echo {number} > note; cat note")).await, number.to_string());
            live.shut().await;
        });
    }
    assert_eq!(starts.join_all().await.len(), 8);
}

#[tokio::test]
async fn files_that_are_no_images_are_named() {
    const ME: &str = "singularity::files_that_are_no_images_are_named";
    let Some(ground) = Ground::singularity(ME) else { return };
    let folder = open_folder();
    let text = folder.path().join("text.sif");
    fs::write(&text, "no image").unwrap();
    let mut cases = vec![(text, "is no image that it knows")];
    if let Some([squashfs, _]) = pack(ME, ground.image.path(), folder.path()) {
        File::options().write(true).open(&squashfs).unwrap().set_len(8192).unwrap();
        cases.push((squashfs, "is damaged or cut short"));
    }
    for (path, part) in cases {
        let error = ground.runtime.start(&of_file(&ground, &path)).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains(part) && text.contains(path.to_str().unwrap()), "{text}");
        assert!(text.contains("it said last: FATAL"), "{text}");
        if !matches!(error, SandboxError::Launcher { fault: LauncherFault::Fuse, .. }) {
            assert_eq!(error.failure_class(), FailureClass::Image);
        }
    }
    let missing = ground.runtime.start(&of_file(&ground, Path::new("/nonexistent.sif"))).await.unwrap_err();
    assert_eq!(missing.to_string(), "failed to open image /nonexistent.sif");
    assert_eq!(fs::read_dir(ground.node.folder().join("boxes")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(ground.node.folder().join("run")).unwrap().count(), 0);
}

#[tokio::test]
async fn images_that_a_runtime_cannot_take_are_refused_with_advice() {
    let folder = open_folder();
    let file = folder.path().join("image.sif");
    fs::write(&file, "").unwrap();
    let namespace = NamespaceRuntime::new(node(), NamespaceConfig::default());
    let error = namespace.start(&SandboxSpec { image: Image::File(file.clone()), ..spec() }).await.unwrap_err();
    assert_eq!(error.to_string(), format!("failed to open image {}", file.display()));
    assert_eq!(error.failure_class(), FailureClass::Image);
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("unsquashfs") && cause.contains("singularity runtime"), "{cause}");

    let Some(ground) = Ground::singularity("images_that_a_runtime_cannot_take_are_refused_with_advice") else { return };
    let error = ground.runtime.start(&spec()).await.unwrap_err();
    assert!(error.to_string().starts_with("invalid image: the singularity runtime has no image of its own"), "{error}");
}

fn of_program(program: PathBuf) -> Result<SingularityRuntime, SandboxError> {
    SingularityRuntime::new(node(), SingularityConfig { program: Some(program), ..SingularityConfig::default() })
}

#[test]
fn a_node_whose_name_the_launcher_would_take_apart_is_refused_by_name() {
    for name in ["with:colon", "with,comma", "with\"quote", "with\nnewline"] {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join(name);
        let node = Node::open(NodeConfig { dir: dir.clone(), ..NodeConfig::new(spec().guest) }).unwrap();
        let error = SingularityRuntime::new(node, SingularityConfig::default()).unwrap_err();
        assert!(matches!(&error, SandboxError::Folder { path, .. } if path.starts_with(&dir)), "{error}");
    }
}

#[test]
fn a_program_that_is_none_is_named() {
    for path in ["/nonexistent/apptainer", "/tmp", "/bin/true", "/etc/passwd"] {
        let error = of_program(path.into()).unwrap_err();
        assert_eq!(error.to_string(), format!("failed to use {path} as Apptainer or Singularity"));
        assert_eq!(error.failure_class(), FailureClass::Sandbox);
    }
}

/// A program that answers as Apptainer does, and does `deed` when it is to launch something.
fn stand_in(folder: &Path, deed: &str) -> SingularityRuntime {
    let build = "PACKAGE_NAME=apptainer\\nPACKAGE_VERSION=0\\nAPPTAINER_CONF_FILE=/nonexistent\\n";
    let text = format!("if [ \"$1\" = buildcfg ]; then printf '{build}'; exit; fi\n{deed}");
    of_program(script(folder, &text)).unwrap()
}

fn of_empty_image(folder: &Path) -> SandboxSpec {
    SandboxSpec { image: Image::Directory(folder.to_owned()), start_timeout: LONG, ..spec() }
}

#[tokio::test]
async fn the_last_words_of_a_launcher_are_kept() {
    let folder = open_folder();
    let deed = "i=0; while [ $i -lt 3000 ]; do echo \"line $i\" >&2; i=$((i+1)); done; printf '\\033[31mFATAL:\\033[0m odd\\n' >&2; exit 255";
    let runtime = stand_in(folder.path(), deed);
    let error = runtime.start(&of_empty_image(folder.path())).await.unwrap_err();
    let text = error.to_string();
    assert!(text.ends_with("line 2999 | FATAL: odd") && text.contains("it said last: line 0 | "), "{text}");
    let SandboxError::Launcher { program, output, fault, .. } = &error else { panic!("{error:?}") };
    assert_eq!((program.as_path(), *fault), (folder.path().join("guest").as_path(), LauncherFault::Other));
    assert!((1500..=2048).contains(&output.len()), "{}", output.len());

    let runtime = stand_in(folder.path(), "exit 3");
    let error = runtime.start(&of_empty_image(folder.path())).await.unwrap_err();
    assert!(error.to_string().ends_with("it said last: it ended without a word"), "{error}");
}

#[tokio::test]
async fn a_launcher_that_does_not_come_to_an_end_is_killed_with_its_children() {
    let folder = open_folder();
    // A number of seconds that no other test's program has in its arguments.
    let seconds = format!("1{:07}", std::process::id());
    let deed = format!(
        "trap '' TERM HUP; echo 'waiting for a lock' >&2; setsid sleep {seconds} & sleep {seconds} & \
         while :; do sleep {seconds}; done"
    );
    let runtime = stand_in(folder.path(), &deed);
    let start_timeout = Duration::from_millis(500);
    let begun = Instant::now();
    let error = runtime.start(&SandboxSpec { start_timeout, ..of_empty_image(folder.path()) }).await.unwrap_err();
    assert_eq!(error.to_string(), "guest not ready after 500ms; it said last: waiting for a lock");
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    let words = format!("sleep\0{seconds}\0");
    let is_left = |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|told| told == words.as_bytes());
    assert_eq!(crate::support::all_pids().filter(is_left).collect::<Vec<_>>(), Vec::<u32>::new());
}

/// Where Apptainer has a set-uid part it takes no configuration but root's, so it is told by flags alone.
#[tokio::test]
async fn a_launcher_that_takes_no_configuration_will_do() {
    const ME: &str = "singularity::a_launcher_that_takes_no_configuration_will_do";
    let Some(ground) = Ground::singularity(ME) else { return };
    let Ok(real) = SingularityRuntime::new(fresh_node(), SingularityConfig::default()) else { return };
    let folder = open_folder();
    let starter = folder.path().join("libexec/apptainer/bin/starter-suid");
    fs::create_dir_all(starter.parent().unwrap()).unwrap();
    fs::write(&starter, "").unwrap();
    fs::set_permissions(&starter, fs::Permissions::from_mode(0o4755)).unwrap();
    let build = format!(
        "PACKAGE_NAME=apptainer\\nLIBEXECDIR={}\\nAPPTAINER_CONF_FILE=/x\\nAPPTAINER_SUID_INSTALL=1\\n",
        folder.path().join("libexec").display()
    );
    let text = format!(
        "if [ \"$1\" = buildcfg ]; then printf '{build}'; exit; fi\n[ \"$2\" = exec ] || exit 9\nexec {} \"$@\"",
        real.program().display()
    );
    let runtime = of_program(script(folder.path(), &text)).unwrap();
    fs::create_dir(ground.image.path().join("dev")).unwrap();
    fs::create_dir(ground.image.path().join("proc")).unwrap();
    let live = Live::start_on(&runtime, &ground.spec()).await;
    assert_eq!(live.sh("cat /etc/settings; touch /newly /etc/x x /usr/x && echo ok").await, "of the image\nok");
    assert!(live.sh("cat /etc/hosts").await.contains("localhost sandbox"));
    live.shut().await;
}

#[tokio::test]
async fn forbidden_user_namespaces_are_named() {
    const ME: &str = "singularity::forbidden_user_namespaces_are_named";
    let Some(ground) = Ground::singularity(ME) else { return };
    if is_alone(ME) {
        let error = ground.runtime.start(&ground.spec()).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, SandboxError::Launcher { fault: LauncherFault::UserNamespaces, .. }), "{text}");
        assert!(text.contains("user.max_user_namespaces is 0; raise it as root"), "{text}");
        assert!(text.contains("it said last: "), "{text}");
        return;
    }
    let limit = "echo 0 > /proc/sys/user/max_user_namespaces && exec \"$@\"";
    let inner = ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", limit, "sh"];
    let ordinary = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let wrapper = if is_root() { [&ordinary[..], &inner[..]].concat() } else { inner.to_vec() };
    let mut probe = Command::new(wrapper[0]);
    probe.args(&wrapper[1..]).arg("test").arg("-x").arg(std::env::current_exe().unwrap());
    if !probe.output().is_ok_and(|output| output.status.success()) {
        return skip(ME, "no setpriv and unshare here, or this program is closed to other users");
    }
    assert_passed(&alone(ME, &wrapper).output().unwrap());
}

#[tokio::test]
async fn forbidden_fuse_is_named() {
    const ME: &str = "singularity::forbidden_fuse_is_named";
    if !is_root() {
        return skip(ME, "only root can close /dev/fuse");
    }
    if !is_alone(ME) {
        return assert_passed(&alone(ME, &["unshare", "--mount", "--propagation", "private"]).output().unwrap());
    }
    let Some(ground) = Ground::singularity(ME) else { return };
    let folder = open_folder();
    let Some([file, _]) = pack(ME, ground.image.path(), folder.path()) else { return };
    let closed = folder.path().join("fuse");
    fs::write(&closed, "").unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    let flags = nix::mount::MsFlags::MS_BIND;
    nix::mount::mount(Some(&closed), Path::new("/dev/fuse"), None::<&str>, flags, None::<&str>).unwrap();
    let error = ground.runtime.start(&of_file(&ground, &file)).await.unwrap_err();
    nix::mount::umount("/dev/fuse").unwrap();
    let text = error.to_string();
    assert!(matches!(error, SandboxError::Launcher { fault: LauncherFault::Fuse, .. }), "{text}");
    assert!(text.contains("chmod 666 /dev/fuse") && text.contains("unpacked directory"), "{text}");
}
