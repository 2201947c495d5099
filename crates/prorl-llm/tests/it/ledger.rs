//! Ledgers: ids only ever grow.

use proptest::{prelude::*, strategy::ValueTree};
use prorl_core::{JobId, JobResult, Outcome, StopReason, TokenId, message::FinishReason, request::InputIds};
use prorl_llm::{
    ledger::Ledger,
    tokenizer::{ChatMessage, ChatOptions, ChatTokenizer},
    verify::verify_result,
};

use crate::support::{tokenizers, tools, turn};

const OPTIONS: ChatOptions = ChatOptions { enable_thinking: true };

fn result_of(ledger: &Ledger, input_ids: InputIds) -> JobResult {
    let (messages, traces) = ledger.snapshot(input_ids);
    JobResult {
        messages,
        traces,
        ..JobResult::empty(JobId::new("j").unwrap(), "math", Outcome::completed(StopReason::Finish))
    }
}

#[test]
fn a_turn_cut_by_length_gets_its_end_as_context() {
    let tokenizer = ChatTokenizer::builtin();
    let mut ledger = Ledger::new(tokenizer.clone(), &[ChatMessage::user("a")], &[], OPTIONS).unwrap();
    let sampled = tokenizer.encode_plain("so far").unwrap();
    ledger.push_turn(turn(&sampled, 1));
    ledger.push_messages(&[ChatMessage::user("go on")]).unwrap();
    ledger.push_turn(turn(&[tokenizer.end_of_turn()], 2));
    let (messages, traces) = ledger.snapshot(InputIds::Delta);
    assert_eq!(
        tokenizer.decode(&messages[2].token_ids),
        "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    );
    let n_fed = messages[2].token_ids.len();
    let expected = [vec![1; sampled.len()], vec![0; n_fed], vec![1]].concat();
    assert_eq!(traces[0].loss_mask(), expected);
    assert_eq!(traces[0].weight_versions(), [(1, (sampled.len() + n_fed) as u64), (2, 1)]);
    verify_result(&result_of(&ledger, InputIds::Delta)).unwrap();
}

#[test]
fn messages_pushed_one_by_one_are_encoded_together() {
    let tokenizer = ChatTokenizer::builtin();
    let results = [ChatMessage::tool("c0", "bash", "one"), ChatMessage::tool("c1", "bash", "two")];
    let start = || {
        let mut ledger = Ledger::new(tokenizer.clone(), &[ChatMessage::user("a")], &tools(), OPTIONS).unwrap();
        ledger.push_turn(turn(&[5, tokenizer.end_of_turn()], 1));
        ledger
    };
    let (mut together, mut apart) = (start(), start());
    together.push_messages(&results).unwrap();
    apart.push_messages(&results[..1]).unwrap();
    apart.push_messages(&results[1..]).unwrap();
    assert_eq!(together.prompt_ids(), apart.prompt_ids());
}

#[test]
fn a_refused_message_leaves_the_ledger_as_it_was() {
    let mut ledger = Ledger::new(ChatTokenizer::builtin(), &[ChatMessage::user("a")], &[], OPTIONS).unwrap();
    let before = ledger.prompt_ids().to_vec();
    ledger.push_messages(&[ChatMessage::system("late")]).unwrap_err();
    assert_eq!(ledger.prompt_ids(), before);
    ledger.push_messages(&[ChatMessage::user("b")]).unwrap();
    assert_eq!(ledger.n_turns(), 0);
}

#[test]
fn a_snapshot_ends_with_the_last_turn() {
    let tokenizer = ChatTokenizer::builtin();
    let mut ledger = Ledger::new(tokenizer.clone(), &[ChatMessage::user("a")], &[], OPTIONS).unwrap();
    assert_eq!(ledger.snapshot(InputIds::Delta), (vec![], vec![]));
    let mut cut = turn(&[9], 1);
    cut.finish_reason = FinishReason::Length;
    ledger.push_turn(cut);
    ledger.push_messages(&[ChatMessage::user("unanswered")]).unwrap();
    let (messages, traces) = ledger.snapshot(InputIds::None);
    assert_eq!((messages.len(), traces[0].response_ids()), (2, &[9][..]));
    assert_eq!(messages[1].input_ids, None);
    verify_result(&result_of(&ledger, InputIds::None)).unwrap();
}

/// One step of a conversation: what is sampled, and what is said after it.
#[derive(Clone, Debug)]
struct Step {
    sampled: String,
    splits: Vec<bool>,
    ends_itself: bool,
    said: Vec<(bool, String)>,
}

fn step() -> impl Strategy<Value = Step> {
    let words = || {
        proptest::sample::select(vec![
            "HAVING counted",
            "the answer is 42.",
            "\n\n",
            " x = 5",
            "é",
            "print(1)\n",
            "1234",
        ])
    };
    let content = || proptest::collection::vec(words(), 0..4).prop_map(|words| words.concat());
    (
        content(),
        proptest::collection::vec(any::<bool>(), 1..8),
        any::<bool>(),
        proptest::collection::vec((any::<bool>(), content()), 1..3),
    )
        .prop_map(|(sampled, splits, ends_itself, said)| Step { sampled, splits, ends_itself, said })
}

/// The ids of a text, some of them as two entries that no tokenizer would choose.
fn sample(tokenizer: &ChatTokenizer, text: &str, splits: &[bool]) -> Vec<TokenId> {
    let canonical = tokenizer.encode_plain(text).unwrap();
    let split = |(idx, id): (usize, TokenId)| {
        let token = tokenizer.id_to_token(id).unwrap();
        let halves = token
            .char_indices()
            .skip(1)
            .find_map(|(at, _)| Some(vec![tokenizer.token_to_id(&token[..at])?, tokenizer.token_to_id(&token[at..])?]));
        halves.filter(|_| splits[idx % splits.len()]).unwrap_or_else(|| vec![id])
    };
    canonical.into_iter().enumerate().flat_map(split).collect()
}

fn check_conversation(tokenizer: &ChatTokenizer, steps: &[Step], enable_thinking: bool) {
    let options = ChatOptions { enable_thinking };
    let mut said = vec![ChatMessage::system("Be brief."), ChatMessage::user("1+1?\n")];
    let mut ledger = Ledger::new(tokenizer.clone(), &said, &tools(), options).unwrap();
    let mut canonical = true;
    for (idx, step) in steps.iter().enumerate() {
        let sent = ledger.prompt_ids().to_vec();
        let mut ids = sample(tokenizer, &step.sampled, &step.splits);
        if step.ends_itself || ids.is_empty() {
            ids.push(tokenizer.end_of_turn());
        }
        ledger.push_turn(turn(&ids, idx as u64));
        let messages: Vec<_> =
            step.said
                .iter()
                .map(|(tool, text)| {
                    if *tool { ChatMessage::tool("c", "bash", text.as_str()) } else { ChatMessage::user(text.as_str()) }
                })
                .collect();
        ledger.push_messages(&messages).unwrap();
        // What is sent next is what was sent, what was sampled, and the suffix.
        let mut expected = [sent, ids.clone()].concat();
        if ids.last() != Some(&tokenizer.end_of_turn()) {
            expected.push(tokenizer.end_of_turn());
        }
        expected.extend(tokenizer.encode_suffix(&messages, &tools(), options).unwrap().ids);
        assert_eq!(ledger.prompt_ids(), expected);
        // A line end at the start would merge with the one of the generation prompt.
        canonical &= !step.sampled.starts_with(char::is_whitespace);
        canonical &= ids
            .iter()
            .filter(|id| **id != tokenizer.end_of_turn())
            .copied()
            .eq(tokenizer.encode_plain(&step.sampled).unwrap());
        said.push(ChatMessage::assistant(step.sampled.as_str()));
        said.extend(messages);
    }
    // Where the sample is canonical and the template only appends, it is what a full rendering gives.
    let full = tokenizer.render(&said, &tools(), options, true).unwrap();
    if canonical && tokenizer.decode(ledger.prompt_ids()) == full {
        assert_eq!(ledger.prompt_ids(), tokenizer.encode_with_added(&full).unwrap());
    }
    for input_ids in [InputIds::Delta, InputIds::Full, InputIds::None] {
        let stats = verify_result(&result_of(&ledger, input_ids)).unwrap();
        assert_eq!(stats.n_turns, steps.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn prompts_only_grow(steps in proptest::collection::vec(step(), 1..5), enable_thinking in any::<bool>()) {
        check_conversation(&ChatTokenizer::builtin(), &steps, enable_thinking);
    }
}

#[test]
fn prompts_only_grow_with_a_real_tokenizer() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for tokenizer in tokenizers().into_iter().skip(1) {
        for _ in 0..24 {
            let steps = proptest::collection::vec(step(), 1..5).new_tree(&mut runner).unwrap().current();
            check_conversation(&tokenizer, &steps, true);
        }
    }
}

#[test]
fn a_canonical_conversation_is_the_full_rendering() {
    let tokenizer = ChatTokenizer::builtin();
    let plain = |text: &str, said: &str| Step {
        sampled: text.into(),
        splits: vec![false],
        ends_itself: true,
        said: vec![(true, said.into())],
    };
    let steps = [plain("Let me see.\n", "\n4\n"), plain("x", "")];
    check_conversation(&tokenizer, &steps, true);
    // The condition inside is met for this template: nothing it wrote before changes.
    let said = [ChatMessage::user("a"), ChatMessage::assistant("b"), ChatMessage::user("c")];
    let mut ledger = Ledger::new(tokenizer.clone(), &said[..1], &[], OPTIONS).unwrap();
    ledger.push_turn(turn(&tokenizer.encode_with_added("b<|im_end|>").unwrap(), 1));
    ledger.push_messages(&said[2..]).unwrap();
    assert_eq!(tokenizer.decode(ledger.prompt_ids()), tokenizer.render(&said, &[], OPTIONS, true).unwrap());
    assert_eq!(ledger.prompt_ids(), tokenizer.encode_prompt(&said, &[], OPTIONS).unwrap().ids);
}
