//! bash as an agent meets it.

use std::{os::unix::fs::PermissionsExt as _, time::Duration};

use prorl_tools::{
    host::{BashCall, ToolClient},
    wire::{BashEnd, Interrupt},
};

use tokio::time::Instant;

use crate::guest::{Guest, LONG};

const MS: fn(u64) -> Duration = Duration::from_millis;

#[tokio::test]
async fn output_and_exit_code_come_back_whole() {
    let guest = Guest::start().await;
    for (command, output, code) in [
        ("echo hello", "hello\n", 0),
        ("printf 'no newline'", "no newline", 0),
        ("true", "", 0),
        ("", "", 0),
        ("# nothing", "", 0),
        ("false", "", 1),
        ("(exit 42)", "", 42),
        ("echo $?", "42\n", 0),
        ("nosuchcommand", "bash: nosuchcommand: command not found\n", 127),
        ("echo out; echo err >&2; echo out2", "out\nerr\nout2\n", 0),
        ("cat <<'EOF'\nit's $HOME\nEOF", "it's $HOME\n", 0),
        ("for i in 1 2 3; do\n  echo \"line $i\"\ndone\necho end", "line 1\nline 2\nline 3\nend\n", 0),
        ("echo 'single' \"double\" \\'escaped\\'", "single double 'escaped'\n", 0),
        ("printf 'a\\tb\\rc\\n'", "a\tb\rc\n", 0),
        ("return 5", "", 5),
        ("break; continue; echo on", "", 0),
        ("test -t 0 && test -t 1 && echo terminal", "terminal\n", 0),
        ("kill -TERM $BASHPID & wait $!; echo $?", "143\n", 0),
        ("set -u; echo $unset_name; echo on", "", 1),
        ("set +u", "", 0),
    ] {
        let (got, status) = guest.run(command).await;
        if command.starts_with("break") || command.starts_with("set -u") {
            assert!(got.ends_with(if command.starts_with("break") { "on\n" } else { "unbound variable\n" }), "{got:?}");
        } else {
            assert_eq!(got, output, "{command:?}");
        }
        assert_eq!(status, code, "{command:?}");
    }
}

#[tokio::test]
async fn state_is_kept_from_call_to_call() {
    let guest = Guest::start().await;
    for command in [
        "cd /usr",
        "export A=1; b=2",
        "declare -A map=([k]=v)",
        "f() { echo f $1; }",
        "alias g='echo g'",
        "set -- x y",
        "umask 077",
    ] {
        assert_eq!(guest.run(command).await, (String::new(), 0), "{command}");
    }
    let (output, _) = guest.run("pwd; bash -c 'echo $A'; echo $b ${map[k]} $# $0; f 3; g 4; umask").await;
    assert_eq!(output, "/usr\n1\n2 v 2 bash\nf 3\ng 4\n0077\n");
    assert_eq!(guest.bash(BashCall::new("cd /tmp"), LONG).await.cwd.as_deref(), Some("/tmp"));
}

#[tokio::test]
async fn the_driver_leaves_no_trace() {
    let guest = Guest::start().await;
    // A child has its standard descriptors and the one it lists them with.
    assert_eq!(guest.run("ls -1 /proc/self/fd").await.0, "0\n1\n2\n3\n");
    assert_eq!(guest.run("declare -F; jobs; history").await, (String::new(), 0));
    assert!(!guest.run("declare -p").await.0.contains("__prorl"));
    let status = guest.run("cat /proc/self/status").await.0;
    for mask in ["SigBlk:\t0000000000000000\n", "SigIgn:\t0000000000000000\n"] {
        assert!(status.contains(mask), "{status}");
    }
    // The depth of the source shows as more pluses.
    for command in ["set -x; echo a", "echo a"] {
        assert_eq!(guest.run(command).await.0.trim_start_matches('+'), " echo a\na\n");
    }
    assert_eq!(guest.run("{ set +x; } 2>/dev/null; echo c").await.0, "c\n");
    assert_eq!(guest.run("echo d").await.0, "d\n");
}

