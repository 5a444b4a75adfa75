//! All engines of the run, and the requests on them. Only engines that have proved the newest version in rotation get
//! requests; which of them, `routing` chooses.

use super::client::{EngineClient, parse_url};
use super::ids::WrittenIds;
use super::seats::{self, Seat};
use super::state::Engine;
use super::supervisor::{self, Update};
use parking_lot::{Mutex, RwLock};
use primerl_core::{EngineId, PolicyVersion};
use primerl_service::files::WriteError;
use primerl_service::inbox::DriverHandle;
use serde::Serialize;
use std::path::Path;
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
    /// Longest sequence that is trained, tokens.
    pub seq_len: u32,
    /// Longest answer that is asked for, tokens.
    pub max_tokens: u32,
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
    /// What it joined by, if it gave a name.
    pub name: Option<String>,
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

/// All engines but one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Others {
    /// One may have requests.
    pub serve: bool,
    /// What a request gets of those: tokens a second, in the median.
    pub pace: Option<f64>,
    /// The newest that one has proved; it may be busy with the next.
    pub newest: Option<PolicyVersion>,
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
    /// One writer of the file at a time.
    seats_file: Mutex<()>,
    /// Set by the engine that could not load them; cleared when they are published again.
    broken: Mutex<Option<BrokenWeights>>,
}

/// Published weights that no engine can load from where they were published: the trainer may still have them.
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
            seats_file: Mutex::default(),
            broken: Mutex::default(),
        })
    }

    /// Published weights whose files are gone or damaged, and were not published again since.
    pub fn broken_weights(&self) -> Option<BrokenWeights> {
        self.broken.lock().clone()
    }

    pub(super) fn note_broken(&self, version: PolicyVersion, why: String) {
        tracing::warn!(%version, "published weights cannot be loaded: {why}; the trainer is asked to write them again");
        *self.broken.lock() = Some(BrokenWeights { version, why });
    }

    /// These were published, perhaps again, and are whole as far as is known.
    pub fn note_published(&self) {
        *self.broken.lock() = None;
    }

    /// Add an engine, or learn that a known one was restarted: at the same address, or under the same name at another.
    /// The error says what is wrong with the URL.
    pub fn join(self: &Arc<Self>, url: &str, name: Option<&str>) -> Result<EngineId, String> {
        // Made before anything is locked: for https, authorities are read from the disk.
        let client = client_of(url)?;
        let mut engines = self.engines.write();
        let at_url = |engine: &&Arc<Engine>| {
            engine.client.url() == client.url() && !engine.gone.is_cancelled()
        };
        let known = engines.iter().find(at_url).cloned();
        let has_name =
            |engine: &Arc<Engine>| name.is_some() && engine.state.lock().name.as_deref() == name;
        let before = engines.iter().position(has_name);
        if let Some(known) = known {
            let mut state = known.state.lock();
            if before.is_none() && state.name.is_none() {
                state.name = name.map(str::to_owned);
            }
            if name.is_none() || state.name.as_deref() == name {
                known.rejoined.notify_one();
                return Ok(known.id);
            }
            // Another engine was here, and has lost its port to this one.
            known.gone.cancel();
        }
        if let Some(before) = before {
            let place = &mut engines[before];
            place.gone.cancel();
            *place = self.add(place.id, client, name, Some(Arc::clone(place)));
            return Ok(place.id);
        }
        let next = engines.iter().map(|engine| engine.id.0 + 1).max();
        let id = EngineId(next.unwrap_or(0));
        engines.push(self.add(id, client, name, None));
        Ok(id)
    }

    /// Look for an engine that had joined before a restart.
    pub fn restore(self: &Arc<Self>, seat: &Seat) -> Result<(), String> {
        let name = seat.name.as_deref();
        let engine = self.add(seat.engine, client_of(&seat.url)?, name, None);
        engine.state.lock().was_known = true;
        self.engines.write().push(engine);
        Ok(())
    }

    /// Write down who joined, from where; not who lost its address to another. Blocks for the disk.
    pub fn write_seats(&self, output_dir: &Path) -> Result<(), WriteError> {
        let _writer = self.seats_file.lock();
        let seat = |engine: &Arc<Engine>| Seat {
            engine: engine.id,
            url: engine.client.url().to_owned(),
            name: engine.state.lock().name.clone(),
        };
        let is_there = |engine: &&Arc<Engine>| !engine.gone.is_cancelled();
        let engines = self.engines.read();
        let seats: Vec<Seat> = engines.iter().filter(is_there).map(seat).collect();
        drop(engines);
        seats::write(output_dir, &seats)
    }

    /// `before`: who had its number; it is heard of last before the new one is heard of.
    fn add(
        self: &Arc<Self>,
        id: EngineId,
        client: EngineClient,
        name: Option<&str>,
        before: Option<Arc<Engine>>,
    ) -> Arc<Engine> {
        let (updates, receiver) = mpsc::unbounded_channel();
        let engine = Arc::new(Engine::new(id, name, client, updates));
        let (pool, supervised) = (Arc::clone(self), Arc::clone(&engine));
        self.tasks.spawn(async move {
            if let Some(before) = before {
                supervised.state.lock().was_known = before.state.lock().was_proved();
                before.ended.cancelled().await;
            }
            supervisor::supervise(pool, supervised, receiver).await;
        });
        engine
    }

    /// What the other engines do, to judge this one by.
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
        // Of two, the slower one: the other may be alone in being fast.
        others.pace = paces.get(paces.len().saturating_sub(1) / 2).copied();
        others
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

/// For an engine at this URL, or what is wrong with that.
fn client_of(url: &str) -> Result<EngineClient, String> {
    EngineClient::new(parse_url(url)?).map_err(|error| error.to_string())
}
