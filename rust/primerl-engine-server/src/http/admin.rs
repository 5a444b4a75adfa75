//! Everything but generation: pause, weights, health, metrics.

use super::App;
use super::error::ApiError;
use super::wire::check_content_type;
use crate::handle::{Command, CommandError, PauseMode};
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

type Answer = Result<Response, ApiError>;
type Parameters = Query<HashMap<String, String>>;

fn parse<T: DeserializeOwned>(headers: &HeaderMap, body: &Bytes) -> Result<T, ApiError> {
    check_content_type(headers)?;
    let body: &[u8] = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body)
        .map_err(|error| ApiError::body("type_error", "body", &error.to_string()))
}

fn json_answer(value: Value) -> Answer {
    Ok(Json(value).into_response())
}

/// Reads a flag of the query as FastAPI does.
fn flag(parameters: &HashMap<String, String>, name: &str, default: bool) -> Result<bool, ApiError> {
    match parameters
        .get(name)
        .map(|value| value.to_ascii_lowercase())
        .as_deref()
    {
        None => Ok(default),
        Some("true" | "1" | "yes" | "on") => Ok(true),
        Some("false" | "0" | "no" | "off") => Ok(false),
        Some(_) => Err(ApiError::body(
            "bool_parsing",
            &format!("query.{name}"),
            "Input should be a valid boolean",
        )),
    }
}

#[derive(Deserialize)]
struct AbortBody {
    request_ids: Option<Vec<String>>,
}

/// The route of the serving surface: ids are required, the answer is empty.
pub async fn abort_by_id(State(app): State<Arc<App>>, headers: HeaderMap, body: Bytes) -> Answer {
    let AbortBody {
        request_ids: Some(request_ids),
    } = parse(&headers, &body)?
    else {
        return Err(ApiError::body(
            "missing",
            "body.request_ids",
            "Field required",
        ));
    };
    let answer = app
        .engine
        .ask(|answer| Command::Abort {
            request_ids: Some(request_ids),
            answer,
        })
        .await?;
    answer.map_err(|error| ApiError::rpc_failed(&error))?;
    Ok(StatusCode::OK.into_response())
}

/// The route for operators: without ids it aborts everything.
pub async fn abort(State(app): State<Arc<App>>, headers: HeaderMap, body: Bytes) -> Answer {
    let AbortBody { request_ids } = parse(&headers, &body)?;
    let answer = app
        .engine
        .ask(|answer| Command::Abort {
            request_ids,
            answer,
        })
        .await?;
    let aborted = answer.map_err(|error| ApiError::rpc_failed(&error))?;
    json_answer(json!({"status": "aborted", "aborted": aborted}))
}

fn pause_mode(mode: Option<&str>) -> Result<PauseMode, ApiError> {
    match mode {
        None | Some("abort") => Ok(PauseMode::Abort),
        Some("wait") => Ok(PauseMode::Wait),
        Some("keep") => Ok(PauseMode::Keep),
        Some(_) => Err(ApiError::body(
            "literal_error",
            "query.mode",
            "Input should be abort, wait or keep",
        )),
    }
}

pub async fn pause(State(app): State<Arc<App>>, Query(parameters): Parameters) -> Answer {
    let mode = pause_mode(parameters.get("mode").map(String::as_str))?;
    let clear_cache = flag(&parameters, "clear_cache", true)?;
    match app
        .engine
        .ask(|answer| Command::Pause {
            mode,
            clear_cache,
            answer,
        })
        .await?
    {
        Ok(()) => json_answer(json!({"status": "paused"})),
        // A string, not an object: vLLM's shape for these routes.
        Err(error) => {
            let body = Json(json!({"error": format!("Failed to pause generation: {error}")}));
            Ok((StatusCode::INTERNAL_SERVER_ERROR, body).into_response())
        }
    }
}

/// Asks the engine something whose failure is a 500 of `collective_rpc`.
async fn ask<T>(
    app: &App,
    command: impl FnOnce(tokio::sync::oneshot::Sender<Result<T, CommandError>>) -> Command,
) -> Result<T, ApiError> {
    app.engine
        .ask(command)
        .await?
        .map_err(|error| ApiError::rpc_failed(&error))
}

