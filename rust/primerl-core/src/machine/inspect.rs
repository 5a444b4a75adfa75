//! What readers of a journal ask of the core, as they play it back. Nothing here changes anything.

use crate::Core;
use crate::admission::last_step;
use crate::group::Group;
use crate::ids::*;
use crate::rollout::Rollout;
use crate::time::Time;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

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
    /// No engine serves: they joined, or were lost, and have not been told to load yet.
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

/// An engine as the core knows it.
#[derive(Clone, Copy, Debug)]
pub struct EngineView {
    pub engine: EngineId,
    /// What it serves.
    pub proved: Option<PolicyVersion>,
    /// What it loads.
    pub updating: Option<PolicyVersion>,
    pub is_lost: bool,
}

impl EngineView {
    /// In rotation, and not paused to load.
    pub fn serves(&self) -> bool {
        self.proved.is_some() && self.updating.is_none() && !self.is_lost
    }
}

/// What a worker does.
#[derive(Clone, Copy, Debug)]
pub struct WorkerView {
    pub worker: WorkerId,
    pub environment: EnvironmentId,
    /// Rollouts it runs.
    pub running: usize,
    /// It waits for a lease.
    pub asks: bool,
}

impl Core {
    /// A rollout in flight.
    pub fn rollout(&self, id: RolloutId) -> Option<&Rollout> {
        self.rollouts
            .get(&id)
            .map(|rollout| -> &Rollout { rollout })
    }

    /// Rollouts in flight, in the order in which they were leased.
    pub fn rollouts(&self) -> impl Iterator<Item = &Rollout> {
        self.rollouts
            .values()
            .map(|rollout| -> &Rollout { rollout })
    }

    /// When a rollout that is open, or has finished, was leased.
    pub fn leased_at(&self, rollout: &Rollout) -> Time {
        rollout.deadline - self.config.rollout_span(rollout.environment)
    }

    /// Training groups begun and not cut, in the order in which they were begun.
    pub fn groups(&self) -> impl Iterator<Item = &Group> {
        self.groups.values()
    }

    /// Rollouts of an evaluation that ended well and wait for the rest of their group, which counts as a whole.
    pub fn held(&self) -> impl Iterator<Item = &Rollout> {
        let environments = self
            .round
            .iter()
            .flat_map(|round| round.environments.values());
        let held = environments.flat_map(|progress| progress.held.values());
        held.flat_map(|held| &held.scored)
            .map(|(rollout, _)| -> &Rollout { rollout })
    }

    /// Whether a group waits for a cut.
    pub fn is_group_complete(&self, id: GroupId) -> bool {
        self.groups
            .get(&id)
            .is_some_and(|group| group.ready_since.is_some())
    }

    /// Rollouts in flight: for training, and of evaluations.
    pub fn in_flight(&self) -> (usize, usize) {
        let evaluation = self.in_flight_evaluation;
        (self.rollouts.len() - evaluation, evaluation)
    }

    /// The first step whose batch can still be had.
    pub fn batches_kept_from(&self) -> Step {
        self.batches.kept_from()
    }

    /// Of the batches that can still be had and are in the spool: for each rank the checksum of its bytes.
    pub fn batch_checksums(&self) -> &BTreeMap<Step, Vec<u64>> {
        self.batches.checksums()
    }

    /// Newest version the trainer has published.
    pub fn published_version(&self) -> Option<PolicyVersion> {
        self.ledger.newest_published()
    }

    /// Engines that ever joined.
    pub fn engine_views(&self) -> impl Iterator<Item = EngineView> + '_ {
        let engines = self.ledger.engines().iter();
        engines.map(|(id, engine)| EngineView {
            engine: *id,
            proved: engine.proved,
            updating: engine.updating,
            is_lost: engine.lost.is_some(),
        })
    }

    /// Workers that are registered.
    pub fn worker_views(&self) -> impl Iterator<Item = WorkerView> + '_ {
        let leases = self.lease_requests.values();
        let asking: BTreeSet<WorkerId> = leases.map(|lease| lease.worker).collect();
        self.workers.iter().map(move |(id, worker)| WorkerView {
            worker: *id,
            environment: worker.environment,
            running: worker.running.len(),
            asks: asking.contains(id),
        })
    }

    /// What the batch of `step`, which is not cut yet, waits for at this moment.
    pub fn batch_wait(&self, step: Step) -> BatchWait {
        if self.ledger.newest_published().is_none() {
            return BatchWait::FirstWeights;
        }
        // Rollouts that run at an engine that is paused wait with it.
        if !self.engine_views().any(|engine| engine.serves()) {
            return self.why_no_engine();
        }
        if last_step(&self.config, self.ledger.newest_proved()) < Some(step) {
            return match &self.round {
                Some(_) => BatchWait::Evaluation,
                None => BatchWait::AsyncLevel,
            };
        }
        match self.in_flight() {
            (0, 0) if self.curriculum.missing().is_some() => BatchWait::NoWorker,
            (0, 0) if !self.computing.is_empty() => BatchWait::Advantages,
            (0, 0) if !self.scoring.is_empty() => BatchWait::Teacher,
            (0, 0) => BatchWait::WorkersAway,
            (0, _) => BatchWait::Evaluation,
            _ => BatchWait::Rollouts,
        }
    }

    fn why_no_engine(&self) -> BatchWait {
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
        if !self.rollouts.is_empty() {
            return None;
        }
        let has_work =
            |site: &crate::machine::Site| !site.queue.is_empty() || !site.set_aside.is_empty();
        let queued = self.sites.iter().any(has_work);
        let evaluates = self.round.is_some();
        Some(
            if self.finished.is_some() || self.next_step.0 > self.config.max_steps && !evaluates {
                NoRollouts::AllCut
            } else if self.curriculum.missing().is_some() {
                NoRollouts::NoWorker
            } else if queued || evaluates || self.may_begin_group() {
                NoRollouts::WorkersAway
            } else {
                NoRollouts::Trainer
            },
        )
    }
}
