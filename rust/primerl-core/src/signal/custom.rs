//! Groups whose advantages come from a function outside: asked for, awaited, checked.

use crate::Core;
use crate::counters::VoidReason;
use crate::deadlines::Due;
use crate::effect::{AdvantagesRequest, Effect};
use crate::group::Group;
use crate::ids::*;
use crate::status::Wait;
use crate::time::Duration;
use crate::wait::Armed;
use std::sync::Arc;

/// Under which the failures are counted.
const KIND: &str = "advantages";

impl Core {
    pub(crate) fn compute_advantages(&mut self, id: GroupId, path: String, timeout: Duration) {
        let Some(group) = self.groups.get(&id) else {
            return;
        };
        let request = Arc::new(request(group, path, timeout));
        let deadline = self.now + timeout;
        self.deadlines.set(deadline, Due::Advantages(id));
        let since = self.now;
        self.computing.insert(id, Armed { since, deadline });
        self.effects.push(Effect::ComputeAdvantages { request });
    }

    pub(crate) fn advantages_computed(
        &mut self,
        id: GroupId,
        result: Result<Vec<Vec<f32>>, String>,
    ) {
        if self.stop_computing(id).is_none() {
            return self.ignore("advantages of a group that is over");
        }
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let environment = group.environment;
        let checked = result.and_then(|values| check(group, &values).map(|()| values));
        match checked {
            Ok(values) => {
                group.token_advantages = Some(values.into_iter().map(Arc::from).collect());
                self.is_ready(id, environment);
            }
            Err(problem) => self.advantages_failed(id, environment, &problem),
        }
    }

    pub(crate) fn advantages_timed_out(&mut self, id: GroupId) {
        let Some(Armed { since, .. }) = self.stop_computing(id) else {
            return;
        };
        let Some(environment) = self.groups.get(&id).map(|group| group.environment) else {
            return;
        };
        let seconds = (self.now.since(since).as_secs_f64() * 1e3).round() / 1e3;
        let others = match self.computing.len() {
            0 => String::new(),
            others => format!(", with {others} other groups waiting for their turn"),
        };
        let problem = format!(
            "no answer within {seconds} s of the group's end{others}: make the function faster, or raise \
             algorithm.timeout_s"
        );
        self.advantages_failed(id, environment, &problem);
    }

    fn advantages_failed(&mut self, id: GroupId, environment: EnvironmentId, problem: &str) {
        self.losses.failed(KIND);
        let why = format!("its custom advantages failed: {problem}");
        self.drop_failed_group(id, environment, VoidReason::GroupDropped, &why);
    }

    /// Forgets that a group waits; returns since when, if it did.
    pub(crate) fn stop_computing(&mut self, id: GroupId) -> Option<Armed> {
        let armed = self.computing.remove(&id)?;
        self.deadlines.clear(armed.deadline, Due::Advantages(id));
        Some(armed)
    }

    pub(crate) fn waits_for_advantages(&self) -> impl Iterator<Item = Wait> {
        let waiting = self.computing.iter();
        waiting.map(|(id, Armed { since, deadline })| {
            let what = "its custom advantages".to_owned();
            Wait::new(format!("group {id}"), what, *since, *deadline)
        })
    }

    /// Requests that were not answered yet, oldest group first: for a shell that has lost those it was given.
    pub fn unanswered_advantages(&self) -> Vec<Arc<AdvantagesRequest>> {
        let waiting = self.computing.keys().filter_map(|id| self.groups.get(id));
        waiting
            .filter_map(
                |group| match &self.config.environment(group.environment).algorithm.kind {
                    crate::config::AlgorithmKind::Custom { path, timeout } => {
                        Some(Arc::new(request(group, path.clone(), *timeout)))
                    }
                    _ => None,
                },
            )
            .collect()
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

/// One finite value a token of each sample.
fn check(group: &Group, values: &[Vec<f32>]) -> Result<(), String> {
    let values = values.iter().map(Vec::as_slice);
    group.check_values(values, "the function", "the value", |value| {
        value.is_finite()
    })
}
