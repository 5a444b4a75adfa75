//! What may start now: the rules of [`crate::admission`], asked of the core's state.

use super::{Core, Site};
use crate::admission::{evaluation_limit, groups_allowed};
use crate::ids::*;

impl Core {
    /// Most rollouts that may be in flight.
    pub(super) fn in_flight_limit(&self) -> usize {
        let most = self.config.max_in_flight();
        match self.config.without_engines {
            true => most,
            false => most.min(self.limits.allowed()),
        }
    }

    /// Whether another rollout of an evaluation may start.
    pub(super) fn evaluation_has_room(&self) -> bool {
        let limit = self.in_flight_limit();
        let own = match self.may_train() {
            true => evaluation_limit(&self.config.admission, limit),
            false => limit,
        };
        self.rollouts.len() < limit && self.in_flight_evaluation < own
    }

    /// Whether another training rollout may start: evaluations keep what they have, and their share while one of their
    /// workers waits.
    pub(super) fn training_has_room(&self) -> bool {
        let limit = self.in_flight_limit();
        let training = self.rollouts.len() - self.in_flight_evaluation;
        let kept = match self.evaluation_waits() {
            true => evaluation_limit(&self.config.admission, limit),
            false => 0,
        };
        training + kept.max(self.in_flight_evaluation) < limit
    }

    fn evaluation_waits(&self) -> bool {
        self.round.as_ref().is_some_and(|round| {
            round.environments.iter().any(|(environment, progress)| {
                !progress.queue.is_empty()
                    && !self.sites[environment.0 as usize].requests.is_empty()
            })
        })
    }

    /// Whether a training rollout could start if there were room for it, and somebody is there to run it.
    fn may_train(&self) -> bool {
        let may_begin = self.curriculum.missing().is_none() && self.may_begin_group();
        self.config.environment_ids().any(|(id, _)| {
            let site = &self.sites[id.0 as usize];
            self.is_training(id) && site.workers > 0 && (may_begin || !site.queue.is_empty())
        })
    }

    pub(super) fn may_begin_group(&self) -> bool {
        let allowed = groups_allowed(&self.config, self.ledger.newest_proved(), self.next_step);
        self.groups_under_way() < allowed
    }

    /// Groups begun, not cut and not set aside.
    pub(super) fn groups_under_way(&self) -> usize {
        self.groups.len() - self.groups_set_aside()
    }

    pub(super) fn groups_set_aside(&self) -> usize {
        self.sites.iter().map(|site| site.set_aside.len()).sum()
    }
}

impl Site {
    /// The request that has waited longest.
    pub(super) fn first_request(&self) -> Option<RequestId> {
        self.requests.first_key_value().map(|(_, request)| *request)
    }
}
