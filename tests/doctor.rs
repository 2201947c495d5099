//! What `prorl doctor` says about this machine, and about one that forbids user namespaces.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::{io::Write as _, process::Command};

use serde_json::Value;
use support::prorl;

/// Every check, in order. Programs read them by name.
const CHECKS: [&str; 38] = [
    "namespace_runtime",
    "singularity_runtime",
    "kernel",
    "max_user_namespaces",
    "max_mnt_namespaces",
    "max_pid_namespaces",
    "max_net_namespaces",
    "max_ipc_namespaces",
    "max_uts_namespaces",
    "max_cgroup_namespaces",
    "unprivileged_userns_clone",
    "apparmor",
    "masked_proc",
    "hidden_processes",
    "seccomp",
    "landlock",
    "overlay",
    "apptainer",
    "fuse",
    "squashfuse",
    "fuse_overlayfs",
    "subuid",
    "subgid",
    "newuidmap",
    "fake_root",
    "python",
    "limits",
    "idle_scheduling",
    "memory",
    "kvm",
    "open_files",
    "processes",
    "locked_memory",
    "address_space",
    "file_size",
    "temp_dir",
    "run_dir",
    "loopback",
];

fn skip(test: &str, why: &str) {
    writeln!(std::io::stderr().lock(), "skipped {test}: {why}").unwrap();
}

/// Runs it through `wrapper`; returns its exit code, its report and the names that it left in its temporary folder.
fn doctor(wrapper: &[&str]) -> (Option<i32>, Value, Vec<String>) {
    let temp = tempfile::tempdir().unwrap();
    // Sandboxes of root belong to somebody else, who has to get there.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(temp.path(), open).unwrap();
    let (program, args) = wrapper.split_first().unwrap();
    let mut command = Command::new(program);
    command.args(args).arg(prorl()).args(["doctor", "--json"]).env("TMPDIR", temp.path());
    let (code, report) = report(&mut command);
    let left = std::fs::read_dir(temp.path()).unwrap();
    (code, report, left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect())
}

/// Runs a command that ends in `doctor --json`.
fn report(command: &mut Command) -> (Option<i32>, Value) {
    let out = command.output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let report = serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!("{error}: {text}{}: {}", out.status, String::from_utf8_lossy(&out.stderr));
    });
    assert_shape(&report);
    (out.status.code(), report)
}

fn plain() -> Command {
    let mut command = Command::new(prorl());
    command.args(["doctor", "--json"]);
    command
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("{name} in {report}"))
}

fn assert_shape(report: &Value) {
    let names: Vec<_> = report["checks"].as_array().unwrap().iter().map(|check| check["name"].clone()).collect();
    assert_eq!(names, CHECKS);
    for check in report["checks"].as_array().unwrap() {
        let fields: Vec<_> = check.as_object().unwrap().keys().collect();
        assert_eq!(fields, ["name", "state", "found", "meaning", "remedy"], "{check}");
        assert!(["ok", "warn", "bad", "absent"].contains(&check["state"].as_str().unwrap()), "{check}");
        for field in ["found", "meaning"] {
            assert!(!check[field].as_str().unwrap().is_empty(), "{check}");
        }
        match &check["remedy"] {
            Value::Null => {}
            remedy => assert!(!remedy.as_str().unwrap().is_empty() && check["state"] != "ok", "{check}"),
        }
    }
}

#[test]
fn every_check_is_there_and_nothing_is_left() {
    let (code, report, left) = doctor(&["env"]);
    assert_shape(&report);
    assert_eq!(check(&report, "namespace_runtime")["state"], "ok", "{report}");
    for name in ["kernel", "max_user_namespaces", "overlay", "loopback"] {
        assert_eq!(check(&report, name)["state"], "ok", "{report}");
    }
    let has_launcher = check(&report, "apptainer")["state"] != "absent";
    assert_eq!(check(&report, "singularity_runtime")["state"] != "absent", has_launcher, "{report}");
    if !has_launcher {
        skip("every_check_is_there_and_nothing_is_left", "no Apptainer here, so its runtime was not tried");
    }
    // Whether fake root gets a range is told with the reason.
    let fake_root = check(&report, "fake_root");
    let is_single = fake_root["found"].as_str().unwrap().starts_with("a single id: ");
    assert!(fake_root["found"] == "a range of ids" || is_single, "{fake_root}");
    assert_eq!((code, left), (Some(0), Vec::<String>::new()), "{report}");
}

#[test]
fn a_machine_without_user_namespaces_is_told_so() {
    // The limit of a user namespace of the test's own, so that the machine's stays.
    let block = "echo 0 > /proc/sys/user/max_user_namespaces && exec \"$@\"";
    let wrapper = ["unshare", "--user", "--map-root-user", "sh", "-c", block, "sh"];
    let possible = Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").output();
    if !possible.is_ok_and(|out| out.status.success()) {
        return skip("a_machine_without_user_namespaces_is_told_so", "unshare cannot make a user namespace here");
    }
    let (code, report, left) = doctor(&wrapper);
    assert_shape(&report);
    let limit = check(&report, "max_user_namespaces");
    assert_eq!((&limit["state"], &limit["found"]), (&"bad".into(), &"0".into()));
    assert!(limit["remedy"].as_str().unwrap().contains("sysctl -w user.max_user_namespaces="), "{limit}");
    for name in ["namespace_runtime", "fake_root"] {
        assert_eq!(check(&report, name)["state"], "bad", "{report}");
    }
    assert!(["bad", "absent"].contains(&check(&report, "singularity_runtime")["state"].as_str().unwrap()), "{report}");
    assert_eq!((code, left), (Some(1), Vec::<String>::new()), "{report}");
}

