#![doc = include_str!("../README.md")]

pub mod agent;
pub mod egress;
pub mod environment;
mod images;
pub mod limits;
pub mod math;
pub mod prepare;
pub mod prompt;
pub mod runtimes;
pub mod sandbox;
pub mod score;

pub use agent::Agent;
pub use egress::EgressPolicy;
pub use environment::{CallLimits, Environment, PathPolicy};
pub use limits::SandboxDefaults;
pub use math::Math;
pub use runtimes::Runtimes;
pub use sandbox::AgentSandbox;
