//! On-policy distillation: a complete group waits until the teacher, which may be the policy itself, has returned the
//! log-probability of every token of it.

use super::Source;
use crate::Core;
use crate::effect::{Effect, TeacherRequest};
use crate::group::Group;
use crate::ids::*;
use crate::sample::TokenLogprobs;
use std::sync::Arc;

impl Core {
    /// What a complete group needs first.
    pub(crate) fn score(&mut self, id: GroupId, environment: EnvironmentId) {
        if !self.config.training_mode(environment).is_scored() {
            return self.give_advantages(id, environment);
        }
        let Some(group) = self.groups.live.get(&id) else {
            return;
        };
        let request = Arc::new(request(group));
        self.await_signal(Source::Teacher, id, self.config.timeouts.teacher);
        self.effects.push(Effect::ScoreByTeacher { request });
    }

    pub(crate) fn teacher_scored(
        &mut self,
        id: GroupId,
        result: Result<Vec<TokenLogprobs>, String>,
    ) {
        let Some(environment) = self.signal_came(Source::Teacher, id) else {
            return;
        };
        let Some(group) = self.groups.live.get_mut(&id) else {
            return;
        };
        match result.and_then(|values| check(group, &values).map(|()| values)) {
            Ok(values) => {
                group.teacher_logprobs = Some(values);
                self.give_advantages(id, environment);
            }
            Err(problem) => self.signal_failed(Source::Teacher, id, environment, &problem),
        }
    }

    /// Requests that are not answered yet, oldest group first: for a shell that has lost those it was given.
    pub fn unanswered_scores(&self) -> Vec<Arc<TeacherRequest>> {
        let waiting = self.signals.teacher.keys();
        let groups = waiting.filter_map(|id| self.groups.live.get(id));
        groups.map(|group| Arc::new(request(group))).collect()
    }
}

fn request(group: &Group) -> TeacherRequest {
    let shown: Vec<_> = group.traces().map(|trace| &trace.demonstration).collect();
    TeacherRequest {
        group: group.id,
        environment: group.environment,
        samples: group.samples().map(|(_, sample)| sample.clone()).collect(),
        demonstrations: group
            .samples()
            .map(|(trace, _)| (*shown.get(trace)?).clone())
            .collect(),
    }
}

/// Checks that each sample has one log-probability per token.
fn check(group: &Group, values: &[TokenLogprobs]) -> Result<(), String> {
    let values = values.iter().map(|TokenLogprobs(values)| &values[..]);
    let is_one = |value: f32| value.is_finite() && value <= 0.0;
    group.check_values(values, "it", "its log-probability", is_one)
}
