//! The last rollouts of a run, a line each, with the places of their events in the journal: lists are made from it, and
//! one rollout is read without playing the run. Its size is bounded: the oldest finished ones are dropped first.

use crate::inspect::{self, Beginning, Life, Moment, seconds};
use crate::journal::Place;
use primerl_core::counters::Ended;
use primerl_core::pack::{Advantage, PackedBatch};
use primerl_core::{Effect, EnvironmentId, Event, PolicyVersion, RolloutId, Step};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};

mod list;

pub use list::Filter;

/// Number of rollouts that are kept, of 136 bytes each.
pub const MOST_ROLLOUTS: usize = 100_000;
/// Places beyond the three that a record holds itself, of 8 bytes each.
const MOST_PLACES: usize = 500_000;
const HELD: usize = 3;
/// Kept characters of a failure's message, and the number of failures whose message is kept.
const MESSAGE_CHARS: usize = 300;
const MOST_MESSAGES: usize = 2_000;

/// Where a rollout is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    InFlight,
    /// It ended well, and waits for its group or for a batch.
    Waits,
    Trained,
    Filtered,
    Stale,
    Failed,
    Cancelled,
    Evaluated,
}

impl From<Ended> for Fate {
    fn from(ended: Ended) -> Fate {
        match ended {
            Ended::Trained => Fate::Trained,
            Ended::Filtered => Fate::Filtered,
            Ended::Stale => Fate::Stale,
            Ended::Failed => Fate::Failed,
            Ended::Cancelled => Fate::Cancelled,
            Ended::Evaluated => Fate::Evaluated,
        }
    }
}

/// What the trainer got for a rollout's tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Given {
    /// It was not trained.
    Nothing,
    /// The same value for each trained token.
    Uniform(f32),
    /// Different values: the batch has them.
    PerToken,
}

#[derive(Clone, Debug)]
pub struct Record {
    pub rollout: RolloutId,
    pub group: u64,
    pub environment: EnvironmentId,
    pub example: u32,
    pub slot: u16,
    pub fate: Fate,
    /// Number of its turns before the oldest kept event.
    pub turns_gone: u32,
    reason: u16,
    pub worker: u32,
    pub evaluates: Option<u32>,
    pub step: Option<u32>,
    pub turns: u32,
    pub sampled_tokens: u32,
    /// Reward of its traces; not a number if there is none. See [`Record::reward`].
    reward: f32,
    pub given: Given,
    /// Oldest and newest version that sampled a token.
    pub versions: Option<(u32, u32)>,
    pub leased_s: f64,
    /// When it was over.
    pub ended_s: Option<f32>,
    places: SmallVec<[u64; HELD]>,
}

impl Record {
    /// A failed rollout has none, whatever its environment reported: the reward was not used.
    pub fn reward(&self) -> Option<f32> {
        Some(self.reward).filter(|reward| reward.is_finite() && self.fate != Fate::Failed)
    }
}

#[derive(Debug, Default)]
pub struct Index {
    /// By number.
    records: VecDeque<Record>,
    /// Segments of the journal that contain the places.
    segments: Vec<u64>,
    /// Names of reasons.
    reasons: Vec<String>,
    /// Messages of the last failures.
    messages: BTreeMap<RolloutId, String>,
    pub environments: Vec<String>,
    places: usize,
}

impl Index {
    /// Rollouts that had started when the index begins.
    pub fn begin(at: &Beginning<'_>) -> Index {
        let environments = at.core.config().environments.iter();
        let mut index = Index {
            reasons: vec![String::new()],
            environments: environments.map(|known| known.name.clone()).collect(),
            // Growing would double the memory.
            records: VecDeque::with_capacity(MOST_ROLLOUTS + 1),
            ..Index::default()
        };
        for life in at.lives.values() {
            let mut record = record_of(life);
            record.turns_gone = life.turns;
            index.insert(record);
        }
        index
    }

    pub fn count(&self) -> usize {
        self.records.len()
    }

