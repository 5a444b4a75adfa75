//! The batch of one step: complete groups, swept for staleness, with their advantages, packed.
//!
//! Groups are taken in the order in which they became complete. A batch is cut as soon as there are enough of them,
//! whether or not the trainer has asked, so several may wait for it. What is staler than `max_off_policy_steps` at the
//! next step is voided as soon as a step is cut, so a complete group holds nothing that is too old. A batch is kept until
//! a checkpoint of the trainer covers it: a trainer that lost an answer, or that goes on from a checkpoint, asks again and
//! gets the same.

use crate::algorithm::advantages;
use crate::config::Config;
use crate::group::Group;
use crate::ids::*;
use crate::metrics::{Interval, batch_metrics};
use crate::pack::{PackedBatch, Weighted, pack};
use crate::time::Time;
use rand::Rng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Packs the batch of `step`. Takes the samples out of the groups.
pub fn build(
    config: &Config,
    step: Step,
    groups: &mut [Group],
    interval: &Interval,
    rng: &mut impl Rng,
) -> PackedBatch {
    let rewards: Vec<Vec<f64>> = groups
        .iter()
        .map(|group| {
            group
                .finished()
                .flat_map(|rollout| rollout.traces.iter().map(|trace| trace.reward))
                .collect()
        })
        .collect();
    let advantages = advantages(&config.algorithm, &rewards, rng);
    let mut samples = weigh(groups, &advantages);
    let sampled = samples.len();
    samples.retain(|weighted| weighted.sample.len() <= config.seq_len as usize);
    let ranks = pack(
        &samples,
        config.seq_len as usize,
        config.data_ranks as usize,
        config.flops,
    );
    let mut metrics = batch_metrics(
        config,
        step,
        groups,
        &samples,
        &advantages,
        &ranks,
        interval,
    );
    metrics.insert(
        "samples/too_long".to_owned(),
        (sampled - samples.len()) as f64,
    );
    let loss_tokens = samples
        .iter()
        .map(|weighted| weighted.sample.loss_tokens)
        .sum();
    PackedBatch {
        step,
        ranks,
        loss_tokens,
        metrics,
    }
}

fn weigh(groups: &mut [Group], advantages: &[Vec<f32>]) -> Vec<Weighted> {
    let mut weighted = Vec::new();
    for (group, advantages) in groups.iter_mut().zip(advantages) {
        let environment = group.environment;
        let mut first_trace = 0;
        for rollout in group.finished_mut() {
            for sample in std::mem::take(&mut rollout.samples) {
                let advantage = advantages[first_trace + sample.trace];
                weighted.push(Weighted {
                    sample,
                    environment,
                    advantage,
                });
            }
            first_trace += rollout.traces.len();
        }
    }
    weighted
}

/// A rank that waits.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct BatchRequest {
    pub step: Step,
    pub rank: u32,
    pub deadline: Time,
}

/// Which batches there are, and who asks for one. The batches themselves are the shell's, on disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Batches {
    pub requests: BTreeMap<RequestId, BatchRequest>,
    /// The first step whose batch is kept: a checkpoint of the trainer covers those before.
    kept_from: Step,
    /// The newest step that a checkpoint covers.
    checkpoint: Option<Step>,
    newest_fetched: Option<Step>,
    last_metrics: Option<BTreeMap<String, f64>>,
}

impl Default for Batches {
    fn default() -> Self {
        Batches {
            requests: BTreeMap::new(),
            kept_from: Step(1),
            checkpoint: None,
            newest_fetched: None,
            last_metrics: None,
        }
    }
}

impl Batches {
    pub fn add(&mut self, batch: &PackedBatch) {
        self.last_metrics = Some(batch.metrics.clone());
    }

    /// Metrics of the batch cut last.
    pub fn last_metrics(&self) -> Option<&BTreeMap<String, f64>> {
        self.last_metrics.as_ref()
    }

    /// The newest step of which some rank has its batch.
    pub fn newest_fetched(&self) -> Option<Step> {
        self.newest_fetched
    }

    pub fn fetched(&mut self, step: Step) {
        self.newest_fetched = self.newest_fetched.max(Some(step));
    }

    /// The first step whose batch can still be had.
    pub fn kept_from(&self) -> Step {
        self.kept_from
    }

    /// The trainer will never ask for `step` or an earlier one again. Returns whether that is news.
    pub fn cover(&mut self, step: Step) -> bool {
        self.checkpoint = self.checkpoint.max(Some(step));
        self.keep_from(step.next())
    }

    /// Without checkpoints a trainer can only begin again at the first step: so many batches are kept for it, and no
    /// more. Returns whether one was given up.
    pub fn limit(&mut self, next_step: Step, keep_steps: u64) -> bool {
        let oldest = Step(next_step.0.saturating_sub(keep_steps).max(1));
        self.checkpoint.is_none() && self.keep_from(oldest)
    }

    /// The trainer goes on from its checkpoint after `step`.
    pub fn resume_after(&mut self, step: Step) {
        self.newest_fetched = Some(step).filter(|step| step.0 > 0);
    }

    fn keep_from(&mut self, step: Step) -> bool {
        let is_news = step > self.kept_from;
        self.kept_from = self.kept_from.max(step);
        is_news
    }
}
