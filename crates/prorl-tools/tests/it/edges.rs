//! The corners of bash, where it must be said what happens.

use std::time::Duration;

use prorl_tools::{
    host::BashCall,
    wire::{BashAnswer, BashEnd, Interrupt},
};

use tokio::time::Instant;

use crate::guest::{Guest, LONG};

const MS: fn(u64) -> Duration = Duration::from_millis;

async fn end_of(guest: &Guest, command: &str, limit: Duration) -> BashAnswer {
    guest.bash(BashCall::new(command), limit).await
}

#[tokio::test]
async fn messages_name_the_lines_of_the_command() {
    let guest = Guest::start().await;
    for (command, output) in [
        ("echo 'a", "bash: eval: line 1: unexpected EOF while looking for matching `''\n"),
        (
            "echo a\n)\necho b",
            "a\nbash: eval: line 2: syntax error near unexpected token `)'\nbash: eval: line 2: `)'\n",
        ),
        ("echo $LINENO\necho $LINENO", "1\n2\n"),
        // bash counts the end of the text as a line.
        ("f() {", "bash: eval: line 2: syntax error: unexpected end of file\n"),
    ] {
        for before in ["true", "false", "(exit 130)"] {
            guest.run(before).await;
            assert_eq!(guest.run(command).await.0, output, "{command} after {before}");
        }
    }
    let (output, code) = guest.run("cat <<E\nopen").await;
    assert!(output.contains("here-document") && output.ends_with("open\n") && code == 0, "{output}");
}

#[tokio::test]
async fn traps_are_kept_and_do_not_see_the_driver() {
    let guest = Guest::start().await;
    for (command, output, code) in [
        ("trap 'echo E' ERR; false", "E\n", 1),
        ("false", "E\n", 1),
        ("echo $?; (exit 3)", "1\nE\n", 3),
        ("echo 'x", "bash: eval: line 2: unexpected EOF while looking for matching `''\n", 2),
        ("false || true", "", 0),
        ("trap -p ERR", "trap -- 'echo E' ERR\n", 0),
        ("trap - ERR; false", "", 1),
        ("false", "", 1),
        ("trap 'echo D' DEBUG; echo a", "D\na\n", 0),
        ("echo b; echo c", "D\nb\nD\nc\n", 0),
        ("trap 'echo \"it'\\''s\"' ERR; false", "D\nD\nD\nit's\n", 1),
        ("false", "D\nD\nit's\n", 1),
        ("trap - DEBUG ERR; echo d", "D\nd\n", 0),
        ("false; echo e", "e\n", 0),
        ("set -T; trap 'echo D' DEBUG; echo f", "D\nf\n", 0),
        ("echo g", "D\ng\n", 0),
        ("trap - DEBUG; set +T", "D\n", 0),
        ("echo h", "h\n", 0),
        ("f() { :; }; trap 'echo R' RETURN; f", "R\n", 0),
        ("trap - RETURN; f; echo i", "i\n", 0),
        ("trap 'echo U' USR1", "", 0),
        ("kill -USR1 $$; echo j", "U\nj\n", 0),
        ("trap 'echo I' INT", "", 0),
        ("kill -INT $$; echo k", "I\nk\n", 0),
    ] {
        let (got, status) = guest.run(command).await;
        // A trap on a function's return sees the end of the call too.
        let got = if command.contains("RETURN; f") { got.replace("R\nR\n", "R\n") } else { got };
        assert_eq!((got.as_str(), status), (output, code), "{command}");
    }
    // One that no command names.
    let script = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(script.path(), "trap 'echo E' ERR\ntrap 'echo D' DEBUG\n").unwrap();
    let guest = Guest::bare(&[]);
    guest.run(&format!(". {}", script.path().display())).await;
    assert_eq!(guest.run("false").await.0.matches('E').count(), 1);
    guest.run("trap - ERR DEBUG").await;
    guest.run("trap - ERR DEBUG").await;
    assert_eq!(guest.run("false; echo a").await.0, "a\n");
}

