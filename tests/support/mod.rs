//! Starts the real binary, watches what it starts, and leaves nothing behind.

#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod image;

use std::{
    collections::BTreeSet,
    io::Write as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use prorl_client::Client;
use prorl_llm::{
    mock::{MockLlm, Script},
    tokenizer::ChatTokenizer,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::{Child, Command},
    time::{Instant, sleep},
};

/// Says on the test's own output what is worth knowing of a test that passes.
pub(crate) fn note(text: &str) {
    writeln!(std::io::stderr().lock(), "{text}").unwrap();
}

/// Returns the root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the binary under test.
pub(crate) fn prorl() -> PathBuf {
    env!("CARGO_BIN_EXE_prorl").into()
}

/// A running `prorl serve` with a temporary folder of its own.
pub(crate) struct Serve {
    pub(crate) child: Child,
    pub(crate) address: String,
    pub(crate) client: Client,
    pub(crate) temp: tempfile::TempDir,
    /// The store of images, which outlives a server.
    pub(crate) store: tempfile::TempDir,
}

impl Serve {
    pub(crate) async fn start(args: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), args, &[]).await
    }

    async fn start_in(temp: tempfile::TempDir, args: &[&str], env: &[(&str, &str)]) -> Self {
        let store = image::open_temp();
        let mut child = Command::new(prorl())
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(args)
            .env("TMPDIR", temp.path())
            .env("PRORL_STORE", store.path())
            .env_remove("PRORL_TOKEN")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next_line().await.unwrap().expect("the server says where it listens");
        let address = line.strip_prefix("prorl serve listening on ").unwrap().to_owned();
        let client = Client::new(&address, None).unwrap();
        Self { child, address, client, temp, store }
    }

    /// Starts a server that uses a scripted policy.
    pub(crate) async fn with_mock(args: &[&str], mock: &MockLlm) -> Self {
        Self::start(args).await.using(mock).await
    }

    /// The same in a temporary folder that every user may pass, as the sandbox user of a server of root has to.
    pub(crate) async fn in_open_folder(args: &[&str], mock: &MockLlm) -> Self {
        Self::start_in(image::open_temp(), args, &[]).await.using(mock).await
    }

    /// A server that finds no program along its search path.
    pub(crate) async fn without_programs(mock: &MockLlm) -> Self {
        Self::start_in(image::open_temp(), &[], &[("PATH", "/nonexistent")]).await.using(mock).await
    }

    async fn using(self, mock: &MockLlm) -> Self {
        let serve = self;
        let added = serve.post("/add_llm_server", &json!({"address": mock.address()})).await;
        assert_eq!((added.0, &added.1["backend"]["healthy"]), (200, &json!(true)), "{added:?}");
        serve
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().expect("the server runs")
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.send(reqwest::Method::POST, path, Some(body.to_string())).await
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        self.send(reqwest::Method::GET, path, None).await
    }

    pub(crate) async fn send(&self, method: reqwest::Method, path: &str, body: Option<String>) -> (u16, Value) {
        let mut request = reqwest::Client::new().request(method, format!("{}{path}", self.address));
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let text = response.text().await.unwrap();
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// Stops it by SIGTERM and checks that nothing is left.
    pub(crate) async fn stop(mut self) {
        let ours = descendants(self.pid());
        signal(self.pid(), Signal::SIGTERM);
        let ended = tokio::time::timeout(Duration::from_secs(20), self.child.wait()).await;
        assert!(ended.expect("the server ends").unwrap().success());
        gone(&ours, Duration::from_secs(2)).await;
        self.nothing_left();
    }

    /// Checks that the temporary folder is empty and no mount of ours is in the host's table.
    pub(crate) fn nothing_left(&self) {
        let left: Vec<_> = std::fs::read_dir(self.temp.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "left in the temporary folder: {left:?}");
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains("prorl"), "left in the mount table: {mounts}");
    }
}

/// Sends a signal to one process.
pub(crate) fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
}

/// A process by number and start time, so that a reused number is not taken for it.
pub(crate) type Process = (u32, String);

fn stat(pid: u32) -> Option<(char, String)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<_> = text.rsplit_once(") ")?.1.split(' ').collect();
    Some((fields[0].chars().next()?, fields[19].to_owned()))
}

/// Returns every process below `pid`, as the kernel's own tree has them.
pub(crate) fn descendants(pid: u32) -> BTreeSet<Process> {
    let mut found = BTreeSet::new();
    let mut left = vec![pid];
    while let Some(parent) = left.pop() {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{parent}/task")) else { continue };
        for task in tasks.flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            for child in children.split_whitespace().filter_map(|child| child.parse().ok()) {
                if let Some((_, started)) = stat(child) {
                    found.insert((child, started));
                    left.push(child);
                }
            }
        }
    }
    found
}

/// Returns those that still live; a zombie is dead.
pub(crate) fn alive(processes: &BTreeSet<Process>) -> BTreeSet<Process> {
    let lives = |process: &&Process| {
        stat(process.0).is_some_and(|(state, started)| started == process.1 && !matches!(state, 'Z' | 'X'))
    };
    processes.iter().filter(lives).cloned().collect()
}

/// Waits until none of them lives.
pub(crate) async fn gone(processes: &BTreeSet<Process>, limit: Duration) {
    let began = Instant::now();
    loop {
        let left = alive(processes);
        if left.is_empty() {
            return;
        }
        assert!(began.elapsed() < limit, "still alive after {limit:?}: {left:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until `ready` is true.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut ready: impl FnMut() -> F) {
    let began = Instant::now();
    while !ready().await {
        assert!(began.elapsed() < Duration::from_secs(30), "{what} did not come");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Starts a scripted policy in this process, so that a test can read what it saw.
pub(crate) async fn mock(script: &Value) -> MockLlm {
    mock_with(ChatTokenizer::builtin(), script).await
}

/// Starts a scripted policy with a tokenizer of its own.
pub(crate) async fn mock_with(tokenizer: ChatTokenizer, script: &Value) -> MockLlm {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let script = Script::from_json(script.to_string().as_bytes()).unwrap();
    MockLlm::start(listener, tokenizer, script).unwrap()
}

/// Returns the folder of the real Qwen3 tokenizer, where `tests/fetch-qwen3.sh` has put it.
pub(crate) fn qwen3() -> Option<PathBuf> {
    let folder =
        std::env::var_os("PRORL_QWEN3_DIR").map_or_else(|| root().join("target/test-data/qwen3"), PathBuf::from);
    folder.join("tokenizer.json").is_file().then_some(folder)
}

/// Returns what a scripted policy was asked by jobs, without the probes of a pool.
pub(crate) fn job_calls(mock: &MockLlm) -> Vec<prorl_llm::mock::Call> {
    mock.calls().into_iter().filter(|call| call.session_id.as_deref() != Some("probe")).collect()
}

/// A tool call as a model writes it.
pub(crate) fn call(name: &str, arguments: &Value) -> String {
    let call = json!({"name": name, "arguments": arguments});
    format!("I am HAVING a look.\n<tool_call>\n{call}\n</tool_call>")
}

/// A turn that runs Python.
pub(crate) fn python(code: &str) -> String {
    call("execute_ipython_cell", &json!({"code": code}))
}

/// A turn that gives the answer.
pub(crate) fn finish(answer: &str) -> String {
    call("finish", &json!({"message": format!("The answer is \\boxed{{{answer}}}.")}))
}

/// A math request.
pub(crate) fn math(prompt: &str, truth: &str) -> Value {
    json!({"instance": {"data_source": "math", "prompt": prompt, "ground_truth": truth}, "sampling_params": {}})
}
