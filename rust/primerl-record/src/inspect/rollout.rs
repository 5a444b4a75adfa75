//! The history of one rollout.

use super::fates::{Fate, Life};
use super::play::{Beginning, JournalSummary, Moment, Observer, Played, play};
use super::{InspectError, environment_name, seconds};
use primerl_core::counters::Ended;
use primerl_core::effect::LeasedRollout;
use primerl_core::event::{Outcome, Trace};
use primerl_core::failure::RolloutError;
use primerl_core::turn::{FinishReason, ForkReason};
use primerl_core::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TurnTrace {
    pub turn: u32,
    /// When it was over; `None` for a turn before the played part begins.
    pub at_s: Option<f64>,
    /// Time since the previous turn, or the lease.
    pub after_s: Option<f64>,
    pub session: String,
    /// The whole prompt.
    pub prompt_tokens: u64,
    /// The prompt after its parent's part.
    pub new_prompt_tokens: u64,
    pub sampled_tokens: u64,
    /// `[version, tokens]` in the order of sampling.
    pub versions: Vec<(PolicyVersion, u32)>,
    /// Engines that had proved one of these versions when the turn ended: one of them sampled it.
    pub engines: Vec<EngineId>,
    pub finish: FinishReason,
    pub parent: Option<u32>,
    /// Why it extends no turn.
    pub fork: Option<ForkReason>,
    /// The model of another server that answered with text: there are no ids then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
pub struct EndTrace {
    pub at_s: f64,
    pub ended: Ended,
    /// The reason, in one word.
    pub reason: Option<String>,
    /// Who is to blame, if it failed or was lost with its worker.
    pub error: Option<ErrorKind>,
    pub message: Option<String>,
    /// The step that trains it.
    pub step: Option<Step>,
}

#[derive(Clone, Debug, Serialize)]
pub struct RolloutTrace {
    pub story: JournalSummary,
    pub rollout: RolloutId,
    pub group: GroupId,
    pub slot: usize,
    pub environment: String,
    pub example: ExampleIndex,
    /// The version it evaluates.
    pub evaluates: Option<PolicyVersion>,
    pub worker: WorkerId,
    pub worker_name: Option<String>,
    pub leased_s: f64,
    /// When an engine began its first turn, and at which version; again if another engine had to start from the
    /// beginning.
    pub sampling: Vec<(f64, PolicyVersion)>,
    pub turns: Vec<TurnTrace>,
    /// Engine requests that failed for good.
    pub turn_failures: Vec<String>,
    /// When its environment reported it.
    pub reported_s: Option<f64>,
    pub reports: Vec<Trace>,
    pub error: Option<RolloutError>,
    /// `None` while it is in flight, or waits for its group or for a batch.
    pub end: Option<EndTrace>,
    pub now: &'static str,
}

/// The existing numbers: the first and the last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Known(Option<(u64, u64)>);

impl Known {
    pub(super) fn add(&mut self, number: u64) {
        self.0 = Some(match self.0 {
            None => (number, number),
            Some((first, last)) => (first.min(number), last.max(number)),
        });
    }

    pub(super) fn unknown(
        self,
        what: &'static str,
        number: u64,
        story: &JournalSummary,
    ) -> InspectError {
        let mut known = match self.0 {
            None => format!("it holds no {what}"),
            Some((first, last)) => format!("it holds {what}s from {first} to {last}"),
        };
        if story.events_before > 0 {
            let (events, step) = (story.events_before, story.first_step);
            known.push_str(&format!(
                "; what was over before event {events} (step {step}) is not kept"
            ));
        }
        if matches!(self.0, Some((first, last)) if (first..=last).contains(&number)) {
            known.push_str("; numbers may be passed over by a restart");
        }
        InspectError::Unknown {
            what,
            number,
            known,
        }
    }
}

impl EndTrace {
    pub(super) fn of(fate: &Fate) -> EndTrace {
        EndTrace {
            at_s: seconds(fate.at),
            ended: fate.end.ended(),
            reason: fate.end.reason(),
            error: fate.end.error(),
            message: fate.end.message().map(str::to_owned),
            step: fate.end.step(),
        }
    }
}

struct Seeker {
    id: RolloutId,
    known: Known,
    life: Option<Life>,
    worker_name: Option<String>,
    sampling: Vec<(f64, PolicyVersion)>,
    turns: Vec<TurnTrace>,
    last_at: Option<Time>,
    turn_failures: Vec<String>,
    report: Option<(Time, Outcome)>,
    end: Option<EndTrace>,
}

impl Seeker {
    fn begin(id: RolloutId, at: &Beginning<'_>) -> Seeker {
        let mut seeker = Seeker {
            id,
            known: Known::default(),
            life: None,
            worker_name: None,
            sampling: Vec::new(),
            turns: Vec::new(),
            last_at: None,
            turn_failures: Vec::new(),
            report: None,
            end: None,
        };
        at.lives.keys().for_each(|id| seeker.known.add(id.0));
        if let Some(life) = at.lives.get(&id) {
            seeker.leased(life, at.core);
            let turns = at.core.rollout(id).map(|rollout| rollout.turns());
            for turn in turns.unwrap_or_default() {
                seeker.turn(turn, None, Vec::new());
            }
            seeker.last_at = None;
        }
        seeker
    }

    fn leased(&mut self, life: &Life, core: &Core) {
        let worker = core
            .open_workers()
            .find(|worker| worker.worker == life.worker);
        self.worker_name = worker.map(|worker| worker.name.to_owned());
        self.last_at = Some(life.leased_at);
        self.life = Some(life.clone());
    }

    fn turn(&mut self, turn: &Turn, at: Option<Time>, engines: Vec<EngineId>) {
        let before = turn
            .parent
            .and_then(|parent| self.turns.get(parent.0 as usize))
            .map_or(0, |parent| parent.prompt_tokens + parent.sampled_tokens);
        let new = turn.prompt_suffix.len() as u64;
        let versions = turn.versions.iter();
        self.turns.push(TurnTrace {
            turn: self.turns.len() as u32,
            at_s: at.map(seconds),
            after_s: super::between(self.last_at, at),
            session: turn.session.to_string(),
            prompt_tokens: before + new,
            new_prompt_tokens: new,
            sampled_tokens: turn.sampled.len() as u64,
            versions: versions.map(|run| (run.version, run.n_tokens)).collect(),
            engines,
            finish: turn.finish,
            parent: turn.parent.map(|parent| parent.0),
            fork: turn.fork,
            model: turn.text.as_ref().map(|text| text.model.to_string()),
        });
        self.last_at = at;
    }

    /// Whether it is the rollout, and is in flight.
    fn is_in_flight(&self, rollout: RolloutId) -> bool {
        let is_open = self.end.is_none() && self.report.is_none();
        rollout == self.id && self.life.is_some() && is_open
    }

    fn is_of(&self, worker: WorkerId) -> bool {
        self.life.as_ref().is_some_and(|life| life.worker == worker)
    }

    fn saw_event(&mut self, moment: &Moment<'_>) {
        match moment.event {
            Event::TurnFinished { rollout, turn } if self.is_in_flight(*rollout) => {
                let engines = possible_engines(turn, moment.core);
                self.turn(turn, Some(moment.now), engines);
            }
            Event::SamplingStarted { rollout, version } if self.is_in_flight(*rollout) => {
                self.sampling.push((seconds(moment.now), *version));
            }
            Event::TurnFailed { rollout, message } if *rollout == self.id => {
                self.turn_failures.push(message.clone());
            }
            Event::RolloutFinished {
                rollout,
                worker,
                outcome,
            } if self.is_in_flight(*rollout) && self.is_of(*worker) => {
                self.report = Some((moment.now, outcome.clone()));
            }
            _ => {}
        }
    }

    fn saw_leases(&mut self, rollouts: &[LeasedRollout], moment: &Moment<'_>) {
        for leased in rollouts {
            self.known.add(leased.rollout.0);
        }
        let is_leased = rollouts.iter().any(|leased| leased.rollout == self.id);
        if let (true, Some(life)) = (is_leased, moment.lives.get(&self.id)) {
            self.leased(life, moment.core);
        }
    }
}

/// Engines that had proved one of the versions that sampled the turn.
fn possible_engines(turn: &Turn, core: &Core) -> Vec<EngineId> {
    let used = |version: &PolicyVersion| turn.versions.iter().any(|run| run.version == *version);
    let engines = core.engine_views();
    let engines = engines.filter(|engine| engine.proved.as_ref().is_some_and(used));
    engines.map(|engine| engine.engine).collect()
}

impl Observer for Seeker {
    fn saw(&mut self, moment: &Moment<'_>) {
        self.saw_event(moment);
        for effect in moment.effects {
            if let Effect::Lease { rollouts, .. } = effect {
                self.saw_leases(rollouts, moment);
            }
        }
        if let Some(fate) = moment
            .ended
            .iter()
            .find(|fate| fate.life.rollout == self.id)
        {
            self.end = Some(EndTrace::of(fate));
        }
    }
}

/// The history of one rollout.
///
/// # Errors
/// The journal cannot be read, or holds no such rollout.
pub fn rollout(output_dir: &Path, id: RolloutId) -> Result<RolloutTrace, InspectError> {
    let Played {
        observer: seeker,
        core,
        lives,
        story,
    } = play(output_dir, |beginning| Seeker::begin(id, beginning))?;
    let Some(life) = seeker.life else {
        return Err(seeker.known.unknown("rollout", id.0, &story));
    };
    let (reported_at, outcome) = seeker.report.unzip();
    let outcome: Outcome = outcome.unwrap_or_default();
    Ok(RolloutTrace {
        story,
        rollout: id,
        group: life.group,
        slot: life.slot,
        environment: environment_name(&core, life.environment),
        example: life.example,
        evaluates: life.evaluates,
        worker: life.worker,
        worker_name: seeker.worker_name,
        leased_s: seconds(life.leased_at),
        sampling: seeker.sampling,
        turns: seeker.turns,
        turn_failures: seeker.turn_failures,
        reported_s: reported_at.map(seconds),
        reports: outcome.traces,
        error: outcome.error,
        end: seeker.end,
        now: state_of(id, &lives, &core),
    })
}

fn state_of(id: RolloutId, lives: &BTreeMap<RolloutId, Life>, core: &Core) -> &'static str {
    match lives.get(&id) {
        None => "over",
        Some(life) if !life.is_finished => "in flight",
        Some(life) if core.is_group_complete(life.group) => {
            "finished; its group is complete and waits for a cut"
        }
        Some(_) => "finished; its group waits for others",
    }
}
