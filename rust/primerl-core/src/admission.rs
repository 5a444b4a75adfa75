//! What may start now.
//!
//! With g the next step to be cut and p the newest version that an engine has proved, rollouts may be generated for
//! steps up to `A = p + 1 + max_async_level` (and never beyond `max_steps`): a rollout that starts now and is trained
//! at step A is `max_async_level` steps off-policy. So `(A - g + 1) * batch_size` rollouts may be queued, in flight, or
//! finished and not cut. Groups start whole, so the count is in groups.
//!
//! Beside that, at most `oversampling_factor * batch_size` rollouts are in flight. What they yield beyond a batch is
//! kept for the next one.
//!
//! With `max_async_level` 0: A = p + 1, so no rollout of step k starts before v(k-1) is proved, and no more than one
//! batch is under way.

use crate::config::Config;
use crate::ids::{PolicyVersion, Step};

/// A, the last step that rollouts may be generated for; `None` before any version is proved.
pub fn last_step(config: &Config, proved: Option<PolicyVersion>) -> Option<Step> {
    proved.map(|version| {
        Step((version.0.saturating_add(1 + config.max_async_level)).min(config.max_steps))
    })
}

/// How many groups may be under way (begun and not cut).
pub fn groups_allowed(config: &Config, proved: Option<PolicyVersion>, next_step: Step) -> usize {
    let steps =
        last_step(config, proved).map_or(0, |last| (last.0 + 1).saturating_sub(next_step.0));
    (steps as usize).saturating_mul(config.groups_per_batch())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::config;

    fn config_with(max_async_level: u64) -> Config {
        Config {
            batch_size: 64,
            group_size: 8,
            max_async_level,
            max_off_policy_steps: 8,
            max_steps: 10,
            ..config()
        }
    }

    #[test]
    fn nothing_before_the_first_proof() {
        assert_eq!(groups_allowed(&config_with(2), None, Step(1)), 0);
    }

    #[test]
    fn synchronous_is_one_batch_at_a_time() {
        let config = config_with(0);
        assert_eq!(groups_allowed(&config, Some(PolicyVersion(0)), Step(1)), 8);
        assert_eq!(groups_allowed(&config, Some(PolicyVersion(0)), Step(2)), 0);
        assert_eq!(groups_allowed(&config, Some(PolicyVersion(1)), Step(2)), 8);
    }

    #[test]
    fn asynchronous_runs_ahead_by_the_level() {
        let config = config_with(2);
        assert_eq!(groups_allowed(&config, Some(PolicyVersion(0)), Step(1)), 24);
        assert_eq!(groups_allowed(&config, Some(PolicyVersion(0)), Step(3)), 8);
        assert_eq!(groups_allowed(&config, Some(PolicyVersion(0)), Step(4)), 0);
    }

    #[test]
    fn never_beyond_the_last_step() {
        let config = config_with(2);
        assert_eq!(groups_allowed(&config, Some(PolicyVersion(9)), Step(10)), 8);
        assert_eq!(groups_allowed(&config, Some(PolicyVersion(9)), Step(11)), 0);
    }
}