#[tokio::test]
async fn unbalanced_quotes_are_bashs_own_error() {
    let guest = Guest::start().await;
    let (output, code) = guest.run("echo 'abc").await;
    assert!(output.contains("unexpected EOF while looking for matching"), "{output}");
    assert_ne!(code, 0);
    let (output, _) = guest.run("if true; then echo x").await;
    assert!(output.contains("syntax error"), "{output}");
    let answer = guest.bash(BashCall::new("echo a\0b"), LONG).await;
    assert!(matches!(&answer.end, BashEnd::Refused(reason) if reason.contains("NUL")), "{answer:?}");
    assert_eq!(guest.run("echo fine").await.0, "fine\n");
}

#[tokio::test]
async fn two_hundred_quick_commands_are_exactly_right() {
    let guest = Guest::start().await;
    for n in 0..200 {
        assert_eq!(guest.run(&format!("echo line {n}; (exit {})", n % 256)).await, (format!("line {n}\n"), n % 256));
    }
}

#[tokio::test]
async fn twenty_sessions_side_by_side_are_exactly_right() {
    async fn one(client: &ToolClient, session: usize) {
        let session_name = format!("s{session}");
        for n in 0..50 {
            let command =
                format!("x=$((x + 1)); echo {session}:$x; printf '%0*d\\n' {} 7; (exit {})", 100 + n * 40, n % 7);
            let call = BashCall { session: session_name.clone(), ..BashCall::new(command) };
            let answer = client.bash(&call, LONG).await.unwrap();
            let width = 100 + n * 40;
            assert_eq!(answer.output.text(), format!("{session}:{}\n{:0>width$}\n", n + 1, 7));
            assert_eq!(answer.end, BashEnd::Exited(i32::try_from(n % 7).unwrap()));
        }
    }
    let guest = Guest::start().await;
    let all = (0..20).map(|session| one(guest.client(), session));
    futures_util::future::join_all(all).await;
}

#[tokio::test]
async fn large_output_is_bounded_and_counted() {
    let guest = Guest::start().await;
    let answer = guest.bash(BashCall::new("seq 1 700000"), LONG).await;
    let total: u64 = (1..=700_000_u64).map(|n| n.to_string().len() as u64 + 1).sum();
    assert_eq!((answer.output.total, answer.end), (total, BashEnd::Exited(0)));
    assert_eq!((answer.output.head.0.len(), answer.output.tail.0.len()), (64 * 1024, 64 * 1024));
    let text = answer.output.text();
    assert!(text.starts_with("1\n2\n3\n") && text.ends_with("\n699999\n700000\n"));
    assert!(text.contains(&format!("[... {} of {total} bytes left out ...]", total - 128 * 1024)));
}

#[tokio::test]
async fn bytes_that_are_no_text_do_no_harm() {
    let guest = Guest::start().await;
    let answer =
        guest.bash(BashCall::new("printf '\\xf0\\x00\\xff ok\\n'; head -c 100000 /dev/urandom | wc -c"), LONG).await;
    assert_eq!(answer.output.bytes(), b"\xf0\0\xff ok\n100000\n");
    assert_eq!(answer.output.text(), "\u{fffd}\0\u{fffd} ok\n100000\n");
    let answer = guest.bash(BashCall::new("head -c 300000 /dev/urandom"), LONG).await;
    assert_eq!((answer.output.total, answer.end), (300_000, BashEnd::Exited(0)));
}

#[tokio::test]
async fn background_processes_do_not_hold_the_call() {
    let guest = Guest::start().await;
    let begun = Instant::now();
    for command in [
        "sleep 100 & echo started",
        "setsid sleep 100 & echo started",
        "nohup sleep 100 >/dev/null 2>&1 & echo started",
        "(sleep 100 &); echo started",
    ] {
        assert_eq!(guest.run(command).await, ("started\n".to_owned(), 0), "{command}");
    }
    // A child that fills the terminal all the time neither delays nor mixes up what comes next.
    guest.run("yes noise > /dev/tty & echo; kill -STOP $!").await;
    assert!(guest.run("kill -CONT $!; echo word; kill $!").await.0.contains("word\n"));
    assert!(begun.elapsed() < Duration::from_secs(20));
    // What a background process prints later comes with a later call, and is not lost.
    guest.run("mkfifo /tmp/prorl-it-$$; (cat /tmp/prorl-it-$$ > /dev/null; echo late) & :").await;
    let (first, _) = guest.run("echo go > /tmp/prorl-it-$$; rm /tmp/prorl-it-$$; wait $!").await;
    assert_eq!(first, "late\n");
}

