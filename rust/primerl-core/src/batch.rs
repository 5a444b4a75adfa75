//! The batch of one step: complete groups, swept for staleness, with their advantages, packed.
//!
//! Groups are taken in the order in which they became complete. A batch is cut as soon as there are enough of them,
//! whether or not the trainer has asked, so several may wait for it. A group in which any sample is staler than
//! `max_off_policy_steps` at the step to be cut is voided. A batch is kept until every rank has fetched the next one:
//! a trainer that lost an answer asks again and gets the same.

use crate::algorithm::{Part, ScoredGroup, advantages, length_scales};
use crate::config::Config;
use crate::group::Group;
use crate::ids::*;
use crate::metrics::{Interval, batch_metrics};
use crate::pack::{Advantage, PackedBatch, Weighted, pack};
use crate::policy::staleness;
use crate::time::Time;
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Whether a complete group may not be trained at `step`.
pub fn is_stale(group: &Group, step: Step, max_off_policy_steps: u64) -> bool {
    group
        .oldest()
        .is_some_and(|oldest| staleness(step, oldest) > max_off_policy_steps)
}

/// Packs the batch of `step`.
pub fn build(
    config: &Config,
    step: Step,
    groups: &[Group],
    interval: &Interval,
    rng: &mut impl Rng,
) -> PackedBatch {
    let scored: Vec<ScoredGroup> = groups
        .iter()
        .map(|group| ScoredGroup {
            algorithm: &config.environment(group.environment).algorithm,
            rewards: group.traces().map(|trace| trace.reward).collect(),
        })
        .collect();
    let mut advantages = advantages(&scored, rng);
    for (group, advantages) in groups.iter().zip(&mut advantages) {
        if let Some(given) = &group.token_advantages {
            *advantages = means_by_trace(group, given, advantages.len());
        }
    }
    let samples = weigh(config, groups, &advantages);
    let loss_tokens = samples
        .iter()
        .map(|weighted| weighted.sample.loss_tokens)
        .sum();
    let ranks = pack(
        samples,
        config.seq_len as usize,
        config.data_ranks as usize,
        config.flops,
    );
    let metrics = batch_metrics(config, step, groups, &advantages, &ranks, interval);
    PackedBatch {
        step,
        ranks,
        loss_tokens,
        metrics,
    }
}

/// For metrics: what a custom algorithm gave each trace, on average over its trained tokens.
fn means_by_trace(group: &Group, given: &[Arc<[f32]>], traces: usize) -> Vec<f32> {
    let mut sums = vec![(0.0_f64, 0_u64); traces];
    for ((trace, sample), values) in group.samples().zip(given) {
        let mut start = 0;
        for segment in sample.segments() {
            if segment.trained().is_some() {
                let values = &values[start..start + segment.len()];
                sums[trace].0 += values.iter().copied().map(f64::from).sum::<f64>();
                sums[trace].1 += values.len() as u64;
            }
            start += segment.len();
        }
    }
    sums.into_iter()
        .map(|(sum, tokens)| (sum / tokens.max(1) as f64) as f32)
        .collect()
}

/// The samples with their advantages, which are those of their traces, scaled as the lengths ask for.
fn weigh(config: &Config, groups: &[Group], advantages: &[Vec<f32>]) -> Vec<Weighted> {
    let (mut weighted, mut parts) = (Vec::new(), Vec::new());
    let mut sequences = BTreeMap::new();
    for (group, advantages) in groups.iter().zip(advantages) {
        let environment = group.environment;
        for (number, (trace, sample)) in group.samples().enumerate() {
            let next = sequences.len();
            parts.push(Part {
                sequence: *sequences.entry((group.id, trace)).or_insert(next),
                loss_tokens: sample.loss_tokens,
                normalization: config
                    .environment(environment)
                    .algorithm
                    .length_normalization,
            });
            let advantage = match &group.token_advantages {
                None => Advantage::Uniform(advantages[trace]),
                Some(given) => Advantage::PerToken {
                    values: Arc::clone(&given[number]),
                    scale: 1.0,
                },
            };
            weighted.push(Weighted {
                sample: sample.clone(),
                environment,
                advantage,
            });
        }
    }
    let scales = length_scales(&parts, f64::from(config.seq_len));
    for (weighted, by) in weighted.iter_mut().zip(scales) {
        match &mut weighted.advantage {
            Advantage::Uniform(advantage) => *advantage *= by,
            Advantage::PerToken { scale, .. } => *scale = by,
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
