//! The command line as a new user meets it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::{path::Path, process::Output};

use serde_json::{Value, json};
use support::{Serve, finish, job_calls, math, mock, prorl};
use tokio::{io::AsyncBufReadExt, process::Command};

async fn run(folder: &Path, args: &[&str]) -> Output {
    Command::new(prorl()).args(args).current_dir(folder).env("TMPDIR", folder).output().await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test]
async fn quickstart_works_in_any_folder_and_its_results_verify() {
    let folder = tempfile::tempdir().unwrap();
    let out = run(folder.path(), &["quickstart"]).await;
    let (stdout, stderr) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("reward") && stdout.contains("Trajectory of"), "{stdout}");
    let results = std::fs::read_to_string(folder.path().join("prorl-quickstart.jsonl")).unwrap();
    let results: Vec<Value> = results.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(results.len() >= 20);
    let rewards: Vec<f64> = results.iter().map(|result| result["reward"].as_f64().unwrap()).collect();
    assert!(rewards.contains(&1.0) && rewards.contains(&0.0), "some are wrong on purpose: {rewards:?}");
    assert!(results.iter().any(|result| result["usage"]["turns"].as_u64().unwrap() >= 3));

    let verified = run(folder.path(), &["verify", "prorl-quickstart.jsonl"]).await;
    assert!(verified.status.success(), "{}", text(&verified.stderr));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["prorl-quickstart.jsonl"], "nothing else is left");

    // A changed id is found and named.
    let mut broken = results[0].clone();
    broken["traces"][0]["response_ids"][0] = json!(0);
    std::fs::write(folder.path().join("broken.jsonl"), format!("{}\n{broken}\n", results[1])).unwrap();
    let refused = run(folder.path(), &["verify", "broken.jsonl"]).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("broken.jsonl line 2: job "), "{}", text(&refused.stderr));
}

#[tokio::test]
async fn run_sends_a_file_and_resumes() {
    let mock = mock(&json!({"default": {"turns": [finish("4")]}})).await;
    let serve = Serve::with_mock(&[], &mock).await;
    let folder = tempfile::tempdir().unwrap();
    let lines: Vec<String> =
        (0..12).map(|n| math(&format!("What is 2+2? ({n})"), "4")["instance"].to_string()).collect();
    std::fs::write(folder.path().join("data.jsonl"), lines.join("\n")).unwrap();
    let args = ["run", "--data", "data.jsonl", "--server", &serve.address, "--out", "r.jsonl", "--concurrency", "4"];
    let out = run(folder.path(), &args).await;
    assert!(out.status.success(), "{}", text(&out.stderr));
    let results = std::fs::read_to_string(folder.path().join("r.jsonl")).unwrap();
    assert_eq!(results.lines().count(), 12);
    assert!(run(folder.path(), &["verify", "r.jsonl"]).await.status.success());

    // Half of it is lost, with a torn line; a resume makes it whole without doing the rest again.
    let half: Vec<&str> = results.lines().take(6).collect();
    std::fs::write(folder.path().join("r.jsonl"), format!("{}\n{{\"job_id\": \"ru", half.join("\n"))).unwrap();
    let calls = job_calls(&mock).len();
    let out = run(folder.path(), &[&args[..], &["--resume", "--json"]].concat()).await;
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((&summary["kept"], &summary["completed"]), (&json!(6), &json!(6)), "{summary}");
    assert_eq!(job_calls(&mock).len(), calls + 6);
    assert_eq!(std::fs::read_to_string(folder.path().join("r.jsonl")).unwrap().lines().count(), 12);

    let missing = run(folder.path(), &["run", "--data", "none.jsonl", "--server", &serve.address]).await;
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("none.jsonl"));
    let status = run(folder.path(), &["status", "--json", "--server", &serve.address]).await;
    assert_eq!(serde_json::from_slice::<Value>(&status.stdout).unwrap()["running"], true);
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn the_configuration_says_where_each_value_came_from() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("prorl.toml"), "timeout = 60.0\nmax_run_workers = 5\nqueue_limit = 7\n").unwrap();
    let out = Command::new(prorl())
        .args(["serve", "--print-config", "--config", "prorl.toml", "--max-run-workers", "9"])
        .current_dir(folder.path())
        .env("PRORL_QUEUE_LIMIT", "8")
        .output()
        .await
        .unwrap();
    let stdout = text(&out.stdout);
    for line in [
        "timeout = 60.0 # file",
        "max_run_workers = 9 # flag",
        "queue_limit = 8 # environment",
        "max_eval_workers = 9 # default",
        "tool_timeout = 120.0 # default",
        "port = 8006 # default",
    ] {
        assert!(stdout.contains(line), "{line} is not in\n{stdout}");
    }
    // Two ways to say where to listen: the closer one wins.
    std::fs::write(folder.path().join("prorl.toml"), "listen = \"127.0.0.1:1\"\n").unwrap();
    let print = ["serve", "--print-config", "--config", "prorl.toml"];
    let chosen = |out: Output| text(&out.stdout).lines().last().unwrap().to_owned();
    assert_eq!(chosen(run(folder.path(), &print).await), "# listens on 127.0.0.1:1");
    assert_eq!(chosen(run(folder.path(), &[&print[..], &["--port", "2"]].concat()).await), "# listens on 127.0.0.1:2");
    let both = run(folder.path(), &[&print[..], &["--port", "2", "--listen", "127.0.0.1:3"]].concat()).await;
    assert_eq!(both.status.code(), Some(2));
    std::fs::write(folder.path().join("prorl.toml"), "timeot = 60.0\n").unwrap();
    let out = run(folder.path(), &["serve", "--print-config", "--config", "prorl.toml"]).await;
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("unknown key timeot"), "{}", text(&out.stderr));
}

