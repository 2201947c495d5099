//! The agent loop: turns, tool calls, budgets, one trajectory.
//!
//! It is the same for every handler. What a model does wrong (a malformed call, an unknown tool, code that fails) comes
//! back to it as a tool result; only what is not its doing ends the job with an error.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use prorl_core::{
    Content, FailureClass, Role, StopReason, TokenId, ToolCall, Usage,
    message::FinishReason,
    request::{History, OnNoToolCall},
};
use prorl_llm::{
    dialect::{GenerateRequest, Generation, LlmError, derive_seed},
    ledger::{Ledger, Turn},
    parse::{self, ParsedTurn},
    pool::Lease,
    tokenizer::{ChatMessage, ChatOptions, ChatTokenizer},
};
use prorl_pipeline::{JobContext, Progress, RunOutput, StageError, Trajectory};
use prorl_tools::host::{ToolContext, ToolError, ToolResult, Toolbox};
use tokio::time::Instant;

use crate::{AgentSandbox, Environment, environment::LLM_SHARE};

/// What the agent is told when a turn calls no tool.
const NUDGE: &str = include_str!("../prompts/nudge.md");

/// Turns in a row without a usable tool call after which the agent is taken to have stopped.
const MAX_IDLE_TURNS: u32 = 3;

/// Backends in a row that may die under one call before the call is given up.
const MAX_MOVES: u32 = 8;

/// One conversation of a policy with tools.
pub struct Agent<'a> {
    job: &'a JobContext,
    env: &'a Environment,
    sandbox: &'a AgentSandbox,
    tools: Toolbox,
    tokenizer: ChatTokenizer,
    state: Arc<Mutex<State>>,
    /// Characters of one tool result.
    output_chars: usize,
    lease: Option<Lease>,
}

struct State {
    ledger: Ledger,
    usage: Usage,
    stop_reason: StopReason,
    finish: Option<String>,
    said: String,
    end_properly: bool,
    tools: Vec<serde_json::Value>,
    input_ids: prorl_core::request::InputIds,
}

struct StateProgress(Arc<Mutex<State>>);

impl Progress for StateProgress {
    fn snapshot(&self) -> RunOutput {
        self.0.lock().output()
    }
}

impl State {
    fn output(&self) -> RunOutput {
        let (messages, traces) = self.ledger.snapshot(self.input_ids);
        RunOutput {
            trajectory: Trajectory { messages, traces },
            stop_reason: self.stop_reason,
            finish: self.finish.clone(),
            said: self.said.clone(),
            end_properly: self.end_properly,
            tools: self.tools.clone(),
            usage: self.usage.clone(),
            ..RunOutput::default()
        }
    }
}

/// What one turn's tool calls led to.
enum Step {
    /// Tell the policy this and go on.
    Observe(Vec<ChatMessage>),
    Stop(StopReason),
}

impl<'a> Agent<'a> {
    /// Begins a conversation with these messages.
    ///
    /// # Errors
    /// When they cannot be rendered or encoded.
    pub async fn begin(
        job: &'a JobContext,
        env: &'a Environment,
        sandbox: &'a AgentSandbox,
        tools: Toolbox,
        messages: Vec<ChatMessage>,
    ) -> Result<Self, StageError> {
        let tokenizer = env.tokenizer(job).await?;
        let options = ChatOptions { enable_thinking: job.sampling().enable_thinking };
        let schemas = tools.schemas();
        let ledger = {
            let (tokenizer, schemas) = (tokenizer.clone(), schemas.clone());
            tokio::task::spawn_blocking(move || Ledger::new(tokenizer, &messages, &schemas, options))
        };
        let ledger = ledger
            .await
            .map_err(|join| StageError::text(FailureClass::Internal, join.to_string()))?
            .map_err(|err| StageError::new(FailureClass::Handler, &err))?;
        let agent_options = job.request().agent;
        for (unsupported, asked) in [
            ("history \"strip\"", agent_options.history == History::Strip),
            ("budget_notice", agent_options.budget_notice),
            ("loop_detector", agent_options.loop_detector),
        ] {
            if asked {
                job.warn(format!("agent.{unsupported} is not supported by this version"));
            }
        }
        let state = Arc::new(Mutex::new(State {
            ledger,
            usage: Usage::default(),
            stop_reason: StopReason::Error,
            finish: None,
            said: String::new(),
            end_properly: false,
            tools: schemas,
            input_ids: job.request().include.input_ids.unwrap_or_default(),
        }));
        let asked = job.instance().common().map_err(|problem| StageError::new(FailureClass::Handler, &problem))?.limits;
        let output_chars = env.sandboxes.with(&asked).output_chars;
        job.set_progress(Arc::new(StateProgress(Arc::clone(&state))));
        Ok(Self { job, env, sandbox, tools, tokenizer, state, output_chars, lease: None })
    }

