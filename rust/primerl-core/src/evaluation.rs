//! One round of evaluation: every environment that is due, at one pinned policy version.
//!
//! While a round goes on, engines stay at its version. Where the trainer went back to a checkpoint before that version, the
//! round is reported when the trainer has come by it again, and begins anew if it came to other weights. A rollout that fails is tried once more, then counts as failed
//! with reward 0. The round has a deadline: what has not ended by then is left out of the report.
//!
//! Rollouts of a group that is run whole ([`crate::group`]) are held until all of it has ended: one that fails the first
//! time, or is lost, takes the others along.

mod scores;

use crate::effect::EvaluationReport;
use crate::failure::{ErrorCounts, ErrorKind};
use crate::ids::*;
use crate::rollout::{Rollout, Score};
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
    pub environments: BTreeMap<EnvironmentId, Progress>,
}

/// How far one environment is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Rollouts to be made in all; `None` until the environment's examples are known.
    pub total: Option<u32>,
    pub queue: VecDeque<Attempt>,
    /// Rollouts in flight and what they are attempts at.
    pub in_flight: BTreeMap<RolloutId, Attempt>,
    /// Of groups that are run whole and have not ended.
    #[serde(default)]
    pub held: BTreeMap<GroupId, Held>,
    pub scored: u32,
    pub failed: u32,
    #[serde(default)]
    errors: ErrorCounts,
    reward_sum: f64,
    /// Of all that have ended, 0 for those that failed.
    #[serde(default)]
    rewards: BTreeMap<ExampleIndex, Vec<f64>>,
    metrics: BTreeMap<String, (f64, u32)>,
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

    /// An attempt at an example failed for good: it has reward 0.
    pub fn fail(&mut self, example: ExampleIndex, kind: ErrorKind) {
        self.failed += 1;
        self.errors.count(kind);
        self.rewards.entry(example).or_default().push(0.0);
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

    /// `None` if nothing ended: there is no mean of nothing.
    pub fn report(
        &self,
        environment: EnvironmentId,
        version: PolicyVersion,
    ) -> Option<EvaluationReport> {
        let rollouts = self.ended();
        (rollouts > 0).then(|| EvaluationReport {
            environment,
            version,
            rollouts,
            failed: self.failed,
            errors: self.errors.named(),
            mean_reward: self.reward_sum / f64::from(rollouts),
            metrics: self
                .metrics
                .iter()
                .map(|(name, (sum, count))| (name.clone(), sum / f64::from(*count)))
                .collect(),
            scores: scores::scores(&self.rewards),
        })
    }
}
