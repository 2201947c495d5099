//! A pipeline with the math handler, sandboxes of this machine's own programs, and a policy that follows a script.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, LazyLock},
    time::Duration,
};

use nix::unistd::geteuid;
use prorl_agents::{Environment, Math, Runtimes};
use prorl_core::{GroupId, Instance, JobRequest, JobResult};
use prorl_guest::Guest;
use prorl_llm::{
    mock::{MockLlm, Script},
    pool::{BackendSpec, Pool, PoolConfig},
    tokenizer::ChatTokenizer,
};
use prorl_pipeline::{JobHandle, Pipeline, PipelineConfig, Registry};
use prorl_sandbox::{
    NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime, SandboxUser, SingularityConfig, SingularityRuntime,
    images::Unpacker,
    store::{ImageStore, StoreConfig},
};
use serde_json::{Value, json};

static GUEST: LazyLock<Guest> = LazyLock::new(|| Guest::install().unwrap());

static NODE: LazyLock<Node> = LazyLock::new(|| Node::open(NodeConfig::new(GUEST.path())).unwrap());

/// Whom sandboxes of root run as.
const NOBODY: SandboxUser = SandboxUser { uid: 65534, gid: 65534 };

/// A temporary folder that every user may pass through, as `/tmp` is: sandboxes of root belong to another user.
pub(crate) fn open_temp() -> tempfile::TempDir {
    let temp = tempfile::tempdir().unwrap();
    fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o755)).unwrap();
    temp
}

/// Opens a store for sandboxes as the tests start them.
pub(crate) fn store(folder: &Path) -> ImageStore {
    let owner = geteuid().is_root().then_some(NOBODY);
    let guest = Some(GUEST.path().to_owned());
    ImageStore::open(StoreConfig { owner, guest, ..StoreConfig::new(folder.join("store")) }).unwrap()
}

/// Puts a file where a folder of the store is, so that nobody can write there, root neither.
pub(crate) fn close(store: &ImageStore, folder: &str) {
    let folder = store.dir().join(folder);
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "no folder").unwrap();
}

/// A running pipeline.
pub(crate) struct Rig {
    pub(crate) pipeline: Pipeline,
    _mock: MockLlm,
}

impl Rig {
    /// Starts one whose policy makes these turns, whatever it is asked.
    pub(crate) async fn start(
        turns: &[String],
        store: Option<&ImageStore>,
        set_up: impl FnOnce(&mut Environment),
    ) -> Self {
        let script = json!({"tasks": [{"match": "", "turns": turns}]});
        let script = Script::from_json(script.to_string().as_bytes()).unwrap();
        let mock = MockLlm::spawn(ChatTokenizer::builtin(), script).await.unwrap();
        let pool = Pool::new(PoolConfig::default());
        pool.add(BackendSpec::new(mock.address())).await.unwrap();
        let config = NamespaceConfig { sandbox_user: geteuid().is_root().then_some(NOBODY) };
        let namespace: Arc<dyn Runtime> = Arc::new(NamespaceRuntime::new(NODE.clone(), config));
        let mut env = Environment::new(Runtimes::from(namespace), GUEST.path(), pool, ChatTokenizer::builtin());
        env.unpacker = store.cloned().map(Unpacker::new);
        set_up(&mut env);
        env.default_sandbox().await.unwrap(); // as a server does
        let mut registry = Registry::default();
        registry.register(Math::new(Arc::new(env))).unwrap();
        let pipeline = Pipeline::new(PipelineConfig { init_workers: 4, ..PipelineConfig::default() }, registry);
        pipeline.start();
        Self { pipeline, _mock: mock }
    }

    pub(crate) fn submit(&self, group: Option<&str>, fields: &Value) -> JobHandle {
        self.pipeline.submit(request(group, fields)).unwrap()
    }

    pub(crate) async fn run(&self, group: Option<&str>, fields: &Value) -> Arc<JobResult> {
        self.submit(group, fields).result().await
    }
}

