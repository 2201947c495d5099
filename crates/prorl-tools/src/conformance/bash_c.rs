//! What many agents use for a shell: `bash -c`, a new one for each command, read through pipes until both are closed.

use std::{
    collections::BTreeSet,
    io::{self, Read as _},
    os::unix::process::ExitStatusExt as _,
    process::{ExitStatus, Stdio},
};

use async_trait::async_trait;
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{io::AsyncReadExt, time::timeout};

use super::{
    case::{Call, File, Need, State, Suite, What},
    host::Ground,
    run::{Found, Seen, Session, Subject, Unopened},
};

/// `bash -c`.
#[derive(Clone, Copy, Debug)]
pub struct BashC;

#[async_trait]
impl Subject for BashC {
    fn name(&self) -> &'static str {
        "bash -c"
    }

    async fn open(&self, suite: Suite) -> Result<Box<dyn Session>, Unopened> {
        if suite != Suite::Bash {
            return Err(Unopened::Absent("it is a shell and nothing else".to_owned()));
        }
        let ground = Ground::make().map_err(|err| Unopened::Broken(err.to_string()))?;
        Ok(Box::new(Commands { ground }))
    }
}

struct Commands {
    ground: Ground,
}

impl Commands {
    /// Runs a command; returns what it printed and how it ended, or nothing of that if its limit passed.
    async fn run(&self, command: &str, call: &Call) -> io::Result<(Vec<u8>, Option<ExitStatus>)> {
        // A long command has no room among the arguments.
        let mut script = tempfile::NamedTempFile::new()?;
        let mut bash = self.ground.command("bash");
        if command.len() < 100_000 {
            bash.args(["-c", command]);
        } else {
            io::Write::write_all(&mut script, command.as_bytes())?;
            bash.arg(script.path());
        }
        let (mut reader, writer) = tokio::net::unix::pipe::pipe().map(|(sender, reader)| (reader, sender))?;
        let writer = writer.into_blocking_fd()?;
        bash.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let mut child = bash.spawn()?;
        // With it go its copies of the pipe's end.
        drop(bash);
        let group = child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
        let mut output = Vec::new();
        let ended = timeout(call.limit, async {
            reader.read_to_end(&mut output).await?;
            child.wait().await
        });
        match ended.await {
            Ok(status) => Ok((output, Some(status?))),
            Err(_elapsed) => {
                if let Some(group) = group {
                    let _sent = killpg(group, Signal::SIGKILL);
                }
                child.wait().await?;
                Ok((output, None))
            }
        }
    }
}

#[async_trait]
impl Session for Commands {
    fn lacks(&self) -> BTreeSet<Need> {
        [Need::Input, Need::Silence, Need::Rich].into()
    }

    fn version(&self) -> Option<String> {
        let mut child = std::process::Command::new("bash").arg("--version").stdout(Stdio::piped()).spawn().ok()?;
        let mut text = String::new();
        let read = child.stdout.take().map(|mut stdout| stdout.read_to_string(&mut text));
        child.wait().ok()?;
        read?.ok()?;
        let word = text.split_whitespace().skip_while(|word| *word != "version").nth(1)?;
        word.split('(').next().map(str::to_owned)
    }

    fn folder(&self) -> &str {
        self.ground.path()
    }

    async fn call(&mut self, call: &Call) -> Result<Seen, String> {
        let What::Command(command) = &call.what else { return Ok(unsupported()) };
        let (output, status) = self.run(command, call).await.map_err(|err| err.to_string())?;
        let code = status.and_then(|status| status.code().or(status.signal().map(|signal| 128 + signal)));
        Ok(Seen {
            bytes: Some(output.len() as u64),
            output: String::from_utf8_lossy(&output).into_owned(),
            code,
            state: if status.is_some() { State::Done } else { State::Limit },
            ..unsupported()
        })
    }

    async fn put(&mut self, file: &File) -> Result<(), String> {
        self.ground.put(file)
    }

    async fn look(&mut self, path: &str) -> Result<Found, String> {
        self.ground.look(path)
    }

    async fn close(self: Box<Self>) {
        self.ground.close().await;
    }
}

fn unsupported() -> Seen {
    let (output, parts) = (String::new(), Vec::new());
    Seen { output, bytes: None, code: None, state: State::Unsupported, cwd: None, waits: false, parts }
}
