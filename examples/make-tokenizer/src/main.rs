#![doc = include_str!("../README.md")]

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, anyhow};
use serde_json::json;
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    SplitDelimiterBehavior, Tokenizer, TokenizerImpl,
    models::{
        TrainerWrapper,
        bpe::{BPE, BpeTrainer},
    },
    normalizers::unicode::NFC,
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

const CORPUS: &str = include_str!("../corpus.txt");
const TEMPLATE: &str = include_str!("../chat_template.jinja");

/// Entries of the vocabulary before the added tokens.
const VOCABULARY: usize = 2000;

/// Words with the sign before them, digits one by one, signs with the line end after them, line ends, other white space.
const PIECES: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Added tokens in the order of their ids, and whether they are special: as in Qwen3, tags for tools and thinking are not.
const ADDED: [(&str, bool); 9] = [
    ("<|endoftext|>", true),
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("<think>", false),
    ("</think>", false),
];

type Parts = TokenizerImpl<ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// The three files by name.
fn make() -> Result<Vec<(&'static str, String)>> {
    let mut trainer = TrainerWrapper::from(
        BpeTrainer::builder()
            .vocab_size(VOCABULARY)
            .min_frequency(1)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build(),
    );
    let byte_level = || ByteLevel::default().add_prefix_space(false).trim_offsets(false).use_regex(false);
    let split = Split::new(SplitPattern::Regex(PIECES.to_owned()), SplitDelimiterBehavior::Isolated, false);
    let split = split.map_err(|err| anyhow!("{err}"))?;
    let mut parts = Parts::new(BPE::default().into());
    parts.with_normalizer(Some(NFC)).map_err(|err| anyhow!("{err}"))?;
    parts
        .with_pre_tokenizer(Some(Sequence::new(vec![split.into(), byte_level().into()])))
        .with_post_processor(Some(byte_level()))
        .with_decoder(Some(byte_level()));
    parts.train(&mut trainer, CORPUS.lines().map(|line| format!("{line}\n"))).map_err(|err| anyhow!("{err}"))?;
    let mut tokenizer = Tokenizer::from(parts);
    let added = ADDED.map(|(content, special)| AddedToken::from(content, special).normalized(false));
    tokenizer.add_tokens(added).map_err(|err| anyhow!("{err}"))?;
    let tokenizer = tokenizer.to_string(true).map_err(|err| anyhow!("{err}"))?;

    let config = json!({
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    Ok(vec![
        ("tokenizer.json", tokenizer + "\n"),
        ("tokenizer_config.json", format!("{config:#}\n")),
        ("chat_template.jinja", TEMPLATE.trim_end().to_owned()),
    ])
}

fn main() -> Result<()> {
    let out: PathBuf = std::env::args_os().nth(1).context("usage: make-tokenizer FOLDER")?.into();
    fs::create_dir_all(&out).with_context(|| format!("failed to make {}", out.display()))?;
    for (name, text) in make()? {
        let path = out.join(name);
        fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_tokenizer_is_what_this_program_makes() {
        let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/prorl-llm/assets/prorl-tiny");
        for (name, text) in make().unwrap() {
            let there = fs::read_to_string(PathBuf::from(committed).join(name)).unwrap();
            assert!(there == text, "{name} differs; run make-tokenizer again");
        }
    }
}
