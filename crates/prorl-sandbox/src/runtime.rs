use async_trait::async_trait;

use crate::{Sandbox, SandboxError, SandboxSpec};

/// A kind of sandbox: something that starts what a [`SandboxSpec`] describes.
#[async_trait]
pub trait Runtime: Send + Sync {
    /// Returns the runtime's name for logs and `/status`, such as `namespace`.
    fn name(&self) -> &str;

    /// Starts a sandbox and waits for its guest's hello.
    ///
    /// # Errors
    /// Whatever keeps the sandbox from standing, by name; nothing of it is left then. See [`SandboxError`].
    ///
    /// # Cancel safety
    /// Dropping the future kills what was started so far.
    async fn start(&self, spec: &SandboxSpec) -> Result<Sandbox, SandboxError>;
}
