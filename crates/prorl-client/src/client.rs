//! The calls.

use std::{sync::Arc, time::Duration};

use prorl_core::{JobId, JobRequest, JobResult, Secret, status::ServiceStatus};
use reqwest::{Method, RequestBuilder, Response, header};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    AddBackend, Added, CancelRequested, ClientError, JobView, Stopped, Submitted,
    wire::{Cleared, Problem},
};

/// How long a connection may take to be made.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// How long a call may take that the server answers at once. Long enough for a 64 MiB body.
const CALL_LIMIT: Duration = Duration::from_mins(2);

/// How long a stop may take: every sandbox has to be proven gone.
const STOP_LIMIT: Duration = Duration::from_mins(10);

/// A server that vanished without a word is noticed after a few of these.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// The most of a body that is no error of ours to repeat, characters.
const LONGEST_FOREIGN_DETAIL: usize = 300;

/// A client of one prorl server. Clones share its connections.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: Arc<str>,
    token: Option<Secret<String>>,
}

impl Client {
    /// Makes a client of the server at `http://HOST:PORT` or `unix:PATH`. No connection is made yet.
    ///
    /// # Errors
    /// [`ClientError::Address`] for another form of address.
    pub fn new(address: &str, token: Option<Secret<String>>) -> Result<Self, ClientError> {
        let wrong = || ClientError::Address { address: address.to_owned() };
        // A proxy named in the environment is for the world outside, not for the cluster's own services.
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_LIMIT)
            .tcp_keepalive(KEEPALIVE);
        let (http, base) = match address.strip_prefix("unix:") {
            Some("") => return Err(wrong()),
            Some(path) => (http.unix_socket(path), "http://localhost".to_owned()),
            None => {
                let url = reqwest::Url::parse(address).ok().filter(|url| url.scheme() == "http" && url.has_host());
                let url = url.filter(|url| url.query().is_none() && url.fragment().is_none()).ok_or_else(wrong)?;
                (http, url.as_str().trim_end_matches('/').to_owned())
            }
        };
        let http = http.build().map_err(ClientError::Setup)?;
        Ok(Self { http, base: base.into(), token })
    }

    /// Submits a job and waits for its result, however long that takes; the job's own limits bound it once it runs.
    ///
    /// # Errors
    /// When the job was not accepted, or the server was lost.
    ///
    /// # Cancel safety
    /// Dropping it closes the connection, which cancels a job that is not detached and that nobody else waits for.
    pub async fn process(&self, request: &JobRequest) -> Result<JobResult, ClientError> {
        answer(self.call(Method::POST, "/process").json(request)).await
    }

    /// Submits a job that goes on by itself.
    ///
    /// # Errors
    /// When the job was not accepted, or the server was lost.
    pub async fn submit(&self, request: &JobRequest) -> Result<Submitted, ClientError> {
        self.post("/v1/jobs", request).await
    }

    /// Looks at a job, waiting up to `wait` (at most a minute) for its end.
    ///
    /// # Errors
    /// `job_unknown`, or `result_dropped` when the result had to make room.
    ///
    /// # Cancel safety
    /// Dropping it changes nothing, unless it was the last to wait for a job that is not detached.
    pub async fn job(&self, id: &JobId, wait: Duration) -> Result<JobView, ClientError> {
        let path = format!("/v1/jobs/{id}?wait={}", wait.as_secs_f64());
        answer(self.call(Method::GET, &path).timeout(wait.saturating_add(CALL_LIMIT))).await
    }

    /// Asks for the end of a job. It ends soon after.
    ///
    /// # Errors
    /// `job_unknown`; the id is refused for a while then, so that a late submit does not start it.
    pub async fn cancel(&self, id: &JobId) -> Result<CancelRequested, ClientError> {
        self.post("/cancel", &serde_json::json!({"job_id": id})).await
    }

    /// Returns what the service is doing.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses the token.
    pub async fn status(&self) -> Result<ServiceStatus, ClientError> {
        answer(self.call(Method::GET, "/status").timeout(CALL_LIMIT)).await
    }

    /// Adds an LLM server, or updates the facts of one that is there.
    ///
    /// # Errors
    /// `backend_unusable` for one that answers and cannot return ids and log-probabilities.
    pub async fn add_llm_server(&self, backend: &AddBackend) -> Result<Added, ClientError> {
        self.post("/add_llm_server", backend).await
    }

    /// Removes every LLM server; returns how many there were.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses the token.
    pub async fn clear_llm_server(&self) -> Result<u64, ClientError> {
        let cleared: Cleared = answer(self.call(Method::POST, "/clear_llm_server").timeout(CALL_LIMIT)).await?;
        Ok(cleared.cleared)
    }

    /// Lets the service take jobs.
    ///
    /// # Errors
    /// `already_running`.
    pub async fn start(&self) -> Result<(), ClientError> {
        let _: Value = answer(self.call(Method::POST, "/start").timeout(CALL_LIMIT)).await?;
        Ok(())
    }

    /// Ends every job and sandbox, and lets the service take none until it is started again. The server itself goes on.
    ///
    /// # Errors
    /// `not_running`.
    ///
    /// # Cancel safety
    /// Dropping it does not take the stop back.
    pub async fn stop(&self) -> Result<Stopped, ClientError> {
        answer(self.call(Method::POST, "/stop").timeout(STOP_LIMIT)).await
    }

    async fn post<A: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<A, ClientError> {
        answer(self.call(Method::POST, path).json(body).timeout(CALL_LIMIT)).await
    }

    fn call(&self, method: Method, path: &str) -> RequestBuilder {
        let call = self.http.request(method, format!("{}{path}", self.base));
        match &self.token {
            Some(token) => call.bearer_auth(token.expose()),
            None => call,
        }
    }
}

async fn answer<A: DeserializeOwned>(call: RequestBuilder) -> Result<A, ClientError> {
    let response = call.send().await.map_err(ClientError::sending)?;
    if !response.status().is_success() {
        return Err(refusal(response).await);
    }
    let body = response.bytes().await.map_err(ClientError::reading)?;
    serde_json::from_slice(&body).map_err(ClientError::Decode)
}

async fn refusal(response: Response) -> ClientError {
    let status = response.status().as_u16();
    let retry_after = response.headers().get(header::RETRY_AFTER);
    let retry_after = retry_after.and_then(|value| value.to_str().ok()?.parse().ok()).map(Duration::from_secs);
    let body = match response.bytes().await {
        Ok(body) => body,
        Err(err) => return ClientError::reading(err),
    };
    let Problem { detail, code } = serde_json::from_slice(&body).unwrap_or_else(|_not_ours| {
        let detail = String::from_utf8_lossy(&body).chars().take(LONGEST_FOREIGN_DETAIL).collect();
        Problem { detail, code: String::new() }
    });
    ClientError::Refused { status, code, detail, retry_after }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_http_or_a_socket_file() {
        for address in ["http://127.0.0.1:8006", "http://host:1/", "http://[::1]:1/prefix", "unix:/run/p.sock"] {
            assert!(Client::new(address, None).is_ok(), "{address}");
        }
        for address in ["", "127.0.0.1:8006", "https://host", "unix:", "ftp://host", "http://", "http://h/?a=1"] {
            assert!(matches!(Client::new(address, None), Err(ClientError::Address { .. })), "{address}");
        }
    }

    #[test]
    fn a_token_is_not_printed() {
        let client = Client::new("http://h:1", Some(Secret::new("s3cret".to_owned()))).unwrap();
        assert!(!format!("{client:?}").contains("s3cret"));
    }
}
