//! `prorl sandbox exec` as a person and a script meet it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::File,
    io::{Read, Write},
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, process::ExitStatusExt},
    },
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use nix::{pty::openpty, sys::signal::Signal, unistd::geteuid};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use support::{Process, alive, descendants, gone, prorl, signal};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, ChildStdout, Command},
    sync::mpsc,
    time::timeout,
};

/// More than anything here takes.
const LONG: Duration = Duration::from_secs(30);

/// What a run under `nohup` would hand down: the command keeps to it, and so the tests of signals have to undo it.
const SIGNALS: &str = "--default-signal=HUP,INT,QUIT,TERM";

fn exec(args: &[&str]) -> Command {
    let mut command = Command::new("env");
    command.arg(SIGNALS).arg(prorl()).args(["sandbox", "exec"]).args(args).stdin(Stdio::null()).kill_on_drop(true);
    // Nothing here needs a store, and none is to be made in somebody's home.
    command.env("PRORL_STORE", "/dev/null/store");
    command
}

async fn run(args: &[&str]) -> Output {
    timeout(LONG, exec(args).output()).await.expect("it ends").unwrap()
}

/// Runs it with an input, which is then closed.
async fn run_with(command: &mut Command, input: &[u8]) -> Output {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writing = async move { stdin.write_all(input).await };
    let (_written, output) = timeout(LONG, async { tokio::join!(writing, child.wait_with_output()) }).await.unwrap();
    output.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Starts a script of `sh` that says `ready` once it is; returns it with all of its processes.
async fn ready(args: &[&str], script: &str) -> (Child, ChildStdout, BTreeSet<Process>) {
    let args = [args, &["host", "--", "sh", "-c", script]].concat();
    let mut child = exec(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    read_until(&mut stdout, "ready\n").await;
    let ours = descendants(child.id().unwrap());
    assert!(ours.len() >= 3, "an outer process, the guest and the command: {ours:?}");
    (child, stdout, ours)
}

async fn read_until(output: &mut ChildStdout, end: &str) -> String {
    let mut said = Vec::new();
    let reading = async {
        while !text(&said).contains(end) {
            assert_ne!(output.read_buf(&mut said).await.unwrap(), 0, "ended after {:?}", text(&said));
        }
    };
    timeout(LONG, reading).await.expect("it says what it should");
    text(&said)
}

#[tokio::test]
async fn streams_pass_as_they_are_and_apart() {
    let noise: Vec<u8> = (0..2_000_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let out = run_with(&mut exec(&["host", "--", "sh", "-c", "cat; echo apart >&2; exit 3"]), &noise).await;
    assert!(out.stdout == noise, "{} bytes came back", out.stdout.len());
    assert_eq!((text(&out.stderr).as_str(), out.status.code()), ("apart\n", Some(3)));

    // Each piece comes when it is written, and the end of the input is passed on.
    let mut child = exec(&["host", "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    for word in ["one\n", "two\n"] {
        stdin.write_all(word.as_bytes()).await.unwrap();
        assert_eq!(read_until(&mut stdout, "\n").await, word);
    }
    drop(stdin);
    assert_eq!(timeout(LONG, child.wait()).await.unwrap().unwrap().code(), Some(0));

    // Without a command it is a shell, which takes a script as any other.
    let out = run_with(&mut exec(&["host"]), b"cd /tmp; pwd; kill -9 $$").await;
    assert_eq!((text(&out.stdout).as_str(), out.status.code()), ("/tmp\n", Some(137)));
    assert_eq!(out.status.signal(), None);
}

/// Returns the most memory that a process has had, in bytes.
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn a_stream_of_any_length_stays_out_of_memory() {
    const LEN: usize = 256 << 20;
    let script = format!("echo ready; head -c {LEN} | wc -c; cat > /dev/null; head -c {LEN} /dev/zero");
    let (mut child, mut stdout, ours) = ready(&[], &script).await;
    let mut stdin = child.stdin.take().unwrap();
    let piece = vec![b'x'; 1 << 20];
    for _ in 0..LEN / piece.len() {
        stdin.write_all(&piece).await.unwrap();
    }
    assert_eq!(read_until(&mut stdout, "\n").await, format!("{LEN}\n"));
    drop(stdin);
    let mut buffer = vec![0; 1 << 20];
    let mut n_read = 0;
    let mut read = async |until| {
        while n_read < until {
            match stdout.read(&mut buffer).await.unwrap() {
                0 => break,
                n => n_read += n,
            }
        }
        n_read
    };
    read(LEN / 2).await;
    let most = alive(&ours).iter().map(|(pid, _)| *pid).chain(child.id()).map(peak).max().unwrap();
    assert!(most < 64 << 20, "{most} bytes of memory");
    assert_eq!(read(usize::MAX).await, LEN);
    assert_eq!(timeout(LONG, child.wait()).await.unwrap().unwrap().code(), Some(0));
}

#[tokio::test]
async fn an_output_that_nobody_reads_ends_the_command() {
    let (mut child, stdout, ours) = ready(&[], "echo ready; exec yes").await;
    drop(stdout);
    let status = timeout(LONG, child.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(128 + Signal::SIGPIPE as i32));
    gone(&ours, LONG).await;

    let full = File::options().write(true).open("/dev/full").unwrap();
    let full = exec(&["host", "--", "yes"]).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let out = timeout(LONG, full.wait_with_output()).await.unwrap().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("standard output cannot be written: No space left"), "{}", text(&out.stderr));

    // A command that closes its output and runs on.
    let (mut child, mut stdout, ours) = ready(&[], "echo ready; exec >&-; cat > /dev/null").await;
    let mut rest = Vec::new();
    timeout(LONG, stdout.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert!(child.try_wait().unwrap().is_none());
    drop(child.stdin.take());
    assert_eq!(timeout(LONG, child.wait()).await.unwrap().unwrap().code(), Some(0));
    gone(&ours, LONG).await;
}

#[tokio::test]
async fn a_sandbox_is_what_the_flags_say() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("with:colon");
    std::fs::write(&file, "shown\n").unwrap();
    let open = std::process::Command::new("chmod").arg("-R").arg("a+rX").arg(folder.path()).status().unwrap();
    assert!(open.success());
    let bind = format!("{}:/data/file:ro", file.display());
    let variables = folder.path().join("env");
    std::fs::write(&variables, "# a comment\nA=of the file\nB=s3cret = \"b\"\n").unwrap();
    let script = "id -u; hostname; pwd; echo \"$A|$B\"; cat /data/file; echo x >> /data/file || echo read-only
        df -m /tmp | tail -1 | awk '{print $2}'; ls /sys/class/net 2>/dev/null; grep -c : /proc/net/dev; tty
        cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c s3cre[t]";
    let out = run(&[
        "--fakeroot",
        "--hostname",
        "box",
        "--workdir",
        "/usr",
        "--tmp-mb",
        "7",
        "--disk-mb",
        "9",
        "--bind",
        &bind,
        "--env-file",
        variables.to_str().unwrap(),
        "--env",
        "A=of the flag",
        "host",
        "--",
        "sh",
        "-c",
        script,
    ])
    .await;
    let said = text(&out.stdout);
    let expected = "0\nbox\n/usr\nof the flag|s3cret = \"b\"\nshown\nread-only\n7\n1\nnot a tty\n0\n";
    assert_eq!(said, expected, "{}", text(&out.stderr));

    let interfaces = std::fs::read_to_string("/proc/net/dev").unwrap().matches(':').count();
    let out = run(&["--network", "host", "host", "--", "grep", "-c", ":", "/proc/net/dev"]).await;
    assert_eq!(text(&out.stdout).trim(), interfaces.to_string());

    // Nothing of a file's variables can be seen from outside either.
    let file = variables.to_str().unwrap();
    let (mut child, _stdout, ours) = ready(&["--env-file", file], "echo ready; read x").await;
    for (pid, _) in &ours {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        assert!(!text(&arguments).contains("s3cret"));
    }
    child.kill().await.unwrap();
    gone(&ours, LONG).await;
}

#[tokio::test]
async fn failures_are_one_and_wrong_usage_is_two() {
    for (args, word) in [
        (&["host", "--", "nosuch-program"][..], "cannot run nosuch-program: No such file or directory"),
        (&["--workdir", "/nowhere", "host", "--", "true"], "cannot enter /nowhere"),
        (&["/nonexistent/image", "--", "true"], "/nonexistent/image"),
        (&["--runtime=singularity", "--apptainer=/nonexistent/apptainer", "/etc/passwd"], "/nonexistent/apptainer"),
        (&["/etc/passwd", "--", "true"], "/dev/null/store"),
        (&["docker://debian", "--", "true"], "prorl image unpack docker://debian"),
        (&["nosuch", "--", "true"], "there is no image nosuch"),
        (&["--bind", "/nonexistent/source:/x", "host", "--", "true"], "/nonexistent/source"),
        (&["--timeout", "0.2", "host", "--", "sleep", "1000"], "killed after 200ms"),
    ] {
        let out = run(args).await;
        assert_eq!((out.status.code(), text(&out.stdout).as_str()), (Some(1), ""), "{args:?}");
        assert!(text(&out.stderr).starts_with("error: ") && text(&out.stderr).contains(word), "{}", text(&out.stderr));
    }
    for args in [
        &[][..],
        &["host", "true"],
        &["--network", "some", "host"],
        &["--runtime", "docker", "host"],
        &["--bind", "/a", "host"],
        &["--bind", "/etc:/proc/x", "host"],
        &["--env", "s3cret", "host"],
        &["--env-file", "/nonexistent", "host"],
        &["--timeout", "0", "host"],
        &["--tmp-mb", "0", "host"],
        &["--tmp-mb", "99999999999999999", "host"],
        &["--hostname", "a b", "host"],
        &["--fly", "host"],
        &["", "--", "true"],
        &["--workdir", "", "host"],
    ] {
        let out = run(args).await;
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", text(&out.stderr));
        assert!(!text(&out.stderr).contains("s3cret"));
    }
}

#[tokio::test]
async fn wrong_usage_is_named_whoever_finds_it() {
    let folder = tempfile::tempdir().unwrap();
    let variables = folder.path().join("env");
    std::fs::write(&variables, b"A=1\nB=s3cret\xff\n").unwrap();
    let bytes = OsStr::from_bytes;
    let mut cases: Vec<(Vec<&OsStr>, &str)> = vec![
        (vec![bytes(b"--env"), bytes(b"A=s3cret\xff"), bytes(b"host")], "--env: the value of A is not UTF-8"),
        (vec![bytes(b"--env"), bytes(b"A\nB=s3cret"), bytes(b"host")], "--env: the name \"A\\nB\" holds a line break"),
        (vec![bytes(b"--env-file"), variables.as_os_str(), bytes(b"host")], "line 2: the value of B is not UTF-8"),
        (vec![bytes(b"--hostname"), bytes(b"h\xff"), bytes(b"host")], "--hostname: \"h\\xff\" is not UTF-8"),
        (vec![bytes(b"host"), bytes(b"--"), bytes(b"true"), bytes(b"\xff")], "CMD, word 2: \"\\xff\" is not UTF-8"),
        (vec![bytes(b"--timeout"), bytes(b"1e30"), bytes(b"host")], "above 0 and at most 3153600000, found 1e30"),
    ];
    let user = if geteuid().is_root() { "0:0 would be root on the host" } else { "only root can choose another user" };
    cases.push((vec![bytes(b"--sandbox-user=0"), bytes(b"host")], user));
    let has_apptainer = ["apptainer", "singularity"].iter().any(|name| on_path(name));
    if has_apptainer {
        cases.push((vec![bytes(b"--sandbox-user=0"), bytes(b"--runtime=singularity"), bytes(b"/etc/passwd")], user));
        cases.push((vec![bytes(b"--runtime=singularity"), bytes(b"host")], "the singularity runtime has no image"));
    } else {
        support::note("wrong_usage_is_named_whoever_finds_it: there is no Apptainer, so its runtime is left out");
    }
    for (args, word) in cases {
        let out = timeout(LONG, exec(&[]).args(&args).output()).await.unwrap().unwrap();
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.starts_with("error: ") && said.contains(word) && !said.contains("s3cret"), "{args:?}: {said}");
    }
}

fn on_path(name: &str) -> bool {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|folder| folder.join(name).is_file())
}

#[tokio::test]
async fn signals_end_the_sandbox_and_leave_nothing() {
    let stubborn =
        "trap '' TERM HUP INT QUIT; setsid sleep 1000 & (sleep 1000; sleep 1000) & echo ready; sleep 1000; sleep 1000";
    for (sent, code) in [(Signal::SIGTERM, Some(143)), (Signal::SIGHUP, Some(129)), (Signal::SIGKILL, None)] {
        let (mut child, _stdout, ours) = ready(&[], stubborn).await;
        signal(child.id().unwrap(), sent);
        assert_eq!(timeout(LONG, child.wait()).await.unwrap().unwrap().code(), code, "{sent}");
        gone(&ours, LONG).await;
    }
    // One that was to be ignored stays so.
    let script = "trap '' HUP; exec \"$0\" sandbox exec host -- sh -c 'echo ready; exec cat'";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(prorl()).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    read_until(&mut stdout, "ready\n").await;
    let ours = descendants(child.id().unwrap());
    signal(child.id().unwrap(), Signal::SIGHUP);
    stdin.write_all(b"still here\n").await.unwrap();
    assert_eq!(read_until(&mut stdout, "\n").await, "still here\n");
    signal(child.id().unwrap(), Signal::SIGTERM);
    assert_eq!(timeout(LONG, child.wait()).await.unwrap().unwrap().code(), Some(143));
    gone(&ours, LONG).await;
    // An interrupt is the command's to answer; a second one is not.
    let (mut child, mut stdout, ours) =
        ready(&[], "trap 'echo asked; exit 5' INT; echo ready; while :; do sleep 0.01; done").await;
    signal(child.id().unwrap(), Signal::SIGINT);
    assert_eq!(read_until(&mut stdout, "\n").await, "asked\n");
    assert_eq!(timeout(LONG, child.wait()).await.unwrap().unwrap().code(), Some(5));
    gone(&ours, LONG).await;
    let (mut child, mut stdout, ours) =
        ready(&[], "trap 'echo asked' INT; echo ready; while :; do sleep 0.01; done").await;
    signal(child.id().unwrap(), Signal::SIGINT);
    assert_eq!(read_until(&mut stdout, "\n").await, "asked\n");
    signal(child.id().unwrap(), Signal::SIGINT);
    assert_eq!(timeout(LONG, child.wait()).await.unwrap().unwrap().code(), Some(130));
    gone(&ours, LONG).await;
}

/// A terminal with the program in its foreground.
struct Console {
    child: Child,
    master: File,
    /// Held, so that its settings can be looked at when the program has ended.
    slave: OwnedFd,
    pieces: mpsc::UnboundedReceiver<Vec<u8>>,
    said: String,
}

impl Console {
    fn start(args: &[&str]) -> Self {
        let terminal = openpty(None, None).unwrap();
        set_size(&terminal.master, 31, 97);
        let slave = || Stdio::from(terminal.slave.try_clone().unwrap());
        let child = Command::new("setsid")
            .arg("--ctty")
            .args(["env", SIGNALS])
            .arg(prorl())
            .args(["sandbox", "exec"])
            .args(args)
            .env("TERM", "xterm-test")
            .stdin(slave())
            .stdout(slave())
            .stderr(slave())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let master = File::from(terminal.master);
        let mut reading = master.try_clone().unwrap();
        let (sender, pieces) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n) = reading.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, master, slave: terminal.slave, pieces, said: String::new() }
    }

    /// Waits until it says this; returns what came before and drops both.
    async fn expect(&mut self, what: &str) -> String {
        let waiting = async {
            while !self.said.contains(what) {
                let piece = self.pieces.recv().await.unwrap();
                self.said.push_str(&String::from_utf8_lossy(&piece));
            }
        };
        assert!(timeout(LONG, waiting).await.is_ok(), "no {what:?} in {:?}", self.said);
        let rest = self.said.split_off(self.said.find(what).unwrap() + what.len());
        std::mem::replace(&mut self.said, rest)
    }

    fn type_in(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.slave)
            .unwrap()
            .local_modes
            .intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// Waits for the end, at which the terminal is as it was and nothing is left.
    async fn ends(mut self, ours: &BTreeSet<Process>) -> Option<i32> {
        let status = timeout(LONG, self.child.wait()).await.expect("it ends").unwrap();
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG), "{modes:?}");
        gone(ours, LONG).await;
        status.code()
    }

    fn processes(&self) -> BTreeSet<Process> {
        descendants(self.child.id().unwrap())
    }
}

