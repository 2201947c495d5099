#![doc = include_str!("../README.md")]

pub mod deadline;
pub mod frame;
pub mod hello;
pub mod id;
pub mod message;
pub mod network;
pub mod outcome;
pub mod redact;
pub mod request;
pub mod resource;
pub mod result;
pub mod status;
pub mod token;

pub use deadline::Deadline;
pub use id::{GroupId, InvalidId, JobId, WeightVersion};
pub use message::{Content, Message, Part, Role, ToolCall};
pub use network::{NetworkChoice, Reach};
pub use outcome::{CriticalError, FailureClass, Outcome, Stage, Status, StopReason};
pub use redact::Secret;
pub use request::{Instance, JobRequest, Malformed, SamplingParams};
pub use resource::SandboxHandle;
pub use result::{JobResult, Timing, Usage};
pub use token::{Completion, LogprobError, TokenId, Trace, TraceError};
