//! Images of registries, fetched by a real Apptainer from a registry on this machine, and by programs that fail.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{fd::AsFd as _, unix::fs::PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use nix::poll::{PollFd, PollFlags};

use super::support::{Tar, World, chain, gzip, layout, skip, store_with_guest};
use crate::{
    images::{Cancel, ImageError, Progress, Quiet, Source, Unpacker},
    sys::poll_patiently,
};

/// A registry that has the blobs of one layout, whatever name they are asked for by.
struct Registry {
    address: SocketAddr,
    state: Arc<State>,
    server: Option<JoinHandle<()>>,
}

struct State {
    dir: PathBuf,
    is_over: AtomicBool,
    n_manifests: AtomicUsize,
}

impl Registry {
    fn start(dir: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state =
            Arc::new(State { dir: dir.to_owned(), is_over: AtomicBool::new(false), n_manifests: AtomicUsize::new(0) });
        let shared = Arc::clone(&state);
        let server = thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.is_over.load(Ordering::Relaxed) {
                    break;
                }
                // A client that goes away has what it wants.
                let _ = shared.answer(stream.unwrap());
            }
        });
        Self { address, state, server: Some(server) }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        self.server.take().unwrap().join().unwrap();
    }
}

impl State {
    /// Answers one request. Nobody keeps the connection.
    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
        for line in lines {
            if line?.is_empty() {
                break;
            }
        }
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (status, kind, body) = match path.rsplit('/').collect::<Vec<_>>()[..] {
            ["", "v2", ..] => ("200 OK", "application/json".to_owned(), b"{}".to_vec()),
            [reference, "manifests", ..] => self.manifest(reference),
            [digest, "blobs", ..] => self.blob(digest, "application/octet-stream"),
            _ => ("404 Not Found", "text/plain".to_owned(), Vec::new()),
        };
        let head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n", body.len());
        write!(stream, "{head}Connection: close\r\n\r\n")?;
        if method == "GET" { stream.write_all(&body) } else { Ok(()) }
    }

    fn blob(&self, digest: &str, kind: &str) -> (&'static str, String, Vec<u8>) {
        match fs::read(self.dir.join("blobs/sha256").join(digest.trim_start_matches("sha256:"))) {
            Ok(body) => ("200 OK", kind.to_owned(), body),
            Err(_) => ("404 Not Found", "text/plain".to_owned(), Vec::new()),
        }
    }

    fn manifest(&self, reference: &str) -> (&'static str, String, Vec<u8>) {
        self.n_manifests.fetch_add(1, Ordering::Relaxed);
        let index: serde_json::Value = serde_json::from_slice(&fs::read(self.dir.join("index.json")).unwrap()).unwrap();
        let digest = if reference.starts_with("sha256:") {
            reference
        } else {
            index["manifests"][0]["digest"].as_str().unwrap()
        };
        self.blob(digest, "application/vnd.oci.image.manifest.v1+json")
    }
}

fn has_apptainer(test: &str) -> bool {
    let is_there = Command::new("apptainer").arg("version").output().is_ok_and(|output| output.status.success());
    if !is_there {
        skip(test, "no apptainer here");
    }
    is_there
}

fn runnable(text: &str) -> Vec<u8> {
    let tar = Tar::default().folder("bin", 0o755).folder("etc", 0o755).folder("tmp", 0o1777);
    let shell = fs::read("/bin/busybox").or_else(|_| fs::read("/usr/bin/busybox")).unwrap_or_default();
    gzip(&tar.mode_file("bin/sh", &shell, 0o755).file("etc/name", text.as_bytes()).end())
}

#[test]
fn a_registry_is_asked_once_and_again_when_told_to() {
    if !has_apptainer("a_registry_is_asked_once_and_again_when_told_to") {
        return;
    }
    for world in [World::new(), World::with_guest()] {
        ask_once(world);
    }
}

fn ask_once(mut world: World) {
    layout(&world.path("layout"), &[runnable("first")]);
    let registry = Registry::start(&world.path("layout"));
    let source = format!("docker://{}/made/by-test", registry.address);
    world.unpacker.no_https = true;
    let image = world.unpack(&source).unwrap_or_else(|error| panic!("{}", chain(&error)));
    let name = |root: &Path| fs::read_to_string(root.join("etc/name")).unwrap();
    assert_eq!(name(image.root()), "first");
    assert_eq!(image.filled().source, source);
    assert_eq!(image.filled().env, [("GREETING", "good day"), ("PATH", "/bin")].map(|(a, b)| (a.into(), b.into())));
    assert_eq!(image.filled().notes, Vec::<String>::new());
    let beside = fs::read_dir(image.root().parent().unwrap()).unwrap();
    let beside: Vec<_> = beside.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!beside.iter().any(|name| name == "pull"), "{beside:?}");

    let n_asked = registry.state.n_manifests.load(Ordering::Relaxed);
    assert!(n_asked > 0);
    fs::remove_dir_all(world.path("layout")).unwrap();
    layout(&world.path("layout"), &[runnable("second")]);
    assert_eq!(world.unpack(&source).unwrap(), image);
    assert_eq!(registry.state.n_manifests.load(Ordering::Relaxed), n_asked);

    world.unpacker.refresh = true;
    let newer = world.unpack(&source).unwrap();
    assert_eq!(name(newer.root()), "second");
    world.unpacker.refresh = false;
    assert_eq!(world.unpack(&source).unwrap(), newer);
}

