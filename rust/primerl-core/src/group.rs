//! `group_size` rollouts of one example, whose rewards are compared with each other.
//!
//! A group has slots. Each is queued (waiting for a worker), in flight, or finished; a failed attempt puts its slot
//! back into the queue. The group is complete once every slot is finished. It leaves whole: cut into a batch, or
//! dropped.

use crate::ids::*;
use crate::rollout::{Rollout, TrainedTrace};
use crate::sample::Sample;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub enum Slot {
    Queued,
    InFlight(RolloutId),
    Finished(Box<Rollout>),
}

#[derive(Clone, Debug)]
pub struct Group {
    pub id: GroupId,
    pub environment: EnvironmentId,
    pub example: ExampleIndex,
    pub slots: Vec<Slot>,
    /// Failed attempts of each slot.
    attempts_failed: Vec<u32>,
    /// Leases each slot lost with their workers.
    leases_lost: Vec<u32>,
    /// Of a custom algorithm: for each of [`Group::samples`], one advantage a token.
    pub token_advantages: Option<Vec<Arc<[f32]>>>,
}

/// A lost lease is no fault of the example, so it is no retry. But an example that kills every worker must not go
/// round for ever: from this many on, a slot's lost lease counts as a failure.
const MAX_LEASES_LOST: u32 = 5;

impl Group {
    pub fn new(
        id: GroupId,
        environment: EnvironmentId,
        example: ExampleIndex,
        size: usize,
    ) -> Self {
        Group {
            id,
            environment,
            example,
            slots: vec![Slot::Queued; size],
            attempts_failed: vec![0; size],
            leases_lost: vec![0; size],
            token_advantages: None,
        }
    }

    pub fn is_complete(&self) -> bool {
        self.slots
            .iter()
            .all(|slot| matches!(slot, Slot::Finished(_)))
    }

    pub fn finished(&self) -> impl Iterator<Item = &Rollout> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::Finished(rollout) => Some(&**rollout),
            _ => None,
        })
    }

    /// Traces of the finished rollouts, in order of the slots.
    pub fn traces(&self) -> impl Iterator<Item = &TrainedTrace> {
        self.finished().flat_map(|rollout| &rollout.traces)
    }

    /// Samples of the finished rollouts, in order of the slots, each with the position of its trace in
    /// [`Group::traces`].
    pub fn samples(&self) -> impl Iterator<Item = (usize, &Sample)> {
        let mut next = 0;
        self.finished().flat_map(move |rollout| {
            let first = next;
            next += rollout.traces.len();
            rollout
                .samples
                .iter()
                .map(move |sample| (first + sample.trace, sample))
        })
    }

    pub fn into_finished(self) -> impl Iterator<Item = Rollout> {
        self.slots.into_iter().filter_map(|slot| match slot {
            Slot::Finished(rollout) => Some(*rollout),
            _ => None,
        })
    }

    pub fn finished_count(&self) -> usize {
        self.finished().count()
    }

    pub fn lease(&mut self, slot: usize, rollout: RolloutId) {
        assert!(
            matches!(self.slots[slot], Slot::Queued),
            "slot {slot} of group {} is not queued",
            self.id
        );
        self.slots[slot] = Slot::InFlight(rollout);
    }

    pub fn finish(&mut self, rollout: Rollout) {
        self.assert_in_flight(rollout.slot, rollout.id);
        let slot = rollout.slot;
        self.slots[slot] = Slot::Finished(Box::new(rollout));
    }

    /// Takes back the slot of a rollout that failed. Returns whether it may be tried again.
    pub fn fail(&mut self, slot: usize, rollout: RolloutId, max_retries: u32) -> bool {
        self.assert_in_flight(slot, rollout);
        self.slots[slot] = Slot::Queued;
        self.attempts_failed[slot] += 1;
        self.attempts_failed[slot] <= max_retries
    }

    /// Takes back the slot of a rollout whose worker is gone. Returns whether it may be tried again.
    pub fn lose(&mut self, slot: usize, rollout: RolloutId) -> bool {
        self.assert_in_flight(slot, rollout);
        self.slots[slot] = Slot::Queued;
        self.leases_lost[slot] += 1;
        self.leases_lost[slot] < MAX_LEASES_LOST
    }

    /// Oldest version in any trained token of its finished rollouts.
    pub fn oldest(&self) -> Option<PolicyVersion> {
        self.finished().filter_map(Rollout::oldest).min()
    }

    fn assert_in_flight(&self, slot: usize, rollout: RolloutId) {
        let in_flight = matches!(self.slots[slot], Slot::InFlight(id) if id == rollout);
        assert!(
            in_flight,
            "rollout {rollout} is not in flight in group {}",
            self.id
        );
    }
}
