//! Rollouts in flight: turns, reports, deadlines.

use super::{Remains, Rollout, Rules};
use crate::Core;
use crate::counters::CancelReason;
use crate::deadlines::Due;
use crate::effect::Effect;
use crate::event::Outcome;
use crate::failure::{PROMPT_TOO_LONG, RolloutError};
use crate::ids::*;
use crate::policy::{oldest_trainable, too_many_policies};
use crate::turn::Turn;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Kinds of failures that leave nothing to be trained.
const WITHOUT_A_SAMPLE: [&str; 3] = ["empty", "no_turns", PROMPT_TOO_LONG];

/// Ended rollouts that are freed with each event.
const FREED_PER_EVENT: usize = 32;

#[derive(Clone, Debug, Default)]
pub(crate) struct Rollouts {
    /// Boxed: a tree moves its entries about.
    pub in_flight: BTreeMap<RolloutId, Box<Rollout>>,
    /// Training rollouts that have sampled something, in flight or finished and not cut, by their oldest version; and
    /// where they belong.
    pub by_age: BTreeMap<(PolicyVersion, RolloutId), (GroupId, usize)>,
    /// How many of those in flight belong to evaluations.
    pub evaluating: usize,
    pub next: u64,
    /// Cancelled together with many others; freed a few at a time, because that takes longer than all the rest. Not part
    /// of the state: a snapshot does not have it.
    pub remains: Vec<Remains>,
}

impl Rollouts {
    pub fn number(&mut self) -> RolloutId {
        let id = RolloutId(self.next);
        self.next += 1;
        id
    }

    /// How many of those in flight are training rollouts.
    pub fn training(&self) -> usize {
        self.in_flight.len() - self.evaluating
    }

    /// Notes how old a training rollout is, in flight or finished.
    pub fn note_age(&mut self, oldest: PolicyVersion, id: RolloutId, place: (GroupId, usize)) {
        self.by_age.insert((oldest, id), place);
    }

    pub fn forget_age(&mut self, rollout: &Rollout) {
        if let Some(oldest) = rollout.oldest() {
            self.by_age.remove(&(oldest, rollout.id));
        }
    }

    pub fn free_some(&mut self) {
        let kept = self.remains.len().saturating_sub(FREED_PER_EVENT);
        self.remains.truncate(kept);
    }
}

impl Core {
    pub(crate) fn turn_finished(&mut self, id: RolloutId, turn: Turn) {
        // What another server wrote was not sampled here.
        if turn.text.is_none() {
            self.tally.sampled_tokens += turn.sampled.len() as u64;
        }
        let Some(rollout) = self.rollouts.in_flight.get_mut(&id) else {
            return self.ignore("turn of a rollout that is over");
        };
        let aging = Aging::of(rollout, |rollout| rollout.record(turn));
        self.aged(id, aging);
    }

    pub(crate) fn noted(&mut self, id: RolloutId, note: Arc<str>) {
        match self.rollouts.in_flight.get_mut(&id) {
            Some(rollout) => rollout.note(note),
            None => self.ignore("note about a rollout that is over"),
        }
    }

    pub(crate) fn sampling_started(&mut self, id: RolloutId, version: PolicyVersion) {
        let Some(rollout) = self.rollouts.in_flight.get_mut(&id) else {
            return self.ignore("start of a turn of a rollout that is over");
        };
        let aging = Aging::of(rollout, |rollout| {
            rollout.begin(version);
            1
        });
        self.aged(id, aging);
    }

    /// Looks at a rollout in flight that something was added to.
    fn aged(&mut self, id: RolloutId, aging: Aging) {
        let Aging {
            evaluates,
            policies,
            before,
            oldest,
            group,
            slot,
        } = aging;
        if evaluates {
            return;
        }
        if before != oldest {
            if let Some(before) = before {
                self.rollouts.by_age.remove(&(before, id));
            }
            if let Some(oldest) = oldest {
                self.rollouts.note_age(oldest, id, (group, slot));
            }
        }
        if too_many_policies(policies, self.config.run.max_off_policy_steps) {
            self.cancel_stale(id, CancelReason::TooManyPolicies);
        } else if self.is_too_old(oldest) {
            self.cancel_stale(id, CancelReason::TooOld);
        }
    }

