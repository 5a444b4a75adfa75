//! The batch of one step: complete groups, swept for staleness, with their advantages, packed.
//!
//! Groups are taken in the order in which they became complete. A batch is cut as soon as there are enough of them,
//! whether or not the trainer has asked, so several may wait for it. What is staler than `max_off_policy_steps` at the
//! next step is voided as soon as a step is cut, so a complete group holds nothing that is too old. A batch is kept until every rank has fetched the next one:
//! a trainer that lost an answer asks again and gets the same.

use crate::algorithm::advantages;
use crate::config::Config;
use crate::group::Group;
use crate::ids::*;
use crate::metrics::{Interval, batch_metrics};
use crate::pack::{PackedBatch, Weighted, pack};
use crate::time::Time;
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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

#[derive(Clone, Debug)]
struct Cut {
    batch: Arc<PackedBatch>,
    fetched: BTreeSet<u32>,
}

/// A rank that waits.
#[derive(Clone, Copy, Debug)]
pub struct BatchRequest {
    pub step: Step,
    pub rank: u32,
    pub deadline: Time,
}

/// Cut batches that may still be asked for, and who asks.
#[derive(Clone, Debug, Default)]
pub struct Batches {
    cut: BTreeMap<Step, Cut>,
    pub requests: BTreeMap<RequestId, BatchRequest>,
    newest_fetched: Option<Step>,
    last_metrics: Option<Arc<PackedBatch>>,
}

impl Batches {
    pub fn add(&mut self, batch: Arc<PackedBatch>) {
        self.last_metrics = Some(Arc::clone(&batch));
        let previous = self.cut.insert(
            batch.step,
            Cut {
                batch,
                fetched: BTreeSet::new(),
            },
        );
        assert!(previous.is_none(), "a step is cut once");
    }

    /// The batch cut last, which may have been fetched and given up since.
    pub fn newest(&self) -> Option<&PackedBatch> {
        self.last_metrics.as_deref()
    }

    /// The newest step of which some rank has its batch.
    pub fn newest_fetched(&self) -> Option<Step> {
        self.newest_fetched
    }

    /// Whether the step was cut and every rank has fetched a later one.
    pub fn is_given_up(&self, step: Step, next_step: Step) -> bool {
        step < next_step && !self.cut.contains_key(&step)
    }

    /// The batch of `step`, if it was cut; noted as fetched by `rank` of `data_ranks`.
    pub fn fetch(&mut self, step: Step, rank: u32, data_ranks: u32) -> Option<Arc<PackedBatch>> {
        let cut = self.cut.get_mut(&step)?;
        cut.fetched.insert(rank);
        let batch = Arc::clone(&cut.batch);
        if cut.fetched.len() == data_ranks as usize {
            self.cut.retain(|other, _| *other >= step);
        }
        self.newest_fetched = self.newest_fetched.max(Some(step));
        Some(batch)
    }
}