pub(crate) fn request(group: Option<&str>, fields: &Value) -> JobRequest {
    let mut fields = fields.as_object().unwrap().clone();
    for (field, value) in [("data_source", "math"), ("prompt", "What is it?"), ("ground_truth", "7")] {
        fields.insert(field.to_owned(), json!(value));
    }
    let mut request = JobRequest::new(Instance(fields));
    request.group_id = group.map(|group| GroupId::new(group).unwrap());
    request
}

fn call(name: &str, arguments: &Value) -> String {
    format!("<tool_call>\n{}\n</tool_call>", json!({"name": name, "arguments": arguments}))
}

/// A turn that runs Python.
pub(crate) fn python(code: &str) -> String {
    call("execute_ipython_cell", &json!({"code": code}))
}

/// A turn that runs bash.
pub(crate) fn bash(command: &str) -> String {
    call("execute_bash", &json!({"command": command}))
}

/// A turn that gives the answer.
pub(crate) fn finish() -> String {
    call("finish", &json!({"message": "\\boxed{7}"}))
}

/// What the tools said, in order.
pub(crate) fn observed(result: &JobResult) -> Vec<String> {
    let is_tool = |message: &&prorl_core::Message| message.role == prorl_core::Role::Tool;
    result.messages.iter().filter(is_tool).map(|message| message.content.text()).collect()
}

/// Waits until a store holds no layer: one that nobody uses is removed by a thread of the store's.
pub(crate) async fn no_layers(store: &ImageStore) {
    let gone = async {
        while !store.list_layers().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("layers are removed when nobody needs them");
}

/// Says why a test does nothing here.
pub(crate) fn skip(why: &str) {
    writeln!(std::io::stderr().lock(), "skipped: {why}").unwrap();
}

fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|done| done.success())
}

/// Copies a program by another process: a handle of ours could leak into a child that another test is just starting, and a
/// program that is open for writing cannot be executed.
fn copy(program: &Path, target: &Path) {
    assert!(succeeds(Command::new("cp").arg("-L").arg(program).arg(target)));
}

/// Gives a tree to whom sandboxes of root run as.
pub(crate) fn give_to_sandboxes(tree: &Path) {
    if geteuid().is_root() {
        let SandboxUser { uid, gid } = NOBODY;
        assert!(succeeds(Command::new("chown").arg("-hR").arg(format!("{uid}:{gid}")).arg(tree)));
    }
}

/// An unpacked image with a shell and a few programs.
pub(crate) fn image(folder: &Path) -> PathBuf {
    let image = folder.join("image");
    for folder in ["bin", "dev", "etc", "home", "proc", "root", "sys", "tmp", "usr/bin", "var/tmp"] {
        fs::create_dir_all(image.join(folder)).unwrap();
    }
    for program in ["bash", "cat", "ls", "rm"] {
        let found = ["/bin", "/usr/bin"].iter().map(|folder| Path::new(folder).join(program));
        let found = found.into_iter().find(|path| path.exists()).unwrap();
        copy(&found, &image.join("bin").join(program));
        let libraries = Command::new("ldd").arg(&found).output().unwrap().stdout;
        for word in String::from_utf8(libraries).unwrap().split_whitespace().filter(|word| word.starts_with('/')) {
            let target = image.join(&word[1..]);
            fs::create_dir_all(target.parent().unwrap()).unwrap();
            copy(Path::new(word), &target);
        }
    }
    std::os::unix::fs::symlink("bash", image.join("bin/sh")).unwrap();
    fs::write(image.join("etc/mark"), "of the image\n").unwrap();
    assert!(succeeds(Command::new("chmod").arg("-R").arg("a+rX").arg(&image)));
    image
}

/// The same as a squashfs; none where it cannot be made.
pub(crate) fn packed(folder: &Path) -> Option<PathBuf> {
    let (image, file) = (image(folder), folder.join("packed.sqfs"));
    let mut pack = Command::new("mksquashfs");
    pack.arg(image).arg(&file).args(["-all-root", "-quiet", "-no-progress"]);
    succeeds(&mut pack).then_some(file)
}

/// The other runtime, where its program is.
pub(crate) fn singularity() -> Option<Arc<dyn Runtime>> {
    let config = SingularityConfig { program: None, sandbox_user: geteuid().is_root().then_some(NOBODY) };
    Some(Arc::new(SingularityRuntime::new(NODE.clone(), config).ok()?))
}
