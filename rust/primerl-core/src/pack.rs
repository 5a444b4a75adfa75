//! Packed batches: the samples of one step in micro-batches of at most `seq_len` tokens, balanced over data ranks.
//!
//! 1. First-fit decreasing: samples, longest first, each into the first micro-batch it fits in.
//! 2. Ranks step together, so their numbers of micro-batches must be equal. Where the number does not divide, the
//!    dearest micro-batches that hold several sequences are split in two (a rank with half the work beats an idle one);
//!    what is then still missing is filled with empty ones.
//! 3. Micro-batches, dearest first by estimated FLOPs, go to the rank with the least work that still has room. Then the
//!    dearest and the cheapest rank exchange micro-batches for as long as that brings them closer.
//!
//! Samples that begin alike may go through the model as a tree, in which the tokens they share are computed once
//! ([`pack_trees`]). What is packed is then the tree of a group, and its size what has to be computed.
//!
//! A batch holds no columns of its own: code that needs them writes them, from the tokens that samples share with their
//! turns.
//!
//! All ties are broken by position, so the same samples always give the same batch.

mod assign;
mod columns;
mod experts;
mod prefixes;
mod trees;

use crate::config::{Echo, FlopsModel, TrainingMode};
use crate::ids::*;
use crate::sample::{Sample, Segment, TokenLogprobs};
use assign::{Bin, Size, balance, first_fit_decreasing, make_divisible};
pub use columns::{Columns, GrammarRun, TruncatedRun};
pub use experts::{ExpertsColumn, ShapesDiffer};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
pub use trees::pack_trees;

/// Sequences that go through the model together, one after the other without padding. Cheap to clone: the tokens are
/// shared with the turns they came from, and the columns written where they are needed ([`MicroBatch::columns`]).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MicroBatch {
    sequences: Vec<Weighted>,
    tokens: usize,
    /// `shared[i]`: leading tokens that sequence i takes over from the previous one. Empty where none takes any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shared: Vec<usize>,
}

/// The batch of one step. Every rank has the same number of micro-batches (an empty one where needed).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PackedBatch {
    pub step: Step,
    /// `ranks[r]` are the micro-batches of data rank r.
    pub ranks: Vec<Vec<MicroBatch>>,
    /// Tokens that are trained, over all ranks.
    pub loss_tokens: u64,
    /// `reward/all/mean`, `reward/<env>/mean`, `seq_len/<env>/max`, `staleness/<n>` (samples of staleness n), ...
    pub metrics: BTreeMap<String, f64>,
}

/// A sample and what the trainer needs to know in addition to its own columns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weighted {
    pub sample: Sample,
    pub environment: EnvironmentId,
    pub advantage: Advantage,
    /// In on-policy distillation: the teacher's log-probability of every token of the sample, nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher_logprobs: Option<TokenLogprobs>,
    /// What its environment learns from, in a run whose environments differ in that: the trainer then learns for each
    /// token which part of the loss it belongs to. `None`: all learn from the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<TrainingMode>,
    /// The weights of what the environment said, in a run that learns some of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub echo: Option<Echo>,
}

/// Advantages of one sample's trained tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Advantage {
    /// The same for each of them.
    Uniform(f32),
    /// `scale` times each value; one value a token of the sample, context included (where it is not looked at).
    PerToken { values: Arc<[f32]>, scale: f32 },
}

impl MicroBatch {
    pub fn new(sequences: Vec<Weighted>) -> Self {
        let tokens = sequences.iter().map(|weighted| weighted.sample.len()).sum();
        MicroBatch {
            sequences,
            tokens,
            shared: Vec::new(),
        }
    }

    /// Sequences in the order of a depth-first walk of their tree; `shared[i]` (0 for the first) are the leading tokens
    /// that sequence i takes over from the previous one, at most as many as both have in common.
    fn of_tree(sequences: Vec<Weighted>, shared: Vec<usize>) -> Self {
        let mut micro_batch = MicroBatch::new(sequences);
        if shared.iter().any(|tokens| *tokens > 0) {
            micro_batch.shared = shared;
        }
        micro_batch
    }

    /// Number of tokens N.
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// Tokens that have to be computed: those that sequences share, once.
    pub fn unique_tokens(&self) -> usize {
        self.tokens - self.shared.iter().sum::<usize>()
    }

    /// For each sequence, the leading tokens that it takes over from the previous one it. Empty where none takes any.
    pub fn shared(&self) -> &[usize] {
        &self.shared
    }

    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    pub fn sequences(&self) -> &[Weighted] {
        &self.sequences
    }

    /// Whether tokens may be trained by cross-entropy: a teacher wrote some, environments learn from different things, or
    /// what an environment said is learnt.
    pub fn has_ce_weights(&self) -> bool {
        let taught =
            |weighted: &Weighted| weighted.sample.segments().iter().any(Segment::is_taught);
        let echoes = |weighted: &Weighted| weighted.echo.is_some();
        let own = |weighted| taught(weighted) || echoes(weighted);
        self.is_mixed() || self.sequences.iter().any(own)
    }

    /// Whether a teacher scored the tokens: all samples of a run that has one.
    pub fn is_scored(&self) -> bool {
        let scored = |weighted: &Weighted| weighted.teacher_logprobs.is_some();
        self.sequences.iter().any(scored)
    }

    /// Whether environments learn from different things, so that each token's part of the loss has to be sent.
    pub fn is_mixed(&self) -> bool {
        self.sequences
            .iter()
            .any(|weighted| weighted.mode.is_some())
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
/// Samples longer than `seq_len` are dropped.
pub fn pack(
    samples: Vec<Weighted>,
    seq_len: usize,
    data_ranks: usize,
    flops: FlopsModel,
) -> Vec<Vec<MicroBatch>> {
    let ranks = plain(&samples, seq_len, data_ranks, flops);
    micro_batches(samples, &ranks)
}

/// Which samples share a micro-batch, each sample a unit of its own.
fn plain(
    samples: &[Weighted],
    seq_len: usize,
    data_ranks: usize,
    flops: FlopsModel,
) -> Vec<Vec<Bin>> {
    let size = |weighted: &Weighted| Size {
        tokens: weighted.sample.len(),
        flops: flops.of(weighted.sample.len()),
    };
    let mut sizes: Vec<Size> = samples.iter().map(size).collect();
    let mut bins = first_fit_decreasing(&sizes, seq_len);
    make_divisible(&mut bins, &mut sizes, data_ranks, |_| None);
    balance(bins, data_ranks)
}

/// Micro-batches of samples in their order.
fn micro_batches(samples: Vec<Weighted>, ranks: &[Vec<Bin>]) -> Vec<Vec<MicroBatch>> {
    let mut samples: Vec<Option<Weighted>> = samples.into_iter().map(Some).collect();
    let mut micro_batch = |bin: &Bin| {
        let mut members = bin.members.clone();
        members.sort_unstable();
        let sequences = members.iter().filter_map(|index| samples[*index].take());
        MicroBatch::new(sequences.collect())
    };
    let mut rank = |bins: &Vec<Bin>| bins.iter().map(&mut micro_batch).collect();
    ranks.iter().map(&mut rank).collect()
}

#[cfg(test)]
mod tests;
