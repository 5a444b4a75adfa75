//! Reports that cannot be what they say, or say that nothing came of a rollout.

use super::Rollout;
use crate::advantage::SMALLEST_DIFFERENCE;
use crate::event::{Outcome, Trace};
use crate::failure::{PROMPT_TOO_LONG, RolloutError};

/// Advantages are f32, and so is the loss they are summed up in: a larger reward could overflow either.
const LARGEST_REWARD: f64 = 1e30;

impl Rollout {
    pub(super) fn check(&self, outcome: &Outcome, lowest_reward: f64) -> Result<(), RolloutError> {
        if let Some(message) = &self.invalid {
            return Err(RolloutError::new("engine", message.clone()));
        }
        if !outcome.ok {
            return Err(self.failure(outcome));
        }
        check_rewards(outcome, lowest_reward)
    }

    /// The error of a rollout that its environment reports as failed.
    fn failure(&self, outcome: &Outcome) -> RolloutError {
        let unnamed = || {
            RolloutError::new(
                "environment",
                "the environment reported a failure without an error".to_owned(),
            )
        };
        self.prompt_too_long(outcome)
            .unwrap_or_else(|| RolloutError {
                refusal: outcome.refusal.clone(),
                ..outcome.error.clone().unwrap_or_else(unnamed)
            })
    }

    /// The error of a rollout without an answer because its first prompt leaves no room for one, however its
    /// environment took that.
    pub(super) fn prompt_too_long(&self, outcome: &Outcome) -> Option<RolloutError> {
        let overflow = outcome.refusal.as_ref()?.overflow?;
        self.turns.is_empty().then(|| {
            let (tokens, most) = (overflow.prompt_tokens, overflow.most);
            RolloutError {
                refusal: outcome.refusal.clone(),
                ..RolloutError::new(
                    PROMPT_TOO_LONG,
                    format!("its first prompt has {tokens} tokens, and the context is {most}"),
                )
            }
        })
    }
}

fn check_rewards(outcome: &Outcome, lowest_reward: f64) -> Result<(), RolloutError> {
    for Trace { reward, .. } in &outcome.traces {
        if reward.is_nan() || reward.abs() > LARGEST_REWARD {
            let message =
                format!("reward = {reward} is not a finite number of at most {LARGEST_REWARD:e}");
            return Err(RolloutError::new("environment", message));
        }
    }
    let trained = outcome.traces.iter().filter(|trace| trace.is_trained());
    match trained
        .map(|trace| trace.reward)
        // A sum that is 0 but for rounding is 0.
        .find(|reward| *reward < lowest_reward - SMALLEST_DIFFERENCE)
    {
        Some(reward) => Err(RolloutError::new(
            "environment",
            format!(
                "reward = {reward}, but the environment's algorithm takes none below {lowest_reward}"
            ),
        )),
        None => Ok(()),
    }
}
