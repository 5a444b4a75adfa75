//! Checks the health of one engine: until it may join, and while it serves. `health` has the rules for what follows.

use super::chat;
use super::client::{EngineClient, PROBE_TIMEOUT};
use super::config::EnginesConfig;
use super::error::EngineError;
use super::fitness;
use super::load::{LoadWatch, Reading};
use super::pool::Engines;
use super::state::{Engine, EngineState, Served};
use crate::clients::ModelCard;
use primerl_core::{Event, PolicyVersion};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const INTERVAL: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(200);
/// The description of an engine that failed a health check begins with this.
const FAILED: &str = "health check failed:";
const WITHOUT_LABEL: &str = "looked at, but";

/// Waits until the engine answers often enough, and serves the run's model.
pub(super) async fn reach(pool: &Engines, engine: &Engine) {
    let mut last = String::new();
    let mut retry = FIRST_RETRY;
    loop {
        if may_be_asked(pool, engine) {
            match look(pool, engine).await {
                Ok(card) if engine.state.lock().health.may_return() => {
                    return reached(engine, &card);
                }
                Ok(_) => retry = FIRST_RETRY,
                Err(error) => {
                    let error = error.to_string();
                    if error != last {
                        tracing::warn!(engine = %engine.client.url(), error, "engine not usable yet");
                    }
                    engine.state.lock().doing = format!("not reachable: {error}");
                    last = error;
                }
            }
        }
        tokio::time::sleep(retry).await;
        retry = (retry * 2).min(Duration::from_secs(1));
    }
}

fn may_be_asked(pool: &Engines, engine: &Engine) -> bool {
    let others_serve = pool.others(engine.id).serve;
    let state = engine.state.lock();
    state.health.may_be_asked(Instant::now(), others_serve)
}

fn reached(engine: &Engine, card: &ModelCard) {
    let mut state = engine.state.lock();
    state.healthy = true;
    state.unfit = None;
    if !state.was_lost {
        state.down_since = None;
    }
    state.max_model_len = card.max_model_len;
    state.doing = "reached, no weights proved".into();
}

async fn usable_card(
    client: &EngineClient,
    config: &EnginesConfig,
) -> Result<ModelCard, EngineError> {
    client.health().await?;
    let card = client.model(&config.model).await?;
    let lacking = fitness::lacking(client, config, &card).await?;
    if !lacking.is_empty() {
        let lacking = lacking.join("; ");
        let text = format!("{lacking} (docs/vllm.md, \"Your own vLLM\")");
        return Err(EngineError::Unfit(text));
    }
    if config.engines_render
        && let Err(lacking) = chat::prove(client, config).await?
    {
        return Err(EngineError::Unfit(lacking));
    }
    Ok(card)
}

/// The card of the run's model, if the engine is well and can do what the run needs.
async fn look(pool: &Engines, engine: &Engine) -> Result<ModelCard, EngineError> {
    let looked = usable_card(&engine.client, &pool.config).await;
    let mut state = engine.state.lock();
    match &looked {
        Ok(_) => state.health.looked_good(Duration::ZERO),
        Err(error) => {
            state.health.looked_bad();
            if let EngineError::Unfit(lacking) = error {
                state.unfit = Some(lacking.clone());
            }
        }
    }
    looked
}

/// Checks its health while its task does other work; returns why it is given up.
pub(super) async fn ill(pool: &Engines, engine: &Engine, watch: &mut LoadWatch) -> String {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let stands_still = engine.state.lock().updating;
        if !stands_still {
            if let Some(reason) = tick(pool, engine, watch).await {
                return reason;
            }
            continue;
        }
        if let Some(took) = check(engine).await {
            looked_good(engine, took);
        }
        let newest = pool.others(engine.id).newest;
        let mut state = engine.state.lock();
        if state.health.is_unreachable() {
            return state.doing.clone();
        }
        compare_weights(&mut state, newest);
        say_what_is_wrong(engine, &mut state);
    }
}

/// One look at an engine that serves; returns why it is to be given up.
pub(super) async fn tick(pool: &Engines, engine: &Engine, watch: &mut LoadWatch) -> Option<String> {
    match look_again(pool, engine).await {
        Ok(true) => report_load(pool, engine, watch).await,
        Ok(false) => engine.state.lock().health.was_paused(Instant::now()),
        Err(error) => return Some(error.to_string()),
    }
    judge(pool, engine)
}

/// Like [`check`]; after a failed request, the engine has to report its version, too. The error says that it has other
/// weights.
async fn look_again(pool: &Engines, engine: &Engine) -> Result<bool, EngineError> {
    let Some(took) = check(engine).await else {
        let others_serve = pool.others(engine.id).serve;
        // Until it answers, new requests go to engines that do.
        engine.state.lock().suspected |= others_serve;
        return Ok(false);
    };
    let suspected = {
        let state = engine.state.lock();
        state.served.clone().filter(|_| state.suspected)
    };
    let Some(served) = suspected else {
        looked_good(engine, took);
        return Ok(true);
    };
    let is_well = check_label(engine, &served).await?;
    if is_well {
        looked_good(engine, took);
        engine.state.lock().suspected = false;
        pool.changed.send_modify(|count| *count += 1);
    }
    Ok(is_well)
}

