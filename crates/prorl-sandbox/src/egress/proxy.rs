//! One connection of a sandbox: requests and their answers, then perhaps a tunnel.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use hyper::{
    Method, Request, Response, StatusCode, Uri, Version,
    body::Incoming,
    header::{
        CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
    },
    server::conn::http1,
    service::service_fn,
    upgrade::{self, OnUpgrade},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf, copy_bidirectional_with_sizes},
    net::TcpStream,
};

use super::{
    EgressConfig, Gate, HEADER_BYTES, dial,
    gate::{Passage, Passing},
    host::Destination,
    refusal::{Content, Refusal, Relayed},
};

/// Bytes that a tunnel holds in each direction.
const TUNNEL_BYTES: usize = 64 << 10;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Headers that are for the next hop alone. The lengths of bodies are not among them: both ends get those of what they really get.
const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    PROXY_CONNECTION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Attends to a connection until either side ends it, it is silent for too long, or the gate shuts on it.
///
/// # Cancel safety
/// Dropping the future closes both sides.
pub(super) async fn attend(client: TcpStream, gate: Gate, config: Arc<EgressConfig>) {
    let _ = client.set_nodelay(true);
    let traffic = Arc::new(AtomicU64::new(0));
    let counted = Counted { stream: client, traffic: Arc::clone(&traffic) };
    let passing = Passing::default();
    let idle = silence(&traffic, config.idle_timeout);
    let desk =
        Desk { gate: gate.clone(), config: Arc::clone(&config), passing: passing.clone(), tunnel: Mutex::new(None) };
    tokio::select! {
        biased;
        () = gate.shuts_on(&passing) => {}
        () = idle => tracing::debug!("egress connection was silent for too long"),
        () = desk.serve(counted) => {}
    }
}

/// Waits until nothing has passed for a while: at least this long, at most twice.
async fn silence(traffic: &AtomicU64, limit: Duration) {
    let mut seen = traffic.load(Ordering::Relaxed);
    loop {
        tokio::time::sleep(limit).await;
        let now = traffic.load(Ordering::Relaxed);
        if now == seen {
            return;
        }
        seen = now;
    }
}

/// What one connection's requests are answered with.
struct Desk {
    gate: Gate,
    config: Arc<EgressConfig>,
    passing: Passing,
    /// What the connection becomes after the answer that is being sent.
    tunnel: Mutex<Option<Tunnel>>,
}

