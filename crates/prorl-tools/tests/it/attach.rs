//! Programs whose streams are attached.

use std::time::Duration;

use prorl_core::frame;
use prorl_tools::{
    host::{AttachSpec, Attached, ExecSpec, Input, Output, ToolClient, ToolError},
    wire::{AttachAnswer, Bytes, ExitStatus, GuestFrame, Stream, WindowSize},
};
use tokio::{io::AsyncWriteExt, net::UnixStream, time::timeout};

use crate::guest::{Guest, LONG, asked};

const SIGPIPE: i32 = 13;

fn sh(script: &str) -> AttachSpec {
    AttachSpec::new(["sh", "-c", script])
}

fn terminal(script: &str) -> AttachSpec {
    AttachSpec { terminal: Some(WindowSize { rows: 30, columns: 100 }), ..AttachSpec::new(["bash", "-c", script]) }
}

fn ended(code: i32) -> AttachAnswer {
    AttachAnswer { status: ExitStatus::Code(code), timed_out: false }
}

/// Reads an output to its end.
async fn all(output: Option<Output>) -> Vec<u8> {
    let mut output = output.unwrap();
    let mut bytes = Vec::new();
    while let Some(piece) = output.next().await {
        bytes.extend(piece);
    }
    bytes
}

/// Reads an output until it has said `text`.
async fn until(output: &mut Output, text: &str) -> String {
    let mut said = Vec::new();
    let reading = async {
        while !String::from_utf8_lossy(&said).contains(text) {
            let piece = output.next().await;
            said.extend(piece.unwrap_or_else(|| panic!("ended before {text:?}: {}", String::from_utf8_lossy(&said))));
        }
    };
    assert!(timeout(LONG, reading).await.is_ok(), "no {text:?} in {:?}", String::from_utf8_lossy(&said));
    String::from_utf8_lossy(&said).into_owned()
}

/// Writes all of an input and ends it.
async fn feed(input: Option<Input>, bytes: &[u8]) {
    input.unwrap().write(bytes).await.unwrap();
}

fn noise(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..len).map(|_| next()).collect()
}

async fn works(guest: &Guest) {
    let output = guest.client().exec(&ExecSpec::new(["echo", "here"]), LONG).await.unwrap();
    assert_eq!(output.stdout.text(), "here\n");
}

#[tokio::test]
async fn bytes_pass_as_they_are_and_apart() {
    let guest = Guest::bare(&[]);
    let spec = AttachSpec {
        env: vec![("A".into(), "value".into())],
        cwd: Some("/usr".into()),
        ..sh("cat; pwd >&2; echo \"$A\" >&2; exit 3")
    };
    let mut attached = guest.client().attach(&spec, LONG).await.unwrap();
    let sent = noise(5_000_000, 7);
    let (input, stdout, stderr) = (attached.stdin.take(), attached.stdout.take(), attached.stderr.take());
    let ((), stdout, stderr, end) = tokio::join!(feed(input, &sent), all(stdout), all(stderr), attached.wait());
    assert!(stdout == sent, "{} bytes came back", stdout.len());
    assert_eq!(String::from_utf8_lossy(&stderr), "/usr\nvalue\n");
    assert_eq!(end.unwrap(), ended(3));
    // Once more, since the end stays.
    assert_eq!(attached.wait().await.unwrap(), ended(3));
}

