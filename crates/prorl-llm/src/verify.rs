//! Proof that a result keeps the promises about its ids, log-probabilities and masks.
//!
//! [`verify_json`] reads a result leniently, so that a broken promise is named even where the strict types of
//! [`JobResult`] would only refuse the file. Each promise has its own variant of [`Broken`].

use prorl_core::{JobResult, Outcome, Role, Status, TokenId, WeightVersion};
use serde::Deserialize;

/// What a verified result holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyStats {
    /// Traces.
    pub n_traces: usize,
    /// The policy's turns.
    pub n_turns: usize,
    /// Ids over all traces.
    pub n_ids: usize,
    /// Sampled ids among them.
    pub n_sampled: usize,
}

/// The first broken promise of a result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Broken {
    #[error("not a result: {detail}")]
    NotAResult { detail: String },
    #[error(
        "trace {trace}: {n_ids} response ids, {n_masks} mask entries, {n_logprobs} log-probabilities: lengths differ"
    )]
    TraceLengths { trace: usize, n_ids: usize, n_masks: usize, n_logprobs: usize },
    #[error("trace {trace}: mask {value} at response position {index} is neither 0 nor 1")]
    MaskValue { trace: usize, index: usize, value: u8 },
    #[error("trace {trace}: log-probability at response position {index} is missing or not finite")]
    LogprobNotFinite { trace: usize, index: usize },
    #[error("trace {trace}: log-probability {value} at response position {index} is above 0")]
    LogprobPositive { trace: usize, index: usize, value: f64 },
    #[error("trace {trace}: log-probability {value} at masked response position {index} is not 0.0")]
    LogprobOfFed { trace: usize, index: usize, value: f64 },
    #[error("trace {trace}: weight versions cover {covered} of {n_ids} response ids")]
    VersionCover { trace: usize, covered: u64, n_ids: usize },
    #[error("trace {trace}: the response does not begin and end with a sampled id")]
    ResponseEdges { trace: usize },
    #[error("traces hold {in_traces} sampled ids, messages {in_messages}")]
    SampledCount { in_traces: usize, in_messages: usize },
    #[error("message {message}: output_ids differ from token_ids")]
    OutputIds { message: usize },
    #[error("message {message}: {n_ids} sampled ids with {n_logprobs} log-probabilities")]
    MessageLengths { message: usize, n_ids: usize, n_logprobs: usize },
    #[error("message {message}: a {role} message carries what only the policy's turns have")]
    FedMessage { message: usize, role: &'static str },
    #[error("message {message}: an assistant turn lacks {field}")]
    TurnField { message: usize, field: &'static str },
    #[error("messages do not end with an assistant turn")]
    LastMessage,
    #[error("token_ids of the messages differ from prompt and response at id {index}")]
    TokenIds { index: usize },
    #[error("message {message}: its ids are {found} in the trace and should be {expected}")]
    Mask { message: usize, found: &'static str, expected: &'static str },
    #[error("message {message}: log-probability {index} differs from the trace's")]
    MessageLogprob { message: usize, index: usize },
    #[error("message {message}: weight version {in_message}, in the trace {in_trace}")]
    MessageVersion { message: usize, in_message: WeightVersion, in_trace: WeightVersion },
    #[error("message {message}: input_ids are neither the ids since the turn before nor the whole prompt")]
    InputIds { message: usize },
    #[error("message {message}: its prompt does not begin with the prompt and the sampled ids of the turn before")]
    Prefix { message: usize },
    #[error("messages: input_ids are delta, full and null by turns")]
    InputIdsMixed,
    #[error("reward {reward} of a job that did not complete")]
    RewardOfFailure { reward: f64 },
    #[error("reward is not a finite number")]
    RewardNotFinite,
    #[error("resolved is {resolved}, reward is {reward:?}")]
    Resolved { resolved: bool, reward: Option<f64> },
    #[error("filter is {filter}, trainable is {trainable}")]
    Filter { filter: bool, trainable: bool },
    #[error("{status} job is marked trainable or in the baseline")]
    Trainable { status: Status },
    #[error("job is marked trainable, and no trace has a sampled id")]
    NothingToTrainOn,
    #[error("a job with a failure class has no error text")]
    NoErrorText,
}

/// What is checked of a result, read from JSON with room for what is wrong.
#[derive(Deserialize)]
struct Claims {
    reward: Option<f64>,
    resolved: bool,
    filter: bool,
    error: Option<String>,
    outcome: Outcome,
    messages: Vec<MessageClaims>,
    traces: Vec<TraceClaims>,
}

#[derive(Deserialize)]
struct MessageClaims {
    role: Role,
    #[serde(default)]
    input_ids: Option<Vec<TokenId>>,
    #[serde(default)]
    output_ids: Option<Vec<TokenId>>,
    token_ids: Vec<TokenId>,
    #[serde(default)]
    logprobs: Option<Vec<Option<f64>>>,
    #[serde(default)]
    weight_version: Option<WeightVersion>,
}

#[derive(Deserialize)]
struct TraceClaims {
    prompt_ids: Vec<TokenId>,
    response_ids: Vec<TokenId>,
    loss_mask: Vec<u8>,
    logprobs: Vec<Option<f64>>,
    weight_versions: Vec<(WeightVersion, u64)>,
}

/// Verifies one result as JSON text.
///
/// # Errors
/// The first broken promise.
pub fn verify_json(json: &[u8]) -> Result<VerifyStats, Broken> {
    let claims: Claims = serde_json::from_slice(json).map_err(not_a_result)?;
    let stats = check(&claims)?;
    // What holds is then also a result in the strict sense, with every field that API section 1.3 names.
    serde_json::from_slice::<JobResult>(json).map_err(not_a_result)?;
    Ok(stats)
}

/// Verifies one result.
///
/// # Errors
/// The first broken promise.
pub fn verify_result(result: &JobResult) -> Result<VerifyStats, Broken> {
    check(&Claims::from(result))
}

#[expect(clippy::needless_pass_by_value, reason = "used as a mapping function")]
fn not_a_result(err: serde_json::Error) -> Broken {
    Broken::NotAResult { detail: err.to_string() }
}

impl From<&JobResult> for Claims {
    fn from(result: &JobResult) -> Self {
        let present = |values: &[f64]| values.iter().copied().map(Some).collect();
        Self {
            reward: result.reward,
            resolved: result.resolved,
            filter: result.filter,
            error: result.error.clone(),
            outcome: result.outcome.clone(),
            messages: result
                .messages
                .iter()
                .map(|message| MessageClaims {
                    role: message.role,
                    input_ids: message.input_ids.clone(),
                    output_ids: message.output_ids.clone(),
                    token_ids: message.token_ids.clone(),
                    logprobs: message.logprobs.as_deref().map(present),
                    weight_version: message.turn.as_ref().map(|turn| turn.weight_version),
                })
                .collect(),
            traces: result
                .traces
                .iter()
                .map(|trace| TraceClaims {
                    prompt_ids: trace.prompt_ids().to_vec(),
                    response_ids: trace.response_ids().to_vec(),
                    loss_mask: trace.loss_mask().to_vec(),
                    logprobs: present(trace.logprobs()),
                    weight_versions: trace.weight_versions().to_vec(),
                })
                .collect(),
        }
    }
}

fn check(claims: &Claims) -> Result<VerifyStats, Broken> {
    check_outcome(claims)?;
    let mut stats = VerifyStats { n_traces: claims.traces.len(), ..VerifyStats::default() };
    for (trace_idx, trace) in claims.traces.iter().enumerate() {
        check_trace(trace_idx, trace)?;
        stats.n_ids += trace.prompt_ids.len() + trace.response_ids.len();
        stats.n_sampled += trace.loss_mask.iter().map(|mask| usize::from(*mask)).sum::<usize>();
    }
    for (message_idx, message) in claims.messages.iter().enumerate() {
        check_message(message_idx, message)?;
    }
    let turns = claims.messages.iter().filter(|message| message.is_turn());
    stats.n_turns = turns.clone().count();
    let in_messages = turns.map(|turn| turn.token_ids.len()).sum();
    if stats.n_sampled != in_messages {
        return Err(Broken::SampledCount { in_traces: stats.n_sampled, in_messages });
    }
    if claims.outcome.trainable && stats.n_sampled == 0 {
        return Err(Broken::NothingToTrainOn);
    }
    if claims.messages.last().is_some_and(|last| !last.is_turn()) {
        return Err(Broken::LastMessage);
    }
    if let [trace] = claims.traces.as_slice() {
        check_against_trace(&claims.messages, trace)?;
    }
    Ok(stats)
}

/// A failure is never a reward, and what is not trainable says so everywhere.
fn check_outcome(claims: &Claims) -> Result<(), Broken> {
    let outcome = &claims.outcome;
    let completed = outcome.status == Status::Completed && outcome.failure_class.is_none();
    if let Some(reward) = claims.reward {
        if !completed {
            return Err(Broken::RewardOfFailure { reward });
        }
        if !reward.is_finite() {
            return Err(Broken::RewardNotFinite);
        }
    }
    if claims.resolved != claims.reward.is_some_and(|reward| reward > 0.99) {
        return Err(Broken::Resolved { resolved: claims.resolved, reward: claims.reward });
    }
    if claims.filter == outcome.trainable {
        return Err(Broken::Filter { filter: claims.filter, trainable: outcome.trainable });
    }
    if !completed && (outcome.trainable || outcome.in_baseline) {
        return Err(Broken::Trainable { status: outcome.status });
    }
    if outcome.failure_class.is_some() && claims.error.is_none() {
        return Err(Broken::NoErrorText);
    }
    Ok(())
}

fn check_trace(trace_idx: usize, trace: &TraceClaims) -> Result<(), Broken> {
    let (n_ids, n_masks, n_logprobs) = (trace.response_ids.len(), trace.loss_mask.len(), trace.logprobs.len());
    if n_ids != n_masks || n_ids != n_logprobs {
        return Err(Broken::TraceLengths { trace: trace_idx, n_ids, n_masks, n_logprobs });
    }
    for (index, (&mask, &logprob)) in trace.loss_mask.iter().zip(&trace.logprobs).enumerate() {
        let not_finite = Broken::LogprobNotFinite { trace: trace_idx, index };
        let value = logprob.filter(|value| value.is_finite()).ok_or(not_finite)?;
        match mask {
            0 if value != 0.0 => return Err(Broken::LogprobOfFed { trace: trace_idx, index, value }),
            1 if value > 0.0 => return Err(Broken::LogprobPositive { trace: trace_idx, index, value }),
            0 | 1 => {}
            value => return Err(Broken::MaskValue { trace: trace_idx, index, value }),
        }
    }
    let covered = trace.weight_versions.iter().fold(0_u64, |sum, (_, count)| sum.saturating_add(*count));
    if covered != n_ids as u64 {
        return Err(Broken::VersionCover { trace: trace_idx, covered, n_ids });
    }
    if trace.loss_mask.first() != Some(&1) || trace.loss_mask.last() != Some(&1) {
        return Err(Broken::ResponseEdges { trace: trace_idx });
    }
    Ok(())
}

impl MessageClaims {
    /// A turn of the policy's, not an assistant message that was quoted in the prompt.
    fn is_turn(&self) -> bool {
        self.output_ids.is_some()
    }
}

fn check_message(message_idx: usize, message: &MessageClaims) -> Result<(), Broken> {
    let Some(output_ids) = &message.output_ids else {
        if message.logprobs.is_some() || message.input_ids.is_some() || message.weight_version.is_some() {
            return Err(Broken::FedMessage { message: message_idx, role: message.role.as_str() });
        }
        return Ok(());
    };
    if message.role != Role::Assistant {
        return Err(Broken::FedMessage { message: message_idx, role: message.role.as_str() });
    }
    if *output_ids != message.token_ids {
        return Err(Broken::OutputIds { message: message_idx });
    }
    let lacks = |field| Broken::TurnField { message: message_idx, field };
    let logprobs = message.logprobs.as_ref().ok_or_else(|| lacks("logprobs"))?;
    message.weight_version.ok_or_else(|| lacks("weight_version"))?;
    if logprobs.len() != output_ids.len() {
        let (n_ids, n_logprobs) = (output_ids.len(), logprobs.len());
        return Err(Broken::MessageLengths { message: message_idx, n_ids, n_logprobs });
    }
    Ok(())
}

/// Which ids the `input_ids` of a turn are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fed {
    Delta,
    Full,
    /// The first turn's, which are both.
    Either,
    Null,
}

