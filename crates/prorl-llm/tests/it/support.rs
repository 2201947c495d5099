//! What several tests use.

use std::path::{Path, PathBuf};

use prorl_core::{Completion, TokenId, message::FinishReason};
use prorl_llm::{ledger::Turn, tokenizer::ChatTokenizer};
use serde_json::{Value, json};

/// The embedded tokenizer and, when it is there, Qwen3's.
pub(crate) fn tokenizers() -> Vec<ChatTokenizer> {
    let mut tokenizers = vec![ChatTokenizer::builtin()];
    match qwen3_dir() {
        Some(dir) => tokenizers.push(ChatTokenizer::load(&dir).unwrap()),
        None => say("Qwen3's tokenizer is not there (tests/fetch-qwen3.sh gets it): tested with the embedded one only"),
    }
    tokenizers
}

pub(crate) fn qwen3_dir() -> Option<PathBuf> {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/test-data/qwen3");
    let dir = std::env::var_os("PRORL_QWEN3_DIR").map_or(fetched, PathBuf::from);
    dir.join("tokenizer.json").is_file().then_some(dir)
}

#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn say(text: &str) {
    println!("skipped: {text}");
}

pub(crate) fn tools() -> Vec<Value> {
    vec![json!({"type": "function", "function": {"name": "bash", "description": "Runs a <b>command</b> & more.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}})]
}

/// A turn of these ids with a log-probability that tells each of them apart.
pub(crate) fn turn(ids: &[TokenId], version: u64) -> Turn {
    let logprobs = ids.iter().enumerate().map(|(idx, id)| -f64::from(*id) / 3.0 - idx as f64 / 7.0).collect();
    Turn {
        completion: Completion::new(ids.to_vec(), logprobs).unwrap(),
        finish_reason: FinishReason::Stop,
        weight_version: version,
        backend: "http://b".into(),
        tool_calls: vec![],
        text: String::new(),
    }
}
