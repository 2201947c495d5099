//! The record of one conversation, token by token.
//!
//! A [`Ledger`] only ever appends: what was sent and sampled stays as it was, and the next prompt is all of it and the newly
//! encoded messages. It knows messages and turns but nothing of an agent loop, so anything that talks to a model can keep one.

use std::ops::Range;

use prorl_core::{
    Completion, Message, Role, TokenId, ToolCall, Trace, WeightVersion,
    message::{FinishReason, TurnInfo},
    request::InputIds,
};
use serde_json::Value;

use crate::{
    parse::TurnStart,
    tokenizer::{ChatMessage, ChatOptions, ChatTokenizer, EncodeError},
};

/// One turn of the policy, as it came from a backend.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Sampled ids and their log-probabilities.
    pub completion: Completion,
    /// How the generation ended.
    pub finish_reason: FinishReason,
    /// The checkpoint that sampled it.
    pub weight_version: WeightVersion,
    /// Address of the backend.
    pub backend: String,
    /// Tool calls read from the text.
    pub tool_calls: Vec<ToolCall>,
    /// The text of the sampled ids, for people.
    pub text: String,
}

/// What a ledger holds of one message.
enum Entry {
    /// Fed: the message and where its ids are.
    Fed { message: ChatMessage, ids: Range<usize> },
    /// Sampled: where its ids are, with everything that came with them.
    Sampled { ids: Range<usize>, logprobs: Vec<f64>, text: String, info: TurnInfo },
}

/// A conversation as ids, extended by sampled turns and encoded messages.
///
/// ```
/// use prorl_core::{Completion, message::FinishReason, request::InputIds};
/// use prorl_llm::{ledger::{Ledger, Turn}, tokenizer::{ChatMessage, ChatOptions, ChatTokenizer}};
///
/// let tokenizer = ChatTokenizer::builtin();
/// let mut ledger = Ledger::new(tokenizer.clone(), &[ChatMessage::user("1+1?")], &[], ChatOptions::default())?;
/// let sent = ledger.prompt_ids().to_vec();
/// // A backend samples: here the answer's ids, each with probability 1.
/// let ids = tokenizer.encode_with_added("2<|im_end|>")?;
/// let completion = Completion::new(ids.clone(), vec![0.0; ids.len()])?;
/// ledger.push_turn(Turn { completion, finish_reason: FinishReason::Stop, weight_version: 1, backend: "b".into(),
///     tool_calls: vec![], text: "2".into() });
/// ledger.push_messages(&[ChatMessage::user("Sure?")])?;
/// assert!(ledger.prompt_ids().starts_with(&[sent, ids].concat()));
///
/// let (messages, traces) = ledger.snapshot(InputIds::Delta);
/// assert_eq!((messages.len(), traces.len()), (2, 1)); // up to the last turn
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Ledger {
    tokenizer: ChatTokenizer,
    tools: Vec<Value>,
    options: ChatOptions,
    /// Everything sampled and fed; fed ids behind the last turn may still change until they are sampled upon.
    ids: Vec<TokenId>,
    entries: Vec<Entry>,
    n_turns: usize,
}

impl Ledger {
    /// Starts a ledger with the first prompt's messages.
    ///
    /// # Errors
    /// When the messages cannot be encoded.
    pub fn new(
        tokenizer: ChatTokenizer,
        messages: &[ChatMessage],
        tools: &[Value],
        options: ChatOptions,
    ) -> Result<Self, EncodeError> {
        let mut ledger =
            Self { tokenizer, tools: tools.to_vec(), options, ids: Vec::new(), entries: Vec::new(), n_turns: 0 };
        ledger.push_messages(messages)?;
        Ok(ledger)
    }

    /// Returns the ids to send for the next turn. They end with the generation prompt, unless the last thing pushed is a turn.
    pub fn prompt_ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Returns the number of ids so far.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Tells whether there are no ids; a ledger that could be made has some.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns the number of turns so far.
    pub fn n_turns(&self) -> usize {
        self.n_turns
    }

    /// Returns what the next turn starts in, for [`parse_hermes_from`](crate::parse::parse_hermes_from).
    pub fn turn_start(&self) -> TurnStart {
        self.tokenizer.turn_start(self.options)
    }

