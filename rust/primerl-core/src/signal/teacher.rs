//! On-policy distillation: a complete group waits until the teacher has said how likely it finds every token of it.

use crate::Core;
use crate::config::TrainingMode;
use crate::counters::VoidReason;
use crate::deadlines::Due;
use crate::effect::{Effect, TeacherRequest};
use crate::group::Group;
use crate::ids::*;
use crate::sample::TokenLogprobs;
use crate::status::Wait;
use crate::wait::Armed;
use std::sync::Arc;

/// Under which the failures are counted.
const KIND: &str = "teacher";

impl Core {
    /// What a complete group needs first.
    pub(crate) fn score(&mut self, id: GroupId, environment: EnvironmentId) {
        if self.config.training_mode != TrainingMode::Opd {
            return self.give_advantages(id, environment);
        }
        let Some(group) = self.groups.get(&id) else {
            return;
        };
        let request = Arc::new(request(group));
        let (since, deadline) = (self.now, self.now + self.config.timeouts.teacher);
        self.deadlines.set(deadline, Due::Teacher(id));
        self.scoring.insert(id, Armed { since, deadline });
        self.effects.push(Effect::ScoreByTeacher { request });
    }

    pub(crate) fn teacher_scored(
        &mut self,
        id: GroupId,
        result: Result<Vec<TokenLogprobs>, String>,
    ) {
        if self.stop_scoring(id).is_none() {
            return self.ignore("teacher's scores of a group that is over");
        }
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let environment = group.environment;
        match result.and_then(|values| check(group, &values).map(|()| values)) {
            Ok(values) => {
                group.teacher_logprobs = Some(values);
                self.give_advantages(id, environment);
            }
            Err(problem) => self.scoring_failed(id, environment, &problem),
        }
    }

    pub(crate) fn teacher_timed_out(&mut self, id: GroupId) {
        let Some(Armed { since, .. }) = self.stop_scoring(id) else {
            return;
        };
        let Some(environment) = self.groups.get(&id).map(|group| group.environment) else {
            return;
        };
        let seconds = (self.now.since(since).as_secs_f64() * 1e3).round() / 1e3;
        let others = match self.scoring.len() {
            0 => String::new(),
            others => format!(", with {others} other groups waiting for it"),
        };
        let problem = format!(
            "no answer within {seconds} s of the group's end{others}: give the teacher more room, or raise \
             teacher.client.timeout_s"
        );
        self.scoring_failed(id, environment, &problem);
    }

    fn scoring_failed(&mut self, id: GroupId, environment: EnvironmentId, problem: &str) {
        self.losses.failed(KIND);
        let why = format!("its teacher did not score it: {problem}");
        self.drop_failed_group(id, environment, VoidReason::GroupDropped, &why);
    }

    /// Forgets that a group waits; returns since when, if it did.
    pub(crate) fn stop_scoring(&mut self, id: GroupId) -> Option<Armed> {
        let armed = self.scoring.remove(&id)?;
        self.deadlines.clear(armed.deadline, Due::Teacher(id));
        Some(armed)
    }

    pub(crate) fn waits_for_teacher(&self) -> impl Iterator<Item = Wait> {
        let waiting = self.scoring.iter();
        waiting.map(|(id, Armed { since, deadline })| {
            let what = "its teacher's log-probabilities".to_owned();
            Wait::new(format!("group {id}"), what, *since, *deadline)
        })
    }

    /// Requests that were not answered yet, oldest group first: for a shell that has lost those it was given.
    pub fn unanswered_scores(&self) -> Vec<Arc<TeacherRequest>> {
        let waiting = self.scoring.keys().filter_map(|id| self.groups.get(id));
        waiting.map(|group| Arc::new(request(group))).collect()
    }
}

fn request(group: &Group) -> TeacherRequest {
    TeacherRequest {
        group: group.id,
        samples: group.samples().map(|(_, sample)| sample.clone()).collect(),
    }
}

/// One log-probability a token of each sample.
fn check(group: &Group, values: &[TokenLogprobs]) -> Result<(), String> {
    let values = values.iter().map(|TokenLogprobs(values)| &values[..]);
    let is_one = |value: f32| value.is_finite() && value <= 0.0;
    group.check_values(values, "it", "its log-probability", is_one)
}
