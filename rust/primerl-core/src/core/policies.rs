//! Which weights engines load, and when a version is evaluated.

use super::Core;
use crate::config::{Evaluation, Role};
use crate::counters::{Ended, VoidReason};
use crate::deadlines::Due;
use crate::effect::{CancelReason, Effect};
use crate::evaluation::{Attempt, Held, Progress, Round};
use crate::event::{Outcome, RolloutError};
use crate::failure::ErrorKind;
use crate::ids::*;
use crate::rollout::Rollout;
use std::collections::BTreeSet;

impl Core {
    pub(super) fn update_engines(&mut self) {
        if self.round.is_none() {
            let (config, evaluated) = (&self.config, self.evaluated);
            self.ledger.advance(|version| {
                Some(version) > evaluated && due_environments(config, version).next().is_some()
            });
        }
        for update in self.ledger.updates() {
            self.effects.push(Effect::UpdateEngine {
                engine: update.engine,
                version: update.version,
                manifest: update.published.manifest,
                digest: update.published.digest,
            });
        }
    }

    pub(super) fn is_evaluation_due(&self, version: PolicyVersion) -> bool {
        Some(version) > self.evaluated && due_environments(&self.config, version).next().is_some()
    }

    /// Begins a round once the version engines are to have is proved and due; fills it; ends it.
    ///
    /// A trainer that went back to a checkpoint may leave the weights of later versions for others: rounds of these
    /// begin, and are reported, when it has come by them again.
    pub(super) fn evaluate(&mut self) {
        if let (None, Some(version)) = (&self.round, self.ledger.measurable())
            && self.is_evaluation_due(version)
            && self.ledger.is_of_this_trainer(version)
        {
            let environments: BTreeSet<EnvironmentId> =
                due_environments(&self.config, version).collect();
            let deadline = self.now + self.config.timeouts.evaluation;
            self.deadlines.set(deadline, Due::Evaluation);
            self.round = Some(Round::new(version, environments, self.now, deadline));
        }
        self.fill_round();
        let is_done =
            |round: &Round| round.is_over() && self.ledger.is_of_this_trainer(round.version);
        if self.round.as_ref().is_some_and(is_done) {
            self.report_round();
            self.close_round(CancelReason::Timeout);
        }
    }

    fn fill_round(&mut self) {
        let Some(mut round) = self.round.take() else {
            return;
        };
        for (environment, progress) in &mut round.environments {
            let Some(listed) = self.sites[environment.0 as usize].examples else {
                continue;
            };
            let Role::Evaluate(evaluation) = &self.config.environment(*environment).role else {
                continue;
            };
            if progress.total.is_none() {
                let wanted = evaluation.num_examples.unwrap_or(listed);
                let examples = wanted.min(listed);
                let rollouts_per_example = evaluation.rollouts_per_example;
                if wanted > listed {
                    let name = self.name(*environment).to_owned();
                    self.warn(format!(
                        "environment {name:?} has {listed} examples, num_examples = {wanted}: all of them are evaluated"
                    ));
                }
                let first_group = self.new_groups(examples);
                progress.fill(examples, rollouts_per_example, first_group);
            }
        }
        self.round = Some(round);
    }

    fn report_round(&mut self) {
        let Some(round) = &self.round else { return };
        let version = round.version;
        let (mut reports, mut unreported) = (Vec::new(), Vec::new());
        for (environment, progress) in &round.environments {
            match progress.report(*environment, version) {
                Some(report) => reports.push(Effect::Evaluated(report)),
                None => unreported.push(*environment),
            }
        }
        self.effects.append(&mut reports);
        for environment in unreported {
            let name = self.name(environment).to_owned();
            self.warn(format!(
                "the evaluation of environment {name:?} at version {version} has no result"
            ));
        }
    }

    /// Ends the round, if there is one: what is still in flight is cancelled, and engines may move on.
    pub(super) fn close_round(&mut self, reason: CancelReason) {
        if let Some(version) = self.drop_round(reason) {
            self.evaluated = Some(version);
        }
    }

    /// Other weights take the place of those that are measured: all of it is measured anew.
    pub(super) fn evaluate_anew(&mut self, version: PolicyVersion) {
        if self
            .round
            .as_ref()
            .is_some_and(|round| round.version == version)
        {
            self.warn(format!(
                "the evaluation of version {version} begins anew, with the weights that the run has now"
            ));
            self.drop_round(CancelReason::WeightsReplaced);
        }
    }

    /// As [`Core::close_round`], but its version is still to be evaluated, if it is due. Returns the version.
    fn drop_round(&mut self, reason: CancelReason) -> Option<PolicyVersion> {
        let round = self.round.take()?;
        self.deadlines.clear(round.deadline, Due::Evaluation);
        for rollout in round
            .environments
            .values()
            .flat_map(|progress| progress.in_flight.keys())
        {
            let rollout = self.cancel(*rollout, reason);
            rollout.end(Ended::Cancelled, &mut self.counters);
        }
        let held = round
            .environments
            .into_values()
            .flat_map(|progress| progress.held);
        held.for_each(|(_, held)| self.void_held(held));
        Some(round.version)
    }

    /// Ends rollouts that were reported, of a group that did not end.
    fn void_held(&mut self, held: Held) {
        for (rollout, _) in held.scored {
            self.void(rollout, VoidReason::GroupIncomplete);
        }
    }

