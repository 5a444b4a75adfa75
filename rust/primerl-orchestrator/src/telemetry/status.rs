//! `/status`, `/metrics` and `/health`: the core's view, joined with addresses, rates and processes.

use super::{Waits, process_cpu_seconds};
use crate::app::App;
use crate::engines::EngineStatus;
use crate::envs::refusals::RefusedStatus;
use crate::envs::workers::WorkerStatus;
use crate::http::{ApiError, JSON, encoded};
use axum::extract::State;
use axum::response::Response;
use primerl_core::{ErrorKind, Status, Time};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

/// An engine that is down for longer is a line in the waits.
const DOWN_IS_A_WAIT_S: f64 = 1.0;

pub async fn health() -> Response {
    encoded(JSON, r#"{"status":"ok"}"#)
}

pub async fn status(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    Ok(encoded(JSON, collect(&app).await?.to_string()))
}

pub async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let (status, _) = app.driver.status().await?;
    let text =
        exposition(&app, &status).map_err(|_| ApiError::internal("cannot encode metrics"))?;
    Ok(encoded(
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        text,
    ))
}

/// The whole of `/status`, as in `docs/architecture.md`.
pub async fn collect(app: &App) -> Result<Value, crate::driver::RunOver> {
    let (core, now) = app.driver.status().await?;
    let engines = app.engines.status();
    let elapsed = app.origin.elapsed().as_secs_f64();
    let telemetry = &app.telemetry;
    let environments = app.environment_names();
    let workers = app.workers.status(&environments);
    let refused = app.refusals.status(&environments);
    let rollouts = json!(core.rollouts);
    let mut waits = waits(&core, &engines, &telemetry.waits, now, elapsed);
    waits.extend(waits_for_others(&workers, &refused));
    Ok(json!({
        "run": {
            "step": core.run.next_step.0 - 1,
            "max_steps": core.run.max_steps,
            "policy_version": core.run.policy_version,
            "published_version": core.run.published_version,
            "elapsed_s": elapsed,
            "finished": core.run.finished,
        },
        "rollouts": rollouts,
        "groups": core.groups,
        "environments": core.environments,
        "buffer": core.buffer,
        "trainer": {
            "waiting": telemetry.trainer.is_waiting(),
            "last_seen_s": telemetry.trainer.last_seen().map(|seen| seen.as_secs_f64()),
            "doing": telemetry.trainer.doing(),
            "idle_share": telemetry.trainer.idle_share(),
            "waited_s": telemetry.trainer.waited().as_secs_f64(),
            "fetched_step": core.trainer.fetched,
        },
        "waits": waits,
        "engines": engines,
        "workers": workers,
        "refused_workers": refused,
        "tokens": {
            "sampled": telemetry.sampled_tokens.get(),
            "prompt": telemetry.prompt_tokens.get(),
            "per_second": telemetry.tokens_per_second(),
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

/// Environments whose workers were all refused.
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

fn waits(
    core: &Status,
    engines: &[EngineStatus],
    shell: &Waits,
    now: Time,
    elapsed: f64,
) -> Vec<Value> {
    let core_waits = core.waits.iter().map(|wait| {
        json!({
            "who": wait.who,
            "for": wait.waiting_for,
            "since_s": now.since(wait.since).as_secs_f64(),
            "deadline_s": wait.deadline.since(now).as_secs_f64(),
        })
    });
    let down = engines.iter().filter_map(|engine| {
        let seconds = engine.down_for?.as_secs_f64();
        (seconds > DOWN_IS_A_WAIT_S).then(|| {
            json!({"who": format!("engine {}", engine.url), "for": engine.doing, "since_s": seconds, "deadline_s": null})
        })
    });
    let none = engines.is_empty().then(|| {
        json!({"who": "gateway", "for": "the first engine to join", "since_s": elapsed, "deadline_s": null})
    });
    let shell = shell.all().into_iter().map(|wait| json!(wait));
    core_waits.chain(down).chain(none).chain(shell).collect()
}

fn exposition(app: &App, status: &Status) -> Result<String, std::fmt::Error> {
    let telemetry = &app.telemetry;
    let mut text = telemetry.encode()?;
    let end = text.rfind("# EOF").unwrap_or(text.len());
    text.truncate(end);
    let mut gauge = |name: &str, help: &str, value: f64| {
        writeln!(
            text,
            "# HELP primerl_{name} {help}\n# TYPE primerl_{name} gauge\nprimerl_{name} {value}"
        )
    };
    gauge(
        "step",
        "Steps whose batch was cut",
        (status.run.next_step.0 - 1) as f64,
    )?;
    gauge(
        "policy_version",
        "Newest proved version, -1 before the first",
        version(status),
    )?;
    gauge(
        "groups_ready",
        "Complete groups that wait for the cut",
        status.groups.ready as f64,
    )?;
    let Value::Object(rollouts) = json!(status.rollouts) else {
        return Err(std::fmt::Error);
    };
    for (name, value) in &rollouts {
        gauge(
            &format!("rollouts_{name}"),
            "Rollouts by state",
            value.as_f64().unwrap_or(0.0),
        )?;
    }
    gauge(
        "trainer_idle_share",
        "Share of time waiting for batches",
        telemetry.trainer.idle_share().unwrap_or(0.0),
    )?;
    gauge(
        "trainer_waited_seconds",
        "Time spent waiting for batches",
        telemetry.trainer.waited().as_secs_f64(),
    )?;
    gauge(
        "engine_failovers",
        "Requests sent again after a failure",
        app.engines.failovers() as f64,
    )?;
    gauge(
        "engine_sampled_again",
        "Answers sampled again because an engine that renders loaded weights meanwhile",
        app.engines.crossed() as f64,
    )?;
    gauge(
        "process_cpu_seconds",
        "CPU time of the orchestrator",
        process_cpu_seconds().unwrap_or(0.0),
    )?;
    errors(&mut text, status)?;
    engines(&mut text, &app.engines.status())?;
    text.push_str("# EOF\n");
    Ok(text)
}

fn version(status: &Status) -> f64 {
    status
        .run
        .policy_version
        .map_or(-1.0, |version| version.0 as f64)
}

fn errors(text: &mut String, status: &Status) -> std::fmt::Result {
    let help = "Rollouts that failed or were lost with their worker, by who is to blame";
    writeln!(
        text,
        "# HELP primerl_rollout_errors {help}\n# TYPE primerl_rollout_errors counter"
    )?;
    for environment in &status.environments {
        for kind in ErrorKind::ALL {
            let (name, kind_name) = (&environment.name, kind.name());
            let count = environment.errors.get(&kind).copied().unwrap_or(0);
            // Names are escaped as a string of Rust's is.
            writeln!(
                text,
                "primerl_rollout_errors_total{{environment={name:?},kind=\"{kind_name}\"}} {count}"
            )?;
        }
    }
    Ok(())
}

fn engines(text: &mut String, engines: &[EngineStatus]) -> std::fmt::Result {
    let mut family = |name: &str, help: &str, value: &dyn Fn(&EngineStatus) -> f64| {
        writeln!(
            text,
            "# HELP primerl_{name} {help}\n# TYPE primerl_{name} gauge"
        )?;
        engines.iter().try_for_each(|engine| {
            writeln!(
                text,
                "primerl_{name}{{engine=\"{}\"}} {}",
                engine.engine,
                value(engine)
            )
        })
    };
    family("engine_running", "Requests in flight", &|engine| {
        f64::from(engine.running)
    })?;
    family("engine_healthy", "1 when it answers", &|engine| {
        f64::from(u8::from(engine.healthy))
    })?;
    family(
        "engine_idle_share",
        "Share of time without a request",
        &|engine| engine.idle_share.unwrap_or(0.0),
    )?;
    family(
        "engine_version",
        "Version it proved, -1 for none",
        &|engine| engine.version.map_or(-1.0, |version| version.0 as f64),
    )
}
