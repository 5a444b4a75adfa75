//! What must hold after every event. Run in debug builds, and by the simulation.

use super::Core;
use crate::admission::groups_allowed;
use crate::group::{Group, Slot};
use crate::ids::*;
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
        for (id, group) in &self.groups {
            self.check_group(*id, group)?;
        }
        self.check_rollouts()?;
        ensure!(
            self.finished.is_none()
                || (self.rollouts.is_empty()
                    && self.groups.is_empty()
                    && self.computing.is_empty()),
            "the run is over, but work is left"
        );
        Ok(())
    }

    /// Every dispatched rollout is in flight, finished and uncut, or ended in exactly one way.
    fn check_counters(&self) -> Result<(), String> {
        let accounted =
            self.rollouts.len() as u64 + self.finished_rollouts() as u64 + self.counters.ended();
        let dispatched = self.counters.dispatched;
        ensure!(
            dispatched == accounted,
            "{dispatched} rollouts were dispatched, {accounted} are accounted for"
        );
        let evaluating = self
            .rollouts
            .values()
            .filter(|rollout| rollout.evaluates.is_some())
            .count();
        ensure!(
            evaluating == self.in_flight_evaluation,
            "the number of evaluation rollouts in flight is wrong"
        );
        Ok(())
    }

    fn check_limits(&self) -> Result<(), String> {
        let limit = self.config.max_in_flight();
        let training = self.rollouts.len() - self.in_flight_evaluation;
        ensure!(
            training <= limit,
            "{training} training rollouts are in flight, {limit} are allowed"
        );
        ensure!(
            self.in_flight_evaluation <= limit,
            "more evaluation rollouts are in flight than {limit}"
        );
        let allowed = groups_allowed(&self.config, self.ledger.newest_proved(), self.next_step);
        let live = self.groups.len();
        ensure!(
            live <= allowed,
            "{live} groups are under way, {allowed} are allowed"
        );
        Ok(())
    }

    fn check_group(&self, id: GroupId, group: &Group) -> Result<(), String> {
        let queue = &self.sites[group.environment.0 as usize].queue;
        for (index, slot) in group.slots.iter().enumerate() {
            let queued = queue.iter().filter(|entry| **entry == (id, index)).count();
            let wanted = usize::from(matches!(slot, Slot::Queued));
            ensure!(
                queued == wanted,
                "slot {index} of group {id} is queued {queued} times instead of {wanted}"
            );
            if let Slot::InFlight(rollout) = slot {
                let known = self
                    .rollouts
                    .get(rollout)
                    .is_some_and(|rollout| rollout.group == id && rollout.slot == index);
                ensure!(known, "rollout {rollout} of group {id} is not in flight");
            }
        }
        let ready = self.ready.iter().filter(|ready| **ready == id).count()
            + usize::from(self.computing.contains_key(&id));
        ensure!(
            ready == usize::from(group.is_complete()),
            "group {id} is {ready} times among those that are ready or wait for their advantages"
        );
        Ok(())
    }

    fn check_rollouts(&self) -> Result<(), String> {
        for (id, rollout) in &self.rollouts {
            let worker = self.workers.get(&rollout.worker);
            ensure!(
                worker.is_some_and(|worker| worker.running.contains(id)),
                "rollout {id} runs on no worker"
            );
            let owned = match (rollout.evaluates, &self.round) {
                (None, _) => self.groups.contains_key(&rollout.group),
                (Some(_), None) => false,
                (Some(version), Some(round)) => {
                    let progress = round.environments.get(&rollout.environment);
                    round.version == version
                        && progress.is_some_and(|progress| progress.in_flight.contains_key(id))
                }
            };
            ensure!(owned, "rollout {id} belongs to no group and no evaluation");
        }
        let running: usize = self
            .workers
            .values()
            .map(|worker| worker.running.len())
            .sum();
        ensure!(
            running == self.rollouts.len(),
            "workers run {running} rollouts, {} are in flight",
            self.rollouts.len()
        );
        let queued: BTreeSet<GroupId> = self
            .sites
            .iter()
            .flat_map(|site| &site.queue)
            .map(|entry| entry.0)
            .collect();
        ensure!(
            queued.iter().all(|id| self.groups.contains_key(id)),
            "a queue holds slots of a group that is gone"
        );
        Ok(())
    }
}
