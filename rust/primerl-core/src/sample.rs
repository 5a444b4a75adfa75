//! Turns to samples: one sample is one token sequence the trainer sees.
//!
//! Interleaved: a turn that extends its parent continues the parent's sequence, so a conversation that only ever extends
//! is one sample. Where it forks (two turns with one parent, or a turn without), each branch from a root to a last turn
//! is a sample. Branches share turns; a shared turn is trained in the first of them (by the number of its last turn) and
//! is plain context in the others, so every sampled token is trained exactly once.
//!
//! ```text
//! turn 0 <- turn 1 <- turn 2        sample A: turns 0 1 2, all trained
//!        <- turn 3                  sample B: turn 0 as context, 3 trained
//! turn 4 (fork)                     sample C: turn 4
//! ```
//! Branching: each turn is a sample of its own, with all before it as context; the same five turns are five samples.
//!
//! A sample holds its turns' tokens, not a copy of them: columns are written once, when a batch is packed.

use crate::config::TrajectoryStrategy;
use crate::ids::{PolicyVersion, RolloutId};
use crate::turn::{Turn, VersionRun};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// One token sequence of N tokens. Cheap to clone: its tokens are shared with the turns they came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub rollout: RolloutId,
    /// Index of the trace (seat) within its rollout, by which it gets its advantage.
    pub trace: usize,
    /// In order; together the sequence.
    segments: Vec<Segment>,
    tokens: usize,
    /// Tokens with `loss_mask` 1; at least 1.
    pub loss_tokens: u64,
    /// Oldest version that sampled a trained token.
    pub oldest: PolicyVersion,
    /// Turns on this branch, those that are context only too.
    pub turns: u32,
}

/// Consecutive tokens that are all trained or all context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    #[serde(with = "crate::column")]
    token_ids: Arc<[u32]>,
    /// How many of `token_ids`, from the front; fewer than all where the sample was truncated.
    len: usize,
    trained: Option<Trained>,
}

/// What the engine said of sampled tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    #[serde(with = "crate::column")]
    logprobs: Arc<[f32]>,
    /// Their lengths add up to the segment's.
    pub versions: Vec<VersionRun>,
    pub temperature: f32,
}

impl Segment {
    /// Never 0 within a sample.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids[..self.len]
    }

    /// `None` for context.
    pub fn trained(&self) -> Option<&Trained> {
        self.trained.as_ref()
    }

    /// Log-probabilities of the tokens, nats; `None` for context.
    pub fn logprobs(&self) -> Option<&[f32]> {
        Some(&self.trained.as_ref()?.logprobs[..self.len])
    }

    fn truncate(&mut self, len: usize) {
        self.len = len;
        let Some(trained) = &mut self.trained else {
            return;
        };
        let mut left = len as u32;
        for run in &mut trained.versions {
            run.n_tokens = run.n_tokens.min(left);
            left -= run.n_tokens;
        }
        trained.versions.retain(|run| run.n_tokens > 0);
    }
}

impl Sample {
    /// Number of tokens N.
    pub fn len(&self) -> usize {
        self.tokens
    }

    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// All token ids. `[N]`
    pub fn token_ids(&self) -> Vec<u32> {
        let mut column = Vec::with_capacity(self.tokens);
        for segment in &self.segments {
            column.extend_from_slice(segment.token_ids());
        }
        column
    }

    /// 1 where the token is trained. `[N]`
    pub fn loss_mask(&self) -> Vec<u8> {
        let mut column = Vec::with_capacity(self.tokens);
        for segment in &self.segments {
            column.resize(
                column.len() + segment.len,
                u8::from(segment.trained.is_some()),
            );
        }
        column
    }

    /// The engine's log-probabilities, nats; 0 where `loss_mask` is 0. `[N]`
    pub fn logprobs(&self) -> Vec<f32> {
        let mut column = Vec::with_capacity(self.tokens);
        for segment in &self.segments {
            match segment.logprobs() {
                Some(logprobs) => column.extend_from_slice(logprobs),
                None => column.resize(column.len() + segment.len, 0.0),
            }
        }
        column
    }

    /// Cuts off what is behind `len` tokens. Afterwards there may be nothing left to train (`loss_tokens` 0).
    pub fn truncate(&mut self, len: usize) {
        let mut left = len;
        for segment in &mut self.segments {
            let kept = segment.len.min(left);
            segment.truncate(kept);
            left -= kept;
        }
        self.segments.retain(|segment| segment.len > 0);
        self.measure();
    }

    fn new(rollout: RolloutId, trace: usize) -> Self {
        Sample {
            rollout,
            trace,
            segments: Vec::new(),
            tokens: 0,
            loss_tokens: 0,
            oldest: PolicyVersion(u64::MAX),
            turns: 0,
        }
    }

    fn push_context(&mut self, tokens: &Arc<[u32]>) {
        self.push(tokens, None);
    }

    fn push_trained(&mut self, turn: &Turn) {
        let trained = Trained {
            logprobs: Arc::clone(&turn.logprobs),
            versions: turn.versions.clone(),
            temperature: turn.temperature,
        };
        self.push(&turn.sampled, Some(trained));
    }

    fn push(&mut self, tokens: &Arc<[u32]>, trained: Option<Trained>) {
        if !tokens.is_empty() {
            self.segments.push(Segment {
                token_ids: Arc::clone(tokens),
                len: tokens.len(),
                trained,
            });
        }
    }

    /// Sets what follows from the segments.
    fn measure(&mut self) {
        self.tokens = self.segments.iter().map(Segment::len).sum();
        let trained = || self.segments.iter().filter_map(Segment::trained);
        let runs = trained().flat_map(|trained| &trained.versions);
        let oldest = runs
            .filter(|run| run.n_tokens > 0)
            .map(|run| run.version)
            .min();
        self.oldest = oldest.unwrap_or(PolicyVersion(u64::MAX));
        let trained = self
            .segments
            .iter()
            .filter(|segment| segment.trained.is_some());
        self.loss_tokens = trained.map(|segment| segment.len as u64).sum();
    }
}

/// Samples of one rollout. `turns` are all its turns in order, each [`Turn::is_consistent`], with parents that come
/// before them; `trace_of[i]` is the trace that turn i belongs to, `None` where it is not to be trained (an untrainable
/// seat). A turn and its parent belong to the same trace. Sequences without a sampled token to train give no sample.
pub fn samples(
    strategy: TrajectoryStrategy,
    rollout: RolloutId,
    turns: &[Turn],
    trace_of: &[Option<usize>],
) -> Vec<Sample> {
    assert_eq!(turns.len(), trace_of.len());
    let mut ends = vec![true; turns.len()];
    if strategy == TrajectoryStrategy::Interleaved {
        for parent in turns.iter().filter_map(|turn| turn.parent) {
            ends[parent.0 as usize] = false;
        }
    }
    let mut trained = vec![false; turns.len()];
    let mut samples = Vec::new();
    for (last, trace) in trace_of.iter().enumerate() {
        let (Some(trace), true) = (*trace, ends[last]) else {
            continue;
        };
        // In order of their last turns: with each turn a last one, its ancestors were trained before it.
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
    let mut sample = Sample::new(rollout, trace);
    sample.segments.reserve_exact(2 * path.len());
    for index in path.into_iter().rev() {
        let turn = &turns[index];
        sample.turns += 1;
        sample.push_context(&turn.prompt_suffix);
        match std::mem::replace(&mut trained[index], true) {
            true => sample.push_context(&turn.sampled),
            false => sample.push_trained(turn),
        }
    }
    sample.measure();
    sample
}

#[cfg(test)]
mod tests;
