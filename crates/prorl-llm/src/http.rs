//! One HTTP call with bounds: on the answer's size here, on its time in the caller.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use prorl_core::Secret;
use reqwest::{Client, RequestBuilder, Response, redirect};

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// No connection: the server is not there.
    #[error("no connection: {0}")]
    Connect(String),
    /// The connection broke before the answer was whole.
    #[error("broke off: {0}")]
    Cut(String),
    /// More bytes than any answer needs.
    #[error("the answer is larger than {0} bytes")]
    TooLarge(usize),
}

/// A whole answer, whatever its status.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The start of the body, for an error message.
    pub(crate) fn excerpt(&self) -> String {
        let text = String::from_utf8_lossy(&self.body);
        let text = text.trim();
        match text.char_indices().nth(300) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text.to_owned(),
        }
    }
}

/// Headers that name a call to a backend, or to a router that stands before it.
pub(crate) struct Names<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) session_id: &'a str,
}

/// The client for all backends. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Http {
    client: Client,
    max_answer_bytes: usize,
}

impl Http {
    pub(crate) fn new(connect_timeout: Duration, max_answer_bytes: usize) -> Self {
        let client = Client::builder()
            .connect_timeout(connect_timeout)
            // Backends are named by the trainer: what an environment or a redirect says is not asked.
            .no_proxy()
            .redirect(redirect::Policy::none())
            // A connection per call: closing it aborts exactly that call upstream, and an engine that silently closes a
            // connection after an error (vLLM does) cannot spoil the next call.
            .pool_max_idle_per_host(0)
            .build()
            .expect("a client without TLS needs nothing that could be missing");
        Self { client, max_answer_bytes }
    }

    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub(crate) async fn get(&self, url: &str, api_key: Option<&Secret<String>>) -> Result<Answer, CallError> {
        self.send(self.client.get(url), api_key).await
    }

    /// # Cancel safety
    /// Dropping the future closes the connection, by which engines notice that nobody waits any more.
    pub(crate) async fn post(
        &self,
        url: &str,
        body: Vec<u8>,
        names: Option<&Names<'_>>,
        api_key: Option<&Secret<String>>,
    ) -> Result<Answer, CallError> {
        let mut request = self.client.post(url).header("content-type", "application/json").body(body);
        if let Some(names) = names {
            request = request.header("x-request-id", names.request_id).header("x-session-id", names.session_id);
        }
        self.send(request, api_key).await
    }

    async fn send(&self, request: RequestBuilder, api_key: Option<&Secret<String>>) -> Result<Answer, CallError> {
        let request = match api_key {
            Some(key) => request.bearer_auth(key.expose()),
            None => request,
        };
        let response = request.send().await.map_err(|err| {
            if err.is_connect() { CallError::Connect(chain(&err)) } else { CallError::Cut(chain(&err)) }
        })?;
        let status = response.status().as_u16();
        let body = self.read(response).await?;
        Ok(Answer { status, body })
    }

    async fn read(&self, mut response: Response) -> Result<Bytes, CallError> {
        let too_large = || CallError::TooLarge(self.max_answer_bytes);
        if response.content_length().is_some_and(|length| length > self.max_answer_bytes as u64) {
            return Err(too_large());
        }
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await.map_err(|err| CallError::Cut(chain(&err)))? {
            if body.len() + chunk.len() > self.max_answer_bytes {
                return Err(too_large());
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body.freeze())
    }
}

/// An error with its causes on one line; the address is left out, as the caller names the backend.
fn chain(err: &reqwest::Error) -> String {
    let mut text = String::new();
    let mut cause = std::error::Error::source(err);
    while let Some(err) = cause {
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&err.to_string());
        cause = err.source();
    }
    if text.is_empty() { err.to_string() } else { text }
}
