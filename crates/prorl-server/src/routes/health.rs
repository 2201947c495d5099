//! For load balancers and supervisors: no token, no work.

use axum::{Json, extract::State};
use prorl_core::status::ServiceState;
use serde::Serialize;

use crate::{problem::Problem, state::AppState};

#[derive(Serialize)]
pub(super) struct Health {
    status: &'static str,
}

pub(super) async fn healthz() -> Json<Health> {
    Json(Health { status: "ok" })
}

pub(super) async fn readyz(State(state): State<AppState>) -> Result<Json<Health>, Problem> {
    match state.pipeline().state() {
        ServiceState::Running => Ok(Json(Health { status: "ok" })),
        ServiceState::Stopped | ServiceState::Draining => Err(Problem::not_running()),
    }
}
