//! What handlers take out of a request. Every refusal is a [`Problem`], so that each error body has the one shape.

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, Path, Query, Request},
    http::{HeaderMap, StatusCode, header, request::Parts},
};
use futures_util::StreamExt;
use prorl_core::JobId;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::{explain, problem::Problem, state::AppState};

/// Bodies longer than this are parsed on a blocking thread: a worker of the runtime must stay free to answer a cancel.
const LONGEST_INLINE: usize = 256 << 10;

/// How many times the limit of a body that is too large is read and thrown away. Most clients send their whole body before
/// they look at the answer, and would see a reset connection in place of it.
const DRAINED_LIMITS: usize = 4;

/// A JSON body. The content type is not looked at.
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<AppState> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, Problem> {
        let config = state.config();
        let (head, body) = request.into_parts();
        let body = timeout(config.body_timeout, read(&head.headers, body, config.body_limit)).await.map_err(
            |_elapsed| {
                let detail = format!("body: expected it whole within {:?}", config.body_timeout);
                Problem::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", detail)
            },
        )??;
        let parsed = if body.len() <= LONGEST_INLINE {
            explain::parse(&body)
        } else {
            let parsing = tokio::task::spawn_blocking(move || explain::parse(&body));
            parsing.await.map_err(|err| Problem::internal("the body could not be read", &err))?
        };
        parsed.map(Self)
    }
}

/// Reads a body of at most `limit` bytes.
async fn read(headers: &HeaderMap, body: Body, limit: usize) -> Result<Vec<u8>, Problem> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    let is_too_long = announced.is_some_and(|length| length > limit);
    if is_too_long && headers.contains_key(header::EXPECT) {
        return Err(Problem::body_too_large(limit)); // The client waits for leave to send it.
    }
    let mut chunks = body.into_data_stream();
    let mut kept = Vec::new();
    let mut length = 0_usize;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|err| {
            tracing::debug!(error = %err, length, "body broke off");
            Problem::invalid_json(format!("body: broke off after {length} bytes"))
        })?;
        length = length.saturating_add(chunk.len());
        if length > limit.saturating_mul(DRAINED_LIMITS) {
            break;
        }
        if is_too_long || length > limit {
            kept = Vec::new();
        } else {
            kept.extend_from_slice(&chunk);
        }
    }
    if length > limit { Err(Problem::body_too_large(limit)) } else { Ok(kept) }
}

/// The query, every parameter of it known.
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<AppState> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &AppState) -> Result<Self, Problem> {
        let query = Query::try_from_uri(&parts.uri);
        query.map(|Query(params)| Self(params)).map_err(|err| {
            let text = err.body_text();
            let problem = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
            Problem::malformed(format!("query: {}", explain::shorten(problem)))
        })
    }
}

/// The one variable part of a path, percent-decoded.
pub(crate) struct Segment(pub(crate) String);

impl FromRequestParts<AppState> for Segment {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let segment = Path::<String>::from_request_parts(parts, state).await;
        segment
            .map(|Path(text)| Self(text))
            .map_err(|err| Problem::malformed(format!("path: {}", explain::shorten(&err.body_text()))))
    }
}

/// The job id in a path.
pub(crate) struct JobInPath(pub(crate) JobId);

impl FromRequestParts<AppState> for JobInPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let Segment(text) = Segment::from_request_parts(parts, state).await?;
        JobId::new(text).map(Self).map_err(|err| Problem::malformed(format!("job_id: {err}")))
    }
}
