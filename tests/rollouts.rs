//! Rollouts through the real server, sandboxes and tools: ids, rewards, and nothing left.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use futures_util::{StreamExt, stream};
use prorl_core::JobResult;
use prorl_llm::tokenizer::ChatTokenizer;
use serde_json::{Value, json};
use support::{Serve, finish, job_calls, math, mock, mock_with, python};

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

fn three_turns() -> Value {
    json!({"seed": 5, "noncanonical": 0.7, "tasks": [{"match": "seventh prime", "turns": [
        python("n = 17\nprint('<|im' + '_end|> is only text', n)"),
        python("n * 2"),
        finish("17"),
    ]}]})
}

#[tokio::test]
async fn the_original_servers_request_works_and_every_id_is_the_sampled_one() {
    every_id_is_the_sampled_one(ChatTokenizer::builtin(), &[]).await;
}

#[tokio::test]
async fn every_id_is_the_sampled_one_with_the_tokenizer_of_qwen3() {
    let Some(folder) = support::qwen3() else {
        println!("skipped: tests/fetch-qwen3.sh has not fetched the tokenizer");
        return;
    };
    let tokenizer = ChatTokenizer::load(&folder).unwrap();
    every_id_is_the_sampled_one(tokenizer, &["--tokenizer", folder.to_str().unwrap()]).await;
}

