//! The endpoints.

mod backends;
mod health;
mod jobs;
mod service;

use std::panic::AssertUnwindSafe;

use axum::{
    Router,
    extract::{Request, State},
    http::{Method, StatusCode, Uri},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use futures_util::FutureExt;

use crate::{explain, problem::Problem, state::AppState};

/// Returns every endpoint, for a server of one's own. [`Server`](crate::Server) is this behind a listener.
///
/// A client's leaving is the drop of the handler's future, so the server must drop that as soon as the connection ends;
/// hyper does.
pub fn router(state: AppState) -> Router {
    Router::new()
        .route("/start", post(service::start))
        .route("/stop", post(service::stop))
        .route("/status", get(service::status))
        .route("/add_llm_server", post(backends::add))
        .route("/clear_llm_server", post(backends::clear))
        .route("/process", post(jobs::process))
        .route("/cancel", post(jobs::cancel))
        .route("/v1/jobs", post(jobs::submit))
        .route("/v1/jobs/{id}", get(jobs::get).delete(jobs::delete))
        .route("/v1/backends", get(backends::list).post(backends::add))
        .route("/v1/backends/swap", post(backends::swap))
        .route("/v1/backends/{address}", delete(backends::remove))
        .route("/v1/stages", post(service::resize))
        .route("/v1/handlers", get(service::handlers))
        .route("/healthz", get(health::healthz))
        .route("/readyz", get(health::readyz))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(state.clone(), guard))
        .with_state(state)
}

/// Asks for the token, and turns a panic of ours into an answer: on HTTP/2 it would end the connection's other requests.
async fn guard(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let is_open = matches!(request.uri().path(), "/healthz" | "/readyz");
    if let Some(token) = state.token()
        && !is_open
        && !token.is_carried_by(request.headers())
    {
        return Problem::unauthorized().into_response();
    }
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(_panic) => Problem::internal("the request broke the server", &"panic").into_response(),
    }
}

async fn not_found(method: Method, uri: Uri) -> Problem {
    let detail = format!("no endpoint {method} {}", explain::shorten(uri.path()));
    Problem::new(StatusCode::NOT_FOUND, "not_found", detail)
}

async fn method_not_allowed(method: Method, uri: Uri) -> Problem {
    let detail = format!("{} does not take {method}", explain::shorten(uri.path()));
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServerConfig;
    use axum::body::{Body, to_bytes};
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;
    use prorl_llm::pool::{Pool, PoolConfig};
    use prorl_pipeline::{Pipeline, PipelineConfig, Registry};

    #[tokio::test]
    async fn a_panic_of_ours_is_an_answer() {
        let pipeline = Pipeline::new(PipelineConfig::default(), Registry::default());
        let state = AppState::new(ServerConfig::default(), pipeline.clone(), Pool::new(PoolConfig::default()));
        let broken = || async { panic!("on purpose") as &'static str };
        let app = Router::new().route("/", get(broken)).layer(middleware::from_fn_with_state(state, guard));
        let response = TowerToHyperService::new(app).call(Request::new(Body::empty())).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = to_bytes(response.into_body(), 1000).await.unwrap();
        assert_eq!(body, r#"{"detail":"the request broke the server","code":"internal"}"#);
        pipeline.close().await;
    }
}
