//! The story as a whole: copied, asked, and checked at its end.

use super::Observer;
use crate::config::Role;
use crate::ids::*;

impl Observer {
    /// A copy that knows of no tokens: engines have sampled them, whatever becomes of the orchestrator.
    pub fn without_tokens(&mut self) -> Observer {
        let sampled = std::mem::take(&mut self.sampled);
        let copy = self.clone();
        self.sampled = sampled;
        copy
    }

    pub fn is_leased(&self, rollout: RolloutId) -> bool {
        self.leased.contains_key(&rollout)
    }

    pub fn is_closed(&self, rollout: RolloutId) -> bool {
        let leased = self.leased.get(&rollout);
        leased.is_some_and(|leased| leased.closed)
    }

    /// Evaluations that the config asks for, in a run that went to its end: all are reported, once, in order.
    pub fn check_evaluations(&self) {
        for (id, environment) in self.config.environment_ids() {
            let Role::Evaluate(evaluation) = &environment.role else {
                continue;
            };
            let versions: Vec<u64> = self
                .evaluations
                .iter()
                .filter(|report| report.environment == id)
                .map(|report| report.version.0)
                .collect();
            let due = |version: &u64| {
                *version == self.config.run.max_steps
                    || (*version == 0 && evaluation.base_model)
                    || (*version > 0
                        && evaluation
                            .interval
                            .is_some_and(|interval| version.is_multiple_of(interval)))
            };
            assert_eq!(
                versions,
                (0..=self.config.run.max_steps)
                    .filter(due)
                    .collect::<Vec<_>>()
            );
        }
    }

    /// Every rollout that was leased is closed.
    pub fn check_all_closed(&self) {
        for (id, leased) in &self.leased {
            assert!(leased.closed, "rollout {id} was never closed");
        }
    }
}
