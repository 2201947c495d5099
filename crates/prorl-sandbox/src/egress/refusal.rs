//! What a program inside is told that asked for what it does not get.

use std::{
    fmt, io,
    net::IpAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use hyper::{
    Response, StatusCode,
    body::{Body, Bytes, Frame, Incoming, SizeHint},
    ext::ReasonPhrase,
    header::{CONTENT_TYPE, HeaderValue},
};
use tokio::task::JoinSet;

use super::{Rules, gate::Passage, host::Destination};

/// How much of a text is told in the status line, which is all that many programs show.
const MAX_REASON: usize = 240;

/// Why something is not passed on.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("bad request: {0}")]
    Malformed(String),
    #[error("egress refused: {to} is not among the allowed hosts{}: {rules}", Named(" of ", rules))]
    NotAllowed { to: Destination, rules: Rules },
    #[error("egress refused: {to}: no host is allowed now{}", Named(" by ", rules))]
    NothingAllowed { to: Destination, rules: Rules },
    #[error("egress refused: {to} is {what}")]
    Name { to: Destination, what: &'static str },
    #[error("egress refused: {to} is at {address}, {what}")]
    Address { to: Destination, address: IpAddr, what: &'static str },
    #[error("{to} has no address: {source}")]
    Unresolved { to: Destination, source: io::Error },
    #[error("{to} cannot be reached: {why}")]
    Unreachable { to: Destination, why: String },
    #[error("{to} did not answer within {waited:?}")]
    Slow { to: Destination, waited: Duration },
    #[error(
        "egress busy: {to} waited {waited:?} for one of {n_places} places; this sandbox is still looking up names or \
         connecting to other hosts with all of them"
    )]
    Busy { to: Destination, waited: Duration, n_places: usize },
}

/// What a list is called, after a word, if it is called anything.
struct Named<'a>(&'static str, &'a Rules);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(word, rules) = self;
        rules.name().map_or(Ok(()), |name| write!(f, "{word}{name}"))
    }
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::NotAllowed { .. } | Self::NothingAllowed { .. } | Self::Name { .. } | Self::Address { .. } => {
                StatusCode::FORBIDDEN
            }
            Self::Unresolved { .. } | Self::Unreachable { .. } => StatusCode::BAD_GATEWAY,
            Self::Slow { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::Busy { .. } => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns the answer that says so.
    pub(super) fn response(&self) -> Response<Content> {
        let text = self.to_string();
        let reason = reason(&text);
        let mut response = Response::new(Content::Text(Some(format!("{text}\n").into())));
        *response.status_mut() = self.status();
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        if let Ok(reason) = ReasonPhrase::try_from(reason.into_bytes()) {
            response.extensions_mut().insert(reason);
        }
        response
    }

    /// Returns the same answer as it is sent, after which the connection ends.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let text = self.to_string();
        let (status, reason, n_bytes) = (self.status().as_u16(), reason(&text), text.len() + 1);
        format!(
            "HTTP/1.1 {status} {reason}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {n_bytes}\r\n\
             connection: close\r\n\r\n{text}\n"
        )
        .into_bytes()
    }
}

/// Returns what of a text fits into a status line.
fn reason(text: &str) -> String {
    text.chars().filter(|letter| matches!(letter, ' '..='~')).take(MAX_REASON).collect()
}

/// The body of an answer.
#[derive(Debug)]
pub(super) enum Content {
    /// A text of our own, until it was sent.
    Text(Option<Bytes>),
    /// What the host outside answers.
    Relayed(Relayed),
}

/// A body that comes from outside. Dropped, its connection ends.
#[derive(Debug)]
pub(super) struct Relayed {
    pub(super) body: Incoming,
    pub(super) _connection: JoinSet<()>,
    pub(super) _passage: Passage,
}

impl Body for Content {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Text(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Self::Relayed(relayed) => Pin::new(&mut relayed.body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Text(text) => text.is_none(),
            Self::Relayed(relayed) => relayed.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            Self::Relayed(relayed) => relayed.body.size_hint(),
        }
    }
}
