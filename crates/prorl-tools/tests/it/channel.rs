//! What happens when either side of the channel goes away, goes silent or talks nonsense.

use std::{
    io::{Read, Write},
    time::Duration,
};

use prorl_core::frame::{self, Decoder};
use prorl_tools::{
    host::{AttachSpec, BashCall, ExecSpec, ToolClient, ToolError},
    wire::{Answer, Bash, BashEnd, GuestFrame, HostFrame, Op, ReadFile, Request},
};
use tokio::{
    io::AsyncReadExt,
    net::UnixStream,
    time::{Instant, timeout},
};

use crate::guest::{Guest, LONG, asked, start_raw};

/// Runs a call until its work has begun, which the work tells by making a file; then drops it.
async fn drop_once_begun(call: impl Future<Output = ()>, sign: &std::path::Path) {
    tokio::select! {
        () = call => panic!("the call ended"),
        () = async {
            while !sign.exists() {
                tokio::task::yield_now().await;
            }
        } => {}
    }
}

#[tokio::test]
async fn a_dropped_call_is_ended_inside() {
    let guest = Guest::bare(&[]);
    let folder = tempfile::tempdir().unwrap();
    let sign = folder.path().join("sign");
    let script = format!("echo $$ > {0}.new; mv {0}.new {0}; sleep 86396; echo never", sign.display());

    let spec = ExecSpec::new(["sh", "-c", &script]);
    drop_once_begun(async { drop(guest.client().exec(&spec, LONG).await) }, &sign).await;
    let pid = std::fs::read_to_string(&sign).unwrap();
    let gone = format!("while kill -0 {} 2>/dev/null; do :; done; rm {}", pid.trim(), sign.display());
    assert_eq!(timeout(LONG, guest.run(&gone)).await.unwrap(), (String::new(), 0));

    let call = BashCall::new(&script);
    drop_once_begun(async { drop(guest.client().bash(&call, LONG).await) }, &sign).await;
    // The interrupt takes a moment; until then the shell is taken.
    let next = async {
        loop {
            let answer = guest.bash(BashCall::new("echo next"), LONG).await;
            if answer.output.total > 0 {
                break answer.output.text();
            }
        }
    };
    assert_eq!(timeout(LONG, next).await.unwrap(), "next\n");
}

#[tokio::test]
async fn a_dead_guest_fails_every_call() {
    let mut guest = Guest::bare(&[]);
    guest.run("true").await;
    guest.kill();
    let spec = ExecSpec::new(["sleep", "100"]);
    let (bash, exec) = {
        let client = guest.client();
        let call = BashCall::new("sleep 100");
        tokio::join!(client.bash(&call, LONG), client.exec(&spec, LONG))
    };
    assert!(matches!(bash, Err(ToolError::ChannelClosed { .. })), "{bash:?}");
    assert!(matches!(exec, Err(ToolError::ChannelClosed { .. })), "{exec:?}");
    guest.client().closed().await;
    assert!(guest.client().is_closed());
    let late = guest.client().ipython("1", LONG).await.unwrap_err();
    assert!(late.is_infrastructure());
}

