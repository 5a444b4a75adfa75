//! What evaluations measured: every rollout that counted, with what the policy, or another model, wrote.

use super::fates::{End, Fate};
use super::play::{JournalSummary, Moment, Observer, Played, play};
use super::{InspectError, environment_name, seconds};
use primerl_core::event::Outcome;
use primerl_core::failure::RolloutError;
use primerl_core::turn::FinishReason;
use primerl_core::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One turn of a rollout that was evaluated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeasuredTurn {
    pub session: String,
    pub parent: Option<u32>,
    /// Length of the whole prompt; as another server reported it, if one answered.
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub finish: FinishReason,
    /// The prompt after its parent's part; empty if another server answered.
    pub prompt_ids: Vec<u32>,
    pub completion_ids: Vec<u32>,
    /// The message of another server, as JSON.
    pub message: Option<String>,
}

/// One rollout that counted: the last attempt at it.
#[derive(Clone, Debug, Serialize)]
pub struct MeasuredRollout {
    pub rollout: RolloutId,
    pub environment: String,
    pub example: ExampleIndex,
    /// Its number among the rollouts of the example.
    pub slot: usize,
    /// The version that measures it.
    pub version: PolicyVersion,
    /// Rollouts of this slot that failed before, or were cancelled.
    pub attempts_before: u32,
    /// Means over its trainable traces, or over all if none is; `None` if it failed.
    pub reward: Option<f64>,
    pub metrics: BTreeMap<String, f64>,
    pub truncated: bool,
    pub stop_condition: Option<String>,
    pub error: Option<RolloutError>,
    /// Its status in the evaluation's counts.
    pub error_kind: Option<ErrorKind>,
    pub leased_s: f64,
    pub ended_s: f64,
    pub turns: Vec<MeasuredTurn>,
}

#[derive(Clone, Debug, Serialize)]
pub struct EvaluatedAnswer {
    pub story: JournalSummary,
    /// In the order of versions, environments, examples and slots.
    pub rollouts: Vec<MeasuredRollout>,
}

/// Which version measures which slot of an example; environments by their index.
type Place = (PolicyVersion, EnvironmentId, ExampleIndex, usize);

#[derive(Default)]
struct Seeker {
    turns: BTreeMap<RolloutId, Vec<MeasuredTurn>>,
    reports: BTreeMap<RolloutId, Outcome>,
    attempts: BTreeMap<Place, u32>,
    found: BTreeMap<Place, MeasuredRollout>,
}

impl Observer for Seeker {
    fn saw(&mut self, moment: &Moment<'_>) {
        let evaluates = |id: &RolloutId| {
            let life = moment.lives.get(id);
            life.is_some_and(|life| life.evaluates.is_some())
                || moment.ended.iter().any(|fate| fate.life.rollout == *id)
        };
        match moment.event {
            Event::TurnFinished { rollout, turn } if evaluates(rollout) => {
                let before = self.turns.entry(*rollout).or_default();
                let measured = MeasuredTurn::of(turn, before);
                before.push(measured);
            }
            Event::RolloutFinished {
                rollout, outcome, ..
            } if evaluates(rollout) => {
                self.reports.insert(*rollout, outcome.clone());
            }
            _ => {}
        }
        for fate in moment.ended {
            self.ended(fate, moment.core);
        }
    }
}

impl Seeker {
    fn ended(&mut self, fate: &Fate, core: &Core) {
        let life = &fate.life;
        let turns = self.turns.remove(&life.rollout).unwrap_or_default();
        let report = self.reports.remove(&life.rollout);
        let Some(version) = life.evaluates else {
            return;
        };
        let place = (version, life.environment, life.example, life.slot);
        // Whatever the result of this attempt is, the previous one does not count any more.
        self.found.remove(&place);
        let before = self.attempts.entry(place).or_default();
        let attempts_before = std::mem::replace(before, *before + 1);
        let (reward, metrics, error) = match (&fate.end, &report) {
            (End::Evaluated, Some(outcome)) => {
                let score = outcome.score();
                (Some(score.reward), score.metrics, None)
            }
            (End::Failed(error), _) => (None, BTreeMap::new(), Some(error.clone())),
            // These include rollouts that ended before the journal begins, and counted later.
            _ => return,
        };
        let outcome = report.unwrap_or_default();
        let truncated = outcome.traces.iter().any(|trace| trace.truncated);
        let mut stops = outcome.traces.iter();
        let measured = MeasuredRollout {
            rollout: life.rollout,
            environment: environment_name(core, life.environment),
            example: life.example,
            slot: life.slot,
            version,
            attempts_before,
            reward,
            metrics,
            truncated,
            stop_condition: stops.find_map(|trace| trace.stop_condition.clone()),
            error_kind: error.as_ref().map(ErrorKind::of),
            error,
            leased_s: seconds(life.leased_at),
            ended_s: seconds(life.finished_at.unwrap_or(fate.at)),
            turns,
        };
        self.found.insert(place, measured);
    }
}

impl MeasuredTurn {
    fn of(turn: &Turn, before: &[MeasuredTurn]) -> MeasuredTurn {
        let parent = turn.parent.and_then(|parent| before.get(parent.0 as usize));
        let carried = parent.map_or(0, |parent| parent.prompt_tokens + parent.completion_tokens);
        let text = turn.text.as_deref();
        MeasuredTurn {
            session: turn.session.to_string(),
            parent: turn.parent.map(|parent| parent.0),
            prompt_tokens: text.map_or(carried + turn.prompt_suffix.len() as u64, |text| {
                u64::from(text.prompt_tokens)
            }),
            completion_tokens: text.map_or(turn.sampled.len() as u64, |text| {
                u64::from(text.completion_tokens)
            }),
            finish: turn.finish,
            prompt_ids: turn.prompt_suffix.to_vec(),
            completion_ids: turn.sampled.to_vec(),
            message: text.map(|text| text.message.to_string()),
        }
    }
}

/// The results of a run's evaluations, as far back as the journal goes.
///
/// # Errors
/// The journal cannot be read.
pub fn evaluated(output_dir: &Path) -> Result<EvaluatedAnswer, InspectError> {
    let Played {
        observer, story, ..
    } = play(output_dir, |_| Seeker::default())?;
    Ok(EvaluatedAnswer {
        story,
        rollouts: observer.found.into_values().collect(),
    })
}
