//! Limits as a trainer and a model meet them, through the whole system.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::{process::Stdio, time::Duration};

use serde_json::{Value, json};
use support::{Serve, call, finish, math, mock, note, prorl, python};

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
async fn limits_that_cannot_be_are_refused_in_one_sentence() {
    let mock = mock(&json!({"default": {"turns": [finish("4")]}})).await;
    let serve = Serve::with_mock(&[], &mock).await;
    let n_processors = std::thread::available_parallelism().unwrap().get();
    let above_processors = format!(", found {}", n_processors + 1);
    let whole = "expected a whole number above 0, found ";
    let number = "expected a number above 0, found ";
    let time = "expected a number above 0 and at most 3153600000, found ";
    // How the sentence begins, behind the name, and how it ends: what came is in it once.
    for (limits, named, begin, end) in [
        (json!({"memory_mb": 0}), "limits.memory_mb", whole, "found 0"),
        (json!({"memory_mb": -1}), "limits.memory_mb", whole, "found -1"),
        (json!({"memory_mb": "512"}), "limits.memory_mb", whole, "found the text \"512\""),
        (json!({"memory_mb": "NaN"}), "limits.memory_mb", whole, "found the text \"NaN\""),
        (json!({"memory_mb": 1e300}), "limits.memory_mb", "expected a whole number of at most ", ", found 1e+300"),
        (
            json!({"memory_mb": 1_u64 << 40}),
            "limits.memory_mb",
            "expected 1 MiB to ",
            " MiB (this machine's memory), found 1099511627776 MiB",
        ),
        (
            json!({"disk_mb": 1_u64 << 40}),
            "limits.disk_mb",
            "expected 1 MiB to ",
            " MiB (this machine's memory, which holds what is written), found 1099511627776 MiB",
        ),
        (json!({"disk_mb": 0}), "limits.disk_mb", whole, "found 0"),
        (json!({"pids": 0}), "limits.pids", whole, "found 0"),
        (json!({"pids": 2.5}), "limits.pids", whole, "found 2.5"),
        (json!({"pids": u32::MAX}), "limits.pids", "expected 1 to ", " (kernel.pid_max), found 4294967295"),
        (json!({"cpus": 0}), "limits.cpus", number, "found 0"),
        (json!({"cpus": -0.5}), "limits.cpus", number, "found -0.5"),
        (json!({"cpus": n_processors + 1}), "limits.cpus", "expected 0.01 to ", &above_processors),
        (json!({"cpus": 1e300}), "limits.cpus", "expected 0.01 to ", ", found 1e300"),
        (json!({"wall_s": "1h"}), "limits.wall_s", time, "found the text \"1h\""),
        (json!({"wall_s": -3}), "limits.wall_s", time, "found -3"),
        (json!({"wall_s": 1e300}), "limits.wall_s", time, "found 1e+300"),
        (json!({"open_files": 0}), "limits.open_files", whole, "found 0"),
        (json!({"open_files": 63}), "limits.open_files", "expected 64 to ", ", found 63"),
        (json!({"output_chars": 1}), "limits.output_chars", "expected a whole number from 1000 to 100000, ", "found 1"),
        (json!({"memory": 5}), "limits.memory", "no such limit; known are memory_mb, pids, ", ", output_chars"),
        (json!([5]), "limits", "expected an object, found ", "a list"),
    ] {
        let mut job = math("2+2?", "4");
        job["instance"]["limits"] = limits.clone();
        let (status, answer) = serve.post("/process", &job).await;
        assert_eq!((status, answer["code"].as_str()), (400, Some("invalid_instance")), "{limits}: {answer}");
        let detail = answer["detail"].as_str().unwrap();
        assert!(detail.starts_with(&format!("instance.{named}: {begin}")), "{limits}: {detail}");
        assert!(detail.ends_with(end) && detail.matches(end).count() == 1, "{limits}: {detail}");
    }
    let (status, result) = serve.post("/process", &math("2+2?", "4")).await;
    assert_eq!((status, &result["reward"]), (200, &json!(1.0)), "the server keeps serving");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

/// Runs the program, which is to refuse its arguments; returns what it says first.
async fn refusal(program: &str, args: &[&str], variable: Option<(&str, &str)>) -> String {
    let mut command = tokio::process::Command::new(program);
    command.args(args).envs(variable).kill_on_drop(true).stdin(Stdio::null());
    // A server that took them would serve.
    let out = tokio::time::timeout(Duration::from_mins(1), command.output()).await;
    let out = out.unwrap_or_else(|_| panic!("{args:?} is not refused")).unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!((out.status.code(), out.stdout.as_slice()), (Some(2), &[][..]), "{args:?}: {stderr}");
    stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default().to_owned()
}

#[tokio::test]
async fn flags_that_cannot_be_are_refused_by_their_names_before_anything_starts() {
    let whole = "expected a whole number above 0";
    let number = "expected a number above 0";
    let prorl = prorl();
    let prorl = prorl.to_str().unwrap();
    // What the parser of flags refuses, the same in both commands.
    for (flag, value, expected) in [
        ("--memory-mb", "0", whole),
        ("--memory-mb", "-1", whole),
        ("--memory-mb", "1.5", whole),
        ("--memory-mb", "lots", whole),
        ("--memory-mb", "1e300", whole),
        ("--memory-mb", "99999999999999999999", "expected a whole number of at most 17592186044415"),
        ("--disk-mb", "-7", whole),
        ("--tmp-mb", "0", whole),
        ("--file-mb", "NaN", whole),
        ("--pids", "-64", whole),
        ("--pids", "4294967296", "expected a whole number of at most 4294967295"),
        ("--open-files", "0", whole),
        ("--cpus", "-0.5", number),
        ("--cpus", "nan", number),
        ("--cpus", "inf", number),
        ("--min-free-memory-mb", "-5", "expected a whole number of 0 or more"),
    ] {
        for command in [&["serve"][..], &["sandbox", "exec", "host"]] {
            let told = refusal(prorl, &[command, &[flag, value]].concat(), None).await;
            let [begin, end] = [format!("error: invalid value '{value}' for '{flag} <"), format!(">': {expected}")];
            assert!(told.starts_with(&begin) && told.ends_with(&end), "{told}");
        }
    }
    for (flag, value, expected) in [
        ("--wall-s", "-1", "expected seconds above 0 and at most 3153600000"),
        ("--wall-s", "1e300", "expected seconds above 0 and at most 3153600000"),
        ("--output-chars", "999", "expected a whole number from 1000 to 100000"),
    ] {
        let told = refusal(prorl, &["serve", flag, value], None).await;
        assert!(told.contains(flag) && told.ends_with(expected), "{told}");
    }
    // What this machine cannot hold.
    for (flag, value, begin, end) in [
        ("--memory-mb", "99999999999", "expected 1 MiB to ", " MiB (this machine's memory), found 99999999999 MiB"),
        ("--disk-mb", "99999999999", "expected 1 MiB to ", " which holds what is written), found 99999999999 MiB"),
        ("--tmp-mb", "99999999999", "expected 1 MiB to ", " which holds what is written), found 99999999999 MiB"),
        ("--pids", "4294967295", "expected 1 to ", " (kernel.pid_max), found 4294967295"),
        ("--cpus", "1e300", "expected 0.01 to ", " (the processors that may be used here), found 1e300"),
        ("--open-files", "63", "expected 64 to ", " (three quarters of what `ulimit -Hn` says here), found 63"),
    ] {
        for command in [&["serve"][..], &["serve", "--print-config"], &["sandbox", "exec", "host"]] {
            let told = refusal(prorl, &[command, &[flag, value]].concat(), None).await;
            assert!(told.starts_with(&format!("error: {flag}: {begin}")) && told.ends_with(end), "{told}");
        }
    }
    let told = refusal(prorl, &["serve", "--print-config"], Some(("PRORL_OPEN_FILES", "5"))).await;
    assert!(told.starts_with("error: PRORL_OPEN_FILES: expected 64 to "), "{told}");
    for folder in ["/nonexistent", "/", "of"] {
        for command in [&["serve"][..], &["serve", "--print-config"], &["sandbox", "exec", "host"]] {
            let told = refusal(prorl, &[command, &["--cgroup", folder]].concat(), None).await;
            let expected = "expected auto, off or a folder of the cgroup version 2 hierarchy";
            assert_eq!(told, format!("error: --cgroup: {expected}, found {folder}"));
        }
    }
    if std::process::Command::new("taskset").arg("-V").output().is_err() {
        return note("skipped in part: no taskset here");
    }
    let on_one = ["-c", &one_processor(), prorl, "sandbox", "exec", "--cpus", "1.5", "host"];
    let told = refusal("taskset", &on_one, None).await;
    assert_eq!(told, "error: --cpus: expected 0.01 to 1 (the processors that may be used here), found 1.5");
}

/// Returns the number of a processor that this process may run on.
fn one_processor() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    list.trim().split([',', '-']).next().unwrap().to_owned()
}

