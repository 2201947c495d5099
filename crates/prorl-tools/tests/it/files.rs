//! Files and folders that go in and come out, with real guests and with hostile ones.

use std::{
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use prorl_core::frame::{self, Decoder};
use prorl_tools::{
    host::{ExecSpec, ToolClient, ToolError, TreeOptions},
    tree::{Entry, IfPresent, OutsideLinks, TreeLimits},
    wire::{Answer, Bytes, Download, GuestFrame, HostFrame, Op, Request, Stream, TreeSummary, Upload},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::{Instant, timeout},
};

use crate::guest::{Guest, LONG, asked, start_raw};

fn keep_links() -> TreeOptions {
    let limits = TreeLimits { outside_links: OutsideLinks::Keep, ..TreeLimits::default() };
    TreeOptions { limits, ..TreeOptions::default() }
}

/// Tells all that is in a folder, with permissions, content and where links lead, in order.
fn told(folder: &Path) -> Vec<(PathBuf, u32, Vec<u8>)> {
    let mut found = Vec::new();
    let mut left = vec![folder.to_owned()];
    while let Some(path) = left.pop() {
        let metadata = path.symlink_metadata().unwrap();
        let content = if metadata.is_symlink() {
            fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec()
        } else if metadata.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            Vec::new()
        } else {
            fs::read(&path).unwrap()
        };
        found.push((path.strip_prefix(folder).unwrap().to_owned(), metadata.mode(), content));
    }
    found.sort();
    found
}

