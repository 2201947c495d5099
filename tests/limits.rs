//! Limits as a trainer and a model meet them, through the whole system.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use serde_json::{Value, json};
use support::{Serve, call, finish, math, mock, python};

fn bash(command: &str) -> String {
    call("execute_bash", &json!({"command": command}))
}

/// Runs one job of these turns under these limits; returns what the tools said, in order.
async fn said(args: &[&str], limits: Value, turns: &[String]) -> Vec<String> {
    let mut turns = turns.to_vec();
    turns.push(finish("4"));
    let mock = mock(&json!({"default": {"turns": turns}})).await;
    let serve = Serve::with_mock(args, &mock).await;
    let mut job = math("2+2?", "4");
    job["instance"]["limits"] = limits;
    job["instance"]["tools"] = json!(["bash", "ipython", "finish"]);
    let (status, result) = serve.post("/process", &job).await;
    assert_eq!(status, 200, "{result}");
    assert_eq!(result["reward"], 1.0, "the rollout goes on: {result}");
    let tool_messages = result["messages"].as_array().unwrap().iter().filter(|message| message["role"] == "tool");
    let said = tool_messages.map(|message| message["content"].as_str().unwrap().to_owned()).collect();
    serve.stop().await;
    mock.shutdown().await.unwrap();
    said
}

#[tokio::test]
async fn a_process_that_takes_too_much_memory_is_killed_and_the_agent_is_told() {
    let turns = [python("x = 6\nwhole = bytearray(1 << 30)"), python("print(7)"), bash("echo still here")];
    let said = said(&[], json!({"memory_mb": 256}), &turns).await;
    assert!(said[0].contains("[memory limit 256 MiB exceeded by python3"), "{}", said[0]);
    assert!(said[0].contains("(pid ") && said[0].contains("), killed]"), "{}", said[0]);
    assert!(said[1].contains('7') && !said[1].contains("limit"), "{}", said[1]);
    assert!(said[2].contains("still here"), "{}", said[2]);
}

#[tokio::test]
async fn a_fork_bomb_is_held_and_the_next_command_runs() {
    // What a bomb starts goes on beside the call that has set it off, so this one waits for all of it.
    let bomb = call("execute_bash", &json!({"command": "bomb() { bomb | bomb & wait; }; bomb", "timeout": 3}));
    let said = said(&[], json!({"pids": 64}), &[bomb, bash("echo still here")]).await;
    assert!(said[0].contains("process limit 64 reached"), "{}", said[0]);
    assert!(said[1].contains("still here"), "{}", said[1]);
}

#[tokio::test]
async fn a_full_disk_is_an_error_that_names_the_limit() {
    let turns = [
        bash("head -c 20000000 /dev/zero > big; rm big; echo freed"),
        bash("head -c 20000000 /dev/zero > big; stat -c %s big"),
        bash("rm -f big; echo small > small; cat small"),
        bash("head -c 20000000 /dev/zero > /tmp/big; true"),
    ];
    let said = said(&[], json!({"disk_mb": 8, "tmp_mb": 4}), &turns).await;
    assert!(said[0].contains("No space left on device"), "{}", said[0]);
    assert!(said[1].contains("[disk limit 8 MiB reached, nothing more can be written]"), "{}", said[1]);
    assert!(said[2].contains("small") && !said[2].contains("limit"), "{}", said[2]);
    assert!(said[3].contains("[disk limit 4 MiB of /tmp reached"), "{}", said[3]);
}

#[tokio::test]
async fn files_have_a_size_and_a_number() {
    let turns = [
        python("try:\n    open('big', 'wb').write(bytes(3 << 20))\nexcept OSError as err:\n    print(err)"),
        bash("dd if=/dev/zero of=big bs=1M count=3; echo code $?"),
        python(
            "files = []\ntry:\n    while True: files.append(open('/dev/null'))\nexcept OSError as err:\n    print(err.strerror, len(files) < 100)",
        ),
    ];
    let said = said(&[], json!({"file_mb": 1, "open_files": 100}), &turns).await;
    assert!(said[0].contains("File too large"), "{}", said[0]);
    assert!(said[1].contains("code 153") || said[1].contains("File too large"), "{}", said[1]);
    assert!(said[2].contains("Too many open files True"), "{}", said[2]);
}