#[tokio::test]
async fn a_shell_that_lost_what_it_needs_is_replaced_at_once() {
    let guest = Guest::start().await;
    for command in [
        "builtin() { :; }",
        "builtin() { echo mine; }",
        "builtin() { false; }",
        "enable -n builtin",
        "enable -n printf",
        ".() { :; }",
        "exec 50>&-",
        "set -r",
        "shopt -s extdebug; trap false DEBUG",
    ] {
        let begun = Instant::now();
        let answer = end_of(&guest, &format!("cd /usr; echo before; {command}"), LONG).await;
        assert!(answer.output.text().starts_with("before\n"), "{command}: {answer:?}");
        assert!(answer.restarted.as_ref().is_some_and(|why| why.contains("the shell needs")), "{command}: {answer:?}");
        assert!(begun.elapsed() < Duration::from_secs(15), "{command}: {:?}", begun.elapsed());
        assert_eq!(guest.run("echo ok; pwd").await, ("ok\n/usr\n".to_owned(), 0), "{command}");
    }
    for command in [
        "printf() { :; }; set() { :; }; eval() { :; }; trap() { :; }; return() { :; }",
        "alias builtin='echo alias' .='echo dot' printf='echo p'",
        "enable -n set; enable -n history",
        "IFS=0123456789",
        "PATH=/nowhere",
        "readonly PATH IFS",
        "set -f; set -C; set -n; set -o posix",
        "for fd in {3..49}; do eval \"exec $fd>&-\"; done",
        "PS1='$ '; PS2='> '; PS4='P '; PROMPT_COMMAND='echo prompt'; PS0='zero'",
        "set -o history; set -H",
        "set -m",
        "unset HOME PWD",
    ] {
        guest.run(command).await;
        assert_eq!(guest.run("echo still; (exit 31)").await, ("still\n".to_owned(), 31), "{command}");
    }
    assert_eq!(guest.run("enable history set; history").await.0, "");
}

#[tokio::test]
async fn no_job_is_the_drivers() {
    let guest = Guest::start().await;
    for command in [
        "sleep 100 &",
        "sleep 100 & disown",
        "(sleep 100 &)",
        "setsid sleep 100 >/dev/null 2>&1 &",
        "nohup sleep 100 &",
    ] {
        guest.run(command).await;
        let (jobs, _) = guest.run("jobs").await;
        assert!(!jobs.contains("/proc/self/fd"), "{command}: {jobs}");
    }
    for stop in ["kill -STOP $$", "sleep 100 & sleep 100", "exit"] {
        end_of(&guest, stop, MS(200)).await;
        let (jobs, _) = guest.run("jobs").await;
        assert!(!jobs.contains("/proc/self/fd"), "{stop}: {jobs}");
    }
}

#[tokio::test]
async fn after_a_limit_return_means_what_it_did() {
    let guest = Guest::start().await;
    for stopped in ["sleep 100", "while :; do :; done", "f() { read line; }; f", "f() { sleep 100; }; f"] {
        let answer = end_of(&guest, stopped, MS(300)).await;
        assert!(matches!(answer.end, BashEnd::LimitPassed { by: Interrupt::Signal, .. }), "{stopped}: {answer:?}");
        assert_eq!(guest.run("f() { (exit 7); return; }; f").await.1, 7, "{stopped}");
    }
}

