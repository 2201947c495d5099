//! Sets a task's sandbox up before its agent comes: once for a group where that can be, in each sandbox where not.
//!
//! An instance's `setup` is a bash script. Where the job has a `group_id` and the server a store, it runs in one sandbox of
//! the group, whose writable layer is then frozen, and the sandboxes of all jobs start on top of that layer. So what it does
//! must not depend on which job of the group it runs for, and it may leave no process running. `/tmp` and `/dev/shm` are
//! each sandbox's own and not part of the layer. Where the store turns out to take no layer, each job is set up by itself, and
//! its result says why.

use std::{error::Error, io::ErrorKind, sync::Arc, time::Duration};

use prorl_core::{
    FailureClass, Instance, JobRequest, Malformed, Stage,
    request::{CommonFields, kind_of},
};
use prorl_pipeline::{JobContext, Shared, StageError};
use prorl_sandbox::{
    FreezeError, Image,
    store::{ImageStore, Layer, StoreError},
};
use prorl_tools::{
    host::{ExecOutput, ExecSpec, ToolClient},
    wire::ExitStatus,
};
use serde_json::{Value, json};

use crate::{AgentSandbox, Environment};

/// Where the script lies while it runs. It is in `/tmp`, so that no layer has it.
const SCRIPT: &str = "/tmp/setup.sh";

/// How long writing the script or removing it may take.
const FILE_LIMIT: Duration = Duration::from_secs(10);

/// Bytes kept of what the script writes.
const OUTPUT_BYTES: usize = 64 * 1024;

/// How much of it a failure shows: its last lines, and of them the last characters.
const SHOWN_LINES: usize = 10;
const SHOWN_CHARS: usize = 1000;

/// What the jobs of a group start from.
struct Ground {
    /// The image that the layer lies over, held so that a name that comes to mean another one changes nothing.
    image: Image,
    layer: Layer,
}

/// Returns an instance's `setup`.
///
/// # Errors
/// When it is no text that bash can read.
pub fn setup(instance: &Instance) -> Result<Option<&str>, Malformed> {
    match instance.get("setup") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(script)) if script.contains('\0') => {
            Err(Malformed::new("instance.setup", "expected a bash script, found a NUL character in it"))
        }
        Some(Value::String(script)) if script.trim().is_empty() => Ok(None),
        Some(Value::String(script)) => Ok(Some(script)),
        Some(other) => {
            let problem = format!("expected a bash script as text, found {}", kind_of(other));
            Err(Malformed::new("instance.setup", problem))
        }
    }
}

/// Returns what a handler answers to [`init_shared_by`](prorl_pipeline::AgentHandler::init_shared_by): everything that decides
/// what the sandbox is after setup; nothing, where there is no setup or no store to keep it in.
pub fn shared_by(env: &Environment, request: &JobRequest) -> Option<String> {
    env.unpacker.as_ref()?;
    let script = setup(&request.instance).ok()??;
    let common = request.instance.common().ok()?;
    Some(key(&common, script))
}

fn key(common: &CommonFields, script: &str) -> String {
    let CommonFields { image, runtime, fakeroot, limits, network, tools: _, system_prompt: _ } = common;
    // No image is not the same as the name of the server's own: that may have come to mean another.
    let key = json!({
        "image": image, "runtime": runtime, "fakeroot": fakeroot, "network": network, "limits": limits, "setup": script,
    });
    key.to_string()
}

/// Does what a handler's [`init_shared`](prorl_pipeline::AgentHandler::init_shared) is to do: sets one sandbox up and keeps
/// what it has written. Where the store cannot keep it there is nothing to start from, and a warning for each job.
///
/// # Errors
/// Of class `handler` when the script fails or leaves something running, else with the class of what went wrong.
///
/// # Cancel safety
/// Dropping it kills the sandbox and keeps nothing.
pub async fn share(env: &Environment, job: &JobContext) -> Result<Shared, StageError> {
    let (Some(unpacker), Some(script)) = (&env.unpacker, script_of(job)?) else {
        return Err(StageError::text(FailureClass::Internal, "there is nothing to share"));
    };
    // Asked first, so that no setup runs in vain.
    if let Err(error) = takes_layers(&unpacker.store).await? {
        return Ok(nothing_shared(&error));
    }
    let (runtime, image) = env.image(job).await?;
    let mut spec = env.sandbox_spec(job, image.clone())?;
    spec.freezable = true;
    let sandbox = AgentSandbox::start(&**runtime, &spec, env.way(job)?).await?;
    sandbox.enter(Some(Stage::Init));
    let frozen = async {
        sandbox.while_alive(run_setup(job, sandbox.tools(), script)).await?;
        Ok(sandbox.freeze(&unpacker.store).await)
    };
    let error = match frozen.await {
        Ok(Ok(layer)) => return Ok(Shared::new(Ground { image, layer })),
        Ok(Err(error)) if is_the_stores(&error) => Ok(nothing_shared(&error)),
        Ok(Err(error)) => Err(not_frozen(&error)),
        Err(error) => Err(error),
    };
    job.adopt(sandbox); // so that its end is proven
    error
}

