//! The columns of a micro-batch.

use super::{Advantage, MicroBatch, Weighted};
use crate::config::TrainingMode;
use crate::ids::*;
use crate::sample::{Segment, TokenLogprobs, Trained};
use crate::turn::{Grammar, Truncation};
use std::borrow::Cow;
use std::sync::Arc;

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
    /// 1 where the token was sampled by the policy and is trained.
    pub loss_mask: Vec<u8>,
    /// The engine's log-probability of this token, nats; 0 where `loss_mask` is 0.
    pub logprobs: Vec<f32>,
    pub advantages: Vec<f32>,
    /// Policy version that sampled the token; -1 where `loss_mask` is 0.
    pub versions: Vec<i32>,
    pub temperatures: Vec<f32>,
    /// 1 where the token is trained by its reward. Empty where that holds for all that was sampled.
    pub rl_weights: Vec<f32>,
    /// 1 where a teacher wrote the token, the weight of what the environment said. Empty where neither is learnt.
    pub ce_weights: Vec<f32>,
    /// 1 where the token is drawn to a teacher's log-probability. Empty where that holds for all that was sampled.
    pub ref_kl_weights: Vec<f32>,
    /// The teacher's log-probability of the token, nats. Empty where no teacher was asked.
    pub teacher_logprobs: Vec<f32>,
    pub sequence_lengths: Vec<i32>,
    /// The rollout each sequence came from.
    pub rollouts: Vec<RolloutId>,
    /// Index into [`crate::Config::environments`] for each sequence.
    pub environments: Vec<EnvironmentId>,
    /// Which tokens were sampled from fewer than all; in order.
    pub truncations: Vec<TruncatedRun>,
    /// Which tokens were sampled by a grammar; in order.
    pub grammars: Vec<GrammarRun>,
}

/// Consecutive sampled tokens of a micro-batch, sampled from those that one truncation kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TruncatedRun {
    /// Index of the first token among the micro-batch's N.
    pub begin: usize,
    /// Index of the token after the last.
    pub end: usize,
    pub truncation: Truncation,
}

/// The tokens of one answer, from its first on, that was sampled by a grammar.
#[derive(Clone, Debug, PartialEq)]
pub struct GrammarRun {
    /// Index of the answer's first token among the micro-batch's N.
    pub begin: usize,
    /// Index of the token after the last.
    pub end: usize,
    pub grammar: Arc<Grammar>,
}

impl MicroBatch {
    /// Tokens that were sampled by a grammar. Looks at segments, not at tokens.
    pub fn grammars(&self) -> Vec<GrammarRun> {
        let runs = self.runs().filter_map(|(begin, end, segment)| {
            let grammar = segment.trained()?.grammar.clone()?;
            Some(GrammarRun {
                begin,
                end,
                grammar,
            })
        });
        runs.collect()
    }

    /// Tokens that were sampled from fewer than all. Looks at segments, not at tokens.
    pub fn truncations(&self) -> Vec<TruncatedRun> {
        let runs = self.runs().filter_map(|(begin, end, segment)| {
            let truncation = segment.trained()?.truncation;
            (!truncation.is_none()).then_some(TruncatedRun {
                begin,
                end,
                truncation,
            })
        });
        runs.collect()
    }

    /// Segments of all sequences, each with the indices of its first token and of the one after its last.
    fn runs(&self) -> impl Iterator<Item = (usize, usize, &Segment)> {
        let mut end = 0;
        let sequences = self.sequences().iter();
        let segments = sequences.flat_map(|weighted| weighted.sample.segments());
        segments.map(move |segment| {
            let begin = end;
            end += segment.len();
            (begin, end, segment)
        })
    }

    /// 1 for each token that a teacher wrote, the weight of each that the environment said, else 0. `[N]`
    pub fn ce_weights(&self) -> Vec<f32> {
        let mut weights = Vec::with_capacity(self.len());
        for weighted in self.sequences() {
            let echo = weighted.echo.unwrap_or_default();
            for segment in weighted.sample.segments() {
                let begin = weights.len();
                let taught = f32::from(u8::from(segment.is_taught()));
                weights.resize(begin + segment.len(), taught);
                for (role, tokens) in segment.observed() {
                    weights[begin + tokens.start..begin + tokens.end]
                        .fill(echo.weight(role) as f32);
                }
            }
        }
        weights
    }

    /// 1 for each token that the policy sampled where it learns from rewards, else 0. `[N]`
    pub fn rl_weights(&self) -> impl Iterator<Item = f32> {
        self.sampled_where(|mode| mode.is_rl())
    }

    /// 1 for each token that the policy sampled where it is drawn to another's log-probabilities, else 0. `[N]`
    pub fn ref_kl_weights(&self) -> impl Iterator<Item = f32> {
        self.sampled_where(|mode| mode.is_scored())
    }

    fn sampled_where(&self, holds: fn(TrainingMode) -> bool) -> impl Iterator<Item = f32> {
        let sequences = self.sequences().iter();
        sequences.flat_map(move |weighted| {
            let belongs = weighted.mode.is_some_and(holds);
            let segments = weighted.sample.segments().iter();
            segments.flat_map(move |segment| {
                let weight = u8::from(belongs && segment.trained().is_some());
                std::iter::repeat_n(f32::from(weight), segment.len())
            })
        })
    }

    pub fn columns(&self) -> Columns {
        let mut columns = Columns::with_capacity(self.len(), self.sequences().len());
        self.sequences()
            .iter()
            .for_each(|weighted| columns.push(weighted));
        if self.is_mixed() {
            columns.rl_weights = self.rl_weights().collect();
            columns.ref_kl_weights = self.ref_kl_weights().collect();
        }
        if self.has_ce_weights() {
            columns.ce_weights = self.ce_weights();
        }
        if self.is_scored() || self.is_mixed() {
            let scores = self.sequences().iter().map(Weighted::teacher_logprobs);
            columns.teacher_logprobs = scores.flat_map(Cow::into_owned).collect();
        }
        columns.truncations = self.truncations();
        columns.grammars = self.grammars();
        columns
    }
}

impl Weighted {
    /// The teacher's log-probability of each token, nats; zeros where it was not asked. `[N]`
    pub fn teacher_logprobs(&self) -> Cow<'_, [f32]> {
        match &self.teacher_logprobs {
            Some(TokenLogprobs(values)) => Cow::Borrowed(values),
            None => Cow::Owned(vec![0.0; self.sample.len()]),
        }
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
            rl_weights: Vec::new(),
            ce_weights: Vec::new(),
            ref_kl_weights: Vec::new(),
            teacher_logprobs: Vec::new(),
            sequence_lengths: Vec::with_capacity(sequences),
            rollouts: Vec::with_capacity(sequences),
            environments: Vec::with_capacity(sequences),
            truncations: Vec::new(),
            grammars: Vec::new(),
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
