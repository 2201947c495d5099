//! What `GET /status` says (API section 1.4).

use serde::{Deserialize, Serialize};

use crate::WeightVersion;

/// Whether the service takes and runs jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServiceState {
    /// Takes and runs jobs.
    Running,
    /// Takes none.
    Stopped,
    /// Takes none and ends those it has.
    Draining,
}

/// One stage's pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStatus {
    /// Jobs waiting for a worker.
    pub queued: usize,
    /// Jobs inside the stage.
    pub active: usize,
    /// Workers.
    pub workers: usize,
}

/// The three pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stages {
    /// Init.
    pub init: StageStatus,
    /// Run.
    pub run: StageStatus,
    /// Eval.
    pub eval: StageStatus,
}

/// Jobs since the service started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCounts {
    /// Accepted.
    pub accepted: u64,
    /// Accepted and not ended.
    pub active: u64,
    /// Ended as completed.
    pub completed: u64,
    /// Ended as failed.
    pub failed: u64,
    /// Ended by their limit.
    pub timeout: u64,
    /// Ended by cancel.
    pub cancelled: u64,
}

/// One LLM server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendStatus {
    /// Its address.
    pub address: String,
    /// The dialect it speaks.
    pub kind: String,
    /// The model it serves, when known.
    pub model: Option<String>,
    /// The checkpoint it serves.
    pub weight_version: WeightVersion,
    /// Whether jobs are sent to it.
    pub healthy: bool,
    /// Jobs on it now.
    pub active: usize,
    /// Jobs ever assigned to it.
    pub assigned: u64,
    /// Why it is not healthy.
    pub reason: Option<String>,
}

/// Sandboxes since the service started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxCounts {
    /// Alive now.
    pub active: usize,
    /// Started.
    pub started: u64,
    /// Failed to start.
    pub failed: u64,
}

/// A job that waits, and for what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stuck {
    /// The job.
    pub job_id: String,
    /// The stage it is in or before.
    pub stage: String,
    /// What it waits for.
    pub waiting_for: String,
    /// For how long, seconds.
    pub seconds: f64,
}

/// The whole answer. The last seven fields are the original server's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the wire's")]
pub struct ServiceStatus {
    pub running: bool,
    pub state: ServiceState,
    /// Seconds.
    pub uptime: f64,
    pub version: String,
    pub stages: Stages,
    pub jobs: JobCounts,
    pub backends: Vec<BackendStatus>,
    pub sandboxes: SandboxCounts,
    pub stuck: Vec<Stuck>,
    pub init_queue: usize,
    pub run_queue: usize,
    pub eval_queue: usize,
    pub active_init: usize,
    pub active_run: usize,
    pub active_eval: usize,
    pub total: u64,
}