#[tokio::test]
async fn what_cannot_be_started_is_said() {
    let guest = Guest::bare(&[]);
    let missing = AttachSpec::new(["/nonexistent/program"]);
    let nowhere = AttachSpec { cwd: Some("/nonexistent/folder".into()), ..sh("true") };
    let file = AttachSpec { cwd: Some("/etc/passwd".into()), ..sh("true") };
    let nothing = AttachSpec::new(Vec::<String>::new());
    for (spec, word) in [
        (missing, "cannot run /nonexistent/program: No such file"),
        (nowhere, "cannot enter /nonexistent/folder: No such file"),
        (file, "cannot enter /etc/passwd: Not a directory"),
        (nothing, "the command is empty"),
    ] {
        let error = guest.client().attach(&spec, LONG).await.unwrap_err();
        assert!(matches!(&error, ToolError::Failed { message } if message.contains(word)), "{error}");
    }
    works(&guest).await;
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_up_nobody_else() {
    let guest = Guest::bare(&[]);
    let mut slow = guest.client().attach(&sh("head -c 30000000 /dev/zero; echo end >&2"), LONG).await.unwrap();
    // Were more sent than the window, the channel would be closed as by a hostile guest.
    for _ in 0..50 {
        works(&guest).await;
    }
    let mut other = guest.client().attach(&sh("head -c 3000000 /dev/zero"), LONG).await.unwrap();
    assert_eq!(all(other.stdout.take()).await.len(), 3_000_000);
    let (stdout, stderr) = (slow.stdout.take(), slow.stderr.take());
    // One output does not wait for the other either.
    let both = async {
        let first = all(stdout).await.len();
        (first, all(stderr).await)
    };
    assert_eq!(timeout(LONG, both).await.unwrap(), (30_000_000, b"end\n".to_vec()));
    assert_eq!(slow.wait().await.unwrap(), ended(0));
}

#[tokio::test]
async fn a_program_that_does_not_read_holds_up_its_own_input_alone() {
    let guest = Guest::bare(&[]);
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let gate = gate.to_str().unwrap();
    let mut attached = guest.client().attach(&sh(&format!("read go < {gate}; wc -c")), LONG).await.unwrap();
    let (input, stdout) = (attached.stdin.take(), attached.stdout.take());
    let sent = vec![b'x'; 4_000_000];
    let mut feeding = std::pin::pin!(feed(input, &sent));
    tokio::select! {
        () = &mut feeding => panic!("4 MB went into a program that does not read"),
        () = async {
            for _ in 0..50 {
                works(&guest).await;
            }
        } => {}
    }
    guest.run(&format!("echo > {gate}")).await;
    let ((), counted) = tokio::join!(feeding, all(stdout));
    assert_eq!(String::from_utf8_lossy(&counted).trim(), "4000000");
}

#[tokio::test]
async fn a_closed_end_is_seen_at_the_other() {
    let guest = Guest::bare(&[]);
    let mut attached = guest.client().attach(&AttachSpec::new(["yes"]), LONG).await.unwrap();
    assert!(attached.stdout.as_mut().unwrap().next().await.unwrap().starts_with(b"y\n"));
    attached.stdout = None;
    assert_eq!(attached.wait().await.unwrap().status, ExitStatus::Signal(SIGPIPE));

    // The program's own ends, while it runs on.
    let mut attached = guest.client().attach(&sh("exec <&- >&-; read go <&2; exec 2>&-"), LONG).await.unwrap();
    assert_eq!(attached.stdout.as_mut().unwrap().next().await, None);
    let mut input = attached.stdin.take().unwrap();
    let refused = loop {
        if let Err(error) = input.write(b"x").await {
            break error;
        }
    };
    assert!(matches!(refused, ToolError::InputClosed) && !refused.is_infrastructure());

    // After the end.
    let mut attached = guest.client().attach(&sh("exit 4"), LONG).await.unwrap();
    assert_eq!(attached.wait().await.unwrap(), ended(4));
    let late = attached.stdin.as_mut().unwrap().write(b"x").await;
    assert!(matches!(late, Err(ToolError::InputClosed)));
    attached.signal(15);
    attached.resize(WindowSize::default());
    assert_eq!(attached.stdout.as_mut().unwrap().next().await, None);
    works(&guest).await;
}

#[tokio::test]
async fn signals_and_limits_are_in_the_end() {
    let guest = Guest::bare(&[]);
    let mut attached =
        guest.client().attach(&sh("trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done"), LONG).await.unwrap();
    until(attached.stdout.as_mut().unwrap(), "ready").await;
    attached.signal(15);
    assert_eq!(attached.wait().await.unwrap(), ended(7));

    let attached = guest.client().attach(&sh("kill -9 $$"), LONG).await.unwrap();
    assert_eq!(attached.wait().await.unwrap().status.code(), 137);

    let limit = Duration::from_millis(300);
    let mut attached =
        guest.client().attach(&sh("trap '' TERM INT; echo begun; sleep 86394.5; :"), limit).await.unwrap();
    let stdout = attached.stdout.take();
    let (said, end) = tokio::join!(all(stdout), attached.wait());
    assert_eq!(
        (said.as_slice(), end.unwrap()),
        (b"begun\n".as_slice(), AttachAnswer { status: ExitStatus::Signal(9), timed_out: true })
    );
    assert!(!runs("86394.5"));

    // The end of the program counts, and not that of what it has left in the background.
    let mut attached = guest.client().attach(&sh("yes >&2 & sleep 86394.25 & echo done"), LONG).await.unwrap();
    let (stdout, stderr) = (attached.stdout.take(), attached.stderr.take());
    let (said, _, end) =
        timeout(LONG, async { tokio::join!(all(stdout), all(stderr), attached.wait()) }).await.unwrap();
    assert_eq!((said.as_slice(), end.unwrap()), (b"done\n".as_slice(), ended(0)));
}

/// Tells whether a live process has this word among its arguments.
fn runs(word: &str) -> bool {
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        std::fs::read_to_string(entry.path().join("cmdline")).is_ok_and(|arguments| arguments.contains(word))
    })
}

