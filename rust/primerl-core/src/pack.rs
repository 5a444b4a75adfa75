//! Packed batches: the samples of one step in micro-batches of at most `seq_len` tokens, balanced over data ranks.

use crate::ids::*;
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
