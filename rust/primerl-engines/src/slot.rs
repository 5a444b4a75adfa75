//! A request's place on an engine: wait for it, take it, give it back.

use super::error::EngineError;
use super::generate::Generated;
use super::pool::Engines;
use super::routing::{Candidate, Resident, choose};
use super::state::{Engine, Served};
use primerl_core::{EngineId, PolicyVersion};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Engines {
    /// Wait until an engine may be used, and take a place on it. `None`: the deadline passed.
    pub(super) async fn pick(
        &self,
        resident: Option<Resident>,
        deadline: Instant,
        failed: &[EngineId],
    ) -> Option<Slot> {
        let mut changed = self.changed.subscribe();
        loop {
            if deadline <= Instant::now() {
                return None;
            }
            if let Some(slot) = self.try_pick(resident, failed) {
                return Some(slot);
            }
            let deadline = tokio::time::Instant::from_std(deadline);
            match tokio::time::timeout_at(deadline, changed.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return None,
            }
        }
    }

    fn try_pick(&self, resident: Option<Resident>, failed: &[EngineId]) -> Option<Slot> {
        let engines = self.engines.read();
        let candidates = engines.iter();
        let candidates: Vec<Candidate> = candidates
            .filter_map(|engine| candidate(engine, failed))
            .collect();
        let chosen = choose(&candidates, resident)?;
        let engine = engines.iter().find(|engine| engine.id == chosen)?;
        let mut state = engine.state.lock();
        // The state may have changed since it was read; the caller tries again.
        let served = Arc::clone(state.usable()?);
        state.load.start(Instant::now());
        served.take_place();
        Some(Slot {
            engine: Arc::clone(engine),
            weights: engine.weights.load(Ordering::SeqCst),
            served,
        })
    }
}

/// `None` if the engine may not be used.
fn candidate(engine: &Engine, failed: &[EngineId]) -> Option<Candidate> {
    let state = engine.state.lock();
    Some(Candidate {
        engine: engine.id,
        version: state.usable()?.named.version,
        running: state.load.running,
        limit: state.limit,
        failed: failed.contains(&engine.id),
        slow: state.health.is_slow(),
    })
}

/// A request's place on an engine.
pub(super) struct Slot {
    pub engine: Arc<Engine>,
    /// [`Engine::weights`] when the place was taken.
    pub weights: u64,
    /// The name of the weights that answer.
    pub served: Arc<Served>,
}

impl Slot {
    pub(super) fn version(&self) -> PolicyVersion {
        self.served.named.version
    }

    /// The request goes to another engine.
    pub(super) fn is_lost(&self) -> bool {
        self.served.lost.is_cancelled()
    }

    pub(super) fn answered(&self) {
        self.engine.state.lock().health.answered(Instant::now());
    }

    /// The engine failed a request that another may answer.
    pub(super) fn failed(&self) {
        // For an engine that was removed meanwhile, this is known; an adapter that had to make room says nothing about
        // the engine.
        if !self.is_lost() {
            self.engine.state.lock().health.failed(Instant::now());
            self.engine.suspect();
        }
    }

    pub(super) async fn unless_lost<T>(
        &self,
        answer: impl Future<Output = Result<T, EngineError>>,
    ) -> Result<T, EngineError> {
        tokio::select! {
            answer = answer => answer,
            () = self.served.lost.cancelled() => Err(EngineError::Lost),
        }
    }

    /// Tokens may come from the version proved at the start, or from updates that were started since; from no other.
    pub(super) fn check_versions(&self, generated: Generated) -> Result<Generated, EngineError> {
        let told = self.engine.state.lock().told;
        let newest = told.map_or(self.version(), |told| told.max(self.version()));
        let foreign = generated
            .versions
            .iter()
            .find(|run| !(self.version()..=newest).contains(&run.version));
        match foreign {
            Some(run) => Err(EngineError::Unproved {
                label: run.version.to_string(),
            }),
            None => Ok(generated),
        }
    }
}

impl Engines {
    /// Ends when these weights have passed their probe; if the probe fails, the engine is lost, which the caller has to
    /// notice.
    pub(super) async fn until_vouched_for(&self, engine: &Engine, weights: u64) {
        let mut changed = self.changed.subscribe();
        while !engine.vouches_for(weights) {
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Holds back what new weights sampled until they have passed their probe; the supervisor bounds the wait.
    pub(super) async fn unless_probe_fails(
        &self,
        slot: &Slot,
        generated: Generated,
    ) -> Result<Generated, EngineError> {
        let newest = generated.versions.iter().map(|run| run.version).max();
        let mut changed = self.changed.subscribe();
        loop {
            if slot.is_lost() {
                return Err(EngineError::Lost);
            }
            if newest <= slot.engine.state.lock().probed {
                return Ok(generated);
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = slot.served.lost.cancelled() => {}
                () = self.stop.cancelled() => return Err(EngineError::Lost),
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.engine.state.lock();
        state.load.stop(Instant::now());
        if self.served.give_back_place() == 0 && self.served.named.base.is_some() {
            self.engine.unused.notify_one();
        }
        if state.load.running == 0 {
            self.engine.idle.notify_one();
        }
    }
}
