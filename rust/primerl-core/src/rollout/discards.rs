//! Rollouts that come to nothing, and what becomes of their groups.
//!
//! A rollout is lost by failing, with its worker, or by becoming stale. Stale is what cannot be trained any more: it
//! was sampled by more policies than `max_off_policy_steps`, or its oldest version is too old for the next step to be
//! cut. The second is looked at when a step is cut (nothing else makes a rollout older), in an index by oldest version,
//! so it costs O(stale * log n).

use crate::Core;
use crate::counters::{Ended, VoidReason};
use crate::effect::{CancelReason, Effect};
use crate::event::RolloutError;
use crate::failure::{ErrorKind, FirstError, PROMPT_TOO_LONG};
use crate::group::Slot;
use crate::ids::*;
use crate::policy::oldest_trainable;
use crate::rollout::Rollout;

/// Whether dropping a group speaks against its environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blame {
    Environment,
    /// The worker is gone, with all that it ran.
    Worker,
    /// Overtaken by the trainer.
    Nobody,
}

impl Core {
    /// Takes a rollout out of flight, and tells the gateway and the worker. The caller ends it.
    pub(crate) fn cancel(&mut self, id: RolloutId, reason: CancelReason) -> Box<Rollout> {
        let rollout = self.take(id);
        self.losses.cancelled(reason);
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
        let site = &mut self.sites[rollout.environment.0 as usize];
        site.errors.count(kind);
        if rollout.evaluates.is_none() {
            site.attempts.errors.count(kind);
        }
    }

