//! `/status`, `/metrics` and `/health`: the core's view, joined with addresses, rates and processes.

use super::{metrics as exposition, rollout_waits};
use crate::app::App;
use crate::envs::refusals::RefusedStatus;
use crate::envs::workers::{Blocked, WorkerStatus};
use axum::extract::State;
use axum::response::Response;
use primerl_core::status::{WaitStatus, own_name};
use primerl_core::{Status, Time};
use primerl_engines::EngineStatus;
use primerl_service::cpu::process_cpu_seconds;
use primerl_service::http::{ApiError, JSON, encoded};
use primerl_service::inbox::RunOver;
use primerl_service::waits::Waits;
use serde_json::{Value, json};
use std::sync::Arc;

/// An engine that is down for longer gets a line in the waits.
const DOWN_IS_A_WAIT_S: f64 = 1.0;

pub async fn health() -> Response {
    encoded(JSON, r#"{"status":"ok"}"#)
}

pub async fn status(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    Ok(encoded(JSON, collect(&app).await?.to_string()))
}

pub async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let (status, _) = app.driver.status().await?;
    let text = exposition::exposition(&app, &status)
        .map_err(|_| ApiError::internal("cannot encode metrics"))?;
    Ok(encoded(
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        text,
    ))
}

/// The whole of `/status`, as in `docs/architecture.md`.
pub async fn collect(app: &App) -> Result<Value, RunOver> {
    let (core, now) = app.driver.status().await?;
    let engines = app.engines.status();
    let elapsed = app.origin.elapsed().as_secs_f64();
    let telemetry = &app.telemetry;
    let environments = app.environment_names();
    let workers = workers(app, &core, now, &environments);
    let refused = app.refusals.status(&environments);
    let rollouts = json!(core.rollouts);
    let rollouts_wait = rollouts_wait(app, &workers, &environments);
    let mut waits = waits(
        &core,
        rollouts_wait,
        &engines,
        &telemetry.waits,
        now,
        elapsed,
    );
    waits.extend(waits_for_others(&workers, &refused));
    // Usual waits come last.
    waits.sort_by_key(|wait| wait["usual"] == true);
    Ok(json!({
        "run": {
            "step": core.run.next_step.0 - 1,
            "max_steps": core.run.max_steps,
            "policy_version": core.run.policy_version,
            "published_version": core.run.published_version,
            "sampled_tokens": core.run.sampled_tokens,
            "elapsed_s": elapsed,
            "finished": core.run.finished,
        },
        "rollouts": rollouts,
        "groups": core.groups,
        "without_signal_s": core.groups.without_signal_since.map(|since| now.since(since).as_secs_f64()),
        "environments": core.environments,
        "buffer": core.buffer,
        "trainer": trainer(app, &core),
        "waits": waits,
        "engines": engines,
        "workers": workers,
        "refused_workers": refused,
        "tokens": {
            "sampled": telemetry.gateway.sampled_tokens.get(),
            "prompt": telemetry.gateway.prompt_tokens.get(),
            "per_second": telemetry.gateway.tokens_per_second(),
        },
        "failovers": app.engines.failovers(),
        "sampled_again": app.engines.crossed(),
        "failures": core.failures,
        "errors": core.errors,
        "cancelled": core.cancelled,
        "voided": core.voided,
        "ignored_events": core.ignored,
        "last_step": core.last_step,
        "running_evaluations": core.evaluations,
        "evaluations": telemetry.evaluations.lock().clone(),
        "cpu_s": process_cpu_seconds(),
    }))
}

fn trainer(app: &App, core: &Status) -> Value {
    let telemetry = &app.telemetry;
    json!({
        "waiting": telemetry.trainer.is_waiting(),
        "last_seen_s": telemetry.trainer.last_seen().map(|seen| seen.as_secs_f64()),
        "silent_s": telemetry.trainer.silent_for().map(|silent| silent.as_secs_f64()),
        "doing": telemetry.trainer.doing(),
        "idle_share": telemetry.trainer.idle_share(),
        "waited_s": telemetry.trainer.waited().as_secs_f64(),
        "fetched_step": core.trainer.fetched,
        "process": app.holder.known().map(|(pid, host)| json!({"pid": pid, "host": host})),
    })
}

fn workers(app: &App, core: &Status, now: Time, environments: &[String]) -> Vec<WorkerStatus> {
    let mut workers = app.workers.status(environments);
    for worker in &mut workers {
        let known = core.workers.iter().find(|one| one.worker == worker.worker);
        let block = known.and_then(|one| one.blocked.as_ref());
        worker.blocked = block.map(|block| Blocked {
            since_s: now.since(block.since).as_secs_f64(),
            at: block.at.clone(),
            rollout: block.rollout,
        });
    }
    workers
}

fn rollouts_wait(app: &App, workers: &[WorkerStatus], environments: &[String]) -> Vec<Value> {
    let names = workers.iter();
    let names = names.map(|worker| (worker.worker, own_name(&worker.name).to_owned()));
    let blocked = workers.iter().filter(|worker| worker.blocked.is_some());
    let blocked = blocked.map(|worker| worker.worker).collect();
    rollout_waits::waits(app, environments, &names.collect(), &blocked)
}

/// Environments all of whose workers were refused.
fn waits_for_others(
    workers: &[WorkerStatus],
    refused: &[RefusedStatus],
) -> impl Iterator<Item = Value> {
    let is_served = |refused: &&RefusedStatus| {
        let mut workers = workers.iter();
        workers.any(|worker| worker.environment == refused.environment)
    };
    refused.iter().filter(move |refused| !is_served(refused)).map(|refused| {
        let RefusedStatus { environment, refused, reason, since_s, .. } = refused;
        json!({
            "who": format!("environment {environment:?}"),
            "for": format!("a worker that can be accepted: {refused} refused, the last because of {reason}"),
            "since_s": since_s,
            "deadline_s": null,
        })
    })
}

/// In the order of who waits for whom.
fn waits(
    core: &Status,
    rollouts: Vec<Value>,
    engines: &[EngineStatus],
    shell: &Waits,
    now: Time,
    elapsed: f64,
) -> Vec<Value> {
    let core_waits = core.waits.iter().map(|wait| core_wait(wait, now));
    let down = engines.iter().filter_map(down_wait);
    let none = engines.is_empty().then(|| {
        json!({"who": "gateway", "for": "the first engine to join", "since_s": elapsed, "deadline_s": null})
    });
    let shell = shell.all().into_iter().map(|wait| json!(wait));
    core_waits
        .chain(rollouts)
        .chain(down)
        .chain(none)
        .chain(shell)
        .collect()
}

fn core_wait(wait: &WaitStatus, now: Time) -> Value {
    let mut told = json!({
        "who": wait.who,
        "for": wait.waiting_for,
        "since_s": now.since(wait.since).as_secs_f64(),
        "deadline_s": wait.deadline.since(now).as_secs_f64(),
    });
    if wait.is_usual {
        told["usual"] = json!(true);
    }
    if wait.is_end {
        told["end"] = json!(true);
    }
    told
}

fn down_wait(engine: &EngineStatus) -> Option<Value> {
    let seconds = engine.down_for?.as_secs_f64();
    (seconds > DOWN_IS_A_WAIT_S).then(|| {
        json!({
            "who": format!("engine {}", engine.url),
            "engine": engine.engine,
            "for": engine.doing,
            "since_s": seconds,
            "deadline_s": null,
        })
    })
}
