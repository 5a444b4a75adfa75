//! A request's place on an engine: waited for, taken, given back.

use super::client::EngineError;
use super::generate::Generated;
use super::pool::Engines;
use super::routing::{Candidate, Resident, choose};
use super::state::Engine;
use primerl_core::{EngineId, PolicyVersion};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokio_util::sync::CancellationToken;

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
        let candidates: Vec<Candidate> = engines
            .iter()
            .filter_map(|engine| {
                let state = engine.state.lock();
                Some(Candidate {
                    engine: engine.id,
                    version: state.usable()?,
                    running: state.load.running,
                    limit: state.limit,
                    failed: failed.contains(&engine.id),
                })
            })
            .collect();
        let engine = &engines[choose(&candidates, resident)?.0 as usize];
        let mut state = engine.state.lock();
        // The state may have changed since it was read; the caller tries again.
        let version = state.usable()?;
        state.load.start(Instant::now());
        Some(Slot {
            engine: Arc::clone(engine),
            version,
            weights: engine.weights.load(Ordering::SeqCst),
            lost: state.lost.clone(),
        })
    }
}

/// A request's place on an engine.
pub(super) struct Slot {
    pub engine: Arc<Engine>,
    pub version: PolicyVersion,
    /// [`Engine::weights`] when the place was taken.
    pub weights: u64,
    pub lost: CancellationToken,
}

impl Slot {
    pub(super) async fn unless_lost<T>(
        &self,
        answer: impl Future<Output = Result<T, EngineError>>,
    ) -> Result<T, EngineError> {
        tokio::select! {
            answer = answer => answer,
            () = self.lost.cancelled() => Err(EngineError::Lost),
        }
    }

    /// Tokens may come from the version proved at the start, or from updates that were told since; from no other.
    pub(super) fn check_versions(&self, generated: Generated) -> Result<Generated, EngineError> {
        let newest = self.engine.state.lock().told.unwrap_or(self.version);
        let foreign = generated
            .versions
            .iter()
            .find(|run| !(self.version..=newest).contains(&run.version));
        match foreign {
            Some(run) => Err(EngineError::Unproved {
                label: run.version.to_string(),
            }),
            None => Ok(generated),
        }
    }
}

impl Engines {
    /// Hold back what new weights sampled until their probe is passed: the supervisor's, which bounds it.
    pub(super) async fn unless_probe_fails(
        &self,
        slot: &Slot,
        generated: Generated,
    ) -> Result<Generated, EngineError> {
        let newest = generated.versions.iter().map(|run| run.version).max();
        let mut changed = self.changed.subscribe();
        loop {
            if slot.lost.is_cancelled() {
                return Err(EngineError::Lost);
            }
            if newest <= slot.engine.state.lock().probed {
                return Ok(generated);
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = slot.lost.cancelled() => {}
                () = self.stop.cancelled() => return Err(EngineError::Lost),
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.engine.state.lock();
        state.load.stop(Instant::now());
        if state.load.running == 0 {
            self.engine.idle.notify_one();
        }
    }
}