/// Finds out whether a store can be written, by making the place of a layer.
async fn takes_layers(store: &ImageStore) -> Result<Result<(), StoreError>, StageError> {
    let store = store.clone();
    let staged = tokio::task::spawn_blocking(move || store.stage_layer().map(drop)).await;
    staged.map_err(|join| StageError::text(FailureClass::Internal, format!("the store broke: {join}")))
}

/// Tells whether it was the store that had no place for a layer, or no room.
fn is_the_stores(error: &FreezeError) -> bool {
    use ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    match error {
        FreezeError::Store(_) => true,
        FreezeError::Copy { source, .. } => {
            matches!(source.kind(), QuotaExceeded | ReadOnlyFilesystem | StorageFull)
        }
        _ => false,
    }
}

/// What a group has whose store keeps nothing for it: [`sandbox`] sets each job up by itself.
fn nothing_shared(why: &(dyn Error + 'static)) -> Shared {
    let why = StageError::new(FailureClass::Sandbox, why).message;
    let mut shared = Shared::default();
    shared.warnings.push(format!("setup ran for this job alone, since its group can share nothing: {why}"));
    shared
}

/// Starts the sandbox that a job asks for, set up: on what its group shares, or by a setup of its own.
///
/// # Errors
/// As [`share`].
///
/// # Cancel safety
/// Dropping it kills what was started.
pub async fn sandbox(env: &Environment, job: &JobContext) -> Result<Arc<AgentSandbox>, StageError> {
    if let Some(shared) = job.shared()
        && let Some(Ground { image, layer }) = shared.state()
    {
        let runtime = env.runtime_of(job, image)?;
        let mut spec = env.sandbox_spec(job, image.clone())?;
        spec.layers.push(layer.clone());
        return AgentSandbox::start(&**runtime, &spec, env.way(job)?).await;
    }
    let (runtime, image) = env.image(job).await?;
    let spec = env.sandbox_spec(job, image)?;
    let sandbox = AgentSandbox::start(&**runtime, &spec, env.way(job)?).await?;
    if let Some(script) = script_of(job)? {
        sandbox.enter(Some(Stage::Init));
        let done = sandbox.while_alive(run_setup(job, sandbox.tools(), script)).await;
        // What it left running waits for the run stage as the sandbox does.
        sandbox.enter(None);
        if let Err(error) = done {
            job.adopt(sandbox); // so that its end is proven
            return Err(error);
        }
    }
    Ok(sandbox)
}

/// Returns the setup of a job that was accepted.
fn script_of(job: &JobContext) -> Result<Option<&str>, StageError> {
    setup(job.instance()).map_err(|problem| StageError::new(FailureClass::Handler, &problem))
}

/// Runs the script to its end, in the time that the stage has left.
async fn run_setup(job: &JobContext, tools: &ToolClient, script: &str) -> Result<(), StageError> {
    let broke = |err: prorl_tools::host::ToolError| {
        let class = if err.is_infrastructure() { FailureClass::Sandbox } else { FailureClass::Handler };
        let error = StageError::new(class, &err);
        StageError { message: format!("setup cannot be run: {}", error.message), ..error }
    };
    // A file and not an argument: those have a limit of 128 KiB. Not its input either, which is the script's own to read.
    let limit = job.remaining(Some(FILE_LIMIT));
    tools.write_file(SCRIPT, script.as_bytes(), 0o600, limit).await.map_err(broke)?;
    // Both outputs in the order in which they were written.
    let mut spec = ExecSpec::new(["bash", "-c", "exec bash \"$0\" 2>&1", SCRIPT]);
    spec.output_limit_bytes = OUTPUT_BYTES;
    let done = tools.exec(&spec, job.remaining(None)).await.map_err(broke)?;
    if !done.success() {
        return Err(StageError::text(FailureClass::Handler, how_it_failed(&done)));
    }
    let removal = ExecSpec::new(["rm", "-f", SCRIPT]);
    if let Err(error) = tools.exec(&removal, job.remaining(Some(FILE_LIMIT))).await {
        // An image without rm. The script is no secret: it is in the task's own data.
        tracing::debug!(%error, "the setup script stays in /tmp");
    }
    Ok(())
}

fn how_it_failed(done: &ExecOutput) -> String {
    let how = match done.status {
        _ if done.timed_out => "setup took longer than init may".to_owned(),
        ExitStatus::Code(code) => format!("setup exited with code {code}"),
        ExitStatus::Signal(signal) => format!("setup was killed by signal {signal}"),
    };
    match last_lines(&done.stdout.text()) {
        "" => how,
        lines => format!("{how}: {lines}"),
    }
}

/// Returns the end of a text, as much as is of use in an error.
fn last_lines(text: &str) -> &str {
    let text = text.trim();
    let newlines = text.char_indices().rev().filter(|(_, c)| *c == '\n').map(|(at, _)| at + 1);
    let by_lines = newlines.take(SHOWN_LINES).nth(SHOWN_LINES - 1).unwrap_or(0);
    let by_chars = text.char_indices().rev().nth(SHOWN_CHARS - 1).map_or(0, |(at, _)| at);
    if by_chars <= by_lines || text[..by_chars].ends_with('\n') {
        return &text[by_chars.max(by_lines)..];
    }
    // From the first line that begins within the limit, if one does.
    let shown = &text[by_chars..];
    shown.split_once('\n').map_or(shown, |(_, lines)| lines)
}

fn not_frozen(error: &FreezeError) -> StageError {
    match error {
        FreezeError::Running { processes, .. } => {
            let left = processes.join(", ");
            StageError::text(FailureClass::Handler, format!("setup left {left} running, which a group cannot share"))
        }
        error => StageError::new(error.failure_class(), error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setup_is_text_or_nothing() {
        let setup_of = |value: Value| {
            let instance = Instance([("setup".to_owned(), value)].into_iter().collect());
            setup(&instance).map(|script| script.map(str::to_owned)).map_err(|problem| problem.to_string())
        };
        assert_eq!(setup_of(json!("touch x")), Ok(Some("touch x".to_owned())));
        for nothing in [json!(null), json!(""), json!(" \n")] {
            assert_eq!(setup_of(nothing), Ok(None));
        }
        for (wrong, found) in [(json!(["a"]), "found a list"), (json!(7), "found a number"), (json!("a\0"), "a NUL")] {
            let problem = setup_of(wrong).unwrap_err();
            assert!(
                problem.starts_with("instance.setup: expected a bash script") && problem.contains(found),
                "{problem}"
            );
        }
    }

    #[test]
    fn everything_that_decides_the_state_tells_groups_apart() {
        let key_of = |script: &str, fields: Value| {
            let Value::Object(fields) = fields else { unreachable!("tests give objects") };
            key(&Instance(fields).common().unwrap(), script)
        };
        let one = key_of("a", json!({}));
        assert_eq!(one, key_of("a", json!({"image": null, "tools": ["bash"], "system_prompt": "x", "n": 1})));
        for (script, fields) in [
            ("b", json!({})),
            ("a", json!({"image": "host"})),
            ("a", json!({"image": "python"})),
            ("a", json!({"runtime": "singularity"})),
            ("a", json!({"fakeroot": true})),
            ("a", json!({"network": "host"})),
            ("a", json!({"network": {"allow": ["a.example"]}})),
            ("a", json!({"network": {"run": {"allow": ["a.example"]}}})),
            ("a", json!({"limits": {"disk_mb": 5}})),
        ] {
            assert_ne!(one, key_of(script, fields));
        }
    }

    #[test]
    fn an_error_shows_the_end_of_the_output() {
        assert_eq!(last_lines("\n"), "");
        assert_eq!(last_lines("one\n"), "one");
        let many: Vec<String> = (1..=30).map(|line| line.to_string()).collect();
        assert_eq!(last_lines(&many.join("\n")), many[20..].join("\n"));
        assert_eq!(last_lines(&"ä".repeat(3000)), "ä".repeat(SHOWN_CHARS));
        let [long, short] = [600, 399].map(|n_chars| "ä".repeat(n_chars));
        assert_eq!(last_lines(&format!("{long}\n{long}")), long, "no line is cut where another fits");
        assert_eq!(last_lines(&format!("x\n{long}\n{short}")), format!("{long}\n{short}"), "just the limit");
    }
}