fn set_size(master: &OwnedFd, rows: u16, columns: u16) {
    tcsetwinsize(master, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
}

/// Waits in a shell's quotes until its group is in the foreground: a shell gives its terminal away when the command may
/// already run. Field 8 is the terminal's foreground, 5 the own group.
const FOREGROUND: &str =
    r#"until [ "$(cut -d " " -f 5 /proc/$$/stat)" = "$(cut -d " " -f 8 /proc/$$/stat)" ]; do :; done"#;

#[tokio::test]
async fn a_person_has_a_shell_in_a_terminal() {
    let mut console = Console::start(&["--env", "PS1=go> ", "host"]);
    let before = console.expect("go> ").await;
    assert!(!before.contains("job control"), "{before}");
    assert!(console.is_raw());
    let ours = console.processes();
    console.type_in("stty size; echo $TERM; tty; test -t 2 && echo a''ll\r");
    let said = console.expect("all\r\n").await;
    assert!(said.contains("31 97\r\nxterm-test\r\n/dev/pts/"), "{said:?}");

    let master = OwnedFd::from(console.master.try_clone().unwrap());
    set_size(&master, 17, 64);
    console.type_in("until [ \"$(stty size)\" = '17 64' ]; do :; done; echo re''sized\r");
    console.expect("resized").await;

    // C-c ends what is in the foreground and not the shell; C-z stops it.
    console.type_in(&format!("sh -c '{FOREGROUND}; echo in-$((1+1)); exec sleep 1000'\r"));
    console.expect("in-2").await;
    // The kernel throws away what the shell says at once about a key that sends a signal; so it is asked.
    console.type_in("\x03");
    console.expect("^C").await;
    console.type_in("echo code-$?\r");
    console.expect("code-130").await;
    console.type_in(&format!("sh -c '{FOREGROUND}; echo in-$((1+2)); exec sleep 1000'\r"));
    console.expect("in-3").await;
    console.type_in("\x1a");
    console.expect("^Z").await;
    console.type_in("jobs; kill %1; fg; echo code-$?\r");
    console.expect("Stopped").await;
    console.expect("code-143").await;
    console.type_in("exit 7\r");
    assert_eq!(console.ends(&ours).await, Some(7));
}

#[tokio::test]
async fn the_terminal_is_restored_on_every_way_out() {
    // C-c through the terminal ends the command itself.
    let mut console = Console::start(&["host", "--", "sh", "-c", "echo ready; exec sleep 1000"]);
    console.expect("ready").await;
    let ours = console.processes();
    console.type_in("\x03");
    assert_eq!(console.ends(&ours).await, Some(130));

    for (sent, code) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129), (Signal::SIGQUIT, 131)] {
        let mut console =
            Console::start(&["host", "--", "sh", "-c", "trap '' HUP TERM QUIT; echo ready; sleep 1000; sleep 1000"]);
        console.expect("ready").await;
        assert!(console.is_raw());
        let ours = console.processes();
        signal(console.child.id().unwrap(), sent);
        assert_eq!(console.ends(&ours).await, Some(code));
    }

    let console = Console::start(&["--timeout", "0.2", "host", "--", "sleep", "1000"]);
    assert_eq!(console.ends(&BTreeSet::new()).await, Some(1));
    let mut console = Console::start(&["host", "--", "nosuch-program"]);
    console.expect("error: cannot run nosuch-program").await;
    assert_eq!(console.ends(&BTreeSet::new()).await, Some(1));
}