#[tokio::test]
async fn a_noisy_background_process_neither_delays_nor_garbles() {
    let guest = Guest::start().await;
    guest.run("yes >/dev/tty & pid=$!").await;
    for n in 0..20 {
        let answer = guest.bash(BashCall::new(format!("echo word-{n}")), LONG).await;
        assert_eq!(answer.end, BashEnd::Exited(0));
        let all = answer.output;
        assert!(all.omitted() > 0 || all.text().contains(&format!("word-{n}")), "{n}");
    }
    let answer = guest.bash(BashCall::new("kill $pid; wait $pid"), LONG).await;
    assert_eq!(answer.end, BashEnd::Exited(143));
    assert_eq!(guest.run("echo quiet").await.0, "quiet\n");
}

#[tokio::test]
async fn the_end_of_the_shell_is_survived_and_said() {
    let guest = Guest::start().await;
    for (command, code, reason) in [
        ("exit 3", 3, "The shell ended with exit code 3."),
        ("exec true", 0, "The shell ended with exit code 0."),
        ("exec bash -c 'exit 7'", 7, "The shell ended with exit code 7."),
        ("set -e; false; echo never", 1, "The shell ended with exit code 1."),
        ("kill -9 $$", 137, "The shell was killed by signal 9."),
        ("set +e; exit 97", 97, "The shell ended with exit code 97."),
        ("trap 'echo bye' EXIT; exit", 0, "The shell ended with exit code 0."),
    ] {
        guest.run("cd /usr; lost=1").await;
        let answer = guest.bash(BashCall::new(format!("echo before; {command}")), LONG).await;
        assert_eq!(answer.end, BashEnd::Exited(code), "{command}");
        assert_eq!(answer.restarted.as_deref(), Some(reason), "{command}");
        assert!(answer.output.text().starts_with("before\n"), "{command}");
        assert!(!answer.output.text().contains("never"));
        assert_eq!(guest.run("echo [$lost]; pwd").await.0, "[]\n/usr\n", "{command}");
    }
    let result = guest.tool("execute_bash", &[("command", "echo before; exit 3")], LONG).await;
    assert_eq!(
        result.content.text(),
        "before\n[The command completed with exit code 3.]\n[The shell ended with exit code 3. A new shell was started in \
         /usr; variables and functions are reset.]\n[Current working directory: /usr]"
    );
}

