//! `prorl bench`: that figures are taken and told; what they are is the machine's affair.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::process::Output;

use serde_json::Value;
use support::prorl;
use tokio::process::Command;

async fn bench(path: Option<&str>) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(prorl());
    command.args(["bench", "sandbox", "--json", "--n", "5", "--burst", "5", "--alive", "5"]);
    command.env("TMPDIR", folder.path());
    if let Some(path) = path {
        command.env("PATH", path);
    }
    let out = command.output().await.unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    out
}

#[tokio::test]
async fn figures_are_one_object_and_notes_are_elsewhere() {
    let report: Value = serde_json::from_slice(&bench(None).await.stdout).unwrap();
    let namespace = &report["namespace"];
    assert_eq!(namespace["start"]["n"], 5, "{report}");
    assert!(namespace["start"]["p50_ms"].as_f64().unwrap() > 0.0, "{report}");
    assert_eq!((&namespace["burst"]["failed"], &namespace["alive"]["answered"]), (&0.into(), &5.into()), "{report}");
    assert!(namespace["alone"]["processes"].as_u64().unwrap() >= 2, "{report}");
    let compared = report["namespace_start_by_bwrap"].as_f64();
    assert_eq!(compared.is_some(), report["bwrap"]["start"]["p50_ms"].is_f64(), "{report}");
}

#[tokio::test]
async fn a_tool_that_is_absent_is_null_and_named() {
    let out = bench(Some("/nonexistent")).await;
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    for tool in ["bwrap", "apptainer", "singularity"] {
        assert!(report[tool].is_null() && stderr.contains(&format!("note: {tool} is null: ")), "{tool}: {stderr}");
    }
    assert!(report["namespace"].is_object() && report["namespace_start_by_bwrap"].is_null(), "{report}");
}

#[tokio::test]
async fn figures_of_images_are_taken_beside_the_bare_tools() {
    let folder = support::image::open_temp();
    let mut command = Command::new(prorl());
    command.args(["bench", "images", "--json", "--n", "1", "--size-mb", "3", "--processes", "4", "--files", "120"]);
    command.args(["--starts", "2"]).env("TMPDIR", folder.path()).env("PRORL_STORE", folder.path().join("store"));
    let out = command.output().await.unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    if said.contains("mksquashfs of squashfs-tools is not on PATH") {
        return support::note("skipped: mksquashfs is not installed");
    }
    assert!(out.status.success(), "{said}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let unpack = report["unpack"].as_array().unwrap();
    assert_eq!((unpack.len(), &report["once"]["unpacked_by"]), (2, &1.into()), "{report}");
    assert!(unpack.iter().all(|one| one["ours_by_unsquashfs"].as_f64().is_some_and(|ratio| ratio > 0.0)), "{report}");
    assert!(report["hit"]["p50_ms"].as_f64().unwrap() > 0.0, "{report}");
    let fork = &report["fork"];
    assert_eq!((&fork["fork"]["n"], &fork["plain"]["n"]), (&2.into(), &2.into()), "{report}");
    // Nothing of the layer is copied, and its hundred files of a kibibyte are more than what a start writes beyond a plain one.
    let written = |name: &str| fork[name].as_u64().unwrap();
    assert!(written("fork_written_bytes") < written("plain_written_bytes") + 100 * 1024, "{report}");
}

#[tokio::test]
async fn figures_of_limits_are_taken_beside_none_and_beside_their_goals() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(prorl());
    command.args(["bench", "limits", "--json", "--n", "2", "--calls", "4", "--sandboxes", "2", "--seconds", "1"]);
    command.args(["--memory-mb", "64"]);
    let out = command.env("TMPDIR", folder.path()).output().await.unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    for (what, n) in [("start", 2), ("call", 4)] {
        let pair = &report["cost"][what];
        assert_eq!((&pair["with"]["n"], &pair["without"]["n"]), (&n.into(), &n.into()), "{report}");
    }
    assert!(report["cost"]["call_with_by_without"].as_f64().unwrap() > 0.0, "{report}");
    let neighbours = &report["neighbours"];
    assert!(neighbours["alone"]["tool"]["p95_ms"].as_f64().unwrap() > 0.0, "{report}");
    assert_eq!(neighbours["alone"]["failed"], 0, "{report}");
    let hogs: Vec<_> = neighbours["beside"].as_array().unwrap().iter().collect();
    let names = ["fork_bomb", "allocator", "disk_filler", "spinner"];
    assert_eq!(hogs.iter().map(|hog| hog["hog"].as_str().unwrap()).collect::<Vec<_>>(), names);
    for hog in hogs {
        let (name, ratio) = (hog["hog"].as_str().unwrap(), &hog["p95_by_alone"]);
        assert_eq!(&report["goals"][format!("{name}_p95_by_alone")]["found"], ratio, "{report}");
        let (is_absent, is_told) = (hog["phase"].is_null(), said.contains(&format!("note: {name} is null: ")));
        assert!(is_absent == is_told && is_absent == ratio.is_null(), "{name}: {report} {said}");
    }
    assert_eq!(said.matches("\ngoal ").count() + usize::from(said.starts_with("goal ")), 8, "{said}");
}

