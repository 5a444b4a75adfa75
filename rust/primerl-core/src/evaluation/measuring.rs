//! Rollouts of the evaluation under way: how they end, and when they count.

use super::{Attempt, Held, Progress};
use crate::Core;
use crate::counters::{CancelReason, Ended};
use crate::event::Outcome;
use crate::failure::{ErrorKind, PROMPT_TOO_LONG, RolloutError};
use crate::ids::*;
use crate::rollout::Rollout;

impl Core {
    pub(crate) fn evaluation_rollout_finished(&mut self, rollout: Box<Rollout>, outcome: &Outcome) {
        let score = match rollout.score(outcome) {
            Ok(score) => score,
            Err(error) => return self.fail(rollout, &error),
        };
        let environment = rollout.environment;
        let whole = self.environments[environment].whole_groups;
        let Some(progress) = self.evaluations.progress_mut(environment) else {
            rollout.end(Ended::Evaluated, &mut self.tally.counters);
            return;
        };
        progress.in_flight.remove(&rollout.id);
        if whole {
            let (group, example) = (rollout.group, rollout.example);
            let held = progress.held.entry(group).or_default();
            held.scored.push((rollout, score));
            return self.count_whole_group(environment, group, example);
        }
        progress.score(rollout.example, score);
        rollout.end(Ended::Evaluated, &mut self.tally.counters);
        self.postpone_round();
    }

    /// Counts what is held of a group, once all of it has ended.
    fn count_whole_group(
        &mut self,
        environment: EnvironmentId,
        group: GroupId,
        example: ExampleIndex,
    ) {
        let size = self.config.rollouts_per_group(environment);
        let Some(progress) = self.evaluations.progress_mut(environment) else {
            return;
        };
        if progress.held.get(&group).map(Held::ended) != Some(size) {
            return;
        }
        let Held { scored, failed } = progress.held.remove(&group).unwrap_or_default();
        let (ended, scores): (Vec<_>, Vec<_>) = scored.into_iter().unzip();
        progress.end_group(group, example, size, scores, failed);
        if !ended.is_empty() {
            self.postpone_round();
        }
        for rollout in ended {
            rollout.end(Ended::Evaluated, &mut self.tally.counters);
        }
    }

    /// Queues a group that is run whole once more, as this attempt says.
    fn restart_evaluation_group(
        &mut self,
        environment: EnvironmentId,
        attempt: Attempt,
        reason: CancelReason,
    ) {
        let size = self.config.rollouts_per_group(environment);
        let Some(progress) = self.evaluations.progress_mut(environment) else {
            return;
        };
        let (siblings, held) = progress.restart(attempt, size);
        self.tally.discards.groups_restarted += 1;
        for sibling in siblings {
            let rollout = self.cancel(sibling, reason);
            rollout.end(Ended::Cancelled, &mut self.tally.counters);
        }
        self.void_held(held.unwrap_or_default());
    }

    pub(crate) fn evaluation_rollout_failed(
        &mut self,
        rollout: Box<Rollout>,
        error: &RolloutError,
    ) {
        let (id, environment, example) = (rollout.id, rollout.environment, rollout.example);
        rollout.end(Ended::Failed, &mut self.tally.counters);
        let whole = self.environments[environment].whole_groups;
        let Some(progress) = self.evaluations.progress_mut(environment) else {
            return;
        };
        let Some(attempt) = progress.in_flight.remove(&id) else {
            return;
        };
        // Another try would end as this one did.
        let is_final = error.kind == PROMPT_TOO_LONG;
        let again = Progress::after_failure(attempt).filter(|_| !is_final);
        match (again, whole) {
            (Some(again), false) => return progress.queue.push_front(again),
            (Some(again), true) => {
                let reason = CancelReason::GroupRestarted;
                return self.restart_evaluation_group(environment, again, reason);
            }
            (None, false) => progress.fail(attempt, ErrorKind::of(error)),
            (None, true) => {
                let held = progress.held.entry(attempt.group).or_default();
                held.failed.push(ErrorKind::of(error));
                self.count_whole_group(environment, attempt.group, example);
            }
        }
        let name = self.name(environment).to_owned();
        let RolloutError { kind, message, .. } = error;
        let often = if is_final { "" } else { " twice, last" };
        self.warn(format!(
            "evaluation of example {example} of {name:?} failed{often} with {kind}: {message}"
        ));
    }

    pub(crate) fn give_back_evaluation(&mut self, rollout: Box<Rollout>) {
        let environment = rollout.environment;
        let whole = self.environments[environment].whole_groups;
        let id = rollout.id;
        rollout.end(Ended::Cancelled, &mut self.tally.counters);
        let Some(progress) = self.evaluations.progress_mut(environment) else {
            return;
        };
        let Some(attempt) = progress.in_flight.remove(&id) else {
            return;
        };
        match whole {
            true => self.restart_evaluation_group(environment, attempt, CancelReason::WorkerLost),
            false => progress.queue.push_front(attempt),
        }
    }
}
