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
//!
//! Tokens of an answer that a teacher gave in the policy's place are trained too, but were not sampled: they have
//! neither log-probabilities nor a version.

mod trace;

pub use trace::TrainedTrace;

use crate::config::TrajectoryStrategy;
use crate::experts::{self, ExpertsRun, SampleExperts};
use crate::ids::{PolicyVersion, RolloutId};
use crate::turn::{Grammar, MessageRole, Observed, Truncation, Turn, VersionRuns};
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
    /// The experts of its turns, in order, as far as engines reported them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    experts: Vec<SampleExperts>,
    tokens: usize,
    /// Tokens that are trained; at least 1.
    pub loss_tokens: u64,
    /// Oldest version that sampled a trained token; `None` where a teacher wrote all of them.
    pub oldest: Option<PolicyVersion>,
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
    /// A teacher wrote them, for the policy to learn.
    #[serde(default, skip_serializing_if = "is_false")]
    taught: bool,
    /// In a segment of context, what the environment said, to be trained here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    observed: Vec<Observed>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// One log-probability, nats, for each of a sample's N tokens. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenLogprobs(#[serde(with = "crate::column")] pub Arc<[f32]>);

/// What the engine said of sampled tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    #[serde(with = "crate::column")]
    logprobs: Arc<[f32]>,
    /// Their lengths add up to the segment's.
    pub versions: VersionRuns,
    pub temperature: f32,
    #[serde(default, skip_serializing_if = "Truncation::is_none")]
    pub truncation: Truncation,
    /// The grammar of the whole answer, whose first tokens these are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grammar: Option<Arc<Grammar>>,
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

    /// `None` for what the policy did not sample: context, and what a teacher wrote.
    pub fn trained(&self) -> Option<&Trained> {
        self.trained.as_ref()
    }

    /// Whether a teacher wrote the tokens, for the policy to learn.
    pub fn is_taught(&self) -> bool {
        self.taught
    }

    /// Tokens that the environment said, first and the one after the last, and as whom.
    pub fn observed(&self) -> impl Iterator<Item = (MessageRole, std::ops::Range<usize>)> {
        let len = self.len;
        self.observed.iter().filter_map(move |run| {
            let tokens = run.begin as usize..(run.end as usize).min(len);
            (!tokens.is_empty()).then_some((run.role, tokens))
        })
    }

    /// Whether the trainer looks at the tokens' loss for what the policy, or a teacher in its place, did.
    pub fn is_learnt(&self) -> bool {
        self.taught || self.trained.is_some()
    }

    /// Log-probabilities of the tokens, nats; `None` for what the policy did not sample.
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

    /// The experts that engines chose, as far as they are known: runs in order, apart from each other.
    pub fn experts(&self) -> impl Iterator<Item = ExpertsRun<'_>> {
        experts::runs(&self.experts, self.tokens)
    }

    /// All token ids. `[N]`
    pub fn token_ids(&self) -> Vec<u32> {
        let mut column = Vec::with_capacity(self.tokens);
        for segment in &self.segments {
            column.extend_from_slice(segment.token_ids());
        }
        column
    }

    /// 1 where the policy sampled the token and it is trained. `[N]`
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
            experts: Vec::new(),
            tokens: 0,
            loss_tokens: 0,
            oldest: None,
            turns: 0,
        }
    }

    fn extend(&mut self, turn: Turn, trains: bool) {
        self.turns += 1;
        if let Some(experts) = turn.experts {
            let before: usize = self.segments.iter().map(Segment::len).sum();
            // A turn that continues another has tokens before its own.
            if let Some(begin) = before.checked_sub(experts.before as usize) {
                self.experts.push(SampleExperts { begin, experts });
            }
        }
        let observed = match trains {
            true => turn.observed,
            false => Vec::new(),
        };
        self.push(turn.prompt_suffix, None, false);
        if let Some(context) = self.segments.last_mut().filter(|_| !observed.is_empty()) {
            context.observed = observed;
        }
        let taught = trains && turn.text.is_some();
        let trained = (trains && !taught).then_some(Trained {
            logprobs: turn.logprobs,
            versions: turn.versions,
            temperature: turn.temperature,
            truncation: turn.truncation,
            grammar: turn.grammar,
        });
        self.push(turn.sampled, trained, taught);
    }

    fn push(&mut self, token_ids: Arc<[u32]>, trained: Option<Trained>, taught: bool) {
        if !token_ids.is_empty() {
            self.segments.push(Segment {
                len: token_ids.len(),
                token_ids,
                trained,
                taught,
                observed: Vec::new(),
            });
        }
    }

    /// Sets what follows from the segments.
    fn measure(&mut self) {
        self.tokens = self.segments.iter().map(Segment::len).sum();
        let trained = || self.segments.iter().filter_map(Segment::trained);
        let runs = trained().flat_map(|trained| &trained.versions);
        self.oldest = runs
            .filter(|run| run.n_tokens > 0)
            .map(|run| run.version)
            .min();
        let learnt = self.segments.iter().filter(|segment| segment.is_learnt());
        self.loss_tokens = learnt.map(|segment| segment.len as u64).sum();
    }
}