#[tokio::test]
async fn a_terminal_is_given_when_it_is_there_or_asked_for() {
    let mut console = Console::start(&["--no-tty", "host", "--", "sh", "-c", "tty; echo end"]);
    console.expect("not a tty\r\nend").await;
    assert_eq!(console.ends(&BTreeSet::new()).await, Some(0));

    let out = run_with(&mut exec(&["-t", "host", "--", "sh", "-c", "stty size; test -t 2 && cat"]), b"typed\n").await;
    // What is typed is echoed at once, whatever else is said.
    let said = text(&out.stdout).replace("^D\u{8}\u{8}", "");
    let mut lines: Vec<_> = said.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["24 80", "typed", "typed"], "{said:?}");
    assert_eq!((out.status.code(), text(&out.stderr).as_str()), (Some(0), ""));
}

#[tokio::test]
async fn the_end_of_a_pipe_is_typed_until_it_is_seen() {
    // Both take the line editing over from the kernel, in whose hands the end may be by then.
    for (program, typed, expected) in [
        ("python3", "print(6 * 7)\n", "42\r\n"),
        ("bash", "echo $((6 * 7))\n", "42\r\n"),
        ("bash", "echo 4''2", "42\r\n"),
    ] {
        for _ in 0..5 {
            let out = run_with(&mut exec(&["-t", "host", "--", program]), typed.as_bytes()).await;
            let said = text(&out.stdout);
            assert!(out.status.code() == Some(0) && said.contains(expected), "{program}: {said:?}");
        }
    }
}

