//! The one task of one engine: reach it, bring it up to date, watch its health.

use super::chat;
use super::client::{EngineError, ModelCard};
use super::load::{LoadWatch, Reading};
use super::meaning::{MeaningError, prove_processed};
use super::pool::Engines;
use super::probe::{self, Probe, ProbeError};
use super::state::Engine;
use futures_util::FutureExt;
use primerl_core::{Event, PolicyVersion};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

const HEALTH_INTERVAL: Duration = Duration::from_secs(1);
/// Failed checks in a row before an engine is given up, and good ones before it is taken back.
const FAILURES_TO_LOSE: u32 = 3;
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LONGEST_RETRY: Duration = Duration::from_secs(10);
/// A resume that fails leaves the engine frozen: worth a few tries.
const RESUME_ATTEMPTS: u32 = 3;
const RESUME_TIMEOUT: Duration = Duration::from_secs(10);

/// New weights to load and prove.
#[derive(Clone, Debug)]
pub(super) struct Update {
    pub version: PolicyVersion,
    /// Path of `manifest.json`; the engine is given its folder.
    pub manifest: String,
    pub digest: String,
}

#[derive(Debug, thiserror::Error)]
enum UpdateError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("the update did not end within {0:?}")]
    Timeout(Duration),
    #[error("cannot be resumed: {0}")]
    Resume(EngineError),
    #[error(transparent)]
    Meaning(#[from] MeaningError),
    #[error(transparent)]
    Probe(#[from] ProbeError),
}

/// Runs until the pool stops.
pub(super) async fn supervise(
    pool: Arc<Engines>,
    engine: Arc<Engine>,
    mut updates: mpsc::UnboundedReceiver<Update>,
) {
    let stop = pool.stop.clone();
    let work = async {
        let mut retry = FIRST_RETRY;
        loop {
            reach(&pool, &engine).await;
            // Updates told before the engine was lost are void: the core tells anew after the join.
            while updates.try_recv().is_ok() {}
            let _ = engine.rejoined.notified().now_or_never();
            pool.driver.send(Event::EngineJoined {
                engine: engine.id,
                url: engine.client.url().to_owned(),
            });
            let started = Instant::now();
            let reason = serve(&pool, &engine, &mut updates).await;
            tracing::warn!(engine = %engine.client.url(), reason, "engine lost");
            pool.driver.send(Event::EngineLost {
                engine: engine.id,
                reason,
            });
            if started.elapsed() > LONGEST_RETRY {
                retry = FIRST_RETRY;
            }
            tokio::time::sleep(retry).await;
            retry = (retry * 2).min(LONGEST_RETRY);
        }
    };
    tokio::select! {
        () = work => {}
        () = stop.cancelled() => {}
    }
}

/// Wait until the engine answers and serves the run's model.
async fn reach(pool: &Engines, engine: &Engine) {
    let mut last = String::new();
    let mut retry = FIRST_RETRY;
    loop {
        match look(pool, engine).await {
            Ok(card) => {
                let mut state = engine.state.lock();
                state.healthy = true;
                state.unfit = None;
                if !state.was_lost {
                    state.down_since = None;
                }
                state.max_model_len = card.max_model_len;
                state.doing = "reached, no weights proved".into();
                return;
            }
            Err(error) => {
                let error = error.to_string();
                if error != last {
                    tracing::warn!(engine = %engine.client.url(), error, "engine not usable yet");
                }
                engine.state.lock().doing = format!("not reachable: {error}");
                last = error;
            }
        }
        tokio::time::sleep(retry).await;
        retry = (retry * 2).min(Duration::from_secs(1));
    }
}

/// The card of the run's model, if the engine is well and can do what it will be asked for.
async fn look(pool: &Engines, engine: &Engine) -> Result<ModelCard, EngineError> {
    engine.client.health().await?;
    let card = engine.client.model(&pool.config.model).await?;
    if pool.config.engines_render
        && let Err(lacking) = chat::prove(&engine.client, &pool.config).await?
    {
        engine.state.lock().unfit = Some(lacking.clone());
        return Err(EngineError::Unfit(lacking));
    }
    Ok(card)
}

/// Updates and health checks until the engine is lost; the result is why.
async fn serve(
    pool: &Engines,
    engine: &Engine,
    updates: &mut mpsc::UnboundedReceiver<Update>,
) -> String {
    let mut failures = 0;
    let mut watch = LoadWatch::default();
    let mut ticks = tokio::time::interval(HEALTH_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            update = updates.recv() => {
                let Some(update) = newest(update, updates) else {
                    return lose(pool, engine, "the run is over".into());
                };
                let proved = async {
                    let probe = read_probe(pool, &update).await?;
                    run_update(pool, engine, &update).await?;
                    pool.driver.send(Event::EngineProved { engine: engine.id, version: update.version });
                    run_probe(pool, engine, update.version, probe).await
                };
                let updated = tokio::select! {
                    updated = proved => updated,
                    // Loading may take minutes, but not an engine's answer that it is well.
                    reason = ill(engine) => {
                        let reason = format!("while it was brought to version {}: {reason}", update.version);
                        return lose(pool, engine, reason);
                    }
                };
                if let Err(error) = updated {
                    let failed = match error {
                        UpdateError::Probe(_) => "failed its probe",
                        _ => "was not proved",
                    };
                    let reason = format!("version {} {failed}: {error}", update.version);
                    return lose(pool, engine, reason);
                }
            }
            () = engine.rejoined.notified() => {
                return lose(pool, engine, "it was restarted, or serves weights it never proved".into());
            }
            () = engine.suspect.notified() => failures = look_again(pool, engine, failures).await,
            _ = ticks.tick() => {
                failures = look_again(pool, engine, failures).await;
                if failures == 0 {
                    report_load(pool, engine, &mut watch).await;
                }
            }
        }
        if failures >= FAILURES_TO_LOSE {
            let doing = engine.state.lock().doing.clone();
            return lose(pool, engine, doing);
        }
    }
}

