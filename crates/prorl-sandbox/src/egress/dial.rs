//! Connections to the outside, to addresses that were looked at.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    time::Duration,
};

use hyper::{
    Method, Request, StatusCode, Uri,
    body::Incoming,
    client::conn::http1,
    header::{HOST, HeaderValue, PROXY_AUTHORIZATION},
    upgrade::{self, Upgraded},
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    time::{Instant, timeout, timeout_at},
};

use super::{
    EgressConfig, HEADER_BYTES, Place, Upstream,
    address::{Kind, Own},
    host::{Destination, METADATA},
    refusal::{Content, Refusal},
};

/// Addresses of one name that are tried at most.
const MAX_ADDRESSES: usize = 8;

impl EgressConfig {
    /// Connects to a destination that the rules allow, or to the proxy that knows the way to it.
    ///
    /// Its name is resolved once, and the connection goes to one of the addresses that were looked at: a name that changes its
    /// mind meanwhile changes nothing.
    ///
    /// # Cancel safety
    /// Dropping the future ends the attempt; a lookup that goes on keeps the place.
    pub(super) async fn dial(&self, to: &Destination, place: &Place) -> Result<TcpStream, Refusal> {
        if to.host.is_metadata() {
            return Err(Refusal::Name { to: to.clone(), what: METADATA });
        }
        let deadline = Instant::now() + self.connect_timeout;
        let slow = |_elapsed| Refusal::Slow { to: to.clone(), waited: self.connect_timeout };
        let (addresses, port) = match &self.upstream {
            None => (timeout_at(deadline, self.addresses(to, place)).await.map_err(slow)??, to.port),
            Some(upstream) => {
                if let Some(known) = to.host.known_addresses() {
                    self.look_at(to, known)?;
                }
                let next = &upstream.at;
                let found = timeout_at(deadline, self.resolve(next, place)).await.map_err(slow)?;
                (found.map_err(|source| unreachable(to, &format!("proxy {next}: {source}")))?, next.port)
            }
        };
        let mut last = None;
        let n_tried = addresses.len().min(MAX_ADDRESSES);
        for (address_idx, address) in addresses.into_iter().take(MAX_ADDRESSES).enumerate() {
            // One that does not answer leaves time for those after it.
            let n_left = u32::try_from(n_tried - address_idx).unwrap_or(1);
            let share = deadline.saturating_duration_since(Instant::now()) / n_left;
            match timeout(share, TcpStream::connect(SocketAddr::new(address, port))).await {
                Ok(Ok(stream)) => {
                    // Small messages are not held back; both ends have asked for what they get.
                    let _ = stream.set_nodelay(true);
                    return Ok(stream);
                }
                Ok(Err(error)) => last = Some(error),
                Err(_elapsed) => {}
            }
        }
        Err(match last {
            Some(error) => unreachable(to, &error.to_string()),
            None => Refusal::Slow { to: to.clone(), waited: self.connect_timeout },
        })
    }

    /// Returns the addresses of a destination that may be connected to.
    async fn addresses(&self, to: &Destination, place: &Place) -> Result<Vec<IpAddr>, Refusal> {
        let found = self.resolve(to, place).await.map_err(|source| Refusal::Unresolved { to: to.clone(), source })?;
        self.look_at(to, found)
    }

    async fn resolve(&self, to: &Destination, place: &Place) -> io::Result<Vec<IpAddr>> {
        let found = match to.host.known_addresses() {
            Some(known) => known,
            None => self.resolver.resolve(&to.host.to_string(), place).await?,
        };
        if found.is_empty() { Err(io::Error::new(io::ErrorKind::NotFound, "no such name")) } else { Ok(found) }
    }

    /// Returns those of the addresses that may be connected to.
    fn look_at(&self, to: &Destination, found: Vec<IpAddr>) -> Result<Vec<IpAddr>, Refusal> {
        let own = Own::read().map_err(|error| unreachable(to, &format!("this machine's addresses: {error}")))?;
        let (mut passed, mut refused) = (Vec::new(), None);
        for address in found {
            // The address that was looked at is the address that is connected to.
            let address = address.to_canonical();
            match self.refuses(to, address, own.kind(address)) {
                None => passed.push(address),
                Some(what) => refused = refused.or(Some((address, what))),
            }
        }
        match refused {
            Some((address, what)) if passed.is_empty() => Err(Refusal::Address { to: to.clone(), address, what }),
            Some(_) | None => Ok(passed),
        }
    }

