//! The batch of one step: complete groups, swept for staleness, with their advantages, packed.
//!
//! Groups are taken in the order in which they became complete, and packed in the order in which they began: a run that is
//! repeated with the same samples packs the same batch. A batch is cut as soon as there are enough of them,
//! whether or not the trainer has asked, so several may wait for it. What is staler than `max_off_policy_steps` at the
//! next step is voided as soon as a step is cut, so a complete group holds nothing that is too old. A batch is kept until
//! a checkpoint of the trainer covers it: a trainer that lost an answer, or that resumes from a checkpoint, asks again and
//! gets the same.

mod cut;
mod kept;
mod trainer;

pub use kept::{BatchRequest, Batches};
pub(crate) use trainer::Trainer;

use crate::advantage::{Baselines, Part, advantages, length_scales};
use crate::config::Config;
use crate::counters::Interval;
use crate::group::Group;
use crate::ids::*;
use crate::metrics::batch_metrics;
use crate::pack::{Advantage, PackedBatch, Weighted, pack, pack_trees};
use rand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Packs the batch of `step`. Takes the samples out of the groups.
pub fn build(
    config: &Config,
    step: Step,
    groups: &mut [Group],
    interval: &Interval,
    baselines: &mut Baselines,
    rng: &mut impl Rng,
) -> PackedBatch {
    let scored: Vec<_> = groups.iter().map(|group| group.scored(config)).collect();
    let mut advantages = advantages(&scored, baselines, rng);
    for (group, advantages) in groups.iter().zip(&mut advantages) {
        if let Some(given) = &group.token_advantages {
            *advantages = means_by_trace(group, given, advantages.len());
        }
    }
    let group_sizes: Vec<usize> = groups.iter().map(|group| group.samples().count()).collect();
    let samples = weigh(config, groups, &advantages);
    let loss_tokens = samples
        .iter()
        .map(|weighted| weighted.sample.loss_tokens)
        .sum();
    let (seq_len, data_ranks) = (config.run.seq_len as usize, config.run.data_ranks as usize);
    let ranks = match config.run.shared_prefixes {
        true => pack_trees(samples, &group_sizes, seq_len, data_ranks, config.flops),
        false => pack(samples, seq_len, data_ranks, config.flops),
    };
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
fn weigh(config: &Config, groups: &mut [Group], advantages: &[Vec<f32>]) -> Vec<Weighted> {
    let (mut weighted, mut parts) = (Vec::new(), Vec::new());
    let mut sequences = BTreeMap::new();
    let (mixed, echoes) = (config.mixes_modes(), config.echoes());
    for (group, advantages) in groups.iter_mut().zip(advantages) {
        let environment = group.environment;
        let algorithm = &config.environment(environment).algorithm;
        for (number, (trace, sample)) in group.take_samples().into_iter().enumerate() {
            let next = sequences.len();
            parts.push(Part {
                sequence: *sequences.entry((group.id, trace)).or_insert(next),
                loss_tokens: sample.loss_tokens,
                normalization: algorithm.length_normalization,
            });
            let advantage = match &group.token_advantages {
                None => Advantage::Uniform(advantages[trace]),
                Some(given) => Advantage::PerToken {
                    values: Arc::clone(&given[number]),
                    scale: 1.0,
                },
            };
            let teacher_logprobs = group.teacher_logprobs.as_ref();
            weighted.push(Weighted {
                sample,
                environment,
                advantage,
                teacher_logprobs: teacher_logprobs.map(|given| given[number].clone()),
                mode: mixed.then(|| config.training_mode(environment)),
                echo: echoes.then(|| algorithm.echo.unwrap_or_default()),
            });
        }
    }
    let scales = length_scales(&parts, f64::from(config.run.seq_len));
    for (weighted, by) in weighted.iter_mut().zip(scales) {
        match &mut weighted.advantage {
            Advantage::Uniform(advantage) => *advantage *= by,
            Advantage::PerToken { scale, .. } => *scale = by,
        }
    }
    weighted
}
