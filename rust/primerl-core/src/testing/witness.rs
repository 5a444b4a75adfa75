//! What the world outside has seen. An orchestrator that dies may forget what no one has seen, and nothing else. Each
//! method panics with the promise that was broken.

use crate::Core;
use crate::effect::LeasedRollout;
use crate::ids::*;
use crate::pack::PackedBatch;
use crate::testing::observer::Observer;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Debug, Default)]
pub struct Witness {
    /// Process names by number.
    workers: BTreeMap<WorkerId, String>,
    leases: BTreeMap<RolloutId, (WorkerId, LeasedRollout)>,
    examples: BTreeMap<GroupId, (EnvironmentId, ExampleIndex)>,
    accepted: BTreeSet<RolloutId>,
    /// As the trainer has them.
    batches: BTreeMap<Step, Arc<PackedBatch>>,
    trained: BTreeMap<u32, Step>,
    newest_version: Option<PolicyVersion>,
    over: bool,
}

impl Witness {
    pub fn registers(&mut self, worker: WorkerId, name: &str) {
        let other = self.workers.insert(worker, name.to_owned());
        assert_eq!(other, None, "worker {worker} is another one already");
    }

    pub fn gets_lease(&mut self, worker: WorkerId, leased: &LeasedRollout) {
        let (rollout, group) = (leased.rollout, leased.group);
        let other = self.leases.insert(rollout, (worker, leased.clone()));
        assert_eq!(other, None, "rollout {rollout} was something else before");
        let example = (leased.environment, leased.example);
        let known = *self.examples.entry(group).or_insert(example);
        assert_eq!(
            known, example,
            "group {group} was of another example before"
        );
    }

    pub fn accepted(&mut self, rollout: RolloutId) {
        self.accepted.insert(rollout);
    }

    pub fn accepts_weights(&mut self, version: PolicyVersion) {
        self.newest_version = self.newest_version.max(Some(version));
    }

    /// A worker leaves, for the run is over.
    pub fn is_over(&mut self) {
        self.over = true;
    }

    /// The same batch as before, and nothing in it that another one has.
    pub fn gets_batch(&mut self, batch: &Arc<PackedBatch>) {
        let step = batch.step;
        if let Some(before) = self.batches.get(&step) {
            return assert!(before == batch, "the batch of step {step} has changed");
        }
        for micro_batch in batch.ranks.iter().flatten() {
            let columns = micro_batch.columns();
            let tokens = columns.token_ids.iter().zip(&columns.loss_mask);
            for (token, _) in tokens.filter(|(_, mask)| **mask == 1) {
                let before = self.trained.insert(*token as u32, step);
                assert_eq!(
                    before, None,
                    "token {token} is trained twice, now in step {step}"
                );
            }
        }
        self.batches.insert(step, Arc::clone(batch));
    }

    /// After a restart: the core, and what is left of its story, keep every promise.
    pub fn check(&self, core: &Core, observer: &Observer) {
        for rollout in &self.accepted {
            assert!(
                observer.is_closed(*rollout),
                "the result of rollout {rollout} was accepted, and is lost"
            );
        }
        for (step, batch) in &self.batches {
            assert!(
                observer.batches.get(step) == Some(batch),
                "the trainer has a batch of step {step} that was not cut"
            );
        }
        assert!(
            !self.over || core.finished().is_some(),
            "workers have seen that the run is over, and it continues"
        );
        let published = core.status().run.published_version;
        assert!(
            published >= self.newest_version,
            "version {:?} was accepted, {published:?} is known",
            self.newest_version
        );
    }
}
