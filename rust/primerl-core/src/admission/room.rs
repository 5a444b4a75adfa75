//! What may start now: the rules of [`crate::admission`], asked of the core's state.

use crate::Core;
use crate::admission::{allowed, evaluation_limit, last_step};
use crate::ids::*;

impl Core {
    /// Most rollouts that may be in flight.
    pub(crate) fn in_flight_limit(&self) -> usize {
        let most = self.config.max_in_flight();
        match self.config.without_engines {
            true => most,
            false => most.min(self.limits.allowed()),
        }
    }

    /// Rollouts of an environment that are leased only together.
    pub(crate) fn leased_together(&self, environment: EnvironmentId) -> usize {
        match self.environments[environment].whole_groups {
            true => self.config.rollouts_per_group(environment),
            false => 1,
        }
    }

    /// Whether `size` more fit in addition to those in flight. A group that is larger than the limit runs alone.
    fn fits(&self, in_flight: usize, size: usize, limit: usize) -> bool {
        limit > 0 && in_flight + size <= limit.max(size) && size <= self.config.max_in_flight()
    }

    /// Whether so many more rollouts of an evaluation may start.
    pub(crate) fn evaluation_has_room(&self, size: usize) -> bool {
        let limit = self.in_flight_limit();
        let own = match self.may_train() {
            true => evaluation_limit(&self.config.run.admission, limit),
            false => limit,
        };
        self.fits(self.rollouts.in_flight.len(), size, limit)
            && self.fits(self.rollouts.evaluating, size, own)
    }

    /// Whether so many more training rollouts may start: evaluations keep what they have, and their share while one of
    /// their workers waits.
    pub(crate) fn training_has_room(&self, size: usize) -> bool {
        if !self.may_train_a_step() {
            return false;
        }
        let limit = self.in_flight_limit();
        let training = self.rollouts.training();
        let kept = match self.evaluation_waits() {
            Some(size) => evaluation_limit(&self.config.run.admission, limit).max(size),
            None => 0,
        };
        self.fits(training + kept.max(self.rollouts.evaluating), size, limit)
    }

    /// The most rollouts that a waiting worker of an evaluation would be leased together.
    fn evaluation_waits(&self) -> Option<usize> {
        let waiting = self.evaluations.environments().filter(|(id, progress)| {
            !progress.queue.is_empty() && !self.environments[*id].requests.is_empty()
        });
        waiting.map(|(id, _)| self.leased_together(id)).max()
    }

    /// Whether a training rollout could start if there were room for it, and a worker is there to run it.
    fn may_train(&self) -> bool {
        if !self.may_train_a_step() {
            return false;
        }
        let may_begin = self.curriculum.missing().is_none() && self.may_begin_group();
        self.training_environments().any(|id| {
            let state = &self.environments[id];
            state.workers > 0 && (may_begin || !state.queue.is_empty())
        })
    }

    /// Whether rollouts that start now may be of the next step. A group that was begun for a step which is full without it
    /// waits.
    pub(crate) fn may_train_a_step(&self) -> bool {
        last_step(&self.config, self.ledger.newest_proved()) >= Some(self.next_step)
    }

    pub(crate) fn may_begin_group(&self) -> bool {
        self.begun() < self.allowed()
    }

    /// For how much groups may be under way: rollouts, or tokens.
    pub(crate) fn allowed(&self) -> u64 {
        allowed(&self.config, self.ledger.newest_proved(), self.next_step)
    }

    /// For how much they are.
    pub(crate) fn begun(&self) -> u64 {
        let complete = self.groups.sums().ready;
        self.ready() + self.measured(self.rollouts_begun() - complete)
    }

    /// So many rollouts that are not complete, or the tokens that they will have.
    pub(crate) fn measured(&self, rollouts: usize) -> u64 {
        match self.config.run.token_batch_size {
            None => rollouts as u64,
            Some(_) => self.groups.usual.of(rollouts, self.config.run.seq_len),
        }
    }

    /// Rollouts of the groups that are begun, not cut and not set aside.
    pub(crate) fn rollouts_begun(&self) -> usize {
        let environments = self.training_environments();
        let set_aside = environments
            .map(|id| self.environments[id].set_aside.len() * self.config.rollouts_per_group(id));
        self.groups.sums().live - set_aside.sum::<usize>()
    }

    pub(crate) fn groups_set_aside(&self) -> usize {
        self.environments
            .iter()
            .map(|state| state.set_aside.len())
            .sum()
    }
}
