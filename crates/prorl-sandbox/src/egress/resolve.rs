//! Names to addresses.

use std::{
    fmt, io,
    net::{IpAddr, ToSocketAddrs as _},
    sync::Arc,
};

use async_trait::async_trait;
use tokio::sync::Semaphore;

/// Lookups at the same time, over all sandboxes that share a resolver: each holds a thread, and a name server that does not
/// answer holds it for long.
const MAX_LOOKUPS: usize = 64;

/// What knows the addresses of names.
#[async_trait]
pub trait Resolver: Send + Sync + fmt::Debug {
    /// Returns the addresses of a name, in the order in which they are to be tried.
    ///
    /// # Errors
    /// When there are none, or when this cannot be found out.
    ///
    /// # Cancel safety
    /// Dropping it may leave a question open, and nothing else.
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>>;
}

/// The system's own, with its `/etc/hosts` and its name servers.
#[derive(Debug)]
pub struct SystemResolver {
    places: Arc<Semaphore>,
}

impl Default for SystemResolver {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(MAX_LOOKUPS)) }
    }
}

#[async_trait]
impl Resolver for SystemResolver {
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        let place = Arc::clone(&self.places).acquire_owned().await.map_err(io::Error::other)?;
        let name = name.to_owned();
        let looked_up = tokio::task::spawn_blocking(move || {
            let _place = place; // the thread's, which outlives whoever waits for it
            (name.as_str(), 0).to_socket_addrs().map(|found| found.map(|address| address.ip()).collect())
        });
        looked_up.await.map_err(io::Error::other)?
    }
}
