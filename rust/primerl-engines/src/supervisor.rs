//! The one task of one engine: connects to it, brings it up to date, watches its health.

use super::adapters;
use super::error::EngineError;
use super::health_check::{self, ill, reach, tick};
use super::load::LoadWatch;
use super::manifest;
use super::pool::{BrokenWeights, Engines};
use super::probe::{self, Probe, ProbeError, Published};
use super::served_version::Named;
use super::state::{Engine, Update};
use super::update::{UpdateError, check_logprob_kind, folder_of, note_proved, within};
use super::weights::in_time;
use futures_util::FutureExt;
use primerl_core::{Event, PolicyVersion};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::Interval;

const FIRST_RETRY: Duration = Duration::from_millis(200);
/// A resume that fails leaves the engine frozen: worth a few tries.
const RESUME_ATTEMPTS: u32 = 3;
const RESUME_TIMEOUT: Duration = Duration::from_secs(10);

const RESTARTED: &str = "it was restarted, or serves weights it never proved";

/// Runs until the pool stops, or the engine is known to have left its address.
pub(super) async fn supervise(
    pool: Arc<Engines>,
    engine: Arc<Engine>,
    mut updates: mpsc::UnboundedReceiver<Update>,
) {
    let work = async {
        loop {
            reach(&pool, &engine).await;
            // Updates requested before the engine was lost are void: the core requests them again after the join.
            while updates.try_recv().is_ok() {}
            let _ = engine.rejoined.notified().now_or_never();
            pool.driver.send(Event::EngineJoined {
                engine: engine.id,
                url: engine.client.url().to_owned(),
            });
            let reason = serve(&pool, &engine, &mut updates).await;
            tell_lost(&pool, &engine, reason);
        }
    };
    tokio::select! {
        () = work => {}
        () = pool.stop.cancelled() => {}
        () = engine.gone.cancelled() => {
            let reason = lose(&pool, &engine, "another engine registered at its address, or it moved to another address".into());
            tell_lost(&pool, &engine, reason);
        }
    }
    engine.ended.cancel();
}

fn tell_lost(pool: &Engines, engine: &Engine, reason: String) {
    tracing::warn!(engine = %engine.client.url(), reason, "engine lost");
    pool.driver.send(Event::EngineLost {
        engine: engine.id,
        reason,
    });
}

/// Updates and health checks until the engine is lost; the result is why.
async fn serve(
    pool: &Engines,
    engine: &Engine,
    updates: &mut mpsc::UnboundedReceiver<Update>,
) -> String {
    let mut watch = LoadWatch::default();
    let mut ticks = tokio::time::interval(health_check::INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            update = updates.recv() => {
                let Some(update) = newest(update, updates) else {
                    return lose(pool, engine, "the run is over".into());
                };
                if let Err(reason) = bring_or_give_up(pool, engine, &update, &mut watch).await {
                    return lose(pool, engine, reason);
                }
            }
            () = engine.rejoined.notified() => return lose(pool, engine, RESTARTED.into()),
            () = engine.unused.notified() => tokio::select! {
                () = adapters::unload_unused(pool, engine) => {}
                reason = ill(pool, engine, &mut watch) => return lose(pool, engine, reason),
            },
            () = due(engine, &mut ticks) => {
                if let Some(reason) = tick(pool, engine, &mut watch).await {
                    return lose(pool, engine, reason);
                }
            }
        }
    }
}

/// Brings the engine up to date. The error says why it is lost instead.
async fn bring_or_give_up(
    pool: &Engines,
    engine: &Engine,
    update: &Update,
    watch: &mut LoadWatch,
) -> Result<(), String> {
    let version = update.version;
    let updated = tokio::select! {
        updated = bring(pool, engine, update) => updated,
        // Loading may take minutes, but the answer of a health check must not.
        reason = ill(pool, engine, watch) => {
            return Err(format!("while it was brought to version {version}: {reason}"));
        }
        () = engine.rejoined.notified() => return Err(RESTARTED.into()),
    };
    let Err(error) = updated else {
        return Ok(());
    };
    look_at_files(pool, update, &error).await;
    let failed = match error {
        UpdateError::Probe(_) => "failed its probe",
        _ => "was not proved",
    };
    Err(format!("version {version} {failed}: {error}"))
}

/// Checks health each second, and after a request that failed.
async fn due(engine: &Engine, ticks: &mut Interval) {
    tokio::select! {
        () = engine.suspect.notified() => {}
        _ = ticks.tick() => {}
    }
}

/// The newest of the waiting updates; the older ones do not matter.
fn newest(first: Option<Update>, waiting: &mut mpsc::UnboundedReceiver<Update>) -> Option<Update> {
    let mut update = first?;
    while let Ok(next) = waiting.try_recv() {
        update = next;
    }
    Some(update)
}

/// Its requests go to other engines at once, and it gets no new ones.
fn cut_off(engine: &Engine) {
    let mut state = engine.state.lock();
    engine.weights_change();
    state.served = None;
    state.adapters.clear();
    state.probed = None;
    let lost = std::mem::take(&mut state.lost);
    drop(state);
    lost.cancel();
}