    pub(super) fn evaluation_timed_out(&mut self) {
        let Some(round) = &self.round else { return };
        let (version, is_over) = (round.version, round.is_over());
        let seconds = self.config.timeouts.evaluation.as_secs_f64();
        if !self.ledger.is_of_this_trainer(version) {
            if is_over {
                return self.wait_for_trainer();
            }
            let at = self.ledger.newest_trained();
            self.warn(format!(
                "the evaluation of version {version} was given up after {seconds} s: the trainer went back, and is at \
                 version {at}; it begins anew when the trainer has published version {version} again"
            ));
            self.drop_round(CancelReason::Timeout);
            return;
        }
        let late: Vec<String> = round
            .environments
            .iter()
            .filter(|(_, progress)| !progress.is_over())
            .map(|(environment, progress)| match progress.total {
                Some(total) => format!(
                    "{:?} ({} of {total} rollouts)",
                    self.name(*environment),
                    progress.ended()
                ),
                None => format!(
                    "{:?} (no worker listed its examples)",
                    self.name(*environment)
                ),
            })
            .collect();
        self.warn(format!(
            "the evaluation of version {version} was closed after {seconds} s with what it has: {} did not end",
            late.join(", ")
        ));
        self.report_round();
        self.close_round(CancelReason::Timeout);
    }

    /// Nothing is left to be measured, and what was found is kept: the trainer's next publication ends the round.
    fn wait_for_trainer(&mut self) {
        let deadline = self.now + self.config.timeouts.evaluation;
        if let Some(round) = &mut self.round {
            round.deadline = deadline;
            self.deadlines.set(deadline, Due::Evaluation);
        }
    }

    pub(super) fn evaluation_rollout_finished(&mut self, rollout: Box<Rollout>, outcome: &Outcome) {
        let score = match rollout.score(outcome) {
            Ok(score) => score,
            Err(error) => return self.fail(rollout, &error),
        };
        let environment = rollout.environment;
        let whole = self.sites[environment.0 as usize].whole_groups;
        let Some(progress) = self.evaluating(environment) else {
            rollout.end(Ended::Evaluated, &mut self.counters);
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
        rollout.end(Ended::Evaluated, &mut self.counters);
    }

    /// Counts what is held of a group, once all of it has ended.
    fn count_whole_group(
        &mut self,
        environment: EnvironmentId,
        group: GroupId,
        example: ExampleIndex,
    ) {
        let size = self.config.rollouts_per_group(environment);
        let Some(progress) = self.evaluating(environment) else {
            return;
        };
        if progress.held.get(&group).map(Held::ended) != Some(size) {
            return;
        }
        let Held { scored, failed } = progress.held.remove(&group).unwrap_or_default();
        failed
            .into_iter()
            .for_each(|kind| progress.fail(example, kind));
        let mut ended = Vec::with_capacity(scored.len());
        for (rollout, score) in scored {
            progress.score(example, score);
            ended.push(rollout);
        }
        for rollout in ended {
            rollout.end(Ended::Evaluated, &mut self.counters);
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
        let Some(progress) = self.evaluating(environment) else {
            return;
        };
        let (siblings, held) = progress.restart(attempt, size);
        self.losses.groups_restarted += 1;
        for sibling in siblings {
            let rollout = self.cancel(sibling, reason);
            rollout.end(Ended::Cancelled, &mut self.counters);
        }
        self.void_held(held.unwrap_or_default());
    }

    pub(super) fn evaluation_rollout_failed(
        &mut self,
        rollout: Box<Rollout>,
        error: &RolloutError,
    ) {
        let (id, environment, example) = (rollout.id, rollout.environment, rollout.example);
        rollout.end(Ended::Failed, &mut self.counters);
        let whole = self.sites[environment.0 as usize].whole_groups;
        let Some(progress) = self.evaluating(environment) else {
            return;
        };
        let Some(attempt) = progress.in_flight.remove(&id) else {
            return;
        };
        match (Progress::after_failure(attempt), whole) {
            (Some(again), false) => return progress.queue.push_front(again),
            (Some(again), true) => {
                let reason = CancelReason::GroupRestarted;
                return self.restart_evaluation_group(environment, again, reason);
            }
            (None, false) => progress.fail(example, ErrorKind::of(error)),
            (None, true) => {
                let held = progress.held.entry(attempt.group).or_default();
                held.failed.push(ErrorKind::of(error));
                self.count_whole_group(environment, attempt.group, example);
            }
        }
        let name = self.name(environment).to_owned();
        let RolloutError { kind, message, .. } = error;
        self.warn(format!(
            "evaluation of example {example} of {name:?} failed twice, last with {kind}: {message}"
        ));
    }

    pub(super) fn give_back_evaluation(&mut self, rollout: Box<Rollout>) {
        let environment = rollout.environment;
        let whole = self.sites[environment.0 as usize].whole_groups;
        let id = rollout.id;
        rollout.end(Ended::Cancelled, &mut self.counters);
        let Some(progress) = self.evaluating(environment) else {
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

fn due_environments(
    config: &crate::Config,
    version: PolicyVersion,
) -> impl Iterator<Item = EnvironmentId> {
    let is_due = move |evaluation: &Evaluation| evaluation.is_due(version, config.max_steps);
    config
        .environment_ids()
        .filter_map(move |(id, environment)| match &environment.role {
            Role::Evaluate(evaluation) if is_due(evaluation) => Some(id),
            _ => None,
        })
}
