//! Packed batches: the samples of one step in micro-batches of at most `seq_len` tokens, balanced over data ranks.
//!
//! 1. First-fit decreasing: samples, longest first, each into the first micro-batch it fits in.
//! 2. Ranks step together, so their numbers of micro-batches must be equal. Where the number does not divide, the
//!    dearest micro-batches that hold several sequences are split in two (a rank with half the work beats an idle one);
//!    what is then still missing is filled with empty ones.
//! 3. Micro-batches, dearest first by estimated FLOPs, go to the rank with the least work that still has room. Then the
//!    dearest and the cheapest rank exchange micro-batches for as long as that brings them closer.
//! 4. The columns are written, once, from the tokens that the samples share with their turns.
//!
//! All ties are broken by position, so the same samples always give the same batch.

mod assign;
mod columns;

use crate::config::FlopsModel;
use crate::ids::*;
use crate::sample::Sample;
use assign::{Bin, balance, first_fit_decreasing, make_divisible};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Columns of one micro-batch. All per-token columns have the same length N, the sum of `sequence_lengths`.
///
/// Worked example, two sequences of 3 and 2 tokens:
/// ```text
/// token_ids        [p0 a0 a1 | p1 b0]
/// loss_mask        [ 0  1  1 |  0  1]
/// sequence_lengths [3, 2]
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    pub advantage: Advantage,
}

/// Advantages of one sample's trained tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Advantage {
    /// The same for each of them.
    Uniform(f32),
    /// `scale` times each value; one value a token of the sample, context included (where it is not looked at).
    PerToken { values: Arc<[f32]>, scale: f32 },
}

impl MicroBatch {
    /// Number of tokens N.
    pub fn len(&self) -> usize {
        self.token_ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
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

/// Packs samples for `data_ranks` ranks: `result[rank]` are its micro-batches, the same number for each rank.
/// Samples longer than `seq_len` are left out.
pub fn pack(
    samples: &[Weighted],
    seq_len: usize,
    data_ranks: usize,
    flops: FlopsModel,
) -> Vec<Vec<MicroBatch>> {
    let lengths: Vec<usize> = samples
        .iter()
        .map(|weighted| weighted.sample.len())
        .collect();
    let mut bins = first_fit_decreasing(&lengths, seq_len, flops);
    make_divisible(&mut bins, &lengths, data_ranks, flops);
    balance(bins, data_ranks)
        .into_iter()
        .map(|rank| rank.iter().map(|bin| micro_batch(bin, samples)).collect())
        .collect()
}

fn micro_batch(bin: &Bin, samples: &[Weighted]) -> MicroBatch {
    let mut members = bin.members.clone();
    members.sort_unstable();
    let mut micro_batch = MicroBatch::with_capacity(bin.tokens, members.len());
    members
        .iter()
        .for_each(|index| micro_batch.push(&samples[*index]));
    micro_batch
}

#[cfg(test)]
mod tests;
