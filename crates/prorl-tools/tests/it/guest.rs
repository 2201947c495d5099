//! Guests to test against: one in a real sandbox, as everywhere else, and one in a plain process, which is this test program
//! started once more, for tests that look at the processes from outside.

use std::{
    io::Write,
    os::{fd::AsFd, fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::LazyLock,
    time::Duration,
};

use prorl_core::{Content, frame::Decoder};
use prorl_sandbox::{NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime, Sandbox, SandboxError, SandboxSpec};
use prorl_tools::{
    guest::{Terms, probe, serve},
    host::{BashCall, ToolClient, ToolContext, ToolResult, Toolbox},
    wire::{BashAnswer, BashEnd, HostFrame},
};
use serde_json::{Map, Value};
use tokio::io::AsyncReadExt as _;

const MARKER: &str = "PRORL_TOOLS_TEST_GUEST";

pub(crate) const LONG: Duration = Duration::from_mins(1);

/// A guest and the client to it. Dropping it closes the channel, which ends the guest and all that it started.
pub(crate) struct Guest {
    client: Option<ToolClient>,
    around: Around,
}

enum Around {
    Sandbox { _sandbox: Box<Sandbox> },
    Process(Child),
}

/// Runs the guest when this program was started as one; a test without content otherwise.
#[test]
fn stand_in() {
    if std::env::var_os(MARKER).is_none() {
        return;
    }
    let channel = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let _exit = serve(channel, probe(), Terms::default());
    let _flushed = std::io::stdout().flush();
    std::process::exit(0);
}

/// Starts a guest process in this process's folder; returns it and the host's end of its channel.
pub(crate) fn start_raw(env: &[(&str, &str)]) -> (Child, UnixStream) {
    start_raw_in(Path::new("."), env)
}

fn start_raw_in(folder: &Path, env: &[(&str, &str)]) -> (Child, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "guest::stand_in", "--nocapture"])
        .current_dir(folder)
        .env(MARKER, "1")
        .envs(env.iter().copied())
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    ours.set_nonblocking(true).unwrap();
    (process, ours)
}

impl Guest {
    /// Starts a guest in a sandbox; in a plain process, and says so, where the machine cannot have one.
    pub(crate) async fn start() -> Self {
        static INSTALLED: LazyLock<prorl_guest::Guest> = LazyLock::new(|| prorl_guest::Guest::install().unwrap());
        static NODE: LazyLock<Node> = LazyLock::new(|| Node::open(NodeConfig::new(INSTALLED.path())).unwrap());
        let runtime = NamespaceRuntime::new(NODE.clone(), NamespaceConfig::default());
        match runtime.start(&SandboxSpec::new(INSTALLED.path())).await {
            Ok(mut sandbox) => {
                let client = ToolClient::new(sandbox.take_channel().unwrap());
                Self { client: Some(client), around: Around::Sandbox { _sandbox: Box::new(sandbox) } }
            }
            Err(err @ SandboxError::UserNamespaces { .. }) => {
                let _said = writeln!(std::io::stderr(), "no sandbox around this guest: {err}");
                Self::bare(&[])
            }
            Err(err) => panic!("{err:?}"),
        }
    }

    /// Starts a guest in a plain process, with these variables.
    pub(crate) fn bare(env: &[(&str, &str)]) -> Self {
        Self::bare_in(Path::new("."), env)
    }

    /// Starts a guest in a plain process that works in a folder.
    pub(crate) fn bare_in(folder: &Path, env: &[(&str, &str)]) -> Self {
        let (process, channel) = start_raw_in(folder, env);
        let client = ToolClient::new(tokio::net::UnixStream::from_std(channel).unwrap());
        Self { client: Some(client), around: Around::Process(process) }
    }

    pub(crate) fn client(&self) -> &ToolClient {
        self.client.as_ref().unwrap()
    }

    /// Takes the client out; returns it, the folder that tools begin in, and what must live as long as it.
    #[cfg(feature = "conformance")]
    pub(crate) fn apart(mut self) -> (ToolClient, String, Self) {
        let client = self.client.take().unwrap();
        let folder = match &self.around {
            Around::Sandbox { .. } => "/workspace".to_owned(),
            Around::Process(_) => std::env::current_dir().unwrap().to_str().unwrap().to_owned(),
        };
        (client, folder, self)
    }

    /// Kills a plain process.
    pub(crate) fn kill(&mut self) {
        let Around::Process(process) = &mut self.around else { panic!("a plain process") };
        process.kill().unwrap();
    }

    /// Runs a command; panics unless it ends by itself in a shell that stays.
    pub(crate) async fn run(&self, command: &str) -> (String, i32) {
        let answer = self.bash(BashCall::new(command), LONG).await;
        match answer {
            BashAnswer { end: BashEnd::Exited(code), restarted: None, output, .. } => (output.text(), code),
            other => panic!("{command}: {other:?}"),
        }
    }

    pub(crate) async fn bash(&self, call: BashCall, limit: Duration) -> BashAnswer {
        self.client().bash(&call, limit).await.unwrap()
    }

    /// Runs a cell; returns what the agent reads.
    pub(crate) async fn cell(&self, code: &str) -> String {
        self.tool("execute_ipython_cell", &[("code", code)], LONG).await.content.text()
    }

    /// Calls a tool as an agent does.
    pub(crate) async fn tool(&self, name: &str, arguments: &[(&str, &str)], limit: Duration) -> ToolResult {
        let toolbox = Toolbox::from_names(["bash", "ipython", "think", "finish"]).unwrap();
        let context = ToolContext::new(self.client(), limit);
        let arguments: Map<String, Value> =
            arguments.iter().map(|(name, value)| ((*name).to_owned(), Value::from(*value))).collect();
        let result = toolbox.call(&context, name, &arguments).await.unwrap();
        assert!(matches!(result.content, Content::Text(_)));
        result
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        drop(self.client.take());
        if let Around::Process(process) = &mut self.around {
            let _ended = process.wait();
        }
    }
}

/// Reads what a client sends until it asks for something, and returns by which number.
pub(crate) async fn asked(theirs: &mut tokio::net::UnixStream) -> u64 {
    let mut decoder = Decoder::default();
    let mut buffer = [0; 4096];
    loop {
        let n = theirs.read(&mut buffer).await.unwrap();
        decoder.push(&buffer[..n]);
        if let Some(HostFrame::Request(request)) = decoder.pop().unwrap() {
            return request.id;
        }
    }
}
