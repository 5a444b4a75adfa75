//! What a batch or a lease waits for.

use super::Wait;
use crate::Core;
use crate::admission::last_step;
use crate::ids::*;

impl Core {
    /// Why no rollout can be leased to a worker of this environment.
    pub(crate) fn lease_wait(&self, environment: EnvironmentId) -> Wait {
        let together = self.leased_together(environment);
        if !self.is_training(environment) {
            return match &self.evaluations.round {
                Some(_) if !self.evaluation_has_room(together) => Wait::Room,
                Some(round) => Wait::HandedOut(round.version),
                None => self.evaluation_wait(),
            };
        }
        if self.all_steps_cut() {
            Wait::AllCut
        } else if let Some(wait) = self.training_wait() {
            wait
        } else if self.why_it_rests(environment).is_some() {
            Wait::Rest(environment)
        } else if !self.may_train_a_step() {
            Wait::NextVersion
        } else if !self.training_has_room(together) {
            Wait::Room
        } else if !self.may_begin_group() {
            Wait::NextVersion
        } else {
            Wait::OtherEnvironments
        }
    }

    fn evaluation_wait(&self) -> Wait {
        let wanted = self.ledger.wanted();
        let left = wanted.filter(|version| !self.ledger.is_of_this_trainer(*version));
        match left.filter(|version| self.is_evaluation_due(*version)) {
            Some(version) => Wait::Republication(version),
            None => Wait::NoEvaluation,
        }
    }

    /// What the batch of `step`, which is not cut yet, waits for.
    pub(crate) fn step_wait(&self, step: Step) -> Wait {
        if let Some(wait) = self.training_wait() {
            wait
        } else if self.is_ahead(step) {
            Wait::Proof(self.needed_for(step))
        } else {
            Wait::Groups
        }
    }

    /// What keeps all of training from starting.
    fn training_wait(&self) -> Option<Wait> {
        if self.ledger.newest_proved().is_none() {
            return Some(match self.ledger.newest_published() {
                None => Wait::FirstWeights,
                Some(version) => Wait::Proof(version),
            });
        }
        self.curriculum.missing().map(Wait::Examples)
    }

    /// Whether no rollouts may be generated for `step` yet.
    pub(super) fn is_ahead(&self, step: Step) -> bool {
        last_step(&self.config, self.ledger.newest_proved()) < Some(step)
    }

    /// The version that has to be proved before rollouts may be generated for `step`.
    fn needed_for(&self, step: Step) -> PolicyVersion {
        PolicyVersion(step.0.saturating_sub(1 + self.config.run.max_async_level))
    }
}
