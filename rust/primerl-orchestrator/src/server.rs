//! All routes.

use crate::app::App;
use crate::endpoints::{self, status};
use crate::envs::wire;
use crate::page;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{get, post};
use primerl_service::http::{ApiError, Routes};
use std::sync::Arc;

pub fn router(app: Arc<App>) -> Router {
    routes(&app)
        .into_router()
        .fallback(unknown)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(
            Arc::clone(&app.gateway),
            primerl_gateway::guard,
        ))
        .with_state(app)
}

/// Which key opens each of them is decided by the path alone: `primerl_gateway::access`.
pub(crate) fn routes(app: &App) -> Routes<Arc<App>> {
    Routes::new()
        .route(wire::REGISTER, post(endpoints::envs::register))
        .route(wire::LEASE, post(endpoints::envs::lease))
        .route(wire::HEARTBEAT, post(endpoints::envs::heartbeat))
        .route(wire::RESULT, post(endpoints::envs::result))
        .route(wire::LEAVE, post(endpoints::envs::leave))
        .route(wire::CONFIG, get(endpoints::config))
        .route("/engines/join", post(endpoints::engines::join))
        .route("/engines/reach", post(endpoints::engines::reach))
        .route("/weights/{version}/{file}", get(endpoints::weights::part))
        .route("/trainer/begin", post(endpoints::trainer::begin))
        .route("/trainer/starting", post(endpoints::trainer::starting))
        .route("/trainer/batch", post(endpoints::trainer::batch))
        .route("/trainer/weights", post(endpoints::trainer::weights))
        .route("/trainer/resume", post(endpoints::trainer::resume))
        .route("/trainer/checkpoint", post(endpoints::trainer::checkpoint))
        .route("/trainer/heartbeat", post(endpoints::trainer::heartbeat))
        .route("/shutdown", post(endpoints::trainer::shutdown))
        .route("/health", get(status::health))
        .route("/status", get(status::status))
        .route("/metrics", get(status::metrics))
        .route("/page/now", get(now))
        .merge(primerl_gateway::routes().with_state(Arc::clone(&app.gateway)))
        .merge(page::routes(Arc::clone(&app.page)))
}

/// Whether it is served without a key: it holds no data of the run.
pub(crate) fn is_open(path: &str) -> bool {
    path == "/health" || page::is_asset(path)
}

async fn now(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let page = Arc::clone(&app.page);
    page::now(page, status::collect(&app)).await
}

async fn unknown(request: Request) -> ApiError {
    let path = request.uri().path();
    let hint = match path.starts_with("/v1/") {
        true => "; a rollout's calls go to its own base URL, /rollouts/{id}/v1",
        false => "",
    };
    ApiError::not_found(
        "route_unknown",
        format!("there is no {} {path}{hint}", request.method()),
    )
}

async fn method_not_allowed(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    ApiError {
        status: StatusCode::METHOD_NOT_ALLOWED,
        ..ApiError::invalid(format!("{path} does not take {method}")).code("method_not_allowed")
    }
}

#[cfg(test)]
mod tests {
    use super::is_open;

    #[test]
    fn health_and_the_files_of_the_page_need_no_key() {
        for path in ["/health", "/", "/page/assets/main.js"] {
            assert!(is_open(path), "{path}");
        }
        for path in [
            "/health/",
            "/page/now",
            "/status",
            "/v1/models",
            "/envs/lease",
        ] {
            assert!(!is_open(path), "{path}");
        }
    }
}
