//! How much may be in flight, and how large groups must be.

use super::Observer;
use crate::config::LimitRule;
use crate::effect::LeasedRollout;
use crate::ids::*;
use crate::pack::PackedBatch;
use std::collections::{BTreeMap, BTreeSet};

impl Observer {
    pub(super) fn saw_limit(&mut self, engine: EngineId, limit: u32) {
        let admission = &self.config.run.admission;
        assert!((admission.min_per_engine..=admission.max_per_engine).contains(&limit));
        if admission.limit == LimitRule::Fixed {
            assert_eq!(limit, admission.start_per_engine);
        }
        self.limits.insert(engine, limit);
    }

    /// A lease keeps the limit that holds at its moment; a limit that is lowered later cancels nothing.
    /// A whole group that is larger than the engines' limits runs alone.
    pub(super) fn check_room(&mut self, leased: &LeasedRollout) {
        self.in_flight += 1;
        self.in_flight_evaluation += usize::from(leased.evaluation);
        self.most_in_flight = self.most_in_flight.max(self.in_flight);
        let engines: u32 = self.serving.iter().map(|engine| self.limits[engine]).sum();
        let batch = self.config.max_in_flight() as f64;
        assert!(engines > 0, "a rollout is leased while no engine serves");
        let together = self.leased_together(leased.environment) as f64;
        let limit = f64::from(engines).max(together).min(batch);
        assert!(
            self.in_flight as f64 <= limit,
            "{} rollouts are in flight where {limit} are allowed",
            self.in_flight
        );
    }

    /// A batch is whole groups, each with at least `min_group_size` rollouts (of which some may be dropped).
    pub(super) fn check_groups(&self, batch: &PackedBatch) {
        let mut groups: BTreeMap<(GroupId, EnvironmentId), BTreeSet<RolloutId>> = BTreeMap::new();
        for micro_batch in batch.ranks.iter().flatten() {
            for weighted in micro_batch.sequences() {
                let rollout = &weighted.sample.rollout;
                let group = self.leased[rollout].rollout.group;
                let group = (group, weighted.environment);
                groups.entry(group).or_default().insert(*rollout);
            }
        }
        let sizes = groups
            .keys()
            .map(|(_, id)| self.config.rollouts_per_group(*id));
        let (found, wanted) = (sizes.sum::<usize>(), self.config.run.batch_size as usize);
        let last = self.config.largest_group();
        let of_tokens = self.config.run.token_batch_size.is_some();
        assert!(
            of_tokens || found < wanted + last,
            "more groups than a batch has"
        );
        if batch.metrics["samples/too_long"] + batch.metrics["samples/masked"] > 0.0 {
            return;
        }
        assert!(of_tokens || found >= wanted, "a batch has so many groups");
        for ((group, environment), rollouts) in groups {
            let smallest = self.config.min_group_size(environment);
            let largest = self.config.rollouts_per_group(environment);
            assert!(
                (smallest..=largest).contains(&rollouts.len()),
                "group {group} is trained with {} rollouts",
                rollouts.len()
            );
        }
    }
}
