//! The routes for agents, and the one where an env worker sends an example's limits.

use super::Service;
use super::count::{count_tokens, detokenize, tokenize};
use super::dialect::DIALECTS;
use super::endpoints::{models, rollout_model, rollout_models, route_of};
use super::rollouts::tighten;
use axum::routing::{get, post};
use primerl_service::http::Routes;
use std::sync::Arc;

/// Only the path decides which key opens each of them: see `access`.
pub fn routes() -> Routes<Arc<Service>> {
    let mut routes = counting();
    for dialect in DIALECTS {
        let path = format!("/rollouts/{{rollout}}/v1/{}", dialect.path());
        routes = routes
            .route(&path, route_of(dialect))
            .merge(dialect.routes());
    }
    routes
        .route("/rollouts/{rollout}/v1/models", get(rollout_models))
        .route("/rollouts/{rollout}/v1/models/{*model}", get(rollout_model))
        .route("/rollouts/{rollout}/limits", post(tighten))
        .route("/v1/models", get(models))
}

/// Token counts and conversions without an answer. Clients look for vLLM's two routes with and without `/v1`, and for
/// all of them without a rollout.
fn counting() -> Routes<Arc<Service>> {
    let mut routes = Routes::new();
    for base in ["", "/rollouts/{rollout}"] {
        routes = routes.route(
            &format!("{base}/v1/messages/count_tokens"),
            post(count_tokens),
        );
        for version in ["", "/v1"] {
            let path = |name: &str| format!("{base}{version}/{name}");
            routes = routes
                .route(&path("tokenize"), post(tokenize))
                .route(&path("detokenize"), post(detokenize));
        }
    }
    routes
}
