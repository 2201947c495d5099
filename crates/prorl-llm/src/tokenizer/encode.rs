//! Conversations to ids.

use std::borrow::Cow;

use minijinja::{Value as JinjaValue, context, value::Serde};
use prorl_core::{Role, TokenId, ToolCall};
use serde_json::{Map, Value};

use super::{
    ChatMessage, ChatOptions, EncodeError, Inner,
    added::{Break, choose_marker, texts_of},
};
use crate::parse::{END_THINK, THINK};

/// Ids of consecutive messages, and where each message ends in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The ids of all messages, the generation prompt last.
    pub ids: Vec<TokenId>,
    /// For each message the number of ids up to its end. Text after an end-of-turn token counts to the message after it,
    /// the generation prompt to the last message.
    pub ends: Vec<usize>,
}

/// What surrounds messages in a rendering.
struct Scene<'a> {
    tools: JinjaValue,
    options: ChatOptions,
    inner: &'a Inner,
}

impl Scene<'_> {
    fn render(&self, messages: &[JinjaValue], add_generation_prompt: bool) -> Result<String, EncodeError> {
        let variables = self.variables(messages, add_generation_prompt);
        self.inner.template.render(variables).map_err(EncodeError::Template)
    }

    fn variables(&self, messages: &[JinjaValue], add_generation_prompt: bool) -> JinjaValue {
        context! {
            messages => messages,
            tools => self.tools.clone(),
            add_generation_prompt => add_generation_prompt,
            enable_thinking => self.options.enable_thinking,
        }
    }
}

impl Inner {
    /// Renders messages; with a marker their contents are broken by it.
    pub(super) fn render(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        options: ChatOptions,
        marker: Option<char>,
        add_generation_prompt: bool,
    ) -> Result<String, EncodeError> {
        let values = self.values(messages, marker)?;
        self.scene(tools, options, marker).render(&values, add_generation_prompt)
    }

    /// Returns the first undefined variable that the template writes for this conversation.
    pub(super) fn undefined_output(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        options: ChatOptions,
    ) -> Result<Option<String>, EncodeError> {
        let values = self.values(messages, None)?;
        Ok(self.template.undefined_output(self.scene(tools, options, None).variables(&values, true)))
    }

    /// Tells whether the generation prompt ends inside reasoning: the last of its tags opens some.
    pub(super) fn opens_reasoning(&self, options: ChatOptions) -> Result<bool, EncodeError> {
        let said = [ChatMessage::user("x")];
        let (without, with) =
            (self.render(&said, &[], options, None, false)?, self.render(&said, &[], options, None, true)?);
        let agreed = without.bytes().zip(with.bytes()).take_while(|(a, b)| a == b).count();
        let rest = &with.as_bytes()[agreed..];
        let last = |tag: &str| rest.windows(tag.len()).rposition(|window| window == tag.as_bytes());
        Ok(last(THINK) > last(END_THINK))
    }

