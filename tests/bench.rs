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
