//! Tokenizers and chat templates: conversations to ids, and ids to text for people.
//!
//! Two rules make the ids trustworthy (paper, 3.3.3). An id that was sampled is never decoded and encoded again: new
//! messages are encoded as a *suffix* that is appended to the ids so far. And content never becomes control: an added
//! token's text inside a message is plain text to the model.

mod added;
mod encode;
mod load;
mod message;
mod proof;
mod template;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use prorl_core::TokenId;
use serde_json::Value;

pub use encode::Encoded;
pub use message::ChatMessage;

use crate::parse::TurnStart;
use added::AddedTokens;
use template::ChatTemplate;

/// Why a tokenizer folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file that must be there cannot be read.
    #[error("failed to read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("{file}: {problem}")]
    Malformed {
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Neither `chat_template.jinja` nor a `chat_template` in the configuration.
    #[error("{name} has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json")]
    NoChatTemplate {
        /// The folder.
        name: String,
    },
    /// The template does not parse.
    #[error("chat template of {name}: {problem}")]
    Template {
        /// The folder.
        name: String,
        /// The line and what is wrong there.
        problem: String,
    },
    /// Prompts of this template cannot be extended token-exactly.
    #[error("chat template of {name} cannot be extended: {reason}")]
    NotExtendable {
        /// The folder.
        name: String,
        /// The conversation and the difference.
        reason: String,
    },
}

/// Why messages cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The template refused the conversation.
    #[error("chat template: {0}")]
    Template(String),
    /// Images need a model and a template that take them.
    #[error("message {message_idx} holds an image ({mime}), and this tokenizer encodes text only")]
    Image {
        /// Position among the messages given.
        message_idx: usize,
        /// The image's media type.
        mime: String,
    },
    /// No message was given.
    #[error("no messages to encode")]
    Empty,
    /// The tokenizer failed on a text.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The texts use up every character that could mark content.
    #[error("the messages hold every private-use character, none is left to mark content with")]
    NoMarker,
    /// The template dropped a message or wrote it where it cannot be found.
    #[error("chat template did not render the assistant turn before the new messages")]
    NoTurn,
}

/// What a template is told beside messages and tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatOptions {
    /// Whether the model may think before it answers.
    pub enable_thinking: bool,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { enable_thinking: true }
    }
}

/// A tokenizer with its chat template, proved at load to extend prompts token-exactly. Cheap to clone.
#[derive(Clone)]
pub struct ChatTokenizer(Arc<Inner>);

struct Inner {
    name: String,
    /// The model's tokenizer without its added tokens: what it makes of text that only looks like control.
    plain: tokenizers::Tokenizer,
    added: AddedTokens,
    template: ChatTemplate,
    end_of_turn: TokenId,
    end_of_turn_text: String,
    vocab_size: usize,
    /// How a turn starts when thinking is off, and when it is on.
    turn_starts: [TurnStart; 2],
}