async fn every_id_is_the_sampled_one(tokenizer: ChatTokenizer, args: &[&str]) {
    let mock = mock_with(tokenizer, &three_turns()).await;
    let serve = Serve::with_mock(args, &mock).await;
    let (status, result) = serve.post("/process", &math("What is the seventh prime?", "17")).await;
    assert_eq!(status, 200);
    assert_eq!((&result["reward"], &result["resolved"]), (&json!(1.0), &json!(true)), "{result}");
    assert_eq!(result["outcome"]["stop_reason"], "finish");
    assert_eq!(result["usage"]["turns"], 3);

    // What the backend saw and sampled is what came back.
    let calls = job_calls(&mock);
    assert_eq!(calls.len(), 3);
    for pair in calls.windows(2) {
        let so_far = [&pair[0].prompt_ids[..], &pair[0].sampled_ids[..]].concat();
        assert_eq!(&pair[1].prompt_ids[..so_far.len()], so_far, "a prompt begins with the one before and its sample");
        assert!(pair[1].prompt_ids.len() > so_far.len());
    }
    let trace = &result["traces"][0];
    assert_eq!(result["traces"].as_array().unwrap().len(), 1);
    let whole = [ids(&trace["prompt_ids"]), ids(&trace["response_ids"])].concat();
    let last = calls.last().unwrap();
    assert_eq!(whole, [&last.prompt_ids[..], &last.sampled_ids[..]].concat());
    assert_eq!(ids(&trace["prompt_ids"]), calls[0].prompt_ids);
    let sampled: Vec<u32> = calls.iter().flat_map(|call| call.sampled_ids.clone()).collect();
    let logprobs: Vec<f64> = calls.iter().flat_map(|call| call.logprobs.clone()).collect();
    let mask = ids(&trace["loss_mask"]);
    let pick = |of: Vec<u32>| of.into_iter().zip(&mask).filter(|(_, mask)| **mask == 1).map(|(id, _)| id).collect();
    let picked: Vec<u32> = pick(ids(&trace["response_ids"]));
    assert_eq!(picked, sampled);
    let returned = trace["logprobs"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap());
    let returned: Vec<u64> = returned.zip(&mask).filter(|(_, m)| **m == 1).map(|(value, _)| value.to_bits()).collect();
    assert_eq!(returned, logprobs.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), "bit for bit");

    // veRL joins all token_ids; the sum of delta input_ids and output_ids is the same up to the last sampled id.
    let messages = result["messages"].as_array().unwrap();
    let joined: Vec<u32> = messages.iter().flat_map(|message| ids(&message["token_ids"])).collect();
    assert_eq!(joined, whole);
    let turns: Vec<_> = messages.iter().filter(|message| message["role"] == "assistant").collect();
    let deltas: Vec<u32> =
        turns.iter().flat_map(|turn| [ids(&turn["input_ids"]), ids(&turn["output_ids"])].concat()).collect();
    assert_eq!(deltas, whole);
    assert_eq!(messages.last().unwrap()["role"], "assistant");
    // The tool really ran, and its text made no control token.
    let tools: Vec<_> = messages.iter().filter(|message| message["role"] == "tool").collect();
    assert_eq!(tools.len(), 2);
    assert!(tools[0]["content"].as_str().unwrap().contains("<|im_end|> is only text 17"), "{}", tools[0]["content"]);
    assert!(tools[1]["content"].as_str().unwrap().contains("34"), "state lives across cells: {}", tools[1]["content"]);

    let checked: JobResult = serde_json::from_value(result.clone()).unwrap();
    prorl_llm::verify::verify_result(&checked).unwrap();
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn input_ids_none_lets_a_client_slice_token_ids() {
    let mock = mock(&three_turns()).await;
    let serve = Serve::with_mock(&["--input-ids", "none"], &mock).await;
    let (_, result) = serve.post("/process", &math("What is the seventh prime?", "17")).await;
    // NeMo RL cuts token_ids by input_ids where that is not null: here nothing is cut.
    let kept: Vec<u32> = result["messages"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|message| {
            let cut = message["input_ids"].as_array().map_or(0, Vec::len);
            ids(&message["token_ids"])[cut..].to_vec()
        })
        .collect();
    let trace = &result["traces"][0];
    assert_eq!(kept, [ids(&trace["prompt_ids"]), ids(&trace["response_ids"])].concat());

    // A request's own choice goes before the server's.
    let mut full = math("What is the seventh prime?", "17");
    full["include"] = json!({"input_ids": "full"});
    let (_, result) = serve.post("/process", &full).await;
    let turns = result["messages"].as_array().unwrap().iter().filter(|message| message["role"] == "assistant");
    let calls = job_calls(&mock);
    for (turn, call) in turns.zip(&calls[3..]) {
        assert_eq!(ids(&turn["input_ids"]), call.prompt_ids);
    }
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn wrong_and_unreadable_answers_are_scored_and_say_why() {
    let script = json!({"tasks": [
        {"match": "wrong", "turns": [finish("5")]},
        {"match": "unreadable", "turns": [super_finish("\\boxed{}")]},
        {"match": "chatty", "turns": ["Hm.", "Well.", "So be it: \\boxed{4}"]},
        {"match": "malformed", "turns": ["<tool_call>\n{\"name\": \"finish\"\n</tool_call>", finish("4")]},
        {"match": "unknown tool", "turns": [support::call("execute_bash", &json!({"command": "ls"})), finish("4")]},
        {"match": "cut short", "turns": ["word ".repeat(200)]},
        {"match": "only code", "turns": [python("x = 4 # \\boxed{4}")]},
        {"match": "said beside code", "turns": [format!("It is \\boxed{{4}}.\n{}", python("x = 5"))]},
    ]});
    let mock = mock(&script).await;
    let serve = Serve::with_mock(&[], &mock).await;
    let ask = async |prompt: &str| serve.post("/process", &math(prompt, "4")).await.1;

    let wrong = ask("wrong").await;
    assert_eq!((&wrong["reward"], &wrong["outcome"]["status"]), (&json!(0.0), &json!("completed")));
    let unreadable = ask("unreadable").await;
    assert_eq!((&unreadable["reward"], &unreadable["report"]["verdict"]), (&json!(0.0), &json!("unreadable")));
    assert!(!unreadable["report"]["reason"].as_str().unwrap().is_empty());
    let chatty = ask("chatty").await;
    assert_eq!((&chatty["reward"], &chatty["outcome"]["stop_reason"]), (&json!(1.0), &json!("no_tool_call")));
    assert_eq!(chatty["finish"], false);
    let malformed = ask("malformed").await;
    assert_eq!((&malformed["reward"], &malformed["usage"]["turns"]), (&json!(1.0), &json!(2)), "{malformed}");
    let unknown = ask("unknown tool").await;
    assert_eq!(unknown["reward"], 1.0);
    let told = unknown["messages"][3]["content"].as_str().unwrap();
    assert!(told.contains("execute_bash") && told.contains("finish"), "{told}");

    for (prompt, reward) in [("only code", 0.0), ("said beside code", 1.0)] {
        let mut request = math(prompt, "4");
        request["sampling_params"] = json!({"max_iterations": 1});
        let (_, result) = serve.post("/process", &request).await;
        assert_eq!((&result["outcome"]["stop_reason"], &result["reward"]), (&json!("max_turns"), &json!(reward)));
    }

    let mut cut = math("cut short", "4");
    cut["sampling_params"] = json!({"max_tokens": 20, "max_iterations": 2});
    let (_, cut) = serve.post("/process", &cut).await;
    assert_eq!(cut["outcome"]["stop_reason"], "max_turns", "{cut}");
    assert_eq!(cut["messages"][2]["finish_reason"], "length");
    let checked: JobResult = serde_json::from_value(cut).unwrap();
    prorl_llm::verify::verify_result(&checked).unwrap();
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_prompt_that_does_not_fit_is_nothing_to_train_on() {
    let mock = mock(&json!({"default": {"turns": [finish("4")]}})).await;
    let serve = Serve::with_mock(&[], &mock).await;
    let mut request = math("What is 2 + 2?", "4");
    request["sampling_params"] = json!({"max_model_len": 10});
    let (_, result) = serve.post("/process", &request).await;
    let outcome = &result["outcome"];
    assert_eq!((&outcome["status"], &outcome["stop_reason"]), (&json!("completed"), &json!("context_full")));
    assert_eq!(
        (&outcome["trainable"], &outcome["in_baseline"], &result["filter"]),
        (&json!(false), &json!(false), &json!(true))
    );
    assert_eq!(result["traces"], json!([]));
    serve.stop().await;
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn jobs_one_after_another_are_spread_over_the_backends() {
    let script = json!({"default": {"turns": [finish("4")]}});
    for policy in ["active", "assigned"] {
        let (first, second) = (mock(&script).await, mock(&script).await);
        let serve = Serve::with_mock(&["--policy", policy], &first).await;
        serve.post("/add_llm_server", &json!({"address": second.address()})).await;
        for idx in 0..10 {
            let (_, result) = serve.post("/process", &math(&format!("What is 2 + 2? ({idx})"), "4")).await;
            assert_eq!(result["reward"], 1.0);
        }
        assert_eq!((job_calls(&first).len(), job_calls(&second).len()), (5, 5), "{policy}");
        let (_, status) = serve.get("/status").await;
        let assigned: Vec<_> = status["backends"].as_array().unwrap().iter().map(|b| b["assigned"].as_u64()).collect();
        assert_eq!(assigned.iter().flatten().sum::<u64>(), 10, "each job is counted once: {status}");
        serve.stop().await;
        first.shutdown().await.unwrap();
        second.shutdown().await.unwrap();
    }
}

fn super_finish(message: &str) -> String {
    support::call("finish", &json!({"message": message}))
}

#[tokio::test]
async fn two_hundred_jobs_at_once_all_end_and_nothing_is_left() {
    let mock = mock(&json!({"seed": 1, "noncanonical": 0.5, "default": {"turns": [
        python("import os\nprint(6 * 7)"), finish("42"),
    ]}}))
    .await;
    let serve = Serve::with_mock(&["--max-run-workers", "16", "--max-init-workers", "16"], &mock).await;
    let results: Vec<_> = stream::iter(0..200)
        .map(|idx| {
            let serve = &serve;
            async move { serve.post("/process", &math(&format!("What is 6 times 7? ({idx})"), "42")).await }
        })
        .buffer_unordered(200)
        .collect()
        .await;
    assert_eq!(results.len(), 200);
    for (status, result) in &results {
        assert_eq!((*status, &result["reward"]), (200, &json!(1.0)), "{result}");
        prorl_llm::verify::verify_result(&serde_json::from_value(result.clone()).unwrap()).unwrap();
    }
    let (_, state) = serve.get("/status").await;
    assert_eq!((&state["jobs"]["completed"], &state["sandboxes"]["active"]), (&json!(200), &json!(0)));
    assert!(support::descendants(serve.pid()).is_empty(), "no sandbox outlives its job");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}
