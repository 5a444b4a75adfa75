//! The columns of a micro-batch.

use super::{Advantage, MicroBatch, Weighted};
use crate::ids::*;
use crate::sample::{Segment, Trained};
use crate::turn::Truncation;

/// Columns of one micro-batch. All per-token columns have the same length N, the sum of `sequence_lengths`.
///
/// Worked example, two sequences of 3 and 2 tokens:
/// ```text
/// token_ids        [p0 a0 a1 | p1 b0]
/// loss_mask        [ 0  1  1 |  0  1]
/// sequence_lengths [3, 2]
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Columns {
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
    /// Which tokens were sampled from fewer than all; in order.
    pub truncations: Vec<TruncatedRun>,
}

/// Consecutive sampled tokens of a micro-batch, sampled from those that one truncation kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TruncatedRun {
    /// Index of the first token among the micro-batch's N.
    pub begin: usize,
    /// Of the token after the last.
    pub end: usize,
    pub truncation: Truncation,
}

impl MicroBatch {
    /// Looks at segments, not at tokens; empty in a run that truncates nothing.
    pub fn truncations(&self) -> Vec<TruncatedRun> {
        let sequences = self.sequences().iter();
        let segments = sequences.flat_map(|weighted| weighted.sample.segments());
        let mut end = 0;
        let runs = segments.filter_map(|segment| {
            let begin = end;
            end += segment.len();
            let truncation = segment.trained()?.truncation;
            (!truncation.is_none()).then_some(TruncatedRun {
                begin,
                end,
                truncation,
            })
        });
        runs.collect()
    }

    pub fn columns(&self) -> Columns {
        let mut columns = Columns::with_capacity(self.len(), self.sequences().len());
        self.sequences()
            .iter()
            .for_each(|weighted| columns.push(weighted));
        columns.truncations = self.truncations();
        columns
    }
}

impl Columns {
    fn with_capacity(tokens: usize, sequences: usize) -> Self {
        Columns {
            token_ids: Vec::with_capacity(tokens),
            loss_mask: Vec::with_capacity(tokens),
            logprobs: Vec::with_capacity(tokens),
            advantages: Vec::with_capacity(tokens),
            versions: Vec::with_capacity(tokens),
            temperatures: Vec::with_capacity(tokens),
            sequence_lengths: Vec::with_capacity(sequences),
            rollouts: Vec::with_capacity(sequences),
            environments: Vec::with_capacity(sequences),
            truncations: Vec::new(),
        }
    }

    fn push(&mut self, weighted: &Weighted) {
        let sample = &weighted.sample;
        let mut start = 0;
        for segment in sample.segments() {
            let tokens = segment.token_ids();
            self.token_ids
                .extend(tokens.iter().map(|token| *token as i32));
            match segment.trained() {
                None => self.push_context(segment.len()),
                Some(trained) => self.push_trained(segment, trained, &weighted.advantage, start),
            }
            start += segment.len();
        }
        self.sequence_lengths.push(sample.len() as i32);
        self.rollouts.push(sample.rollout);
        self.environments.push(weighted.environment);
    }

    fn push_context(&mut self, tokens: usize) {
        let len = self.loss_mask.len() + tokens;
        self.loss_mask.resize(len, 0);
        self.logprobs.resize(len, 0.0);
        self.advantages.resize(len, 0.0);
        self.versions.resize(len, -1);
        self.temperatures.resize(len, 1.0);
    }

    /// `start`: where in its sample the segment begins.
    fn push_trained(
        &mut self,
        segment: &Segment,
        trained: &Trained,
        advantage: &Advantage,
        start: usize,
    ) {
        let len = self.loss_mask.len() + segment.len();
        self.loss_mask.resize(len, 1);
        self.logprobs
            .extend_from_slice(segment.logprobs().unwrap_or_default());
        match advantage {
            Advantage::Uniform(advantage) => self.advantages.resize(len, *advantage),
            Advantage::PerToken { values, scale } => {
                let values = &values[start..start + segment.len()];
                self.advantages
                    .extend(values.iter().map(|value| value * scale));
            }
        }
        for run in &trained.versions {
            self.versions.resize(
                self.versions.len() + run.n_tokens as usize,
                run.version.0 as i32,
            );
        }
        self.temperatures.resize(len, trained.temperature);
    }
}
