//! What the pipeline must be able to do with a sandbox that it cannot name.

use std::{any::Any, time::Duration};

use async_trait::async_trait;

/// A started sandbox as the pipeline sees it: something with a name that must be gone in the end.
///
/// Dropping the last reference kills it too; [`close`](Self::close) waits and proves.
#[async_trait]
pub trait SandboxHandle: Send + Sync + 'static {
    /// Returns the sandbox's name for logs and `/status`.
    fn name(&self) -> &str;

    /// Ends everything inside, waits until it is proven gone, and frees what it held. Calling it twice is harmless.
    ///
    /// # Errors
    /// When something is left after `grace` and a kill. The text says what.
    ///
    /// # Cancel safety
    /// A dropped call has at least sent the kill once the handle itself is dropped.
    async fn close(&self, grace: Duration) -> Result<(), String>;

    /// Returns self, for the handler that made it and knows its type.
    fn as_any(&self) -> &dyn Any;
}