    /// Makes turns until the policy stops or a budget ends.
    ///
    /// # Errors
    /// When a backend or the sandbox failed for good. What there is can still be read through the job's progress.
    ///
    /// # Cancel safety
    /// Dropping it ends the running generation upstream and the running tool call inside the sandbox.
    pub async fn run(mut self) -> Result<RunOutput, StageError> {
        let stop_reason = self.turns().await?;
        let mut state = self.state.lock();
        state.stop_reason = stop_reason;
        Ok(state.output())
    }

    async fn turns(&mut self) -> Result<StopReason, StageError> {
        let sampling = self.job.sampling();
        let mut idle = 0;
        for turn in 0..sampling.max_iterations {
            let prompt_ids = self.state.lock().ledger.prompt_ids().to_vec();
            let room = sampling.max_model_len.saturating_sub(prompt_ids.len() as u64);
            if room == 0 {
                return Ok(StopReason::ContextFull);
            }
            let Some(generation) = self.generate(&prompt_ids, sampling.max_tokens.min(room), turn).await? else {
                return Ok(StopReason::ContextFull);
            };
            let (finish_reason, parsed) = self.record(generation, prompt_ids.len(), turn);
            let wrong = !parsed.malformed.is_empty();
            let empty = parsed.tool_calls.is_empty() && !wrong;

            if parsed.tool_calls.is_empty() {
                idle += 1;
                if empty && self.job.request().agent.on_no_tool_call == OnNoToolCall::Finish {
                    let cut = finish_reason == FinishReason::Length;
                    return Ok(if cut { StopReason::Length } else { StopReason::NoToolCall });
                }
                if idle >= MAX_IDLE_TURNS {
                    return Ok(if wrong { StopReason::MalformedToolCall } else { StopReason::NoToolCall });
                }
            } else {
                idle = 0;
            }
            let observations = if empty {
                vec![ChatMessage::new(Role::User, NUDGE.trim())]
            } else {
                match self.act(parsed).await? {
                    Step::Observe(observations) => observations,
                    Step::Stop(reason) => return Ok(reason),
                }
            };
            if turn + 1 < sampling.max_iterations {
                let mut state = self.state.lock();
                let pushed = state.ledger.push_messages(&observations);
                pushed.map_err(|err| StageError::new(FailureClass::TokenIntegrity, &err))?;
            }
        }
        Ok(StopReason::MaxTurns)
    }

    /// Puts a turn into the ledger and reads its tool calls.
    fn record(&self, generation: Generation, n_prompt: usize, turn: u64) -> (FinishReason, ParsedTurn) {
        let text = self.tokenizer.decode_text(generation.completion.ids());
        let start = self.state.lock().ledger.turn_start();
        let mut parsed = parse::parse_hermes_from(start, &text);
        parsed.number_calls(usize::try_from(turn).unwrap_or(usize::MAX));
        let finish_reason = generation.finish_reason;
        let mut state = self.state.lock();
        state.usage.turns += 1;
        state.usage.prompt_tokens += n_prompt as u64;
        state.usage.completion_tokens += generation.completion.ids().len() as u64;
        state.said.clone_from(&parsed.content);
        state.end_properly = parsed.malformed.is_empty() && finish_reason == FinishReason::Stop;
        state.ledger.push_turn(Turn {
            completion: generation.completion,
            finish_reason,
            weight_version: generation.weight_version,
            backend: generation.backend,
            tool_calls: parsed.tool_calls.clone(),
            text,
        });
        drop(state);
        (finish_reason, parsed)
    }

    /// Carries out a turn's tool calls in order.
    async fn act(&self, parsed: ParsedTurn) -> Result<Step, StageError> {
        let mut observations = Vec::new();
        for call in parsed.tool_calls {
            let began = Instant::now();
            let outcome = self.call(&call).await;
            self.state.lock().usage.tool_time += began.elapsed().as_secs_f64();
            let mut result = outcome.map_err(|err| StageError::new(FailureClass::Sandbox, &err))?;
            tracing::debug!(tool = %call.name, error = result.is_error, took = ?began.elapsed(), "tool call");
            if let Some(message) = result.finish {
                self.state.lock().finish = Some(message);
                return Ok(Step::Stop(StopReason::Finish));
            }
            for exceeded in self.sandbox.take_exceeded(&result.content.text()) {
                result.note(exceeded);
            }
            observations.push(tool_message(&call, result.content));
        }
        for malformed in parsed.malformed {
            let told = format!(
                "Error: this tool call could not be read: {}. Write each call as <tool_call>\n{{\"name\": ..., \
                 \"arguments\": {{...}}}}\n</tool_call>.",
                malformed.problem
            );
            observations.push(ChatMessage::new(Role::Tool, told.as_str()));
        }
        Ok(Step::Observe(observations))
    }

