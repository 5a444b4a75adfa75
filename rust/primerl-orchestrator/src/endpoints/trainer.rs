//! The trainer's endpoints (`docs/architecture.md`).

use crate::app::App;
use crate::trainer::holder::{Answer, Identity};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use primerl_core::{Event, PolicyVersion, Step};
use primerl_engines::{BrokenWeights, manifest};
use primerl_service::http::{ApiError, MSGPACK, Wire, encoded};
use primerl_service::inbox::BatchReply;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug, Deserialize)]
pub struct BatchRequest {
    step: Step,
    rank: u32,
    /// It trains the previous step: it takes the batch if it is there, and does not wait.
    #[serde(default)]
    ahead: bool,
    #[serde(default)]
    trainer: Option<Identity>,
}

#[derive(Debug, Serialize)]
struct NotReady {
    waiting_for: String,
    /// Weights that the trainer has to write again: no engine can load its files.
    #[serde(skip_serializing_if = "Option::is_none")]
    publish_again: Option<BrokenWeights>,
}

#[derive(Debug, Deserialize)]
pub struct WeightsRequest {
    version: PolicyVersion,
    manifest: PathBuf,
    #[serde(default)]
    trainer: Option<Identity>,
}

/// A trainer asks for the run, before any other request.
#[derive(Debug, Deserialize)]
pub struct BeginRequest {
    trainer: Identity,
}

/// The launcher starts a trainer.
#[derive(Debug, Deserialize)]
pub struct StartingRequest {
    /// How long it may take to begin. Omitted at the run's start, when other checks cover it.
    #[serde(default)]
    within_s: Option<f64>,
    /// Why it is started again.
    #[serde(default)]
    why: String,
}

#[derive(Debug, Deserialize)]
pub struct HeartbeatRequest {
    #[serde(rename = "step")]
    _step: u64,
    doing: String,
    /// The trainer says goodbye: its silence from now on is not a failure.
    #[serde(default)]
    leaving: bool,
    #[serde(default)]
    trainer: Option<Identity>,
}

/// The step after which the trainer continues.
#[derive(Debug, Deserialize)]
pub struct ResumeRequest {
    step: Step,
    #[serde(default)]
    trainer: Option<Identity>,
}

#[derive(Debug, Deserialize)]
pub struct CheckpointRequest {
    /// Batches up to here are no longer needed.
    step: Step,
    /// The checkpoint that was just written to the disk.
    #[serde(default)]
    saved: Option<Step>,
    #[serde(default)]
    trainer: Option<Identity>,
}

#[derive(Debug, Deserialize)]
pub struct ShutdownRequest {
    reason: String,
}

#[derive(Debug, Serialize)]
struct Empty {}

/// Whether the trainer of a request has the run.
fn admit(app: &App, trainer: Option<&Identity>) -> Result<(), ApiError> {
    let admitted = app.holder.admit(trainer);
    admitted.map_err(|why| ApiError::conflict("trainer_taken", why))
}

/// Gives the run to a trainer, or reports which other one has it; a long poll while the other may be gone.
pub async fn begin(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<BeginRequest>,
) -> Result<Response, ApiError> {
    let since = Instant::now();
    let end = since + Duration::from_secs_f64(app.config.timeouts.long_poll_s);
    loop {
        let changed = app.holder.changed();
        match app.holder.begin(&body.trainer, since) {
            Answer::Yours => {
                app.telemetry.trainer.heard();
                return Ok(encoding.ok(&Empty {}));
            }
            Answer::Refused(why) => return Err(ApiError::conflict("trainer_taken", why)),
            Answer::Unknown(until, other) => {
                if end <= Instant::now() {
                    let waiting_for = format!("a sign of the run's trainer, {other}");
                    let answer = NotReady {
                        waiting_for,
                        publish_again: None,
                    };
                    return Ok(encoding.respond(StatusCode::ACCEPTED, &answer));
                }
                tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep_until(until.min(end).into()) => {}
                    _ = app.failures.wait() => return Err(app.over()),
                }
            }
        }
    }
}

/// The launcher reports that its trainer is being started.
pub async fn starting(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<StartingRequest>,
) -> Result<Response, ApiError> {
    let within = match body.within_s.map(Duration::try_from_secs_f64) {
        Some(Err(error)) => {
            return Err(ApiError::invalid(format!("within_s: {error}")).param("within_s"));
        }
        Some(Ok(within)) => Some(within),
        None => None,
    };
    app.holder.is_started_again();
    if let Some(within) = within {
        tracing::info!(why = body.why, ?within, "the trainer is started again");
        app.telemetry.trainer.is_started(within, body.why);
    }
    Ok(encoding.ok(&Empty {}))
}

/// A rank's batch, or why there is none yet.
pub async fn wait_for_batch(app: &App, step: Step, rank: u32) -> Result<BatchReply, ApiError> {
    check_rank(app, step, rank)?;
    app.telemetry.trainer.asked();
    let reply = app.driver.batch(step, rank).await.map_err(|_| app.over())?;
    match &reply {
        BatchReply::Batch(_) => app.telemetry.trainer.answered(),
        BatchReply::NoMore => app.telemetry.trainer.ended(),
        BatchReply::NotReady { .. } => app.telemetry.trainer.heard(),
    }
    Ok(reply)
}

