//! Turns to samples: one sample is one token sequence the trainer sees.
//!
//! A turn that extends its parent continues the parent's sequence, so a conversation that only ever extends is one
//! sample. Where it forks (two turns with one parent, or a turn without), each branch from a root to a last turn is a
//! sample. Branches share turns; a shared turn is trained in the first of them (by the number of its last turn) and is
//! plain context in the others, so every sampled token is trained exactly once.
//!
//! ```text
//! turn 0 <- turn 1 <- turn 2        sample A: turns 0 1 2, all trained
//!        <- turn 3                  sample B: turn 0 as context, 3 trained
//! turn 4 (fork)                     sample C: turn 4
//! ```

use crate::ids::{PolicyVersion, RolloutId};
use crate::turn::Turn;
use serde::{Deserialize, Serialize};

/// One token sequence in columns of equal length N (see [`crate::pack::MicroBatch`] for their meaning).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub rollout: RolloutId,
    /// Index of the trace (seat) within its rollout, by which it gets its advantage.
    pub trace: usize,
    pub token_ids: Vec<u32>,    // [N]
    pub loss_mask: Vec<u8>,     // [N]
    pub logprobs: Vec<f32>,     // [N]
    pub versions: Vec<i32>,     // [N], -1 where masked
    pub temperatures: Vec<f32>, // [N], 1 where masked
    /// Tokens with `loss_mask` 1; at least 1.
    pub loss_tokens: u64,
    /// Oldest version that sampled a trained token.
    pub oldest: PolicyVersion,
    /// Turns on this branch, those that are context only too.
    pub turns: u32,
}

impl Sample {
    /// Number of tokens N.
    pub fn len(&self) -> usize {
        self.token_ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
    }

    fn new(rollout: RolloutId, trace: usize, capacity: usize) -> Self {
        Sample {
            rollout,
            trace,
            token_ids: Vec::with_capacity(capacity),
            loss_mask: Vec::with_capacity(capacity),
            logprobs: Vec::with_capacity(capacity),
            versions: Vec::with_capacity(capacity),
            temperatures: Vec::with_capacity(capacity),
            loss_tokens: 0,
            oldest: PolicyVersion(u64::MAX),
            turns: 0,
        }
    }

    fn push_context(&mut self, tokens: &[u32]) {
        let len = self.len() + tokens.len();
        self.token_ids.extend_from_slice(tokens);
        self.loss_mask.resize(len, 0);
        self.logprobs.resize(len, 0.0);
        self.versions.resize(len, -1);
        self.temperatures.resize(len, 1.0);
    }

    fn push_trained(&mut self, turn: &Turn) {
        let len = self.len() + turn.sampled.len();
        self.token_ids.extend_from_slice(&turn.sampled);
        self.loss_mask.resize(len, 1);
        self.logprobs.extend_from_slice(&turn.logprobs);
        self.temperatures.resize(len, turn.temperature);
        for run in &turn.versions {
            self.versions.resize(
                self.versions.len() + run.n_tokens as usize,
                run.version.0 as i32,
            );
            if run.n_tokens > 0 {
                self.oldest = self.oldest.min(run.version);
            }
        }
        self.loss_tokens += turn.sampled.len() as u64;
    }
}

/// Samples of one rollout. `turns` are all its turns in order, each [`Turn::is_consistent`], with parents that come
/// before them; `trace_of[i]` is the trace that turn i belongs to, `None` where it is not to be trained (an untrainable
/// seat). A turn and its parent belong to the same trace. Branches without a sampled token give no sample.
pub fn interleave(rollout: RolloutId, turns: &[Turn], trace_of: &[Option<usize>]) -> Vec<Sample> {
    assert_eq!(turns.len(), trace_of.len());
    let mut has_child = vec![false; turns.len()];
    for parent in turns.iter().filter_map(|turn| turn.parent) {
        has_child[parent.0 as usize] = true;
    }
    let mut trained = vec![false; turns.len()];
    let mut samples = Vec::new();
    for (last, trace) in trace_of.iter().enumerate() {
        let (Some(trace), false) = (*trace, has_child[last]) else {
            continue;
        };
        let sample = branch(rollout, trace, turns, last, &mut trained);
        if sample.loss_tokens > 0 {
            samples.push(sample);
        }
    }
    samples
}

/// The branch that ends with turn `last`, as one sequence; marks the turns it trains.
fn branch(
    rollout: RolloutId,
    trace: usize,
    turns: &[Turn],
    last: usize,
    trained: &mut [bool],
) -> Sample {
    let mut path = vec![last];
    while let Some(parent) = turns[path[path.len() - 1]].parent {
        path.push(parent.0 as usize);
    }
    let tokens = path
        .iter()
        .map(|turn| turns[*turn].prompt_suffix.len() + turns[*turn].sampled.len())
        .sum();
    let mut sample = Sample::new(rollout, trace, tokens);
    for index in path.into_iter().rev() {
        let turn = &turns[index];
        sample.turns += 1;
        sample.push_context(&turn.prompt_suffix);
        match std::mem::replace(&mut trained[index], true) {
            true => sample.push_context(&turn.sampled),
            false => sample.push_trained(turn),
        }
    }
    sample
}

#[cfg(test)]
mod tests;
