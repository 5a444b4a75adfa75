//! The difficulty buffer: complete groups file their examples, and those without signal make room for others.

use crate::Core;
use crate::counters::VoidReason;
use crate::curriculum::{BufferReport, ExampleHistory, Filing};
use crate::effect::Effect;
use crate::group::Group;
use crate::ids::*;
use crate::time::Time;

/// So many groups in a row without signal are worth a warning, or four batches of them where that is more.
const FILTERED_AT_LEAST: u64 = 32;

impl Core {
    /// The pools of each environment, and what moved in them, step by step.
    pub fn buffer_report(&self) -> BufferReport {
        self.curriculum.report(&self.config)
    }

    /// What became of one training example; `None` if there is no such one, or its environment has no worker yet.
    pub fn example_history(
        &self,
        environment: EnvironmentId,
        example: ExampleIndex,
    ) -> Option<ExampleHistory> {
        self.curriculum.history(environment, example, &self.config)
    }

    /// Files the example of a complete group. Returns whether the group is to be trained.
    pub(crate) fn file_example(&mut self, id: GroupId) -> bool {
        let group = &self.groups.live[&id];
        let rewards: Vec<f64> = rewards(group).collect();
        let filing = Filing {
            step: self.next_step,
            mean_reward: crate::advantage::mean(rewards.iter().copied()),
            rollouts: group.finished_count(),
            has_signal: self.has_signal(group),
        };
        self.curriculum
            .file(group.environment, group.example, &filing, &self.config)
    }

    /// Whether a complete group may not be trained any more, now that it has lost a rollout.
    pub(crate) fn lost_its_signal(&self, id: GroupId) -> bool {
        self.config.buffer.online_difficulty_filtering && !self.has_signal(&self.groups.live[&id])
    }

    fn has_signal(&self, group: &Group) -> bool {
        // A teacher's log-probabilities and answers teach whatever the rewards are.
        let taught = !self.config.training_mode(group.environment).is_rl();
        taught
            || group
                .scored(&self.config)
                .has_signal(&self.signals.baselines)
    }

    /// Drops a complete group without signal. That is no failure: a warning is logged only for a long stretch of them. Its
    /// place is free.
    pub(crate) fn filter_group(&mut self, id: GroupId) {
        let Some(group) = self.groups.remove(id) else {
            return;
        };
        let environment = group.environment;
        self.tried_in_vain(environment, id);
        for rollout in group.into_finished() {
            self.rollouts.forget_age(&rollout);
            self.void(rollout, VoidReason::NoSignal);
        }
        self.effects.push(Effect::GroupDropped {
            group: id,
            reason: VoidReason::NoSignal,
            why: "all of its advantages would be 0".to_owned(),
        });
        let in_a_row = self.curriculum.filtered_in_a_row(environment);
        let first = self.many_filtered();
        if in_a_row.is_multiple_of(first) && (in_a_row / first).is_power_of_two() {
            let name = self.name(environment).to_owned();
            self.warn(format!(
                "environment {name:?}: the last {in_a_row} groups had no signal (all advantages of a group would be 0), so \
                 none was trained (buffer.online_difficulty_filtering)"
            ));
        }
    }

    fn many_filtered(&self) -> u64 {
        FILTERED_AT_LEAST.max(4 * self.config.groups_per_batch() as u64)
    }

    /// Since when a batch is waited for in vain, where every environment that is drawn has had a long stretch of groups
    /// without signal, and none has had one with it since. It may last: when that is the end of a run, its launcher knows.
    pub fn without_signal_since(&self) -> Option<Time> {
        let since = self.trainer.waiting_since?.max(self.signals.at);
        let drawn = self.training_environments();
        let mut drawn = drawn
            .filter(|id| self.why_it_rests(*id).is_none())
            .peekable();
        drawn.peek()?;
        let many = self.many_filtered();
        let none = drawn.all(|id| self.curriculum.filtered_in_a_row(id) >= many);
        (none && self.ending.finished.is_none()).then_some(since)
    }

    /// Warns at powers of two: a small environment that is learnt comes here again and again.
    pub(crate) fn warn_of_returned_pools(&mut self, environment: EnvironmentId, times: u64) {
        if times.is_power_of_two() {
            let name = self.name(environment).to_owned();
            self.warn(format!(
                "environment {name:?}: no example that may be drawn was left, so all are normal again (so far {times} \
                 times); raise buffer.easy_fraction or buffer.hard_fraction to draw easy or hard ones before that"
            ));
        }
    }
}

/// Rewards of all traces of the group's rollouts.
fn rewards(group: &Group) -> impl Iterator<Item = f64> {
    group
        .finished()
        .flat_map(|rollout| rollout.traces.iter().map(|trace| trace.reward))
}
