//! Baselines that outlive a batch: what each seat of each environment usually gets.

use crate::ids::EnvironmentId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Exponential moving averages of rewards. Each begins at 0. Part of the run's state: a run that resumes has them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Baselines(BTreeMap<EnvironmentId, BTreeMap<String, f64>>);

impl Baselines {
    /// The advantage of the next reward, `r - b`; then the baseline moves, `b <- decay b + (1 - decay) r`. Role-conditioned
    /// advantage estimation (SPIRAL, Liu et al. 2025, arXiv:2506.24119), the paper's role in a game being a
    /// seat of an environment. A reward is measured against what was known before it: after the update its own share
    /// would be in the baseline, and every advantage smaller by the factor `decay`.
    pub fn score(
        &mut self,
        environment: EnvironmentId,
        seat: &str,
        reward: f64,
        decay: f64,
    ) -> f64 {
        let seats = self.0.entry(environment).or_default();
        let baseline = match seats.get_mut(seat) {
            Some(baseline) => baseline,
            None => seats.entry(seat.to_owned()).or_insert(0.0),
        };
        let advantage = reward - *baseline;
        *baseline = decay * *baseline + (1.0 - decay) * reward;
        advantage
    }

    /// What a seat usually gets; 0 before its first reward.
    pub fn get(&self, environment: EnvironmentId, seat: &str) -> f64 {
        let seats = self.0.get(&environment);
        seats
            .and_then(|seats| seats.get(seat))
            .copied()
            .unwrap_or(0.0)
    }
}
