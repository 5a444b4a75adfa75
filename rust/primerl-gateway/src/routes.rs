//! The routes for agents, and the one where an env worker sends an example's limits.

use super::Service;
use super::count::{count_tokens, detokenize, tokenize};
use super::dialect::{delete_response, response_input_items, retrieve_response};
use super::endpoints::{
    chat_completions, completions, messages, models, responses, rollout_model, rollout_models,
};
use super::rollouts::tighten;
use axum::routing::{get, post};
use primerl_service::http::Routes;
use std::sync::Arc;

/// Only the path decides which key opens each of them: see `access`.
pub fn routes() -> Routes<Arc<Service>> {
    Routes::new()
        .route(
            "/rollouts/{rollout}/v1/chat/completions",
            post(chat_completions),
        )
        .route("/rollouts/{rollout}/v1/messages", post(messages))
        .merge(counting())
        .route("/rollouts/{rollout}/v1/completions", post(completions))
        .route("/rollouts/{rollout}/v1/responses", post(responses))
        .route(
            "/rollouts/{rollout}/v1/responses/{response}",
            get(retrieve_response).delete(delete_response),
        )
        .route(
            "/rollouts/{rollout}/v1/responses/{response}/input_items",
            get(response_input_items),
        )
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