impl Desk {
    async fn serve(&self, client: Counted) {
        let service = service_fn(|request| async {
            let answered = match *request.method() {
                Method::CONNECT => self.connect(request).await,
                _ => self.forward(request).await,
            };
            Ok::<_, Infallible>(answered.unwrap_or_else(|refusal| {
                tracing::debug!(%refusal, "egress refused");
                refusal.response()
            }))
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.config.header_timeout)
            .max_buf_size(HEADER_BYTES)
            .max_header_size(HEADER_BYTES)
            .serve_connection(TokioIo::new(client), service)
            .with_upgrades()
            .await;
        let tunnel = self.tunnel.lock().take();
        match (served, tunnel) {
            (Ok(()), Some(tunnel)) => tunnel.run().await,
            (Ok(()), None) => {}
            (Err(error), _) => tracing::debug!(%error, "egress connection broke"),
        }
    }

    /// Notes where a request is to go and asks the rules.
    fn admit(&self, to: Destination) -> Result<Passage, Refusal> {
        let passage = self.passing.to(to.clone());
        let rules = self.gate.rules();
        if rules.allows(&passage) {
            return Ok(passage);
        }
        Err(if rules.is_empty() { Refusal::NothingAllowed { to } } else { Refusal::NotAllowed { to, rules } })
    }

    async fn connect(&self, mut request: Request<Incoming>) -> Result<Response<Content>, Refusal> {
        let headers = request.headers();
        if headers.contains_key(CONTENT_LENGTH) || headers.contains_key(TRANSFER_ENCODING) {
            return Err(Refusal::Malformed("CONNECT has no body".to_owned()));
        }
        let authority = request.uri().authority().filter(|_| request.uri().scheme().is_none());
        let authority = authority.ok_or_else(|| Refusal::Malformed("CONNECT takes HOST:PORT".to_owned()))?;
        let to = Destination::parse(authority.as_str(), None).map_err(Refusal::Malformed)?;
        let to = self.admit(to)?;
        let stream = self.config.dial(&to).await?;
        let outside: Box<dyn Duplex> = match self.config.upstream {
            None => Box::new(stream),
            Some(_) => Box::new(dial::through(stream, &to, self.config.connect_timeout).await?),
        };
        let upgrading = upgrade::on(&mut request);
        *self.tunnel.lock() = Some(Tunnel { upgrading, outside, _passage: to });
        Ok(Response::new(Content::Text(None)))
    }

    async fn forward(&self, mut request: Request<Incoming>) -> Result<Response<Content>, Refusal> {
        let uri = request.uri();
        let authority = match (uri.scheme_str(), uri.authority()) {
            (Some("http"), Some(authority)) => authority,
            (Some(scheme), _) => {
                let why = format!("this proxy takes http:// URLs, and CONNECT for all else; found {scheme}://");
                return Err(Refusal::Malformed(why));
            }
            (None, _) => {
                let why = "this is a proxy: it takes whole http:// URLs and CONNECT, and serves nothing itself";
                return Err(Refusal::Malformed(why.to_owned()));
            }
        };
        let to = Destination::parse(authority.as_str(), Some(80)).map_err(Refusal::Malformed)?;
        let to = self.admit(to)?;
        let host = if to.port == 80 { to.host.to_string() } else { to.to_string() };
        let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
        let path = format!("{}{query}", uri.path());
        let target = match self.config.upstream {
            None => Uri::try_from(path),
            Some(_) => Uri::try_from(format!("http://{host}{path}")),
        };
        let named = target.ok().zip(HeaderValue::try_from(host).ok());
        let (target, host) = named.ok_or_else(|| Refusal::Malformed("its URL cannot be passed on".to_owned()))?;
        *request.uri_mut() = target;
        *request.version_mut() = Version::HTTP_11;
        let headers = request.headers_mut();
        drop_hop_by_hop(headers);
        // Its body is framed anew, by what of it really comes, and asked for here.
        headers.remove(CONTENT_LENGTH);
        headers.remove(EXPECT);
        headers.insert(HOST, host);
        let stream = self.config.dial(&to).await?;
        let (mut response, connection) = dial::ask(stream, request, &to, self.config.idle_timeout).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let why = "it changed the protocol, which nobody asked for".to_owned();
            return Err(Refusal::Unreachable { to: Destination::clone(&to), why });
        }
        drop_hop_by_hop(response.headers_mut());
        *response.version_mut() = Version::HTTP_11;
        Ok(response.map(|body| Content::Relayed(Relayed { body, _connection: connection, _passage: to })))
    }
}

fn drop_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// A connection to the outside, of whichever kind.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection that is no longer requests and answers.
struct Tunnel {
    upgrading: OnUpgrade,
    outside: Box<dyn Duplex>,
    _passage: Passage,
}

impl Tunnel {
    async fn run(mut self) {
        let passed = async {
            let upgraded = self.upgrading.await.map_err(io::Error::other)?;
            let parts = upgraded.downcast::<TokioIo<Counted>>().map_err(|_other| io::ErrorKind::Unsupported)?;
            let mut client = parts.io.into_inner();
            // What came right behind the request.
            self.outside.write_all(&parts.read_buf).await?;
            copy_bidirectional_with_sizes(&mut client, &mut self.outside, TUNNEL_BYTES, TUNNEL_BYTES).await
        };
        if let Err(error) = passed.await {
            tracing::debug!(%error, "egress tunnel broke");
        }
    }
}

/// The sandbox's side of a connection. Whatever passes, passes here, and is counted.
struct Counted {
    stream: TcpStream,
    traffic: Arc<AtomicU64>,
}

impl Counted {
    fn count(&self, n_bytes: usize) {
        self.traffic.fetch_add(n_bytes as u64, Ordering::Relaxed);
    }
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        self.count(into.filled().len() - before);
        read
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(n_bytes)) = &written {
            self.count(*n_bytes);
        }
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        if let Poll::Ready(Ok(n_bytes)) = &written {
            self.count(*n_bytes);
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
