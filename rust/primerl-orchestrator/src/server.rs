//! All routes.

use crate::app::App;
use crate::gateway::access::guard;
use crate::http::ApiError;
use crate::routes::Routes;
use crate::telemetry::status;
use crate::{engines, envs, gateway, page, trainer};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{get, post};
use std::sync::Arc;

pub fn router(app: Arc<App>) -> Router {
    routes(&app)
        .into_router()
        .fallback(unknown)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(Arc::clone(&app), guard))
        .with_state(app)
}

/// Which key opens each of them is decided by the path alone: `gateway/access.rs`.
pub(crate) fn routes(app: &App) -> Routes<Arc<App>> {
    Routes::new()
        .route(
            "/rollouts/{rollout}/v1/chat/completions",
            post(gateway::chat_completions),
        )
        .route("/rollouts/{rollout}/v1/messages", post(gateway::messages))
        .merge(counting())
        .route(
            "/rollouts/{rollout}/v1/completions",
            post(gateway::completions),
        )
        .route("/rollouts/{rollout}/v1/responses", post(gateway::responses))
        .route(
            "/rollouts/{rollout}/v1/responses/{response}",
            get(gateway::retrieve_response).delete(gateway::delete_response),
        )
        .route(
            "/rollouts/{rollout}/v1/responses/{response}/input_items",
            get(gateway::response_input_items),
        )
        .route(
            "/rollouts/{rollout}/v1/models",
            get(gateway::rollout_models),
        )
        .route(
            "/rollouts/{rollout}/v1/models/{*model}",
            get(gateway::rollout_model),
        )
        .route("/rollouts/{rollout}/limits", post(gateway::tighten))
        .route("/v1/models", get(gateway::models))
        .route(envs::wire::REGISTER, post(envs::endpoints::register))
        .route(envs::wire::LEASE, post(envs::endpoints::lease))
        .route(envs::wire::HEARTBEAT, post(envs::endpoints::heartbeat))
        .route(envs::wire::RESULT, post(envs::endpoints::result))
        .route(envs::wire::LEAVE, post(envs::endpoints::leave))
        .route(envs::wire::CONFIG, get(envs::joining::config))
        .route("/engines/join", post(engines::endpoints::join))
        .route("/trainer/begin", post(trainer::endpoints::begin))
        .route("/trainer/starting", post(trainer::endpoints::starting))
        .route("/trainer/batch", post(trainer::endpoints::batch))
        .route("/trainer/weights", post(trainer::endpoints::weights))
        .route("/trainer/resume", post(trainer::endpoints::resume))
        .route("/trainer/checkpoint", post(trainer::endpoints::checkpoint))
        .route("/trainer/heartbeat", post(trainer::endpoints::heartbeat))
        .route("/shutdown", post(trainer::endpoints::shutdown))
        .route("/health", get(status::health))
        .route("/status", get(status::status))
        .route("/metrics", get(status::metrics))
        .route("/page/now", get(now))
        .merge(page::routes(Arc::clone(&app.page)))
}

/// Tokens without an answer. Clients look for vLLM's two beside `/v1` and in it, and for all of them without a rollout.
fn counting() -> Routes<Arc<App>> {
    let mut routes = Routes::new();
    for base in ["", "/rollouts/{rollout}"] {
        routes = routes.route(
            &format!("{base}/v1/messages/count_tokens"),
            post(gateway::count_tokens),
        );
        for version in ["", "/v1"] {
            let path = |name: &str| format!("{base}{version}/{name}");
            routes = routes
                .route(&path("tokenize"), post(gateway::tokenize))
                .route(&path("detokenize"), post(gateway::detokenize));
        }
    }
    routes
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