/// Of the updates that wait, only the newest matters.
fn newest(first: Option<Update>, waiting: &mut mpsc::UnboundedReceiver<Update>) -> Option<Update> {
    let mut update = first?;
    while let Ok(next) = waiting.try_recv() {
        update = next;
    }
    Some(update)
}

/// Returns once health checks fail, with what they said.
async fn ill(engine: &Engine) -> String {
    let mut failures = 0;
    while failures < FAILURES_TO_LOSE {
        tokio::time::sleep(HEALTH_INTERVAL).await;
        failures = check(engine, failures).await;
    }
    engine.state.lock().doing.clone()
}

/// As [`check`]; one that a request failed on has to say its version, too.
async fn look_again(pool: &Engines, engine: &Engine, failures: u32) -> u32 {
    let before = failures;
    let failures = check(engine, failures).await;
    let suspected = {
        let state = engine.state.lock();
        state.proved.filter(|_| state.suspected)
    };
    let (Some(version), 0) = (suspected, failures) else {
        return failures;
    };
    match engine.client.check_label(version).await {
        Ok(()) => {
            engine.state.lock().suspected = false;
            pool.changed.send_modify(|count| *count += 1);
            0
        }
        Err(error @ EngineError::Label { .. }) => {
            engine.state.lock().doing = error.to_string();
            FAILURES_TO_LOSE
        }
        Err(error) => {
            engine.state.lock().doing = format!("looked at, but {error}");
            before + 1
        }
    }
}

async fn check(engine: &Engine, failures: u32) -> u32 {
    let Err(error) = engine.client.health().await else {
        return 0;
    };
    engine.state.lock().doing = format!("health check failed: {error}");
    failures + 1
}

/// Tells the core of the engine's load when it changed enough. An engine that does not report any keeps its limit.
async fn report_load(pool: &Engines, engine: &Engine, watch: &mut LoadWatch) {
    if engine.state.lock().usable().is_none() {
        return;
    }
    let reading = match engine.client.metrics().await {
        Ok(text) => Reading::parse(&text),
        Err(error) => {
            tracing::debug!(engine = %engine.client.url(), %error, "no metrics");
            None
        }
    };
    if let Some(load) = reading.and_then(|reading| watch.look(reading, Instant::now())) {
        pool.driver.send(Event::EngineLoad {
            engine: engine.id,
            load,
        });
    }
}

/// Its requests go elsewhere at once, and it gets no others.
fn cut_off(engine: &Engine) {
    let mut state = engine.state.lock();
    engine.weights_change();
    state.proved = None;
    state.probed = None;
    let lost = std::mem::take(&mut state.lost);
    drop(state);
    lost.cancel();
}

fn lose(pool: &Engines, engine: &Engine, reason: String) -> String {
    cut_off(engine);
    let mut state = engine.state.lock();
    state.told = None;
    state.updating = false;
    state.suspected = false;
    state.healthy = false;
    state.doing = format!("lost: {reason}");
    state.lost_because.clone_from(&reason);
    state.was_lost = true;
    state.is_processed = false;
    state.down_since.get_or_insert_with(Instant::now);
    drop(state);
    pool.changed.send_modify(|count| *count += 1);
    reason
}