    /// Carries out one tool call, in what time the job and the sandbox have left.
    async fn call(&self, call: &ToolCall) -> Result<ToolResult, ToolError> {
        let left = self.job.remaining(Some(self.env.limits.tool_total));
        let limit = self.sandbox.wall_left().map_or(left, |wall| wall.min(left));
        if self.sandbox.wall_left().is_some_and(|left| left.is_zero()) && self.tools.needs_sandbox(&call.name) {
            return Ok(ToolResult::error("The time of this sandbox is over. Nothing was run."));
        }
        let context = ToolContext {
            silence: Some(self.env.limits.bash_silence),
            output_chars: self.output_chars,
            ..ToolContext::new(self.sandbox.tools(), limit)
        };
        self.tools.call(&context, &call.name, &call.arguments).await
    }

    /// Gets one turn from a backend: the job's own as long as it lives, another when it dies. `None` when the prompt no
    /// longer fits the model, which is shorter than the request says.
    async fn generate(
        &mut self,
        prompt_ids: &[TokenId],
        max_tokens: u64,
        turn: u64,
    ) -> Result<Option<Generation>, StageError> {
        let began = Instant::now();
        let job = self.job;
        let (sampling, trajectory_id) = (job.sampling(), job.trajectory_id());
        let request_id = format!("{}-{}-{turn}", job.id(), job.attempt());
        let vocab_size = self.tokenizer.vocab_size();
        let llm_call = self.env.limits.llm_call;
        let mut moves = 0;
        loop {
            let lease = self.lease().await?;
            let request = GenerateRequest {
                prompt_ids,
                params: sampling,
                max_tokens,
                seed: sampling.seed.map(|seed| derive_seed(seed, &trajectory_id, turn)),
                request_id: &request_id,
                session_id: job.id().as_str(),
                vocab_size,
            };
            let share = job.budget().mul_f64(LLM_SHARE);
            let limit = job.remaining(Some(llm_call.min(share)));
            let called = Instant::now();
            let answer = lease.generate(&request, limit).await;
            let address = lease.address().to_owned();
            let alive = lease.is_alive();
            self.state.lock().usage.llm_time += called.elapsed().as_secs_f64();
            let error = match answer {
                Ok(generation) => return Ok(Some(generation)),
                Err(LlmError::PromptTooLong { .. }) => return Ok(None),
                Err(error) => error,
            };
            tracing::warn!(backend = %address, turn, error = %error, "backend call failed");
            if !alive {
                // The backend died, which is no fault of this call: the job moves, its ids go along.
                self.lease = None;
                moves += 1;
                if error.is_retryable() && moves <= MAX_MOVES {
                    self.job.warn(format!("backend {address} was lost at turn {turn}; the job moved"));
                    continue;
                }
            } else if error.is_retryable() && self.job.remaining(None) > called.elapsed() && self.job.take_retry() {
                continue;
            }
            let waited = began.elapsed().as_secs_f64();
            let class = error.failure_class();
            let mut failure = StageError::new(class, &error);
            failure.message = format!("turn {turn} on backend {address} after {waited:.1} s: {}", failure.message);
            return Err(failure);
        }
    }

    /// Returns the job's backend; waits for one without a worker when there is none.
    async fn lease(&mut self) -> Result<&Lease, StageError> {
        if self.lease.as_ref().is_some_and(|lease| !lease.is_alive()) {
            self.lease = None;
        }
        let session = self.job.id().as_str();
        let held = self.lease.take().or_else(|| self.env.pool.try_acquire(session));
        let lease = if let Some(lease) = held {
            lease
        } else {
            let limit = self.env.limits.backend_wait;
            let wait = tokio::time::timeout(limit, self.env.pool.acquire(session));
            self.job.park("llm backend", wait).await.map_err(|_elapsed| no_backend(limit))?
        };
        Ok(self.lease.insert(lease))
    }
}

/// The error of a job that waited for a backend in vain.
pub(crate) fn no_backend(waited: Duration) -> StageError {
    StageError::text(FailureClass::LlmBackend, format!("no healthy llm backend came within {waited:?}"))
}

fn tool_message(call: &ToolCall, content: Content) -> ChatMessage {
    ChatMessage {
        tool_call_id: Some(call.id.clone()),
        name: Some(call.name.clone()),
        ..ChatMessage::new(Role::Tool, content)
    }
}
