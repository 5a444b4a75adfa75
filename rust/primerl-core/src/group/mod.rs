//! `group_size` rollouts of one example, whose rewards are compared with each other.
//!
//! A group has slots:
//! ```text
//! Queued ──lease──> InFlight ──finish──> Finished
//!   ^                  │                    │
//!   └──── taken back ──┴────────────────────┴──> Lost (given up)
//! ```
//! A slot whose rollout gave no result is queued again, or given up: after `max_retries` failures, after too many
//! lost workers or stale rollouts, or at its first stale rollout under `group_on_cancel = "drop"`. The group is complete
//! when every slot is finished or lost and at least `min_group_size` are finished, and hopeless when too many are lost
//! for that. It leaves whole: cut into a batch with what it has, or dropped.
//!
//! Where rewards come from all rollouts of a group together (`whole`), one worker gets all of it, and a rollout is
//! finished for good only when all are: one that gives no result ends the others too, also reported ones, and all slots
//! are queued again. Tries are then counted for the group. Only when they are spent is a failed slot given up by itself.

mod ending;
mod live;
mod scored;
mod slots;

pub(crate) use live::{Groups, UsualTokens};
pub(crate) use slots::Blame;

use crate::config::OnCancel;
use crate::ids::*;
use crate::rollout::Rollout;
use crate::sample::{Sample, TokenLogprobs, TrainedTrace};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Slot {
    Queued,
    InFlight(RolloutId),
    Finished(Box<Rollout>),
    /// Given up: the group continues without it.
    Lost,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Group {
    pub id: GroupId,
    pub environment: EnvironmentId,
    pub example: ExampleIndex,
    pub slots: Vec<Slot>,
    /// Its place among the complete groups, once it is.
    pub ready_since: Option<u64>,
    /// Tokens of its samples when it became so.
    #[serde(default)]
    pub ready_tokens: u64,
    /// A custom algorithm's result: for each of [`Group::samples`], one advantage a token.
    pub token_advantages: Option<Vec<Arc<[f32]>>>,
    /// In on-policy distillation: for each of [`Group::samples`], the teacher's log-probability of every token, nats.
    #[serde(default)]
    pub teacher_logprobs: Option<Vec<TokenLogprobs>>,
    /// One worker runs all of it.
    #[serde(default)]
    pub whole: bool,
    tries: Vec<Tries>,
    finished: usize,
    lost: usize,
    in_flight: usize,
}

/// How often a slot gave no result, by whose fault.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Tries {
    failed: u32,
    leases_lost: u32,
    stale: u32,
}