pub async fn resume(State(app): State<Arc<App>>) -> Answer {
    ask(&app, |answer| Command::Resume { answer }).await?;
    json_answer(json!({"status": "resumed"}))
}

pub async fn is_paused(State(app): State<Arc<App>>) -> Answer {
    let is_paused = ask(&app, |answer| Command::IsPaused { answer }).await?;
    json_answer(json!({"is_paused": is_paused}))
}

pub async fn reset_prefix_cache(
    State(app): State<Arc<App>>,
    Query(parameters): Parameters,
) -> Answer {
    let running_too = flag(&parameters, "reset_running_requests", false)?;
    let success = ask(&app, |answer| Command::ResetCache {
        running_too,
        answer,
    })
    .await?;
    json_answer(json!({"success": success}))
}

pub async fn start_weight_update(State(app): State<Arc<App>>) -> Answer {
    ask(&app, |answer| Command::StartUpdate { answer }).await?;
    json_answer(json!({"message": "Weight update started"}))
}

#[derive(Deserialize)]
struct UpdateBody {
    update_info: UpdateInfo,
}

#[derive(Deserialize)]
struct UpdateInfo {
    path: PathBuf,
}

pub async fn update_weights(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let UpdateBody {
        update_info: UpdateInfo { path },
    } = parse(&headers, &body)?;
    ask(&app, |answer| Command::LoadWeights { path, answer }).await?;
    json_answer(json!({"message": "Weights updated"}))
}

#[derive(Deserialize)]
struct FinishBody {
    weight_version: Option<String>,
}

pub async fn finish_weight_update(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let FinishBody {
        weight_version: label,
    } = parse(&headers, &body)?;
    ask(&app, |answer| Command::FinishUpdate { label, answer }).await?;
    json_answer(json!({"message": "Weight update finished"}))
}

#[derive(Deserialize)]
struct VersionBody {
    new_version: String,
}

pub async fn update_weight_version(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let VersionBody { new_version } = parse(&headers, &body)?;
    let label = new_version.clone();
    ask(&app, |answer| Command::SetLabel { label, answer }).await?;
    json_answer(json!({"success": true, "new_version": new_version}))
}

pub async fn weight_info(State(app): State<Arc<App>>) -> Answer {
    let label = ask(&app, |answer| Command::Label { answer }).await?;
    json_answer(json!({"weight_version": &*label}))
}

#[derive(Deserialize)]
struct RpcBody {
    method: String,
}

pub async fn collective_rpc(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let RpcBody { method } = parse(&headers, &body)?;
    if method != "primerl_weight_digest" {
        return Err(ApiError::rpc_failed(&CommandError(format!(
            "Method '{method}' is not implemented."
        ))));
    }
    let digest = ask(&app, |answer| Command::Digest { answer }).await?;
    json_answer(json!({"results": [{"digest": digest}]}))
}

/// 200 when requests will be answered; 503 with the reason when the engine is dead or a step hangs.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let stalled = app
        .engine
        .step_lasts()
        .filter(|&lasts| lasts > app.config.step_deadline());
    let reason = match (app.engine.failure(), stalled) {
        (Some(failure), _) => format!("The engine is dead: {failure}"),
        (None, Some(lasts)) => format!(
            "The current step has been running for {:.1} s",
            lasts.as_secs_f64()
        ),
        (None, None) => return StatusCode::OK.into_response(),
    };
    let error = json!({"error": {
        "message": reason, "type": "ServiceUnavailableError", "param": null, "code": 503,
    }});
    (StatusCode::SERVICE_UNAVAILABLE, Json(error)).into_response()
}

pub async fn version() -> Answer {
    json_answer(json!({"version": env!("CARGO_PKG_VERSION")}))
}

pub async fn world_size() -> Answer {
    json_answer(json!({"world_size": 1}))
}

pub async fn load(State(app): State<Arc<App>>) -> Answer {
    json_answer(json!({"server_load": app.load.load(Ordering::Relaxed)}))
}

pub async fn models(State(app): State<Arc<App>>) -> Answer {
    let config = &app.config;
    json_answer(json!({"object": "list", "data": [{
        "id": config.served_model_name, "object": "model", "created": app.created(), "owned_by": "primerl",
        "root": config.model_root, "parent": null, "max_model_len": config.max_model_len,
    }]}))
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let content_type = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], app.metrics.encode()).into_response()
}
