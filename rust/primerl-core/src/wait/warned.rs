//! Waits that no request stands for, and the warnings about them.

use super::Wait;
use crate::Core;
use crate::ids::*;
use crate::time::Duration;

impl Core {
    /// The waits there are at this moment, each with the span after which it is worth a warning; in ascending order.
    fn current_waits(&self) -> Vec<(Wait, Duration)> {
        let mut waits = Vec::new();
        if self.ending.finished.is_some() {
            return waits;
        }
        let timeouts = &self.config.timeouts;
        if !self.ledger.has_live_engine() && !self.config.without_engines {
            waits.push((Wait::NoEngine, timeouts.worker));
        }
        for (id, engine) in self.ledger.engines() {
            if let Some(version) = engine.updating {
                waits.push((Wait::EngineUpdate(*id, version), timeouts.weights));
            }
        }
        for id in self.environments.ids() {
            let state = &self.environments[id];
            if state.in_flight == 0 && state.requests.is_empty() && self.has_work(id) {
                waits.push((Wait::NoWorker(id), timeouts.worker));
            }
        }
        if let Some(wait) = self.trainer_owes() {
            waits.push((wait, timeouts.weights));
        }
        waits
    }

    fn has_work(&self, environment: EnvironmentId) -> bool {
        if !self.is_training(environment) {
            return self
                .evaluations
                .progress(environment)
                .is_some_and(|progress| progress.total.is_none() || !progress.queue.is_empty());
        }
        let state = &self.environments[environment];
        !self.all_steps_cut()
            && (state.examples.is_none() || state.has_queued() || self.may_begin_group())
    }

    fn trainer_owes(&self) -> Option<Wait> {
        if self.config.without_engines {
            return None;
        }
        if self.ledger.newest_published().is_none() {
            return Some(Wait::Weights(PolicyVersion(0)));
        }
        // Not the newest that was published: it may have gone back to a checkpoint.
        let trained = self.ledger.newest_trained();
        // It may hold the batch after the one it trains.
        if self.batches.newest_fetched() > Some(trained) {
            return Some(Wait::Weights(PolicyVersion(trained.0 + 1)));
        }
        let owes = self.batches.requests.is_empty() && trained.0 < self.config.run.max_steps;
        owes.then_some(Wait::BatchRequest(Step(trained.0 + 1)))
    }

    pub(crate) fn refresh_waits(&mut self) {
        let current = self.current_waits();
        self.waits.update(&current, self.now, &mut self.deadlines);
    }

    pub(crate) fn warn_of_wait(&mut self, wait: Wait) {
        // It may have ended with the event that let its deadline pass.
        let mut current = self.current_waits().into_iter();
        let Some((_, span)) = current.find(|(other, _)| *other == wait) else {
            return;
        };
        let Some(since) = self.waits.rearm(wait, span, self.now, &mut self.deadlines) else {
            return;
        };
        let (who, waiting_for) = (self.who(wait), self.words(wait));
        let seconds = self.now.since(since).as_secs_f64();
        self.warn(format!(
            "{who} waits for {waiting_for}, since {seconds:.0} s"
        ));
    }
}
