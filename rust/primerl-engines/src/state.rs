//! One engine as the pool sees it.

use super::client::EngineClient;
use super::health::Health;
use super::served_version::Named;
use parking_lot::Mutex;
use primerl_core::{EngineId, PolicyVersion};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// New weights to load and prove.
#[derive(Clone, Debug)]
pub(super) struct Update {
    pub version: PolicyVersion,
    /// Path of `manifest.json`; the engine is given its folder.
    pub manifest: String,
    pub digest: String,
}

/// One engine. Written by its supervisor; read by routing and status.
#[derive(Debug)]
pub(super) struct Engine {
    pub id: EngineId,
    pub client: EngineClient,
    pub state: Mutex<EngineState>,
    /// Changes whenever its weights may, whatever their name: before it is asked to load others, and when it is lost.
    /// Written under the lock of `state`.
    pub weights: AtomicU64,
    /// `weights` whose probe was passed last.
    pub probed_weights: AtomicU64,
    pub updates: mpsc::UnboundedSender<Update>,
    /// Something went wrong with a request: check health now.
    pub suspect: Notify,
    /// It joined again: whatever it proved, it may have forgotten.
    pub rejoined: Notify,
    /// Its last request has ended.
    pub idle: Notify,
    /// Cancelled when it is known not to be at its address any more.
    pub gone: CancellationToken,
    /// Cancelled when its supervisor has ended.
    pub ended: CancellationToken,
    /// The last request of an adapter has ended.
    pub unused: Notify,
}

/// A proved version, as requests get it.
#[derive(Debug)]
pub(super) struct Served {
    pub named: Named,
    /// Cancelled with the engine's own, or for itself alone.
    pub lost: CancellationToken,
    /// Places that requests have; written under the lock of the engine's state.
    places: AtomicU32,
}

impl Served {
    pub(crate) fn take_place(&self) {
        self.places.fetch_add(1, Ordering::SeqCst);
    }

    /// How many are left.
    pub(crate) fn give_back_place(&self) -> u32 {
        self.places.fetch_sub(1, Ordering::SeqCst) - 1
    }

    pub(crate) fn running(&self) -> u32 {
        self.places.load(Ordering::SeqCst)
    }
}

impl EngineState {
    fn joining(name: Option<&str>) -> EngineState {
        EngineState {
            name: name.map(str::to_owned),
            health: Health::default(),
            complained: false,
            served: None,
            adapters: Vec::new(),
            probed: None,
            told: None,
            healthy: false,
            suspected: false,
            updating: false,
            doing: "joining".into(),
            max_model_len: None,
            down_since: Some(Instant::now()),
            was_known: false,
            was_lost: false,
            lost_because: String::new(),
            is_processed: false,
            unfit: None,
            lost: CancellationToken::new(),
            load: Load::default(),
            limit: u32::MAX,
        }
    }
}

impl Engine {
    pub(crate) fn new(
        id: EngineId,
        name: Option<&str>,
        client: EngineClient,
        updates: mpsc::UnboundedSender<Update>,
    ) -> Engine {
        Engine {
            id,
            client,
            state: Mutex::new(EngineState::joining(name)),
            weights: AtomicU64::new(0),
            probed_weights: AtomicU64::new(0),
            updates,
            suspect: Notify::new(),
            rejoined: Notify::new(),
            idle: Notify::new(),
            gone: CancellationToken::new(),
            ended: CancellationToken::new(),
            unused: Notify::new(),
        }
    }

    /// From now on requests get this. `is_probed`: it has passed its probe, too.
    pub(crate) fn serve(&self, named: Named, is_probed: bool) {
        let mut state = self.state.lock();
        let version = named.version;
        let served = Arc::new(Served {
            lost: state.lost.child_token(),
            places: AtomicU32::new(0),
            named,
        });
        if served.named.base.is_some() {
            state.adapters.push(Arc::clone(&served));
        }
        state.updating = false;
        state.suspected = false;
        state.served = Some(served);
        state.health.was_paused(Instant::now());
        state.doing = format!("comparing version {version} with the trainer");
        if is_probed {
            self.note_probe(&mut state, version);
        }
    }

    /// It computes with what it serves, which is this version.
    pub(crate) fn note_probe(&self, state: &mut EngineState, version: PolicyVersion) {
        state.probed = Some(version);
        self.probe_passed();
        state.down_since = None;
        state.doing = format!("serving version {version}");
        let now = Instant::now();
        state.health.serves(now);
        state.load.counted_since.get_or_insert(now);
    }

    /// Names of the adapters that requests have, or may get.
    pub(crate) fn adapters_in_use(&self) -> Vec<String> {
        let state = self.state.lock();
        let names = state.adapters.iter();
        names.map(|served| served.named.model.clone()).collect()
    }

    /// A request failed on it: it gets no other before it was looked at.
    pub(crate) fn suspect(&self) {
        self.state.lock().suspected = true;
        self.suspect.notify_one();
    }