#[tokio::test]
async fn time_is_up_for_the_sandbox_and_not_for_the_rollout() {
    let turns = [bash("echo before; sleep 1000"), bash("touch after"), python("print(1)")];
    let said = said(&[], json!({"wall_s": 2}), &turns).await;
    assert!(said[0].contains("before") && said[0].contains("wall time limit 2 s exceeded"), "{}", said[0]);
    for later in &said[1..] {
        assert_eq!(later, "The time of this sandbox is over. Nothing was run.");
    }
}

#[tokio::test]
async fn programs_see_the_processors_that_they_may_use() {
    let show = "nproc; echo $OMP_NUM_THREADS $OPENBLAS_NUM_THREADS";
    let limited = said(&[], json!({"cpus": 0.5}), &[bash(show)]).await;
    assert!(limited[0].starts_with("1\n1 1\n"), "{}", limited[0]);
}

#[tokio::test]
async fn the_servers_limits_are_those_of_instances_that_name_none() {
    let args = ["--memory-mb", "200", "--output-chars", "1000", "--disk-mb", "9"];
    let turns = [python("whole = bytearray(1 << 30)"), bash("seq 10000; df -m /workspace | tail -1")];
    let said = said(&args, json!({"memory_mb": null}), &turns).await;
    assert!(said[0].contains("memory limit 200 MiB exceeded"), "{}", said[0]);
    assert!(said[1].chars().count() <= 1000 && said[1].contains("left out"), "{}", said[1]);
}

#[tokio::test]
async fn limits_that_cannot_be_are_refused_by_name() {
    let mock = mock(&json!({"default": {"turns": [finish("4")]}})).await;
    let serve = Serve::with_mock(&[], &mock).await;
    let n_processors = std::thread::available_parallelism().unwrap().get();
    for (limits, named) in [
        (json!({"memory_mb": 0}), "limits.memory_mb"),
        (json!({"memory_mb": -1}), "limits.memory_mb"),
        (json!({"memory_mb": "512"}), "limits.memory_mb"),
        (json!({"memory_mb": 1_u64 << 40}), "limits.memory_mb"),
        (json!({"pids": 0}), "limits.pids"),
        (json!({"pids": 2.5}), "limits.pids"),
        (json!({"cpus": 0}), "limits.cpus"),
        (json!({"cpus": -0.5}), "limits.cpus"),
        (json!({"cpus": n_processors + 1}), "limits.cpus"),
        (json!({"disk_mb": 0}), "limits.disk_mb"),
        (json!({"disk_mb": 1_u64 << 40}), "limits.disk_mb"),
        (json!({"wall_s": "1h"}), "limits.wall_s"),
        (json!({"wall_s": -3}), "limits.wall_s"),
        (json!({"open_files": 0}), "limits.open_files"),
        (json!({"output_chars": 1}), "limits.output_chars"),
        (json!({"memory": 5}), "limits.memory"),
        (json!([5]), "limits"),
    ] {
        let mut job = math("2+2?", "4");
        job["instance"]["limits"] = limits.clone();
        let (status, answer) = serve.post("/process", &job).await;
        assert_eq!((status, answer["code"].as_str()), (400, Some("invalid_instance")), "{limits}: {answer}");
        let detail = answer["detail"].as_str().unwrap();
        assert!(detail.starts_with(&format!("instance.{named}: ")), "{limits}: {detail}");
        // What came or what is known, so that the mistake is plain.
        assert!(["found", "known", "more than"].iter().any(|word| detail.contains(word)), "{limits}: {detail}");
    }
    let (status, result) = serve.post("/process", &math("2+2?", "4")).await;
    assert_eq!((status, &result["reward"]), (200, &json!(1.0)), "the server keeps serving");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}
