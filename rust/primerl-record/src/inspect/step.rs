//! The history of one step: its batch, from the first lease to the proof of the weights it made.

use super::fates::rollouts_of;
use super::group::RolloutLine;
use super::play::{JournalSummary, Moment, Observer, play};
use super::rollout::Known;
use super::{InspectError, between, environment_name, seconds};
use primerl_core::pack::{MicroBatch, PackedBatch};
use primerl_core::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, Debug, Serialize)]
pub struct GroupLine {
    pub group: GroupId,
    pub environment: String,
    pub example: ExampleIndex,
    pub rollouts: Vec<RolloutLine>,
}

/// A rank asked for the batch and got it. A trainer that resumes from a checkpoint does so again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fetched {
    pub rank: u32,
    /// When it first asked.
    pub asked_s: f64,
    pub fetched_s: Option<f64>,
}

/// An engine loaded the step's version.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Proved {
    pub engine: EngineId,
    pub told_s: f64,
    pub proved_s: Option<f64>,
}

/// How long each part took, seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Durations {
    /// First lease to the cut.
    pub rollouts: Option<f64>,
    /// Cut to the first fetch by the last rank.
    pub until_fetched: Option<f64>,
    /// First fetch to the first publication of the step's version.
    pub training: Option<f64>,
    /// First publication to the first proof by an engine.
    pub until_proved: Option<f64>,
}

/// A micro-batch whose samples share tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TreeLine {
    pub rank: usize,
    /// Its place among the rank's micro-batches, from 0.
    pub micro_batch: usize,
    pub samples: usize,
    /// Trees that share nothing with each other.
    pub trees: usize,
    /// All tokens of its sequences.
    pub tokens: usize,
    /// Those that are computed: what samples share, once.
    pub computed_tokens: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct StepTrace {
    pub story: JournalSummary,
    pub step: Step,
    pub cut_s: f64,
    pub groups: Vec<GroupLine>,
    pub rollouts: usize,
    pub samples: usize,
    /// All tokens of its sequences.
    pub tokens: u64,
    /// Those that are computed, if the trainer shares leading tokens of samples.
    pub computed_tokens: u64,
    /// Tokens that are trained.
    pub loss_tokens: u64,
    /// Micro-batches whose samples share tokens.
    pub trees: Vec<TreeLine>,
    /// Micro-batches of each rank.
    pub micro_batches: usize,
    /// Samples by the steps between their oldest token's version and the trained one.
    pub staleness: BTreeMap<u64, u64>,
    pub fetched: Vec<Fetched>,
    pub published_s: Vec<f64>,
    pub proved: Vec<Proved>,
    /// A newer version replaced this one before any engine loaded it.
    pub overtaken: bool,
    pub took: Durations,
}

struct Cut {
    at: Time,
    first_lease: Option<Time>,
    groups: BTreeMap<GroupId, GroupLine>,
    batch: Summed,
}

/// A batch without its tokens.
struct Summed {
    rollouts: usize,
    samples: usize,
    tokens: u64,
    computed_tokens: u64,
    loss_tokens: u64,
    micro_batches: usize,
    trees: Vec<TreeLine>,
    staleness: BTreeMap<u64, u64>,
}

impl Summed {
    fn of(batch: &PackedBatch) -> Summed {
        let mut summed = Summed {
            rollouts: rollouts_of(batch).len(),
            samples: 0,
            tokens: 0,
            computed_tokens: 0,
            loss_tokens: batch.loss_tokens,
            micro_batches: batch.ranks.first().map_or(0, Vec::len),
            trees: trees_of(batch),
            staleness: BTreeMap::new(),
        };
        for micro_batch in batch.ranks.iter().flatten() {
            summed.tokens += micro_batch.len() as u64;
            summed.computed_tokens += micro_batch.unique_tokens() as u64;
            let oldest = oldest_versions(micro_batch);
            summed.samples += oldest.len();
            for oldest in oldest.into_iter().flatten() {
                let staleness = batch.step.trains().0.saturating_sub(oldest);
                *summed.staleness.entry(staleness).or_default() += 1;
            }
        }
        summed
    }
}