    /// Ends a rollout that failed; its slot is tried again, or given up.
    pub(crate) fn fail(&mut self, rollout: Box<Rollout>, error: &RolloutError) {
        let error = &error.in_one_word();
        self.losses.failed(&error.kind);
        let kind = ErrorKind::of(error);
        self.count_error(&rollout, kind);
        let firsts = &mut self.sites[rollout.environment.0 as usize].first_errors;
        firsts
            .entry(kind)
            .or_insert_with(|| FirstError::of(&rollout, error));
        self.effects.push(Effect::RolloutFailed {
            rollout: rollout.id,
            error: error.clone(),
        });
        if rollout.evaluates.is_some() {
            return self.evaluation_rollout_failed(rollout, error);
        }
        let (id, group, slot) = (rollout.id, rollout.group, rollout.slot);
        let (environment, example) = (rollout.environment, rollout.example);
        let max_retries = self.config.environment(environment).max_retries;
        rollout.end(Ended::Failed, &mut self.counters);
        if error.kind == PROMPT_TOO_LONG {
            // Another try would end as this one did.
            return self.rest_example(environment, example, group, (slot, id), &error.message);
        }
        let Some(live) = self.groups.get_mut(&group) else {
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
        rollout.end(Ended::Cancelled, &mut self.counters);
        let Some(live) = self.groups.get_mut(&group) else {
            return;
        };
        let again = live.lose(slot, id);
        self.free_slot(group, slot, again, Blame::Worker, || {
            "one of its rollouts was lost with its worker too often".to_owned()
        });
    }

    /// Cancels a rollout in flight that can not be trained any more.
    pub(crate) fn cancel_stale(&mut self, id: RolloutId, reason: CancelReason) {
        let rollout = self.cancel(id, reason);
        let (group, slot) = (rollout.group, rollout.slot);
        self.remains
            .push(rollout.end(Ended::Stale, &mut self.counters));
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
        let ended = self.losses.voided(reason);
        rollout.end(ended, &mut self.counters);
        self.effects.push(Effect::RolloutVoided {
            rollout: id,
            reason,
        });
    }

    fn slot_went_stale(&mut self, group: GroupId, slot: usize, id: RolloutId, why: &str) {
        let rule = self.config.group_on_cancel;
        let Some(live) = self.groups.get_mut(&group) else {
            return;
        };
        let again = live.stale(slot, id, rule);
        self.free_slot(group, slot, again, Blame::Nobody, || {
            format!("a rollout became stale ({why}) and is not replaced")
        });
    }

    /// Ends all that the next step to be cut may not train. Called when that step changes.
    pub(crate) fn sweep(&mut self) {
        let oldest = oldest_trainable(self.next_step, self.config.max_off_policy_steps);
        let first_kept = (oldest, RolloutId(0));
        if self
            .by_age
            .first_key_value()
            .is_none_or(|(first, _)| *first >= first_kept)
        {
            return;
        }
        let kept = self.by_age.split_off(&first_kept);
        let stale = std::mem::replace(&mut self.by_age, kept);
        // A cancelled rollout has two effects.
        self.effects.reserve(2 * stale.len());
        for ((_, id), (group, slot)) in stale {
            // A group that was dropped on the way took its other rollouts along.
            if self.rollouts.contains_key(&id) {
                self.cancel_stale(id, CancelReason::TooOld);
            } else {
                self.void_finished(group, slot, id);
            }
        }
    }

    /// Voids a finished rollout of a group that was not cut.
    fn void_finished(&mut self, id: GroupId, slot: usize, rollout: RolloutId) {
        let (rule, min_size) = (self.config.group_on_cancel, self.config.min_group_size());
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let Some(rollout) = group.void(slot, rollout) else {
            return;
        };
        self.void(rollout, VoidReason::TooOld);
        let waits = self.computing.contains_key(&id) || self.scoring.contains_key(&id);
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let computed =
            group.token_advantages.is_some() || group.teacher_logprobs.is_some() || waits;
        if group.ready_since.is_none() && !computed {
            let again = group.may_refill(slot, rule);
            return self.free_slot(id, slot, again, Blame::Nobody, || {
                "a finished rollout became stale before the others had ended".to_owned()
            });
        }
        // A complete group goes on with what it has: refilled, it would only get older. Custom advantages and a teacher's
        // scores are of all of it.
        group.give_up(slot);
        self.losses.slots_lost += 1;
        if computed || group.is_hopeless(min_size) || group.samples().next().is_none() {
            let (bound, step) = (self.config.max_off_policy_steps, self.next_step);
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
        let older = self.groups[&id]
            .finished()
            .filter(|rollout| rollout.oldest() < Some(trains))
            .map(|rollout| (rollout.slot, rollout.id, rollout.oldest()));
        let older: Vec<(usize, RolloutId, Option<PolicyVersion>)> = older.collect();
        for (slot, rollout, oldest) in older {
            if let Some(oldest) = oldest {
                self.by_age.remove(&(oldest, rollout));
            }
            self.void_finished(id, slot, rollout);
        }
    }

    /// What becomes of a slot that was taken back, and of its group.
    fn free_slot(
        &mut self,
        id: GroupId,
        slot: usize,
        again: bool,
        blame: Blame,
        why: impl FnOnce() -> String,
    ) {
        let min_size = self.config.min_group_size();
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        if again && group.whole {
            return self.restart_group(id, blame);
        }
        if again {
            self.losses.slots_refilled += 1;
            return self.enqueue(id, slot);
        }
        group.give_up(slot);
        self.losses.slots_lost += 1;
        // What overtook one rollout of a whole group has overtaken what its reward is compared with.
        let goes_on = !(group.whole && blame == Blame::Nobody);
        if goes_on && !group.is_hopeless(min_size) {
            return self.complete_if_whole(id);
        }
        let environment = group.environment;
        match blame {
            Blame::Environment | Blame::Worker => {
                self.drop_failed_group(id, environment, VoidReason::GroupDropped, &why());
            }
            Blame::Nobody => self.drop_group(id, VoidReason::GroupDropped, &why()),
        }
    }

    /// Begins a whole group anew. What is left of it is void: its rewards would have come from all of it together.
    fn restart_group(&mut self, id: GroupId, blame: Blame) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let reason = match blame {
            Blame::Worker => CancelReason::WorkerLost,
            Blame::Environment | Blame::Nobody => CancelReason::GroupRestarted,
        };
        let slots = group.restart();
        self.losses.groups_restarted += 1;
        self.losses.slots_refilled += slots.len() as u64;
        for (slot, held) in slots.into_iter().enumerate() {
            match held {
                Slot::Queued | Slot::Lost => {}
                Slot::InFlight(rollout) => {
                    let rollout = self.cancel(rollout, reason);
                    self.remains
                        .push(rollout.end(Ended::Cancelled, &mut self.counters));
                }
                Slot::Finished(rollout) => {
                    self.forget_age(&rollout);
                    self.void(rollout, VoidReason::GroupIncomplete);
                }
            }
            self.enqueue(id, slot);
        }
    }

    /// Drops a group: what is in flight is cancelled, what had finished ends as `finished_as`. Its place is free.
    pub(crate) fn drop_group(&mut self, id: GroupId, finished_as: VoidReason, why: &str) {
        if let Some(group) = self.groups.get(&id) {
            let (name, example) = (self.name(group.environment).to_owned(), group.example);
            self.warn(format!(
                "group {id} (example {example} of environment {name:?}) was dropped: {why}"
            ));
        }
        self.drop_quietly(id, finished_as, why);
    }

    /// Of a group of whose drop something else is said.
    pub(crate) fn drop_quietly(&mut self, id: GroupId, finished_as: VoidReason, why: &str) {
        let Some(group) = self.groups.remove(&id) else {
            return;
        };
        self.losses.groups_dropped += 1;
        self.tried_in_vain(group.environment, id);
        self.effects.push(Effect::GroupDropped {
            group: id,
            reason: finished_as,
            why: why.to_owned(),
        });
        if let Some(since) = group.ready_since {
            self.ready.remove(&(since, id));
        }
        self.stop_computing(id);
        self.stop_scoring(id);
        let environment = group.environment.0 as usize;
        self.sites[environment].set_aside.remove(&id);
        for (index, slot) in group.slots.into_iter().enumerate() {
            match slot {
                Slot::Lost => {}
                Slot::Queued => {
                    self.sites[environment].queue.remove(&(id, index));
                }
                Slot::InFlight(rollout) => {
                    let rollout = self.cancel(rollout, CancelReason::GroupDropped);
                    self.remains
                        .push(rollout.end(Ended::Cancelled, &mut self.counters));
                }
                Slot::Finished(rollout) => {
                    self.forget_age(&rollout);
                    self.void(rollout, finished_as);
                }
            }
        }
    }

    /// At the end of the run: groups that will not be cut. Nothing is in flight any more.
    pub(crate) fn discard_groups(&mut self) {
        self.ready.clear();
        self.by_age.clear();
        let computing: Vec<GroupId> = self.computing.keys().copied().collect();
        computing.into_iter().for_each(|id| {
            self.stop_computing(id);
        });
        let scoring: Vec<GroupId> = self.scoring.keys().copied().collect();
        scoring.into_iter().for_each(|id| {
            self.stop_scoring(id);
        });
        for site in &mut self.sites {
            site.queue.clear();
            site.set_aside.clear();
        }
        for slot in std::mem::take(&mut self.groups)
            .into_values()
            .flat_map(|group| group.slots)
        {
            if let Slot::Finished(rollout) = slot {
                self.void(rollout, VoidReason::RunFinished);
            }
        }
    }

    /// Notes how old a training rollout is, in flight or finished.
    pub(crate) fn note_age(
        &mut self,
        rollout: RolloutId,
        group: GroupId,
        slot: usize,
        oldest: PolicyVersion,
    ) {
        self.by_age.insert((oldest, rollout), (group, slot));
    }

    pub(crate) fn forget_age(&mut self, rollout: &Rollout) {
        if let Some(oldest) = rollout.oldest() {
            self.by_age.remove(&(oldest, rollout.id));
        }
    }
}
