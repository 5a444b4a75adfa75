//! Rounds of evaluation: when a version is evaluated, and how its round ends.

use super::{Held, Progress, Round};
use crate::Core;
use crate::config::{Config, Evaluation, Role};
use crate::counters::{CancelReason, Ended, VoidReason};
use crate::deadlines::Due;
use crate::effect::Effect;
use crate::ids::*;
use crate::time::Time;
use std::collections::BTreeSet;

#[derive(Clone, Debug, Default)]
pub(crate) struct Evaluations {
    pub round: Option<Round>,
    /// In a run that only evaluates: its round, when that has ended.
    pub measured: Option<Round>,
    /// Versions up to this one have had their evaluation.
    pub evaluated: Option<PolicyVersion>,
}

impl Evaluations {
    /// How far the evaluation of an environment is, if there is one.
    pub fn progress(&self, environment: EnvironmentId) -> Option<&Progress> {
        self.round.as_ref()?.environments.get(&environment)
    }

    pub fn progress_mut(&mut self, environment: EnvironmentId) -> Option<&mut Progress> {
        self.round.as_mut()?.environments.get_mut(&environment)
    }

    /// Environments of the round, if there is one.
    pub fn environments(&self) -> impl Iterator<Item = (EnvironmentId, &Progress)> {
        let rounds = self.round.iter();
        let all = rounds.flat_map(|round| &round.environments);
        all.map(|(id, progress)| (*id, progress))
    }

    /// Rollouts of the round that ended, and that it has in all as far as is known.
    pub fn ended_of_total(&self) -> (u32, u32) {
        let ended = self.environments().map(|(_, progress)| progress.ended());
        let total = self
            .environments()
            .filter_map(|(_, progress)| progress.total);
        (ended.sum(), total.sum())
    }

    /// Whether the version has not had its evaluation, and one is due.
    pub fn is_due(&self, config: &Config, version: PolicyVersion) -> bool {
        Some(version) > self.evaluated && due_environments(config, version).next().is_some()
    }
}

impl Core {
    pub(crate) fn is_evaluation_due(&self, version: PolicyVersion) -> bool {
        self.evaluations.is_due(&self.config, version)
    }

    /// Begins a round once the version engines are to have is proved and due; fills it; ends it.
    ///
    /// A trainer that went back to a checkpoint may leave the weights of later versions for others: rounds of these
    /// begin, and are reported, when it has come by them again.
    pub(crate) fn evaluate(&mut self) {
        if let (None, Some(version)) = (&self.evaluations.round, self.ledger.measurable())
            && self.is_evaluation_due(version)
            && self.ledger.is_of_this_trainer(version)
        {
            let environments: BTreeSet<EnvironmentId> =
                due_environments(&self.config, version).collect();
            let deadline = self.round_deadline(self.now);
            self.deadlines.set(deadline, Due::Evaluation);
            self.evaluations.round = Some(Round::new(version, environments, self.now, deadline));
        }
        self.fill_round();
        let is_done =
            |round: &Round| round.is_over() && self.ledger.is_of_this_trainer(round.version);
        if self.evaluations.round.as_ref().is_some_and(is_done) {
            self.report_round();
            self.close_round(CancelReason::Timeout);
        }
    }

    /// When a round that began at that time is closed, should nothing be measured from now on. Where training does not wait
    /// for it, nothing has to be.
    fn round_deadline(&self, since: Time) -> Time {
        let timeouts = &self.config.timeouts;
        let last = since + timeouts.evaluation;
        match timeouts.evaluation_progress {
            Some(span) if !self.config.only_evaluates() => last.min(self.now + span),
            _ => last,
        }
    }

    /// Something was measured, or it may take longer than it might before.
    pub(crate) fn postpone_round(&mut self) {
        let Some(since) = self.evaluations.round.as_ref().map(|round| round.since) else {
            return;
        };
        self.set_round_deadline(self.round_deadline(since));
    }

    fn set_round_deadline(&mut self, deadline: Time) {
        if let Some(round) = &mut self.evaluations.round {
            self.deadlines.clear(round.deadline, Due::Evaluation);
            round.deadline = deadline;
            self.deadlines.set(deadline, Due::Evaluation);
        }
    }

    fn fill_round(&mut self) {
        let Some(mut round) = self.evaluations.round.take() else {
            return;
        };
        for (environment, progress) in &mut round.environments {
            let Some(listed) = self.environments[*environment].examples else {
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
                let first_group = self.groups.number(examples);
                progress.fill(examples, rollouts_per_example, first_group);
            }
        }
        self.evaluations.round = Some(round);
    }

