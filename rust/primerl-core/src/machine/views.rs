//! Read-only views of the state, for those that play a journal back.

use crate::Core;
use crate::group::Group;
use crate::ids::*;
use crate::rollout::Rollout;
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};

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
            .in_flight
            .get(&id)
            .map(|rollout| -> &Rollout { rollout })
    }

    /// Rollouts in flight, in the order in which they were leased.
    pub fn rollouts(&self) -> impl Iterator<Item = &Rollout> {
        self.rollouts
            .in_flight
            .values()
            .map(|rollout| -> &Rollout { rollout })
    }

    /// When a rollout that is open, or has finished, was leased.
    pub fn leased_at(&self, rollout: &Rollout) -> Time {
        rollout.deadline - self.config.rollout_span(rollout.environment)
    }

    /// Training groups begun and not cut, in the order in which they were begun.
    pub fn groups(&self) -> impl Iterator<Item = &Group> {
        self.groups.live.values()
    }

    /// Rollouts of an evaluation that ended well and wait for the rest of their group, which counts as a whole.
    pub fn held(&self) -> impl Iterator<Item = &Rollout> {
        let round = self.evaluations.round.iter();
        let environments = round.flat_map(|round| round.environments.values());
        let held = environments.flat_map(|progress| progress.held.values());
        held.flat_map(|held| &held.scored)
            .map(|(rollout, _)| -> &Rollout { rollout })
    }

    /// Whether a group waits for a cut.
    pub fn is_group_complete(&self, id: GroupId) -> bool {
        self.groups
            .live
            .get(&id)
            .is_some_and(|group| group.ready_since.is_some())
    }

    /// Rollouts in flight: for training, and of evaluations.
    pub fn in_flight(&self) -> (usize, usize) {
        (self.rollouts.training(), self.rollouts.evaluating)
    }

    /// The first step whose batch can still be had.
    pub fn batches_kept_from(&self) -> Step {
        self.batches.kept_from()
    }

    /// For each batch that can still be had and is in the spool, the checksum of each rank's bytes.
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
        let leases = self.leases.requests.values();
        let asking: BTreeSet<WorkerId> = leases.map(|lease| lease.worker).collect();
        self.workers
            .registered
            .iter()
            .map(move |(id, worker)| WorkerView {
                worker: *id,
                environment: worker.environment,
                running: worker.running.len(),
                asks: asking.contains(id),
            })
    }
}
