//! A complete group as its algorithm looks at it.

use super::Group;
use crate::advantage::{AlgorithmKind, ScoredGroup};
use crate::config::Config;
use crate::sample::TrainedTrace;

impl Group {
    /// As far as its algorithm looks at it: this is made of every group that completes.
    pub fn scored<'a>(&'a self, config: &'a Config) -> ScoredGroup<'a> {
        let algorithm = &config.environment(self.environment).algorithm;
        let rewards = self.traces().map(|trace| trace.reward).collect();
        let mut scored = ScoredGroup {
            environment: self.environment,
            ..ScoredGroup::plain(algorithm, rewards)
        };
        let seat = |trace: &'a TrainedTrace| &*trace.seat;
        let first = self.traces().next().map(seat);
        let is_of_one_seat = self.traces().all(|trace| Some(seat(trace)) == first);
        if !is_of_one_seat || algorithm.kind.knows_seats() {
            scored.seats = self.traces().map(seat).collect();
        }
        if matches!(algorithm.kind, AlgorithmKind::HierarchicalGrpo { .. }) {
            scored.rollouts = self
                .finished()
                .flat_map(|rollout| std::iter::repeat_n(rollout.id, rollout.traces.len()))
                .collect();
        }
        if algorithm.length_penalty.is_some() {
            scored.lengths = self.traces().map(TrainedTrace::length).collect();
        }
        scored
    }
}
