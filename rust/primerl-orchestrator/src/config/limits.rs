//! The limits of rollouts, by environment.

use super::Config;
use primerl_gateway::RolloutLimits;
use primerl_service::config_error::{ConfigError, field};
use std::time::Duration;

impl Config {
    /// The limits of each environment, in the order of `to_core`'s environments.
    pub fn limits(&self) -> Vec<RolloutLimits> {
        let training = self.train.env.iter().map(|environment| environment.limits);
        let evaluation = self.eval.env.iter().map(|environment| environment.limits);
        training.chain(evaluation).collect()
    }

    /// What a rollout of each environment has from its lease to its report, likewise.
    pub fn spans(&self) -> Vec<Duration> {
        let training = self
            .train
            .env
            .iter()
            .map(|environment| environment.rollout_s);
        let evaluation = self
            .eval
            .env
            .iter()
            .map(|environment| environment.rollout_s);
        let longest = self.timeouts.rollout_s;
        let spans = training.chain(evaluation);
        spans
            .map(|own| Duration::from_secs_f64(own.unwrap_or(longest)))
            .collect()
    }

    pub(super) fn validate_limits(&self) -> Result<(), ConfigError> {
        let training = self.train.env.iter();
        let training = training.map(|one| (one.key(), one.limits, one.rollout_s));
        let evaluation = self.eval.env.iter();
        let evaluation = evaluation.map(|one| (one.key(), one.limits, one.rollout_s));
        let longest = self.timeouts.rollout_s;
        for (environment, limits, rollout_s) in training.chain(evaluation) {
            validate_span(&environment, rollout_s, longest)?;
            validate_time(&environment, limits, rollout_s, longest)?;
        }
        Ok(())
    }
}

fn validate_span(environment: &str, own: Option<f64>, longest: f64) -> Result<(), ConfigError> {
    match own.filter(|own| *own > longest) {
        None => Ok(()),
        Some(own) => Err(field(
            &format!("{environment}.rollout_s"),
            format!("is {own}"),
            format!("give at most timeouts.rollout_s = {longest}, or omit it"),
        )),
    }
}

/// What a rollout samples within its time has to be scored before its report is due.
fn validate_time(
    environment: &str,
    limits: RolloutLimits,
    own: Option<f64>,
    longest: f64,
) -> Result<(), ConfigError> {
    let (longest, key) = match own {
        Some(own) => (own, "rollout_s"),
        None => (longest, "timeouts.rollout_s"),
    };
    match limits.time_s.filter(|seconds| *seconds >= longest) {
        None => Ok(()),
        Some(seconds) => Err(field(
            &format!("{environment}.limits.time_s"),
            format!(
                "is {seconds}, and a rollout that has not been reported after {key} = {longest} has failed"
            ),
            format!("lower it, or raise {key}, so that there is time to score what was sampled"),
        )),
    }
}
