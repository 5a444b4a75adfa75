//! Cutting a batch: complete groups become the batch of the next step.

use super::build;
use crate::Core;
use crate::counters::{Attempts, Ended, VoidReason};
use crate::effect::Effect;
use crate::group::Group;
use crate::ids::*;
use crate::metrics::{attempt_metrics, buffer_metrics};
use crate::pack::{MicroBatch, PackedBatch};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

impl Core {
    pub(crate) fn cut_batches(&mut self) {
        while let Some(needed) = self.enough_for_a_batch() {
            if !self.may_train_a_step() {
                return;
            }
            let of_tokens = self.config.run.token_batch_size.is_some();
            let groups = self.groups.take_ready(needed, of_tokens);
            self.cut(groups);
            self.sweep();
        }
    }

    /// Rollouts, or tokens, for which ready groups are to be cut now. Where generation does not run ahead of the trainer, a
    /// step has all that were begun for it: one that is left would be trained off-policy.
    fn enough_for_a_batch(&self) -> Option<u64> {
        let (ready, needed) = (self.ready(), self.config.step_size());
        let takes_all = self.config.run.max_async_level == 0;
        let all_are_ready = || self.groups.sums().ready == self.rollouts_begun();
        match ready >= needed && (!takes_all || all_are_ready()) {
            true if takes_all => Some(ready),
            true => Some(needed),
            false => None,
        }
    }

    /// The size of what is ready: rollouts, or tokens.
    pub(crate) fn ready(&self) -> u64 {
        let sums = self.groups.sums();
        match self.config.run.token_batch_size {
            None => sums.ready as u64,
            Some(_) => sums.ready_tokens,
        }
    }

    /// Groups in the next batch: those that are ready, and as many of the run's size as it still needs.
    pub(crate) fn groups_needed(&self) -> usize {
        let missing = self.config.step_size().saturating_sub(self.ready());
        let group = self.measured(self.config.run.group_size as usize).max(1);
        self.groups.ready.len() + missing.div_ceil(group) as usize
    }

    fn cut(&mut self, mut groups: Vec<Group>) {
        for rollout in groups.iter().flat_map(Group::finished) {
            self.rollouts.forget_age(rollout);
        }
        let interval = self.tally.end_interval();
        let (config, step) = (&self.config, self.next_step);
        let baselines = &mut self.signals.baselines;
        let rng = &mut self.rng;
        let mut batch = build(config, step, &mut groups, &interval, baselines, rng);
        let moved = self.curriculum.end_step(step);
        let states = self.environments.iter_mut();
        let attempts: Vec<Attempts> = states
            .map(|state| std::mem::take(&mut state.attempts))
            .collect();
        let metrics = &mut batch.metrics;
        metrics.extend(buffer_metrics(config, moved));
        metrics.extend(attempt_metrics(config, &attempts));
        metrics.insert("progress/epoch".to_owned(), self.curriculum.epoch());
        let batch = Arc::new(batch);
        self.warn_of_echo_in_vain(&batch);
        self.end_cut_rollouts(groups, &batch);
        self.next_step = step.next();
        self.batches.add(&batch);
        self.effects.push(Effect::BatchCut { batch });
        if self.batches.limit(self.next_step, self.config.spool_steps) {
            self.forget_batches();
        }
    }

    /// In the first step: environments whose messages are to be learnt, and of which there is none.
    fn warn_of_echo_in_vain(&mut self, batch: &PackedBatch) {
        if batch.step != Step(1) || !self.config.echoes() {
            return;
        }
        let weighted = batch.ranks.iter().flatten().flat_map(MicroBatch::sequences);
        let mut learns: BTreeMap<EnvironmentId, bool> = BTreeMap::new();
        for weighted in weighted {
            let mut segments = weighted.sample.segments().iter();
            let says = segments.any(|segment| segment.observed().next().is_some());
            *learns.entry(weighted.environment).or_default() |= says;
        }
        for (environment, learns) in learns {
            let algorithm = &self.config.environment(environment).algorithm;
            if algorithm.echo.is_some() && !learns {
                let name = self.name(environment).to_owned();
                self.warn(format!(
                    "environment {name:?}: algorithm.echo learnt nothing in step 1: no message of the roles that it weighs \
                     followed an answer, or the chat template does not write them as they are"
                ));
            }
        }
    }

    /// A rollout with a sample in the batch is trained; the others are void.
    fn end_cut_rollouts(&mut self, groups: Vec<Group>, batch: &PackedBatch) {
        let micro_batches = batch.ranks.iter().flatten();
        let trained: BTreeSet<RolloutId> = micro_batches
            .flat_map(|micro_batch| micro_batch.sequences())
            .map(|weighted| weighted.sample.rollout)
            .collect();
        for rollout in groups.into_iter().flat_map(Group::into_finished) {
            if trained.contains(&rollout.id) {
                rollout.end(Ended::Trained, &mut self.tally.counters);
            } else {
                let reason = match rollout.left_out.too_long > 0 {
                    true => VoidReason::TooLong,
                    false => VoidReason::Masked,
                };
                self.void(rollout, reason);
            }
        }
    }
}
