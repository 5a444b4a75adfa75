//! What a worker that joins from another machine learns about its environment.
//!
//! The worker has no file of the run: the settings of its environment, its limits, and the examples that the first
//! worker listed come from here. Secrets are not among them: they are variables of the run's own workers, and only
//! their names are sent.

use super::envs::environment_named;
use crate::app::App;
use crate::envs::joining::First;
use crate::envs::wire::WorkerRole;
use axum::extract::{Query, State};
use axum::response::Response;
use primerl_gateway::RolloutLimits;
use primerl_service::http::{ApiError, Encoding};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
pub struct Asked {
    environment: String,
    role: Option<WorkerRole>,
}

#[derive(Serialize)]
struct Told<'a> {
    environment: &'a str,
    role: WorkerRole,
    /// Id of the verifiers environment.
    id: &'a str,
    model: String,
    limits: RolloutLimits,
    /// The table as the launcher wrote it.
    worker: &'a Map<String, Value>,
    /// `None` until a worker has registered.
    first: Option<First>,
}

pub async fn config(
    State(app): State<Arc<App>>,
    Query(asked): Query<Asked>,
) -> Result<Response, ApiError> {
    let (environment, role) = environment_named(&app, &asked.environment, asked.role)?;
    let index = environment.0 as usize;
    let config = &app.config;
    let trained = config.train.env.get(index);
    let trained = trained.map(|own| (&own.id, &own.worker));
    let measured = index.checked_sub(config.train.env.len());
    let measured = measured.and_then(|index| config.eval.env.get(index));
    let found = trained.or(measured.map(|own| (&own.id, &own.worker)));
    let (id, worker) = found.ok_or_else(|| ApiError::internal("the environment has no config"))?;
    Ok(Encoding::Json.ok(&Told {
        environment: &asked.environment,
        role,
        id,
        model: config.model.name(),
        limits: config.limits().get(index).copied().unwrap_or_default(),
        worker,
        first: app.first_workers.first(environment),
    }))
}
