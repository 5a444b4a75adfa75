//! Rollouts that are discarded, and what becomes of their groups.
//!
//! A rollout is discarded when it fails, when it is lost with its worker, or when it becomes stale. Stale is what can no
//! longer be trained: more policies than `max_off_policy_steps` sampled it, or its oldest version is too old for the next
//! step to be cut. The second is checked when a step is cut (nothing else makes a rollout older), in an index by oldest
//! version, so it costs O(stale * log n).

use super::Rollout;
use crate::Core;
use crate::counters::{CancelReason, Ended, VoidReason};
use crate::effect::Effect;
use crate::failure::{ErrorKind, FirstError, PROMPT_TOO_LONG, RolloutError};
use crate::group::Blame;
use crate::ids::*;
use crate::policy::oldest_trainable;

impl Core {
    /// Takes a rollout out of flight, and notifies the gateway and the worker. The caller ends it.
    pub(crate) fn cancel(&mut self, id: RolloutId, reason: CancelReason) -> Box<Rollout> {
        let rollout = self.take(id);
        self.tally.discards.cancelled(reason);
        if reason == CancelReason::WorkerLost {
            self.count_error(&rollout, ErrorKind::Infrastructure);
        }
        let worker = (reason != CancelReason::WorkerLost).then_some(rollout.worker);
        self.effects.push(Effect::CancelRollout {
            rollout: id,
            worker,
            reason,
        });
        self.effects.push(Effect::RolloutClosed { rollout: id });
        rollout
    }

    fn count_error(&mut self, rollout: &Rollout, kind: ErrorKind) {
        let state = &mut self.environments[rollout.environment];
        state.errors.count(kind);
        if rollout.evaluates.is_none() {
            state.attempts.errors.count(kind);
        }
    }

    /// Ends a rollout that failed; its slot is tried again, or given up.
    pub(crate) fn fail(&mut self, rollout: Box<Rollout>, error: &RolloutError) {
        let error = &error.in_one_word();
        self.tally.discards.failed(&error.kind);
        let kind = ErrorKind::of(error);
        self.count_error(&rollout, kind);
        let firsts = &mut self.environments[rollout.environment].first_errors;
        firsts
            .entry(kind)
            .or_insert_with(|| FirstError::of(rollout.id, rollout.example, error));
        self.effects.push(Effect::RolloutFailed {
            rollout: rollout.id,
            error: error.clone(),
        });
        if rollout.evaluates.is_some() {
            return self.evaluation_rollout_failed(rollout, error);
        }
        let (id, group, slot) = (rollout.id, rollout.group, rollout.slot);
        let (environment, example) = (rollout.environment, rollout.example);
        let max_retries = self.config.environment(environment).own.max_retries;
        rollout.end(Ended::Failed, &mut self.tally.counters);
        if error.kind == PROMPT_TOO_LONG {
            // Another try would end as this one did.
            return self.rest_example(environment, example, group, (slot, id), &error.message);
        }
        let Some(live) = self.groups.live.get_mut(&group) else {
            return;
        };
        let again = live.fail(slot, id, max_retries);
        let RolloutError { kind, message, .. } = error;
        let failures = max_retries + 1;
        self.free_slot(group, slot, again, Blame::Environment, || {
            format!("a rollout failed {failures} times, last with {kind}: {message}")
        });
    }

    /// Ends a rollout whose worker is gone, and queues its slot again.
    pub(crate) fn give_back(&mut self, rollout: Box<Rollout>) {
        if rollout.evaluates.is_some() {
            return self.give_back_evaluation(rollout);
        }
        let (id, group, slot) = (rollout.id, rollout.group, rollout.slot);
        rollout.end(Ended::Cancelled, &mut self.tally.counters);
        let Some(live) = self.groups.live.get_mut(&group) else {
            return;
        };
        let again = live.lose(slot, id);
        self.free_slot(group, slot, again, Blame::Worker, || {
            "one of its rollouts was lost with its worker too often".to_owned()
        });
    }

    /// Cancels a rollout in flight that can no longer be trained.
    pub(crate) fn cancel_stale(&mut self, id: RolloutId, reason: CancelReason) {
        let rollout = self.cancel(id, reason);
        let (group, slot) = (rollout.group, rollout.slot);
        self.rollouts
            .remains
            .push(rollout.end(Ended::Stale, &mut self.tally.counters));
        self.slot_went_stale(group, slot, id, reason.name());
    }

