//! Packed batches: the samples of one step in micro-batches of at most `seq_len` tokens, balanced over data ranks.
//!
//! 1. First-fit decreasing: samples, longest first, each into the first micro-batch it fits in.
//! 2. Ranks step together, so their numbers of micro-batches must be equal. Where the number does not divide, the
//!    dearest micro-batches that hold several sequences are split in two (a rank with half the work beats an idle one);
//!    what is then still missing is filled with empty ones.
//! 3. Micro-batches, dearest first by estimated FLOPs, go to the rank with the least work that still has room.
//!
//! All ties are broken by position, so the same samples always give the same batch.

use crate::config::FlopsModel;
use crate::ids::*;
use crate::sample::Sample;
use std::collections::BTreeMap;

/// Columns of one micro-batch. All per-token columns have the same length N, the sum of `sequence_lengths`.
///
/// Worked example, two sequences of 3 and 2 tokens:
/// ```text
/// token_ids        [p0 a0 a1 | p1 b0]
/// loss_mask        [ 0  1  1 |  0  1]
/// sequence_lengths [3, 2]
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    pub token_ids: Vec<i32>,
    /// 1 where the token was sampled by the policy and is to be trained.
    pub loss_mask: Vec<u8>,
    /// The engine's log-probability of this token, nats; 0 where `loss_mask` is 0.
    pub logprobs: Vec<f32>,
    pub advantages: Vec<f32>,
    /// Policy version that sampled the token; -1 where `loss_mask` is 0.
    pub versions: Vec<i32>,
    pub temperatures: Vec<f32>,
    pub sequence_lengths: Vec<i32>,
    /// The rollout each sequence came from.
    pub rollouts: Vec<RolloutId>,
    /// Index into [`crate::Config::environments`] for each sequence.
    pub environments: Vec<EnvironmentId>,
}

/// The batch of one step. Every rank has the same number of micro-batches (an empty one where needed).
#[derive(Clone, Debug, PartialEq)]
pub struct PackedBatch {
    pub step: Step,
    /// `ranks[r]` are the micro-batches of data rank r.
    pub ranks: Vec<Vec<MicroBatch>>,
    /// Tokens with `loss_mask` 1 over all ranks: the loss is normalised by it.
    pub loss_tokens: u64,
    /// `reward/all/mean`, `reward/<env>/mean`, `seq_len/all/mean`, `staleness/<n>` (samples of staleness n), ...
    pub metrics: BTreeMap<String, f64>,
}

/// A sample and what the trainer needs to know beside its own columns.
#[derive(Clone, Debug)]
pub struct Weighted {
    pub sample: Sample,
    pub environment: EnvironmentId,
    pub advantage: f32,
}

impl MicroBatch {
    /// Number of tokens N.
    pub fn len(&self) -> usize {
        self.token_ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
    }

    fn push(&mut self, weighted: &Weighted) {
        let sample = &weighted.sample;
        self.token_ids
            .extend(sample.token_ids.iter().map(|token| *token as i32));
        self.loss_mask.extend_from_slice(&sample.loss_mask);
        self.logprobs.extend_from_slice(&sample.logprobs);
        let advantage = |mask: &u8| if *mask == 1 { weighted.advantage } else { 0.0 };
        self.advantages
            .extend(sample.loss_mask.iter().map(advantage));
        self.versions.extend_from_slice(&sample.versions);
        self.temperatures.extend_from_slice(&sample.temperatures);
        self.sequence_lengths.push(sample.len() as i32);
        self.rollouts.push(sample.rollout);
        self.environments.push(weighted.environment);
    }
}

impl FlopsModel {
    /// Estimated FLOPs of one sequence of `tokens` tokens. Packed sequences do not attend to each other, so a
    /// micro-batch costs the sum over its sequences.
    pub fn of(&self, tokens: usize) -> f64 {
        let tokens = tokens as f64;
        self.linear * tokens + self.quadratic * tokens * tokens
    }
}

/// Positions of samples that share a micro-batch.
#[derive(Clone, Debug, Default)]
struct Bin {
    members: Vec<usize>,
    tokens: usize,
    flops: f64,
}

