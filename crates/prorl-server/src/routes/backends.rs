//! The LLM servers behind the pool.

use std::num::NonZeroUsize;

use axum::{Json, extract::State, http::StatusCode};
use prorl_core::{Secret, WeightVersion, status::BackendStatus};
use prorl_llm::pool::{BackendSpec, Kind};
use serde::{Deserialize, Serialize};

use crate::{
    explain,
    extract::{JsonBody, Segment},
    problem::Problem,
    state::AppState,
};

/// An LLM server to add.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AddRequest {
    address: String,
    #[serde(default)]
    kind: Kind,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    weight_version: Option<WeightVersion>,
    #[serde(default)]
    max_concurrent: Option<NonZeroUsize>,
    #[serde(default)]
    api_key: Option<Secret<String>>,
    #[serde(default = "yes")]
    probe: bool,
}

fn yes() -> bool {
    true
}

#[derive(Serialize)]
pub(super) struct Added {
    status: String,
    backend: BackendStatus,
}

pub(super) async fn add(
    State(state): State<AppState>,
    JsonBody(request): JsonBody<AddRequest>,
) -> Result<Json<Added>, Problem> {
    let status = format!("Added LLM server address: {}", request.address);
    let backend = state
        .pool()
        .add(BackendSpec {
            address: request.address,
            kind: request.kind,
            model: request.model,
            weight_version: request.weight_version,
            max_concurrent: request.max_concurrent,
            api_key: request.api_key,
            probe: request.probe,
        })
        .await?;
    Ok(Json(Added { status, backend }))
}

#[derive(Serialize)]
pub(super) struct Cleared {
    status: &'static str,
    cleared: usize,
}

pub(super) async fn clear(State(state): State<AppState>) -> Json<Cleared> {
    Json(Cleared { status: "Cleared all LLM server addresses", cleared: state.pool().clear() })
}

#[derive(Serialize)]
pub(super) struct Listed {
    backends: Vec<BackendStatus>,
}

pub(super) async fn list(State(state): State<AppState>) -> Json<Listed> {
    Json(Listed { backends: state.pool().list() })
}

#[derive(Serialize)]
pub(super) struct Removed {
    status: String,
}

pub(super) async fn remove(State(state): State<AppState>, Segment(address): Segment) -> Result<Json<Removed>, Problem> {
    if state.pool().remove(&address)? {
        return Ok(Json(Removed { status: format!("Removed LLM server address: {address}") }));
    }
    let detail = format!("no LLM server {}", explain::shorten(&address));
    Err(Problem::new(StatusCode::NOT_FOUND, "backend_unknown", detail))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SwapRequest {
    addresses: Vec<String>,
    #[serde(default)]
    weight_version: Option<WeightVersion>,
}

pub(super) async fn swap(
    State(state): State<AppState>,
    JsonBody(request): JsonBody<SwapRequest>,
) -> Result<Json<Listed>, Problem> {
    let specs = request.addresses.into_iter().map(BackendSpec::new).collect();
    let backends = state.pool().swap(specs, request.weight_version).await?;
    Ok(Json(Listed { backends }))
}
