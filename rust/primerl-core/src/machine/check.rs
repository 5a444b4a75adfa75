//! What must hold after every event. Run in debug builds, and by the simulation.

use crate::Core;
use crate::group::{Group, Slot};
use crate::ids::*;
use crate::policy::oldest_trainable;
use crate::rollout::Rollout;
use std::collections::BTreeSet;

macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(format!($($message)*));
        }
    };
}

impl Core {
    /// # Errors
    /// The first invariant found broken, in words.
    pub fn check(&self) -> Result<(), String> {
        self.check_counters()?;
        self.check_limits()?;
        for (id, group) in &self.groups.live {
            self.check_group(*id, group)?;
        }
        self.check_rollouts()?;
        self.curriculum.check(&self.config)?;
        self.check_ages()?;
        ensure!(
            self.ending.finished.is_none()
                || (self.rollouts.in_flight.is_empty()
                    && self.groups.live.is_empty()
                    && self.signals.custom.is_empty()
                    && self.signals.teacher.is_empty()),
            "the run is over, but work is left"
        );
        Ok(())
    }

    /// Settling once more changes nothing (but what dispatching does at each event). In debug builds, where it was spared.
    #[cfg(debug_assertions)]
    pub(crate) fn assert_settled(&mut self) {
        let readings = |core: &Core| {
            let updating = |engine: &&crate::policy::Engine| engine.updating.is_some();
            (
                (
                    core.effects.len(),
                    core.next_step,
                    core.ending.finished.is_some(),
                ),
                (
                    core.ledger.wanted(),
                    core.evaluations.evaluated,
                    core.evaluations.round.is_some(),
                ),
                core.ledger.engines().values().filter(updating).count(),
                core.batches.requests.len(),
                core.waits.iter().map(|(key, _)| *key).collect::<Vec<_>>(),
            )
        };
        let before = readings(self);
        assert!(self.ending.hopeless.is_none(), "the run is over");
        self.advance();
        self.answer_batch_requests();
        self.refresh_waits();
        assert_eq!(readings(self), before, "an event was not only noted");
    }

    /// Every dispatched rollout is in flight, finished and uncut, or ended in exactly one way.
    fn check_counters(&self) -> Result<(), String> {
        let accounted = self.rollouts.in_flight.len() as u64
            + self.finished_rollouts() as u64
            + self.tally.counters.ended();
        let dispatched = self.tally.counters.dispatched;
        ensure!(
            dispatched == accounted,
            "{dispatched} rollouts were dispatched, {accounted} are accounted for"
        );
        let evaluating = self
            .rollouts
            .in_flight
            .values()
            .filter(|rollout| rollout.evaluates.is_some())
            .count();
        ensure!(
            evaluating == self.rollouts.evaluating,
            "the number of evaluation rollouts in flight is wrong"
        );
        Ok(())
    }

    fn check_limits(&self) -> Result<(), String> {
        let (in_flight, limit) = (self.rollouts.in_flight.len(), self.config.max_in_flight());
        ensure!(
            in_flight <= limit,
            "{in_flight} rollouts are in flight, {limit} are allowed"
        );
        let (allowed, begun) = (self.allowed(), self.begun());
        let last = self.config.largest_group().max(1) as u64;
        // How many tokens they will have is an estimate.
        ensure!(
            self.config.run.token_batch_size.is_some() || begun < allowed + last,
            "groups of {begun} rollouts are under way, {allowed} are allowed"
        );
        ensure!(
            self.groups.sums() == self.groups.counted(),
            "the rollouts of groups are counted wrongly"
        );
        Ok(())
    }

    fn check_group(&self, id: GroupId, group: &Group) -> Result<(), String> {
        let waits = !self.environments[group.environment].set_aside.contains(&id);
        for (index, slot) in group.slots.iter().enumerate() {
            self.check_slot((id, index), slot, waits, group.environment)?;
        }
        let count = |is: fn(&Slot) -> bool| group.slots.iter().filter(|slot| is(slot)).count();
        let finished = count(|slot| matches!(slot, Slot::Finished(_)));
        let lost = count(|slot| matches!(slot, Slot::Lost));
        let in_flight = count(|slot| matches!(slot, Slot::InFlight(_)));
        let counted = (
            group.finished_count(),
            group.lost_count(),
            group.in_flight_count(),
        );
        ensure!(
            counted == (finished, lost, in_flight) && (waits || in_flight == 0),
            "group {id} counts {counted:?} finished, lost, in flight"
        );
        let min_size = self.config.min_group_size(group.environment);
        ensure!(
            !group.is_hopeless(min_size),
            "group {id} has lost too many slots and was not dropped"
        );
        self.check_place(id, group)
    }

