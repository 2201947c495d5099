//! What a client reads from a guest while seven calls wait for answers: the bytes are all that the guest says.
//!
//! No bytes may panic, leave a call without an end, have more kept of a call than it asked for, or have anything made but what was to
//! be downloaded.

#![no_main]

use std::{fs, path::PathBuf, process, sync::LazyLock, time::Duration};

use libfuzzer_sys::fuzz_target;
use prorl_core::frame::Decoder;
use prorl_tools::{
    host::{AttachSpec, BashCall, ExecSpec, ToolClient, TreeOptions},
    tree::TreeLimits,
    wire::{Change, Edit, HostFrame},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    runtime::{Builder, Runtime},
};

const LIMIT: Duration = Duration::from_secs(60);
const KEPT: usize = 64;

/// Where a download goes; in TMPDIR, for whoever set that to remove.
static PLACE: LazyLock<PathBuf> = LazyLock::new(|| {
    let place = std::env::temp_dir().join(format!("prorl-fuzz-{}", process::id()));
    fs::create_dir(&place).expect("TMPDIR takes folders");
    place
});

/// Kept, since a new one would start new threads for files.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_all().build().expect("there is a runtime"));

fuzz_target!(|data: &[u8]| {
    RUNTIME.block_on(talk(data));
    for entry in fs::read_dir(&*PLACE).expect("it is still there") {
        let entry = entry.expect("a name");
        assert_eq!(entry.file_name(), "to", "made beside the place");
        let path = entry.path();
        if fs::symlink_metadata(&path).expect("it is there").is_dir() {
            open_up(&path);
            fs::remove_dir_all(&path).expect("it can be removed");
        } else {
            fs::remove_file(&path).expect("it can be removed");
        }
    }
});

async fn talk(data: &[u8]) {
    let (ours, mut theirs) = UnixStream::pair().expect("there are sockets");
    let client = ToolClient::new(ours);
    let guest = async {
        // All calls are known before the first answer.
        let mut decoder = Decoder::default();
        let mut buffer = [0; 4096];
        let mut n_requests = 0;
        while n_requests < 7 {
            let n = theirs.read(&mut buffer).await.expect("the client is there");
            decoder.push(&buffer[..n]);
            while let Some(frame) = decoder.pop::<HostFrame>().expect("the client sends frames") {
                n_requests += usize::from(matches!(frame, HostFrame::Request(_)));
            }
        }
        // A client that has given up reads no more.
        let _written = theirs.write_all(data).await;
        let _shut = theirs.shutdown().await;
        theirs
    };
    let exec = ExecSpec { output_limit_bytes: KEPT, ..ExecSpec::new(["x"]) };
    let bash = BashCall::new("x");
    let edit = Edit { path: "/x".to_owned(), change: Change::Undo, output_chars: 99 };
    let spec = AttachSpec::new(["x"]);
    let attach = async {
        let mut attached = client.attach(&spec, LIMIT).await?;
        let (stdout, stderr) = (attached.stdout.take(), attached.stderr.take());
        let all = async |output: Option<prorl_tools::host::Output>| {
            let mut output = output.expect("it has pipes");
            while output.next().await.is_some() {}
        };
        tokio::join!(all(stdout), all(stderr));
        attached.wait().await
    };
    let limits = TreeLimits { max_bytes: 10_000, max_entries: 100, ..TreeLimits::default() };
    let options = TreeOptions { limits, ..TreeOptions::default() };
    let to = PLACE.join("to");
    let (exec, bash, cell, read, _edit, _attach, download, _open) = tokio::join!(
        client.exec(&exec, LIMIT),
        client.bash(&bash, LIMIT),
        client.ipython("x", LIMIT),
        client.read_file("/x", KEPT, LIMIT),
        client.edit(&edit, LIMIT),
        attach,
        client.download("/x", &to, &options, LIMIT),
        guest,
    );
    if let Ok(exec) = exec {
        // What comes with the answer is one frame at most.
        assert!(exec.stdout.head.0.len() <= KEPT && exec.stderr.head.0.len() <= KEPT);
        let _counted = (exec.stdout.omitted(), exec.truncated());
    }
    if let Ok(bash) = bash {
        let _told = bash.output.text();
    }
    if let Ok(cell) = cell {
        assert!(cell.shown.len() <= 32);
    }
    if let Ok(read) = read {
        assert!(read.head.0.len() <= KEPT);
    }
    if let Ok(made) = download {
        assert!(made.n_entries <= 100 && made.n_bytes <= 10_000, "{made:?}");
    }
}

/// Lets folders that nobody may change be removed, for whoever is no root.
fn open_up(folder: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).expect("it is ours");
    for entry in fs::read_dir(folder).expect("it is open").flatten() {
        if entry.file_type().expect("it is there").is_dir() {
            open_up(&entry.path());
        }
    }
}
