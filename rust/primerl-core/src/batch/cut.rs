//! Cutting batches and answering the trainer.

use crate::Core;
use crate::admission::last_step;
use crate::batch::build;
use crate::counters::{Attempts, Ended, VoidReason};
use crate::deadlines::Due;
use crate::effect::Effect;
use crate::group::Group;
use crate::ids::*;
use crate::metrics::{Interval, attempt_metrics, buffer_metrics};
use std::collections::BTreeSet;
use std::sync::Arc;

impl Core {
    pub(crate) fn cut_batches(&mut self) {
        let needed = self.config.groups_per_batch();
        while self.ready.len() >= needed {
            if last_step(&self.config, self.ledger.newest_proved()) < Some(self.next_step) {
                return;
            }
            let mut chosen = Vec::with_capacity(needed);
            for _ in 0..needed {
                chosen.extend(self.ready.pop_first().map(|(_, id)| id));
            }
            // Which groups are trained depends on when they came; how they are packed does not.
            chosen.sort_unstable();
            self.cut(&chosen);
            self.sweep();
        }
    }

    fn cut(&mut self, chosen: &[GroupId]) {
        let mut groups: Vec<Group> = chosen
            .iter()
            .filter_map(|id| self.groups.remove(id))
            .collect();
        for rollout in groups.iter().flat_map(Group::finished) {
            if let Some(oldest) = rollout.oldest() {
                self.by_age.remove(&(oldest, rollout.id));
            }
        }
        let counted = Interval {
            counters: self.counters,
            losses: self.losses.clone(),
        };
        let interval = Interval::between(&self.last_cut, &counted);
        self.last_cut = counted;
        let mut batch = build(
            &self.config,
            self.next_step,
            &mut groups,
            &interval,
            &mut self.rng,
        );
        let moved = self.curriculum.end_step(self.next_step);
        batch.metrics.extend(buffer_metrics(&self.config, moved));
        let attempts = self.sites.iter_mut().map(|site| &mut site.attempts);
        let attempts: Vec<Attempts> = attempts.map(std::mem::take).collect();
        batch
            .metrics
            .extend(attempt_metrics(&self.config, &attempts));
        let epoch = ("progress/epoch".to_owned(), self.curriculum.epoch());
        batch.metrics.extend([epoch]);
        let batch = Arc::new(batch);
        let micro_batches = batch.ranks.iter().flatten();
        let trained: BTreeSet<RolloutId> = micro_batches
            .flat_map(|micro_batch| micro_batch.sequences())
            .map(|weighted| weighted.sample.rollout)
            .collect();
        for rollout in groups.into_iter().flat_map(Group::into_finished) {
            if trained.contains(&rollout.id) {
                rollout.end(Ended::Trained, &mut self.counters);
            } else {
                let reason = match rollout.left_out.too_long > 0 {
                    true => VoidReason::TooLong,
                    false => VoidReason::Masked,
                };
                self.void(rollout, reason);
            }
        }
        self.next_step = self.next_step.next();
        self.batches.add(&batch);
        self.effects.push(Effect::BatchCut { batch });
        if self.batches.limit(self.next_step, self.config.spool_steps) {
            self.forget_batches();
        }
    }

    pub(crate) fn answer_batch_requests(&mut self) {
        if self.batches.requests.is_empty() {
            return;
        }
        let waiting: Vec<RequestId> = self.batches.requests.keys().copied().collect();
        for request in waiting {
            let asked = self.batches.requests[&request];
            let effect = if self.finished.is_some() {
                Effect::NoMoreBatches { request }
            } else {
                if asked.step >= self.next_step {
                    continue;
                }
                self.batches.fetched(asked.step);
                Effect::Batch {
                    request,
                    rank: asked.rank,
                    step: asked.step,
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

    pub(crate) fn batch_written(&mut self, step: Step, checksums: Vec<u64>) {
        if step >= self.next_step {
            return self.ignore("batch_written of a step that was not cut");
        }
        self.batches.written(step, checksums);
    }

    /// Tells the shell which batches nobody will ask for.
    pub(crate) fn forget_batches(&mut self) {
        let before = self.batches.kept_from();
        self.ledger.forget_before(before.trains());
        self.effects.push(Effect::ForgetBatches { before });
    }

    pub(crate) fn batch_poll_ended(&mut self, request: RequestId) {
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
