//! How many agents use a shell: keys are sent to tmux, and its screen is looked at until the end shows. Here it is looked at as
//! often as can be; tools that sleep between two looks take longer.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use tokio::time::Instant;

use crate::bench::machine;

/// How long a command may take.
const LIMIT: Duration = Duration::from_secs(20);

/// A server of tmux with one window and a bash in it.
pub(super) struct Tmux {
    program: PathBuf,
    folder: tempfile::TempDir,
    n_commands: u64,
}

impl Tmux {
    pub(super) fn start() -> anyhow::Result<Self> {
        let program = machine::find_program("tmux").context("tmux is absent")?;
        let folder = tempfile::Builder::new().prefix("prorl-bench-").tempdir()?;
        let mut tmux = Self { program, folder, n_commands: 0 };
        tmux.ask(&["-f", "/dev/null", "new-session", "-d", "-x", "200", "-y", "50", "bash --noprofile --norc"])?;
        tmux.run("true")?;
        Ok(tmux)
    }

    /// Runs a command; returns how long it took until its end showed.
    pub(super) fn run(&mut self, command: &str) -> anyhow::Result<Duration> {
        self.n_commands += 1;
        let n = self.n_commands;
        let begun = Instant::now();
        // What is typed shows as well, and is not what is looked for.
        self.ask(&["send-keys", &format!("clear; {command}; echo @\"@{n}@\"@ $?"), "Enter"])?;
        let end = format!("@@{n}@@ 0");
        while begun.elapsed() < LIMIT {
            if self.ask(&["capture-pane", "-p"])?.contains(&end) {
                return Ok(begun.elapsed());
            }
        }
        bail!("{command}: no end on tmux's screen in {LIMIT:?}")
    }

    fn ask(&self, args: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(&self.program);
        command.arg("-S").arg(self.folder.path().join("socket")).args(args).env_remove("TMUX").env("TERM", "dumb");
        let said = command.stdin(Stdio::null()).output().context("failed to start tmux")?;
        ensure!(said.status.success(), "tmux {}: {}", args[0], String::from_utf8_lossy(&said.stderr).trim());
        Ok(String::from_utf8_lossy(&said.stdout).into_owned())
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        let _ended = self.ask(&["kill-server"]);
    }
}
