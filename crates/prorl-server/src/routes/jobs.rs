//! Jobs: submit, wait, look, cancel.

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use prorl_core::{JobId, JobRequest, JobResult};
use prorl_pipeline::{CancelAnswer, JobHandle, JobState, Lookup};
use serde::{Deserialize, Serialize};
use tokio::time::{Duration, timeout};

use crate::{
    extract::{JobInPath, JsonBody, Params},
    problem::Problem,
    state::AppState,
};

/// The longest wait of `GET /v1/jobs/{id}?wait=`; a longer one is cut to this.
const LONGEST_WAIT: Duration = Duration::from_mins(1);

/// Submits and waits. The handle in this future is the client's hold on the job: when the client leaves, the future is
/// dropped and the handle with it, which cancels a job that nobody else waits for.
pub(super) async fn process(
    State(state): State<AppState>,
    JsonBody(request): JsonBody<JobRequest>,
) -> Result<Response, Problem> {
    let partial = request.include.partial;
    let request = admit(&state, request)?;
    let job = state.pipeline().submit(request)?;
    let result = job.result().await;
    encode(move || {
        let is_broken = result.outcome.failure_class.is_some();
        if is_broken && !partial {
            // The original's clients take an empty conversation for "try again".
            let bare = JobResult { messages: Vec::new(), traces: Vec::new(), ..JobResult::clone(&result) };
            serde_json::to_vec(&bare)
        } else {
            serde_json::to_vec(&*result)
        }
    })
    .await
}

#[derive(Serialize)]
pub(super) struct Submitted {
    job_id: JobId,
    state: &'static str,
}

pub(super) async fn submit(
    State(state): State<AppState>,
    JsonBody(request): JsonBody<JobRequest>,
) -> Result<(StatusCode, Json<Submitted>), Problem> {
    let request = admit(&state, request)?;
    let (job_id, job_state) = state.pipeline().submit_detached(request)?;
    Ok((StatusCode::ACCEPTED, Json(Submitted { job_id, state: job_state.as_str() })))
}

/// Fills in what the server decides, and refuses what could not begin here.
fn admit(state: &AppState, mut request: JobRequest) -> Result<JobRequest, Problem> {
    let config = state.config();
    request.include.input_ids.get_or_insert(config.default_input_ids);
    let may_not_wait = config.wait_for_llm == Some(Duration::ZERO);
    if may_not_wait && state.pool().list().is_empty() && !is_known(state, request.job_id.as_ref()) {
        // A request that is wrong is told so first: it would be wrong with a backend too.
        state.pipeline().check(&request)?;
        let detail = "there is no LLM server, and this service is set not to wait for one";
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "no_llm_server", detail));
    }
    Ok(request)
}

/// Tells whether a submit of this id attaches to a job that is there.
fn is_known(state: &AppState, id: Option<&JobId>) -> bool {
    let pipeline = state.pipeline();
    id.is_some_and(|id| pipeline.attach(id).is_some() || matches!(pipeline.result(id), Lookup::Found(_)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wait {
    /// Seconds.
    #[serde(default)]
    wait: f64,
}

impl Wait {
    fn limit(&self) -> Result<Duration, Problem> {
        if self.wait.is_finite() && self.wait >= 0.0 {
            Ok(Duration::try_from_secs_f64(self.wait).unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT))
        } else {
            Err(Problem::malformed(format!("query: wait: expected seconds of 0 or more, found {}", self.wait)))
        }
    }
}

#[derive(Serialize)]
struct Look<'a> {
    job_id: &'a JobId,
    state: &'static str,
    result: Option<&'a JobResult>,
}

pub(super) async fn get(
    State(state): State<AppState>,
    JobInPath(id): JobInPath,
    Params(wait): Params<Wait>,
) -> Result<Response, Problem> {
    let limit = wait.limit()?;
    if let Some(job) = state.pipeline().attach(&id) {
        match wait_for(&job, limit).await {
            Some(result) => return look(id, JobState::Ended, Some(result)).await,
            None => return look(id, job.state(), None).await,
        }
    }
    match state.pipeline().result(&id) {
        Lookup::Found(result) => look(id, JobState::Ended, Some(result)).await,
        Lookup::Dropped => {
            let detail = format!("the result of job {id} had to make room for newer ones");
            Err(Problem::new(StatusCode::GONE, "result_dropped", detail))
        }
        Lookup::Unknown => Err(Problem::job_unknown(&id)),
    }
}

async fn wait_for(job: &JobHandle, limit: Duration) -> Option<Arc<JobResult>> {
    timeout(limit, job.result()).await.ok()
}

async fn look(id: JobId, state: JobState, result: Option<Arc<JobResult>>) -> Result<Response, Problem> {
    encode(move || serde_json::to_vec(&Look { job_id: &id, state: state.as_str(), result: result.as_deref() })).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CancelRequest {
    job_id: JobId,
}

#[derive(Serialize)]
pub(super) struct CancelRequested {
    status: String,
    state: &'static str,
}

pub(super) async fn cancel(
    State(state): State<AppState>,
    JsonBody(request): JsonBody<CancelRequest>,
) -> Result<Json<CancelRequested>, Problem> {
    cancel_job(&state, &request.job_id)
}

pub(super) async fn delete(
    State(state): State<AppState>,
    JobInPath(id): JobInPath,
) -> Result<Json<CancelRequested>, Problem> {
    cancel_job(&state, &id)
}

fn cancel_job(state: &AppState, id: &JobId) -> Result<Json<CancelRequested>, Problem> {
    match state.pipeline().cancel(id) {
        CancelAnswer::Found(job_state) => {
            let status = format!("Cancel requested for job {id}");
            Ok(Json(CancelRequested { status, state: job_state.as_str() }))
        }
        CancelAnswer::Unknown => Err(Problem::job_unknown(id)),
    }
}

/// Answers JSON that may be long (ids and log-probabilities of a whole trajectory), written on a blocking thread.
async fn encode(write: impl FnOnce() -> serde_json::Result<Vec<u8>> + Send + 'static) -> Result<Response, Problem> {
    let written = tokio::task::spawn_blocking(write).await;
    let written = written.map_err(|err| Problem::internal("the result could not be written", &err))?;
    let body = written.map_err(|err| Problem::internal("the result could not be written", &err))?;
    let kind = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok((kind, Body::from(body)).into_response())
}