fn trees_of(batch: &PackedBatch) -> Vec<TreeLine> {
    let of = |rank: usize, place: usize, micro_batch: &MicroBatch| {
        let roots = micro_batch.shared().iter().filter(|shared| **shared == 0);
        let line = TreeLine {
            rank,
            micro_batch: place,
            samples: micro_batch.sequences().len(),
            trees: roots.count(),
            tokens: micro_batch.len(),
            computed_tokens: micro_batch.unique_tokens(),
        };
        (!micro_batch.shared().is_empty()).then_some(line)
    };
    let ranks = batch.ranks.iter().enumerate();
    let lines = ranks.flat_map(|(rank, micro_batches)| {
        let numbered = micro_batches.iter().enumerate();
        numbered.filter_map(move |(place, micro_batch)| of(rank, place, micro_batch))
    });
    lines.collect()
}

/// The oldest version among each sequence's trained tokens; `None` if a teacher wrote them.
pub(super) fn oldest_versions(micro_batch: &MicroBatch) -> Vec<Option<u64>> {
    let columns = micro_batch.columns();
    let mut rest = &columns.versions[..];
    let mut oldest = Vec::with_capacity(columns.sequence_lengths.len());
    for length in columns.sequence_lengths {
        let (versions, after) = rest.split_at(length as usize);
        rest = after;
        let sampled = versions.iter().filter(|version| **version >= 0);
        oldest.push(sampled.min().map(|version| *version as u64));
    }
    oldest
}

struct Seeker {
    id: Step,
    known: Known,
    cut: Option<Cut>,
    asked: BTreeMap<RequestId, u32>,
    fetched: Vec<Fetched>,
    published: Vec<Time>,
    proved: Vec<Proved>,
    first_fetch: BTreeMap<u32, Time>,
    first_proof: Option<Time>,
    is_overtaken: bool,
}

impl Seeker {
    fn new(id: Step) -> Seeker {
        Seeker {
            id,
            known: Known::default(),
            cut: None,
            asked: BTreeMap::new(),
            fetched: Vec::new(),
            published: Vec::new(),
            proved: Vec::new(),
            first_fetch: BTreeMap::new(),
            first_proof: None,
            is_overtaken: false,
        }
    }

    fn version(&self) -> PolicyVersion {
        PolicyVersion(self.id.0)
    }

    fn saw_event(&mut self, moment: &Moment<'_>) {
        match moment.event {
            Event::BatchRequested {
                request,
                step,
                rank,
            } if *step == self.id => {
                self.asked.insert(*request, *rank);
                self.wait(*rank, moment.now);
            }
            // It does not wait: only whether it gets the batch counts.
            Event::NextBatchRequested {
                request,
                step,
                rank,
            } if *step == self.id => {
                self.asked.insert(*request, *rank);
            }
            Event::WeightsPublished { version, .. }
                if *version == self.version()
                    && moment.core.published_version() >= Some(*version) =>
            {
                self.published.push(moment.now);
            }
            Event::EngineProved { engine, version } if *version == self.version() => {
                self.prove(*engine, moment.now);
            }
            Event::EngineProved { version, .. } if *version > self.version() => {
                self.is_overtaken |= self.first_proof.is_none();
            }
            _ => {}
        }
    }

    /// The rank asks for the batch.
    fn wait(&mut self, rank: u32, now: Time) {
        if self.waiting(rank).is_none() {
            self.fetched.push(Fetched {
                rank,
                asked_s: seconds(now),
                fetched_s: None,
            });
        }
    }

    /// The rank's last request, if it has no answer yet.
    fn waiting(&mut self, rank: u32) -> Option<&mut Fetched> {
        let mut fetched = self.fetched.iter_mut();
        fetched.rfind(|fetched| fetched.rank == rank && fetched.fetched_s.is_none())
    }

    fn prove(&mut self, engine: EngineId, now: Time) {
        let mut proved = self.proved.iter_mut();
        let told = proved.rfind(|proved| proved.engine == engine && proved.proved_s.is_none());
        if let Some(proved) = told {
            proved.proved_s = Some(seconds(now));
            self.first_proof.get_or_insert(now);
        }
    }