#[tokio::test]
async fn a_dropped_program_is_killed_with_all_that_it_started() {
    let guest = Guest::bare(&[]);
    for spec in [
        sh("sleep 86393.25 & setsid sleep 86393.5 & trap '' HUP TERM; echo up; sleep 86393.75; :"),
        terminal("sleep 86393.25 & setsid sleep 86393.5 & trap '' HUP TERM; echo up; sleep 86393.75; :"),
    ] {
        let mut attached = guest.client().attach(&spec, LONG).await.unwrap();
        until(attached.stdout.as_mut().unwrap(), "up").await;
        drop(attached);
        let gone = async {
            while ["86393.25", "86393.5", "86393.75"].into_iter().any(runs) {
                tokio::task::yield_now().await;
            }
        };
        timeout(LONG, gone).await.unwrap();
    }
    works(&guest).await;
}

#[tokio::test]
async fn fifty_run_at_once() {
    let guest = Guest::bare(&[]);
    let echo = |n: u32| {
        let client = guest.client();
        async move {
            let mut attached = client.attach(&sh(&format!("cat; exit {n}")), LONG).await.unwrap();
            let sent = noise(400_000, n);
            let (input, stdout) = (attached.stdin.take(), attached.stdout.take());
            let ((), back, end) = tokio::join!(feed(input, &sent), all(stdout), attached.wait());
            assert!(back == sent, "{n}: {} bytes", back.len());
            assert_eq!(end.unwrap(), ended(n.cast_signed()));
        }
    };
    futures_util::future::join_all((0..50).map(echo)).await;
}

#[tokio::test]
async fn a_terminal_has_a_size_a_foreground_and_an_end() {
    // In a sandbox, whose terminals are its own.
    let guest = Guest::start().await;
    let script = "stty size; tty; trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.01; done";
    let mut attached = guest.client().attach(&terminal(script), LONG).await.unwrap();
    assert!(attached.stderr.is_none());
    let stdout = attached.stdout.as_mut().unwrap();
    let said = until(stdout, "ready").await;
    assert!(said.starts_with("30 100\r\n/dev/pts/"), "{said:?}");
    attached.resize(WindowSize { rows: 7, columns: 33 });
    until(attached.stdout.as_mut().unwrap(), "7 33").await;
    assert_eq!(attached.wait().await.unwrap(), ended(5));

    // Bytes that are typed: echoed, edited, and C-c for the foreground.
    let mut attached =
        guest.client().attach(&terminal("cat; echo after $?; sleep 1000; echo never"), LONG).await.unwrap();
    let (mut input, stdout) = (attached.stdin.take().unwrap(), attached.stdout.as_mut().unwrap());
    input.write("helloé\x7fo\n".as_bytes()).await.unwrap();
    until(stdout, "\r\nhelloo\r\n").await;
    input.write(b"\x04").await.unwrap();
    until(stdout, "after 0\r\n").await;
    input.write(b"\x03").await.unwrap();
    assert_eq!(attached.wait().await.unwrap().status, ExitStatus::Signal(2));

    // The end of the input is the end of what `cat` reads, also inside a line.
    for typed in ["whole\n", "torn", ""] {
        let mut attached = guest.client().attach(&terminal("cat > /dev/null; echo read"), LONG).await.unwrap();
        feed(attached.stdin.take(), typed.as_bytes()).await;
        until(attached.stdout.as_mut().unwrap(), "read").await;
        assert_eq!(attached.wait().await.unwrap(), ended(0), "{typed:?}");
    }

    // A terminal that is closed outside is hung up inside.
    let mut attached = guest.client().attach(&terminal("sleep 1000"), LONG).await.unwrap();
    attached.stdout = None;
    assert_eq!(attached.wait().await.unwrap().status, ExitStatus::Signal(1));

    // Everything that was written comes, however much and whoever still holds the terminal.
    let script = "setsid sleep 1000 & sleep 1000 & seq 1 200000";
    let mut attached = guest.client().attach(&terminal(script), LONG).await.unwrap();
    let said = timeout(LONG, all(attached.stdout.take())).await.unwrap();
    let said = String::from_utf8_lossy(&said);
    assert_eq!(said.lines().count(), 200_000);
    assert!(said.ends_with("\r\n200000\r\n"));
}

