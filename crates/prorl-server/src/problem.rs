//! What went wrong with a request, as a status and the body of API.md. The only place that turns domain errors into HTTP.

use std::fmt::Display;

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use prorl_core::JobId;
use prorl_llm::pool::AddError;
use prorl_pipeline::SubmitError;
use serde::Serialize;

/// When to come back after `queue_full`, seconds. A queue of the default length takes far longer to empty than this, but
/// it has room again as soon as one job ends.
const RETRY_AFTER_SECS: &str = "5";

/// An answer that is no success. Its body is `{"detail", "code"}`.
#[derive(Debug)]
pub(crate) struct Problem {
    status: StatusCode,
    code: &'static str,
    detail: String,
}

#[derive(Serialize)]
struct Body {
    detail: String,
    code: &'static str,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self { status, code, detail: detail.into() }
    }

    #[cfg(test)]
    pub(crate) fn code(&self) -> &'static str {
        self.code
    }

    #[cfg(test)]
    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    pub(crate) fn invalid_json(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_json", detail)
    }

    pub(crate) fn malformed(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "malformed", detail)
    }

    pub(crate) fn body_too_large(limit: usize) -> Self {
        let detail = format!("body: expected at most {limit} bytes, found more");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", detail)
    }

    pub(crate) fn unauthorized() -> Self {
        let detail = "authorization: expected `Bearer TOKEN` with the server's token";
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", detail)
    }

    pub(crate) fn not_running() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_running", "the service is not running")
    }

    pub(crate) fn job_unknown(id: &JobId) -> Self {
        Self::new(StatusCode::NOT_FOUND, "job_unknown", format!("no job {id}"))
    }

    /// A broken invariant of ours: logged whole, told short.
    pub(crate) fn internal(what: &str, error: &dyn Display) -> Self {
        tracing::error!(%error, "{what}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", what)
    }
}

impl From<SubmitError> for Problem {
    fn from(error: SubmitError) -> Self {
        let (status, code) = match &error {
            SubmitError::NotRunning => return Self::not_running(),
            SubmitError::UnknownDataSource { .. } => (StatusCode::BAD_REQUEST, "unknown_data_source"),
            SubmitError::Malformed(_) => (StatusCode::UNPROCESSABLE_ENTITY, "malformed"),
            SubmitError::InvalidInstance(_) => (StatusCode::BAD_REQUEST, "invalid_instance"),
            SubmitError::JobExists(_) => (StatusCode::CONFLICT, "job_exists"),
            SubmitError::JobCancelled(_) => (StatusCode::CONFLICT, "job_cancelled"),
            SubmitError::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, "queue_full"),
            other => return Self::internal("the job was refused", other),
        };
        Self::new(status, code, error.to_string())
    }
}

impl From<AddError> for Problem {
    fn from(error: AddError) -> Self {
        match &error {
            AddError::BadAddress(_) => Self::malformed(error.to_string()),
            AddError::UnsupportedKind { .. } => Self::malformed(format!("kind: {error}")),
            AddError::Unusable { .. } => Self::new(StatusCode::BAD_GATEWAY, "backend_unusable", error.to_string()),
            other => Self::internal("the backend was refused", other),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(Body { detail: self.detail, code: self.code })).into_response();
        let extra = match self.status {
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
            StatusCode::TOO_MANY_REQUESTS => Some((header::RETRY_AFTER, RETRY_AFTER_SECS)),
            _ => None,
        };
        if let Some((name, value)) = extra {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }
}