#[tokio::test]
async fn the_end_of_the_channel_ends_everything_inside() {
    let guest = Guest::bare(&[]);
    guest.run("setsid sleep 86395 & nohup sleep 86395 >/dev/null 2>&1 & disown -a").await;
    guest.client().ipython("import subprocess; p = subprocess.Popen(['sleep', '86395'])", LONG).await.unwrap();
    drop(guest);
    let left: Vec<_> = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("cmdline")).ok())
        .filter(|arguments| arguments.contains("86395"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn garbage_ends_the_guest_with_a_word() {
    for garbage in [&[255; 64][..], &[3, 0, 0, 0, 99, 99, 99]] {
        let (mut process, mut channel) = start_raw(&[]);
        channel.set_nonblocking(false).unwrap();
        channel.write_all(garbage).unwrap();
        let mut said = Vec::new();
        channel.read_to_end(&mut said).unwrap();
        let mut decoder = Decoder::default();
        decoder.push(&said);
        let word = decoder.pop::<GuestFrame>().unwrap();
        assert!(matches!(&word, Some(GuestFrame::Fatal { message }) if message.contains("no frame")), "{word:?}");
        process.wait().unwrap();
    }
}

/// A guest that answers the first request with whatever it is given.
async fn scripted(answer: impl FnOnce(u64) -> Vec<u8>) -> Result<(), ToolError> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let client = ToolClient::new(ours);
    let guest = async {
        let id = asked(&mut theirs).await;
        tokio::io::AsyncWriteExt::write_all(&mut theirs, &answer(id)).await.unwrap();
        theirs
    };
    let spec = ExecSpec { output_limit_bytes: 4, ..ExecSpec::new(["x"]) };
    let (result, _open) = tokio::join!(client.exec(&spec, LONG), guest);
    result.map(drop)
}

#[tokio::test]
async fn a_hostile_guest_is_an_error_and_no_more() {
    let reason = |result: Result<(), ToolError>| match result {
        Err(ToolError::ChannelClosed { reason }) => reason,
        other => panic!("{other:?}"),
    };
    assert!(reason(scripted(|_| vec![255; 64]).await).contains("above the limit"));
    assert!(reason(scripted(|_| vec![1, 0, 0, 0, 200]).await).contains("guest sent no frame"));
    let fatal = frame::encode(&GuestFrame::Fatal { message: "disk full".into() }).unwrap();
    assert!(reason(scripted(|_| fatal).await).contains("disk full"));
    let flood = |id| {
        let bytes = prorl_tools::wire::Bytes(vec![b'x'; 5]);
        frame::encode(&GuestFrame::Output { id, stream: prorl_tools::wire::Stream::Stdout, bytes }).unwrap()
    };
    assert!(reason(scripted(flood).await).contains("more than the 4 bytes"));
    let wrong = scripted(|id| frame::encode(&GuestFrame::Done { id, answer: Answer::Written }).unwrap()).await;
    assert!(matches!(wrong, Err(ToolError::WrongAnswer)), "{wrong:?}");
    // An answer to nothing is passed over.
    let stray = |id| {
        [
            frame::encode(&GuestFrame::Done { id: 999, answer: Answer::Written }).unwrap(),
            frame::encode(&GuestFrame::Done { id, answer: Answer::Failed { message: "no".into() } }).unwrap(),
        ]
        .concat()
    };
    assert!(matches!(scripted(stray).await, Err(ToolError::Failed { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_silent_guest_is_given_up() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let client = ToolClient::new(ours);
    let call = BashCall::new("true");
    let limit = Duration::from_secs(10);
    let result = timeout(Duration::from_mins(1), client.bash(&call, limit)).await.unwrap();
    assert!(matches!(result, Err(ToolError::NoAnswer { waited }) if waited > limit), "{result:?}");
}

#[tokio::test]
async fn many_calls_are_in_flight_at_once() {
    let guest = Guest::bare(&[]);
    let begun = Instant::now();
    let calls: Vec<_> =
        (0..40).map(|n| ExecSpec::new(["sh".to_owned(), "-c".to_owned(), format!("sleep 0.5; echo {n}")])).collect();
    let outputs = futures_util::future::join_all(calls.iter().map(|spec| guest.client().exec(spec, LONG))).await;
    for (n, output) in outputs.into_iter().enumerate() {
        assert_eq!(output.unwrap().stdout.text(), format!("{n}\n"));
    }
    assert!(begun.elapsed() < Duration::from_secs(15), "one after the other it would be 20 s");
}

/// Waits until the thread of a guest's bash session waits for a lock, which is that of the channel.
async fn until_it_waits(process: u32) {
    let waits = || {
        let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        threads.flatten().map(|thread| thread.path()).any(|thread| {
            let name = std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
            let call = std::fs::read_to_string(thread.join("syscall")).unwrap_or_default();
            name.trim() == "session" && call.split(' ').next() == Some(&libc::SYS_futex.to_string())
        })
    };
    let waiting = async {
        while !waits() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, waiting).await.unwrap();
}

#[tokio::test]
async fn an_answer_goes_before_a_flood() {
    const MIB: u64 = 1 << 20;
    let (mut process, channel) = start_raw(&[]);
    let mut channel = UnixStream::from_std(channel).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large").display().to_string();
    std::fs::File::create(&path).unwrap().set_len(64 * MIB).unwrap();
    let mut requests = Vec::new();
    for id in 1..=8 {
        let op = Op::ReadFile(ReadFile { path: path.clone(), offset: 0, limit: 64 * MIB });
        requests.extend(frame::encode(&HostFrame::Request(Request { id, timeout_ms: 60_000, op })).unwrap());
    }
    let op = Op::Bash(Bash { session: "main".into(), command: "echo here".into(), is_input: false, silence_ms: 0 });
    requests.extend(frame::encode(&HostFrame::Request(Request { id: 9, timeout_ms: 60_000, op })).unwrap());
    tokio::io::AsyncWriteExt::write_all(&mut channel, &requests).await.unwrap();
    // Nothing is read meanwhile, so eight threads stand before a full channel, and then the shell's.
    until_it_waits(process.id()).await;

    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 * 1024];
    let (mut n_before, mut n_last) = (0_u64, 0);
    let n_ahead = 'found: loop {
        let n = channel.read(&mut buffer).await.unwrap();
        decoder.push(&buffer[..n]);
        while let Some(frame) = decoder.pop::<GuestFrame>().unwrap() {
            match frame {
                GuestFrame::Output { bytes, .. } => {
                    n_last = bytes.0.len() as u64;
                    n_before += n_last;
                }
                GuestFrame::Done { id: 9, answer: Answer::Bash(answer) } => {
                    assert_eq!((answer.end, answer.output.text().as_str()), (BashEnd::Exited(0), "here\n"));
                    break 'found n_before;
                }
                other => panic!("{other:?}"),
            }
        }
    };
    // What the channel holds, which nobody can overtake, and a piece that is being written.
    let held: u64 = std::fs::read_to_string("/proc/sys/net/core/wmem_default").unwrap().trim().parse().unwrap();
    assert!(n_ahead <= held + n_last, "{n_ahead} bytes came first, {held} of them held by the channel");
    drop(channel);
    process.wait().unwrap();
}

#[tokio::test]
async fn calls_go_on_beside_a_flood() {
    let guest = Guest::start().await;
    let client = guest.client();
    assert_eq!(guest.run("head -c 16777216 /dev/zero > /tmp/large").await.1, 0);
    let flood = |n: u8| async move {
        match n {
            0 => loop {
                client.read_file("/tmp/large", 16 << 20, LONG).await.unwrap();
            },
            1 => loop {
                let spec = ExecSpec { output_limit_bytes: 16 << 20, ..ExecSpec::new(["cat", "/tmp/large"]) };
                assert!(client.exec(&spec, LONG).await.unwrap().success());
            },
            2 => loop {
                let call = BashCall { session: "flood".into(), ..BashCall::new("seq 1 200000") };
                client.bash(&call, LONG).await.unwrap();
            },
            _ => {
                let mut attached = client.attach(&AttachSpec::new(["yes"]), LONG).await.unwrap();
                let mut output = attached.stdout.take().unwrap();
                while output.next().await.is_some() {}
            }
        }
    };
    let calls = || async {
        let mut took = Vec::new();
        for _ in 0..200 {
            let begun = Instant::now();
            guest.run("true").await;
            took.push(begun.elapsed());
        }
        took.sort();
        took
    };
    let alone = calls().await;
    let beside = tokio::select! {
        took = calls() => took,
        _ = async { tokio::join!(flood(0), flood(1), flood(2), flood(3)) } => panic!("the flood ended"),
    };
    eprintln!(
        "alone p50 {:?} p99 {:?}; beside a flood p50 {:?} p99 {:?}",
        alone[100], alone[198], beside[100], beside[198]
    );
    // The four take all the time that a machine has, so there is no telling how long a call waits for that.
    assert!(beside[100] < Duration::from_millis(250), "{:?} and {:?} alone", beside[100], alone[100]);
}
