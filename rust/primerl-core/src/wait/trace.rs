//! Causes as a trace of a journal counts them: coarser than [`Wait`], with the state of engines and rollouts.

use super::Wait;
use crate::Core;
use crate::ids::*;
use serde::Serialize;

/// What a batch that is asked for waits for, the nearest cause first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchWait {
    /// The trainer itself has not published version 0.
    FirstWeights,
    /// No engine has joined.
    NoEngine,
    /// Every engine is lost.
    EnginesLost,
    /// No engine serves, and some load weights.
    EnginesLoading,
    /// No engine serves: they joined, or were lost, and were not asked to load yet.
    EnginesUnproved,
    /// The step is further ahead of the newest proved version than `max_async_level` allows.
    AsyncLevel,
    /// A training environment has no worker that listed its examples, and nothing is in flight.
    NoWorker,
    /// Training rollouts are in flight.
    Rollouts,
    /// An evaluation holds the next version back, or is all that is in flight.
    Evaluation,
    /// Groups wait for a custom algorithm, and nothing is in flight.
    Advantages,
    /// Groups wait for the teacher, and nothing is in flight.
    Teacher,
    /// Engines serve and there is work, but no worker asks for it.
    WorkersAway,
}

/// Why no rollout is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoRollouts {
    /// Nothing is left to be sampled.
    AllCut,
    /// As many groups are under way as may be trained before the next version.
    Trainer,
    /// No worker has listed the examples of a training environment.
    NoWorker,
    /// There is work, but no worker asks for it.
    WorkersAway,
}

impl Core {
    /// What the batch of `step`, which is not cut yet, waits for at this moment.
    pub fn batch_wait(&self, step: Step) -> BatchWait {
        if self.ledger.newest_published().is_none() {
            return BatchWait::FirstWeights;
        }
        // Rollouts that run at an engine that is paused wait with it.
        if !self.engine_views().any(|engine| engine.serves()) {
            return self.engine_wait();
        }
        if self.is_ahead(step) {
            return match &self.evaluations.round {
                Some(_) => BatchWait::Evaluation,
                None => BatchWait::AsyncLevel,
            };
        }
        match (self.in_flight(), self.step_wait(step)) {
            ((0, 0), Wait::Examples(_)) => BatchWait::NoWorker,
            ((0, 0), _) if !self.signals.custom.is_empty() => BatchWait::Advantages,
            ((0, 0), _) if !self.signals.teacher.is_empty() => BatchWait::Teacher,
            ((0, 0), _) => BatchWait::WorkersAway,
            ((0, _), _) => BatchWait::Evaluation,
            _ => BatchWait::Rollouts,
        }
    }

    fn engine_wait(&self) -> BatchWait {
        if self.engine_views().next().is_none() {
            BatchWait::NoEngine
        } else if self.engine_views().any(|engine| engine.updating.is_some()) {
            BatchWait::EnginesLoading
        } else if self.engine_views().all(|engine| engine.is_lost) {
            BatchWait::EnginesLost
        } else {
            BatchWait::EnginesUnproved
        }
    }

    /// Why none is in flight at this moment, if none is.
    pub fn why_no_rollouts(&self) -> Option<NoRollouts> {
        if !self.rollouts.in_flight.is_empty() {
            return None;
        }
        let queued = self.environments.iter().any(|state| state.has_queued());
        let evaluates = self.evaluations.round.is_some();
        Some(
            if self.ending.finished.is_some() || self.all_steps_cut() && !evaluates {
                NoRollouts::AllCut
            } else if self.curriculum.missing().is_some() {
                NoRollouts::NoWorker
            } else if evaluates || (queued && self.may_train_a_step()) || self.may_begin_group() {
                NoRollouts::WorkersAway
            } else {
                NoRollouts::Trainer
            },
        )
    }
}
