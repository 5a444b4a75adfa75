//! One engine as the pool sees it.

use super::client::EngineClient;
use super::supervisor::Update;
use parking_lot::Mutex;
use primerl_core::{EngineId, PolicyVersion};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// One engine. Written by its supervisor; read by routing and status.
#[derive(Debug)]
pub(super) struct Engine {
    pub id: EngineId,
    pub client: EngineClient,
    pub state: Mutex<EngineState>,
    /// Changes whenever its weights may, whatever they are called: before it is told to load others, and when it is lost.
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
}

impl Engine {
    pub fn new(
        id: EngineId,
        client: EngineClient,
        updates: mpsc::UnboundedSender<Update>,
    ) -> Engine {
        Engine {
            id,
            client,
            state: Mutex::new(EngineState {
                proved: None,
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
            }),
            weights: AtomicU64::new(0),
            probed_weights: AtomicU64::new(0),
            updates,
            suspect: Notify::new(),
            rejoined: Notify::new(),
            idle: Notify::new(),
        }
    }

    /// A request failed on it: it gets no other before it was looked at.
    pub fn suspect(&self) {
        self.state.lock().suspected = true;
        self.suspect.notify_one();
    }

    /// It computes with the weights it has now. The caller holds `state`.
    pub fn probe_passed(&self) {
        let weights = self.weights.load(Ordering::SeqCst);
        self.probed_weights.store(weights, Ordering::SeqCst);
    }

    /// From now on, what it samples is not known to come from the weights it proved last. The caller holds `state`.
    pub fn weights_change(&self) {
        self.weights.fetch_add(1, Ordering::SeqCst);
    }
}

/// Guarded by a mutex held for a few loads and stores.
#[derive(Debug)]
pub(super) struct EngineState {
    /// Newest version it proved; no traffic without.
    pub proved: Option<PolicyVersion>,
    /// Newest version whose probe it passed: tokens of later ones are held back.
    pub probed: Option<PolicyVersion>,
    /// Newest version it was told to load: tokens of a version in between are its own, too.
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
    busy: Duration,
    busy_since: Option<Instant>,
    /// When it first could have worked.
    pub counted_since: Option<Instant>,
}

impl Load {
    pub fn start(&mut self, now: Instant) {
        self.running += 1;
        self.busy_since.get_or_insert(now);
    }

    pub fn stop(&mut self, now: Instant) {
        self.running -= 1;
        if self.running == 0
            && let Some(since) = self.busy_since.take()
        {
            self.busy += now - since;
        }
    }

    pub fn idle_share(&self, now: Instant) -> Option<f64> {
        let total = (now - self.counted_since?).as_secs_f64();
        let busy = self.busy + self.busy_since.map_or(Duration::ZERO, |since| now - since);
        (total > 0.0).then(|| (1.0 - busy.as_secs_f64() / total).clamp(0.0, 1.0))
    }
}

impl EngineState {
    /// For people: of one that cannot be used also why not, while it is tried again.
    pub fn describe(&self) -> String {
        let (doing, reason) = (&self.doing, &self.lost_because);
        match self.down_since {
            Some(_) if !reason.is_empty() && !doing.contains(reason) => {
                format!("{doing}; it was lost before: {reason}")
            }
            _ => doing.clone(),
        }
    }

    /// The version it may be given requests for.
    pub fn usable(&self) -> Option<PolicyVersion> {
        self.proved
            .filter(|_| self.healthy && !self.updating && !self.suspected)
    }
}