/// The messages, one after the other, are the trace: ids, masks, log-probabilities, versions, and what each call was given.
fn check_against_trace(messages: &[MessageClaims], trace: &TraceClaims) -> Result<(), Broken> {
    let ids: Vec<TokenId> = trace.prompt_ids.iter().chain(&trace.response_ids).copied().collect();
    // Their sum was checked to be the number of response ids, so it fits.
    let runs = trace.weight_versions.iter().map(|(version, count)| (*version, usize::try_from(*count).unwrap_or(0)));
    let mut versions = runs.flat_map(|(version, count)| std::iter::repeat_n(version, count));
    let n_prompt = trace.prompt_ids.len();
    let mut at = 0;
    let mut turn_end = 0;
    let mut forms = Vec::new();
    for (message_idx, message) in messages.iter().enumerate() {
        let end = at + message.token_ids.len();
        let in_trace = ids.get(at..).unwrap_or_default();
        if !in_trace.starts_with(&message.token_ids) {
            let agreed = in_trace.iter().zip(&message.token_ids).take_while(|(a, b)| a == b).count();
            return Err(Broken::TokenIds { index: at + agreed });
        }
        if message.is_turn() {
            forms.push(fed_form(message_idx, message, &ids, at, turn_end)?);
            turn_end = end;
        }
        for position in at..end {
            let index = position - at;
            let Some(response) = position.checked_sub(n_prompt) else {
                if message.is_turn() {
                    return Err(Broken::Mask { message: message_idx, found: "fed", expected: "sampled" });
                }
                continue;
            };
            match (trace.loss_mask[response] == 1, message.is_turn()) {
                (true, false) => return Err(Broken::Mask { message: message_idx, found: "sampled", expected: "fed" }),
                (false, true) => return Err(Broken::Mask { message: message_idx, found: "fed", expected: "sampled" }),
                _ => {}
            }
            let in_trace = versions.next().unwrap_or_default();
            if !message.is_turn() {
                continue;
            }
            let bits = |value: Option<f64>| value.map(f64::to_bits);
            let logprob = message.logprobs.as_ref().and_then(|logprobs| logprobs[index]);
            if bits(logprob) != bits(trace.logprobs[response]) {
                return Err(Broken::MessageLogprob { message: message_idx, index });
            }
            let in_message = message.weight_version.unwrap_or_default();
            if in_message != in_trace {
                return Err(Broken::MessageVersion { message: message_idx, in_message, in_trace });
            }
        }
        at = end;
    }
    if at != ids.len() {
        return Err(Broken::TokenIds { index: at });
    }
    let agree = |a: Fed, b: Fed| a == b || (a != Fed::Null && b != Fed::Null && (a == Fed::Either || b == Fed::Either));
    // Every form against the first that decides: the others may all be either.
    let decisive = forms.iter().copied().find(|form| *form != Fed::Either);
    if decisive.is_some_and(|decisive| forms.iter().any(|form| !agree(*form, decisive))) {
        return Err(Broken::InputIdsMixed);
    }
    Ok(())
}

/// Which form a turn's `input_ids` have.
fn fed_form(
    message_idx: usize,
    message: &MessageClaims,
    ids: &[TokenId],
    at: usize,
    turn_end: usize,
) -> Result<Fed, Broken> {
    let Some(fed) = &message.input_ids else { return Ok(Fed::Null) };
    let (delta, full) = (&ids[turn_end..at], &ids[..at]);
    match (fed == delta, fed == full) {
        (true, true) => Ok(Fed::Either),
        (true, false) => Ok(Fed::Delta),
        (false, true) => Ok(Fed::Full),
        // As long as a whole prompt, but not on top of what came before.
        (false, false) if fed.len() == full.len() => Err(Broken::Prefix { message: message_idx }),
        (false, false) => Err(Broken::InputIds { message: message_idx }),
    }
}
