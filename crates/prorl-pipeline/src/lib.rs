#![doc = include_str!("../README.md")]

mod conclude;
mod context;
mod drive;
mod handler;
mod job;
mod pipeline;
mod pool;
mod queue;
mod registry;
mod results;
mod shared;
mod timer;

pub use context::{JobContext, Progress};
pub use handler::{AgentHandler, Evaluation, Fallback, Prepared, RunOutput, StageError, Trajectory};
pub use job::{CancelReason, JobHandle, JobState};
pub use pipeline::{CancelAnswer, OnDisconnect, Pipeline, PipelineConfig, StopReport, SubmitError};
pub use pool::{Permit, StagePool};
pub use queue::{InProcessQueue, JobQueue, Ticket};
pub use registry::{Registry, RegistryError};
pub use results::{InMemoryResults, Lookup, ResultStore};
pub use shared::Shared;
pub use timer::{BudgetExceeded, PausableTimer};
