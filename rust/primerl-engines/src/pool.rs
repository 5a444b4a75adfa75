//! All engines of the run, and the requests on them. Only engines that have proved the newest version in rotation get
//! requests; `routing` chooses among them.

use super::config::EnginesConfig;
use super::engine_records::{self, EngineRecord};
use super::state::{Engine, Update};
use parking_lot::{Mutex, RwLock};
use primerl_core::{EngineId, PolicyVersion};
use primerl_service::files::WriteError;
use primerl_service::inbox::DriverHandle;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// One line of `/status`.
#[derive(Clone, Debug, Serialize)]
pub struct EngineStatus {
    pub engine: EngineId,
    pub url: String,
    /// The name under which it joined, if any.
    pub name: Option<String>,
    pub version: Option<PolicyVersion>,
    pub healthy: bool,
    pub running: u32,
    /// Requests it should have at a time, once the core has set a limit.
    pub limit: Option<u32>,
    /// Share of the time since its first proof in which it had no request.
    pub idle_share: Option<f64>,
    pub doing: String,
    #[serde(skip)]
    pub down_for: Option<Duration>,
    #[serde(skip)]
    pub was_proved: bool,
    /// What it lacks that the run's config needs.
    #[serde(skip)]
    pub unfit: Option<String>,
}

/// All engines but one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Others {
    /// Whether one of them may have requests.
    pub serve: bool,
    /// Their median pace: tokens per second for each request.
    pub pace: Option<f64>,
    /// The newest version that one of them has proved; it may be loading the next.
    pub newest: Option<PolicyVersion>,
}

/// The pool of engines.
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
    pub(super) tasks: TaskTracker,
    /// One writer of the file at a time.
    records_file: Mutex<()>,
    /// Set by the engine that could not load them; cleared when they are published again.
    broken: Mutex<Option<BrokenWeights>>,
}

/// Published weights that no engine can load from their folder: the trainer may still have them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BrokenWeights {
    pub version: PolicyVersion,
    /// What is wrong with the files.
    pub why: String,
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
            records_file: Mutex::default(),
            broken: Mutex::default(),
        })
    }

    /// Published weights whose files are missing or damaged, and that were not published again since.
    pub fn broken_weights(&self) -> Option<BrokenWeights> {
        self.broken.lock().clone()
    }

    pub(super) fn note_broken(&self, version: PolicyVersion, why: String) {
        tracing::warn!(%version, "published weights cannot be loaded: {why}; the trainer is asked to write them again");
        *self.broken.lock() = Some(BrokenWeights { version, why });
    }

    /// These weights were published, perhaps again, and are complete as far as is known.
    pub fn note_published(&self) {
        *self.broken.lock() = None;
    }

    /// Writes down which engines joined, and their addresses, except those that lost their address to another. Blocks
    /// for the disk.
    pub fn write_records(&self, output_dir: &Path) -> Result<(), WriteError> {
        let _writer = self.records_file.lock();
        let record = |engine: &Arc<Engine>| EngineRecord {
            engine: engine.id,
            url: engine.client.url().to_owned(),
            name: engine.state.lock().name.clone(),
        };
        let is_there = |engine: &&Arc<Engine>| !engine.gone.is_cancelled();
        let engines = self.engines.read();
        let records: Vec<EngineRecord> = engines.iter().filter(is_there).map(record).collect();
        drop(engines);
        engine_records::write(output_dir, &records)
    }

    /// What the other engines do, for comparison with this one.
    pub(super) fn others(&self, than: EngineId) -> Others {
        let now = Instant::now();
        let mut paces = Vec::new();
        let mut others = Others::default();
        for engine in self
            .engines
            .read()
            .iter()
            .filter(|engine| engine.id != than)
        {
            let state = engine.state.lock();
            others.newest = others.newest.max(state.proved());
            if state.usable().is_some() {
                others.serve = true;
                paces.extend(state.health.pace(now));
            }
        }
        paces.sort_by(f64::total_cmp);
        // If there are two, the slower one: the other may be alone in being fast.
        others.pace = paces.get(paces.len().saturating_sub(1) / 2).copied();
        others
    }

    /// Runs requests to engines, for any caller that waits for them.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Carry out [`primerl_core::Effect::UpdateEngine`].
    pub fn update(&self, engine: EngineId, version: PolicyVersion, manifest: &str, digest: String) {
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
    pub fn limit(&self, engine: EngineId, limit: u32) {
        let engines = self.engines.read();
        if let Some(engine) = engines.iter().find(|known| known.id == engine) {
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
                version: state.proved(),
                healthy: state.healthy,
                running: state.load.running,
                limit: (state.limit < u32::MAX).then_some(state.limit),
                idle_share: state.load.idle_share(now),
                doing: state.describe(now),
                down_for: state.down_since.map(|since| now - since),
                was_proved: state.was_proved(),
                name: state.name.clone(),
                unfit: state.unfit.clone(),
            }
        };
        self.engines.read().iter().map(describe).collect()
    }
}
