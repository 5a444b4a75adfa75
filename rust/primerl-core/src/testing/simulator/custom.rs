//! The function of a custom algorithm: the advantage of a token is the token, which an observer can tell. And a teacher:
//! its log-probability of a token is minus the token.

use super::Simulator;
use super::actors::Action;
use crate::effect::{AdvantagesRequest, TeacherRequest};
use crate::sample::{Sample, TokenLogprobs};
use crate::time::Duration;
use rand::Rng;

impl Simulator {
    pub(super) fn compute_advantages(&mut self, request: &AdvantagesRequest) {
        let mut values: Vec<Vec<f32>> = request
            .samples
            .iter()
            .map(|(_, sample)| {
                sample
                    .token_ids()
                    .iter()
                    .map(|token| *token as f32)
                    .collect()
            })
            .collect();
        let mut after = self.spread(0.01, 2.0);
        let mut failure = None;
        if self.chance(self.scenario.faults.advantages_fail) {
            match self.rng.random_range(0..4) {
                0 => failure = Some("ZeroDivisionError".to_owned()),
                1 => values[0][0] = f32::NAN,
                2 => values[0].push(0.0),
                _ => after = Duration(request.timeout.0 + after.0),
            }
        }
        let result = failure.map_or(Ok(values), Err);
        self.plan(after, Action::AdvantagesComputed(request.group, result));
    }

    pub(super) fn score_by_teacher(&mut self, request: &TeacherRequest) {
        let score = |sample: &Sample| {
            let ids = sample.token_ids();
            TokenLogprobs(ids.iter().map(|token| -(*token as f32)).collect())
        };
        let mut values: Vec<TokenLogprobs> = request.samples.iter().map(score).collect();
        let mut after = self.spread(0.01, 2.0);
        let mut failure = None;
        if self.chance(self.scenario.faults.advantages_fail) {
            match self.rng.random_range(0..4) {
                0 => failure = Some("the prompt is too long".to_owned()),
                1 => values[0] = TokenLogprobs([f32::NEG_INFINITY].into()),
                2 => drop(values.pop()),
                _ => after = Duration(self.scenario.config.timeouts.teacher.0 + after.0),
            }
        }
        let result = failure.map_or(Ok(values), Err);
        self.plan(after, Action::TeacherScored(request.group, result));
    }
}
