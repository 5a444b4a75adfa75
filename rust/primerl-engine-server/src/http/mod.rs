//! The wire: vLLM's routes, bodies and error shapes. Handlers check, send a command and wait; they decide nothing.

mod admin;
mod answer;
mod body;
mod chat;
mod error;
mod generate;
mod rendering;
mod structured;
mod wire;

use self::body::Bodies;
use self::rendering::Rendering;
use self::structured::Structured;
use crate::config::Config;
use crate::handle::EngineHandle;
use crate::metrics::Metrics;
use crate::model_info::ModelInfo;
use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

pub struct App {
    config: Config,
    model: ModelInfo,
    engine: EngineHandle,
    metrics: Arc<Metrics>,
    rendering: Rendering,
    bodies: Bodies,
    structured: Structured,
    /// Generate calls in flight.
    load: AtomicU64,
    /// Makes request ids that clients did not choose unique over restarts, too.
    started: u128,
}

impl App {
    pub fn new(
        config: Config,
        model: ModelInfo,
        engine: EngineHandle,
        metrics: Arc<Metrics>,
    ) -> Self {
        let started = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos());
        App {
            rendering: Rendering::new(config.chat_model.clone()),
            bodies: Bodies::new(config.max_model_len),
            structured: Structured::default(),
            config,
            model,
            engine,
            metrics,
            load: AtomicU64::new(0),
            started,
        }
    }

    fn created(&self) -> u64 {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs())
    }

    /// Counts a call as long as the guard lives.
    fn enter(self: &Arc<Self>) -> LoadGuard {
        self.load.fetch_add(1, Ordering::Relaxed);
        LoadGuard(self.clone())
    }
}

struct LoadGuard(Arc<App>);

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.0.load.fetch_sub(1, Ordering::Relaxed);
    }
}

pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/inference/v1/generate", post(generate::generate))
        .route("/v1/chat/completions", post(chat::completions))
        .route("/tokenize", post(chat::tokenize))
        .route("/inference/v1/abort_requests", post(admin::abort_by_id))
        .route("/abort_requests", post(admin::abort))
        .route("/pause", post(admin::pause))
        .route("/resume", post(admin::resume))
        .route("/is_paused", get(admin::is_paused))
        .route("/reset_prefix_cache", post(admin::reset_prefix_cache))
        .route("/start_weight_update", post(admin::start_weight_update))
        .route("/update_weights", post(admin::update_weights))
        .route("/finish_weight_update", post(admin::finish_weight_update))
        .route("/update_weight_version", post(admin::update_weight_version))
        .route("/weight_info", get(admin::weight_info))
        .route("/collective_rpc", post(admin::collective_rpc))
        .route("/health", get(admin::health))
        .route("/version", get(admin::version))
        .route("/load", get(admin::load))
        .route("/get_world_size", get(admin::world_size))
        .route("/v1/models", get(admin::models))
        .route("/metrics", get(admin::metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::clone(&app), read_body))
        .with_state(app)
}

/// Reads every body to its end before a handler answers. A connection whose body was left unread is closed after the
/// answer, and a client that keeps connections would find its next call refused.
async fn read_body(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match app.bodies.read(body).await {
        Ok(whole) => {
            let body = Body::from(whole.bytes.clone());
            next.run(Request::from_parts(parts, body)).await
        }
        Err(error) => error.into_response(),
    }
}

// These two have another shape than all other errors, as in vLLM.
async fn not_found() -> Response {
    (
        StatusCode::NOT_FOUND,
        axum::Json(serde_json::json!({"detail": "Not Found"})),
    )
        .into_response()
}

async fn method_not_allowed() -> Response {
    (
        StatusCode::METHOD_NOT_ALLOWED,
        axum::Json(serde_json::json!({"detail": "Method Not Allowed"})),
    )
        .into_response()
}
