//! Servers that are killed at any moment.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Stdio},
};

use nix::{
    errno::Errno,
    poll::ppoll,
    sys::{
        prctl::{set_child_subreaper, set_pdeathsig},
        signal::{Signal, kill},
        time::TimeSpec,
        wait::waitpid,
    },
    unistd::Pid,
};
use prorl_sandbox::Node;

use crate::support::{alone, assert_passed, config, folder, is_alone, names};

/// Longer than opening and dropping a node takes, in microseconds.
const SPAN_MICROS: u64 = 25_000;

/// How often a server is killed: `default` times, or as often as `PRORL_KILLS` says.
pub(crate) fn n_kills(default: u64) -> u64 {
    std::env::var("PRORL_KILLS").map_or(default, |kills| kills.parse().unwrap())
}

/// Numbers that look random and are the same each time.
pub(crate) struct Moments {
    state: u64,
    span_micros: u64,
}

impl Moments {
    /// Moments of less than `span_micros`.
    pub(crate) fn of(seed: u64, span_micros: u64) -> Self {
        Self { state: seed, span_micros }
    }

    /// Returns the next one, in microseconds.
    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % self.span_micros
    }
}

/// Not a test: the server that is killed. It opens nodes and drops them until then.
#[test]
fn server() {
    let Some(dir) = is_alone("crash::server") else { return };
    // It does not outlive a test that is ended itself.
    set_pdeathsig(Signal::SIGKILL).unwrap();
    println!("serving");
    loop {
        drop(Node::open(config(&dir)).unwrap());
    }
}

fn serve(dir: &Path) -> Child {
    let mut server = alone("crash::server", dir, &[]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(server.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.ends_with("serving")), "the server did not start");
    server
}

pub(crate) fn wait_micros(micros: u64) {
    let micros = i64::try_from(micros).unwrap();
    let moment = TimeSpec::new(micros / 1_000_000, micros % 1_000_000 * 1000);
    ppoll(&mut [], Some(moment), None).unwrap();
}

/// Children of this process, and what became its child by losing its parent.
pub(crate) fn children() -> Vec<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
}

/// Waits until no child is left, by birth or by adoption.
pub(crate) fn reap_all() {
    loop {
        match waitpid(Pid::from_raw(-1), None) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(Errno::ECHILD) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_killed_server_leaves_nothing() {
    let test = "crash::a_killed_server_leaves_nothing";
    let Some(dir) = is_alone(test) else {
        let dir = folder();
        assert_passed(&alone(test, dir.path(), &[]).output().unwrap());
        return;
    };
    set_child_subreaper(true).unwrap();
    let mut moments = Moments::of(1, SPAN_MICROS);
    for kill_idx in 0..n_kills(60) {
        let mut server = serve(&dir);
        let moment = moments.next();
        wait_micros(moment);
        server.kill().unwrap();
        server.wait().unwrap();
        reap_all();
        assert!(names(&dir).is_empty(), "kill {kill_idx} after {moment} µs left {:?}", names(&dir));
    }
}

#[test]
fn what_a_server_and_its_keeper_leave_when_both_are_killed_goes_with_the_next() {
    let test = "crash::what_a_server_and_its_keeper_leave_when_both_are_killed_goes_with_the_next";
    let Some(dir) = is_alone(test) else {
        let dir = folder();
        assert_passed(&alone(test, dir.path(), &[]).output().unwrap());
        return;
    };
    set_child_subreaper(true).unwrap();
    let mut moments = Moments::of(2, SPAN_MICROS);
    let mut n_left = 0;
    for kill_idx in 0..n_kills(60) {
        let mut server = serve(&dir);
        let moment = moments.next();
        wait_micros(moment);
        server.kill().unwrap();
        server.wait().unwrap();
        for child in children() {
            let _ = kill(Pid::from_raw(child), Signal::SIGKILL);
        }
        reap_all();
        n_left += usize::from(!names(&dir).is_empty());
        drop(Node::open(config(&dir)).unwrap());
        reap_all();
        assert!(names(&dir).is_empty(), "kill {kill_idx} after {moment} µs left {:?}", names(&dir));
    }
    println!("{n_left} had left something");
}
