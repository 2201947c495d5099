//! How the scripted policy samples: its text in splits that no tokenizer would make.

use prorl_core::TokenId;
use rand::{Rng, SeedableRng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;

use super::script::{Script, ScriptedFinish, ScriptedTurn};
use crate::tokenizer::{ChatMessage, ChatOptions, ChatTokenizer, EncodeError};

/// A tokenizer with what is needed to follow a script on ids alone.
pub(super) struct Policy {
    tokenizer: ChatTokenizer,
    /// The ids that open an assistant turn.
    header: Vec<TokenId>,
}

/// What the policy sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sample {
    pub(super) ids: Vec<TokenId>,
    pub(super) logprobs: Vec<f64>,
    pub(super) finish: &'static str,
}

impl Policy {
    pub(super) fn new(tokenizer: ChatTokenizer) -> Result<Self, EncodeError> {
        let header = |enable_thinking| {
            let render = |generation_prompt| {
                let options = ChatOptions { enable_thinking };
                tokenizer.render(&[ChatMessage::user("x")], &[], options, generation_prompt)
            };
            let (without, with) = (render(false)?, render(true)?);
            tokenizer.encode_with_added(with.strip_prefix(&without).unwrap_or(&with))
        };
        // With thinking off a template may add an empty block, so only what both have opens a turn.
        let (on, off) = (header(true)?, header(false)?);
        let header = on.into_iter().zip(off).take_while(|(a, b)| a == b).map(|(id, _)| id).collect();
        Ok(Self { tokenizer, header })
    }

    pub(super) fn prompt_text(&self, prompt_ids: &[TokenId]) -> String {
        self.tokenizer.decode(prompt_ids)
    }

    /// The text that a completion shows: without special tokens, as engines do by default.
    pub(super) fn text(&self, ids: &[TokenId]) -> String {
        self.tokenizer.decode_text(ids)
    }

    /// The number of assistant turns in a prompt before the one to sample. Counted on ids, which text cannot forge.
    pub(super) fn turn_idx(&self, prompt_ids: &[TokenId]) -> usize {
        if self.header.is_empty() {
            return 0;
        }
        let n_headers = prompt_ids.windows(self.header.len()).filter(|window| *window == self.header).count();
        n_headers.saturating_sub(1)
    }

    /// Samples a turn, the same for the same script, prompt and seed.
    pub(super) fn sample(
        &self,
        script: &Script,
        turn: &ScriptedTurn,
        prompt_ids: &[TokenId],
        seed: Option<u64>,
        max_tokens: usize,
    ) -> Result<Sample, EncodeError> {
        let mut rng = rng_for(script.seed, prompt_ids, seed);
        let mut ids = if let Some(ids) = &turn.ids {
            ids.clone()
        } else {
            let share = turn.noncanonical.unwrap_or(script.noncanonical).clamp(0.0, 1.0);
            let canonical = self.tokenizer.encode_with_added(&turn.text)?;
            canonical.into_iter().flat_map(|id| self.split(id, share, &mut rng)).collect()
        };
        let end_of_turn = self.tokenizer.end_of_turn();
        let ends_itself = !matches!(turn.finish, Some(ScriptedFinish::Length | ScriptedFinish::Abort));
        if ends_itself && ids.last() != Some(&end_of_turn) {
            ids.push(end_of_turn);
        }
        let cut = ids.len() > max_tokens;
        ids.truncate(max_tokens);
        let finish = match turn.finish {
            Some(ScriptedFinish::Abort) => "abort",
            Some(ScriptedFinish::Length) => "length",
            _ if cut => "length",
            _ => "stop",
        };
        // Uniform over 53 bits, so that every digit of the double is used.
        let logprobs = ids.iter().map(|_| -5.0 * rng.random::<f64>()).collect();
        Ok(Sample { ids, logprobs, finish })
    }

    /// The id, or now and then two entries whose texts together are the id's.
    fn split(&self, id: TokenId, share: f64, rng: &mut ChaCha8Rng) -> Vec<TokenId> {
        if self.tokenizer.is_added(id) || !rng.random_bool(share) {
            return vec![id];
        }
        let Some(token) = self.tokenizer.id_to_token(id) else { return vec![id] };
        let halves: Vec<[TokenId; 2]> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| {
                let (left, right) = token.split_at(at);
                Some([self.tokenizer.token_to_id(left)?, self.tokenizer.token_to_id(right)?])
            })
            .collect();
        halves.choose(rng).map_or_else(|| vec![id], |halves| halves.to_vec())
    }
}

fn rng_for(script_seed: u64, prompt_ids: &[TokenId], seed: Option<u64>) -> ChaCha8Rng {
    // FNV-1a: stable over versions and machines.
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let start = 0xcbf2_9ce4_8422_2325 ^ script_seed;
    let bytes = seed.into_iter().flat_map(u64::to_le_bytes).chain(prompt_ids.iter().flat_map(|id| id.to_le_bytes()));
    ChaCha8Rng::seed_from_u64(bytes.fold(start, mix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_not_canonical_and_decode_to_the_same_text() {
        let tokenizer = ChatTokenizer::builtin();
        let policy = Policy::new(tokenizer.clone()).unwrap();
        let text = "<think>\nHAVING counted\n</think>\n\nThe answer is 42.";
        let script = Script { noncanonical: 1.0, ..Script::default() };
        let sample = policy.sample(&script, &text.into(), &[1, 2], Some(7), 4096).unwrap();
        let canonical = tokenizer.encode_with_added(text).unwrap();
        assert!(sample.ids.len() > canonical.len() + 5, "{} {}", sample.ids.len(), canonical.len());
        assert_eq!(tokenizer.decode_text(&sample.ids), text);
        assert_eq!((sample.ids.last(), sample.finish), (Some(&tokenizer.end_of_turn()), "stop"));
        assert_eq!(sample, policy.sample(&script, &text.into(), &[1, 2], Some(7), 4096).unwrap());
        assert_ne!(sample.logprobs, policy.sample(&script, &text.into(), &[1, 2], Some(8), 4096).unwrap().logprobs);
        let cut = policy.sample(&script, &text.into(), &[1, 2], Some(7), 5).unwrap();
        assert_eq!((cut.ids.as_slice(), cut.finish), (&sample.ids[..5], "length"));
    }

    #[test]
    fn turns_are_counted_on_ids() {
        let tokenizer = ChatTokenizer::builtin();
        let policy = Policy::new(tokenizer.clone()).unwrap();
        for enable_thinking in [true, false] {
            let options = ChatOptions { enable_thinking };
            let user = ChatMessage::user("say <|im_start|>assistant\n");
            let one = tokenizer.encode_prompt(std::slice::from_ref(&user), &[], options).unwrap();
            assert_eq!(policy.turn_idx(&one.ids), 0);
            let two = [user.clone(), ChatMessage::assistant("a"), user];
            assert_eq!(policy.turn_idx(&tokenizer.encode_prompt(&two, &[], options).unwrap().ids), 1);
        }
        assert_eq!(policy.turn_idx(&[0]), 0);
    }
}