    /// It computes with the weights it has now. The caller holds `state`.
    pub(crate) fn probe_passed(&self) {
        let weights = self.weights.load(Ordering::SeqCst);
        self.probed_weights.store(weights, Ordering::SeqCst);
    }

    /// Whether the probe of these weights, or of later ones, was passed.
    pub(crate) fn vouches_for(&self, weights: u64) -> bool {
        weights <= self.probed_weights.load(Ordering::SeqCst)
    }

    /// From now on, what it samples is not known to come from the weights it proved last. The caller holds `state`.
    pub(crate) fn weights_change(&self) {
        self.weights.fetch_add(1, Ordering::SeqCst);
    }
}

/// Guarded by a mutex held for a few loads and stores.
#[derive(Debug)]
pub(super) struct EngineState {
    /// What it joins by, wherever it is: one that joins by it later is the same, started again.
    pub name: Option<String>,
    pub health: Health,
    /// Whether what is wrong with it was logged.
    pub complained: bool,
    /// Newest version it proved; no traffic without.
    pub served: Option<Arc<Served>>,
    /// Adapters that are loaded, the oldest first: requests still have them, or new ones get them.
    pub adapters: Vec<Arc<Served>>,
    /// Newest version whose probe it passed: tokens of later ones are held back.
    pub probed: Option<PolicyVersion>,
    /// Newest version it was asked to load: tokens of a version in between are its own, too.
    pub told: Option<PolicyVersion>,
    pub healthy: bool,
    /// A request failed on it, and it was not looked at since: it may be another process by now.
    pub suspected: bool,
    pub updating: bool,
    pub doing: String,
    /// Prompt and answer together, tokens; known once the engine has answered.
    pub max_model_len: Option<u32>,
    /// Since when it could not be used: never reached yet, or lost and not proved again.
    pub down_since: Option<Instant>,
    /// It was known before a restart of this process: it has been through its start-up.
    pub was_known: bool,
    /// It has been lost at least once.
    pub was_lost: bool,
    /// Why it was lost last.
    pub lost_because: String,
    /// Its log-probabilities were shown to be those of the distribution it samples from.
    pub is_processed: bool,
    /// What it lacks that the run's config asks of it.
    pub unfit: Option<String>,
    /// Cancelled when the engine is lost: its requests go elsewhere at once.
    pub lost: CancellationToken,
    pub load: Load,
    /// Requests it is to have at a time while others have room; the core's word.
    pub limit: u32,
}

/// How many requests run, and for how long any did.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub running: u32,
    /// Duration of all requests, added up, until `counted`.
    requests: Duration,
    counted: Option<Instant>,
    busy: Duration,
    busy_since: Option<Instant>,
    /// When it first could have worked.
    pub counted_since: Option<Instant>,
}

impl Load {
    pub(crate) fn start(&mut self, now: Instant) {
        self.count(now);
        self.running += 1;
        self.busy_since.get_or_insert(now);
    }

    pub(crate) fn stop(&mut self, now: Instant) {
        self.count(now);
        self.running -= 1;
        if self.running == 0
            && let Some(since) = self.busy_since.take()
        {
            self.busy += now - since;
        }
    }

    fn count(&mut self, now: Instant) {
        if let Some(before) = self.counted.replace(now) {
            self.requests += now.saturating_duration_since(before) * self.running;
        }
    }

    /// For how long requests were here, of all of them added up, in seconds.
    pub(crate) fn requests_s(&mut self, now: Instant) -> f64 {
        self.count(now);
        self.requests.as_secs_f64()
    }

    pub(crate) fn idle_share(&self, now: Instant) -> Option<f64> {
        let total = (now - self.counted_since?).as_secs_f64();
        let busy = self.busy + self.busy_since.map_or(Duration::ZERO, |since| now - since);
        (total > 0.0).then(|| (1.0 - busy.as_secs_f64() / total).clamp(0.0, 1.0))
    }
}

impl EngineState {
    /// For people: of one that cannot be used also why not, while it is tried again.
    pub(crate) fn describe(&self, now: Instant) -> String {
        let (doing, reason) = (&self.doing, &self.lost_because);
        if self.down_since.is_some() && !reason.is_empty() && !doing.contains(reason) {
            return format!("{doing}; it was lost before: {reason}");
        }
        match self.health.complaint(now) {
            Some(complaint) => format!("{doing}; {complaint}"),
            None => doing.clone(),
        }
    }

    /// Newest version it proved.
    pub(crate) fn proved(&self) -> Option<PolicyVersion> {
        self.served.as_ref().map(|served| served.named.version)
    }

    /// What it may be given requests for.
    pub(crate) fn usable(&self) -> Option<&Arc<Served>> {
        let is_well = self.healthy && !self.updating && !self.suspected;
        self.served.as_ref().filter(|_| is_well)
    }

    /// It has been through its start-up once.
    pub(crate) fn was_proved(&self) -> bool {
        self.was_known || self.load.counted_since.is_some()
    }
}