#[tokio::test]
async fn what_runs_in_the_background_is_told_once() {
    let guest = Guest::start().await;
    for command in [
        "sleep 100 & echo $!",
        "setsid sleep 100 & echo $!",
        "nohup sleep 100 >/dev/null 2>&1 & echo $!",
        "(sleep 100 & echo $!)",
    ] {
        let answer = end_of(&guest, command, LONG).await;
        let pid: i32 = answer.output.text().trim().parse().unwrap();
        let told: Vec<i32> = answer.background.iter().map(|one| one.pid).collect();
        assert_eq!(told, [pid], "{command}: {answer:?}");
        assert!(!answer.background[0].name.is_empty());
        assert_eq!(end_of(&guest, "true", LONG).await.background, [], "{command}");
    }
    let answer = end_of(&guest, "for n in {1..20}; do sleep 100 & done", LONG).await;
    assert_eq!(answer.background.len(), 8);
    assert_eq!(end_of(&guest, "sleep 0.01 & wait $!", LONG).await.background, []);
    let answer = end_of(&guest, "sleep 100 & while :; do :; done", MS(300)).await;
    assert_eq!(answer.background.len(), 1, "{answer:?}");
}

#[tokio::test]
async fn output_that_goes_elsewhere_is_told() {
    let guest = Guest::start().await;
    assert_eq!(end_of(&guest, "true", LONG).await.output_elsewhere, None);
    assert_eq!(end_of(&guest, "exec >/dev/null", LONG).await.output_elsewhere.as_deref(), Some("/dev/null"));
    assert_eq!(end_of(&guest, "echo lost", LONG).await.output_elsewhere.as_deref(), Some("/dev/null"));
    assert_eq!(end_of(&guest, "echo seen >/dev/tty", LONG).await.output_elsewhere, None);
    assert_eq!(end_of(&guest, "exec >/dev/tty 2>&-", LONG).await.output_elsewhere.as_deref(), Some("nowhere"));
    assert_eq!(end_of(&guest, "exec 2>/dev/tty", LONG).await.output_elsewhere, None);
    assert_eq!(guest.run("echo back").await.0, "back\n");
}

#[tokio::test]
async fn the_folder_that_is_told_is_the_new_shells() {
    let guest = Guest::start().await;
    let own = end_of(&guest, "pwd", LONG).await.cwd.unwrap();
    for command in
        ["mkdir -p /tmp/prorl-gone; cd /tmp/prorl-gone; rmdir /tmp/prorl-gone; exit", "cd /usr; exec sleep 100"]
    {
        let answer = end_of(&guest, command, MS(400)).await;
        assert!(answer.restarted.is_some(), "{command}: {answer:?}");
        let told = answer.cwd.unwrap();
        assert_eq!(guest.run("pwd").await.0, format!("{told}\n"), "{command}");
        assert!(told == "/usr" || told == own, "{command}: {told}");
    }
    // In a folder that is gone a shell goes on.
    guest.run("mkdir -p /tmp/prorl-gone; cd /tmp/prorl-gone; rmdir /tmp/prorl-gone").await;
    assert_eq!(guest.run("echo x").await, ("x\n".to_owned(), 0));
    guest.run("cd /; set -e").await;
    let answer = end_of(&guest, "false", LONG).await;
    assert_eq!(answer.restarted.as_deref(), Some("The shell ended with exit code 1 while `set -e` was on."));
}

const GETPASS: &str = "python3 -c 'import getpass; print(len(getpass.getpass()))'";

#[tokio::test]
async fn whoever_waits_for_input_is_seen_without_any_limit() {
    let guest = Guest::start().await;
    for (command, typed, output) in [
        ("read -s -p 'word: ' word; echo $word", "x", "x\n"),
        ("read line </dev/tty; echo $line", "x", "x\n"),
        ("cat", "C-d", ""),
        ("cat /dev/tty", "C-d", ""),
        (GETPASS, "abc", "3\n"),
        ("python3 -q", "exit()", ""),
        ("bash --norc -i", "exit", ""),
        ("select word in a b; do echo $word; break; done", "2", "b\n"),
    ] {
        let begun = Instant::now();
        let answer = end_of(&guest, command, LONG).await;
        assert!(
            matches!(answer.end, BashEnd::Running { wants_input: true, silent_ms: 2000.. }),
            "{command}: {answer:?}"
        );
        assert!(begun.elapsed() < Duration::from_secs(20), "{command}");
        let answer = guest.bash(BashCall::input(typed), LONG).await;
        assert_eq!(answer.end, BashEnd::Exited(0), "{command}: {answer:?}");
        assert!(answer.output.text().contains(output), "{command}: {answer:?}");
    }
    let answer = end_of(&guest, GETPASS, MS(1000)).await;
    let BashEnd::LimitPassed { wanted_input: true, by: Interrupt::Signal, .. } = answer.end else {
        panic!("{answer:?}")
    };
    // Work that is silent is none of that.
    assert_eq!(guest.run("sleep 3").await.1, 0);
    assert_eq!(
        guest.run("python3 -c 'import select, sys; print(select.select([sys.stdin], [], [], 3)[0])'").await.0,
        "[]\n"
    );
}

