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
