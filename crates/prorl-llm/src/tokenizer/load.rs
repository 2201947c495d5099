//! Reading a model's tokenizer folder.

use std::{fs, io, path::Path};

use prorl_core::TokenId;
use serde::Deserialize;
use tokenizers::{PostProcessorWrapper, Tokenizer, TokenizerBuilder};

use super::{
    ChatOptions, Inner, TokenizerError,
    added::{AddedToken, AddedTokens},
    proof,
    template::ChatTemplate,
};
use crate::parse::TurnStart;

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";

/// What is used of `tokenizer_config.json`.
#[derive(Deserialize)]
struct Config {
    bos_token: Option<TokenText>,
    eos_token: Option<TokenText>,
    pad_token: Option<TokenText>,
    unk_token: Option<TokenText>,
    chat_template: Option<ConfiguredTemplate>,
}

/// A token is written as text or as an object with its properties.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenText {
    Text(String),
    Object { content: String },
}

impl TokenText {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { content: text } => text,
        }
    }
}

/// One template, or several by name.
#[derive(Deserialize)]
#[serde(untagged)]
enum ConfiguredTemplate {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

pub(super) fn from_dir(dir: &Path) -> Result<Inner, TokenizerError> {
    let read = |file: &str| {
        let path = dir.join(file);
        fs::read(&path).map_err(|source| TokenizerError::Read { path, source })
    };
    let template = match read(TEMPLATE) {
        Ok(bytes) => Some(String::from_utf8(bytes).map_err(|err| malformed(TEMPLATE, &err))?),
        Err(TokenizerError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(err) => return Err(err),
    };
    let name = dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
    from_bytes(&name, &read(TOKENIZER)?, &read(CONFIG)?, template)
}

pub(super) fn from_bytes(
    name: &str,
    tokenizer: &[u8],
    config: &[u8],
    template: Option<String>,
) -> Result<Inner, TokenizerError> {
    let config: Config = serde_json::from_slice(config).map_err(|err| malformed(CONFIG, &err))?;
    let template = template.or_else(|| configured(config.chat_template));
    let template = template.ok_or_else(|| TokenizerError::NoChatTemplate { name: name.to_owned() })?;
    let eos_token = config.eos_token.map(TokenText::into_text);
    let tokens = [
        ("bos_token", config.bos_token.map(TokenText::into_text)),
        ("eos_token", eos_token.clone()),
        ("pad_token", config.pad_token.map(TokenText::into_text)),
        ("unk_token", config.unk_token.map(TokenText::into_text)),
    ];
    let tokens = tokens.into_iter().filter_map(|(name, text)| Some((name, text?))).collect();
    let template = ChatTemplate::parse(&template, tokens)
        .map_err(|problem| TokenizerError::Template { name: name.to_owned(), problem })?;

    let full = Tokenizer::from_bytes(tokenizer).map_err(|err| malformed(TOKENIZER, &err))?;
    let added = AddedTokens::new(added_tokens(&full)).map_err(|err| malformed(TOKENIZER, &err))?;
    let refuse = |reason: String| TokenizerError::NotExtendable { name: name.to_owned(), reason };
    if let Some(short) = added.tokens().iter().find(|token| token.content.chars().count() < 2) {
        // A marker could not break it.
        return Err(refuse(format!("its added token {:?} is a single character", short.content)));
    }
    let end_of_turn_text = eos_token.ok_or_else(|| malformed(CONFIG, &"no eos_token, which ends a turn"))?;
    let end_of_turn = added
        .by_content(&end_of_turn_text)
        .ok_or_else(|| malformed(CONFIG, &format!("eos_token {end_of_turn_text:?} is no added token of {TOKENIZER}")))?
        .id;
    let plain = without_added_tokens(&full).map_err(|err| malformed(TOKENIZER, &err))?;
    let highest = plain.get_vocab(false).into_values().chain(added.tokens().iter().map(|token| token.id)).max();
    let vocab_size = highest.map_or(0, |highest| highest as usize + 1);
    let mut inner = Inner {
        name: name.to_owned(),
        plain,
        added,
        template,
        end_of_turn,
        end_of_turn_text,
        vocab_size,
        turn_starts: [TurnStart::Answer; 2],
    };
    proof::prove(&inner, &full).map_err(refuse)?;
    for enable_thinking in [false, true] {
        if inner.opens_reasoning(ChatOptions { enable_thinking }).map_err(|err| refuse(err.to_string()))? {
            inner.turn_starts[usize::from(enable_thinking)] = TurnStart::Reasoning;
        }
    }
    Ok(inner)
}

fn malformed(file: &str, problem: &impl ToString) -> TokenizerError {
    TokenizerError::Malformed { file: file.to_owned(), problem: problem.to_string() }
}

fn configured(template: Option<ConfiguredTemplate>) -> Option<String> {
    match template? {
        ConfiguredTemplate::One(template) => Some(template),
        ConfiguredTemplate::Named(templates) => {
            let named = |wanted: &str| templates.iter().find(|template| template.name == wanted);
            // An agent needs the one that knows tools.
            named("tool_use").or_else(|| named("default")).map(|template| template.template.clone())
        }
    }
}

fn added_tokens(full: &Tokenizer) -> Vec<AddedToken> {
    let mut tokens: Vec<AddedToken> = full
        .get_added_tokens_decoder()
        .into_iter()
        .map(|(id, token)| AddedToken { id: id as TokenId, content: token.content, special: token.special })
        .filter(|token| !token.content.is_empty())
        .collect();
    tokens.sort_unstable_by_key(|token| token.id);
    tokens
}

/// The same model, normaliser, pre-tokenizer and decoder, but no added token and no post-processor.
fn without_added_tokens(full: &Tokenizer) -> Result<Tokenizer, tokenizers::Error> {
    let plain = TokenizerBuilder::new()
        .with_model(full.get_model().clone())
        .with_normalizer(full.get_normalizer().cloned())
        .with_pre_tokenizer(full.get_pre_tokenizer().cloned())
        .with_post_processor(None::<PostProcessorWrapper>)
        .with_decoder(full.get_decoder().cloned())
        .build()?;
    Ok(Tokenizer::from(plain))
}