impl ChatTokenizer {
    /// Loads `tokenizer.json`, `tokenizer_config.json` and, if there, `chat_template.jinja` from a folder as models ship it.
    ///
    /// Reads files and proves the template on trial conversations: seconds for a large vocabulary, so call it off the
    /// async threads.
    ///
    /// # Errors
    /// A missing or malformed file, a template that does not parse, or one whose prompts cannot be extended.
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        load::from_dir(dir).map(|inner| Self(Arc::new(inner)))
    }

    /// Returns the small tokenizer that is part of this crate: about 1,800 entries and a ChatML template, made by
    /// `examples/make-tokenizer`. Good for tests and trials; no model was trained with it.
    ///
    /// # Panics
    /// Never: the embedded files are tested.
    pub fn builtin() -> Self {
        static BUILTIN: OnceLock<ChatTokenizer> = OnceLock::new();
        BUILTIN
            .get_or_init(|| {
                let inner = load::from_bytes(
                    "prorl-tiny",
                    include_bytes!("../../assets/prorl-tiny/tokenizer.json"),
                    include_bytes!("../../assets/prorl-tiny/tokenizer_config.json"),
                    Some(include_str!("../../assets/prorl-tiny/chat_template.jinja").to_owned()),
                );
                Self(Arc::new(inner.expect("the embedded tokenizer is tested")))
            })
            .clone()
    }

    /// Returns the folder's name, or `prorl-tiny`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns one more than the highest id, added tokens included. Sampled ids must be below it.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// Returns what a turn starts in: reasoning when the generation prompt ends inside `<think>`, as that of models which
    /// always think does.
    pub fn turn_start(&self, options: ChatOptions) -> TurnStart {
        self.0.turn_starts[usize::from(options.enable_thinking)]
    }

    /// Returns the id that ends a turn, such as `<|im_end|>`.
    pub fn end_of_turn(&self) -> TokenId {
        self.0.end_of_turn
    }

    /// Returns the text of ids, special tokens written out. For people and parsers, never to be encoded again.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        self.0.decode(ids, true)
    }

    /// Returns the text of ids without special tokens; `<tool_call>` and `<think>` are not special and stay.
    pub fn decode_text(&self, ids: &[TokenId]) -> String {
        self.0.decode(ids, false)
    }

    /// Renders a conversation as the template would without any care for ids. For tests and for people.
    ///
    /// # Errors
    /// When the template refuses the conversation, or it holds an image.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        options: ChatOptions,
        add_generation_prompt: bool,
    ) -> Result<String, EncodeError> {
        self.0.render(messages, tools, options, None, add_generation_prompt)
    }

    /// Encodes text in which added tokens are meant: what a policy would emit, with `<tool_call>` as its id.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_with_added(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        Ok(self.0.encode_marked(text, None, &[])?.ids)
    }

    /// Encodes text as plain text: no added token comes out, whatever it holds.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        self.0.encode_run(text)
    }

    /// Encodes the first prompt of a conversation, ending with the generation prompt.
    ///
    /// # Errors
    /// When there is no message, one holds an image, or the template refuses them.
    pub fn encode_prompt(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        options: ChatOptions,
    ) -> Result<Encoded, EncodeError> {
        self.0.encode_prompt(messages, tools, options)
    }

    /// Encodes what follows the end-of-turn token of a sampled turn: the text that the template puts there, `messages`,
    /// and the generation prompt. Costs the new messages alone, however long the conversation is.
    ///
    /// # Errors
    /// As [`encode_prompt`](Self::encode_prompt).
    pub fn encode_suffix(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        options: ChatOptions,
    ) -> Result<Encoded, EncodeError> {
        self.0.encode_suffix(messages, tools, options)
    }

    /// Returns the vocabulary's text of an id as the tokenizer stores it, if there is such an id.
    pub fn id_to_token(&self, id: TokenId) -> Option<String> {
        self.0.added.by_id(id).map(|token| token.content.clone()).or_else(|| self.0.plain.id_to_token(id))
    }

    /// Returns the id of a vocabulary entry in the tokenizer's own spelling.
    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.0.added.by_content(token).map(|added| added.id).or_else(|| self.0.plain.token_to_id(token))
    }

    /// Tells whether the id is an added token such as `<|im_end|>` or `<tool_call>`.
    pub fn is_added(&self, id: TokenId) -> bool {
        self.0.added.by_id(id).is_some()
    }
}

impl Inner {
    fn decode(&self, ids: &[TokenId], keep_special: bool) -> String {
        let is_added = |id: &TokenId| self.added.by_id(*id).is_some();
        let mut text = String::new();
        for run in ids.chunk_by(|a, b| !is_added(a) && !is_added(b)) {
            match self.added.by_id(run[0]) {
                Some(token) if token.special && !keep_special => {}
                Some(token) => text.push_str(&token.content),
                // Only a decoder that joins words can fail, and then the text is for people anyway.
                None => text.push_str(&self.plain.decode(run, false).unwrap_or_else(|_| "\u{fffd}".to_owned())),
            }
        }
        text
    }
}

impl fmt::Debug for ChatTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTokenizer")
            .field("name", &self.0.name)
            .field("vocab_size", &self.0.vocab_size)
            .finish_non_exhaustive()
    }
}
