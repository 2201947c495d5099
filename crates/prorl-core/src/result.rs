//! The result of a job (API section 1.3).

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{CriticalError, GroupId, JobId, Message, Outcome, Trace};

/// Seconds spent, by stage. Time in queues is not counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Inside init, seconds.
    pub init_time: f64,
    /// Inside run, seconds.
    pub run_time: f64,
    /// Inside eval, seconds.
    pub eval_time: f64,
    /// Outside the stages but not in a queue (clean-up, final result), seconds; counted by no limit.
    pub others_time: f64,
    /// What was charged against `timeout`, seconds.
    pub counted_elapsed: f64,
    /// The job's limit, seconds.
    pub timeout: f64,
    /// Whether that limit, or a stage's, ended the job.
    pub timeout_triggered: bool,
}

/// What a job used.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// Turns made.
    pub turns: u64,
    /// Prompt ids over all calls.
    pub prompt_tokens: u64,
    /// Sampled ids over all calls.
    pub completion_tokens: u64,
    /// Inside LLM calls, seconds.
    pub llm_time: f64,
    /// Inside tool calls, seconds.
    pub tool_time: f64,
}

/// The result of one job: always whole, whatever happened to the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobResult {
    /// The job.
    pub job_id: JobId,
    /// The instance's own id, as text.
    pub instance_id: Option<String>,
    /// The instance's `trajectory_id`, or one that was made.
    pub trajectory_id: String,
    /// The handler's registered name that the instance asked for.
    pub data_source: String,
    /// The job's group.
    pub group_id: Option<GroupId>,
    /// Whether the run stage ended by itself.
    pub success: bool,
    /// Whether the reward is above 0.99.
    pub resolved: bool,
    /// The score; null unless the job completed.
    pub reward: Option<f64>,
    /// Whether the last action was the finish tool.
    pub finish: bool,
    /// Whether the last turn has no format error.
    pub end_properly: bool,
    /// Whether to leave it out of training.
    pub filter: bool,
    /// What went wrong, for people.
    pub error: Option<String>,
    /// Where it went wrong, in the original server's words.
    pub critical_error: Option<CriticalError>,
    /// How it ended.
    pub outcome: Outcome,
    /// The conversation.
    pub messages: Vec<Message>,
    /// Token sequences to train on.
    pub traces: Vec<Trace>,
    /// Schemas of the tools that the agent was given.
    pub tools: Vec<Value>,
    /// The scorer's account.
    pub report: Map<String, Value>,
    /// What the handler brings out beside the trajectory.
    pub artifacts: Map<String, Value>,
    /// The change that the agent made to a repository.
    pub git_patch: Option<String>,
    /// What the trainer should know.
    pub warnings: Vec<String>,
    /// The image that the sandbox started from.
    pub image: String,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// Time by stage.
    pub timing: Timing,
    /// What was used.
    pub usage: Usage,
}