/// Whether the engine reports the version that it served. The error says that it has other weights.
async fn check_label(engine: &Engine, served: &Arc<Served>) -> Result<bool, EngineError> {
    let label = engine.client.check_label(&served.named, PROBE_TIMEOUT);
    match label.await {
        Ok(()) => Ok(true),
        Err(error @ (EngineError::Label { .. } | EngineError::Forgotten(_))) => {
            let state = engine.state.lock();
            let is_served = |now: &Arc<Served>| Arc::ptr_eq(now, served);
            // Not if the engine was updated to other weights meanwhile.
            match !state.updating && state.served.as_ref().is_some_and(is_served) {
                true => Err(error),
                false => Ok(false),
            }
        }
        Err(error) => {
            let mut state = engine.state.lock();
            state.health.looked_bad();
            state.doing = format!("{WITHOUT_LABEL} {error}");
            Ok(false)
        }
    }
}

/// How long the engine takes to report that it is well. If it does not, the check has failed.
async fn check(engine: &Engine) -> Option<Duration> {
    let began = Instant::now();
    let Err(error) = engine.client.health().await else {
        return Some(began.elapsed());
    };
    let mut state = engine.state.lock();
    state.health.looked_bad();
    state.doing = format!("{FAILED} {error}");
    None
}

fn looked_good(engine: &Engine, took: Duration) {
    let mut state = engine.state.lock();
    state.health.looked_good(took);
    let was_bad = state.doing.starts_with(FAILED) || state.doing.starts_with(WITHOUT_LABEL);
    if let Some(version) = state.probed.filter(|_| was_bad) {
        state.doing = format!("serving version {version}");
    }
}

/// `had_requests`: before the engine was asked for the reading.
fn note_progress(engine: &Engine, reading: Option<Reading>, had_requests: bool) {
    let mut state = engine.state.lock();
    let is_idle = !had_requests || state.load.running == 0;
    match reading.and_then(|reading| reading.made) {
        Some(made) => state.health.made(Instant::now(), made, is_idle),
        // It is unknown whether the engine makes progress.
        None => state.health.was_paused(Instant::now()),
    }
    if let Some(sampled) = reading.and_then(|reading| reading.sampled) {
        let now = Instant::now();
        let requests_s = state.load.requests_s(now);
        state.health.sampled(now, sampled, requests_s);
    }
}

/// Reports the engine's load to the core when it changed enough. An engine without metrics keeps its limit.
async fn report_load(pool: &Engines, engine: &Engine, watch: &mut LoadWatch) {
    let had_requests = {
        let mut state = engine.state.lock();
        if state.usable().is_none() {
            return state.health.was_paused(Instant::now());
        }
        state.load.running > 0
    };
    let reading = match engine.client.metrics().await {
        Ok(text) => Reading::parse(&text),
        Err(error) => {
            tracing::debug!(engine = %engine.client.url(), %error, "no metrics");
            None
        }
    };
    note_progress(engine, reading, had_requests);
    if let Some(load) = reading.and_then(|reading| watch.look(reading, Instant::now())) {
        pool.driver.send(Event::EngineLoad {
            engine: engine.id,
            load,
        });
    }
}

/// Why the engine is to be taken out, if it is.
fn judge(pool: &Engines, engine: &Engine) -> Option<String> {
    let others = pool.others(engine.id);
    let now = Instant::now();
    let mut state = engine.state.lock();
    if state.health.is_unreachable() {
        return Some(state.doing.clone());
    }
    if let Some(reason) = state.health.lost(now, others.serve) {
        return Some(reason);
    }
    state.health.compare(now, others.pace);
    compare_weights(&mut state, others.newest);
    say_what_is_wrong(engine, &mut state);
    None
}

fn compare_weights(state: &mut EngineState, newest: Option<PolicyVersion>) {
    let is_behind = state.proved().is_some_and(|proved| Some(proved) < newest);
    state.health.compare_weights(Instant::now(), is_behind);
}

/// Logs what is wrong with an engine that stays in use, when that changes.
fn say_what_is_wrong(engine: &Engine, state: &mut EngineState) {
    let complaint = state.health.complaint(Instant::now());
    let was_said = std::mem::replace(&mut state.complained, complaint.is_some());
    match complaint {
        Some(complaint) if !was_said => {
            tracing::warn!(engine = %engine.client.url(), complaint, "engine is not well");
        }
        None if was_said => tracing::info!(engine = %engine.client.url(), "engine is well again"),
        _ => {}
    }
}
