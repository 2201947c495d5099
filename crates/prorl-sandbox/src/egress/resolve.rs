//! Names to addresses.

use std::{
    fmt, io,
    net::{IpAddr, ToSocketAddrs as _},
    sync::Arc,
};

use async_trait::async_trait;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Lookups at the same time, over all sandboxes that share a resolver: each holds a thread, and a name server that does not
/// answer holds it for long. One sandbox has [places](Place) for a small part of them, and other blocking work finds as many
/// threads again.
const MAX_LOOKUPS: usize = 256;

/// The right of one sandbox to look up a name or to connect. It has few, and while one is held it has one fewer. A clone holds
/// the same one.
#[derive(Clone, Debug)]
pub struct Place(#[expect(dead_code, reason = "dropping it matters")] Arc<OwnedSemaphorePermit>);

impl Place {
    pub(super) fn new(permit: OwnedSemaphorePermit) -> Self {
        Self(Arc::new(permit))
    }
}

/// What knows the addresses of names.
#[async_trait]
pub trait Resolver: Send + Sync + fmt::Debug {
    /// Returns the addresses of a name, in the order in which they are to be tried.
    ///
    /// What goes on after the future was dropped keeps a clone of the place for as long, so that a sandbox whose name server
    /// is silent waits for its own questions, and takes nothing from others.
    ///
    /// # Errors
    /// When there are none, or when this cannot be found out.
    ///
    /// # Cancel safety
    /// Dropping it may leave a question open, and nothing else.
    async fn resolve(&self, name: &str, place: &Place) -> io::Result<Vec<IpAddr>>;
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
    async fn resolve(&self, name: &str, place: &Place) -> io::Result<Vec<IpAddr>> {
        let thread = Arc::clone(&self.places).acquire_owned().await.map_err(io::Error::other)?;
        let (name, place) = (name.to_owned(), place.clone());
        let looked_up = tokio::task::spawn_blocking(move || {
            let _held = (thread, place); // by the thread, which outlives whoever waits for it
            (name.as_str(), 0).to_socket_addrs().map(|found| found.map(|address| address.ip()).collect())
        });
        looked_up.await.map_err(io::Error::other)?
    }
}