/// Packs samples for `data_ranks` ranks: `result[rank]` are its micro-batches, the same number for each rank.
/// Samples longer than `seq_len` are left out.
pub fn pack(
    samples: &[Weighted],
    seq_len: usize,
    data_ranks: usize,
    flops: FlopsModel,
) -> Vec<Vec<MicroBatch>> {
    let mut bins = first_fit_decreasing(samples, seq_len, flops);
    make_divisible(&mut bins, samples, data_ranks, flops);
    balance(bins, data_ranks)
        .into_iter()
        .map(|rank| rank.iter().map(|bin| micro_batch(bin, samples)).collect())
        .collect()
}

fn first_fit_decreasing(samples: &[Weighted], seq_len: usize, flops: FlopsModel) -> Vec<Bin> {
    let mut order: Vec<usize> = (0..samples.len())
        .filter(|i| samples[*i].sample.len() <= seq_len)
        .collect();
    order.sort_by_key(|i| (std::cmp::Reverse(samples[*i].sample.len()), *i));
    let shortest = order.last().map_or(0, |i| samples[*i].sample.len());
    let mut bins: Vec<Bin> = Vec::new();
    // Bins before this one have no room for even the shortest sample.
    let mut first_open = 0;
    for index in order {
        let tokens = samples[index].sample.len();
        let fits = (first_open..bins.len()).find(|bin| bins[*bin].tokens + tokens <= seq_len);
        let bin = fits.unwrap_or(bins.len());
        if bin == bins.len() {
            bins.push(Bin::default());
        }
        bins[bin].members.push(index);
        bins[bin].tokens += tokens;
        bins[bin].flops += flops.of(tokens);
        while first_open < bins.len() && bins[first_open].tokens + shortest > seq_len {
            first_open += 1;
        }
    }
    bins
}

fn make_divisible(bins: &mut Vec<Bin>, samples: &[Weighted], data_ranks: usize, flops: FlopsModel) {
    let wanted = bins.len().div_ceil(data_ranks) * data_ranks;
    while bins.len() < wanted {
        let splittable = |bin: &&usize| bins[**bin].members.len() > 1;
        let positions: Vec<usize> = (0..bins.len()).collect();
        // `max_by` takes the last of equals; reversed, the first.
        let dearest = positions
            .iter()
            .rev()
            .filter(splittable)
            .max_by(|a, b| bins[**a].flops.total_cmp(&bins[**b].flops));
        let second = match dearest {
            Some(bin) => split(&mut bins[*bin], samples, flops),
            None => Bin::default(),
        };
        bins.push(second);
    }
}

/// Halves a bin by FLOPs: its members, dearest first, each to the cheaper half.
fn split(bin: &mut Bin, samples: &[Weighted], flops: FlopsModel) -> Bin {
    let mut halves = [Bin::default(), Bin::default()];
    for index in std::mem::take(&mut bin.members) {
        let tokens = samples[index].sample.len();
        let half = usize::from(halves[1].flops < halves[0].flops);
        halves[half].members.push(index);
        halves[half].tokens += tokens;
        halves[half].flops += flops.of(tokens);
    }
    let [first, second] = halves;
    *bin = first;
    second
}

fn balance(mut bins: Vec<Bin>, data_ranks: usize) -> Vec<Vec<Bin>> {
    let per_rank = bins.len() / data_ranks;
    bins.sort_by(|a, b| b.flops.total_cmp(&a.flops));
    let mut ranks: Vec<Vec<Bin>> = vec![Vec::with_capacity(per_rank); data_ranks];
    let mut load = vec![0.0_f64; data_ranks];
    for bin in bins {
        let open = (0..data_ranks).filter(|rank| ranks[*rank].len() < per_rank);
        let rank = open
            .min_by(|a, b| load[*a].total_cmp(&load[*b]))
            .expect("there is room for every bin");
        load[rank] += bin.flops;
        ranks[rank].push(bin);
    }
    ranks
}

fn micro_batch(bin: &Bin, samples: &[Weighted]) -> MicroBatch {
    let mut members = bin.members.clone();
    members.sort_unstable();
    let mut micro_batch = MicroBatch::default();
    members
        .iter()
        .for_each(|index| micro_batch.push(&samples[*index]));
    micro_batch
}

#[cfg(test)]
mod tests;