impl JobResult {
    /// A whole result with nothing in it yet but how the job ended.
    pub fn empty(job_id: JobId, data_source: impl Into<String>, outcome: Outcome) -> Self {
        Self {
            trajectory_id: job_id.to_string(),
            job_id,
            instance_id: None,
            data_source: data_source.into(),
            group_id: None,
            success: false,
            resolved: false,
            reward: None,
            finish: false,
            end_properly: false,
            filter: !outcome.trainable,
            error: None,
            critical_error: None,
            outcome,
            messages: Vec::new(),
            traces: Vec::new(),
            tools: Vec::new(),
            report: Map::new(),
            artifacts: Map::new(),
            git_patch: None,
            warnings: Vec::new(),
            image: String::new(),
            attempt: 1,
            timing: Timing::default(),
            usage: Usage::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Completion, FailureClass, Role, Stage, StopReason,
        message::{FinishReason, TurnInfo},
    };

    fn sample() -> JobResult {
        let turn = Completion::new(vec![5, 6], vec![-0.1, -0.25]).unwrap();
        let mut trace = Trace::new(vec![1, 2]);
        trace.push_sampled(&turn, 3);
        trace.push_fed(&[7]);
        let call = crate::ToolCall {
            id: "call_1_0".into(),
            name: "think".into(),
            arguments: serde_json::from_str(r#"{"thought":"x"}"#).unwrap(),
        };
        let assistant = Message {
            turn: Some(TurnInfo {
                tool_calls: vec![call],
                finish_reason: FinishReason::Stop,
                weight_version: 3,
                backend: "http://127.0.0.1:9".into(),
            }),
            input_ids: Some(vec![1, 2]),
            output_ids: Some(turn.ids().to_vec()),
            logprobs: Some(turn.logprobs().to_vec()),
            ..Message::fed(Role::Assistant, "hm", turn.ids().to_vec())
        };
        let tool = Message {
            tool_call_id: Some("call_1_0".into()),
            name: Some("think".into()),
            ..Message::fed(Role::Tool, "ok", vec![7])
        };
        JobResult {
            reward: Some(1.0),
            resolved: true,
            success: true,
            messages: vec![Message::fed(Role::User, "1+1?", vec![1, 2]), assistant, tool],
            traces: vec![trace],
            image: "host".into(),
            ..JobResult::empty(JobId::new("j1").unwrap(), "math", Outcome::completed(StopReason::Finish))
        }
    }

    /// One top-level field a line.
    fn compact(result: &JobResult) -> String {
        let json = serde_json::to_value(result).unwrap();
        let fields = json.as_object().unwrap().iter();
        fields.map(|(name, value)| format!("{name}: {value}")).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_json_of_a_result_is_fixed() {
        insta::assert_snapshot!(compact(&sample()), @r#"
        job_id: "j1"
        instance_id: null
        trajectory_id: "j1"
        data_source: "math"
        group_id: null
        success: true
        resolved: true
        reward: 1.0
        finish: false
        end_properly: false
        filter: false
        error: null
        critical_error: null
        outcome: {"status":"completed","stop_reason":"finish","failure_class":null,"stage":null,"retryable":false,"trainable":true,"in_baseline":true}
        messages: [{"role":"user","content":"1+1?","input_ids":null,"output_ids":null,"token_ids":[1,2],"logprobs":null},{"role":"assistant","content":"hm","tool_calls":[{"id":"call_1_0","name":"think","arguments":{"thought":"x"}}],"finish_reason":"stop","weight_version":3,"backend":"http://127.0.0.1:9","input_ids":[1,2],"output_ids":[5,6],"token_ids":[5,6],"logprobs":[-0.1,-0.25]},{"role":"tool","content":"ok","tool_call_id":"call_1_0","name":"think","input_ids":null,"output_ids":null,"token_ids":[7],"logprobs":null}]
        traces: [{"prompt_ids":[1,2],"response_ids":[5,6,7],"loss_mask":[1,1,0],"logprobs":[-0.1,-0.25,0.0],"weight_versions":[[3,3]]}]
        tools: []
        report: {}
        artifacts: {}
        git_patch: null
        warnings: []
        image: "host"
        attempt: 1
        timing: {"init_time":0.0,"run_time":0.0,"eval_time":0.0,"others_time":0.0,"counted_elapsed":0.0,"timeout":0.0,"timeout_triggered":false}
        usage: {"turns":0,"prompt_tokens":0,"completion_tokens":0,"llm_time":0.0,"tool_time":0.0}
        "#);
    }

    #[test]
    fn the_json_of_a_failure_is_whole() {
        let failed = JobResult {
            error: Some("guest not ready after 5s".into()),
            critical_error: Some(CriticalError::Init),
            ..JobResult::empty(
                JobId::new("j2").unwrap(),
                "math",
                Outcome::failed(FailureClass::Sandbox, Some(Stage::Init)),
            )
        };
        insta::assert_snapshot!(compact(&failed), @r#"
        job_id: "j2"
        instance_id: null
        trajectory_id: "j2"
        data_source: "math"
        group_id: null
        success: false
        resolved: false
        reward: null
        finish: false
        end_properly: false
        filter: true
        error: "guest not ready after 5s"
        critical_error: "init"
        outcome: {"status":"failed","stop_reason":"error","failure_class":"sandbox","stage":"init","retryable":true,"trainable":false,"in_baseline":false}
        messages: []
        traces: []
        tools: []
        report: {}
        artifacts: {}
        git_patch: null
        warnings: []
        image: ""
        attempt: 1
        timing: {"init_time":0.0,"run_time":0.0,"eval_time":0.0,"others_time":0.0,"counted_elapsed":0.0,"timeout":0.0,"timeout_triggered":false}
        usage: {"turns":0,"prompt_tokens":0,"completion_tokens":0,"llm_time":0.0,"tool_time":0.0}
        "#);
    }

    #[test]
    fn results_survive_json_bit_for_bit() {
        let mut result = sample();
        let values = [-0.1, -1e-300, -f64::MIN_POSITIVE, -123_456.789_012_345_67, -0.0];
        let turn = Completion::new(vec![1; values.len()], values.to_vec()).unwrap();
        result.traces[0].push_sampled(&turn, 4);
        let back: JobResult = serde_json::from_str(&serde_json::to_string(&result).unwrap()).unwrap();
        assert_eq!(back, result);
        let bits = |r: &JobResult| r.traces[0].logprobs().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back), bits(&result));
    }
}