/// Types `typed` and its end at a program in a terminal; returns what it said.
async fn session(guest: &Guest, argv: &[&str], typed: &str) -> String {
    let spec = AttachSpec {
        terminal: Some(WindowSize::default()),
        env: vec![("TERM".into(), "xterm".into()), ("HISTFILE".into(), "/dev/null".into())],
        ..AttachSpec::new(argv.iter().copied())
    };
    let mut attached = guest.client().attach(&spec, LONG).await.unwrap();
    let (input, stdout) = (attached.stdin.take(), attached.stdout.take());
    let ended =
        timeout(LONG, async { tokio::join!(feed(input, typed.as_bytes()), all(stdout), attached.wait()) }).await;
    let ((), said, end) = ended.unwrap_or_else(|_| panic!("{argv:?} did not see the end of {typed:?}"));
    let said = String::from_utf8_lossy(&said).into_owned();
    assert_eq!(end.unwrap(), AttachAnswer { status: ExitStatus::Code(0), timed_out: false }, "{argv:?}: {said:?}");
    said
}

#[tokio::test]
async fn the_end_of_what_is_typed_is_seen_by_whoever_reads() {
    const BASH: &[&str] = &["bash", "--norc", "--noprofile"];
    /// Throws away what was typed before it takes over the line editing, as programs that ask for a password do.
    const LATE: &[&str] = &[
        "bash",
        "-c",
        "stty -icanon; stty icanon; head -c 1 >/dev/null; sleep 0.1; python3 -c 'import termios as t; t.tcflush(0, t.TCIFLUSH)'; \
         read -e x; [ -z \"$x\" ] && echo lat''e",
    ];
    let guest = Guest::bare(&[]);
    let cases: [(&[&str], &str, &str); 12] = [
        (&["cat"], "", ""),
        (&["cat"], "whole\n", "whole\r\nwhole\r\n"),
        (&["cat"], "torn", "torn"),
        (&["sh"], "echo s''h\n", "sh\r\n"),
        (&["sh", "-c", "cat; cat; python3; bash --norc; echo al''l"], "x\n", "all\r\n"),
        (BASH, "", ""),
        (BASH, "echo ba''sh\n", "bash\r\n"),
        (BASH, "echo to''rn", "torn\r\n"),
        (BASH, "cat > /dev/null\nnothing\n", ""),
        (BASH, "sleep 0.1; cat\n", ""),
        (&["python3", "-q"], "print(6 * 7)\n", "42\r\n"),
        (LATE, "x\n", "late\r\n"),
    ];
    for _ in 0..8 {
        let sessions = cases.map(|(argv, typed, expected)| {
            let guest = &guest;
            async move {
                let said = session(guest, argv, typed).await;
                assert!(said.contains(expected), "{argv:?}, {typed:?}: {said:?}");
            }
        });
        futures_util::future::join_all(sessions).await;
    }
}

#[tokio::test]
async fn the_end_of_what_is_typed_is_no_data() {
    let guest = Guest::bare(&[]);
    let folder = tempfile::tempdir().unwrap();
    for number in 0..20 {
        let file = folder.path().join(number.to_string());
        // The shell reads its line by itself, the program the next ones as the kernel edits them.
        let typed = format!("cat > {}\n", file.display());
        session(&guest, &["bash", "--norc", "--noprofile"], &typed).await;
        assert_eq!(std::fs::read(&file).unwrap(), b"", "{number}");
    }
}

