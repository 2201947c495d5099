//! How a job ended: one vocabulary for status, stop reason and failure class.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $word)] $variant),+ }

        impl $name {
            /// Every value, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Returns the word used on the wire.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

words! {
    /// One of the three parts of a rollout (paper, 3.2.1).
    Stage {
        /// Make the sandbox.
        Init = "init",
        /// Drive the agent.
        Run = "run",
        /// Score the result.
        Eval = "eval",
    }
}

words! {
    /// The kind of ending.
    Status {
        /// The agent's work was done and scored.
        Completed = "completed",
        /// Something of ours, or of the task's, broke.
        Failed = "failed",
        /// The job's counted time ran out.
        Timeout = "timeout",
        /// Somebody asked for the end.
        Cancelled = "cancelled",
    }
}

words! {
    /// Why the agent made no further turn.
    StopReason {
        /// The finish tool was called.
        Finish = "finish",
        /// A turn called no tool, and the policy takes that as the end.
        NoToolCall = "no_tool_call",
        /// `max_iterations` turns were made.
        MaxTurns = "max_turns",
        /// The next prompt no longer fits the model.
        ContextFull = "context_full",
        /// A turn was cut at its token limit and nothing could follow.
        Length = "length",
        /// Tool calls stayed malformed.
        MalformedToolCall = "malformed_tool_call",
        /// Counted time ran out.
        Timeout = "timeout",
        /// Cancelled.
        Cancelled = "cancelled",
        /// A failure; see the failure class.
        Error = "error",
    }
}

words! {
    /// Who failed, where the failure says nothing about the policy. With one of these the reward is null.
    FailureClass {
        /// The sandbox did not start, or died.
        Sandbox = "sandbox",
        /// The image is missing or broken.
        Image = "image",
        /// An LLM server refused, hung, or broke off.
        LlmBackend = "llm_backend",
        /// Ids or log-probabilities that cannot be trusted.
        TokenIntegrity = "token_integrity",
        /// The handler's own code.
        Handler = "handler",
        /// The scorer could not run.
        Scorer = "scorer",
        /// The node ran out of something.
        Resource = "resource",
        /// A broken invariant of the service.
        Internal = "internal",
    }
}

words! {
    /// The original server's name for the stage that broke.
    CriticalError {
        /// Init failed.
        Init = "init",
        /// Run failed.
        Run = "run",
        /// Eval failed.
        Eval = "eval",
        /// Counted time ran out.
        Timeout = "timeout",
        /// The handler's `final_result` failed.
        FinalResult = "final_result",
        /// Cancelled.
        Cancelled = "cancelled",
    }
}

impl From<Stage> for CriticalError {
    fn from(stage: Stage) -> Self {
        match stage {
            Stage::Init => Self::Init,
            Stage::Run => Self::Run,
            Stage::Eval => Self::Eval,
        }
    }
}

impl FailureClass {
    /// Tells whether another attempt can end better. A handler's fault and a broken image repeat; the others may pass.
    pub fn is_retryable(self) -> bool {
        !matches!(self, Self::Handler | Self::Image)
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// The kind of ending.
    pub status: Status,
    /// Why the agent stopped.
    pub stop_reason: StopReason,
    /// Who failed, if anybody did.
    pub failure_class: Option<FailureClass>,
    /// The stage in which it ended early; null for a completed job.
    pub stage: Option<Stage>,
    /// Whether submitting the job again can help.
    pub retryable: bool,
    /// Whether its traces may be trained on.
    pub trainable: bool,
    /// Whether its reward counts in its group's baseline.
    pub in_baseline: bool,
}

impl Outcome {
    /// A job whose agent stopped for `stop_reason` and that was scored.
    pub fn completed(stop_reason: StopReason) -> Self {
        Self {
            status: Status::Completed,
            stop_reason,
            failure_class: None,
            stage: None,
            retryable: false,
            trainable: true,
            in_baseline: true,
        }
    }

    /// A job that failed in `stage` through no doing of the policy.
    pub fn failed(class: FailureClass, stage: Option<Stage>) -> Self {
        Self {
            status: Status::Failed,
            stop_reason: StopReason::Error,
            failure_class: Some(class),
            stage,
            retryable: class.is_retryable(),
            trainable: false,
            in_baseline: false,
        }
    }

    /// A job whose counted time ran out in `stage`.
    pub fn timed_out(stage: Option<Stage>) -> Self {
        Self { status: Status::Timeout, stop_reason: StopReason::Timeout, ..Self::ended_early(stage) }
    }

    /// A job that somebody cancelled while it was in `stage`.
    pub fn cancelled(stage: Option<Stage>) -> Self {
        Self { status: Status::Cancelled, stop_reason: StopReason::Cancelled, ..Self::ended_early(stage) }
    }

    fn ended_early(stage: Option<Stage>) -> Self {
        Self {
            status: Status::Timeout,
            stop_reason: StopReason::Timeout,
            failure_class: None,
            stage,
            retryable: true,
            trainable: false,
            in_baseline: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_on_the_wire_are_those_of_as_str() {
        for class in FailureClass::ALL {
            assert_eq!(serde_json::to_value(class).unwrap(), class.as_str());
        }
        for reason in StopReason::ALL {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
        }
    }

    #[test]
    fn only_completed_jobs_are_trained_on() {
        assert!(Outcome::completed(StopReason::MaxTurns).trainable);
        for class in FailureClass::ALL {
            let outcome = Outcome::failed(*class, Some(Stage::Run));
            assert!(!outcome.trainable && !outcome.in_baseline);
        }
        assert!(!Outcome::timed_out(None).trainable && !Outcome::cancelled(None).in_baseline);
    }
}
