//! Jobs choose their runtime and image, and are told by name what cannot be had.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Stdio};

use prorl_llm::mock::MockLlm;
use serde_json::{Value, json};
use support::{Serve, call, finish, image, mock, note, prorl};
use tokio::process::Command;

/// A policy that looks around in its sandbox and answers.
async fn policy() -> MockLlm {
    let look = call("execute_bash", &json!({"command": "id -u; pwd; cat /etc/image; cat /proc/1/comm"}));
    mock(&json!({"default": {"turns": [look, finish("4")]}})).await
}

fn job(runtime: &str, image: Option<&Path>) -> Value {
    let mut instance = json!({"data_source": "math", "prompt": "2 + 2", "ground_truth": "4", "runtime": runtime,
        "tools": ["execute_bash", "finish"]});
    if let Some(image) = image {
        instance["image"] = json!(image);
    }
    json!({"instance": instance, "sampling_params": {}, "retries": 0})
}

fn observation(result: &Value) -> String {
    let messages = result["messages"].as_array().unwrap();
    let tool = messages.iter().find(|message| message["role"] == "tool");
    tool.unwrap_or_else(|| panic!("no tool message: {result}"))["content"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn the_same_job_sees_the_same_sandbox_in_both_runtimes() {
    if !image::has_apptainer() {
        return note("skipped: apptainer is not installed");
    }
    let unpacked = image::image();
    fs::write(unpacked.path().join("etc/image"), "of the image\n").unwrap();
    let mock = policy().await;
    let serve = Serve::in_open_folder(&["--image", unpacked.path().to_str().unwrap()], &mock).await;
    let mut seen = Vec::new();
    for runtime in ["namespace", "singularity"] {
        for named in [None, Some(unpacked.path())] {
            let (status, result) = serve.post("/process", &job(runtime, named)).await;
            assert_eq!((status, &result["reward"]), (200, &json!(1.0)), "{result}");
            assert_eq!(result["image"], json!(unpacked.path()));
            seen.push(observation(&result));
        }
    }
    assert!(seen[0].contains("of the image"), "{seen:?}");
    assert!(seen.iter().all(|one| *one == seen[0]), "{seen:#?}");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_packed_image_goes_to_singularity_and_a_broken_one_fails_its_job_alone() {
    if !image::has_apptainer() {
        return note("skipped: apptainer is not installed");
    }
    let Some(packed) = image::packed_image() else {
        return note("skipped: mksquashfs or /dev/fuse is not there for this user");
    };
    let folder = image::open_temp();
    let broken = folder.path().join("broken.sif");
    fs::write(&broken, "no image at all").unwrap();
    let mock = policy().await;
    let serve = Serve::in_open_folder(&[], &mock).await;

    let (status, result) = serve.post("/process", &job("auto", Some(packed.path()))).await;
    assert_eq!((status, &result["reward"]), (200, &json!(1.0)), "{result}");

    let (status, result) = serve.post("/process", &job("auto", Some(&broken))).await;
    assert_eq!((status, &result["reward"], &result["filter"]), (200, &Value::Null, &json!(true)));
    assert_eq!(
        (&result["outcome"]["failure_class"], &result["outcome"]["stage"]),
        (&json!("image"), &json!("init")),
        "{result}"
    );
    let error = result["error"].as_str().unwrap();
    assert!(error.contains("broken.sif"), "{error}");

    let (_, result) = serve.post("/process", &job("auto", Some(packed.path()))).await;
    assert_eq!(result["reward"], 1.0, "{result}");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_had_is_refused_by_name() {
    let folder = image::open_temp();
    let packed = folder.path().join("image.sif");
    fs::write(&packed, "").unwrap();
    let missing = folder.path().join("missing");
    let mock = policy().await;
    let serve = Serve::without_programs(&mock).await;
    for (request, field, part) in [
        (job("singularity", Some(folder.path())), "instance.runtime", "no singularity runtime"),
        (job("singularity", Some(Path::new("host"))), "instance.image", "no image of its own"),
        (job("auto", Some(Path::new("docker://debian"))), "instance.image", "prorl image unpack docker://debian"),
        (job("auto", Some(Path::new("nosuch"))), "instance.image", "the store has no names"),
        (job("auto", Some(Path::new(""))), "instance.image", "empty"),
        (job("singularity", None), "instance.image", "no image of its own"),
        (job("auto", Some(&missing)), "instance.image", "missing"),
    ] {
        let (status, refused) = serve.post("/process", &request).await;
        assert_eq!((status, &refused["code"]), (400, &json!("invalid_instance")), "{refused}");
        let detail = refused["detail"].as_str().unwrap();
        assert!(detail.contains(field) && detail.contains(part), "{detail}");
    }
    // What a file holds is seen when it is unpacked.
    let (_, result) = serve.post("/process", &job("namespace", Some(&packed))).await;
    assert_eq!((&result["outcome"]["failure_class"], &result["reward"]), (&json!("image"), &Value::Null), "{result}");
    let (_, result) = serve.post("/process", &job("auto", Some(Path::new("host")))).await;
    assert_eq!((&result["reward"], &result["image"]), (&json!(1.0), &json!("host")), "{result}");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_image_without_what_a_tool_needs_is_warned_of() {
    let unpacked = image::image();
    let mock = policy().await;
    let serve = Serve::in_open_folder(&[], &mock).await;
    let mut request = job("auto", Some(unpacked.path()));
    request["instance"]["tools"] = json!(["execute_bash", "execute_ipython_cell", "finish"]);
    let (_, result) = serve.post("/process", &request).await;
    let warnings = result["warnings"].to_string();
    assert!(warnings.contains("has no python3") && !warnings.contains("has no bash"), "{result}");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_server_that_cannot_do_as_told_says_so_and_ends() {
    let (folder, store) = (image::open_temp(), image::open_temp());
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    fs::set_permissions(&empty, fs::Permissions::from_mode(0o0)).unwrap();
    let long = format!("unix:/{}", "x".repeat(107));
    let mut cases = vec![
        (vec!["--apptainer", "/nonexistent/apptainer"], 1, "/nonexistent/apptainer"),
        (vec!["--runtime", "singularity", "--apptainer", "/nonexistent/apptainer"], 1, "/nonexistent/apptainer"),
        (vec!["--runtime", "namespace", "--image", file.to_str().unwrap()], 1, file.to_str().unwrap()),
        (vec!["--image", "nosuch"], 1, "the store has no names"),
        (vec!["--store", file.to_str().unwrap()], 1, file.to_str().unwrap()),
        (vec!["--store-max", "many"], 2, "store_max"),
        (vec!["--listen", &long], 2, "108 bytes"),
        (vec!["--run-dir", file.to_str().unwrap()], 1, file.to_str().unwrap()),
        (vec!["--image", "/nonexistent/image"], 2, "/nonexistent/image"),
        (vec!["--max-starting", "0"], 2, "max_starting"),
        (vec!["--runtime", "docker"], 2, "docker"),
    ];
    if image::has_apptainer() {
        cases.push((vec!["--image", file.to_str().unwrap()], 1, file.to_str().unwrap()));
    }
    if nix::unistd::geteuid().is_root() {
        // To the owner of a folder its mode means nothing inside, as to root outside.
        cases.push((vec!["--image", empty.to_str().unwrap()], 1, empty.to_str().unwrap()));
    } else {
        cases.push((vec!["--sandbox-user", "5"], 2, "sandbox_user"));
    }
    for (args, code, part) in cases {
        let listen = if args[0] == "--listen" { &[][..] } else { &["--listen", "127.0.0.1:0"] };
        let output = Command::new(prorl())
            .arg("serve")
            .args(listen)
            .args(&args)
            .env("TMPDIR", folder.path())
            .env("PRORL_STORE", store.path())
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(std::time::Duration::from_secs(30), output).await;
        let output = output.unwrap_or_else(|_elapsed| panic!("the server runs with {args:?}")).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(part), "{args:?}: {said}");
    }
    let mut left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["empty", "file"]);
}