/// Pause, load, prove, resume. Requests in flight keep their KV cache and go on with the new weights.
async fn run_update(pool: &Engines, engine: &Engine, update: &Update) -> Result<(), UpdateError> {
    let started = Instant::now();
    {
        let mut state = engine.state.lock();
        state.updating = true;
        state.told = Some(update.version);
        state.doing = format!("ending its requests before version {}", update.version);
    }
    let limit = pool.config.update_timeout;
    if pool.config.engines_render {
        drain(engine, limit).await;
    }
    {
        let mut state = engine.state.lock();
        // Before the engine hears of it.
        engine.weights_change();
        // The version may be one that it had, of other weights.
        state.probed = state.probed.filter(|probed| *probed < update.version);
        state.doing = format!("loading version {}", update.version);
    }
    let loaded = tokio::time::timeout(limit, load_and_prove(engine, update)).await;
    if !matches!(loaded, Ok(Ok(()))) {
        // Nobody knows what it would go on with.
        cut_off(engine);
    }
    // Also after a failure: a frozen engine would hold its requests forever.
    let resumed = resume(engine).await;
    match loaded {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(error.into()),
        Err(_) => return Err(UpdateError::Timeout(limit)),
    }
    resumed.map_err(UpdateError::Resume)?;
    check_meaning(pool, engine, update.version).await?;
    {
        let mut state = engine.state.lock();
        state.updating = false;
        state.suspected = false;
        state.proved = Some(update.version);
        state.doing = format!("comparing version {} with the trainer", update.version);
    }
    pool.changed.send_modify(|count| *count += 1);
    tracing::info!(
        engine = %engine.client.url(), version = %update.version,
        milliseconds = started.elapsed().as_millis() as u64, "engine proved its weights"
    );
    Ok(())
}

async fn read_probe(pool: &Engines, update: &Update) -> Result<Option<Probe>, ProbeError> {
    if pool.config.engines_render {
        // Such an engine need not take token ids.
        return Ok(None);
    }
    let manifest = PathBuf::from(&update.manifest);
    match tokio::task::spawn_blocking(move || Probe::read(&manifest)).await {
        Ok(read) => read,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Requests run meanwhile; those that the new weights had a part in are answered when it is passed.
async fn run_probe(
    pool: &Engines,
    engine: &Engine,
    version: PolicyVersion,
    probe: Option<Probe>,
) -> Result<(), UpdateError> {
    if let Some(probe) = probe {
        probe::check(&engine.client, &pool.config, version, &probe).await?;
    }
    {
        let mut state = engine.state.lock();
        state.probed = Some(version);
        engine.probe_passed();
        state.down_since = None;
        state.doing = format!("serving version {version}");
        state.load.counted_since.get_or_insert_with(Instant::now);
    }
    pool.changed.send_modify(|count| *count += 1);
    Ok(())
}

/// A process does not change what its log-probabilities are of, so it is asked once.
async fn check_meaning(
    pool: &Engines,
    engine: &Engine,
    version: PolicyVersion,
) -> Result<(), MeaningError> {
    if !pool.config.needs_processed || engine.state.lock().is_processed {
        return Ok(());
    }
    let proved = prove_processed(&engine.client, &pool.config, version).await;
    let mut state = engine.state.lock();
    state.is_processed = proved.is_ok();
    // It has been through its start-up: there is nothing more to wait for than with others.
    state.was_known = true;
    proved
}

/// Wait until the requests that the engine has are answered; it gets no new ones. Those that are not by then will be
/// sampled again.
async fn drain(engine: &Engine, limit: Duration) {
    let idle = async {
        while engine.state.lock().load.running > 0 {
            engine.idle.notified().await;
        }
    };
    if tokio::time::timeout(limit, idle).await.is_err() {
        let running = engine.state.lock().load.running;
        tracing::warn!(engine = %engine.client.url(), running, "updated with requests in flight: they begin anew");
    }
}

async fn load_and_prove(engine: &Engine, update: &Update) -> Result<(), EngineError> {
    let folder = Path::new(&update.manifest)
        .parent()
        .unwrap_or_else(|| Path::new("."));
    engine.client.pause().await?;
    engine
        .client
        .load(&folder.to_string_lossy(), update.version)
        .await?;
    engine.client.prove(update.version, &update.digest).await
}

async fn resume(engine: &Engine) -> Result<(), EngineError> {
    let mut attempt = 1;
    loop {
        let outcome = match tokio::time::timeout(RESUME_TIMEOUT, engine.client.resume()).await {
            Ok(outcome) => outcome,
            Err(_) => Err(EngineError::Malformed {
                call: "resume",
                problem: format!("no answer within {RESUME_TIMEOUT:?}"),
            }),
        };
        match outcome {
            Err(error) if attempt < RESUME_ATTEMPTS => {
                tracing::warn!(engine = %engine.client.url(), %error, "cannot resume, trying again");
                attempt += 1;
                tokio::time::sleep(FIRST_RETRY).await;
            }
            outcome => return outcome,
        }
    }
}
