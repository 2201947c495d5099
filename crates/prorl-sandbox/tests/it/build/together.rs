//! Builds of one output at the same time happen once.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::Stdio,
    sync::mpsc,
    thread,
};

use prorl_sandbox::images::{BuildRequest, Built, CacheMode, Cancel, Progress};

use super::{Bench, Held, beside, release, request, with_script};
use crate::support::{alone, assert_passed, is_alone};

const PROGRAMS: [&str; 2] = ["apptainer", "mksquashfs"];

const WAITED: &str = "reused: another build of it ended while this one waited";

/// Tells when a build waits for another.
struct Waits(mpsc::Sender<String>);

impl Progress for Waits {
    fn begin(&self, part: &str, _total: Option<u64>) {
        if part.starts_with("wait for ") {
            self.0.send(part.to_owned()).unwrap();
        }
    }
}

/// The same for another process: it writes a byte into a pipe.
struct WaitsBy(PathBuf);

impl Progress for WaitsBy {
    fn begin(&self, part: &str, _total: Option<u64>) {
        if part.starts_with("wait for ") {
            File::options().write(true).open(&self.0).unwrap().write_all(b"w").unwrap();
        }
    }
}

/// A build whose script counts its runs, tells that it runs, and waits to go on.
fn counted(folder: &Path) -> BuildRequest {
    let at = folder.display();
    let script = format!("    echo >> {at}/runs\n    echo > {at}/running\n    read line < {at}/go");
    request(&with_script(&script), folder.join("out/image.sif"))
}

fn assert_one_built(bench: &Bench, first: &Built, others: &[Built]) {
    assert!(!first.reused, "{}", first.reason);
    for other in others {
        assert_eq!((other.reused, other.reason.as_str(), &other.digest), (true, WAITED, &first.digest));
    }
    assert_eq!(fs::read_to_string(bench.path("runs")).unwrap().lines().count(), 1);
    assert_eq!(bench.outputs(), ["image.sif"]);
}

#[test]
fn threads_wait_for_the_first_and_take_what_it_built() {
    let Some(bench) = Bench::if_there("threads_wait_for_the_first_and_take_what_it_built", &PROGRAMS) else { return };
    let [running, go] = ["running", "go"].map(|name| bench.fifo(name));
    let scratch = counted(bench.folder.path());
    let versioned = BuildRequest { mode: CacheMode::Versioned, ..scratch.clone() };
    let (waits, waiting) = mpsc::channel();
    let (first, others) = thread::scope(|scope| {
        let first = scope.spawn(|| bench.build(&scratch));
        Held::wait(&running);
        let others: Vec<_> = [&scratch, &scratch, &versioned]
            .into_iter()
            .map(|request| {
                let (waits, bench) = (Waits(waits.clone()), &bench);
                scope.spawn(move || bench.builder.build(request, &Cancel::default(), &waits))
            })
            .collect();
        for _ in &others {
            let said = waiting.recv().unwrap();
            assert!(said.contains(&format!("process {} on ", std::process::id())), "{said}");
            assert!(said.ends_with("/out/image.sif"), "{said}");
        }
        release(&go);
        let others: Vec<_> = others.into_iter().map(|other| other.join().unwrap().unwrap()).collect();
        (first.join().unwrap().unwrap(), others)
    });
    assert_one_built(&bench, &first, &others);
}

const PROCESSES: &str = "build::together::processes_wait_for_the_first_and_take_what_it_built";

#[test]
fn processes_wait_for_the_first_and_take_what_it_built() {
    if let (true, Ok(folder)) = (is_alone(PROCESSES), std::env::var("PRORL_TEST_FOLDER")) {
        let folder = Path::new(&folder);
        let waits = WaitsBy(folder.join("waiting"));
        let built = beside(folder).build(&counted(folder), &Cancel::default(), &waits).unwrap();
        assert_eq!(built.reason, WAITED);
        return;
    }
    let Some(bench) = Bench::if_there("processes_wait_for_the_first_and_take_what_it_built", &PROGRAMS) else { return };
    let [running, go, waiting] = ["running", "go", "waiting"].map(|name| bench.fifo(name));
    let request = counted(bench.folder.path());
    let first = thread::scope(|scope| {
        let first = scope.spawn(|| bench.build(&request));
        Held::wait(&running);
        let start = || {
            let mut other = alone(PROCESSES, &[]);
            other.env("PRORL_TEST_FOLDER", bench.folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
            other.spawn().unwrap()
        };
        let others = [start(), start()];
        let mut n_waiting = 0;
        while n_waiting < others.len() {
            // One that comes while this is being closed finds no reader, and waits for the next.
            n_waiting += File::open(&waiting).unwrap().read(&mut [0; 8]).unwrap();
        }
        release(&go);
        for other in others {
            assert_passed(&other.wait_with_output().unwrap());
        }
        first.join().unwrap().unwrap()
    });
    assert_one_built(&bench, &first, &[]);
}

#[test]
fn whoever_waits_for_a_build_that_fails_builds() {
    let Some(bench) = Bench::if_there("whoever_waits_for_a_build_that_fails_builds", &PROGRAMS) else { return };
    let [running, go] = ["running", "go"].map(|name| bench.fifo(name));
    let folder = bench.folder.path().display();
    let failing = bench.with_script(&format!("    echo > {folder}/running\n    read line < {folder}/go\n    false"));
    let (waits, waiting) = mpsc::channel();
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(|| bench.build(&failing));
        Held::wait(&running);
        let plain = bench.plain();
        let bench = &bench;
        let second = scope.spawn(move || bench.builder.build(&plain, &Cancel::default(), &Waits(waits)));
        waiting.recv().unwrap();
        release(&go);
        (first.join().unwrap(), second.join().unwrap())
    });
    assert!(first.is_err());
    assert_eq!(second.unwrap().reason, "built: there was no image yet");
    assert_eq!(bench.outputs(), ["image.sif"]);
}

#[test]
fn who_waits_can_be_told_to_stop() {
    let Some(bench) = Bench::if_there("who_waits_can_be_told_to_stop", &PROGRAMS) else { return };
    let [running, go] = ["running", "go"].map(|name| bench.fifo(name));
    let request = counted(bench.folder.path());
    let (waits, waiting) = mpsc::channel();
    let cancel = Cancel::default();
    thread::scope(|scope| {
        let first = scope.spawn(|| bench.build(&request));
        Held::wait(&running);
        let (bench, request, cancel) = (&bench, &request, &cancel);
        let second = scope.spawn(move || bench.builder.build(request, cancel, &Waits(waits)));
        waiting.recv().unwrap();
        cancel.cancel();
        second.join().unwrap().unwrap_err();
        release(&go);
        first.join().unwrap().unwrap();
    });
}
