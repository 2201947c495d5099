//! The `math` handler: a problem, a Python session, an answer that is compared with the ground truth (paper, 4.3).

use std::sync::Arc;

use async_trait::async_trait;
use prorl_core::{FailureClass, Instance, JobRequest, JobResult, Malformed, SandboxHandle, Stage, request::kind_of};
use prorl_pipeline::{AgentHandler, Evaluation, JobContext, Prepared, RunOutput, Shared, StageError};
use prorl_tools::host::Toolbox;
use serde_json::{Map, Value, json};

use crate::{
    Environment,
    agent::{Agent, no_backend},
    prepare, prompt,
    sandbox::AgentSandbox,
    score::math::grade,
};

/// What the policy is told first.
const SYSTEM: &str = include_str!("../prompts/math.md");

/// The tools that it is offered.
const TOOLS: [&str; 3] = ["ipython", "think", "finish"];

/// Mathematics with a persistent Python session.
pub struct Math {
    env: Arc<Environment>,
}

impl Math {
    /// Makes the handler.
    pub fn new(env: Arc<Environment>) -> Self {
        Self { env }
    }
}

fn ground_truth(instance: &Instance) -> Result<String, Malformed> {
    let nested = instance.get("reward_model").and_then(|model| model.get("ground_truth"));
    let found = [("ground_truth", instance.get("ground_truth")), ("reward_model.ground_truth", nested)];
    let given = found.into_iter().find_map(|(field, value)| value.filter(|v| !v.is_null()).map(|v| (field, v)));
    match given {
        None => {
            let problem = "missing; expected text or a number here or in reward_model.ground_truth";
            Err(Malformed::new("instance.ground_truth", problem))
        }
        Some((_, Value::String(text))) if !text.trim().is_empty() => Ok(text.clone()),
        Some((_, Value::Number(number))) => Ok(number.to_string()),
        Some((field, Value::String(_))) => {
            Err(Malformed::new(format!("instance.{field}"), "expected some text or a number, found empty text"))
        }
        Some((field, other)) => {
            let problem = format!("expected text or a number, found {}", kind_of(other));
            Err(Malformed::new(format!("instance.{field}"), problem))
        }
    }
}

fn toolbox(instance: &Instance) -> Result<Toolbox, Malformed> {
    let asked = instance.common().ok().and_then(|common| common.tools);
    let names: Vec<&str> = match &asked {
        Some(names) => names.iter().map(String::as_str).collect(),
        None => TOOLS.to_vec(),
    };
    Toolbox::from_names(names).map_err(|err| Malformed::new("instance.tools", err.to_string()))
}

fn as_handler_error(problem: &Malformed) -> StageError {
    StageError::new(FailureClass::Handler, problem)
}

#[async_trait]
impl AgentHandler for Math {
    fn name(&self) -> &'static str {
        "math"
    }

    fn aliases(&self) -> Vec<&str> {
        vec!["deepscaler"]
    }

    fn check(&self, request: &JobRequest) -> Result<(), Malformed> {
        self.env.check(request)?;
        prepare::setup(&request.instance)?;
        prompt::messages(&request.instance, &["problem", "question"], SYSTEM)?;
        ground_truth(&request.instance)?;
        toolbox(&request.instance).map(drop)
    }

    fn init_shared_by(&self, request: &JobRequest) -> Option<String> {
        prepare::shared_by(&self.env, request)
    }

    async fn init_shared(&self, job: &JobContext) -> Result<Shared, StageError> {
        prepare::share(&self.env, job).await
    }

    async fn init(&self, job: &JobContext) -> Result<Prepared, StageError> {
        // Loaded here, so that a broken folder is found before a backend waits for it.
        self.env.tokenizer(job).await?;
        let sandbox = prepare::sandbox(&self.env, job).await?;
        let image = self.env.image_name(job.instance());
        // Not a failure, since the policy is told by the tool; but whoever chose the image should know.
        let hello = &sandbox.facts().hello;
        let offered = toolbox(job.instance()).map_err(|err| StageError::new(FailureClass::Handler, &err))?;
        for (tool, program, is_there) in [
            ("execute_ipython_cell", "python3", hello.python.is_some()),
            ("execute_bash", "bash", hello.bash.is_some()),
        ] {
            if !is_there && offered.names().any(|name| name == tool) {
                job.warn(format!("image {image} has no {program}, which {tool} needs"));
            }
        }
        Ok(Prepared { sandbox: Some(sandbox as Arc<dyn SandboxHandle>), image, ..Prepared::default() })
    }

    async fn before_run(&self, _job: &JobContext) -> Result<(), StageError> {
        let limit = self.env.limits.backend_wait;
        // Only waits: the backend is chosen and counted when the run stage needs it (paper, 3.3.2).
        tokio::time::timeout(limit, self.env.pool.ready()).await.map_err(|_elapsed| no_backend(limit))
    }

    async fn run(&self, job: &JobContext, prepared: &Prepared) -> Result<RunOutput, StageError> {
        let sandbox = AgentSandbox::of(prepared)?;
        sandbox.enter(Some(Stage::Run));
        let messages = prompt::messages(job.instance(), &["problem", "question"], SYSTEM)
            .map_err(|problem| as_handler_error(&problem))?;
        let toolbox = toolbox(job.instance()).map_err(|problem| as_handler_error(&problem))?;
        sandbox.while_alive(async { Agent::begin(job, &self.env, sandbox, toolbox, messages).await?.run().await }).await
    }

    async fn eval(&self, job: &JobContext, _: &Prepared, run: &RunOutput) -> Result<Evaluation, StageError> {
        let truth = ground_truth(job.instance()).map_err(|problem| as_handler_error(&problem))?;
        // Code in a tool call is no answer, so without the finish tool only what the last turn says beside it is graded.
        let said = run.finish.as_ref().unwrap_or(&run.said).clone();
        let graded = tokio::task::spawn_blocking(move || (grade(&said, &truth), truth))
            .await
            .map_err(|join| StageError::text(FailureClass::Scorer, format!("the scorer broke: {join}")))?;
        let (grade, truth) = graded;
        let report =
            json!({"answer": grade.answer, "ground_truth": truth, "verdict": grade.verdict, "reason": grade.reason});
        let report: Map<String, Value> = report.as_object().cloned().unwrap_or_default();
        Ok(Evaluation { reward: grade.reward, report })
    }

    async fn final_result(&self, job: &JobContext, mut draft: JobResult) -> JobResult {
        if draft.image.is_empty() {
            // Init came to nothing, and the instance names none.
            draft.image = self.env.image_name(job.instance());
        }
        draft
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_odd_ground_truth_is_named() {
        let truth = |fields: Value| {
            let Value::Object(fields) = fields else { unreachable!("tests give objects") };
            ground_truth(&Instance(fields)).map_err(|err| err.to_string())
        };
        assert_eq!(truth(json!({"ground_truth": 5})).unwrap(), "5");
        assert_eq!(truth(json!({"reward_model": {"ground_truth": "x"}})).unwrap(), "x");
        assert_eq!(truth(json!({"ground_truth": "a", "reward_model": {"ground_truth": "x"}})).unwrap(), "a");
        for (fields, expected) in [
            (json!({}), "instance.ground_truth: missing"),
            (json!({"ground_truth": ["5"]}), "instance.ground_truth: expected text or a number, found a list"),
            (json!({"ground_truth": ""}), "found empty text"),
            (json!({"reward_model": {"ground_truth": true}}), "instance.reward_model.ground_truth: expected text"),
        ] {
            let err = truth(fields).unwrap_err();
            assert!(err.contains(expected), "{err}");
        }
    }
}
