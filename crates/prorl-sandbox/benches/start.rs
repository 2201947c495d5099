//! Start to hello, and to the end of everything, of a sandbox; beside bubblewrap where it is installed.
//!
//! `prorl bench sandbox` takes the figures that the documents name: it measures the two in turns. This is for comparing one
//! state of the code with another.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::{
    fs,
    io::Write as _,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use criterion::{Criterion, criterion_group, criterion_main};
use prorl_guest::{Guest, VERSION_FLAG};
use prorl_sandbox::{
    Image, NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime, SandboxSpec, SingularityConfig,
    SingularityRuntime,
};
use tokio::time::Instant;

/// How long the guest may take to end everything before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// The user that bubblewrap runs as when root starts it, as our sandboxes do.
const NOBODY: u32 = 65534;

fn namespace(criterion: &mut Criterion) {
    let guest = Guest::install().expect("the guest can be executed here");
    let node = Node::open(NodeConfig::new(guest.path())).expect("a node can be opened here");
    let runtime = NamespaceRuntime::new(node, NamespaceConfig::default());
    sandboxes(criterion, &runtime, &SandboxSpec::new(guest.path()));
}

/// The same through Apptainer, on a directory with nothing but the folders that it insists on.
fn singularity(criterion: &mut Criterion) {
    let guest = Guest::install().expect("the guest can be executed here");
    let node = Node::open(NodeConfig::new(guest.path())).expect("a node can be opened here");
    let runtime = match SingularityRuntime::new(node, SingularityConfig::default()) {
        Ok(runtime) => runtime,
        Err(error) => {
            let _told = writeln!(std::io::stderr(), "skipped singularity: {error}");
            return;
        }
    };
    let image = tempfile::tempdir().expect("there is a folder for temporary files");
    fs::set_permissions(image.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    for name in ["dev", "etc", "proc", "sys", "tmp"] {
        fs::create_dir(image.path().join(name)).expect("it takes a folder");
    }
    let spec = SandboxSpec { image: Image::Directory(image.path().to_owned()), ..SandboxSpec::new(guest.path()) };
    sandboxes(criterion, &runtime, &spec);
}

/// What is measured of every runtime.
fn sandboxes(criterion: &mut Criterion, runtime: &dyn Runtime, spec: &SandboxSpec) {
    let tokio = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("threads can be started");
    let mut group = criterion.benchmark_group(runtime.name());
    group.sample_size(50);
    group.bench_function("start", |bencher| {
        bencher.iter_custom(|n| {
            tokio.block_on(async {
                let mut took = Duration::ZERO;
                for _ in 0..n {
                    let begun = Instant::now();
                    let sandbox = runtime.start(spec).await.expect("sandboxes can be made here");
                    took += begun.elapsed();
                    sandbox.shutdown(GRACE).await.expect("it ends");
                }
                took
            })
        });
    });
    group.bench_function("start and shutdown", |bencher| {
        bencher.iter(|| {
            tokio.block_on(async {
                let sandbox = runtime.start(spec).await.expect("sandboxes can be made here");
                sandbox.shutdown(GRACE).await.expect("it ends");
            });
        });
    });
    group.finish();
}

/// bubblewrap as a whole: it has nothing that could be told from outside but its end.
fn bwrap(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    let guest = folder.path().join("guest");
    fs::File::create(&guest).and_then(|mut file| file.write_all(prorl_guest::bytes())).expect("it takes a file");
    for path in [folder.path(), &guest] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is ours");
    }
    if !bubblewrapped(&guest).status().is_ok_and(|status| status.success()) {
        let _told = writeln!(std::io::stderr(), "skipped bwrap: it is absent or makes no sandbox here");
        return;
    }
    criterion.benchmark_group("bwrap").sample_size(50).bench_function("start and end", |bencher| {
        bencher.iter(|| bubblewrapped(&guest).status().expect("it ran before"));
    });
}

fn bubblewrapped(guest: &Path) -> Command {
    let mut command = Command::new("bwrap");
    command
        .args(["--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"])
        .args(["--tmpfs", "/tmp", "--tmpfs", "/workspace", "--chdir", "/workspace", "--ro-bind"])
        .arg(guest)
        .args(["/guest", "--", "/guest", VERSION_FLAG])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    if nix::unistd::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

criterion_group!(benches, namespace, bwrap, singularity);
criterion_main!(benches);
