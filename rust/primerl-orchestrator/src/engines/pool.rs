//! All engines of the run, and the requests on them. Only engines that have proved the newest version in rotation get
//! requests; which of them, `routing` chooses.

use super::client::{EngineClient, parse_url};
use super::ids::WrittenIds;
use super::state::Engine;
use super::supervisor::{self, Update};
use crate::driver::DriverHandle;
use parking_lot::RwLock;
use primerl_core::{EngineId, PolicyVersion};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

#[derive(Clone, Debug)]
pub struct EnginesConfig {
    /// Name the engines serve the run's model under.
    pub model: String,
    pub request_timeout: Duration,
    pub update_timeout: Duration,
    pub stop_token_ids: Vec<u32>,
    /// Of the model; `None` where it does not say.
    pub vocabulary_size: Option<u32>,
    /// Training rollouts are not all sampled at temperature 1 from all tokens: log-probabilities must be of the
    /// distribution that was sampled from.
    pub needs_processed: bool,
    /// How far an engine's log-probabilities of the probe may be from the trainer's: mean of the differences, nats.
    pub probe_tolerance: f64,
    /// What of the prompts was written before.
    pub written_ids: Arc<WrittenIds>,
    /// Engines are given messages, and say which ids they made of them.
    pub engines_render: bool,
}

/// One line of `/status`.
#[derive(Clone, Debug, Serialize)]
pub struct EngineStatus {
    pub engine: EngineId,
    pub url: String,
    pub version: Option<PolicyVersion>,
    pub healthy: bool,
    pub running: u32,
    /// Requests it is to have at a time, once the core has said it.
    pub limit: Option<u32>,
    /// Share of the time since its first proof in which it had no request.
    pub idle_share: Option<f64>,
    pub doing: String,
    #[serde(skip)]
    pub down_for: Option<Duration>,
    #[serde(skip)]
    pub was_proved: bool,
    /// What it lacks that the run's config asks of it.
    #[serde(skip)]
    pub unfit: Option<String>,
}

/// The pool.
#[derive(Debug)]
pub struct Engines {
    pub(super) config: EnginesConfig,
    /// Grows when an engine joins; never shrinks.
    pub(super) engines: RwLock<Vec<Arc<Engine>>>,
    /// Bumped whenever an engine may have become usable.
    pub(super) changed: watch::Sender<u64>,
    pub(super) failovers: AtomicU64,
    /// Answers that were sampled again because weights were loaded meanwhile.
    pub(super) crossed: AtomicU64,
    pub(super) driver: DriverHandle,
    pub(super) stop: CancellationToken,
    tasks: TaskTracker,
}

impl Engines {
    pub fn new(
        config: EnginesConfig,
        driver: DriverHandle,
        stop: CancellationToken,
        tasks: TaskTracker,
    ) -> Arc<Engines> {
        Arc::new(Engines {
            config,
            engines: RwLock::default(),
            changed: watch::channel(0).0,
            failovers: AtomicU64::new(0),
            crossed: AtomicU64::new(0),
            driver,
            stop,
            tasks,
        })
    }

    /// Add an engine, or learn that a known one was restarted. The error says what is wrong with the URL.
    pub fn join(self: &Arc<Self>, url: &str) -> Result<EngineId, String> {
        let url = parse_url(url)?;
        let mut engines = self.engines.write();
        if let Some(known) = engines.iter().find(|engine| engine.client.url() == url) {
            known.rejoined.notify_one();
            return Ok(known.id);
        }
        let next = engines.iter().map(|engine| engine.id.0 + 1).max();
        let id = EngineId(next.unwrap_or(0));
        engines.push(self.add(id, url)?);
        Ok(id)
    }

    /// Look for an engine that had joined before a restart.
    pub fn restore(self: &Arc<Self>, id: EngineId, url: &str) -> Result<(), String> {
        let engine = self.add(id, parse_url(url)?)?;
        engine.state.lock().was_known = true;
        self.engines.write().push(engine);
        Ok(())
    }

    fn add(self: &Arc<Self>, id: EngineId, url: String) -> Result<Arc<Engine>, String> {
        let client = EngineClient::new(url).map_err(|error| error.to_string())?;
        let (updates, receiver) = mpsc::unbounded_channel();
        let engine = Arc::new(Engine::new(id, client, updates));
        let supervised = supervisor::supervise(Arc::clone(self), Arc::clone(&engine), receiver);
        self.tasks.spawn(supervised);
        Ok(engine)
    }

    /// Run what asks engines, whoever waits for it.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Carry out [`primerl_core::Effect::UpdateEngine`].
    pub(crate) fn update(
        &self,
        engine: EngineId,
        version: PolicyVersion,
        manifest: &str,
        digest: String,
    ) {
        let engines = self.engines.read();
        let Some(engine) = engines.iter().find(|known| known.id == engine) else {
            return;
        };
        // A closed channel means that the run is over.
        let _ = engine.updates.send(Update {
            version,
            manifest: manifest.into(),
            digest,
        });
    }

    /// Carry out [`primerl_core::Effect::LimitEngine`].
    pub(crate) fn limit(&self, engine: EngineId, limit: u32) {
        if let Some(engine) = self.engines.read().get(engine.0 as usize) {
            engine.state.lock().limit = limit;
        }
    }

    /// Smallest context among the engines that have answered, tokens.
    pub fn max_model_len(&self) -> Option<u32> {
        self.engines
            .read()
            .iter()
            .filter_map(|engine| engine.state.lock().max_model_len)
            .min()
    }

    /// Requests that were sent again because an engine failed.
    pub fn failovers(&self) -> u64 {
        self.failovers.load(Ordering::Relaxed)
    }

    /// Answers that were sampled again because weights were loaded meanwhile.
    pub fn crossed(&self) -> u64 {
        self.crossed.load(Ordering::Relaxed)
    }

    pub fn status(&self) -> Vec<EngineStatus> {
        let now = Instant::now();
        let describe = |engine: &Arc<Engine>| {
            let state = engine.state.lock();
            EngineStatus {
                engine: engine.id,
                url: engine.client.url().to_owned(),
                version: state.proved,
                healthy: state.healthy,
                running: state.load.running,
                limit: (state.limit < u32::MAX).then_some(state.limit),
                idle_share: state.load.idle_share(now),
                doing: state.describe(),
                down_for: state.down_since.map(|since| now - since),
                was_proved: state.was_known || state.load.counted_since.is_some(),
                unfit: state.unfit.clone(),
            }
        };
        self.engines.read().iter().map(describe).collect()
    }
}