#[tokio::test]
async fn limits_of_a_file_are_read_as_those_of_an_instance() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prorl.toml");
    let prorl = prorl();
    let args = ["serve", "--print-config", "--config", file.to_str().unwrap()];
    for (line, expected) in [
        ("pids = \"many\"", "expected a whole number above 0, found the text \"many\""),
        ("memory_mb = -5", "expected a whole number above 0, found -5"),
        ("disk_mb = 1.5", "expected a whole number above 0, found 1.5"),
        ("wall_s = 1e300", "expected a number above 0 and at most 3153600000, found 1e+300"),
        ("cpus = nan", "expected a finite number, found nan or inf"),
        ("cpus = -inf", "expected a finite number, found nan or inf"),
        ("output_chars = 3", "expected a whole number from 1000 to 100000, found 3"),
        ("cpus = 1e300", "expected 0.01 to "),
    ] {
        std::fs::write(&file, line).unwrap();
        let key = line.split(' ').next().unwrap();
        let told = refusal(prorl.to_str().unwrap(), &args, None).await;
        assert!(told.starts_with(&format!("error: {key} in the configuration file: {expected}")), "{line}: {told}");
    }
    std::fs::write(&file, "memory_mb = 64\nwall_s = 1.5\nopen_files = 100\n").unwrap();
    let out =
        tokio::process::Command::new(&prorl).args(args).args(["--cpus", "1", "--pids", "7"]).output().await.unwrap();
    let told = String::from_utf8(out.stdout).unwrap();
    for line in [
        "memory_mb = 64 # file",
        "pids = 7 # flag",
        "cpus = 1.0 # flag",
        "wall_s = 1.5 # file",
        "open_files = 100 # file",
        "# file_mb is not set",
        "output_chars = 30000 # default",
    ] {
        assert!(told.contains(line), "{line} is not in\n{told}");
    }
    // What holds where nobody says anything is told as well.
    for key in ["disk_mb", "tmp_mb"] {
        let shown = told.lines().find(|line| line.starts_with(&format!("{key} = "))).unwrap_or_default();
        assert!(shown.ends_with(" # default"), "{key} is not in\n{told}");
    }
}

#[tokio::test]
async fn a_server_may_set_how_long_processes_run() {
    let turns = [bash("echo before; sleep 1000"), bash("true")];
    let said = said(&["--wall-s", "2"], json!({}), &turns).await;
    assert!(said[0].contains("before") && said[0].contains("wall time limit 2 s exceeded"), "{}", said[0]);
    assert_eq!(said[1], "The time of this sandbox is over. Nothing was run.");
}
