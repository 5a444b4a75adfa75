//! One round of evaluation: every environment that is due, at one pinned policy version.
//!
//! During a round, engines stay at its version. Where the trainer went back to a checkpoint before that version, the round
//! is reported when the trainer has reached it again, and starts over if it came to other weights. A rollout that fails
//! is tried once more, then counts as failed with reward 0. The round has a deadline, which moves with every rollout
//! that is measured: it ends a round that takes too long, or that measures nothing. What has not ended by then
//! does not count in the scores, and is reported as unmeasured.
//!
//! In a run that only evaluates, the round is kept when it has ended, with what failed in it, which may be measured again.
//!
//! Rollouts of a group that is run whole ([`crate::group`]) are held until all of it has ended: one that fails the first
//! time, or is lost, ends the others too.

mod interval;
mod measuring;
mod rounds;
mod scores;

pub(crate) use rounds::Evaluations;

use crate::config::Evaluation;
use crate::effect::EvaluationReport;
use crate::event::Score;
use crate::failure::{ErrorCounts, ErrorKind};
use crate::ids::*;
use crate::rollout::Rollout;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const MAX_RETRIES: u32 = 1;

/// One rollout to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    pub group: GroupId,
    pub slot: usize,
    pub example: ExampleIndex,
    pub failed: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Round {
    pub version: PolicyVersion,
    pub since: Time,
    pub deadline: Time,
    /// How often what had failed in it was to be measured again.
    #[serde(default)]
    pub again: u32,
    pub environments: BTreeMap<EnvironmentId, Progress>,
}

impl Attempt {
    /// Its group, slot and example.
    pub fn place(&self) -> (GroupId, usize, ExampleIndex) {
        (self.group, self.slot, self.example)
    }
}

/// How far one environment is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Rollouts to be made in all; `None` until the environment's examples are known.
    pub total: Option<u32>,
    pub queue: VecDeque<Attempt>,
    /// Rollouts in flight and what they are attempts at.
    pub in_flight: BTreeMap<RolloutId, Attempt>,
    /// What has ended of groups that are run whole and have not ended.
    #[serde(default)]
    pub held: BTreeMap<GroupId, Held>,
    pub scored: u32,
    pub failed: u32,
    #[serde(default)]
    errors: ErrorCounts,
    reward_sum: f64,
    /// Rewards of all rollouts that have ended, 0 for those that failed.
    #[serde(default)]
    rewards: BTreeMap<ExampleIndex, Vec<f64>>,
    metrics: BTreeMap<String, (f64, u32)>,
    #[serde(default)]
    failures: Vec<Failure>,
}

/// What failed for good: a rollout by itself, or rollouts of a group that is run whole.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    group: GroupId,
    example: ExampleIndex,
    /// What would be made again: of a group that is run whole, all of it.
    slots: Vec<usize>,
    kinds: Vec<ErrorKind>,
    /// What ended well of a group that is run whole.
    scored: Vec<Score>,
}

/// What has ended of a group that is run whole.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Held {
    pub scored: Vec<(Box<Rollout>, Score)>,
    pub failed: Vec<ErrorKind>,
}

impl Held {
    pub fn ended(&self) -> usize {
        self.scored.len() + self.failed.len()
    }
}

impl Round {
    pub fn new(
        version: PolicyVersion,
        environments: BTreeSet<EnvironmentId>,
        since: Time,
        deadline: Time,
    ) -> Self {
        let environments = environments
            .into_iter()
            .map(|environment| (environment, Progress::default()))
            .collect();
        Round {
            version,
            since,
            deadline,
            again: 0,
            environments,
        }
    }

    pub fn is_over(&self) -> bool {
        self.environments.values().all(Progress::is_over)
    }
}

impl Progress {
    /// Queues `rollouts_per_example` rollouts of each of the first `examples` examples, the group of example i being
    /// `first_group + i`.
    pub fn fill(&mut self, examples: u32, rollouts_per_example: u32, first_group: GroupId) {
        assert!(self.total.is_none(), "an evaluation is filled once");
        self.total = Some(examples.saturating_mul(rollouts_per_example));
        for example in 0..examples {
            let group = GroupId(first_group.0 + u64::from(example));
            let attempt = |slot| Attempt {
                group,
                slot: slot as usize,
                example: ExampleIndex(example),
                failed: 0,
            };
            self.queue.extend((0..rollouts_per_example).map(attempt));
        }
    }

    pub fn is_over(&self) -> bool {
        self.total == Some(self.ended())
    }

    pub fn ended(&self) -> u32 {
        self.scored + self.failed
    }

    pub fn score(&mut self, example: ExampleIndex, score: Score) {
        self.scored += 1;
        self.reward_sum += score.reward;
        self.rewards.entry(example).or_default().push(score.reward);
        for (name, value) in score.metrics {
            let (sum, count) = self.metrics.entry(name).or_default();
            *sum += value;
            *count += 1;
        }
    }

    /// The attempt after one that failed; `None` if that was the last.
    pub fn after_failure(attempt: Attempt) -> Option<Attempt> {
        (attempt.failed < MAX_RETRIES).then_some(Attempt {
            failed: attempt.failed + 1,
            ..attempt
        })
    }

    /// An attempt failed for good: it has reward 0.
    pub fn fail(&mut self, attempt: Attempt, kind: ErrorKind) {
        self.count_failure(Failure {
            group: attempt.group,
            example: attempt.example,
            slots: vec![attempt.slot],
            kinds: vec![kind],
            scored: Vec::new(),
        });
    }