#[tokio::test]
async fn keys_reach_what_runs() {
    let guest = Guest::start().await;
    for (key, code) in [("C-c", 130), ("C-\\", 131), ("C-d", 0)] {
        let call = BashCall { silence: Some(MS(200)), ..BashCall::new("cat") };
        guest.bash(call, LONG).await;
        let answer = guest.bash(BashCall::input(key), LONG).await;
        assert_eq!(answer.end, BashEnd::Exited(code), "{key}: {answer:?}");
        assert_eq!(guest.run("sleep 0.1 & wait; echo $?").await.0, "0\n", "{key}");
    }
    // The shell's own trap is not for ever.
    guest.run("trap - INT").await;
    let call = BashCall { silence: Some(MS(200)), ..BashCall::new("while :; do sleep 1; done; echo never") };
    guest.bash(call, LONG).await;
    let answer = guest.bash(BashCall::input("C-c"), LONG).await;
    assert_eq!((answer.end, answer.output.text().as_str()), (BashEnd::Exited(130), ""));
    for size in ["stty rows 5 cols 7", "stty size"] {
        assert!(["", "24 120\n"].contains(&guest.run(size).await.0.as_str()));
    }
}

#[tokio::test]
async fn pagers_and_editors_do_not_wait() {
    let guest = Guest::bare(&[("PAGER", "less"), ("EDITOR", "vi"), ("GIT_EDITOR", "vi")]);
    let (output, _) = guest.run("echo $PAGER $EDITOR $GIT_EDITOR $VISUAL $GIT_TERMINAL_PROMPT $SYSTEMD_PAGER").await;
    assert_eq!(output, "cat true true true 0 cat\n");
}

#[tokio::test]
async fn much_output_takes_little_memory() {
    let guest = Guest::start().await;
    let answer = end_of(&guest, "head -c 100000000 /dev/zero | tr '\\0' x", LONG).await;
    assert_eq!((answer.output.total, answer.end), (100_000_000, BashEnd::Exited(0)));
    let answer = end_of(&guest, "python3 -c 'import os\nfor _ in range(1_000_000): os.write(1, b\"x\")'", LONG).await;
    assert_eq!((answer.output.total, answer.end), (1_000_000, BashEnd::Exited(0)));
    let (memory, _) = guest.run("awk '/RssAnon/ {print $2}' /proc/1/status").await;
    if let Ok(n_kib) = memory.trim().parse::<u64>() {
        assert!(n_kib < 8 * 1024, "{n_kib} KiB");
    }
}

#[tokio::test]
async fn job_control_that_a_task_turns_on_does_no_harm() {
    let guest = Guest::start().await;
    guest.run("set -m").await;
    assert_eq!(guest.run("sleep 100 & echo on").await.0.lines().last(), Some("on"));
    let answer = end_of(&guest, "echo start; sleep 100; echo never", MS(300)).await;
    assert!(matches!(answer.end, BashEnd::LimitPassed { .. }) && answer.restarted.is_none(), "{answer:?}");
    assert_eq!(guest.run("set +m; echo ok").await.0, "ok\n");
}
