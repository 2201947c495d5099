//! The example does what its README says.

use std::process::{Command, Stdio};

use nix::{
    sys::{
        prctl::set_child_subreaper,
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};

#[test]
fn fifty_sandboxes_are_scored_and_nothing_is_left() {
    // Whatever outlives the example becomes a child of this process, which has no other.
    set_child_subreaper(true).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_embed-sandbox")).stdin(Stdio::null()).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{stdout}\n{stderr}");
    let rows = |verdict: &str| stdout.lines().filter(|line| line.contains(&format!(" {verdict} "))).count();
    assert_eq!([rows("right"), rows("wrong"), rows("broken"), rows("endless")], [20, 15, 10, 5], "{stdout}");
    assert!(stdout.contains("mean reward 0.40"), "{stdout}");
    assert!(stdout.contains("processes left: 0, samples without a reward: 0"), "{stdout}");
    // The node's keeper was nobody's child and has seen everything to its end; it may just be ending itself.
    let left: Vec<_> = std::iter::from_fn(|| waitpid(Pid::from_raw(-1), None).ok()).collect();
    assert!(matches!(left[..], [WaitStatus::Exited(_, 0)]), "{left:?}");
}
