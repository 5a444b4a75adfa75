//! Groups whose rewards come from all of their rollouts together.

use super::Observer;
use crate::effect::LeasedRollout;
use crate::ids::*;
use crate::pack::PackedBatch;
use std::collections::BTreeMap;

impl Observer {
    /// Rollouts of an environment that are leased only together.
    pub(super) fn leased_together(&self, environment: EnvironmentId) -> u32 {
        match self.whole.contains(&environment) {
            false => 1,
            true => self.config.rollouts_per_group(environment) as u32,
        }
    }

    /// An answer holds whole groups, as few as reach what was asked for, and nothing else of them is still open.
    pub(super) fn check_together(&mut self, request: RequestId, rollouts: &[LeasedRollout]) {
        let max = self.asked.remove(&request).expect("somebody asked") as usize;
        let size = self.leased_together(rollouts[0].environment) as usize;
        assert!(
            rollouts.len() - size < max,
            "{} rollouts are leased where {max} were asked for, {size} at a time",
            rollouts.len()
        );
        if size == 1 {
            return;
        }
        let mut groups: BTreeMap<GroupId, usize> = BTreeMap::new();
        for leased in rollouts {
            *groups.entry(leased.group).or_default() += 1;
        }
        for (group, leased) in &groups {
            assert_eq!(*leased, size, "group {group} is not leased whole");
        }
        let open = self.leased.values().filter(|leased| !leased.closed);
        for leased in open {
            let group = leased.rollout.group;
            assert!(
                !groups.contains_key(&group),
                "group {group} is leased again while a rollout of it is open"
            );
        }
    }

    /// What is trained of a whole group was leased with one answer, so one worker rewarded it.
    pub(super) fn check_one_run(&self, batch: &PackedBatch) {
        let mut answers: BTreeMap<GroupId, u64> = BTreeMap::new();
        for micro_batch in batch.ranks.iter().flatten() {
            for weighted in micro_batch.sequences() {
                let leased = &self.leased[&weighted.sample.rollout];
                let group = leased.rollout.group;
                if self.whole.contains(&leased.rollout.environment) {
                    let answer = *answers.entry(group).or_insert(leased.answer);
                    assert_eq!(
                        answer, leased.answer,
                        "group {group} is trained with rollouts of two runs of it"
                    );
                }
            }
        }
    }
}