    /// Voids a rollout that ends well, but too old.
    pub(crate) fn void_at_its_end(&mut self, rollout: Box<Rollout>) {
        let (id, group, slot) = (rollout.id, rollout.group, rollout.slot);
        self.void(rollout, VoidReason::TooOld);
        self.slot_went_stale(group, slot, id, VoidReason::TooOld.name());
    }

    /// Ends a finished rollout that is not trained.
    pub(crate) fn void(&mut self, rollout: Box<Rollout>, reason: VoidReason) {
        let id = rollout.id;
        let ended = self.tally.discards.voided(reason);
        rollout.end(ended, &mut self.tally.counters);
        self.effects.push(Effect::RolloutVoided {
            rollout: id,
            reason,
        });
    }

    fn slot_went_stale(&mut self, group: GroupId, slot: usize, id: RolloutId, why: &str) {
        let rule = self.config.run.group_on_cancel;
        let Some(live) = self.groups.live.get_mut(&group) else {
            return;
        };
        let again = live.stale(slot, id, rule);
        self.free_slot(group, slot, again, Blame::Trainer, || {
            format!("a rollout became stale ({why}) and is not replaced")
        });
    }

    /// Ends all that the next step to be cut may not train. Called when that step changes.
    pub(crate) fn sweep(&mut self) {
        let oldest = oldest_trainable(self.next_step, self.config.run.max_off_policy_steps);
        let first_kept = (oldest, RolloutId(0));
        if self
            .rollouts
            .by_age
            .first_key_value()
            .is_none_or(|(first, _)| *first >= first_kept)
        {
            return;
        }
        let kept = self.rollouts.by_age.split_off(&first_kept);
        let stale = std::mem::replace(&mut self.rollouts.by_age, kept);
        // A cancelled rollout has two effects.
        self.effects.reserve(2 * stale.len());
        for ((_, id), (group, slot)) in stale {
            // A group that was dropped on the way has ended its other rollouts too.
            if self.rollouts.in_flight.contains_key(&id) {
                self.cancel_stale(id, CancelReason::TooOld);
            } else {
                self.void_finished(group, slot, id);
            }
        }
    }

    /// Voids a finished rollout of a group that was not cut.
    fn void_finished(&mut self, id: GroupId, slot: usize, rollout: RolloutId) {
        let rule = self.config.run.group_on_cancel;
        let Some(group) = self.groups.live.get_mut(&id) else {
            return;
        };
        let min_size = self.config.min_group_size(group.environment);
        let Some(rollout) = group.void(slot, rollout) else {
            return;
        };
        self.void(rollout, VoidReason::TooOld);
        let waits = self.signals.awaits(id);
        let Some(group) = self.groups.live.get_mut(&id) else {
            return;
        };
        let computed =
            group.token_advantages.is_some() || group.teacher_logprobs.is_some() || waits;
        if group.ready_since.is_none() && !computed {
            let again = group.may_refill(slot, rule);
            return self.free_slot(id, slot, again, Blame::Trainer, || {
                "a finished rollout became stale before the others had ended".to_owned()
            });
        }
        // A complete group keeps what it has: refilled, it would only get older. Custom advantages and a teacher's scores
        // were computed from all of it.
        group.give_up(slot);
        self.tally.discards.slots_lost += 1;
        if computed || group.is_hopeless(min_size) || group.samples().next().is_none() {
            let (bound, step) = (self.config.run.max_off_policy_steps, self.next_step);
            let why = format!(
                "a sample would be trained at step {step}, more than max_off_policy_steps = {bound} steps late"
            );
            self.drop_group(id, VoidReason::GroupDropped, &why);
        } else if self.lost_its_signal(id) {
            self.filter_group(id);
        }
    }

    /// Voids what a group has finished with an older policy than the next step trains. Synchronous runs promise that no
    /// rollout starts before that policy is proved, and a group that was set aside may have.
    pub(crate) fn void_off_policy(&mut self, id: GroupId) {
        let trains = self.next_step.trains();
        let older = self.groups.live[&id]
            .finished()
            .filter(|rollout| rollout.oldest() < Some(trains))
            .map(|rollout| (rollout.slot, rollout.id, rollout.oldest()));
        let older: Vec<(usize, RolloutId, Option<PolicyVersion>)> = older.collect();
        for (slot, rollout, oldest) in older {
            if let Some(oldest) = oldest {
                self.rollouts.by_age.remove(&(oldest, rollout));
            }
            self.void_finished(id, slot, rollout);
        }
    }
}