#[tokio::test]
async fn the_limit_interrupts_and_the_session_lives_on() {
    let guest = Guest::start().await;
    guest.run("cd /usr; export KEPT=1").await;
    for (command, by) in [
        ("echo start; while true; do sleep 1; done; echo never", Interrupt::Signal),
        ("echo start; while :; do :; done; echo never", Interrupt::Signal),
        ("f() { echo start; sleep 50; echo never; }; g() { f; echo never; }; g; echo never", Interrupt::Signal),
        ("echo start; trap '' INT; while :; do :; done; echo never", Interrupt::Signal),
        ("echo start; read line; echo never", Interrupt::Signal),
        ("echo start; kill -STOP $BASHPID & sleep 50; echo never", Interrupt::Signal),
        ("echo start; python3 -c 'import time; time.sleep(50)'; echo never", Interrupt::Signal),
        ("echo start; bash -c 'trap \"\" INT; while :; do sleep 1; done'; echo never", Interrupt::Kill),
        ("echo start; setsid -w sleep 50; echo never", Interrupt::Kill),
    ] {
        let begun = Instant::now();
        let answer = guest.bash(BashCall::new(command), MS(400)).await;
        let wanted_input = command.contains("read");
        assert_eq!(answer.end, BashEnd::LimitPassed { limit_ms: 400, by, wanted_input }, "{command}: {answer:?}");
        assert_eq!(answer.restarted, None, "{command}");
        let text = answer.output.text();
        assert!(text.starts_with("start\n") && !text.contains("never"), "{command}: {text}");
        assert!(begun.elapsed() < Duration::from_secs(6), "{command}");
        assert_eq!(guest.run("echo $KEPT; pwd").await.0, "1\n/usr\n", "{command}");
    }
    let answer = guest.bash(BashCall::new("echo start; trap '' INT RTMAX; while :; do :; done"), MS(300)).await;
    assert_eq!(answer.end, BashEnd::LimitPassed { limit_ms: 300, by: Interrupt::Restart, wanted_input: false });
    assert!(answer.restarted.is_some());
    assert_eq!(answer.output.text(), "start\n");
    assert_eq!(guest.run("echo [$KEPT]; pwd").await.0, "[]\n/usr\n");
}

#[tokio::test]
async fn after_a_limit_the_shell_waits_as_before() {
    let guest = Guest::start().await;
    for stopped in
        ["sleep 1000", "while :; do :; done", "sleep 1000 | cat", "bash -c 'trap \"\" INT; sleep 1000; sleep 1000'"]
    {
        let answer = guest.bash(BashCall::new(stopped), MS(200)).await;
        assert!(
            matches!(answer.end, BashEnd::LimitPassed { .. }) && answer.restarted.is_none(),
            "{stopped}: {answer:?}"
        );
        let begun = Instant::now();
        for wait in ["wait", "wait $!"] {
            assert_eq!(guest.run(&format!("sleep 0.2 & {wait}; echo $?")).await.0, "0\n", "{stopped}: {wait}");
        }
        assert!(begun.elapsed() >= MS(400), "{stopped}");
        assert_eq!(guest.run("trap -p DEBUG").await.0, "", "{stopped}");
    }
    guest.bash(BashCall { silence: Some(MS(100)), ..BashCall::new("sleep 1000") }, LONG).await;
    assert_eq!(guest.bash(BashCall::input("C-c"), LONG).await.end, BashEnd::Exited(130));
    assert_eq!(guest.run("sleep 0.2 & wait; echo $?").await.0, "0\n");
}

#[tokio::test]
async fn a_program_in_the_shells_place_is_ended_with_its_limit() {
    let guest = Guest::start().await;
    for program in ["sleep 1000", "bash -c 'sleep 1000; echo never'", "bash"] {
        let answer = guest.bash(BashCall::new(format!("cd /usr; echo start; exec {program}")), MS(300)).await;
        assert!(answer.restarted.is_some(), "{program}: {answer:?}");
        assert!(answer.output.text().starts_with("start\n"), "{program}: {answer:?}");
        assert_eq!(guest.run("echo here").await, ("here\n".to_owned(), 0), "{program}");
    }
}

