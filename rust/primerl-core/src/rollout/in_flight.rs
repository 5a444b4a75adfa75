//! Rollouts in flight: turns, reports, deadlines; when a group is complete.

use crate::Core;
use crate::config::AlgorithmKind;
use crate::counters::VoidReason;
use crate::deadlines::Due;
use crate::effect::{CancelReason, Effect};
use crate::event::{Outcome, RolloutError};
use crate::failure::PROMPT_TOO_LONG;
use crate::group::Group;
use crate::ids::*;
use crate::policy::{oldest_trainable, too_many_policies};
use crate::rollout::{LeftOut, Rollout, Rules, error};
use crate::turn::Turn;
use std::sync::Arc;

/// Kinds of failures of which nothing is there to be trained.
const WITHOUT_A_SAMPLE: [&str; 3] = ["empty", "no_turns", PROMPT_TOO_LONG];

impl Core {
    pub(crate) fn turn_finished(&mut self, id: RolloutId, turn: Turn) {
        let Some(rollout) = self.rollouts.get_mut(&id) else {
            return self.ignore("turn of a rollout that is over");
        };
        let aging = Aging::of(rollout, |rollout| rollout.record(turn));
        self.aged(id, aging);
    }

    pub(crate) fn noted(&mut self, id: RolloutId, note: Arc<str>) {
        match self.rollouts.get_mut(&id) {
            Some(rollout) => rollout.note(note),
            None => self.ignore("note about a rollout that is over"),
        }
    }

    pub(crate) fn sampling_started(&mut self, id: RolloutId, version: PolicyVersion) {
        let Some(rollout) = self.rollouts.get_mut(&id) else {
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
                self.by_age.remove(&(before, id));
            }
            if let Some(oldest) = oldest {
                self.note_age(id, group, slot, oldest);
            }
        }
        if too_many_policies(policies, self.config.max_off_policy_steps) {
            self.cancel_stale(id, CancelReason::TooManyPolicies);
        } else if self.is_too_old(oldest) {
            self.cancel_stale(id, CancelReason::TooOld);
        }
    }

    /// Only counted: the environment is told by its own request, and decides whether it goes on.
    pub(crate) fn turn_failed(&mut self, rollout: RolloutId) {
        match self.rollouts.contains_key(&rollout) {
            true => self.losses.failed("turn"),
            false => self.ignore("failed turn of a rollout that is over"),
        }
    }

    pub(crate) fn rollout_finished(&mut self, id: RolloutId, worker: WorkerId, outcome: &Outcome) {
        if self
            .rollouts
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
            Ok(()) => self.finish(rollout),
            Err(error) => self.fail(rollout, &error),
        }
    }

    /// Counts what a report says beside how the rollout ended.
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
        self.counters.errored += errored;
        self.counters.empty += empty;
        self.counters.truncated += u64::from(outcome.ok && truncated);
        let attempts = &mut self.sites[environment.0 as usize].attempts;
        attempts.errored += errored;
        attempts.empty += empty;
    }

    pub(crate) fn rollout_timed_out(&mut self, id: RolloutId) {
        let Some(rollout) = self.rollouts.get(&id) else {
            return;
        };
        if self.is_blocked(rollout.worker) {
            return self.give_up_blocked(rollout.worker);
        }
        let rollout = self.cancel(id, CancelReason::Timeout);
        let span = self.config.rollout_span(rollout.environment);
        let seconds = span.as_secs_f64();
        let message = format!("not ended {seconds} s after it was leased");
        self.fail(rollout, &error("timeout", message));
    }

    /// Whether the next step to be cut may not train what this version sampled.
    fn is_too_old(&self, oldest: Option<PolicyVersion>) -> bool {
        let trainable = oldest_trainable(self.next_step, self.config.max_off_policy_steps);
        oldest.is_some_and(|oldest| oldest < trainable)
    }

    fn finish(&mut self, rollout: Box<Rollout>) {
        let id = rollout.group;
        if let Some(oldest) = rollout.oldest() {
            self.note_age(rollout.id, id, rollout.slot, oldest);
        }
        let group = self.groups.get_mut(&id);
        group
            .expect("a rollout in flight has a live group")
            .finish(rollout);
        self.complete_if_whole(id);
    }

    /// Puts a group whose last slot has come to its end among the ready ones.
    pub(crate) fn complete_if_whole(&mut self, id: GroupId) {
        let min_size = self.config.min_group_size();
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        if !group.is_complete(min_size) {
            return;
        }
        let environment = group.environment;
        if group.samples().next().is_none() {
            let (why, reason) = why_nothing_is_left(group, self.config.seq_len);
            self.file_example(id);
            return self.drop_failed_group(id, environment, reason, &why);
        }
        if !self.file_example(id) {
            self.goes_well(environment);
            return self.filter_group(id);
        }
        self.score(id, environment);
    }

    pub(crate) fn give_advantages(&mut self, id: GroupId, environment: EnvironmentId) {
        match &self.config.environment(environment).algorithm.kind {
            AlgorithmKind::Custom { path, timeout } => {
                let (path, timeout) = (path.clone(), *timeout);
                self.compute_advantages(id, path, timeout);
            }
            _ => self.is_ready(id, environment),
        }
    }

    /// A complete group, with all that its advantages need, waits for its batch.
    pub(crate) fn is_ready(&mut self, id: GroupId, environment: EnvironmentId) {
        self.goes_well(environment);
        self.signal_at = self.now;
        let since = self.next_ready;
        self.next_ready += 1;
        if let Some(group) = self.groups.get_mut(&id) {
            group.ready_since = Some(since);
        }
        self.ready.insert((since, id));
    }

    /// Takes a rollout out of flight.
    pub(crate) fn take(&mut self, id: RolloutId) -> Box<Rollout> {
        let rollout = self
            .rollouts
            .remove(&id)
            .expect("the caller knows the rollout to be in flight");
        self.deadlines.clear(rollout.deadline, Due::Rollout(id));
        let site = &mut self.sites[rollout.environment.0 as usize];
        site.in_flight -= 1;
        if let Some(worker) = self.workers.get_mut(&rollout.worker) {
            worker.running.remove(&id);
        }
        if rollout.evaluates.is_some() {
            self.in_flight_evaluation -= 1;
        } else {
            site.attempts.ended += 1;
            self.forget_age(&rollout);
        }
        rollout
    }
}

/// What was added to a rollout in flight, as far as its age goes.
struct Aging {
    evaluates: bool,
    /// So many have contributed.
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

fn why_nothing_is_left(group: &Group, seq_len: u32) -> (String, VoidReason) {
    let left_out: Vec<LeftOut> = group.finished().map(|rollout| rollout.left_out).collect();
    if left_out.iter().any(|left_out| left_out.too_long > 0) {
        let why = format!(
            "all of its samples are longer than seq_len = {seq_len}: raise it or shorten rollouts"
        );
        return (why, VoidReason::TooLong);
    }
    let why = "all of its rollouts were cut short by the environment, and truncated_rollouts = \"mask\": allow them more \
               tokens or turns";
    (why.to_owned(), VoidReason::Masked)
}
