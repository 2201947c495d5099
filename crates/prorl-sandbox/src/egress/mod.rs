//! A way out of a sandbox to hosts that are named, and to no others.
//!
//! A sandbox has no network but its own loopback interface. With [`SandboxSpec::proxy_port`](crate::SandboxSpec::proxy_port)
//! there is a socket in it that this side accepts on, and an [`Egress`] is an HTTP proxy there: a request inside comes out
//! here, is held against a list of hosts ([`Rules`]) and the address against what no sandbox is to reach, and is passed on.
//! There is no route to go around it. What is allowed can change while the sandbox stands: see [`Gate`].
//!
//! ```no_run
//! # async fn example(mut sandbox: prorl_sandbox::Sandbox) -> Result<(), Box<dyn std::error::Error>> {
//! use prorl_sandbox::egress::{Egress, EgressConfig, Gate, Rules};
//!
//! let gate = Gate::new(Some(Rules::parse(["pypi.example", "*.files.example"])?));
//! let listener = sandbox.take_proxy().ok_or("the spec has no proxy_port")?;
//! let egress = Egress::serve(listener, gate.clone(), EgressConfig::default())?;
//! // Here runs what needs them; then nothing is allowed any more.
//! gate.set(None);
//! # egress.end().await;
//! # Ok(())
//! # }
//! ```

mod address;
mod check;
mod dial;
mod gate;
mod host;
mod opening;
mod proxy;
mod refusal;
mod resolve;
mod rules;
mod traffic;
mod upstream;

use std::{io, net::TcpListener as StdListener, sync::Arc, time::Duration};

use tokio::{
    net::TcpListener,
    sync::{Semaphore, oneshot},
    task::JoinSet,
};

pub use gate::Gate;
pub use resolve::{Place, Resolver, SystemResolver};
pub use rules::{MAX_RULES, Rule, RuleError, Rules};
pub use upstream::Upstream;

use self::proxy::Terms;

/// Bytes of a request's or an answer's head at most.
const HEADER_BYTES: usize = 64 << 10;

/// How long nobody is accepted after this process ran out of something, such as open files.
const PAUSE: Duration = Duration::from_millis(100);

/// How an [`Egress`] works. A clone shares the resolver.
#[derive(Clone, Debug)]
pub struct EgressConfig {
    /// Hosts that may be at private addresses, such as an operator's own mirrors; a gate has to allow them too. A
    /// name lifts what is private. What is this machine's own (its addresses, loopback) is lifted only by the address
    /// itself or by `localhost`, and metadata services and link-local addresses by nothing: see
    /// [`check_private`](Self::check_private).
    pub private: Rules,
    /// The proxy that everything goes through. Names are then resolved there, and only the addresses that are named as
    /// such, or as `localhost`, are looked at here.
    pub upstream: Option<Upstream>,
    /// What knows the addresses of names.
    pub resolver: Arc<dyn Resolver>,
    /// Connections at the same time; more wait to be accepted.
    pub max_connections: usize,
    /// Connections at the same time for which a name is being looked up or that are being made. More wait for as long as
    /// [`connect_timeout`](Self::connect_timeout), and are then refused: what a resolver and a silent name server
    /// can be made to hold is this much for each sandbox.
    pub max_opening: usize,
    /// How long a request's head may take to arrive, and how long a connection waits for the next one.
    pub header_timeout: Duration,
    /// How long resolving and connecting may take together.
    pub connect_timeout: Duration,
    /// How long an answer may take to begin, and how long a connection may be silent.
    pub idle_timeout: Duration,
}

impl Default for EgressConfig {
    fn default() -> Self {
        Self {
            private: Rules::default(),
            upstream: None,
            resolver: Arc::new(SystemResolver::default()),
            max_connections: 64,
            max_opening: 8,
            header_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_mins(5),
        }
    }
}

/// A proxy that is served. Dropping it ends it and everything that passes through it.
#[derive(Debug)]
pub struct Egress {
    /// The task that accepts, which owns those that pass on.
    tasks: JoinSet<()>,
    stop: oneshot::Sender<()>,
}

impl Egress {
    /// Serves a proxy at a socket, which [`Sandbox::take_proxy`](crate::Sandbox::take_proxy) gave out. The caller is in a
    /// tokio runtime.
    ///
    /// # Errors
    /// When the socket cannot be watched.
    pub fn serve(listener: StdListener, gate: Gate, config: EgressConfig) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let (stop, stopped) = oneshot::channel();
        let mut tasks = JoinSet::new();
        let places = Arc::new(Semaphore::new(config.max_opening));
        tasks.spawn(accept(listener, Arc::new(Terms { gate, config, places }), stopped));
        Ok(Self { tasks, stop })
    }

    /// Ends it, and returns when nothing of it is left.
    ///
    /// # Cancel safety
    /// Dropping the future ends it all the same.
    pub async fn end(self) {
        let Self { mut tasks, stop } = self;
        drop(stop);
        while tasks.join_next().await.is_some() {}
    }
}

async fn accept(listener: TcpListener, terms: Arc<Terms>, mut stop: oneshot::Receiver<()>) {
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = &mut stop => break,
            Some(ended) = open.join_next(), if !open.is_empty() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "egress connection panicked");
                }
            }
            accepted = listener.accept(), if open.len() < terms.config.max_connections => match accepted {
                Ok((client, _)) => {
                    open.spawn(proxy::attend(client, Arc::clone(&terms)));
                }
                Err(error) => {
                    tracing::warn!(%error, "egress cannot accept");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
    open.shutdown().await;
}
