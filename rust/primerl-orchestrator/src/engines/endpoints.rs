//! Where engines join.

use crate::app::App;
use crate::http::{ApiError, Wire};
use axum::extract::State;
use axum::response::Response;
use primerl_core::EngineId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
pub struct JoinRequest {
    url: String,
}

#[derive(Debug, Serialize)]
struct JoinAnswer {
    engine: EngineId,
}

pub async fn join(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<JoinRequest>,
) -> Result<Response, ApiError> {
    let engine = app
        .engines
        .join(&body.url)
        .map_err(|problem| ApiError::invalid(problem).param("url"))?;
    tracing::info!(%engine, url = body.url, "engine joined");
    Ok(encoding.ok(&JoinAnswer { engine }))
}