#[test]
fn folders_in_which_nothing_can_start_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let (missing, file) = (temp.path().join("missing"), temp.path().join("file"));
    std::fs::write(&file, "").unwrap();
    for place in [&missing, &file] {
        let (code, report) = report(plain().env("TMPDIR", place));
        assert_eq!(code, Some(1), "{report}");
        for name in ["namespace_runtime", "fake_root", "temp_dir", "run_dir"] {
            let check = check(&report, name);
            assert_eq!(check["state"], "bad", "{check}");
            assert!(check["found"].as_str().unwrap().contains(place.to_str().unwrap()), "{check}");
            assert!(check["remedy"].as_str().unwrap().contains("TMPDIR"), "{check}");
        }
        assert_ne!(check(&report, "singularity_runtime")["state"], "ok", "{report}");
    }
    // Sandboxes need their own folder and not that of temporary files.
    let run_dir = temp.path().join("run");
    let (code, report) = report(plain().env("TMPDIR", &missing).arg("--run-dir").arg(&run_dir));
    assert_eq!((code, &check(&report, "namespace_runtime")["state"]), (Some(0), &"ok".into()), "{report}");
    assert!(!run_dir.exists());
}

#[test]
fn a_run_dir_that_a_launcher_takes_apart_is_told() {
    let temp = tempfile::tempdir().unwrap();
    let (code, report) = report(plain().env("PRORL_RUN_DIR", temp.path().join("a:b")));
    assert_eq!((code, &check(&report, "namespace_runtime")["state"]), (Some(0), &"ok".into()), "{report}");
    let singularity = check(&report, "singularity_runtime");
    if singularity["state"] == "absent" {
        return skip("a_run_dir_that_a_launcher_takes_apart_is_told", "no Apptainer here");
    }
    assert_eq!(singularity["state"], "bad", "{singularity}");
    assert!(singularity["found"].as_str().unwrap().contains("a:b"), "{singularity}");
}

#[test]
fn a_launcher_that_is_none_is_bad() {
    for (path, words) in [("/nonexistent/launcher", "No such file"), ("/bin/true", "buildcfg")] {
        let (code, report) = report(plain().args(["--apptainer", path]));
        assert_eq!(code, Some(0), "{report}");
        for name in ["apptainer", "singularity_runtime"] {
            let check = check(&report, name);
            assert_eq!(check["state"], "bad", "{check}");
            let found = check["found"].as_str().unwrap();
            assert!(found.contains(path) && found.contains(words), "{check}");
        }
    }
}

#[test]
fn root_is_no_sandbox_user() {
    if !nix::unistd::geteuid().is_root() {
        return skip("root_is_no_sandbox_user", "only root starts sandboxes of others");
    }
    let (code, report) = report(plain().args(["--sandbox-user", "0"]));
    assert_eq!(code, Some(1), "{report}");
    let remedy = check(&report, "namespace_runtime")["remedy"].as_str().unwrap();
    assert!(remedy.contains("--sandbox-user"), "{remedy}");
}

#[test]
fn limits_of_the_process_hide_no_cause() {
    let under = |limit: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit {limit} && exec \"$@\""), "sh"]).arg(prorl()).args(["doctor", "--json"]);
        report(&mut command)
    };
    // Little to reserve stacks of threads from.
    let (_, report) = under("-v 200000");
    let blamed = |check: &&Value| check["remedy"].as_str().is_some_and(|remedy| remedy.contains("limit of processes"));
    assert_eq!(report["checks"].as_array().unwrap().iter().filter(blamed).count(), 0, "{report}");
    assert_eq!(check(&report, "address_space")["state"], "warn", "{report}");
    // Less than the guest is large.
    let (code, report) = under("-f 100");
    assert_eq!(code, Some(1), "{report}");
    for name in ["namespace_runtime", "file_size"] {
        assert!(check(&report, name)["remedy"].as_str().unwrap().contains("ulimit -f"), "{report}");
    }
}

#[test]
fn people_get_one_line_for_each_check() {
    // The second has a name that would be two lines.
    for args in [vec![], vec!["--apptainer", "/nonexistent/two\nlines"]] {
        let out = Command::new(prorl()).arg("doctor").args(args).env("NO_COLOR", "1").output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert_eq!(text.lines().count(), CHECKS.len(), "{text}");
        for (line, name) in text.lines().zip(CHECKS) {
            let (state, rest) = line.split_once(' ').unwrap();
            assert!(["ok", "warn", "bad", "absent"].contains(&state), "{line}");
            assert!(rest.trim_start().starts_with(&format!("{name}: ")) && rest.contains(" ("), "{line}");
            assert!(!matches!(state, "bad") || rest.contains("; remedy: "), "{line}");
        }
    }
}
