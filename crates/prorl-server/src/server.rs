//! The server: a listener, and a task for each of its connections.

use std::{io, net::SocketAddr};

use axum::Router;
use hyper::rt::Executor;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use prorl_llm::pool::Pool;
use prorl_pipeline::Pipeline;
use tokio::{
    task::{JoinError, JoinSet},
    time::{Duration, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{AppState, Listen, ServerConfig, listen::Listener, router, stream::Stream};

/// How long a client may take to send a request's head, and a kept connection may be idle. Longer than the idle time of
/// common client pools (15 to 90 s), so that it is they who close and no request meets a connection that is just closing.
const HEAD_TIMEOUT: Duration = Duration::from_mins(2);

/// How often an HTTP/2 peer is asked whether it is still there, and how long it may take to say so.
const H2_PING: Duration = Duration::from_secs(30);

/// How many requests one HTTP/2 connection may have open. Hyper's default of 200 would let the jobs of a trainer wait
/// unseen that keeps a whole batch on one connection.
const H2_STREAMS: u32 = 65_536;

/// How long what a client sent before it left may still be worked on. A request that waits for a job ends then.
const HANG_UP_GRACE: Duration = Duration::from_millis(500);

/// The rest after a failed accept (out of descriptors, say), so that it does not become a busy loop.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// Why the server could not start or did not end as it should.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address can be reached from elsewhere and nothing protects it.
    #[error("{0} can be reached from other machines: give a token, or allow it without one (--insecure-no-auth)")]
    NoToken(Listen),
    /// The token is empty, so that everybody has it.
    #[error("the token is empty")]
    EmptyToken,
    /// The address cannot be had.
    #[error("failed to listen on {listen}")]
    Bind {
        /// Where.
        listen: Listen,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Jobs had not ended when the grace was over.
    #[error("jobs had not ended {grace:?} after the stop")]
    JobsLeft {
        /// The grace.
        grace: Duration,
    },
}

/// A bound server that does not answer yet.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    local: Listen,
    state: AppState,
}

impl Server {
    /// Binds the listener. Connections wait in the backlog until [`serve`](Self::serve) is called.
    ///
    /// A socket file that a dead server left is replaced; one on which somebody listens is not touched.
    ///
    /// # Errors
    /// When the address cannot be had, or would be open to other machines without a token.
    pub async fn bind(listen: Listen, config: ServerConfig, pipeline: Pipeline, pool: Pool) -> Result<Self, Error> {
        match &config.token {
            Some(token) if token.expose().trim().is_empty() => return Err(Error::EmptyToken),
            None if !listen.is_loopback() && !listen.is_unix() && !config.insecure_no_auth => {
                return Err(Error::NoToken(listen));
            }
            _ => {}
        }
        let failed = |source| Error::Bind { listen: listen.clone(), source };
        let listener = Listener::bind(&listen).await.map_err(failed)?;
        let local = listener.local().map_err(failed)?;
        Ok(Self { listener, local, state: AppState::new(config, pipeline, pool) })
    }

    /// Returns the address, with the port that the system chose; `None` on a socket file.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.local {
            Listen::Tcp(address) => Some(*address),
            Listen::Unix(_) => None,
        }
    }

    /// Returns the address as clients write it: `http://ADDR:PORT` or `unix:PATH`.
    pub fn address(&self) -> String {
        match &self.local {
            Listen::Tcp(address) => format!("http://{address}"),
            unix @ Listen::Unix(_) => unix.to_string(),
        }
    }

    /// Returns what the endpoints reach.
    pub fn state(&self) -> &AppState {
        &self.state
    }

    /// Answers requests until `stop` is cancelled.
    ///
    /// Then nothing is accepted any more, the pipeline is stopped, and clients that wait get their cancelled results. What
    /// has not ended after `stop_grace` is cut off. No task of the server is left when this returns; the pipeline's own
    /// are ended by [`Pipeline::close`].
    ///
    /// # Errors
    /// [`Error::JobsLeft`] when the pipeline took longer than the grace.
    ///
    /// # Cancel safety
    /// Dropping it closes the listener and every connection at once; jobs that clients waited for are cancelled with them.
    pub async fn serve(self, stop: CancellationToken) -> Result<(), Error> {
        let Self { listener, local, state } = self;
        tracing::info!(listen = %local, "serving");
        let app = router(state.clone());
        let leave = CancellationToken::new();
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(ended) = connections.join_next() => report(ended),
                accepted = listener.accept() => match accepted {
                    Ok(stream) => {
                        connections.spawn(connection(stream, app.clone(), state.clone(), leave.clone()));
                    }
                    Err(err) => {
                        tracing::warn!(error = %err, "accept failed");
                        stop.run_until_cancelled(sleep(ACCEPT_REST)).await;
                    }
                },
            }
        }
        drop(listener); // The socket file goes with it.

        let grace = state.config().stop_grace;
        let mut jobs_ended = false;
        let ending = async {
            state.pipeline().stop().await;
            jobs_ended = true;
            // Only now: a connection that is asked to leave while it is idle could not fetch its job's result any more.
            leave.cancel();
            while let Some(ended) = connections.join_next().await {
                report(ended);
            }
        };
        if timeout(grace, ending).await.is_err() {
            tracing::warn!(connections = connections.len(), jobs_ended, "cut off what has not ended");
        }
        connections.shutdown().await;
        state.close().await;
        tracing::info!(listen = %local, "served");
        if jobs_ended { Ok(()) } else { Err(Error::JobsLeft { grace }) }
    }
}

fn report(ended: Result<(), JoinError>) {
    if let Err(err) = ended
        && err.is_panic()
    {
        tracing::error!(error = %err, "a connection panicked");
    }
}

/// Gives the tasks of HTTP/2 streams an owner.
#[derive(Clone)]
struct Streams(AppState);

impl<F> Executor<F> for Streams
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, stream: F) {
        self.0.spawn(stream);
    }
}

/// Serves one connection: HTTP/1.1, or HTTP/2 when the client begins with its preface.
async fn connection(stream: Stream, app: Router, state: AppState, leave: CancellationToken) {
    let mut http = auto::Builder::new(Streams(state));
    http.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    http.http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(H2_PING)
        .keep_alive_timeout(H2_PING)
        .max_concurrent_streams(H2_STREAMS);
    let serving = http.serve_connection(TokioIo::new(stream.clone()), TowerToHyperService::new(app));
    tokio::pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = leave.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
        // The requests of a client that has left end with this future.
        () = stream.hung_up() => timeout(HANG_UP_GRACE, serving).await.unwrap_or(Ok(())),
    };
    if let Err(err) = ended {
        tracing::debug!(error = %err, "connection broke");
    }
}
