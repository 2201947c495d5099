//! What keeps a sandbox from standing is said by name, and nothing is left of the attempt.

use std::{
    fs,
    io::{IoSlice, Read as _},
    os::{
        fd::AsRawFd as _,
        unix::{fs::PermissionsExt as _, net::UnixStream},
    },
    path::Path,
    process::Command,
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::{
        resource::{Resource, setrlimit},
        socket::{ControlMessage, MsgFlags, sendmsg},
    },
};
use prorl_core::{
    FailureClass, frame,
    hello::{Greeting, StartFailure},
};
use prorl_sandbox::{Bind, Image, Runtime as _, SandboxError, SandboxSpec};
use tokio::time::Instant;

use crate::support::{
    adopt_orphans, alone, assert_no_children, assert_passed, is_alone, is_root, runtime, script, skip, spec,
};

async fn refusal(spec: &SandboxSpec) -> SandboxError {
    runtime().start(spec).await.expect_err("this must not start")
}

#[tokio::test]
async fn a_missing_guest_is_named() {
    let error = refusal(&SandboxSpec::new("/nonexistent/guest")).await;
    assert_eq!(error.to_string(), "failed to open guest /nonexistent/guest");
    assert!(matches!(refusal(&SandboxSpec::new("/tmp")).await, SandboxError::Guest { .. }));
}

#[tokio::test]
async fn a_guest_that_cannot_be_executed_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    fs::write(&path, "not a program").unwrap();
    let error = refusal(&SandboxSpec::new(&path)).await;
    assert!(matches!(&error, SandboxError::Spawn { path: named, .. } if *named == path), "{error:?}");
}

#[tokio::test]
async fn a_foreign_guest_is_no_guest() {
    let error = refusal(&SandboxSpec::new("/bin/true")).await;
    assert_eq!(error.to_string(), "guest ended before its hello (exit status: 0)");
    assert_eq!(error.failure_class(), FailureClass::Sandbox);
    // What it says goes out where its channel came in.
    let folder = tempfile::tempdir().unwrap();
    for (words, reason) in [
        ("\\377\\377\\377\\377", "frame of 4294967295 bytes is above the limit of 4194304"),
        ("\\0\\0\\2\\0", "hello of 131072 bytes"),
        ("\\1\\0\\0\\0\\5", "frame body does not decode"),
    ] {
        let guest = script(folder.path(), &format!("printf '{words}' >&0; exec sleep 1000"));
        let error = refusal(&SandboxSpec::new(guest)).await;
        assert_eq!(error.to_string(), format!("guest does not speak our protocol: {reason}"));
        assert_eq!(error.failure_class(), FailureClass::Internal);
    }
}

#[tokio::test]
async fn a_guest_that_says_nothing_is_killed_in_time() {
    const ME: &str = "refusals::a_guest_that_says_nothing_is_killed_in_time";
    if !is_alone(ME) {
        return assert_passed(&alone(ME, &[]).output().unwrap());
    }
    adopt_orphans();
    let folder = tempfile::tempdir().unwrap();
    let mut spec = SandboxSpec::new(script(folder.path(), "trap '' TERM HUP; while :; do sleep 1000; done"));
    spec.start_timeout = Duration::from_millis(200);
    let begun = Instant::now();
    let error = refusal(&spec).await;
    assert_eq!(error.to_string(), "guest not ready after 200ms");
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_no_children().await;
}

#[tokio::test]
async fn an_image_that_is_not_there_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [Path::new("/nonexistent/image"), &file] {
        let error = refusal(&SandboxSpec { image: Image::Directory(path.to_owned()), ..spec() }).await;
        assert_eq!(error.to_string(), format!("failed to open image {}", path.display()));
        assert_eq!(error.failure_class(), FailureClass::Image);
    }
}

/// Root can open it, but the sandbox's user cannot.
#[tokio::test]
async fn an_image_closed_to_the_sandbox_user_is_named() {
    if !is_root() {
        return skip("an_image_closed_to_the_sandbox_user_is_named", "only root can open what its sandboxes cannot");
    }
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    fs::create_dir(&image).unwrap();
    fs::set_permissions(&image, fs::Permissions::from_mode(0o000)).unwrap();
    let error = refusal(&SandboxSpec { image: Image::Directory(image.clone()), ..spec() }).await;
    assert!(matches!(&error, SandboxError::Image { path, .. } if *path == image), "{error:?}");
}