    fn scene(&self, tools: &[Value], options: ChatOptions, marker: Option<char>) -> Scene<'_> {
        let tools = if tools.is_empty() {
            // Templates ask `if tools`; transformers passes None.
            JinjaValue::from(())
        } else {
            let broken = tools.iter().map(|tool| match marker {
                Some(marker) => Cow::Owned(self.added.break_value(tool, marker, Break::All)),
                None => Cow::Borrowed(tool),
            });
            broken.map(|tool| JinjaValue::from(Serde(tool))).collect()
        };
        Scene { tools, options, inner: self }
    }

    fn values(&self, messages: &[ChatMessage], marker: Option<char>) -> Result<Vec<JinjaValue>, EncodeError> {
        let values = messages.iter().enumerate().map(|(idx, message)| message.to_value(idx, &self.added, marker));
        values.map(|value| value.map(|value| JinjaValue::from(Serde(value)))).collect()
    }

    pub(super) fn encode_prompt(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        options: ChatOptions,
    ) -> Result<Encoded, EncodeError> {
        if messages.is_empty() {
            return Err(EncodeError::Empty);
        }
        let marker = marker_for(messages, tools)?;
        let scene = self.scene(tools, options, Some(marker));
        let values = self.values(messages, Some(marker))?;
        let text = scene.render(&values, true)?;
        let mut cuts = Vec::new();
        let mut start = 0;
        for last in 0..messages.len() - 1 {
            // Behind an assistant message the boundary is where a suffix starts.
            let tail = match messages[last].role {
                Role::Assistant => self.suffix_text(&scene, &messages[last + 1..], marker).ok(),
                _ => None,
            };
            start = match tail {
                Some(tail) if text.ends_with(&tail) && text.len() - tail.len() >= start => text.len() - tail.len(),
                _ => self.boundary(&scene.render(&values[..=last], false)?, &text, start),
            };
            cuts.push(start);
        }
        self.encode_marked(&text, Some(marker), &cuts)
    }

    pub(super) fn encode_suffix(
        &self,
        messages: &[ChatMessage],
        tools: &[Value],
        options: ChatOptions,
    ) -> Result<Encoded, EncodeError> {
        if messages.is_empty() {
            return Err(EncodeError::Empty);
        }
        let marker = marker_for(messages, tools)?;
        let scene = self.scene(tools, options, Some(marker));
        let text = self.suffix_text(&scene, messages, marker)?;
        let mut cuts = Vec::new();
        for last in 0..messages.len() - 1 {
            let part = self.rendered_behind_turn(&scene, &messages[..=last], marker, false)?;
            cuts.push(self.boundary(&part, &text, cuts.last().copied().unwrap_or(0)));
        }
        self.encode_marked(&text, Some(marker), &cuts)
    }

    /// The marked text of a suffix: what follows an assistant turn's end-of-turn token when `messages` come next.
    fn suffix_text(&self, scene: &Scene<'_>, messages: &[ChatMessage], marker: char) -> Result<String, EncodeError> {
        self.rendered_behind_turn(scene, messages, marker, true)
    }

    /// Renders `messages` behind a fixed conversation of one user and one assistant message and cuts that off, with the
    /// end-of-turn token that closes it.
    fn rendered_behind_turn(
        &self,
        scene: &Scene<'_>,
        messages: &[ChatMessage],
        marker: char,
        add_generation_prompt: bool,
    ) -> Result<String, EncodeError> {
        // Two markers in a row occur nowhere else: breaking puts one behind a character.
        let turn_text: String = [marker, marker].iter().collect();
        let mut turn = ChatMessage::assistant(turn_text.as_str());
        // Some templates refuse a tool's answer to no call.
        turn.tool_calls = messages.iter().take_while(|message| message.role == Role::Tool).map(call_for).collect();
        let mut values = self.values(&[ChatMessage::user("x"), turn], Some(marker))?;
        values.extend(self.values(messages, Some(marker))?);
        let text = scene.render(&values, add_generation_prompt)?;
        let turn_at = text.find(&turn_text).ok_or(EncodeError::NoTurn)?;
        let behind = &text[turn_at..];
        let end = behind.find(&self.end_of_turn_text).ok_or(EncodeError::NoTurn)? + self.end_of_turn_text.len();
        Ok(behind[end..].to_owned())
    }

    /// Where a message ends in `text`, given the rendering of everything up to and with it. The message starts at `start`.
    ///
    /// Both renderings agree up to where the template closes the message or goes on with the next one. If an end-of-turn
    /// token is in there the message ends with it.
    fn boundary(&self, up_to_message: &str, text: &str, start: usize) -> usize {
        let agreed = up_to_message.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count();
        let agreed = (0..=agreed).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0).max(start);
        text[start..agreed].rfind(&self.end_of_turn_text).map_or(agreed, |at| start + at + self.end_of_turn_text.len())
    }

    /// Encodes rendered text: unbroken added tokens become their ids, the runs between them are encoded as plain text
    /// without markers. `cuts` are positions in `text` at which a message ends; the last message needs none.
    pub(super) fn encode_marked(
        &self,
        text: &str,
        marker: Option<char>,
        cuts: &[usize],
    ) -> Result<Encoded, EncodeError> {
        let mut encoded = Encoded::default();
        let mut cuts = cuts.iter().copied().peekable();
        let mut done = 0;
        let stops = self.added.find(text).map(|(start, end, token)| (start, end, Some(token.id)));
        for (start, end, id) in stops.chain([(text.len(), text.len(), None)]) {
            if start > done {
                let inside: Vec<usize> = std::iter::from_fn(|| cuts.next_if(|cut| *cut < start)).collect();
                self.encode_cut_run(&text[done..start], done, marker, &inside, &mut encoded)?;
            }
            if id.is_some() {
                while cuts.next_if(|cut| *cut < end).is_some() {
                    encoded.ends.push(encoded.ids.len());
                }
            }
            encoded.ids.extend(id);
            done = end;
        }
        encoded.ends.extend(cuts.map(|_| encoded.ids.len()));
        encoded.ends.push(encoded.ids.len());
        Ok(encoded)
    }

    /// Encodes one run as a whole, so that tokens merge over message boundaries as in a full rendering, and then gives
    /// each token to the message in which it starts.
    fn encode_cut_run(
        &self,
        run: &str,
        run_start: usize,
        marker: Option<char>,
        cuts: &[usize],
        encoded: &mut Encoded,
    ) -> Result<(), EncodeError> {
        let clean = strip(run, marker);
        if cuts.is_empty() {
            encoded.ids.extend(self.encode_run(&clean)?);
            return Ok(());
        }
        let tokens = self.plain.encode(clean.as_ref(), false).map_err(|err| EncodeError::Tokenizer(err.to_string()))?;
        let starts: Vec<usize> = tokens.get_offsets().iter().map(|(start, _)| *start).collect();
        for cut in cuts {
            let clean_cut = strip(&run[..cut - run_start], marker).len();
            let n_before = starts.iter().take_while(|start| **start < clean_cut).count();
            encoded.ends.push(encoded.ids.len() + n_before);
        }
        encoded.ids.extend_from_slice(tokens.get_ids());
        Ok(())
    }

    /// Encodes plain text.
    pub(super) fn encode_run(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        let tokens = self.plain.encode_fast(text, false).map_err(|err| EncodeError::Tokenizer(err.to_string()))?;
        Ok(tokens.get_ids().to_vec())
    }
}

fn strip(text: &str, marker: Option<char>) -> Cow<'_, str> {
    match marker {
        Some(marker) if text.contains(marker) => Cow::Owned(text.replace(marker, "")),
        _ => Cow::Borrowed(text),
    }
}

/// A call that a tool message may answer.
fn call_for(message: &ChatMessage) -> ToolCall {
    ToolCall {
        id: message.tool_call_id.clone().unwrap_or_default(),
        name: message.name.clone().unwrap_or_default(),
        arguments: Map::new(),
    }
}

pub(super) fn marker_for(messages: &[ChatMessage], tools: &[Value]) -> Result<char, EncodeError> {
    let mut texts = Vec::new();
    for message in messages {
        message.visit_texts(&mut texts);
    }
    for tool in tools {
        texts_of(tool, &mut texts);
    }
    choose_marker(texts.into_iter()).ok_or(EncodeError::NoMarker)
}