    /// All of a group that is run whole, of `size`, has ended.
    pub fn end_group(
        &mut self,
        group: GroupId,
        example: ExampleIndex,
        size: usize,
        scored: Vec<Score>,
        kinds: Vec<ErrorKind>,
    ) {
        for score in &scored {
            self.score(example, score.clone());
        }
        if !kinds.is_empty() {
            self.count_failure(Failure {
                group,
                example,
                slots: (0..size).collect(),
                kinds,
                scored,
            });
        }
    }

    fn count_failure(&mut self, failure: Failure) {
        let rewards = self.rewards.entry(failure.example).or_default();
        for kind in &failure.kinds {
            self.failed += 1;
            self.errors.count(*kind);
            rewards.push(0.0);
        }
        self.failures.push(failure);
    }

    /// Queues once more what failed for good. Returns whether anything is to be done now.
    pub fn measure_failures_again(&mut self) -> bool {
        for failure in std::mem::take(&mut self.failures) {
            self.forget(&failure);
            let attempts = failure.slots.iter().map(|slot| Attempt {
                group: failure.group,
                slot: *slot,
                example: failure.example,
                failed: 0,
            });
            self.queue.extend(attempts);
        }
        !self.is_over()
    }

    /// Takes what a failure stands for out of all that was counted.
    fn forget(&mut self, failure: &Failure) {
        failure
            .kinds
            .iter()
            .for_each(|kind| self.errors.take_back(*kind));
        self.failed -= failure.kinds.len() as u32;
        self.scored -= failure.scored.len() as u32;
        for score in &failure.scored {
            self.reward_sum -= score.reward;
            for (name, value) in &score.metrics {
                if let Some((sum, count)) = self.metrics.get_mut(name) {
                    *sum -= value;
                    *count -= 1;
                }
            }
        }
        self.metrics.retain(|_, (_, count)| *count > 0);
        self.forget_rewards(failure);
    }

    fn forget_rewards(&mut self, failure: &Failure) {
        let scored = failure.scored.iter().map(|score| score.reward);
        let counted: Vec<f64> = scored.chain(failure.kinds.iter().map(|_| 0.0)).collect();
        let Some(rewards) = self.rewards.get_mut(&failure.example) else {
            return;
        };
        for reward in counted {
            if let Some(at) = rewards.iter().position(|other| *other == reward) {
                rewards.remove(at);
            }
        }
        if rewards.is_empty() {
            self.rewards.remove(&failure.example);
        }
    }

    /// Queues what is in flight as it was. Of groups that are run whole, of `whole` rollouts each, all that has not ended;
    /// returns what was held of these.
    pub fn take_back(&mut self, whole: Option<usize>) -> Vec<Held> {
        let in_flight = std::mem::take(&mut self.in_flight);
        let Some(size) = whole else {
            in_flight
                .into_values()
                .rev()
                .for_each(|attempt| self.queue.push_front(attempt));
            return Vec::new();
        };
        let mut groups = BTreeMap::new();
        for attempt in in_flight.into_values() {
            groups.insert(attempt.group, attempt);
        }
        for attempt in groups.into_values().rev() {
            for slot in (0..size).rev() {
                self.queue.push_front(Attempt { slot, ..attempt });
            }
        }
        std::mem::take(&mut self.held).into_values().collect()
    }

    /// Takes a whole group of `size` back, to be run as this attempt says. Returns what is in flight of it, and what was
    /// held.
    pub fn restart(&mut self, attempt: Attempt, size: usize) -> (Vec<RolloutId>, Option<Held>) {
        let of_group = |(_, other): &(&RolloutId, &Attempt)| other.group == attempt.group;
        let siblings = self.in_flight.iter().filter(of_group);
        let siblings: Vec<RolloutId> = siblings.map(|(id, _)| *id).collect();
        siblings.iter().for_each(|id| {
            self.in_flight.remove(id);
        });
        for slot in (0..size).rev() {
            self.queue.push_front(Attempt { slot, ..attempt });
        }
        (siblings, self.held.remove(&attempt.group))
    }

    /// Rollouts that were reported and do not count yet.
    pub fn held_rollouts(&self) -> usize {
        self.held.values().map(|held| held.scored.len()).sum()
    }

    /// What ended of each example.
    fn ended_by_example(&self) -> BTreeMap<ExampleIndex, scores::Ended<'_>> {
        let mut found: BTreeMap<ExampleIndex, scores::Ended<'_>> = BTreeMap::new();
        for (example, rewards) in &self.rewards {
            let ended = scores::Ended { rewards, failed: 0 };
            found.insert(*example, ended);
        }
        for failure in &self.failures {
            if let Some(ended) = found.get_mut(&failure.example) {
                ended.failed += failure.kinds.len();
            }
        }
        found
    }

    /// `None` if nothing ended: there is no mean of nothing.
    pub fn report(
        &self,
        environment: EnvironmentId,
        round: &Round,
        evaluation: &Evaluation,
    ) -> Option<EvaluationReport> {
        let rollouts = self.ended();
        let expected = self.total.unwrap_or(rollouts);
        let rule = scores::Rule {
            rollouts: evaluation.rollouts_per_example as usize,
            pass_threshold: evaluation.pass_threshold,
        };
        if rollouts == 0 {
            return None;
        }
        let (scores, by_example) = scores::scores(&self.ended_by_example(), rule);
        Some(EvaluationReport {
            environment,
            version: round.version,
            rollouts,
            expected,
            unmeasured: expected - rollouts,
            complete: expected == rollouts,
            measured_again: round.again,
            failed: self.failed,
            errors: self.errors.named(),
            mean_reward: self.reward_sum / f64::from(rollouts),
            metrics: self
                .metrics
                .iter()
                .map(|(name, (sum, count))| (name.clone(), sum / f64::from(*count)))
                .collect(),
            scores,
            by_example,
        })
    }
}