#[tokio::test]
async fn values_that_no_sandbox_can_have_are_named() {
    let bind =
        |source: &str, target: &str| vec![Bind { source: source.into(), target: target.into(), writable: false }];
    let env = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    let memory_mb = nix::sys::sysinfo::sysinfo().unwrap().ram_total() >> 20;
    let size = |what: &str, found: &str| {
        let range = format!("1 MiB to {memory_mb} MiB (this machine's memory, which holds what is written)");
        format!("invalid {what}: expected {range}, found {found}")
    };
    let cases = [
        (SandboxSpec { env: env("A", "secret\0"), ..spec() }, "invalid env: value of A holds a NUL byte"),
        (SandboxSpec { env: env("A=B", ""), ..spec() }, "invalid env: \"A=B\" is no name of a variable"),
        (SandboxSpec { env: env("", ""), ..spec() }, "invalid env: \"\" is no name of a variable"),
        (
            SandboxSpec { hostname: "a b".to_owned(), ..spec() },
            "invalid hostname: \"a b\" is not 1 to 63 letters, digits and '-'",
        ),
        (SandboxSpec { layer_bytes: 0, ..spec() }, &size("layer_bytes", "0 MiB")),
        (SandboxSpec { tmp_bytes: 17, ..spec() }, &size("tmp_bytes", "17 bytes")),
        (SandboxSpec { start_timeout: Duration::ZERO, ..spec() }, "invalid start_timeout: zero"),
        (SandboxSpec { max_life: Duration::ZERO, ..spec() }, "invalid max_life: zero"),
        (SandboxSpec { binds: bind("usr", "/x"), ..spec() }, "invalid binds: source usr is not absolute"),
        (
            SandboxSpec { binds: bind("/usr", "/x/../y"), ..spec() },
            "invalid binds: target /x/../y is not an absolute path without '..'",
        ),
        (
            SandboxSpec { binds: bind("/usr", "/proc/x"), ..spec() },
            "invalid binds: target /proc/x belongs to the sandbox itself",
        ),
        (SandboxSpec { binds: bind("/usr", "/"), ..spec() }, "invalid binds: target / belongs to the sandbox itself"),
        (SandboxSpec { binds: bind("/nonexistent/x", "/x"), ..spec() }, "failed to open bind source /nonexistent/x"),
    ];
    for (spec, text) in cases {
        let error = refusal(&spec).await;
        assert_eq!(error.to_string(), text);
        assert_eq!(error.failure_class(), FailureClass::Handler);
    }
}

#[tokio::test]
async fn an_environment_above_a_frame_is_refused_and_a_large_one_is_not() {
    let env = |bytes: usize| vec![("LARGE".to_owned(), "x".repeat(bytes))];
    let error = refusal(&SandboxSpec { env: env(5 << 20), ..spec() }).await;
    assert!(matches!(error, SandboxError::Invalid { what: "env", .. }), "{error:?}");
    let large = SandboxSpec { env: env(1 << 20), ..spec() };
    runtime().start(&large).await.unwrap().shutdown(Duration::from_secs(2)).await.unwrap();
}

/// In a user namespace of its own, whose limit the test may set, as an ordinary user.
#[tokio::test]
async fn a_machine_without_user_namespaces_is_told_what_forbids_them() {
    const ME: &str = "refusals::a_machine_without_user_namespaces_is_told_what_forbids_them";
    if is_alone(ME) {
        let error = refusal(&spec()).await;
        assert!(matches!(error, SandboxError::UserNamespaces { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("user.max_user_namespaces is 0"), "{text}");
        return;
    }
    // In a shell that replaces itself: the limit is the new namespace's own, and its maker may set it.
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

#[test]
fn a_guest_whose_files_cannot_travel_says_so() {
    const ME: &str = "refusals::a_guest_whose_files_cannot_travel_says_so";
    if !is_alone(ME) {
        return assert_passed(&alone(ME, &[]).output().unwrap());
    }
    // What is on its way is counted for a user, and root may have as much as it likes.
    if is_root() {
        nix::unistd::setuid(nix::unistd::Uid::from_raw(65534)).unwrap();
    }
    setrlimit(Resource::RLIMIT_NOFILE, 64, 64).unwrap();
    let null = fs::File::open("/dev/null").unwrap();
    let (_nobody_reads, sender) = UnixStream::pair().unwrap();
    let refused = loop {
        let files = [null.as_raw_fd(); 16];
        let control = [ControlMessage::ScmRights(&files)];
        let sent = sendmsg::<()>(sender.as_raw_fd(), &[IoSlice::new(b"x")], &control, MsgFlags::empty(), None);
        if let Err(error) = sent {
            break error;
        }
    };
    assert_eq!(refused, Errno::ETOOMANYREFS);

    let (mut host, guest) = UnixStream::pair().unwrap();
    let failure = |step: &str, errno| StartFailure { step: step.to_owned(), target: String::new(), errno };
    let greeting = Greeting::Failed(failure("any", 0));
    let error = prorl_sandbox::init::greet(&guest.into(), &greeting, &[null.into()]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ETOOMANYREFS));
    let mut heard = Vec::new();
    host.read_to_end(&mut heard).unwrap();
    let (header, body) = heard.split_first_chunk().unwrap();
    assert_eq!(frame::body_len(*header).unwrap(), body.len());
    let told: Greeting = frame::decode(body).unwrap();
    assert_eq!(told, Greeting::Failed(failure("send open files", libc::ETOOMANYREFS)));
}
