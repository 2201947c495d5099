//! The cost of one more observation, early and late in a conversation, beside rendering and encoding all of it anew.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use prorl_core::{Completion, message::FinishReason};
use prorl_llm::{
    ledger::{Ledger, Turn},
    tokenizer::{ChatMessage, ChatOptions, ChatTokenizer},
};

/// About 200 tokens of tool output.
fn observation() -> ChatMessage {
    ChatMessage::tool("call", "bash", "total 4 drwxr-xr-x 2 agent agent 4096 data\n".repeat(8))
}

fn turn(tokenizer: &ChatTokenizer) -> Turn {
    let text = "Let me look.\n<tool_call>\n{\"name\": \"bash\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>";
    let mut ids = tokenizer.encode_with_added(text).expect("plain text encodes");
    ids.push(tokenizer.end_of_turn());
    let logprobs = vec![-0.5; ids.len()];
    Turn {
        completion: Completion::new(ids, logprobs).expect("one log-probability each"),
        finish_reason: FinishReason::Stop,
        weight_version: 1,
        backend: "http://127.0.0.1:8000".to_owned(),
        tool_calls: vec![],
        text: text.to_owned(),
    }
}

/// A conversation that waits for the observation of its last turn, and the same as messages.
fn conversation(tokenizer: &ChatTokenizer, n_turns: usize) -> (Ledger, Vec<ChatMessage>) {
    let mut messages = vec![ChatMessage::system("Be brief."), ChatMessage::user("What is in the folder?")];
    let mut ledger =
        Ledger::new(tokenizer.clone(), &messages, &[], ChatOptions::default()).expect("the template takes it");
    for idx in 0..n_turns {
        if idx > 0 {
            ledger.push_messages(&[observation()]).expect("the template takes it");
            messages.push(observation());
        }
        let turn = turn(tokenizer);
        messages.push(ChatMessage::assistant(turn.text.as_str()));
        ledger.push_turn(turn);
    }
    (ledger, messages)
}

fn observations(criterion: &mut Criterion) {
    let tokenizer = ChatTokenizer::builtin();
    let mut group = criterion.benchmark_group("observation of 200 tokens");
    group.sample_size(20);
    for n_turns in [2, 128] {
        group.bench_function(format!("ledger, turn {n_turns}"), |bencher| {
            bencher.iter_batched(
                || conversation(&tokenizer, n_turns).0,
                |mut ledger| ledger.push_messages(black_box(&[observation()])),
                BatchSize::PerIteration,
            );
        });
        group.bench_function(format!("everything anew, turn {n_turns}"), |bencher| {
            let (_, mut messages) = conversation(&tokenizer, n_turns);
            messages.push(observation());
            bencher.iter(|| {
                let text = tokenizer.render(black_box(&messages), &[], ChatOptions::default(), true);
                tokenizer.encode_with_added(&text.expect("the template takes it"))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, observations);
criterion_main!(benches);