/// Samples of one rollout. `turns` are all its turns in order, each [`Turn::is_consistent`], with parents that come
/// before them; `trace_of[i]` is the trace that turn i belongs to, `None` where it is not to be trained (an untrainable
/// seat). A turn and its parent belong to the same trace. Sequences without a sampled token to train give no sample.
pub fn samples(
    strategy: TrajectoryStrategy,
    rollout: RolloutId,
    turns: Vec<Turn>,
    trace_of: &[Option<usize>],
) -> Vec<Sample> {
    assert_eq!(turns.len(), trace_of.len());
    let (branches, uses) = branches(strategy, &turns, trace_of);
    // Nearly always: one conversation that only ever extends.
    if let [(trace, path)] = &branches[..]
        && path.len() == turns.len()
    {
        let mut sample = Sample::new(rollout, *trace);
        sample.segments.reserve_exact(2 * path.len());
        turns.into_iter().for_each(|turn| sample.extend(turn, true));
        sample.measure();
        return Vec::from_iter(Some(sample).filter(|sample| sample.loss_tokens > 0));
    }
    let mut turns = Turns {
        trained: vec![false; turns.len()],
        turns: turns.into_iter().map(Some).collect(),
        uses,
    };
    let samples = branches.iter().map(|(trace, path)| {
        let sample = Sample::new(rollout, *trace);
        branch(sample, path, &mut turns)
    });
    samples.filter(|sample| sample.loss_tokens > 0).collect()
}

/// A trace, and the turns of one of its samples in order.
type Branch = (usize, Vec<usize>);

/// The branches in order of their last turns: with each turn a last one, its ancestors were trained before it. And in how
/// many of them each turn is.
fn branches(
    strategy: TrajectoryStrategy,
    turns: &[Turn],
    trace_of: &[Option<usize>],
) -> (Vec<Branch>, Vec<usize>) {
    let mut ends = vec![true; turns.len()];
    if strategy == TrajectoryStrategy::Interleaved {
        for parent in turns.iter().filter_map(|turn| turn.parent) {
            ends[parent.0 as usize] = false;
        }
    }
    let (mut branches, mut uses) = (Vec::new(), vec![0; turns.len()]);
    for (last, trace) in trace_of.iter().enumerate() {
        let (Some(trace), true) = (*trace, ends[last]) else {
            continue;
        };
        let parent = |turn: &usize| Some(turns[*turn].parent?.0 as usize);
        let path: Vec<usize> = std::iter::successors(Some(last), parent).collect();
        path.iter().for_each(|turn| uses[*turn] += 1);
        branches.push((trace, path));
    }
    (branches, uses)
}

/// Turns on their way into samples. Only what two branches need is shared: nearly all turns are on one, and counting
/// shares of tokens that were not touched for a while costs more than all the rest.
struct Turns {
    turns: Vec<Option<Turn>>,
    /// In how many branches each is still needed.
    uses: Vec<usize>,
    trained: Vec<bool>,
}

impl Turns {
    /// A turn that is still needed, and whether it is trained in this branch.
    fn take(&mut self, index: usize) -> (Option<Turn>, bool) {
        self.uses[index] -= 1;
        let turn = match self.uses[index] {
            0 => self.turns[index].take(),
            _ => self.turns[index].clone(),
        };
        (turn, !std::mem::replace(&mut self.trained[index], true))
    }
}

/// The branch of these turns, the last one first, as one sequence.
fn branch(mut sample: Sample, path: &[usize], turns: &mut Turns) -> Sample {
    sample.segments.reserve_exact(2 * path.len());
    for index in path.iter().rev() {
        let (Some(turn), trains) = turns.take(*index) else {
            continue;
        };
        sample.extend(turn, trains);
    }
    sample.measure();
    sample
}

#[cfg(test)]
mod tests;