/// A lost lease is no fault of the example, so it is no retry. But an example that kills every worker must not go
/// round for ever: from this many on, the slot is given up.
const MAX_LEASES_LOST: u32 = 5;
/// Nor is staleness. But an example whose rollouts are always overtaken by the trainer must not be refilled for ever.
const MAX_REFILLS: u32 = 4;

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
            ready_since: None,
            ready_tokens: 0,
            token_advantages: None,
            teacher_logprobs: None,
            whole: false,
            tries: vec![Tries::default(); size],
            finished: 0,
            lost: 0,
            in_flight: 0,
        }
    }

    /// What a ready group gives to a step: rollouts, or tokens.
    pub(crate) fn ready_size(&self, of_tokens: bool) -> u64 {
        match of_tokens {
            false => self.slots.len() as u64,
            true => self.ready_tokens,
        }
    }

    /// Every slot has come to its end, and at least `min_size` of them to a good one.
    pub fn is_complete(&self, min_size: usize) -> bool {
        self.finished + self.lost == self.slots.len() && self.finished >= min_size
    }

    /// So many slots are lost that `min_size` rollouts cannot come together any more.
    pub fn is_hopeless(&self, min_size: usize) -> bool {
        self.slots.len() - self.lost < min_size
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

    /// Whether each token of [`Group::samples`] has one value, and a good one. `who` gave them, `what` they are: for the
    /// error.
    pub fn check_values<'a>(
        &self,
        values: impl ExactSizeIterator<Item = &'a [f32]>,
        who: &str,
        what: &str,
        is_good: impl Fn(f32) -> bool,
    ) -> Result<(), String> {
        let samples = self.samples().count();
        if values.len() != samples {
            let answered = values.len();
            return Err(format!(
                "the group has {samples} samples, {who} answered for {answered}"
            ));
        }
        for (number, ((_, sample), values)) in self.samples().zip(values).enumerate() {
            if values.len() != sample.len() {
                let (tokens, given) = (sample.len(), values.len());
                return Err(format!(
                    "sample {number} has {tokens} tokens, {who} gave {given} values"
                ));
            }
            if let Some(at) = values.iter().position(|value| !is_good(*value)) {
                let value = values[at];
                return Err(format!(
                    "{what} of token {at} of sample {number} is {value}"
                ));
            }
        }
        Ok(())
    }

    /// [`Group::samples`], which are then the caller's.
    pub fn take_samples(&mut self) -> Vec<(usize, Sample)> {
        let (mut next, mut taken) = (0, Vec::new());
        for slot in &mut self.slots {
            let Slot::Finished(rollout) = slot else {
                continue;
            };
            let samples = std::mem::take(&mut rollout.samples).into_iter();
            taken.extend(samples.map(|sample| (next + sample.trace, sample)));
            next += rollout.traces.len();
        }
        taken
    }

    pub fn into_finished(self) -> impl Iterator<Item = Box<Rollout>> {
        self.slots.into_iter().filter_map(|slot| match slot {
            Slot::Finished(rollout) => Some(rollout),
            _ => None,
        })
    }

    pub fn finished_count(&self) -> usize {
        self.finished
    }

    pub fn lost_count(&self) -> usize {
        self.lost
    }

    pub fn in_flight_count(&self) -> usize {
        self.in_flight
    }

    /// Slots that wait for a worker.
    pub fn queued(&self) -> impl Iterator<Item = usize> {
        let queued = |(index, slot)| matches!(slot, &Slot::Queued).then_some(index);
        self.slots.iter().enumerate().filter_map(queued)
    }

    pub fn lease(&mut self, slot: usize, rollout: RolloutId) {
        assert!(
            matches!(self.slots[slot], Slot::Queued),
            "slot {slot} of group {} is not queued",
            self.id
        );
        self.slots[slot] = Slot::InFlight(rollout);
        self.in_flight += 1;
    }

    pub fn finish(&mut self, rollout: Box<Rollout>) {
        let slot = rollout.slot;
        self.take_back(slot, rollout.id);
        self.slots[slot] = Slot::Finished(rollout);
        self.finished += 1;
    }

    /// Takes back the slot of a rollout that failed. Returns whether it may be tried again.
    pub fn fail(&mut self, slot: usize, rollout: RolloutId, max_retries: u32) -> bool {
        self.take_back(slot, rollout);
        let tries = self.tries_of(slot);
        tries.failed += 1;
        tries.failed <= max_retries
    }

    /// Takes back the slot of a rollout whose worker is gone. Returns whether it may be tried again.
    pub fn lose(&mut self, slot: usize, rollout: RolloutId) -> bool {
        self.take_back(slot, rollout);
        let tries = self.tries_of(slot);
        tries.leases_lost += 1;
        tries.leases_lost < MAX_LEASES_LOST
    }

    /// Takes back the slot of a rollout that became stale in flight. Returns whether it may be filled again.
    pub fn stale(&mut self, slot: usize, rollout: RolloutId, rule: OnCancel) -> bool {
        self.take_back(slot, rollout);
        self.may_refill(slot, rule)
    }

    /// Takes out a finished rollout that became stale. `None` if the slot does not hold it.
    pub fn void(&mut self, slot: usize, rollout: RolloutId) -> Option<Box<Rollout>> {
        let held = self.slots.get_mut(slot)?;
        if !matches!(held, Slot::Finished(held) if held.id == rollout) {
            return None;
        }
        let Slot::Finished(rollout) = std::mem::replace(held, Slot::Queued) else {
            return None;
        };
        self.finished -= 1;
        Some(rollout)
    }

    /// Whether the slot of a stale rollout may be filled again; counts it.
    pub fn may_refill(&mut self, slot: usize, rule: OnCancel) -> bool {
        let tries = self.tries_of(slot);
        tries.stale += 1;
        rule == OnCancel::Refill && tries.stale <= MAX_REFILLS
    }

    /// Starts over: every slot is queued, given up or not. Returns what they held.
    pub fn restart(&mut self) -> Vec<Slot> {
        (self.finished, self.lost, self.in_flight) = (0, 0, 0);
        let queued = vec![Slot::Queued; self.slots.len()];
        std::mem::replace(&mut self.slots, queued)
    }

    /// A slot that was taken back is not tried again.
    pub fn give_up(&mut self, slot: usize) {
        assert!(
            matches!(self.slots[slot], Slot::Queued),
            "slot {slot} of group {} was not taken back",
            self.id
        );
        self.slots[slot] = Slot::Lost;
        self.lost += 1;
    }

    /// Those of a whole group are counted at its first slot.
    fn tries_of(&mut self, slot: usize) -> &mut Tries {
        &mut self.tries[if self.whole { 0 } else { slot }]
    }

    fn take_back(&mut self, slot: usize, rollout: RolloutId) {
        let in_flight = matches!(self.slots[slot], Slot::InFlight(id) if id == rollout);
        assert!(
            in_flight,
            "rollout {rollout} is not in flight in group {}",
            self.id
        );
        self.slots[slot] = Slot::Queued;
        self.in_flight -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(size: usize) -> Group {
        Group::new(GroupId(0), EnvironmentId(0), ExampleIndex(0), size)
    }

    fn lose_slot(group: &mut Group, slot: usize) {
        group.lease(slot, RolloutId(slot as u64));
        assert!(!group.fail(slot, RolloutId(slot as u64), 0));
        group.give_up(slot);
    }

    #[test]
    fn it_is_hopeless_once_too_few_slots_are_left() {
        let mut group = group(4);
        lose_slot(&mut group, 0);
        assert!(group.is_hopeless(4) && !group.is_hopeless(3));
        lose_slot(&mut group, 2);
        assert!(group.is_hopeless(3) && !group.is_hopeless(2));
        assert_eq!(group.queued().collect::<Vec<_>>(), [1, 3]);
        assert!(!group.is_complete(2), "two slots are still to be filled");
    }

    #[test]
    fn refilling_has_an_end_and_dropping_refills_nothing() {
        let mut group = group(2);
        let mut refilled = 0;
        loop {
            group.lease(0, RolloutId(7));
            if !group.stale(0, RolloutId(7), OnCancel::Refill) {
                break;
            }
            refilled += 1;
        }
        assert_eq!(refilled, MAX_REFILLS);
        group.lease(1, RolloutId(8));
        assert!(!group.stale(1, RolloutId(8), OnCancel::Drop));
    }
}
