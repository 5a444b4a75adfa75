//! The endpoints where engines join, and where it is asked whether they could be reached.

use crate::app::App;
use axum::extract::State;
use axum::response::Response;
use primerl_core::EngineId;
use primerl_engines::Engines;
use primerl_service::http::{ApiError, Wire};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
pub struct JoinRequest {
    url: String,
    /// An engine that joins under this name takes the place of the one that had it.
    #[serde(default)]
    name: Option<String>,
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
        .join(&body.url, body.name.as_deref())
        .map_err(|problem| ApiError::invalid(problem).param("url"))?;
    tracing::info!(%engine, url = body.url, name = body.name, "engine joined");
    let writer = Arc::clone(&app);
    let write = move || writer.engines.write_records(&writer.config.output_dir);
    if let Ok(Err(error)) = tokio::task::spawn_blocking(write).await {
        tracing::warn!(
            %error, problem = %error.source,
            "cannot write the engine records; after a restart, engines may be looked for at their old addresses"
        );
    }
    Ok(encoding.ok(&JoinAnswer { engine }))
}

#[derive(Debug, Deserialize)]
pub struct ReachRequest {
    url: String,
}

#[derive(Debug, Serialize)]
struct ReachAnswer {
    reached: bool,
    /// Why it is not reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

/// For the dry run of an engine: nothing joins.
pub async fn reach(Wire { body, encoding }: Wire<ReachRequest>) -> Result<Response, ApiError> {
    let reached = Engines::reach(&body.url)
        .await
        .map_err(|problem| ApiError::invalid(problem).param("url"))?;
    Ok(encoding.ok(&ReachAnswer {
        reached: reached.is_ok(),
        why: reached.err(),
    }))
}
