//! A started sandbox with the tools inside it.

use std::{any::Any, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use prorl_core::{FailureClass, SandboxHandle, Stage};
use prorl_pipeline::{Prepared, StageError};
use prorl_sandbox::{
    Exceeded, Facts, FreezeError, Runtime, Sandbox, SandboxSpec,
    egress::{Egress, Gate},
    store::{ImageStore, Layer},
};
use prorl_tools::host::ToolClient;
use tokio::time::Instant;

use crate::egress::{PROXY_PORT, Way};

/// A sandbox, the client of the tools inside it, and its way out.
pub struct AgentSandbox {
    sandbox: Sandbox,
    tools: ToolClient,
    wall: Option<Duration>,
    started: Instant,
    /// What it may reach in which stage, and the gate that is set to that; nothing for one that reaches nothing.
    way: Option<(Way, Gate)>,
    /// What passes its requests on, until it is closed.
    egress: Mutex<Option<Egress>>,
}

impl AgentSandbox {
    /// Starts a sandbox, with a way out if there is to be one. It is shut until [`enter`](Self::enter) names a stage.
    ///
    /// # Errors
    /// With the failure class of what went wrong.
    ///
    /// # Cancel safety
    /// Dropping it kills what was started.
    pub async fn start(runtime: &dyn Runtime, spec: &SandboxSpec, way: Option<Way>) -> Result<Arc<Self>, StageError> {
        let proxy_port = way.as_ref().map(|_| PROXY_PORT);
        let started = runtime.start(&SandboxSpec { proxy_port, ..spec.clone() }).await;
        let mut sandbox = started.map_err(|err| StageError::new(err.failure_class(), &err))?;
        let lacks = |what: &str| StageError::text(FailureClass::Internal, format!("a fresh sandbox has no {what}"));
        let channel = sandbox.take_channel().ok_or_else(|| lacks("channel"))?;
        let (way, egress) = match way {
            None => (None, None),
            Some(way) => {
                let (gate, listener) =
                    (Gate::new(None), sandbox.take_proxy().ok_or_else(|| lacks("listening socket"))?);
                let served = Egress::serve(listener, gate.clone(), way.config.clone());
                let egress = served.map_err(|err| StageError::new(FailureClass::Resource, &err))?;
                (Some((way, gate)), Some(egress))
            }
        };
        let (wall, started) = (spec.limits.wall, Instant::now());
        let (tools, egress) = (ToolClient::new(channel), Mutex::new(egress));
        Ok(Arc::new(Self { sandbox, tools, wall, started, way, egress }))
    }

    /// Lets it reach what a stage of its job may reach, or nothing. What is open and may no longer be ends.
    ///
    /// A handler enters a stage when what runs inside is that stage's. [`prepare::sandbox`](crate::prepare::sandbox) does so
    /// for a setup, and leaves it shut.
    pub fn enter(&self, stage: Option<Stage>) {
        if let Some((way, gate)) = &self.way {
            way.open(gate, stage);
        }
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
        self.hang_up().await;
        self.sandbox.freeze(store).await
    }

    /// Ends its way out.
    async fn hang_up(&self) {
        let egress = self.egress.lock().take();
        if let Some(egress) = egress {
            egress.end().await;
        }
    }

    /// Returns what is known of the sandbox.
    pub fn facts(&self) -> &Facts {
        self.sandbox.facts()
    }

    /// Returns which limits were exceeded since this was last asked: to be told with the result of what ran meanwhile, which is
    /// `output`.
    pub fn take_exceeded(&self, output: &str) -> Vec<Exceeded> {
        self.sandbox.take_exceeded_after(output)
    }

    /// Returns how long its processes may still run; nothing where there is no limit.
    pub fn wall_left(&self) -> Option<Duration> {
        self.wall.map(|wall| wall.saturating_sub(self.started.elapsed()))
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
        self.hang_up().await;
        self.sandbox.shutdown(grace).await.map_err(|err| err.to_string())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