#[tokio::test]
async fn a_shell_in_a_terminal_has_job_control() {
    let guest = Guest::start().await;
    let spec = AttachSpec {
        terminal: Some(WindowSize::default()),
        env: vec![("PS1".into(), "$ ".into())],
        ..AttachSpec::new(["bash", "--norc", "--noprofile", "--noediting", "-i"])
    };
    let mut attached = guest.client().attach(&spec, LONG).await.unwrap();
    let (mut input, mut output) = (attached.stdin.take().unwrap(), attached.stdout.take().unwrap());
    let stdout = &mut output;
    let said = until(stdout, "$ ").await;
    assert!(!said.contains("job control"), "{said}");
    // A shell gives its terminal away when the command may already run: field 8 is the terminal's foreground, 5 the own group.
    let command = r#"sh -c 'until [ "$(cut -d " " -f 5 /proc/$$/stat)" = "$(cut -d " " -f 8 /proc/$$/stat)" ]; do :; done
        echo up-$((1+1)); exec sleep 1000'"#;
    input.write(format!("{command}\n").as_bytes()).await.unwrap();
    until(stdout, "up-2").await;
    // The kernel throws away what a shell says at once about a key that sends a signal; so it is asked.
    input.write(b"\x1a").await.unwrap();
    until(stdout, "^Z").await;
    input.write(b"jobs; fg; echo code-$?\n").await.unwrap();
    until(stdout, "Stopped").await;
    // Signals go where C-c goes, which is to the shell at first, and that does not care.
    let killed = async {
        let mut said = String::new();
        while !said.contains("code-143") {
            attached.signal(15);
            if let Ok(piece) = timeout(Duration::from_millis(10), stdout.next()).await {
                said.push_str(&String::from_utf8_lossy(&piece.unwrap()));
            }
        }
    };
    timeout(LONG, killed).await.unwrap();
    input.write(b"exit 6\n").await.unwrap();
    assert_eq!(timeout(LONG, attached.wait()).await.unwrap().unwrap(), ended(6));
}

#[tokio::test]
async fn a_dead_guest_ends_every_part() {
    let mut guest = Guest::bare(&[]);
    let mut attached = guest.client().attach(&sh("echo up; cat"), LONG).await.unwrap();
    until(attached.stdout.as_mut().unwrap(), "up").await;
    guest.kill(); // in no sandbox, the program stays and finds its input ended
    assert!(matches!(attached.wait().await, Err(ToolError::ChannelClosed { .. })));
    assert_eq!(attached.stdout.as_mut().unwrap().next().await, None);
    let write = attached.stdin.as_mut().unwrap().write(b"x").await;
    assert!(matches!(write, Err(ToolError::ChannelClosed { .. })), "{write:?}");
    assert!(guest.client().attach(&sh("true"), LONG).await.unwrap_err().is_infrastructure());
    // A client that goes away is an end like any other.
    let guest = Guest::bare(&[]);
    let attached = guest.client().attach(&sh("sleep 1000"), LONG).await.unwrap();
    drop(guest);
    assert!(matches!(attached.wait().await, Err(ToolError::ChannelClosed { .. })));
}

/// A guest that says what it is told to, once a program was asked for.
async fn scripted(says: impl FnOnce(u64) -> Vec<GuestFrame>) -> (Result<Attached, ToolError>, UnixStream, ToolClient) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let client = ToolClient::new(ours);
    let guest = async {
        let id = asked(&mut theirs).await;
        for frame in says(id) {
            theirs.write_all(&frame::encode(&frame).unwrap()).await.unwrap();
        }
        theirs
    };
    let spec = sh("true");
    let (attached, theirs) = tokio::join!(client.attach(&spec, LONG), guest);
    (attached, theirs, client)
}

#[tokio::test]
async fn a_guest_that_sends_more_than_the_window_is_no_guest() {
    let (attached, theirs, client) = scripted(|id| {
        let output = |stream| GuestFrame::Output { id, stream, bytes: Bytes(vec![0; 64 * 1024]) };
        let mut frames = vec![GuestFrame::Credit { id, bytes: 10 }];
        frames.extend((0..5).map(|_| output(Stream::Stdout)));
        frames
    })
    .await;
    client.closed().await;
    let error = attached.unwrap().wait().await.unwrap_err();
    assert!(error.to_string().contains("65536 bytes of output where 0 were asked for"), "{error}");
    drop(theirs);

    let (attached, _theirs, client) = scripted(|id| {
        let output = GuestFrame::Output { id, stream: Stream::Stdin, bytes: Bytes(vec![0]) };
        vec![GuestFrame::Credit { id, bytes: 10 }, output]
    })
    .await;
    client.closed().await;
    drop(attached);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_does_not_start_it_is_given_up() {
    let (attached, _theirs, _client) = scripted(|_| Vec::new()).await;
    assert!(matches!(attached, Err(ToolError::NoAnswer { .. })), "{attached:?}");
}