#[tokio::test]
async fn wrong_usage_is_exit_code_two_and_help_is_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    for args in [
        &["serve", "--nope"][..],
        &["serve", "--max-run-workers", "0"],
        &["serve", "--timeout", "-1"],
        &["serve", "--listen", "nowhere"],
        &["quickstart", "--jobs", "0"],
        &["quickstart", "--llm", "http://127.0.0.1:1"],
        &["verify"],
        &["cancel", "a b"],
        &["fly"],
    ] {
        assert_eq!(run(folder.path(), args).await.status.code(), Some(2), "{args:?}");
    }
    for command in
        ["serve", "quickstart", "run", "verify", "mock-llm", "bench", "doctor", "sandbox", "status", "cancel"]
    {
        let out = run(folder.path(), &[command, "--help"]).await;
        assert!(out.status.success() && text(&out.stdout).contains("Usage"), "{command}");
    }
    // Off loopback without a token.
    let out = run(folder.path(), &["serve", "--listen", "0.0.0.0:0"]).await;
    assert!(!out.status.success() && text(&out.stderr).contains("token"), "{}", text(&out.stderr));
}

#[tokio::test]
async fn mock_llm_serves_both_dialects() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("s.json"), json!({"default": {"turns": [finish("4")]}}).to_string()).unwrap();
    let mut mock = Command::new(prorl())
        .args(["mock-llm", "--script", "s.json", "--listen", "127.0.0.1:0"])
        .current_dir(folder.path())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = tokio::io::BufReader::new(mock.stdout.take().unwrap()).lines();
    let line = lines.next_line().await.unwrap().unwrap();
    let address = line.strip_prefix("prorl mock-llm listening on ").unwrap();
    let serve = Serve::start(&[]).await;
    for kind in ["vllm", "generate", "auto"] {
        let body = json!({"address": address, "kind": kind});
        let (status, added) = serve.post("/add_llm_server", &body).await;
        assert_eq!((status, &added["backend"]["healthy"]), (200, &json!(true)), "{kind}: {added}");
        assert_eq!(serve.post("/process", &math("2+2", "4")).await.1["reward"], 1.0, "{kind}");
        serve.post("/clear_llm_server", &json!(null)).await;
    }
    serve.stop().await;
    support::signal(mock.id().unwrap(), nix::sys::signal::Signal::SIGTERM);
    assert!(mock.wait().await.unwrap().success());
}