    /// Appends a sampled turn, id by id as it came.
    pub fn push_turn(&mut self, turn: Turn) {
        let start = self.ids.len();
        self.ids.extend_from_slice(turn.completion.ids());
        self.entries.push(Entry::Sampled {
            ids: start..self.ids.len(),
            logprobs: turn.completion.logprobs().to_vec(),
            text: turn.text,
            info: TurnInfo {
                tool_calls: turn.tool_calls,
                finish_reason: turn.finish_reason,
                weight_version: turn.weight_version,
                backend: turn.backend,
            },
        });
        self.n_turns += 1;
    }

    /// Appends messages behind the last turn, and the generation prompt.
    ///
    /// If the turn did not end itself (cut by length, say), its end-of-turn token comes first, as context that was fed. When
    /// messages are pushed in several steps the ones since the last turn are encoded together, as the template may join them.
    /// The cost is that of the messages since the last turn.
    ///
    /// # Errors
    /// When the messages cannot be encoded; the ledger is then as it was.
    pub fn push_messages(&mut self, messages: &[ChatMessage]) -> Result<(), EncodeError> {
        let last_turn = self.entries.iter().rposition(|entry| matches!(entry, Entry::Sampled { .. }));
        let first_new = last_turn.map_or(0, |idx| idx + 1);
        let pending = self.entries[first_new..].iter().filter_map(|entry| match entry {
            Entry::Fed { message, .. } => Some(message.clone()),
            Entry::Sampled { .. } => None,
        });
        let messages: Vec<ChatMessage> = pending.chain(messages.iter().cloned()).collect();
        let (encoded, start) = match last_turn.map(|idx| &self.entries[idx]) {
            Some(Entry::Sampled { ids, .. }) => {
                (self.tokenizer.encode_suffix(&messages, &self.tools, self.options)?, ids.end)
            }
            _ => (self.tokenizer.encode_prompt(&messages, &self.tools, self.options)?, 0),
        };
        self.ids.truncate(start);
        self.entries.truncate(first_new);
        let end_of_turn = self.tokenizer.end_of_turn();
        if self.ids.last().is_some_and(|last| *last != end_of_turn) {
            self.ids.push(end_of_turn);
        }
        let base = self.ids.len();
        self.ids.extend_from_slice(&encoded.ids);
        let mut from = start;
        for (message, end) in messages.into_iter().zip(encoded.ends) {
            self.entries.push(Entry::Fed { message, ids: from..base + end });
            from = base + end;
        }
        Ok(())
    }

    /// Returns what a result says of the conversation up to the last turn: its messages with their ids, and its traces.
    /// Messages fed behind the last turn are left out; without any turn there is nothing.
    ///
    /// # Panics
    /// Never: ids and log-probabilities were checked when they were pushed.
    pub fn snapshot(&self, input_ids: InputIds) -> (Vec<Message>, Vec<Trace>) {
        let mut messages = Vec::new();
        let mut trace: Option<Trace> = None;
        // End of the turn before, from where on a delta counts.
        let mut turn_end = 0;
        let last_turn = self.entries.iter().rposition(|entry| matches!(entry, Entry::Sampled { .. }));
        for entry in &self.entries[..last_turn.map_or(0, |idx| idx + 1)] {
            match entry {
                Entry::Fed { message, ids } => messages.push(Message {
                    tool_call_id: message.tool_call_id.clone(),
                    name: message.name.clone(),
                    ..Message::fed(message.role, message.content.clone(), self.ids[ids.clone()].to_vec())
                }),
                Entry::Sampled { ids, logprobs, text, info } => {
                    let sampled = self.ids[ids.clone()].to_vec();
                    let fed = turn_end..ids.start;
                    match &mut trace {
                        Some(trace) => trace.push_fed(&self.ids[fed.clone()]),
                        None => trace = Some(Trace::new(self.ids[fed.clone()].to_vec())),
                    }
                    let completion =
                        Completion::new(sampled.clone(), logprobs.clone()).expect("checked when it was pushed");
                    if let Some(trace) = &mut trace {
                        trace.push_sampled(&completion, info.weight_version);
                    }
                    turn_end = ids.end;
                    messages.push(Message {
                        turn: Some(info.clone()),
                        input_ids: match input_ids {
                            InputIds::Delta => Some(self.ids[fed].to_vec()),
                            InputIds::Full => Some(self.ids[..ids.start].to_vec()),
                            InputIds::None => None,
                        },
                        output_ids: Some(sampled.clone()),
                        logprobs: Some(logprobs.clone()),
                        ..Message::fed(Role::Assistant, text.as_str(), sampled)
                    });
                }
            }
        }
        (messages, trace.into_iter().collect())
    }
}
