//! Programs without a shell, and files.

use std::time::Duration;

use prorl_tools::{
    host::{ExecSpec, ToolError},
    wire::ExitStatus,
};

use tokio::time::Instant;

use crate::guest::{Guest, LONG};

#[tokio::test]
async fn a_program_runs_with_arguments_input_and_environment() {
    let guest = Guest::bare(&[]);
    let client = guest.client();
    let spec = ExecSpec {
        env: vec![("A".into(), "value".into())],
        cwd: Some("/usr".into()),
        ..ExecSpec::new(["sh", "-c", "echo \"$0 $1\" $A; pwd; echo err >&2; exit 3", "a b", "'c'"])
    };
    let output = client.exec(&spec, LONG).await.unwrap();
    assert_eq!(output.status, ExitStatus::Code(3));
    assert_eq!((output.stdout.text().as_str(), output.stderr.text().as_str()), ("a b 'c' value\n/usr\n", "err\n"));
    assert!(!output.truncated() && !output.timed_out && !output.success());

    let text: Vec<u8> = (0..1_000_000_u32).map(|n| b'a' + u8::try_from(n % 26).unwrap()).collect();
    let spec = ExecSpec { stdin: text.clone(), ..ExecSpec::new(["cat"]) };
    let output = client.exec(&spec, LONG).await.unwrap();
    assert_eq!(output.stdout.bytes(), text);
    // A program that does not read its input is no failure.
    let spec = ExecSpec { stdin: text, ..ExecSpec::new(["true"]) };
    assert!(client.exec(&spec, LONG).await.unwrap().success());

    let spec = ExecSpec { output_limit_bytes: 1000, ..ExecSpec::new(["seq", "1", "100000"]) };
    let output = client.exec(&spec, LONG).await.unwrap();
    assert_eq!((output.stdout.bytes().len(), output.stdout.total), (1000, 588_895));
    assert!(output.truncated() && output.stdout.text().ends_with("\n100000\n"));

    let failed = client.exec(&ExecSpec::new(["/nonexistent"]), LONG).await.unwrap_err();
    assert!(
        matches!(&failed, ToolError::Failed { message } if message.contains("cannot run /nonexistent")),
        "{failed}"
    );
    assert!(!failed.is_infrastructure());
}

#[tokio::test]
async fn every_signal_that_ends_a_program_is_told() {
    let guest = Guest::bare(&[]);
    let client = guest.client();
    // Those that do not end a program, or that bash always ignores.
    let stops = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
    let harmless = [libc::SIGCHLD, libc::SIGCONT, libc::SIGURG, libc::SIGWINCH, libc::SIGQUIT];
    for signal in (1..=64).filter(|signal| !stops.contains(signal) && !harmless.contains(signal)) {
        // One that nobody here has started ends by it as well, and is collected.
        let script = format!("(setsid bash -c 'kill -{signal} $$' &); kill -{signal} $$; sleep 10");
        let output = client.exec(&ExecSpec::new(["bash", "-c", &script]), LONG).await.unwrap();
        assert_eq!(output.status, ExitStatus::Signal(signal));
    }
}

/// Tells whether a process runs with this word among its arguments.
pub(crate) fn runs(word: &str) -> bool {
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).any(|argument| argument == word.as_bytes())
    })
}

#[tokio::test]
async fn the_limit_kills_the_whole_tree() {
    let guest = Guest::bare(&[]);
    // Lengths of sleep that no other test has stand for names.
    let script = "echo begun; sleep 86397.125 & setsid sleep 86397.25 & (setsid sh -c 'sleep 86397.375; :' &) ; trap '' TERM INT; sleep 86397.5; :";
    let begun = Instant::now();
    let output = guest.client().exec(&ExecSpec::new(["sh", "-c", script]), Duration::from_millis(500)).await.unwrap();
    assert!(output.timed_out);
    assert_eq!((output.status, output.stdout.text().as_str()), (ExitStatus::Signal(9), "begun\n"));
    assert!(begun.elapsed() < Duration::from_secs(5));
    for word in ["86397.125", "86397.25", "86397.5"] {
        assert!(!runs(word), "{word}");
    }
    drop(guest);
    assert!(!runs("86397.375"));
}

#[tokio::test]
async fn a_child_in_the_background_does_not_hold_the_call() {
    let guest = Guest::bare(&[]);
    let output = guest.client().exec(&ExecSpec::new(["sh", "-c", "sleep 100 & echo done"]), LONG).await.unwrap();
    assert_eq!(output.stdout.text(), "done\n");
}

#[tokio::test]
async fn files_go_in_and_come_out() {
    let guest = Guest::bare(&[]);
    let client = guest.client();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/file.bin");
    let path = path.to_str().unwrap();
    let bytes: Vec<u8> = (0..3_500_000_u32).flat_map(u32::to_le_bytes).take(3_500_000).collect();
    client.write_file(path, &bytes, 0o640, LONG).await.unwrap();
    assert_eq!(client.read_file(path, 4_000_000, LONG).await.unwrap().bytes(), bytes);
    let cut = client.read_file(path, 10, LONG).await.unwrap();
    assert_eq!((cut.bytes().as_slice(), cut.total, cut.omitted()), (&bytes[..10], 3_500_000, 3_499_990));
    client.write_file(path, b"", 0o640, LONG).await.unwrap();
    assert_eq!(client.read_file(path, 10, LONG).await.unwrap().bytes(), b"");
    for path in ["/nonexistent", "/tmp", "/dev/zero"] {
        let failed = client.read_file(path, 10, LONG).await.unwrap_err();
        assert!(matches!(&failed, ToolError::Failed { message } if message.contains(path)), "{failed}");
    }
}
