//! One attempt at an example, as a state machine.
//!
//! ```text
//! Leased ──turn──> Running ──outcome──> Finished ──> trained | filtered | stale | cancelled
//!   │                 │                                (with its group)
//!   └─────────────────┴──> failed | stale | cancelled | evaluated
//! ```
//! A rollout is leased to exactly one worker and never handed on: a retry, and a lease taken back from a lost worker,
//! are new rollouts. So nothing that a slow or presumed dead worker still does can touch its successor.
//! Transitions that are not drawn are bugs and panic. [`Rollout::end`] takes the rollout by value: it ends once.

mod discards;
mod in_flight;
mod leases;
mod report;
mod rules;
mod traces;

pub(crate) use in_flight::Rollouts;
pub(crate) use leases::{LeaseRequest, Leases};
pub use rules::{LeftOut, Rules};

use crate::counters::{Counters, Ended};
use crate::effect::LeasedRollout;
use crate::event::{Outcome, Score};
use crate::failure::RolloutError;
use crate::ids::*;
use crate::sample::{Sample, TrainedTrace, samples};
use crate::time::{Duration, Time};
use crate::turn::Turn;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use traces::trace_lengths;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// A worker has it; no turn yet.
    Leased,
    /// At least one turn was recorded.
    Running,
    /// It ended well; its samples wait for the group and the cut.
    Finished,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Rollout {
    pub id: RolloutId,
    pub group: GroupId,
    /// Which of the group's rollouts this is an attempt at.
    pub slot: usize,
    pub environment: EnvironmentId,
    pub example: ExampleIndex,
    /// Pinned version, if this is part of an evaluation.
    pub evaluates: Option<PolicyVersion>,
    pub worker: WorkerId,
    pub deadline: Time,
    state: State,
    turns: Vec<Turn>,
    /// [`crate::Event::Noted`]
    #[serde(default)]
    notes: Vec<Arc<str>>,
    /// Versions that sampled anything, ascending.
    versions: Vec<PolicyVersion>,
    /// The oldest of them in each session that sampled anything.
    oldest_in: Vec<(Arc<str>, PolicyVersion)>,
    /// The version at which its first turn began, until one is recorded.
    began_at: Option<PolicyVersion>,
    /// Set if a turn was recorded that cannot be trusted: the rollout fails when it ends.
    invalid: Option<String>,
    /// Filled by [`Rollout::finish`].
    pub traces: Vec<TrainedTrace>,
    /// To be trained. May be empty: its traces still count in their group's baseline.
    pub samples: Vec<Sample>,
    pub left_out: LeftOut,
}

/// Where a rollout comes from.
#[derive(Clone, Debug)]
pub struct Lease {
    pub id: RolloutId,
    pub group: GroupId,
    pub slot: usize,
    pub environment: EnvironmentId,
    pub example: ExampleIndex,
    pub evaluates: Option<PolicyVersion>,
    pub worker: WorkerId,
    pub deadline: Time,
}

