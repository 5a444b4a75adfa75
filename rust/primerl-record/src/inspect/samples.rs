//! The samples of some steps: each with its reward and its advantage, and the tokens of a share of them.

use super::group::RolloutLine;
use super::play::{JournalSummary, Moment, Observer, play};
use super::{InspectError, environment_name};
use primerl_core::pack::{Advantage, PackedBatch, Weighted};
use primerl_core::*;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// One trained sequence.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampleLine {
    pub rollout: RolloutId,
    pub group: GroupId,
    pub environment: String,
    pub example: ExampleIndex,
    /// Index of its trace (seat) within the rollout.
    pub trace: usize,
    /// Reward of its trace.
    pub reward: Option<f64>,
    /// Mean over its trained tokens.
    pub advantage: f64,
    pub turns: u32,
    pub tokens: usize,
    pub loss_tokens: u64,
    /// Steps between its oldest token's version and the trained one; `None` if a teacher wrote it.
    pub staleness: Option<u64>,
    /// Its place among the samples of its environment, from 0, if not all are shown: an arbitrary order, which is the
    /// same each time.
    pub place: usize,
    /// `None` if its place is beyond the requested share.
    pub text: Option<SampleTokens>,
}

/// Arrays of `[tokens]` each.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampleTokens {
    pub token_ids: Vec<u32>,
    /// 1 if the policy sampled the token, or a teacher wrote it for the policy to learn.
    pub learnt: Vec<u8>,
}

#[derive(Clone, Debug, Serialize)]
pub struct SamplesAnswer {
    pub story: JournalSummary,
    /// The requested steps that are in the journal.
    pub steps: BTreeMap<u64, Vec<SampleLine>>,
}

struct Seeker {
    steps: BTreeSet<Step>,
    share: f64,
    found: BTreeMap<u64, Vec<SampleLine>>,
}

impl Observer for Seeker {
    fn saw(&mut self, moment: &Moment<'_>) {
        for effect in moment.effects {
            let Effect::BatchCut { batch } = effect else {
                continue;
            };
            if self.steps.contains(&batch.step) {
                let lines = samples_of(batch, moment, self.share);
                self.found.insert(batch.step.0, lines);
            }
        }
    }
}

fn samples_of(batch: &PackedBatch, moment: &Moment<'_>, share: f64) -> Vec<SampleLine> {
    let trained = moment.ended.iter();
    let trained = trained.filter(|fate| fate.end.step() == Some(batch.step));
    let rollouts: BTreeMap<RolloutId, (ExampleIndex, RolloutLine)> = trained
        .map(|fate| {
            let line = RolloutLine::ended(fate);
            (fate.life.rollout, (fate.life.example, line))
        })
        .collect();
    let micro_batches = batch.ranks.iter().flatten();
    let sequences = micro_batches.flat_map(|micro_batch| micro_batch.sequences());
    let mut by_environment: BTreeMap<EnvironmentId, Vec<&Weighted>> = BTreeMap::new();
    for weighted in sequences {
        let own = by_environment.entry(weighted.environment).or_default();
        own.push(weighted);
    }
    let mut lines = Vec::new();
    for (environment, mut own) in by_environment {
        // A stable sort: samples of one rollout stay as they were packed.
        own.sort_by_key(|weighted| mixed(weighted.sample.rollout.0));
        let shown = (share.clamp(0.0, 1.0) * own.len() as f64).ceil() as usize;
        let name = environment_name(moment.core, environment);
        for (place, weighted) in own.into_iter().enumerate() {
            let Some((example, line)) = rollouts.get(&weighted.sample.rollout) else {
                continue;
            };
            lines.push(SampleLine {
                rollout: weighted.sample.rollout,
                group: line.group,
                environment: name.clone(),
                example: *example,
                trace: weighted.sample.trace,
                reward: line.rewards.get(weighted.sample.trace).copied(),
                advantage: mean_advantage(weighted),
                turns: weighted.sample.turns,
                tokens: weighted.sample.len(),
                loss_tokens: weighted.sample.loss_tokens,
                staleness: weighted
                    .sample
                    .oldest
                    .map(|oldest| batch.step.trains().0.saturating_sub(oldest.0)),
                place,
                text: (place < shown).then(|| tokens_of(weighted)),
            });
        }
    }
    lines
}

fn mean_advantage(weighted: &Weighted) -> f64 {
    let of = |scale: f32, values: &[f32]| {
        let mask = weighted.sample.loss_mask();
        let trained = values.iter().zip(mask).filter(|(_, mask)| *mask == 1);
        let (sum, count) = trained.fold((0.0, 0_u64), |(sum, count), (value, _)| {
            (sum + f64::from(*value), count + 1)
        });
        f64::from(scale) * sum / count.max(1) as f64
    };
    match &weighted.advantage {
        Advantage::Uniform(value) => f64::from(*value),
        Advantage::PerToken { values, scale } => of(*scale, values),
    }
}

fn tokens_of(weighted: &Weighted) -> SampleTokens {
    let segments = weighted.sample.segments().iter();
    SampleTokens {
        token_ids: weighted.sample.token_ids(),
        learnt: segments
            .flat_map(|segment| std::iter::repeat_n(u8::from(segment.is_learnt()), segment.len()))
            .collect(),
    }
}

/// The last step of splitmix64: neighbours get distant places.
fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Samples of `steps`, ordered by environment and place; tokens of `share` of each environment's samples.
///
/// # Errors
/// The journal cannot be read.
pub fn samples(
    output_dir: &Path,
    steps: &[Step],
    share: f64,
) -> Result<SamplesAnswer, InspectError> {
    let played = play(output_dir, |_| Seeker {
        steps: steps.iter().copied().collect(),
        share,
        found: BTreeMap::new(),
    })?;
    Ok(SamplesAnswer {
        story: played.story,
        steps: played.observer.found,
    })
}