#[test]
fn a_registry_without_the_image_has_its_say() {
    if !has_apptainer("a_registry_without_the_image_has_its_say") {
        return;
    }
    for mut world in [World::new(), World::with_guest()] {
        layout(&world.path("layout"), &[runnable("first")]);
        let registry = Registry::start(&world.path("layout"));
        world.unpacker.no_https = true;
        fs::remove_dir_all(world.path("layout/blobs")).unwrap();
        let source = format!("docker://{}/made/by-test:1", registry.address);
        world.assert_refused(&source, &["apptainer", "could not fetch it", "404", "copy the .sif here"]);
    }
}

/// Writes a program by another process, as one that is open for writing cannot be executed.
fn program(path: &Path, text: &str) {
    let write = "printf '#!/bin/sh\\n%s\\n' \"$2\" > \"$1\" && chmod 755 \"$1\"";
    assert!(Command::new("sh").args(["-c", write, "sh"]).arg(path).arg(text).status().unwrap().success());
    assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o755);
}

#[test]
fn a_program_that_fails_or_is_missing_is_named_with_advice() {
    let alone = (World::new(), "cannot be started", "exit status: 7");
    let owned = (World::with_guest(), "failed to execute program", "ended with code 7");
    for (mut world, absent, failed) in [alone, owned] {
        world.unpacker.apptainer = Some(world.path("absent"));
        world.assert_refused("docker://a", &["absent", absent, "apptainer pull image.sif docker://a:latest"]);
        program(&world.path("fails"), "echo its first words; echo its last words >&2; exit 7");
        world.unpacker.apptainer = Some(world.path("fails"));
        world.assert_refused("docker://a", &["fails", failed, "its first words | its last words"]);
        program(&world.path("mute"), "exit 0");
        world.unpacker.apptainer = Some(world.path("mute"));
        world.assert_refused("docker://a", &["image.sif", "No such file"]);
        program(&world.path("lies"), "for last; do file=$out; out=$last; done; echo no image > \"$file\"");
        world.unpacker.apptainer = Some(world.path("lies"));
        world.assert_refused("docker://a", &["docker://a"]);
    }
}

#[tokio::test]
async fn a_fetch_that_nobody_waits_for_is_ended_with_its_children() {
    for world in [World::new(), World::with_guest()] {
        drop_fetch(world).await;
    }
}

/// Cancels as soon as the fetching has begun to write into a FIFO that the test reads.
async fn drop_fetch(mut world: World) {
    let pids = world.path("pids");
    assert!(Command::new("mkfifo").arg(&pids).status().unwrap().success());
    // A child of its own session does not hear what its group is told.
    let text = format!("setsid sh -c 'trap \"\" TERM; sleep 1000' & echo $$ $! > {}; wait", pids.display());
    program(&world.path("slow"), &text);
    world.unpacker.apptainer = Some(world.path("slow"));
    let source = Source::parse("docker://a").unwrap();
    let unpacker = world.unpacker.clone();
    let mut work = Box::pin(unpacker.unpack_async(source, Arc::new(Quiet) as Arc<dyn Progress>));
    let started = tokio::task::spawn_blocking(move || fs::read_to_string(pids).unwrap());
    let line = tokio::select! {
        done = &mut work => panic!("{done:?}"),
        line = started => line.unwrap(),
    };
    let ends: Vec<_> = line
        .split_whitespace()
        .filter_map(|pid| rustix::process::Pid::from_raw(pid.parse().unwrap()))
        .filter_map(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok())
        .collect();
    drop(work);
    // Whoever comes next waits until the old work is gone, and then does its own.
    let cancel = Cancel::default();
    program(&world.path("slow"), "exit 9");
    let again = world.unpacker.unpack(&Source::parse("docker://a").unwrap(), &cancel, &Quiet).unwrap_err();
    assert!(matches!(again, ImageError::Program { .. }), "{again}");
    for end in ends {
        let mut fds = [PollFd::new(end.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll_patiently(&mut fds, 5000), 1);
    }
    world.assert_untouched("cancelled");
}

/// Names the folder of a copy of this program that is to be killed while it fetches.
const KILLED_IN: &str = "PRORL_TEST_KILLED_IN";

#[test]
fn a_process_that_is_killed_while_it_fetches_leaves_no_process() {
    if let Some(folder) = std::env::var_os(KILLED_IN) {
        let folder = Path::new(&folder);
        let mut unpacker = Unpacker::new(store_with_guest(&folder.join("store")));
        unpacker.apptainer = Some(folder.join("slow"));
        let fetched = unpacker.unpack(&Source::parse("docker://a").unwrap(), &Cancel::default(), &Quiet);
        panic!("{fetched:?}");
    }
    let world = World::new();
    let held = world.path("held");
    nix::unistd::mkfifo(&held, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // Whatever it has started holds the FIFO; a child of its own session hears no signal but one.
    let script = "exec 9> \"${0%/*}/held\"; setsid sh -c 'trap \"\" HUP INT TERM; echo >&9; sleep 1000; sleep 1000' & sleep 1000";
    program(&world.path("slow"), script);
    let mut fetching = Command::new(std::env::current_exe().unwrap());
    let test = "images::tests::registry::a_process_that_is_killed_while_it_fetches_leaves_no_process";
    fetching.args(["--exact", test, "--nocapture"]).env(KILLED_IN, world.path(""));
    let mut fetching = fetching.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut held = fs::File::open(held).unwrap();
    held.read_exact(&mut [0]).unwrap();
    fetching.kill().unwrap();
    fetching.wait().unwrap();
    // It ends when nobody is left who holds it.
    let mut fds = [PollFd::new(held.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll_patiently(&mut fds, 20_000), 1);
    assert_eq!(held.read(&mut [0]).unwrap(), 0);
}