impl Rollout {
    pub fn leased(lease: Lease, counters: &mut Counters) -> Self {
        counters.dispatched += 1;
        Rollout {
            id: lease.id,
            group: lease.group,
            slot: lease.slot,
            environment: lease.environment,
            example: lease.example,
            evaluates: lease.evaluates,
            worker: lease.worker,
            deadline: lease.deadline,
            state: State::Leased,
            turns: Vec::new(),
            notes: Vec::new(),
            versions: Vec::new(),
            oldest_in: Vec::new(),
            began_at: None,
            invalid: None,
            traces: Vec::new(),
            samples: Vec::new(),
            left_out: LeftOut::default(),
        }
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// The lease as its worker gets it, `left` before its deadline.
    pub(crate) fn as_leased(&self, left: Duration) -> LeasedRollout {
        LeasedRollout {
            rollout: self.id,
            group: self.group,
            environment: self.environment,
            example: self.example,
            evaluation: self.evaluates.is_some(),
            deadline: left,
        }
    }

    /// Those recorded so far; none once it was reported, when they have become samples.
    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// Those of an open rollout.
    pub fn notes(&self) -> &[Arc<str>] {
        &self.notes
    }

    pub fn note(&mut self, note: Arc<str>) {
        self.notes.push(note);
    }

    /// Its first turn begins, on an engine that serves this version.
    pub fn begin(&mut self, version: PolicyVersion) {
        if self.state == State::Leased {
            self.began_at = Some(version);
        }
    }

    /// Records a turn. Returns how many distinct policies have contributed by now.
    pub fn record(&mut self, mut turn: Turn) -> usize {
        assert_ne!(
            self.state,
            State::Finished,
            "rollout {} got a turn after its end",
            self.id
        );
        self.state = State::Running;
        self.began_at = None;
        if self.invalid.is_none() {
            self.invalid = self.problem_with(&turn);
        }
        for run in turn.versions.iter().filter(|run| run.n_tokens > 0) {
            if let Err(place) = self.versions.binary_search(&run.version) {
                self.versions.insert(place, run.version);
            }
            let known = self
                .oldest_in
                .iter_mut()
                .find(|(session, _)| *session == turn.session);
            match known {
                Some((session, oldest)) => {
                    *oldest = (*oldest).min(run.version);
                    // One name a session: read from a journal, each turn has its own.
                    turn.session = Arc::clone(session);
                }
                None => self
                    .oldest_in
                    .push((Arc::clone(&turn.session), run.version)),
            }
        }
        self.turns.push(turn);
        self.versions.len()
    }

    /// Takes in the environment's report.
    ///
    /// # Errors
    /// The rollout failed, began with a prompt that is longer than the context (kind `prompt_too_long`), asked for no turn
    /// (kind `no_turns`), has nothing to train on (kind `empty`), or was truncated
    /// where those are dropped (kind `truncated`); it is still to be ended.
    pub fn finish(&mut self, outcome: &Outcome, rules: &Rules) -> Result<(), RolloutError> {
        assert_ne!(
            self.state,
            State::Finished,
            "rollout {} ended twice",
            self.id
        );
        self.check(outcome, rules.lowest_reward)?;
        self.check_answered(outcome)?;
        let sessions = self.turns.iter().map(|turn| &*turn.session);
        let trace_of = outcome.trained_traces(sessions);
        let turns = std::mem::take(&mut self.turns);
        self.notes = Vec::new();
        let lengths = trace_lengths(&turns, &trace_of, outcome.traces.len());
        let mut samples = samples(rules.strategy, self.id, turns, &trace_of);
        if samples.is_empty() {
            let why = "no trainable trace has a sampled token";
            return Err(nothing("empty", why, outcome));
        }
        rules.check_whole(&samples, outcome)?;
        self.keep_trained_traces(&mut samples, outcome, &lengths);
        samples.retain_mut(|sample| {
            let truncated = self.traces[sample.trace].truncated;
            rules.keep(sample, truncated, &mut self.left_out)
        });
        self.samples = samples;
        self.state = State::Finished;
        Ok(())
    }

    fn check_answered(&self, outcome: &Outcome) -> Result<(), RolloutError> {
        if let Some(error) = self.prompt_too_long(outcome) {
            return Err(error);
        }
        if self.turns.is_empty() {
            let why = "the environment ended well without a single answer of the model";
            return Err(nothing("no_turns", why, outcome));
        }
        Ok(())
    }

    /// Reward and metrics of an evaluation's rollout: means over its trainable traces, or over all if none is.
    ///
    /// # Errors
    /// The rollout failed, or was sampled by another version than the pinned one; it is still to be ended.
    pub fn score(&self, outcome: &Outcome) -> Result<Score, RolloutError> {
        self.check(outcome, f64::NEG_INFINITY)?;
        if let Some(other) = self
            .versions
            .iter()
            .find(|version| Some(**version) != self.evaluates)
        {
            return Err(RolloutError::new(
                "version",
                format!("sampled by version {other}, which is not the evaluated one"),
            ));
        }
        if outcome.traces.is_empty() {
            return Err(RolloutError::new(
                "empty",
                "the environment reported no trace".to_owned(),
            ));
        }
        Ok(outcome.score())
    }

    /// Oldest version in its trained tokens; `None` while nothing was sampled or begun. In flight it is not known yet
    /// which sessions are trained: then the session that began at the newest version counts, for none of the others can
    /// save it.
    pub fn oldest(&self) -> Option<PolicyVersion> {
        match self.state {
            State::Finished => self.samples.iter().filter_map(|sample| sample.oldest).min(),
            State::Leased => self.began_at,
            State::Running => self.oldest_in.iter().map(|(_, oldest)| *oldest).max(),
        }
    }

    /// The end: counts it.
    pub fn end(self: Box<Self>, ended: Ended, counters: &mut Counters) -> Remains {
        let legal = match ended {
            Ended::Trained | Ended::Filtered => self.state == State::Finished,
            Ended::Failed | Ended::Evaluated => self.state != State::Finished,
            Ended::Stale => self.state != State::Leased || self.began_at.is_some(),
            Ended::Cancelled => true,
        };
        assert!(
            legal,
            "rollout {} cannot go from {:?} to {ended:?}",
            self.id, self.state
        );
        assert!(
            ended != Ended::Evaluated || self.evaluates.is_some(),
            "rollout {} is no evaluation",
            self.id
        );
        counters.count(ended);
        Remains { _rollout: self }
    }

    fn problem_with(&self, turn: &Turn) -> Option<String> {
        let number = self.turns.len();
        if !turn.is_consistent() {
            return Some(format!(
                "turn {number} has not one finite log-probability and one version a token"
            ));
        }
        if turn.text.is_some() && turn.sampled.is_empty() && self.evaluates.is_none() {
            return Some(format!(
                "turn {number} is text without token ids, which cannot be trained"
            ));
        }
        let parent = turn
            .parent
            .map(|parent| self.turns.get(parent.0 as usize).map(|turn| &turn.session));
        match parent {
            Some(None) => Some(format!(
                "turn {number} extends a turn that was not recorded before it"
            )),
            Some(Some(session)) if *session != turn.session => {
                Some(format!("turn {number} extends a turn of another session"))
            }
            _ => None,
        }
    }
}

/// A rollout that has ended. Nothing can be done with it but to free it.
#[derive(Clone, Debug)]
pub struct Remains {
    _rollout: Box<Rollout>,
}

/// The error of a rollout of which nothing came: the gateway's refusal may be why.
fn nothing(kind: &str, message: &str, outcome: &Outcome) -> RolloutError {
    RolloutError {
        refusal: outcome.refusal.clone(),
        ..RolloutError::new(kind, message.to_owned())
    }
}

#[cfg(test)]
mod tests;