    /// The oldest rollout that is kept.
    pub fn first(&self) -> Option<RolloutId> {
        self.records.front().map(|record| record.rollout)
    }

    pub fn get(&self, rollout: RolloutId) -> Option<&Record> {
        let at = self.position(rollout).ok()?;
        self.records.get(at)
    }

    /// Where its events are, in order.
    pub fn places(&self, record: &Record) -> Vec<Place> {
        let place = |packed: &u64| Place {
            segment: self.segments[(packed >> 32) as usize],
            offset: packed & u64::from(u32::MAX),
        };
        record.places.iter().map(place).collect()
    }

    pub fn reason(&self, record: &Record) -> &str {
        &self.reasons[usize::from(record.reason)]
    }

    pub fn message(&self, record: &Record) -> Option<&str> {
        self.messages.get(&record.rollout).map(String::as_str)
    }

    /// Takes an event, which is at `place`.
    pub fn saw(&mut self, moment: &Moment<'_>, place: Place) {
        self.saw_event(moment, place);
        for effect in moment.effects {
            self.saw_effect(effect, moment);
        }
        for fate in moment.ended {
            self.saw_end(fate);
        }
        self.forget();
    }

    fn saw_event(&mut self, moment: &Moment<'_>, place: Place) {
        match moment.event {
            Event::TurnFinished { rollout, turn } => {
                let versions = turn.versions.iter().map(|run| run.version.0 as u32);
                let range = versions.clone().min().zip(versions.max());
                self.note(*rollout, place, moment, |record| {
                    if let Some((oldest, newest)) = range {
                        let known = record.versions.get_or_insert((oldest, newest));
                        *known = (known.0.min(oldest), known.1.max(newest));
                    }
                });
            }
            Event::RolloutFinished { rollout, .. }
            | Event::SamplingStarted { rollout, .. }
            | Event::TurnFailed { rollout, .. } => self.note(*rollout, place, moment, |_| {}),
            _ => {}
        }
    }

    fn saw_effect(&mut self, effect: &Effect, moment: &Moment<'_>) {
        match effect {
            Effect::Lease { rollouts, .. } => {
                let lives = rollouts.iter();
                let lives = lives.filter_map(|leased| moment.lives.get(&leased.rollout));
                lives.for_each(|life| self.insert(record_of(life)));
            }
            Effect::RolloutClosed { rollout } => {
                let life = moment.lives.get(rollout);
                if let (Some(life), Some(record)) = (life, self.get_mut(*rollout)) {
                    take_in(record, life);
                }
            }
            Effect::BatchCut { batch } => self.cut(batch),
            _ => {}
        }
    }

    fn saw_end(&mut self, fate: &inspect::Fate) {
        let reason = self.reason_number(fate.end.reason());
        if let Some(record) = self.get_mut(fate.life.rollout) {
            take_in(record, &fate.life);
            record.fate = fate.end.ended().into();
            record.reason = reason;
            record.step = fate.end.step().map(|Step(step)| step as u32);
            record.ended_s = Some(seconds(fate.at) as f32);
        }
        if let Some(message) = fate.end.message() {
            let message = message.chars().take(MESSAGE_CHARS).collect();
            self.messages.insert(fate.life.rollout, message);
            if self.messages.len() > MOST_MESSAGES {
                self.messages.pop_first();
            }
        }
    }

    fn note(
        &mut self,
        rollout: RolloutId,
        place: Place,
        moment: &Moment<'_>,
        change: impl FnOnce(&mut Record),
    ) {
        if !is_part_of(moment, rollout) {
            return;
        }
        let packed = self.packed(place);
        let Some(record) = self.get_mut(rollout) else {
            return;
        };
        if let Some(life) = moment.lives.get(&rollout) {
            take_in(record, life);
        }
        change(record);
        record.places.push(packed);
        if record.places.len() > HELD {
            // Further places are on the heap, together with the earlier ones.
            self.places += 1;
        }
    }