#[tokio::test]
async fn a_silent_command_runs_on_and_takes_input() {
    let guest = Guest::start().await;
    let silent = |command: &str| BashCall { silence: Some(MS(300)), ..BashCall::new(command) };
    let typed = |text: &str| BashCall { silence: Some(MS(300)), ..BashCall::input(text) };

    let answer = guest.bash(silent("echo ready; cat"), LONG).await;
    assert_eq!(answer.output.text(), "ready\n");
    let BashEnd::Running { silent_ms, .. } = answer.end else { panic!("{answer:?}") };
    assert!(silent_ms >= 300);

    let answer = guest.bash(BashCall::new("echo other"), LONG).await;
    assert!(matches!(&answer.end, BashEnd::Refused(reason) if reason.contains("still running")), "{answer:?}");
    let answer = guest.bash(typed("C-z"), LONG).await;
    assert!(matches!(&answer.end, BashEnd::Refused(reason) if reason.contains("not supported")), "{answer:?}");

    let answer = guest.bash(typed("hello"), LONG).await;
    assert_eq!(answer.output.text(), "hello\n");
    assert!(matches!(answer.end, BashEnd::Running { .. }));
    let answer = guest.bash(typed(""), LONG).await;
    assert_eq!(answer.output.text(), "");
    let answer = guest.bash(typed("C-d"), LONG).await;
    assert_eq!(answer.end, BashEnd::Exited(0));

    let answer = guest.bash(BashCall::input("hello"), LONG).await;
    assert!(matches!(&answer.end, BashEnd::Refused(reason) if reason.contains("No command is running")), "{answer:?}");

    guest.bash(silent("sleep 100; echo never"), LONG).await;
    let answer = guest.bash(typed("C-c"), LONG).await;
    assert_eq!((answer.end, answer.output.text().as_str()), (BashEnd::Exited(130), ""));

    // What ends between two calls is told by the next one, whichever that is.
    for next in [typed(""), BashCall::new("echo next")] {
        let is_input = next.is_input;
        guest.run("rm -f /tmp/prorl-it-fifo; mkfifo /tmp/prorl-it-fifo").await;
        guest.bash(silent("read x < /tmp/prorl-it-fifo; echo got $x; (exit 5)"), LONG).await;
        let other = BashCall {
            session: "other".to_owned(),
            ..BashCall::new("echo word > /tmp/prorl-it-fifo; rm /tmp/prorl-it-fifo")
        };
        guest.bash(other, LONG).await;
        let answer = loop {
            let answer = guest.bash(next.clone(), LONG).await;
            if !matches!(answer.end, BashEnd::Refused(_)) {
                break answer;
            }
        };
        let (end, text) = if is_input {
            (BashEnd::Exited(5), "got word\n")
        } else {
            (BashEnd::Exited(0), "got word\n[The earlier command completed with exit code 5.]\nnext\n")
        };
        assert_eq!((answer.end, answer.output.text().as_str()), (end, text));
    }
}

#[tokio::test]
async fn a_command_that_waits_for_input_is_told() {
    let guest = Guest::start().await;
    let call = BashCall { silence: Some(MS(200)), ..BashCall::new("read -p 'name? ' name; echo $name") };
    let answer = guest.bash(call, LONG).await;
    assert_eq!(answer.output.text(), "name? ");
    assert!(matches!(answer.end, BashEnd::Running { wants_input: true, .. }), "{answer:?}");
    let answer = guest.bash(BashCall::input("Ada"), LONG).await;
    assert_eq!((answer.end, answer.output.text().as_str()), (BashEnd::Exited(0), "Ada\n"));
    let call = BashCall { silence: Some(MS(200)), ..BashCall::new("sleep 100") };
    assert!(matches!(guest.bash(call, LONG).await.end, BashEnd::Running { wants_input: false, .. }));
}

#[tokio::test]
async fn marks_cannot_be_forged() {
    let guest = Guest::start().await;
    let forge = "for fd in {3..255}; do { echo \"$RANDOM 0 hiB\" >&$fd; } 2>/dev/null; done";
    for command in [
        format!("bash -c '{}'; echo real; (exit 9)", forge.replace('\'', "'\\''")),
        format!("({forge}); echo real; (exit 9)"),
        format!("({forge}) & wait; echo real; (exit 9)"),
        // From the shell itself, which has the socket and not the word.
        format!("{forge}; echo real; (exit 9)"),
        "for n in {1..1000}; do echo \"$RANDOM$RANDOM 0 hiB\" >&50; done; echo real; (exit 9)".to_owned(),
        "for n in {1..1000}; do printf '%08x%08x%08x%08x' $RANDOM $RANDOM $RANDOM $RANDOM; done; echo; echo real; (exit 9)".to_owned(),
        // By way of the shell's own descriptors, which a child of the same user may open.
        "bash -c 'for f in /proc/$PPID/fd/*; do case $(readlink $f) in /dev/pts/*|pipe:*) ;; *) echo \"x 0 hiB\" > $f ;; esac; done' 2>/dev/null; echo real; (exit 9)".to_owned(),
    ] {
        let answer = guest.bash(BashCall::new(&command), LONG).await;
        assert_eq!(answer.end, BashEnd::Exited(9), "{command}: {answer:?}");
        assert!(answer.output.text().ends_with("real\n"), "{command}");
        assert_eq!(guest.run("echo intact").await.0, "intact\n");
    }
}

