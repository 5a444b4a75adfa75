//! Custom algorithms: advantages that a function outside computes.

use super::Source;
use crate::Core;
use crate::config::AlgorithmKind;
use crate::effect::{AdvantagesRequest, Effect};
use crate::group::Group;
use crate::ids::*;
use crate::time::Duration;
use std::sync::Arc;

impl Core {
    /// Gives a complete group its advantages, or asks for them.
    pub(super) fn give_advantages(&mut self, id: GroupId, environment: EnvironmentId) {
        let Some(group) = self.groups.live.get(&id) else {
            return;
        };
        let Some(request) = self.request_advantages(group) else {
            return self.set_ready(id, environment);
        };
        self.await_signal(Source::Custom, id, request.timeout);
        self.effects.push(Effect::ComputeAdvantages { request });
    }

    pub(crate) fn advantages_computed(
        &mut self,
        id: GroupId,
        result: Result<Vec<Vec<f32>>, String>,
    ) {
        let Some(environment) = self.signal_came(Source::Custom, id) else {
            return;
        };
        let Some(group) = self.groups.live.get_mut(&id) else {
            return;
        };
        match result.and_then(|values| check(group, &values).map(|()| values)) {
            Ok(values) => {
                group.token_advantages = Some(values.into_iter().map(Arc::from).collect());
                self.set_ready(id, environment);
            }
            Err(problem) => self.signal_failed(Source::Custom, id, environment, &problem),
        }
    }

    /// Requests that are not answered yet, oldest group first: for a shell that has lost those it was given.
    pub fn unanswered_advantages(&self) -> Vec<Arc<AdvantagesRequest>> {
        let waiting = self.signals.custom.keys();
        let groups = waiting.filter_map(|id| self.groups.live.get(id));
        groups
            .filter_map(|group| self.request_advantages(group))
            .collect()
    }

    /// What is asked of the group's custom algorithm, if it has one.
    fn request_advantages(&self, group: &Group) -> Option<Arc<AdvantagesRequest>> {
        match &self.config.environment(group.environment).algorithm.kind {
            AlgorithmKind::Custom { path, timeout } => {
                Some(Arc::new(request(group, path.clone(), *timeout)))
            }
            _ => None,
        }
    }
}

fn request(group: &Group, path: String, timeout: Duration) -> AdvantagesRequest {
    let rollouts = group
        .finished()
        .flat_map(|rollout| std::iter::repeat_n(rollout.id, rollout.traces.len()));
    AdvantagesRequest {
        group: group.id,
        environment: group.environment,
        example: group.example,
        path,
        timeout,
        traces: group.traces().cloned().collect(),
        rollouts: rollouts.collect(),
        samples: group
            .samples()
            .map(|(trace, sample)| (trace, sample.clone()))
            .collect(),
    }
}

/// Checks that each sample has one finite value per token.
fn check(group: &Group, values: &[Vec<f32>]) -> Result<(), String> {
    let values = values.iter().map(Vec::as_slice);
    group.check_values(values, "the function", "the value", |value| {
        value.is_finite()
    })
}