    /// Returns what is wrong with an address, unless the operator has lifted it.
    pub(super) fn refuses(&self, to: &Destination, address: IpAddr, kind: Kind) -> Option<&'static str> {
        let at_address = Destination::at(address, to.port);
        match kind {
            Kind::Public => None,
            Kind::Never(what) => Some(what),
            Kind::Private(what) => (!self.private.allows(to) && !self.private.allows(&at_address)).then_some(what),
            // A name is not enough: whoever answers for it could mean any service of this machine. For its own names nobody else
            // answers.
            Kind::Local(what) => {
                let is_named = to.host.is_loopback() && self.private.allows(to);
                (!is_named && !self.private.allows(&at_address)).then_some(what)
            }
        }
    }
}

fn client() -> http1::Builder {
    let mut client = http1::Builder::new();
    client.max_buf_size(HEADER_BYTES).max_header_size(HEADER_BYTES);
    client
}

/// Says that the proxy before it does not know who asks.
pub(super) fn stranger(to: &Destination) -> Refusal {
    unreachable(to, "the proxy before it wants another user or password than it was given")
}

fn unreachable(to: &Destination, why: &str) -> Refusal {
    Refusal::Unreachable { to: to.clone(), why: why.to_owned() }
}

/// Asks the proxy at the other end of a connection for a tunnel.
pub(super) async fn through(
    stream: TcpStream,
    to: &Destination,
    (upstream, limit): (&Upstream, Duration),
) -> Result<TokioIo<Upgraded>, Refusal> {
    let failed = |error: hyper::Error| unreachable(to, &format!("the proxy before it: {error}"));
    let asked = async {
        let authority = to.to_string();
        let mut request = Request::new(Content::Text(None));
        *request.method_mut() = Method::CONNECT;
        let named = Uri::try_from(authority.as_str()).ok().zip(HeaderValue::try_from(authority).ok());
        let (uri, host) = named.ok_or_else(|| unreachable(to, "its name does not fit into a request"))?;
        *request.uri_mut() = uri;
        request.headers_mut().insert(HOST, host);
        if let Some(credentials) = &upstream.credentials {
            request.headers_mut().insert(PROXY_AUTHORIZATION, credentials.clone());
        }
        let handshake = client().handshake(TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.map_err(failed)?;
        let mut exchange = pin!(async move {
            let response = sender.send_request(request).await.map_err(failed)?;
            if response.status() == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
                return Err(stranger(to));
            }
            if !response.status().is_success() {
                return Err(unreachable(to, &format!("the proxy before it answered {}", response.status())));
            }
            upgrade::on(response).await.map(TokioIo::new).map_err(failed)
        });
        tokio::select! {
            biased;
            tunnel = &mut exchange => tunnel,
            // It has handed over the tunnel, or the exchange is told what became of it.
            _ended = connection.with_upgrades() => exchange.await,
        }
    };
    let waited = timeout(limit, asked).await;
    waited.map_err(|_elapsed| Refusal::Slow { to: to.clone(), waited: limit })?
}

/// Sends a request, and returns the answer with the connection that it comes by.
pub(super) async fn ask(
    stream: TcpStream,
    request: Request<Incoming>,
    to: &Destination,
    limit: Duration,
) -> Result<(hyper::Response<Incoming>, tokio::task::JoinSet<()>), Refusal> {
    let failed = |error: hyper::Error| unreachable(to, &error.to_string());
    let mut driver = tokio::task::JoinSet::new();
    let asked = async {
        let handshake = client().handshake(TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.map_err(failed)?;
        driver.spawn(async move {
            // What goes wrong with it is told to whoever reads the answer.
            let _ = connection.await;
        });
        sender.send_request(request).await.map_err(failed)
    };
    let response = timeout(limit, asked).await;
    Ok((response.map_err(|_elapsed| Refusal::Slow { to: to.clone(), waited: limit })??, driver))
}
