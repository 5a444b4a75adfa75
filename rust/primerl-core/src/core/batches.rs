//! Cutting batches and answering the trainer.

use super::Core;
use crate::admission::last_step;
use crate::batch::{build, is_stale};
use crate::counters::Ended;
use crate::deadlines::Due;
use crate::effect::Effect;
use crate::group::Group;
use crate::ids::*;
use crate::metrics::Interval;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Core {
    pub(super) fn cut_batches(&mut self) {
        let needed = self.config.groups_per_batch();
        while self.ready.len() >= needed {
            if last_step(&self.config, self.ledger.newest_proved()) < Some(self.next_step) {
                return;
            }
            self.sweep();
            if self.ready.len() >= needed {
                let chosen: Vec<GroupId> = self.ready.drain(..needed).collect();
                self.cut(&chosen);
            }
        }
    }

    /// Drops complete groups that are too old for the step to be cut; they can only get older.
    fn sweep(&mut self) {
        let bound = self.config.max_off_policy_steps;
        let step = self.next_step;
        let stale = self
            .ready
            .iter()
            .copied()
            .filter(|id| is_stale(&self.groups[id], step, bound));
        let stale: Vec<GroupId> = stale.collect();
        for id in stale {
            let oldest = self.groups[&id].oldest().unwrap_or(PolicyVersion(0));
            let why = format!(
                "a sample of version {oldest} would be trained at step {step}, more than max_off_policy_steps = {bound} \
                 steps late"
            );
            self.drop_group(id, Ended::Stale, &why);
        }
    }

    fn cut(&mut self, chosen: &[GroupId]) {
        let groups: Vec<Group> = chosen
            .iter()
            .filter_map(|id| self.groups.remove(id))
            .collect();
        let counted = Interval {
            counters: self.counters,
            groups_dropped: self.groups_dropped,
        };
        let interval = Interval::between(&self.last_cut, &counted);
        self.last_cut = counted;
        let batch = build(
            &self.config,
            self.next_step,
            &groups,
            &interval,
            &mut self.rng,
        );
        let batch = Arc::new(batch);
        let micro_batches = batch.ranks.iter().flatten();
        let trained: BTreeSet<RolloutId> = micro_batches
            .flat_map(|micro_batch| micro_batch.sequences())
            .map(|weighted| weighted.sample.rollout)
            .collect();
        for rollout in groups.into_iter().flat_map(Group::into_finished) {
            let ended = if trained.contains(&rollout.id) {
                Ended::Trained
            } else {
                Ended::Filtered
            };
            rollout.end(ended, &mut self.counters);
        }
        self.next_step = self.next_step.next();
        self.batches.add(Arc::clone(&batch));
        self.effects.push(Effect::BatchCut { batch });
    }

    pub(super) fn answer_batch_requests(&mut self) {
        let waiting: Vec<RequestId> = self.batches.requests.keys().copied().collect();
        for request in waiting {
            let asked = self.batches.requests[&request];
            let effect = if self.finished.is_some() {
                Effect::NoMoreBatches { request }
            } else {
                let batch = self
                    .batches
                    .fetch(asked.step, asked.rank, self.config.data_ranks);
                let Some(batch) = batch else { continue };
                Effect::Batch {
                    request,
                    rank: asked.rank,
                    batch,
                }
            };
            self.batches.requests.remove(&request);
            self.deadlines.clear(asked.deadline, Due::Batch(request));
            self.trainer.waiting_since = None;
            self.effects.push(effect);
        }
        if self.batches.requests.is_empty() && self.finished.is_some() {
            self.trainer.waiting_since = None;
        }
    }

    pub(super) fn batch_poll_ended(&mut self, request: RequestId) {
        let Some(asked) = self.batches.requests.get(&request).copied() else {
            return;
        };
        self.cut_batches();
        self.answer_batch_requests();
        if self.batches.requests.remove(&request).is_some() {
            let waiting_for = self.why_no_batch(asked.step);
            self.effects.push(Effect::BatchNotReady {
                request,
                waiting_for,
            });
        }
    }
}