#[tokio::test]
async fn an_image_without_a_shell_is_named() {
    let image = tempfile::tempdir().unwrap();
    std::fs::create_dir(image.path().join("bin")).unwrap();
    let open = std::process::Command::new("chmod").arg("-R").arg("a+rX").arg(image.path()).status().unwrap();
    assert!(open.success());
    let path = image.path().to_str().unwrap();
    let out = run(&[path]).await;
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1));
    assert!(said.starts_with(&format!("error: image {path} has no bash and no sh")), "{said}");
}

#[tokio::test]
async fn an_unpacked_image_is_run_with_its_own_programs() {
    let Some(busybox) = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists()) else {
        println!("skipped: there is no busybox to make an image from");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("host");
    std::fs::create_dir_all(image.join("bin")).unwrap();
    std::fs::copy(busybox, image.join("bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", image.join("bin/sh")).unwrap();
    let open = std::process::Command::new("chmod").arg("-R").arg("a+rX").arg(folder.path()).status().unwrap();
    assert!(open.success());
    // A folder with the name of the word for this machine's programs; and no bash for a shell.
    let script = "echo $0; busybox ls /bin";
    let out = run_with(exec(&["./host"]).current_dir(folder.path()), script.as_bytes()).await;
    assert_eq!((text(&out.stdout).as_str(), out.status.code()), ("sh\nbusybox\nsh\n", Some(0)));
}