    /// A slot is queued or in flight where it says so. A group that does not wait was set aside.
    fn check_slot(
        &self,
        (id, index): (GroupId, usize),
        slot: &Slot,
        waits: bool,
        environment: EnvironmentId,
    ) -> Result<(), String> {
        let queued = self.environments[environment].queue.contains(&(id, index));
        let wanted = waits && matches!(slot, Slot::Queued);
        ensure!(
            queued == wanted,
            "slot {index} of group {id} is queued: {queued}, instead of {wanted}"
        );
        if let Slot::InFlight(rollout) = slot {
            let known = self.rollouts.in_flight.get(rollout);
            ensure!(
                known.is_some_and(|rollout| rollout.group == id && rollout.slot == index),
                "rollout {rollout} of group {id} is not in flight"
            );
        }
        Ok(())
    }

    /// A complete group is in one place, any other in none.
    fn check_place(&self, id: GroupId, group: &Group) -> Result<(), String> {
        let min_size = self.config.min_group_size(group.environment);
        let ready = group
            .ready_since
            .is_some_and(|since| self.groups.ready.contains(&(since, id)));
        let computing = self.signals.custom.contains_key(&id);
        let scoring = self.signals.teacher.contains_key(&id);
        ensure!(
            u8::from(ready) + u8::from(computing) + u8::from(scoring)
                == u8::from(group.is_complete(min_size)),
            "group {id} is among the ready ones: {ready}, those that wait for their advantages: {computing}, and for \
             their teacher: {scoring}"
        );
        Ok(())
    }

    /// The index by age has every training rollout that has sampled, and none is too old for the next step.
    fn check_ages(&self) -> Result<(), String> {
        let mut aged = 0;
        for (oldest, rollout) in self.sampled() {
            aged += 1;
            ensure!(
                self.rollouts.by_age.get(&(oldest, rollout.id))
                    == Some(&(rollout.group, rollout.slot)),
                "rollout {} is not in the index by age",
                rollout.id
            );
        }
        ensure!(
            aged == self.rollouts.by_age.len(),
            "the index by age has rollouts that are over"
        );
        let trainable = oldest_trainable(self.next_step, self.config.run.max_off_policy_steps);
        ensure!(
            self.rollouts
                .by_age
                .first_key_value()
                .is_none_or(|((oldest, _), _)| *oldest >= trainable),
            "a rollout is too old for the next step, and was not discarded"
        );
        Ok(())
    }

    /// Training rollouts that have sampled, each with its oldest version.
    fn sampled(&self) -> impl Iterator<Item = (PolicyVersion, &Rollout)> {
        let in_flight = self.rollouts.in_flight.values().map(|rollout| &**rollout);
        let trained = in_flight.filter(|rollout| rollout.evaluates.is_none());
        let finished = self.groups.live.values().flat_map(Group::finished);
        let all = trained.chain(finished);
        all.filter_map(|rollout| Some((rollout.oldest()?, rollout)))
    }

    fn check_rollouts(&self) -> Result<(), String> {
        for (id, rollout) in &self.rollouts.in_flight {
            let worker = self.workers.registered.get(&rollout.worker);
            ensure!(
                worker.is_some_and(|worker| worker.running.contains(id)),
                "rollout {id} runs on no worker"
            );
            ensure!(
                self.is_owned(rollout),
                "rollout {id} belongs to no group and no evaluation"
            );
        }
        let workers = self.workers.registered.values();
        let running: usize = workers.map(|worker| worker.running.len()).sum();
        ensure!(
            running == self.rollouts.in_flight.len(),
            "workers run {running} rollouts, {} are in flight",
            self.rollouts.in_flight.len()
        );
        let queues = self.environments.iter().map(|state| &state.queue);
        let queued: BTreeSet<GroupId> = queues.flatten().map(|entry| entry.0).collect();
        ensure!(
            queued.iter().all(|id| self.groups.live.contains_key(id)),
            "a queue holds slots of a group that is gone"
        );
        Ok(())
    }

    /// Whether its group, or the evaluation under way, has it.
    fn is_owned(&self, rollout: &Rollout) -> bool {
        match (rollout.evaluates, &self.evaluations.round) {
            (None, _) => self.groups.live.contains_key(&rollout.group),
            (Some(_), None) => false,
            (Some(version), Some(round)) => {
                let progress = round.environments.get(&rollout.environment);
                let in_flight = progress.map(|progress| &progress.in_flight);
                round.version == version
                    && in_flight.is_some_and(|known| known.contains_key(&rollout.id))
            }
        }
    }
}
