//! Slots of live groups: begun, queued, taken back, filled again or given up.

use super::{Group, Slot};
use crate::Core;
use crate::counters::{CancelReason, Ended, VoidReason};
use crate::ids::*;
use crate::rollout::Rollout;

/// Who is to blame when a group is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    Environment,
    /// The worker is gone, with all that it ran.
    Worker,
    /// No one: the trainer overtook it.
    Trainer,
}

impl Core {
    /// Begins a group and queues all of its rollouts.
    pub(crate) fn begin_new_group(&mut self, environment: EnvironmentId, example: ExampleIndex) {
        let id = self.groups.number(1);
        let size = self.config.rollouts_per_group(environment);
        let mut group = Group::new(id, environment, example, size);
        group.whole = self.environments[environment].whole_groups;
        self.groups.insert(group);
        self.tries(environment, id);
        (0..size).for_each(|slot| self.enqueue(id, slot));
    }

    /// Resumes a group that was set aside.
    pub(crate) fn resume_group(&mut self, id: GroupId) {
        let slots: Vec<usize> = self.groups.live[&id].queued().collect();
        slots.into_iter().for_each(|slot| self.enqueue(id, slot));
        if self.config.run.max_async_level == 0 {
            self.void_off_policy(id);
        }
    }

    /// Makes a slot wait for a worker.
    pub(crate) fn enqueue(&mut self, id: GroupId, slot: usize) {
        let state = &mut self.environments[self.groups.live[&id].environment];
        if state.set_aside.contains(&id) {
            return;
        }
        if state.queue.is_empty() {
            state.unasked_since = self.now;
        }
        state.queue.insert((id, slot));
    }

    /// A rollout has finished well.
    pub(crate) fn fill_slot(&mut self, rollout: Box<Rollout>) {
        let id = rollout.group;
        let tokens = rollout.samples.iter().map(|sample| sample.len());
        self.groups.usual.note(tokens.sum());
        if let Some(oldest) = rollout.oldest() {
            self.rollouts
                .note_age(oldest, rollout.id, (id, rollout.slot));
        }
        let group = self.groups.live.get_mut(&id);
        group
            .expect("a rollout in flight has a live group")
            .finish(rollout);
        self.complete_if_whole(id);
    }

    /// Decides what becomes of a slot that was taken back, and of its group.
    pub(crate) fn free_slot(
        &mut self,
        id: GroupId,
        slot: usize,
        again: bool,
        blame: Blame,
        why: impl FnOnce() -> String,
    ) {
        let Some(group) = self.groups.live.get_mut(&id) else {
            return;
        };
        let min_size = self.config.min_group_size(group.environment);
        if again && group.whole {
            return self.restart_group(id, blame);
        }
        if again {
            self.tally.discards.slots_refilled += 1;
            return self.enqueue(id, slot);
        }
        group.give_up(slot);
        self.tally.discards.slots_lost += 1;
        // What overtook one rollout of a whole group has overtaken what its reward is compared with.
        let goes_on = !(group.whole && blame == Blame::Trainer);
        if goes_on && !group.is_hopeless(min_size) {
            return self.complete_if_whole(id);
        }
        let environment = group.environment;
        match blame {
            Blame::Environment | Blame::Worker => {
                self.drop_failed_group(id, environment, VoidReason::GroupDropped, &why());
            }
            Blame::Trainer => self.drop_group(id, VoidReason::GroupDropped, &why()),
        }
    }

    /// Begins a whole group again. What is left of it is void: its rewards would have come from all of it together.
    fn restart_group(&mut self, id: GroupId, blame: Blame) {
        let Some(group) = self.groups.live.get_mut(&id) else {
            return;
        };
        let reason = match blame {
            Blame::Worker => CancelReason::WorkerLost,
            Blame::Environment | Blame::Trainer => CancelReason::GroupRestarted,
        };
        let slots = group.restart();
        self.tally.discards.groups_restarted += 1;
        self.tally.discards.slots_refilled += slots.len() as u64;
        for (slot, held) in slots.into_iter().enumerate() {
            match held {
                Slot::Queued | Slot::Lost => {}
                Slot::InFlight(rollout) => self.cancel_with_group(rollout, reason),
                Slot::Finished(rollout) => {
                    self.void_with_group(rollout, VoidReason::GroupIncomplete)
                }
            }
            self.enqueue(id, slot);
        }
    }

    pub(super) fn cancel_with_group(&mut self, id: RolloutId, reason: CancelReason) {
        let rollout = self.cancel(id, reason);
        let remains = rollout.end(Ended::Cancelled, &mut self.tally.counters);
        self.rollouts.remains.push(remains);
    }

    pub(super) fn void_with_group(&mut self, rollout: Box<Rollout>, reason: VoidReason) {
        self.rollouts.forget_age(&rollout);
        self.void(rollout, reason);
    }
}
