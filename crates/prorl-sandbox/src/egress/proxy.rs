//! One connection of a sandbox: requests and their answers, then perhaps a tunnel.

use std::{convert::Infallible, io, sync::Arc};

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
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, copy_bidirectional_with_sizes},
    net::TcpStream,
    sync::Semaphore,
    time::timeout,
};

use super::{
    EgressConfig, Gate, HEADER_BYTES, Place, dial,
    gate::{Passage, Passing},
    host::Destination,
    opening,
    refusal::{Content, Refusal, Relayed},
    traffic::{Noted, Traffic},
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

/// What holds for every connection of one sandbox.
pub(super) struct Terms {
    pub(super) gate: Gate,
    pub(super) config: EgressConfig,
    /// Those for what is being looked up or connected to.
    pub(super) places: Arc<Semaphore>,
}

/// Attends to a connection until either side ends it, it is silent for too long, or the gate shuts on it.
///
/// # Cancel safety
/// Dropping the future closes both sides.
pub(super) async fn attend(client: TcpStream, terms: Arc<Terms>) {
    let _ = client.set_nodelay(true);
    let traffic = Traffic::begin();
    let passing = Passing::default();
    let idle = traffic.ceases(terms.config.idle_timeout);
    let desk = Desk {
        terms: Arc::clone(&terms),
        passing: passing.clone(),
        traffic: traffic.clone(),
        tunnel: Mutex::new(None),
    };
    tokio::select! {
        biased;
        () = terms.gate.shuts_on(&passing) => {}
        () = idle => tracing::debug!("egress connection was silent for too long"),
        () = desk.receive(client) => {}
    }
}

/// What one connection's requests are answered with.
struct Desk {
    terms: Arc<Terms>,
    passing: Passing,
    traffic: Traffic,
    /// What the connection becomes after the answer that is being sent.
    tunnel: Mutex<Option<Tunnel>>,
}

impl Desk {
    /// Serves a connection, unless it begins with what gets no word from the parser of requests.
    async fn receive(&self, client: TcpStream) {
        let looked = timeout(self.terms.config.header_timeout, opening::look_at(&client));
        match looked.await {
            Ok(Ok(())) => self.serve(Noted { stream: client, traffic: self.traffic.clone() }).await,
            Ok(Err(refusal)) => {
                tracing::debug!(%refusal, "egress refused");
                opening::refuse(client, &refusal).await;
            }
            Err(_elapsed) => tracing::debug!("egress connection asked for nothing"),
        }
    }

    async fn serve(&self, client: Noted) {
        let service = service_fn(|request| async {
            let _work = self.traffic.work();
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
            .header_read_timeout(self.terms.config.header_timeout)
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
        let rules = self.terms.gate.rules();
        if rules.allows(&passage) {
            return Ok(passage);
        }
        Err(if rules.is_empty() { Refusal::NothingAllowed { to, rules } } else { Refusal::NotAllowed { to, rules } })
    }

    /// Waits for one of the sandbox's places, and not for ever.
    async fn place(&self, to: &Destination) -> Result<Place, Refusal> {
        let EgressConfig { connect_timeout: waited, max_opening: n_places, .. } = self.terms.config;
        match timeout(waited, Arc::clone(&self.terms.places).acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Place::new(permit)),
            Ok(Err(_)) | Err(_) => Err(Refusal::Busy { to: to.clone(), waited, n_places }),
        }
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
        let place = self.place(&to).await?;
        let stream = self.terms.config.dial(&to, &place).await?;
        let outside: Box<dyn Duplex> = match &self.terms.config.upstream {
            None => Box::new(stream),
            Some(upstream) => {
                let limit = self.terms.config.connect_timeout;
                Box::new(dial::through(stream, &to, (upstream, limit)).await?)
            }
        };
        let upgrading = upgrade::on(&mut request);
        *self.tunnel.lock() = Some(Tunnel { upgrading, outside, _passage: to });
        Ok(Response::new(Content::Text(None)))
    }

    async fn forward(&self, mut request: Request<Incoming>) -> Result<Response<Content>, Refusal> {
        if request.method() == Method::TRACE {
            // A proxy before this one could show what it is told, with the password.
            return Err(Refusal::Malformed("TRACE is not passed on".to_owned()));
        }
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
        let target = match self.terms.config.upstream {
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
        if let Some(credentials) = self.terms.config.upstream.as_ref().and_then(|upstream| upstream.credentials.clone())
        {
            headers.insert(PROXY_AUTHORIZATION, credentials);
        }
        let place = self.place(&to).await?;
        let stream = self.terms.config.dial(&to, &place).await?;
        drop(place);
        let (mut response, connection) = dial::ask(stream, request, &to, self.terms.config.idle_timeout).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let why = "it changed the protocol, which nobody asked for".to_owned();
            return Err(Refusal::Unreachable { to: Destination::clone(&to), why });
        }
        if response.status() == StatusCode::PROXY_AUTHENTICATION_REQUIRED && self.terms.config.upstream.is_some() {
            // It asks this side, and not the program inside.
            return Err(dial::stranger(&to));
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
            let parts = upgraded.downcast::<TokioIo<Noted>>().map_err(|_other| io::ErrorKind::Unsupported)?;
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
