//! The service as a whole: start, stop, status, sizes.

use std::num::NonZeroUsize;

use axum::{Json, extract::State, http::StatusCode};
use prorl_core::{
    Stage,
    status::{ServiceState, ServiceStatus, Stages},
};
use serde::{Deserialize, Serialize};

use crate::{extract::JsonBody, problem::Problem, state::AppState};

#[derive(Serialize)]
pub(super) struct Started {
    status: &'static str,
}

pub(super) async fn start(State(state): State<AppState>) -> Result<Json<Started>, Problem> {
    if state.pipeline().start() {
        return Ok(Json(Started { status: "Server started successfully" }));
    }
    let detail = match state.pipeline().state() {
        ServiceState::Draining => "the service is still stopping",
        ServiceState::Running | ServiceState::Stopped => "the service is running already",
    };
    Err(Problem::new(StatusCode::BAD_REQUEST, "already_running", detail))
}

#[derive(Serialize)]
pub(super) struct Stopped {
    status: &'static str,
    cancelled: usize,
    sandboxes_killed: usize,
}

pub(super) async fn stop(State(state): State<AppState>) -> Result<Json<Stopped>, Problem> {
    let report = state.stop_pipeline().await?;
    Ok(Json(Stopped {
        status: "Server stopped successfully",
        cancelled: report.cancelled,
        sandboxes_killed: report.sandboxes_killed,
    }))
}

pub(super) async fn status(State(state): State<AppState>) -> Json<ServiceStatus> {
    Json(state.status())
}

/// Absent stages keep their workers. None may have zero: its jobs would wait for ever.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Resize {
    init: Option<NonZeroUsize>,
    run: Option<NonZeroUsize>,
    eval: Option<NonZeroUsize>,
}

#[derive(Serialize)]
pub(super) struct Resized {
    stages: Stages,
}

pub(super) async fn resize(State(state): State<AppState>, JsonBody(sizes): JsonBody<Resize>) -> Json<Resized> {
    for (stage, workers) in [(Stage::Init, sizes.init), (Stage::Run, sizes.run), (Stage::Eval, sizes.eval)] {
        if let Some(workers) = workers {
            state.pipeline().resize(stage, workers.get());
        }
    }
    Json(Resized { stages: state.pipeline().stages() })
}

#[derive(Serialize)]
pub(super) struct Handlers {
    handlers: Vec<String>,
}

pub(super) async fn handlers(State(state): State<AppState>) -> Json<Handlers> {
    Json(Handlers { handlers: state.pipeline().handler_names() })
}