    fn saw_effect(&mut self, effect: &Effect, moment: &Moment<'_>) {
        match effect {
            Effect::BatchCut { batch } => {
                self.known.add(batch.step.0);
                if batch.step == self.id {
                    self.cut = Some(cut_of(batch, moment));
                }
            }
            Effect::Batch { request, step, .. } if *step == self.id => {
                if let Some(rank) = self.asked.remove(request) {
                    self.fetch(rank, moment.now);
                }
            }
            Effect::UpdateEngine {
                engine, version, ..
            } if *version == self.version() => self.proved.push(Proved {
                engine: *engine,
                told_s: seconds(moment.now),
                proved_s: None,
            }),
            _ => {}
        }
    }

    /// The rank gets the batch.
    fn fetch(&mut self, rank: u32, now: Time) {
        self.first_fetch.entry(rank).or_insert(now);
        let now = seconds(now);
        match self.waiting(rank) {
            Some(fetched) => fetched.fetched_s = Some(now),
            None => self.fetched.push(Fetched {
                rank,
                asked_s: now,
                fetched_s: Some(now),
            }),
        }
    }

    fn durations(&self, cut: &Cut, ranks: u32) -> Durations {
        let last_fetch = self.first_fetch.values().max().copied();
        let last_fetch = last_fetch.filter(|_| self.first_fetch.len() == ranks as usize);
        let published = self.published.first().copied();
        Durations {
            rollouts: between(cut.first_lease, Some(cut.at)),
            until_fetched: between(Some(cut.at), last_fetch),
            training: between(last_fetch, published),
            until_proved: between(published, self.first_proof),
        }
    }

    fn trace(self, cut: Cut, ranks: u32, story: JournalSummary) -> StepTrace {
        StepTrace {
            story,
            step: self.id,
            took: self.durations(&cut, ranks),
            cut_s: seconds(cut.at),
            groups: cut.groups.into_values().collect(),
            rollouts: cut.batch.rollouts,
            samples: cut.batch.samples,
            tokens: cut.batch.tokens,
            computed_tokens: cut.batch.computed_tokens,
            trees: cut.batch.trees,
            loss_tokens: cut.batch.loss_tokens,
            micro_batches: cut.batch.micro_batches,
            staleness: cut.batch.staleness,
            fetched: self.fetched,
            published_s: self.published.into_iter().map(seconds).collect(),
            proved: self.proved,
            overtaken: self.is_overtaken,
        }
    }
}

fn cut_of(batch: &PackedBatch, moment: &Moment<'_>) -> Cut {
    let mut groups: BTreeMap<GroupId, GroupLine> = BTreeMap::new();
    let trained = moment
        .ended
        .iter()
        .filter(|fate| fate.end.step() == Some(batch.step));
    let mut first_lease: Option<Time> = None;
    for fate in trained {
        let life = &fate.life;
        first_lease = Some(first_lease.map_or(life.leased_at, |first| first.min(life.leased_at)));
        let line = groups.entry(life.group).or_insert_with(|| GroupLine {
            group: life.group,
            environment: environment_name(moment.core, life.environment),
            example: life.example,
            rollouts: Vec::new(),
        });
        line.rollouts.push(RolloutLine::ended(fate));
    }
    Cut {
        at: moment.now,
        first_lease,
        groups,
        batch: Summed::of(batch),
    }
}

impl Observer for Seeker {
    fn saw(&mut self, moment: &Moment<'_>) {
        self.saw_event(moment);
        for effect in moment.effects {
            self.saw_effect(effect, moment);
        }
    }
}

/// The history of the batch of one step.
///
/// # Errors
/// The journal cannot be read, or the step was not cut in what it holds.
pub fn step(output_dir: &Path, id: Step) -> Result<StepTrace, InspectError> {
    let played = play(output_dir, |_| Seeker::new(id))?;
    let (mut seeker, story) = (played.observer, played.story);
    let ranks = played.core.config().run.data_ranks;
    match seeker.cut.take() {
        Some(cut) => Ok(seeker.trace(cut, ranks, story)),
        None => Err(seeker.known.unknown("step", id.0, &story)),
    }
}