#[tokio::test]
async fn figures_of_tools_are_taken_beside_others_and_beside_their_goals() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(prorl());
    command.args(["bench", "tools", "--json", "--n", "20", "--sessions", "4", "--commands", "20", "--many", "6"]);
    let out = command.args(["--seconds", "1"]).env("TMPDIR", folder.path()).output().await.unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    for command in ["true", "echo"] {
        let beside = &report["call"][command];
        for (who, n) in [("ours", 20), ("pty", 20), ("pty_behind_socket", 20), ("tmux", 1)] {
            let (is_absent, is_told) = (beside[who].is_null(), said.contains(&format!("note: {who} is null: ")));
            assert!(is_absent == is_told && (is_absent || beside[who]["n"] == n), "{who}: {report} {said}");
        }
        assert!(beside["ours"]["p50_ms"].as_f64().unwrap() > 0.0, "{report}");
    }
    assert_eq!(report["goals"]["true_by_pty"]["found"], report["call"]["true"]["ours_by_pty"], "{report}");
    for (name, n) in [("sessions", 80), ("many", 12)] {
        assert_eq!((&report[name]["commands"], &report[name]["wrong"]), (&n.into(), &0.into()), "{report} {said}");
    }
    assert!(report["cpu"]["s_per_1000"].as_f64().unwrap() > 0.0, "{report}");
    assert!(report["idle"]["wakeups"].is_u64(), "{report}");
    assert_eq!(report["python"].is_null(), said.contains("note: python is null: "), "{said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("goal ")).count(), 18, "{said}");
}

#[tokio::test]
async fn implementations_are_held_to_cases_side_by_side() {
    let folder = tempfile::tempdir().unwrap();
    let absent = r#"gone=sh -c read${IFS}start;echo${IFS}'{"skip":"not"}'"#;
    let conformance = |args: &[&str]| {
        let mut command = Command::new(prorl());
        command.args(["bench", "tools", "--conformance", "--suite", "bash", "--adapter", absent]).args(args);
        command.env("TMPDIR", folder.path());
        command
    };
    let names = ["--case", "echo", "--case", "exit-code-kept", "--case", "input-none"];
    let out = conformance(&names).arg("--json").output().await.unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("note: gone is left out: not\n"), "{said}");
    assert!(said.contains("bash -c: bash exit-code-kept: step 2: printed \"0\", not \"42\"\n"), "{said}");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let marks = |idx: usize| -> Vec<&str> {
        report["subjects"][idx]["cases"].as_array().unwrap().iter().map(|one| one["mark"].as_str().unwrap()).collect()
    };
    assert_eq!((marks(0), marks(1)), (vec!["passed"; 3], vec!["passed", "failed", "unsupported"]), "{report}");
    assert_eq!((&report["subjects"][2]["absent"], marks(2).len()), (&"not".into(), 0), "{report}");
    let out = conformance(&["--case", "echo", "--markdown"]).output().await.unwrap();
    assert!(String::from_utf8_lossy(&out.stdout).contains("| echo | A word is printed. | yes | yes |\n"));
    let out = conformance(&["--case", "no-such"]).output().await.unwrap();
    assert!(!out.status.success() && String::from_utf8_lossy(&out.stderr).contains("there is no case no-such"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}