    fn report_round(&mut self) {
        let Some(round) = &self.evaluations.round else {
            return;
        };
        let version = round.version;
        let (mut reports, mut unreported) = (Vec::new(), Vec::new());
        for (environment, progress) in &round.environments {
            let Role::Evaluate(evaluation) = &self.config.environment(*environment).role else {
                continue;
            };
            match progress.report(*environment, round, evaluation) {
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
    pub(crate) fn close_round(&mut self, reason: CancelReason) {
        if let Some(round) = self.drop_round(reason) {
            self.evaluations.evaluated = Some(round.version);
            if self.config.only_evaluates() {
                self.evaluations.measured = Some(round);
            }
        }
    }

    /// What a run that only evaluates has measured as failed, or did not come to measure, is to be measured once more.
    pub(crate) fn measure_again(&mut self) {
        if let Some(round) = &mut self.evaluations.round {
            for progress in round.environments.values_mut() {
                progress.measure_failures_again();
            }
            return;
        }
        let Some(mut round) = self.evaluations.measured.take() else {
            return self.warn(
                "the run has no record of its measurements, so nothing is measured again"
                    .to_owned(),
            );
        };
        let mut unfinished = false;
        for progress in round.environments.values_mut() {
            unfinished |= progress.measure_failures_again();
        }
        if !unfinished {
            self.evaluations.measured = Some(round);
            return self.warn("nothing has failed that could be measured again".to_owned());
        }
        round.again += 1;
        round.since = self.now;
        round.deadline = self.round_deadline(self.now);
        self.deadlines.set(round.deadline, Due::Evaluation);
        self.evaluations.round = Some(round);
        self.evaluations.evaluated = None;
        self.ending.finished = None;
        self.ending.failed = false;
    }

    /// Other weights replace those that are measured: the whole evaluation starts over.
    pub(crate) fn evaluate_anew(&mut self, version: PolicyVersion) {
        if self
            .evaluations
            .round
            .as_ref()
            .is_some_and(|round| round.version == version)
        {
            self.warn(format!(
                "the evaluation of version {version} starts over, with the weights that the run has now"
            ));
            self.drop_round(CancelReason::WeightsReplaced);
        }
    }

    /// As [`Core::close_round`], but its version is still to be evaluated, if it is due. Returns the round, with what it
    /// has not measured in its queues.
    fn drop_round(&mut self, reason: CancelReason) -> Option<Round> {
        let mut round = self.evaluations.round.take()?;
        self.deadlines.clear(round.deadline, Due::Evaluation);
        for (environment, progress) in &mut round.environments {
            let in_flight: Vec<RolloutId> = progress.in_flight.keys().copied().collect();
            for rollout in in_flight {
                let rollout = self.cancel(rollout, reason);
                rollout.end(Ended::Cancelled, &mut self.tally.counters);
            }
            let whole = self.environments[*environment].whole_groups;
            let size = self.config.rollouts_per_group(*environment);
            let held = progress.take_back(whole.then_some(size));
            held.into_iter().for_each(|held| self.void_held(held));
        }
        Some(round)
    }

    /// Ends rollouts that were reported, of a group that did not end.
    pub(crate) fn void_held(&mut self, held: Held) {
        for (rollout, _) in held.scored {
            self.void(rollout, VoidReason::GroupIncomplete);
        }
    }

    pub(crate) fn evaluation_timed_out(&mut self) {
        let Some(round) = &self.evaluations.round else {
            return;
        };
        let (version, is_over) = (round.version, round.is_over());
        let why = self.why_closed(round);
        if !self.ledger.is_of_this_trainer(version) {
            if is_over {
                return self.set_round_deadline(self.round_deadline(self.now));
            }
            let at = self.ledger.newest_trained();
            self.warn(format!(
                "the evaluation of version {version} was given up {why}: the trainer went back, and is at \
                 version {at}; it starts over when the trainer has published version {version} again"
            ));
            self.drop_round(CancelReason::Timeout);
            return;
        }
        let late = self.late(round).join(", ");
        self.warn(format!(
            "the evaluation of version {version} was closed {why}, with partial results: {late} had not ended"
        ));
        self.report_round();
        self.close_round(CancelReason::Timeout);
    }

    /// What has not ended in the round's environments.
    fn late(&self, round: &Round) -> Vec<String> {
        let environments = round.environments.iter();
        let late = environments.filter(|(_, progress)| !progress.is_over());
        let described = late.map(|(environment, progress)| {
            let name = self.name(*environment);
            match progress.total {
                Some(total) => format!("{name:?} ({} of {total} rollouts)", progress.ended()),
                None => format!("{name:?} (no worker listed its examples)"),
            }
        });
        described.collect()
    }

    /// Which of its two limits a round has come to.
    fn why_closed(&self, round: &Round) -> String {
        let timeouts = &self.config.timeouts;
        match timeouts.evaluation_progress {
            Some(span) if self.now < round.since + timeouts.evaluation => {
                format!(
                    "after {} s in which it measured nothing",
                    span.as_secs_f64()
                )
            }
            _ => format!("after {} s", timeouts.evaluation.as_secs_f64()),
        }
    }
}

fn due_environments(
    config: &Config,
    version: PolicyVersion,
) -> impl Iterator<Item = EnvironmentId> {
    let is_due = move |evaluation: &Evaluation| evaluation.is_due(version, config.run.max_steps);
    config
        .environment_ids()
        .filter_map(move |(id, environment)| match &environment.role {
            Role::Evaluate(evaluation) if is_due(evaluation) => Some(id),
            _ => None,
        })
}