fn lose(pool: &Engines, engine: &Engine, reason: String) -> String {
    cut_off(engine);
    let mut state = engine.state.lock();
    state.health.taken_out(Instant::now());
    state.complained = false;
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

/// Load, prove, compare with the trainer.
async fn bring(pool: &Engines, engine: &Engine, update: &Update) -> Result<(), UpdateError> {
    let Published { probe, is_adapter } = read_published(pool, update).await?;
    if is_adapter && let Some(most) = within(pool, engine.client.most_adapters()).await? {
        return adapters::bring(pool, engine, update, probe, most).await;
    }
    let named = Named::weights(&pool.config.model, update.version);
    run_update(pool, engine, update, &named).await?;
    note_proved(pool, engine, update.version);
    run_probe(pool, engine, &named, probe).await
}

/// Whether the files are wrong: an engine says so in its own words, or not at all.
async fn look_at_files(pool: &Engines, update: &Update, error: &UpdateError) {
    let is_of_files = match error {
        UpdateError::Probe(ProbeError::Read { .. }) => true,
        UpdateError::Engine(error) => error.is_about_weights(),
        _ => false,
    };
    if !is_of_files {
        return;
    }
    let (path, version) = (PathBuf::from(&update.manifest), update.version);
    // Engines retry repeatedly: the files are read once.
    let is_known = |broken: BrokenWeights| broken.version == version;
    if pool.broken_weights().is_some_and(is_known) {
        return;
    }
    let looked = tokio::task::spawn_blocking(move || manifest::verify(&path, version)).await;
    if let Ok(Err(problem)) = looked {
        pool.note_broken(version, problem.to_string());
    }
}

/// Read, pause, load, resume, prove. Requests in flight keep their KV cache and continue with the new weights; what
/// those sampled is held back until `run_probe` has let it go, so the proof need not keep the engine standing still.
async fn run_update(
    pool: &Engines,
    engine: &Engine,
    update: &Update,
    named: &Named,
) -> Result<(), UpdateError> {
    let started = Instant::now();
    let limit = pool.config.update_timeout;
    let folder = folder_of(&update.manifest);
    // It serves meanwhile. The load does what is not finished when the time is up, or fails there.
    if let Ok(prepared) = tokio::time::timeout(limit, engine.client.prepare(&folder)).await {
        prepared?;
    }
    end_requests(pool, engine, update.version).await;
    let paused = load(pool, engine, &folder, update.version).await?;
    within(pool, engine.client.prove(named, &update.digest)).await?;
    check_logprob_kind(pool, engine, named).await?;
    engine.serve(named.clone(), false);
    pool.changed.send_modify(|count| *count += 1);
    tracing::info!(
        engine = %engine.client.url(), version = %update.version, paused_ms = paused.as_millis() as u64,
        milliseconds = started.elapsed().as_millis() as u64, "engine proved its weights"
    );
    Ok(())
}

/// An engine that renders must have no requests while it loads.
async fn end_requests(pool: &Engines, engine: &Engine, version: PolicyVersion) {
    {
        let mut state = engine.state.lock();
        state.updating = true;
        state.told = Some(version);
        state.doing = format!("ending its requests before version {version}");
    }
    if pool.config.engines_render {
        drain(engine, pool.config.update_timeout).await;
    }
}

/// Before the engine gets the request.
fn note_loading(engine: &Engine, version: PolicyVersion) {
    let mut state = engine.state.lock();
    engine.weights_change();
    // The engine may have had this version before, with other weights.
    state.probed = state.probed.filter(|probed| *probed < version);
    state.doing = format!("loading version {version}");
}

/// Pauses, loads, and resumes; returns how long the engine stood still.
async fn load(
    pool: &Engines,
    engine: &Engine,
    folder: &str,
    version: PolicyVersion,
) -> Result<Duration, UpdateError> {
    note_loading(engine, version);
    let paused = Instant::now();
    let loaded = within(pool, engine.client.load(folder, version)).await;
    if loaded.is_err() {
        // It is unknown with which weights the requests would continue.
        cut_off(engine);
    }
    // Also after a failure: a frozen engine would hold its requests forever.
    let resumed = resume(engine).await;
    let paused = paused.elapsed();
    loaded?;
    resumed.map_err(UpdateError::Resume)?;
    Ok(paused)
}

async fn read_published(pool: &Engines, update: &Update) -> Result<Published, ProbeError> {
    let manifest = PathBuf::from(&update.manifest);
    let read = match tokio::task::spawn_blocking(move || Published::read(&manifest)).await {
        Ok(read) => read?,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    };
    // An engine that renders need not accept token ids.
    let probe = read.probe.filter(|_| !pool.config.engines_render);
    Ok(Published { probe, ..read })
}

/// Requests run meanwhile; those that the new weights took part in are answered after the probe has passed.
async fn run_probe(
    pool: &Engines,
    engine: &Engine,
    named: &Named,
    probe: Option<Probe>,
) -> Result<(), UpdateError> {
    if let Some(probe) = probe {
        probe::check(&engine.client, &pool.config, named, &probe).await?;
    }
    engine.note_probe(&mut engine.state.lock(), named.version);
    pool.changed.send_modify(|count| *count += 1);
    Ok(())
}

/// Waits until the engine has answered its requests; it gets no new ones. Those that are not answered in time will be
/// sampled again.
async fn drain(engine: &Engine, limit: Duration) {
    let idle = async {
        while engine.state.lock().load.running > 0 {
            engine.idle.notified().await;
        }
    };
    if tokio::time::timeout(limit, idle).await.is_err() {
        let running = engine.state.lock().load.running;
        tracing::warn!(engine = %engine.client.url(), running, "updated with requests in flight: they start again");
    }
}

async fn resume(engine: &Engine) -> Result<(), EngineError> {
    let mut attempt = 1;
    loop {
        let resumed = in_time("resume", RESUME_TIMEOUT, engine.client.resume()).await;
        match resumed.and_then(|resumed| resumed) {
            Err(error) if attempt < RESUME_ATTEMPTS => {
                tracing::warn!(engine = %engine.client.url(), %error, "cannot resume, trying again");
                attempt += 1;
                tokio::time::sleep(FIRST_RETRY).await;
            }
            outcome => return outcome,
        }
    }
}