async fn batch_ahead(app: &App, step: Step, rank: u32) -> Result<BatchReply, ApiError> {
    check_rank(app, step, rank)?;
    app.telemetry.trainer.heard();
    let reply = app.driver.next_batch(step, rank).await;
    reply.map_err(|_| app.over())
}

fn check_rank(app: &App, step: Step, rank: u32) -> Result<(), ApiError> {
    if step.0 == 0 {
        return Err(ApiError::invalid("steps are counted from 1").param("step"));
    }
    let ranks = app.config.run.data_ranks;
    if rank >= ranks {
        let message = format!(
            "rank {rank} was asked for, data_ranks is {ranks}; start as many trainer processes"
        );
        return Err(ApiError::invalid(message).param("rank"));
    }
    Ok(())
}

pub async fn batch(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<BatchRequest>,
) -> Result<Response, ApiError> {
    admit(&app, body.trainer.as_ref())?;
    let reply = match body.ahead {
        true => batch_ahead(&app, body.step, body.rank).await?,
        false => wait_for_batch(&app, body.step, body.rank).await?,
    };
    match reply {
        BatchReply::Batch(bytes) => Ok(encoded(MSGPACK, Bytes::clone(&bytes))),
        BatchReply::NotReady { waiting_for } => {
            let publish_again = app.engines.broken_weights();
            let answer = NotReady {
                waiting_for,
                publish_again,
            };
            Ok(encoding.respond(StatusCode::ACCEPTED, &answer))
        }
        BatchReply::NoMore => Err(ApiError::gone(
            "no_more_batches",
            "there are no more batches",
        )),
    }
}

/// Checks the manifest and reports the weights to the core; the result is durable.
pub async fn publish(app: &App, version: PolicyVersion, path: PathBuf) -> Result<(), ApiError> {
    app.telemetry.trainer.heard();
    let checked = path.clone();
    let digest = tokio::task::spawn_blocking(move || manifest::check(&checked, version))
        .await
        .map_err(|error| ApiError::internal(error.to_string()))?
        .map_err(|error| ApiError::invalid(error.to_string()).param("manifest"))?;
    let manifest = path.to_string_lossy().into_owned();
    app.driver
        .weights_published(version, manifest, digest)
        .await
        .map_err(|_| app.over())?
        .map_err(|why| ApiError::conflict("version_not_due", why).param("version"))?;
    app.engines.note_published();
    tracing::info!(%version, manifest = %path.display(), "weights published");
    Ok(())
}

pub async fn weights(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<WeightsRequest>,
) -> Result<Response, ApiError> {
    admit(&app, body.trainer.as_ref())?;
    publish(&app, body.version, body.manifest).await?;
    Ok(encoding.ok(&Empty {}))
}

/// The trainer continues after `step`; durable.
pub async fn resume_after(app: &App, step: Step) -> Result<(), ApiError> {
    app.telemetry.trainer.heard();
    let resumed = app.driver.trainer_resumed(step).await;
    resumed
        .map_err(|_| app.over())?
        .map_err(|why| ApiError::conflict("step_not_resumable", why).param("step"))?;
    tracing::info!(%step, "the trainer continues after this step");
    Ok(())
}

pub async fn resume(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<ResumeRequest>,
) -> Result<Response, ApiError> {
    admit(&app, body.trainer.as_ref())?;
    resume_after(&app, body.step).await?;
    Ok(encoding.ok(&Empty {}))
}

/// Batches up to `step` will not be requested again; durable. `saved`: the checkpoint next to which the run's state is
/// to be kept.
pub async fn checkpoint_saved(app: &App, step: Step, saved: Option<Step>) -> Result<(), ApiError> {
    app.telemetry.trainer.heard();
    let verdict = app.driver.checkpoint_saved(step, saved).await;
    verdict
        .map_err(|_| app.over())?
        .map_err(|why| ApiError::conflict("step_not_trained", why).param("step"))
}

pub async fn checkpoint(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<CheckpointRequest>,
) -> Result<Response, ApiError> {
    admit(&app, body.trainer.as_ref())?;
    checkpoint_saved(&app, body.step, body.saved).await?;
    Ok(encoding.ok(&Empty {}))
}

pub async fn heartbeat(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<HeartbeatRequest>,
) -> Result<Response, ApiError> {
    admit(&app, body.trainer.as_ref())?;
    app.telemetry.trainer.beat(body.doing, body.leaving);
    if body.leaving {
        app.holder.left(body.trainer.as_ref());
    }
    Ok(encoding.ok(&Empty {}))
}

pub async fn shutdown(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<ShutdownRequest>,
) -> Result<Response, ApiError> {
    tracing::info!(reason = body.reason, "shutdown requested");
    app.driver.send(Event::ShutdownRequested {
        reason: body.reason,
    });
    Ok(encoding.ok(&Empty {}))
}