/// Makes a folder with something of everything.
fn sample(root: &Path) {
    fs::create_dir_all(root.join("deep/er/and/deeper")).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    for (name, mode, content) in [
        ("run.sh", 0o755, b"#!/bin/sh\n".to_vec()),
        ("private", 0o600, b"secret".to_vec()),
        ("deep/read only", 0o444, (0..=255).collect()),
        ("deep/er/nothing", 0o644, Vec::new()),
        ("deep/er/and/deeper/\u{e4}\u{1f600}\n", 0o640, b"x".repeat(3 << 20)),
    ] {
        fs::write(root.join(name), content).unwrap();
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::write(root.join(std::ffi::OsStr::from_bytes(b"not \xff utf8")), "?").unwrap();
    symlink("../run.sh", root.join("deep/inside")).unwrap();
    symlink("/nowhere/at/all", root.join("outside")).unwrap();
    symlink("deep", root.join("folder")).unwrap();
}

#[tokio::test]
async fn a_folder_comes_back_as_it_went() {
    let guest = Guest::start().await;
    let client = guest.client();
    let place = TempDir::new().unwrap();
    let from = place.path().join("from");
    sample(&from);
    let sent = client.upload(&from, "/tmp/made/for/it", &TreeOptions::default(), LONG).await.unwrap();
    assert_eq!((sent.n_files, sent.n_entries, sent.n_bytes), (6, 15, (3 << 20) + 10 + 6 + 256 + 1));
    let (said, code) =
        guest.run("cd /tmp/made/for/it && ./run.sh && cat private deep/inside; ls -A /tmp/made /tmp/made/for").await;
    assert_eq!((said.as_str(), code), ("secret#!/bin/sh\n/tmp/made:\nfor\n\n/tmp/made/for:\nit\n", 0));

    let to = place.path().join("new/to");
    let came = client.download("/tmp/made/for/it", &to, &keep_links(), LONG).await.unwrap();
    assert_eq!(came, sent);
    assert_eq!(told(&to), told(&from));

    // Without being asked for, links to anywhere do not come.
    let to = place.path().join("other");
    let refused = client.download("/tmp/made/for/it", &to, &TreeOptions::default(), LONG).await.unwrap_err();
    assert!(matches!(&refused, ToolError::Tree(_)) && !refused.is_infrastructure(), "{refused:?}");
    assert!(!to.exists());

    // A single file, and a second time.
    let one = &from.join("run.sh");
    let upload = |options| async move { client.upload(one, "/tmp/one", &options, LONG).await };
    let replace = TreeOptions { if_present: IfPresent::Replace, ..TreeOptions::default() };
    assert_eq!(upload(TreeOptions::default()).await.unwrap().n_entries, 1);
    let refused = upload(TreeOptions::default()).await.unwrap_err();
    assert!(
        matches!(&refused, ToolError::Failed { message } if message.contains("/tmp/one is there already")),
        "{refused:?}"
    );
    upload(replace).await.unwrap();
    assert_eq!(guest.run("/tmp/one; stat -c %a /tmp/one; ls -A /tmp | grep prorl").await, ("755\n".to_owned(), 1));
}

#[tokio::test]
async fn ten_thousand_small_files_go_in_and_come_out() {
    let guest = Guest::start().await;
    // In memory where that is possible: a disk may take its time for twenty thousand files.
    let place = TempDir::new_in("/dev/shm").or_else(|_none| TempDir::new()).unwrap();
    let from = place.path().join("from");
    for n in 0..10_000 {
        if n % 100 == 0 {
            fs::create_dir_all(from.join(format!("{}", n / 100))).unwrap();
        }
        fs::write(from.join(format!("{}/{n}", n / 100)), format!("file {n}\n")).unwrap();
    }
    let begun = Instant::now();
    let sent = guest.client().upload(&from, "/tmp/many", &TreeOptions::default(), LONG).await.unwrap();
    let uploaded = begun.elapsed();
    assert_eq!((sent.n_files, sent.n_entries), (10_000, 10_101));
    let (text, _) = guest.run("find /tmp/many -type f | wc -l; cat /tmp/many/42/4242").await;
    assert_eq!(text, "10000\nfile 4242\n");
    let begun = Instant::now();
    let to = place.path().join("to");
    assert_eq!(guest.client().download("/tmp/many", &to, &TreeOptions::default(), LONG).await.unwrap(), sent);
    eprintln!("10,000 files: {uploaded:?} in, {:?} out", begun.elapsed());
    assert_eq!(told(&to), told(&from));
}

/// Waits until a folder has, or has not, something in it whose name begins with `.prorl-`.
async fn until_staged(folder: &Path, is_staged: bool) {
    let staged = || {
        let entries = fs::read_dir(folder).unwrap();
        entries.flatten().any(|entry| entry.file_name().as_bytes().starts_with(b".prorl-"))
    };
    let waiting = async {
        while staged() != is_staged {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, waiting).await.unwrap();
}

#[tokio::test]
async fn nothing_is_left_of_what_was_given_up() {
    let guest = Guest::bare(&[]);
    let place = TempDir::new().unwrap();
    let (big, into) = (place.path().join("big"), place.path().join("into"));
    fs::File::create(&big).unwrap().set_len(1 << 40).unwrap();
    fs::create_dir(&into).unwrap();
    let to = into.join("above/to");
    let limits = TreeLimits { max_bytes: u64::MAX, ..TreeLimits::default() };
    let options = TreeOptions { limits, ..TreeOptions::default() };
    let (big_name, to_name) = (big.to_str().unwrap(), to.to_str().unwrap());
    for limit in [LONG, Duration::from_millis(700)] {
        let is_dropped = limit == LONG;
        for is_upload in [true, false] {
            let call = async {
                if is_upload {
                    guest.client().upload(&big, to_name, &options, limit).await
                } else {
                    guest.client().download(big_name, &to, &options, limit).await
                }
            };
            if is_dropped {
                tokio::select! {
                    ended = call => panic!("{ended:?}"),
                    () = until_staged(&into, true) => {}
                }
            } else {
                let ended = call.await;
                assert!(
                    matches!(&ended, Err(ToolError::Failed { message }) if message.contains("limit of 700 ms")),
                    "{ended:?}"
                );
            }
            until_staged(&into, false).await;
            assert_eq!(fs::read_dir(&into).unwrap().count(), 0);
        }
    }
    // So is reading one, which goes on to the end of the channel otherwise.
    let read = guest.client().read_range(big_name, (1 << 39)..(1 << 40), Duration::from_millis(300)).await;
    assert!(
        matches!(&read, Err(ToolError::Failed { message }) if message.contains("limit of 300 ms")),
        "{:?}",
        read.err()
    );
}

#[tokio::test]
async fn what_cannot_be_is_said_in_words() {
    let guest = Guest::bare(&[]);
    let client = guest.client();
    let place = TempDir::new().unwrap();
    let (from, to) = (place.path().join("from"), place.path().join("to"));
    let options = TreeOptions::default();
    let failed = |result: Result<TreeSummary, ToolError>| match result {
        Err(err) if !err.is_infrastructure() => match err {
            ToolError::Failed { message } => message,
            ToolError::Tree(err) => err.told(),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    assert!(failed(client.upload(&from, "/tmp/never", &options, LONG).await).contains("No such file"));
    let missing = from.to_str().unwrap();
    assert!(failed(client.download(missing, &to, &options, LONG).await).contains("No such file"));
    fs::create_dir(&from).unwrap();
    for n in 0..5 {
        fs::write(from.join(n.to_string()), "12345").unwrap();
    }
    for (limits, why) in [
        (TreeLimits { max_entries: 5, ..TreeLimits::default() }, "more than 5 files"),
        (TreeLimits { max_bytes: 24, ..TreeLimits::default() }, "more than 24 bytes"),
    ] {
        let options = TreeOptions { limits, ..options };
        assert!(failed(client.upload(&from, to.to_str().unwrap(), &options, LONG).await).contains(why));
        assert!(failed(client.download(missing, &to, &options, LONG).await).contains(why));
    }
    // A file in the place of a folder above.
    let below = from.join("0/x");
    assert!(failed(client.upload(&from, below.to_str().unwrap(), &options, LONG).await).contains("Not a directory"));
    assert!(failed(client.upload(&from, "/proc/x", &options, LONG).await).contains("cannot make"));
    until_staged(place.path(), false).await;
    assert!(!to.exists());
    // Nothing of that has hurt the channel.
    client.upload(&from, to.to_str().unwrap(), &options, LONG).await.unwrap();
    assert_eq!(told(&to), told(&from));

    let read = client.read_range(to.join("3").to_str().unwrap(), 1..3, LONG).await.unwrap();
    assert_eq!((read.bytes.as_slice(), read.size), (&b"23"[..], 5));
}

/// Answers a download with these records and an answer.
async fn hostile(entries: &[Entry], summary: impl FnOnce(TreeSummary) -> TreeSummary, to: &Path) -> ToolError {
    let mut records: Vec<u8> = entries.iter().flat_map(|entry| frame::encode(entry).unwrap()).collect();
    let n_entries = entries.iter().filter(|entry| !matches!(entry, Entry::Data(_))).count() as u64;
    let end = summary(TreeSummary { n_files: 0, n_entries, n_bytes: 0, sha256: [0; 32] });
    records.extend(frame::encode(&Entry::End(end)).unwrap());
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let client = ToolClient::new(ours);
    let guest = async {
        let id = asked(&mut theirs).await;
        let output = GuestFrame::Output { id, stream: Stream::Stdout, bytes: Bytes(records) };
        let done = GuestFrame::Done { id, answer: Answer::Tree(end) };
        theirs.write_all(&[frame::encode(&output).unwrap(), frame::encode(&done).unwrap()].concat()).await.unwrap();
        theirs
    };
    let options = TreeOptions::default();
    let (result, _open) = tokio::join!(client.download("/x", to, &options, LONG), guest);
    result.unwrap_err()
}

#[tokio::test]
async fn a_hostile_guest_makes_nothing() {
    let place = TempDir::new().unwrap();
    let to = place.path().join("to");
    let path = |text: &str| Bytes(text.into());
    let root = Entry::Folder { path: path(""), mode: 0o755 };
    let file = |text: &str| Entry::File { path: path(text), mode: 0o644, size: 0 };
    let link = |text: &str, target: &str| Entry::Link { path: path(text), target: path(target) };
    let wrong_sum = hostile(std::slice::from_ref(&root), |end| end, &to).await;
    assert!(wrong_sum.is_infrastructure(), "{wrong_sum:?}");
    for entries in [
        vec![root.clone(), file("../escaped")],
        vec![root.clone(), link("a", "/"), file("a/tmp")],
        vec![root.clone(), link("a", "/etc/passwd")],
        vec![file("/etc/passwd")],
        vec![],
    ] {
        let refused = hostile(&entries, |end| end, &to).await;
        assert!(matches!(refused, ToolError::Tree(_)), "{refused:?}");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "after {entries:?}");
    }
}

#[tokio::test]
async fn who_sends_or_reads_nothing_is_not_waited_for() {
    let (mut process, channel) = start_raw(&[]);
    let mut channel = UnixStream::from_std(channel).unwrap();
    let place = TempDir::new().unwrap();
    fs::write(place.path().join("file"), "content").unwrap();
    let (to, from) = (place.path().join("to").display().to_string(), place.path().join("file").display().to_string());
    let upload = Op::Upload(Upload { to, replace: false });
    let download = Op::Download(Download { from, max_bytes: 100, max_entries: 1, window: 3 });
    for (id, op) in [(1, upload), (2, download)] {
        let request = HostFrame::Request(Request { id, timeout_ms: 200, op });
        channel.write_all(&frame::encode(&request).unwrap()).await.unwrap();
    }
    let mut decoder = Decoder::default();
    let mut buffer = [0; 4096];
    let (mut n_done, mut n_sent) = (0, 0);
    while n_done < 2 {
        let n = timeout(LONG, channel.read(&mut buffer)).await.unwrap().unwrap();
        decoder.push(&buffer[..n]);
        while let Some(frame) = decoder.pop::<GuestFrame>().unwrap() {
            match frame {
                GuestFrame::Done { answer: Answer::Failed { message }, .. } => {
                    assert!(message.contains("limit of 200 ms"), "{message}");
                    n_done += 1;
                }
                GuestFrame::Output { id: 2, bytes, .. } => n_sent += bytes.0.len(),
                GuestFrame::Credit { id: 1, .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(n_sent, 3, "no more than there was credit for");
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
    drop(channel);
    process.wait().unwrap();
}

#[tokio::test]
async fn sessions_are_bounded() {
    let guest = Guest::bare(&[]);
    for n in 0.. {
        let call =
            prorl_tools::host::BashCall { session: n.to_string(), ..prorl_tools::host::BashCall::new("echo ok") };
        match guest.client().bash(&call, LONG).await {
            Ok(answer) => assert!(n < 24 && answer.output.text() == "ok\n", "{n}: {answer:?}"),
            Err(err) => {
                assert!(n == 24 && err.to_string().contains("24 sessions") && !err.is_infrastructure(), "{n}: {err:?}");
                break;
            }
        }
    }
    assert!(guest.client().exec(&ExecSpec::new(["true"]), LONG).await.unwrap().success());
}