    /// Only counted: the environment gets the error as the answer to its own request, and decides whether to continue.
    pub(crate) fn turn_failed(&mut self, rollout: RolloutId) {
        match self.rollouts.in_flight.contains_key(&rollout) {
            true => self.tally.discards.failed("turn"),
            false => self.ignore("failed turn of a rollout that is over"),
        }
    }

    pub(crate) fn rollout_finished(&mut self, id: RolloutId, worker: WorkerId, outcome: &Outcome) {
        if self
            .rollouts
            .in_flight
            .get(&id)
            .is_none_or(|rollout| rollout.worker != worker)
        {
            return self.ignore("report of a rollout that is over");
        }
        let mut rollout = self.take(id);
        self.effects.push(Effect::RolloutClosed { rollout: id });
        if rollout.evaluates.is_some() {
            return self.evaluation_rollout_finished(rollout, outcome);
        }
        let environment = rollout.environment;
        let rules = Rules::of(&self.config, environment);
        let finished = rollout.finish(outcome, &rules);
        self.flag(environment, outcome, finished.as_ref().err());
        match finished {
            Ok(()) if self.is_too_old(rollout.oldest()) => self.void_at_its_end(rollout),
            Ok(()) => self.fill_slot(rollout),
            Err(error) => self.fail(rollout, &error),
        }
    }

    /// Counts what a report says in addition to how the rollout ended.
    fn flag(
        &mut self,
        environment: EnvironmentId,
        outcome: &Outcome,
        error: Option<&RolloutError>,
    ) {
        let mut trained = outcome
            .traces
            .iter()
            .filter(|trace| trace.trainable && trace.ok);
        let truncated = trained.any(|trace| trace.truncated);
        let errored = u64::from(!outcome.ok);
        let empty = u64::from(error.is_some_and(|error| WITHOUT_A_SAMPLE.contains(&&*error.kind)));
        self.tally.counters.errored += errored;
        self.tally.counters.empty += empty;
        self.tally.counters.truncated += u64::from(outcome.ok && truncated);
        let attempts = &mut self.environments[environment].attempts;
        attempts.errored += errored;
        attempts.empty += empty;
    }

    pub(crate) fn rollout_timed_out(&mut self, id: RolloutId) {
        let Some(rollout) = self.rollouts.in_flight.get(&id) else {
            return;
        };
        if self.is_blocked(rollout.worker) {
            return self.give_up_blocked(rollout.worker);
        }
        let rollout = self.cancel(id, CancelReason::Timeout);
        let span = self.config.rollout_span(rollout.environment);
        let seconds = span.as_secs_f64();
        let message = format!("not ended {seconds} s after it was leased");
        self.fail(rollout, &RolloutError::new("timeout", message));
    }

    /// Whether the next step to be cut may not train what this version sampled.
    fn is_too_old(&self, oldest: Option<PolicyVersion>) -> bool {
        let trainable = oldest_trainable(self.next_step, self.config.run.max_off_policy_steps);
        oldest.is_some_and(|oldest| oldest < trainable)
    }

    /// Takes a rollout out of flight.
    pub(crate) fn take(&mut self, id: RolloutId) -> Box<Rollout> {
        let rollout = self
            .rollouts
            .in_flight
            .remove(&id)
            .expect("the caller knows the rollout to be in flight");
        self.deadlines.clear(rollout.deadline, Due::Rollout(id));
        let state = &mut self.environments[rollout.environment];
        state.in_flight -= 1;
        if let Some(worker) = self.workers.registered.get_mut(&rollout.worker) {
            worker.running.remove(&id);
        }
        if rollout.evaluates.is_some() {
            self.rollouts.evaluating -= 1;
        } else {
            state.attempts.ended += 1;
            self.rollouts.forget_age(&rollout);
        }
        rollout
    }
}

/// How the age of a rollout in flight changed.
struct Aging {
    evaluates: bool,
    /// How many have contributed.
    policies: usize,
    before: Option<PolicyVersion>,
    oldest: Option<PolicyVersion>,
    group: GroupId,
    slot: usize,
}

impl Aging {
    fn of(rollout: &mut Rollout, add: impl FnOnce(&mut Rollout) -> usize) -> Self {
        let before = rollout.oldest();
        let policies = add(rollout);
        Aging {
            evaluates: rollout.evaluates.is_some(),
            policies,
            before,
            oldest: rollout.oldest(),
            group: rollout.group,
            slot: rollout.slot,
        }
    }
}
