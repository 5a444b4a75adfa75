//! One engine as the pool sees it.

use super::client::EngineClient;
use super::supervisor::Update;
use parking_lot::Mutex;
use primerl_core::{EngineId, PolicyVersion};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// One engine. Written by its supervisor; read by routing and status.
#[derive(Debug)]
pub(super) struct Engine {
    pub id: EngineId,
    pub client: EngineClient,
    pub state: Mutex<EngineState>,
    pub updates: mpsc::UnboundedSender<Update>,
    /// Something went wrong with a request: check health now.
    pub suspect: Notify,
    /// It joined again: whatever it proved, it may have forgotten.
    pub rejoined: Notify,
    /// Its last request has ended.
    pub idle: Notify,
}

/// Guarded by a mutex held for a few loads and stores.
#[derive(Debug)]
pub(super) struct EngineState {
    /// Newest version it proved; no traffic without.
    pub proved: Option<PolicyVersion>,
    /// Newest version it was told to load: tokens of a version in between are its own, too.
    pub told: Option<PolicyVersion>,
    pub healthy: bool,
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
    /// Its log-probabilities were shown to be those of the distribution it samples from.
    pub is_processed: bool,
    /// What it lacks that the run's config asks of it.
    pub unfit: Option<String>,
    /// Weights it was told to load so far, whatever they were called.
    pub loads: u64,
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
    /// The version it may be given requests for.
    pub fn usable(&self) -> Option<PolicyVersion> {
        self.proved.filter(|_| self.healthy && !self.updating)
    }
}