    fn packed(&mut self, place: Place) -> u64 {
        if self.segments.last() != Some(&place.segment) {
            self.segments.push(place.segment);
        }
        // A segment is closed at 64 MiB.
        ((self.segments.len() as u64 - 1) << 32) | place.offset.min(u64::from(u32::MAX))
    }

    fn cut(&mut self, batch: &PackedBatch) {
        let micro_batches = batch.ranks.iter().flatten();
        for weighted in micro_batches.flat_map(|micro_batch| micro_batch.sequences()) {
            let Some(record) = self.get_mut(weighted.sample.rollout) else {
                continue;
            };
            record.given = match (&weighted.advantage, record.given) {
                (Advantage::Uniform(value), Given::Nothing) => Given::Uniform(*value),
                (Advantage::Uniform(value), Given::Uniform(known)) if *value == known => continue,
                _ => Given::PerToken,
            };
        }
    }

    fn reason_number(&mut self, reason: Option<String>) -> u16 {
        let Some(reason) = reason else {
            return 0;
        };
        let known = self.reasons.iter().position(|known| *known == reason);
        // Kinds of errors are the environments' own strings: kinds beyond the limit are not kept.
        let number = known.or_else(|| {
            (self.reasons.len() < usize::from(u16::MAX)).then(|| {
                self.reasons.push(reason);
                self.reasons.len() - 1
            })
        });
        number.unwrap_or_default() as u16
    }

    fn position(&self, rollout: RolloutId) -> Result<usize, usize> {
        self.records
            .binary_search_by_key(&rollout, |record| record.rollout)
    }

    fn get_mut(&mut self, rollout: RolloutId) -> Option<&mut Record> {
        let at = self.position(rollout).ok()?;
        self.records.get_mut(at)
    }

    /// Leased again, it starts from the beginning.
    fn insert(&mut self, record: Record) {
        match self.position(record.rollout) {
            Ok(at) => {
                let before = std::mem::replace(&mut self.records[at], record);
                self.places -= before.places.len().saturating_sub(HELD);
            }
            Err(at) if at == 0 && self.count() >= MOST_ROLLOUTS => {}
            Err(at) => self.records.insert(at, record),
        }
    }

    fn forget(&mut self) {
        while self.count() > MOST_ROLLOUTS || self.places > MOST_PLACES {
            let is_over = |record: &Record| record.ended_s.is_some();
            let Some(at) = self.records.iter().position(is_over) else {
                return;
            };
            if let Some(gone) = self.records.remove(at) {
                self.places -= gone.places.len().saturating_sub(HELD);
                self.messages.remove(&gone.rollout);
            }
        }
    }
}

/// Events after the rollout's end change nothing and are not part of it.
fn is_part_of(moment: &Moment<'_>, rollout: RolloutId) -> bool {
    moment.lives.contains_key(&rollout)
        || moment.ended.iter().any(|fate| fate.life.rollout == rollout)
}

fn record_of(life: &Life) -> Record {
    let version = |PolicyVersion(version)| version as u32;
    let mut record = Record {
        rollout: life.rollout,
        group: life.group.0,
        environment: life.environment,
        example: life.example.0,
        slot: life.slot as u16,
        fate: Fate::InFlight,
        turns_gone: 0,
        reason: 0,
        worker: life.worker.0 as u32,
        evaluates: life.evaluates.map(version),
        step: None,
        turns: 0,
        sampled_tokens: 0,
        reward: f32::NAN,
        given: Given::Nothing,
        versions: None,
        leased_s: seconds(life.leased_at),
        ended_s: None,
        places: SmallVec::new(),
    };
    take_in(&mut record, life);
    record
}

fn take_in(record: &mut Record, life: &Life) {
    if life.is_finished {
        record.fate = Fate::Waits;
    }
    record.turns = life.turns;
    record.sampled_tokens = life.sampled_tokens as u32;
    if !life.rewards.is_empty() {
        let sum: f64 = life.rewards.iter().sum();
        record.reward = (sum / life.rewards.len() as f64) as f32;
    }
}

#[cfg(test)]
pub mod tests;