#[tokio::test]
async fn what_a_command_does_to_the_terminal_is_undone() {
    let guest = Guest::start().await;
    let plain = guest.run("stty -a").await.0;
    guest.run("stty raw -echo opost onlcr; exec 0<&0").await;
    assert_eq!(guest.run("stty -a").await.0, plain);
    guest.run("python3 -c 'import os; os.set_blocking(0, False)'").await;
    let call = BashCall { silence: Some(MS(200)), ..BashCall::new("cat") };
    assert!(matches!(guest.bash(call, LONG).await.end, BashEnd::Running { .. }));
    assert_eq!(guest.bash(BashCall::input("C-d"), LONG).await.end, BashEnd::Exited(0));
    // Typed and not read is not the next command's.
    let call = BashCall { silence: Some(MS(200)), ..BashCall::new("sleep 100") };
    guest.bash(call, LONG).await;
    let call = BashCall { silence: Some(MS(200)), ..BashCall::input("stray line") };
    guest.bash(call, LONG).await;
    guest.bash(BashCall::input("C-c"), LONG).await;
    let call = BashCall { silence: Some(MS(200)), ..BashCall::new("read -t 1 line; echo [$line]") };
    assert_eq!(guest.bash(BashCall { silence: None, ..call }, LONG).await.output.text(), "[]\n");
}

#[tokio::test]
async fn a_long_command_line_is_taken() {
    let guest = Guest::start().await;
    let word = "x".repeat(1_000_000);
    assert_eq!(guest.run(&format!("w={word}; echo ${{#w}}")).await, ("1000000\n".to_owned(), 0));
}

#[tokio::test]
async fn a_call_takes_no_longer_than_its_way() {
    let guest = Guest::start().await;
    let mut took = Vec::new();
    for _ in 0..300 {
        let begun = Instant::now();
        guest.run("true").await;
        took.push(begun.elapsed());
    }
    took.sort();
    // Far above what it takes, and far below what any polling or sleeping would cost.
    assert!(took[30] < MS(20), "{took:?}");
    let _said = std::io::Write::write_all(
        &mut std::io::stderr(),
        format!("true: p50 {:?}, p99 {:?}\n", took[150], took[297]).as_bytes(),
    );
}

#[tokio::test]
async fn a_flood_of_marks_does_not_hold_up_the_limit() {
    let guest = Guest::bare(&[]);
    // The shell has the socket under this number, and hands it to whom it is told to.
    let flood = "for n in {1..32}; do dd if=/dev/zero bs=1 >&50 2>/dev/null & done; sleep 100";
    let answer = guest.bash(BashCall::new(flood), MS(500)).await;
    assert!(matches!(answer.end, BashEnd::LimitPassed { limit_ms: 500, .. }), "{answer:?}");
    let answer = guest.bash(BashCall::new("echo next"), LONG).await;
    assert_eq!((answer.output.text().as_str(), answer.end), ("next\n", BashEnd::Exited(0)));
}

#[tokio::test]
async fn a_shell_that_does_not_come_up_is_told_when_the_limit_passes() {
    let folder = tempfile::tempdir().unwrap();
    let bash = folder.path().join("bash");
    std::fs::write(&bash, "#!/bin/sh\nexec sleep 1000\n").unwrap();
    std::fs::set_permissions(&bash, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let guest = Guest::bare(&[("PATH", &path)]);
    let answer = guest.bash(BashCall::new("true"), MS(300)).await;
    assert!(matches!(&answer.end, BashEnd::Refused(reason) if reason.contains("did not come up")), "{answer:?}");
}
