//! Each broken promise is named.

use prorl_core::{FailureClass, JobId, JobResult, Outcome, StopReason, request::InputIds};
use prorl_llm::{
    ledger::Ledger,
    tokenizer::{ChatMessage, ChatOptions, ChatTokenizer},
    verify::{Broken, VerifyStats, verify_json, verify_result},
};
use serde_json::{Value, json};

use crate::support::turn;

/// Three prompt messages in two, two turns, a tool result between them.
fn good(input_ids: InputIds) -> JobResult {
    let tokenizer = ChatTokenizer::builtin();
    let end = tokenizer.end_of_turn();
    let mut ledger =
        Ledger::new(tokenizer, &[ChatMessage::system("a"), ChatMessage::user("b")], &[], ChatOptions::default())
            .unwrap();
    ledger.push_turn(turn(&[300, 301, end], 3));
    ledger.push_messages(&[ChatMessage::tool("c", "bash", "ok")]).unwrap();
    ledger.push_turn(turn(&[302, end], 4));
    let (messages, traces) = ledger.snapshot(input_ids);
    let outcome = Outcome::completed(StopReason::Finish);
    let reward = (Some(1.0), true);
    JobResult {
        messages,
        traces,
        reward: reward.0,
        resolved: reward.1,
        ..JobResult::empty(JobId::new("j").unwrap(), "math", outcome)
    }
}

#[test]
fn a_good_result_passes_in_every_form() {
    for input_ids in [InputIds::Delta, InputIds::Full, InputIds::None] {
        let result = good(input_ids);
        let stats = verify_result(&result).unwrap();
        assert_eq!(stats, verify_json(&serde_json::to_vec(&result).unwrap()).unwrap());
        let n_ids = result.traces[0].prompt_ids().len() + result.traces[0].response_ids().len();
        assert_eq!(stats, VerifyStats { n_traces: 1, n_turns: 2, n_ids, n_sampled: 5 });
    }
}

fn broken(input_ids: InputIds, change: impl FnOnce(&mut Value)) -> Broken {
    let mut json = serde_json::to_value(good(input_ids)).unwrap();
    change(&mut json);
    verify_json(&serde_json::to_vec(&json).unwrap()).unwrap_err()
}

fn pop(value: &mut Value) -> Value {
    value.as_array_mut().unwrap().pop().unwrap()
}

