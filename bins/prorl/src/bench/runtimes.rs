//! What the figures are taken of.

use std::{sync::Arc, time::Duration};

use prorl_sandbox::{Image, Runtime, SandboxSpec, SingularityRuntime};

use crate::sandboxes::{SandboxConfig, Sandboxes};

/// How long a sandbox may take to start; far more than any takes, so that a loaded machine yields figures too.
const START_LIMIT: Duration = Duration::from_mins(1);

/// The runtimes of this machine, and the node that they start sandboxes on.
pub(super) struct Runtimes {
    /// Sandboxes of namespaces alone.
    pub(super) namespace: Arc<dyn Runtime>,
    /// Sandboxes of Apptainer, or why there are none.
    pub(super) singularity: Result<Arc<SingularityRuntime>, String>,
    sandboxes: Sandboxes,
}

impl Runtimes {
    /// Makes each runtime once. No other place here knows how.
    pub(super) fn make() -> anyhow::Result<Self> {
        let sandboxes = Sandboxes::open(SandboxConfig::default())?;
        let singularity = sandboxes.singularity().map_err(|error| format!("{error:#}"));
        Ok(Self { namespace: Arc::new(sandboxes.namespace()), singularity: singularity.map(Arc::new), sandboxes })
    }

    /// Returns the guest's program.
    pub(super) fn guest(&self) -> &std::path::Path {
        self.sandboxes.guest.path()
    }

    /// Describes the sandbox that is measured: what a handler gets by default.
    pub(super) fn spec(&self, image: Image) -> SandboxSpec {
        SandboxSpec { image, start_timeout: START_LIMIT, ..SandboxSpec::new(self.sandboxes.guest.path()) }
    }
}
