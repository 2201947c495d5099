//! A started sandbox with the tools inside it.

use std::{any::Any, sync::Arc, time::Duration};

use async_trait::async_trait;
use prorl_core::{FailureClass, SandboxHandle};
use prorl_pipeline::{Prepared, StageError};
use prorl_sandbox::{
    Facts, FreezeError, Runtime, Sandbox, SandboxSpec,
    store::{ImageStore, Layer},
};
use prorl_tools::host::ToolClient;

/// A sandbox and the client of the tools inside it.
pub struct AgentSandbox {
    sandbox: Sandbox,
    tools: ToolClient,
}

impl AgentSandbox {
    /// Starts a sandbox.
    ///
    /// # Errors
    /// With the failure class of what went wrong.
    ///
    /// # Cancel safety
    /// Dropping it kills what was started.
    pub async fn start(runtime: &dyn Runtime, spec: &SandboxSpec) -> Result<Arc<Self>, StageError> {
        let started = runtime.start(spec).await;
        let mut sandbox = started.map_err(|err| StageError::new(err.failure_class(), &err))?;
        let channel = sandbox
            .take_channel()
            .ok_or_else(|| StageError::text(FailureClass::Internal, "a fresh sandbox has no channel"))?;
        Ok(Arc::new(Self { sandbox, tools: ToolClient::new(channel) }))
    }

    /// Returns the sandbox that a handler's own init stage made.
    ///
    /// # Errors
    /// When init made none.
    pub fn of(prepared: &Prepared) -> Result<&Self, StageError> {
        prepared
            .sandbox
            .as_ref()
            .and_then(|sandbox| sandbox.as_any().downcast_ref())
            .ok_or_else(|| StageError::text(FailureClass::Internal, "init made no sandbox"))
    }

    /// Runs work that needs the sandbox; fails at once when the sandbox dies meanwhile.
    ///
    /// # Errors
    /// That of the work, or of class `sandbox`.
    ///
    /// # Cancel safety
    /// As that of the work.
    pub async fn while_alive<T>(&self, work: impl Future<Output = Result<T, StageError>>) -> Result<T, StageError> {
        tokio::select! {
            biased;
            output = work => output,
            () = self.sandbox.wait_dead() => {
                Err(StageError::text(FailureClass::Sandbox, format!("sandbox {} died", self.sandbox.id())))
            }
        }
    }

    /// Makes a layer of what the sandbox has written, and ends it.
    ///
    /// # Errors
    /// See [`FreezeError`].
    ///
    /// # Cancel safety
    /// As that of [`Sandbox::freeze`].
    pub async fn freeze(&self, store: &ImageStore) -> Result<Layer, FreezeError> {
        self.sandbox.freeze(store).await
    }

    /// Returns what is known of the sandbox.
    pub fn facts(&self) -> &Facts {
        self.sandbox.facts()
    }

    /// Returns the client of the tools inside.
    pub fn tools(&self) -> &ToolClient {
        &self.tools
    }
}

#[async_trait]
impl SandboxHandle for AgentSandbox {
    fn name(&self) -> &str {
        self.sandbox.id()
    }

    async fn close(&self, grace: Duration) -> Result<(), String> {
        self.sandbox.shutdown(grace).await.map_err(|err| err.to_string())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