#[test]
fn each_broken_promise_has_a_name() {
    macro_rules! assert_broken {
        ($form:ident, $pattern:pat, $change:expr) => {{
            let broken = broken(InputIds::$form, $change);
            assert!(matches!(broken, $pattern), "{broken:?}: {broken}");
        }};
    }
    // Messages are: 0 system, 1 user, 2 turn, 3 tool, 4 turn. The response is 3 sampled, some fed, 2 sampled.
    assert_broken!(Delta, Broken::NotAResult { .. }, |json| {
        json.as_object_mut().unwrap().remove("timing");
    });
    assert_broken!(Delta, Broken::NotAResult { .. }, |json| json["traces"][0]["response_ids"][0] = json!("x"));
    assert_broken!(Delta, Broken::TraceLengths { .. }, |json| {
        pop(&mut json["traces"][0]["loss_mask"]);
    });
    assert_broken!(Delta, Broken::TraceLengths { .. }, |json| {
        pop(&mut json["traces"][0]["logprobs"]);
    });
    assert_broken!(Delta, Broken::MaskValue { value: 2, .. }, |json| json["traces"][0]["loss_mask"][1] = json!(2));
    assert_broken!(Delta, Broken::LogprobNotFinite { index: 1, .. }, |json| json["traces"][0]["logprobs"][1] =
        Value::Null);
    assert_broken!(Delta, Broken::LogprobPositive { .. }, |json| json["traces"][0]["logprobs"][1] = json!(0.25));
    assert_broken!(Delta, Broken::LogprobOfFed { .. }, |json| json["traces"][0]["logprobs"][3] = json!(-0.25));
    assert_broken!(Delta, Broken::VersionCover { .. }, |json| json["traces"][0]["weight_versions"][0][1] = json!(1));
    assert_broken!(Delta, Broken::ResponseEdges { .. }, |json| {
        json["traces"][0]["loss_mask"][0] = json!(0);
        json["traces"][0]["logprobs"][0] = json!(0.0);
    });
    assert_broken!(Delta, Broken::SampledCount { in_traces: 6, in_messages: 5 }, |json| {
        json["traces"][0]["loss_mask"][3] = json!(1);
    });
    assert_broken!(Delta, Broken::SampledCount { in_traces: 0, .. }, |json| json["traces"] = json!([]));
    assert_broken!(Delta, Broken::OutputIds { message: 2 }, |json| json["messages"][2]["output_ids"][0] = json!(7));
    assert_broken!(Delta, Broken::MessageLengths { message: 4, .. }, |json| {
        pop(&mut json["messages"][4]["logprobs"]);
    });
    assert_broken!(Delta, Broken::FedMessage { message: 1, .. }, |json| json["messages"][1]["logprobs"] =
        json!([-0.5]));
    assert_broken!(Delta, Broken::FedMessage { message: 2, .. }, |json| json["messages"][2]["role"] = json!("user"));
    assert_broken!(Delta, Broken::TurnField { field: "logprobs", .. }, |json| json["messages"][2]["logprobs"] =
        Value::Null);
    assert_broken!(Delta, Broken::TurnField { field: "weight_version", .. }, |json| {
        json["messages"][2].as_object_mut().unwrap().remove("weight_version");
    });
    assert_broken!(Delta, Broken::LastMessage, |json| {
        let fed = json["messages"][3].clone();
        json["messages"].as_array_mut().unwrap().push(fed);
    });
    assert_broken!(Delta, Broken::TokenIds { .. }, |json| json["messages"][3]["token_ids"][1] = json!(7));
    assert_broken!(Delta, Broken::TokenIds { .. }, |json| json["traces"][0]["prompt_ids"][0] = json!(7));
    assert_broken!(Delta, Broken::TokenIds { index: 0 }, |json| {
        json["messages"].as_array_mut().unwrap().remove(0);
    });
    assert_broken!(Delta, Broken::Mask { message: 2, expected: "sampled", .. }, |json| {
        json["traces"][0]["loss_mask"][2] = json!(0);
        json["traces"][0]["logprobs"][2] = json!(0.0);
        json["traces"][0]["loss_mask"][3] = json!(1);
    });
    assert_broken!(Delta, Broken::MessageLogprob { message: 2, index: 1 }, |json| {
        json["messages"][2]["logprobs"][1] = json!(-1.5);
    });
    assert_broken!(Delta, Broken::MessageVersion { message: 4, in_message: 9, in_trace: 4 }, |json| {
        json["messages"][4]["weight_version"] = json!(9);
    });
    assert_broken!(Delta, Broken::InputIds { message: 4 }, |json| {
        pop(&mut json["messages"][4]["input_ids"]);
    });
    assert_broken!(Full, Broken::Prefix { message: 4 }, |json| json["messages"][4]["input_ids"][2] = json!(7));
    assert_broken!(Delta, Broken::InputIdsMixed, |json| json["messages"][4]["input_ids"] = Value::Null);
    assert_broken!(Delta, Broken::Resolved { .. }, |json| json["reward"] = json!(0.5));
    assert_broken!(Delta, Broken::Filter { .. }, |json| json["filter"] = json!(true));
    assert_broken!(Delta, Broken::RewardOfFailure { .. }, |json| json["outcome"]["status"] = json!("timeout"));
    assert_broken!(Delta, Broken::RewardOfFailure { .. }, |json| json["outcome"]["failure_class"] = json!("scorer"));
    assert_broken!(Delta, Broken::Trainable { .. }, |json| {
        json["outcome"]["status"] = json!("cancelled");
        json["reward"] = Value::Null;
        json["resolved"] = json!(false);
    });
    assert_broken!(Delta, Broken::NothingToTrainOn, |json| {
        json["messages"] = json!([]);
        json["traces"] = json!([]);
    });
    assert_broken!(Delta, Broken::NoErrorText, |json| {
        json["outcome"]["failure_class"] = json!("scorer");
        json["outcome"]["trainable"] = json!(false);
        json["outcome"]["in_baseline"] = json!(false);
        json["filter"] = json!(true);
        json["reward"] = Value::Null;
        json["resolved"] = json!(false);
    });
}

#[test]
fn a_failed_job_may_be_empty() {
    let outcome = Outcome::failed(FailureClass::Handler, None);
    let result = JobResult {
        error: Some("no such thing".into()),
        ..JobResult::empty(JobId::new("j").unwrap(), "math", outcome)
    };
    assert_eq!(verify_json(&serde_json::to_vec(&result).unwrap()), Ok(VerifyStats::default()));
}

#[test]
fn a_reward_that_is_no_number_is_named() {
    let result = JobResult { reward: Some(f64::INFINITY), ..good(InputIds::Delta) };
    assert_eq!(verify_result(&result), Err(Broken::RewardNotFinite));
}
