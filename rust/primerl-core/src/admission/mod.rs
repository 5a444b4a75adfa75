//! What may start now.
//!
//! With g the next step to be cut and p the newest version that an engine has proved, rollouts may be generated for
//! steps up to `A = p + 1 + max_async_level` (and never beyond `max_steps`): a rollout that starts now and is trained
//! at step A is `max_async_level` steps off-policy. So `(A - g + 1) * batch_size` rollouts may be queued, in flight, or
//! finished and not cut. Groups start whole: one more starts while there are fewer, and where groups have different sizes
//! it may reach beyond (by less than its size); what a step then has too much is left to the next one. Where a step is of
//! tokens (`token_batch_size`), the tokens of complete groups count, and as many for each other rollout as the last ones
//! had on average.
//!
//! In addition, no more rollouts are in flight than `oversampling_factor * batch_size`, and than the engines that serve
//! are trusted with, each by a limit of its own. What they yield beyond a batch is kept for the next one.
//!
//! An engine's limit is fixed, or follows what it reports (additive increase, multiplicative decrease: Chiu and Jain
//! 1989, "Analysis of the increase and decrease algorithms for congestion avoidance in computer networks"):
//! - Full (KV cache above its target, requests that wait for capacity, or preemptions): the limit becomes
//!   `decrease_factor` times what the engine has, at once, and is then kept until that many are out: before, the
//!   engine's load says nothing about the new limit.
//! - Room, while the limits are what holds rollouts back: `increase` is added. A limit that nothing presses against
//!   stays where it is, for nothing is known of what lies above (as RFC 7661 does for TCP).
//!
//! Evaluations are a class of their own: during training they may have `evaluation_share` of the limit, and that
//! much is kept free for them for as long as their workers wait; when no training may start they may have all of it.
//!
//! With `max_async_level` 0: A = p + 1, so no rollout of step k starts before v(k-1) is proved, and no more than one
//! batch is under way. Where groups have different sizes, a step takes all that were begun for it.

mod room;

use crate::config::{Admission, Config, LimitRule};
use crate::event::EngineLoad;
use crate::ids::{EngineId, PolicyVersion, Step};
use crate::policy::Ledger;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Requests that wait count as congestion from this share of the running ones on: a few wait between two steps of any
/// engine.
const WAITING_TOLERATED: f64 = 0.125;

impl EngineLoad {
    pub fn is_full(&self, kv_cache_target: f64) -> bool {
        let tolerated = f64::from(self.running) * WAITING_TOLERATED;
        self.preemptions > 0
            || self.kv_cache_usage > kv_cache_target
            || f64::from(self.waiting) > tolerated.max(1.0)
    }
}

/// How many rollouts are in flight in all, next to what the limits allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    pub rollouts: usize,
    /// The limits of all engines that serve.
    pub allowed: usize,
    /// Engines that serve; at least 1.
    pub engines: usize,
}

/// An engine's limit after a report.
pub fn next_limit(config: &Admission, limit: u32, load: &EngineLoad, in_flight: InFlight) -> u32 {
    if config.limit == LimitRule::Fixed {
        return config.start_per_engine;
    }
    if !load.is_full(config.kv_cache_target) {
        let pressed = in_flight.rollouts >= in_flight.allowed;
        let raised = limit.saturating_add(config.increase);
        return match pressed {
            true => raised.min(config.max_per_engine),
            false => limit,
        };
    }
    if in_flight.rollouts > in_flight.allowed {
        return limit;
    }
    // The limit may stand far above what ever was in flight: what the engine has is what was too much.
    let share = in_flight.rollouts.div_ceil(in_flight.engines.max(1)) as u32;
    let has = share.max(load.running.saturating_add(load.waiting));
    let lowered = f64::from(limit.min(has)) * config.decrease_factor;
    (lowered as u32).clamp(config.min_per_engine, limit.max(config.min_per_engine))
}

/// One engine's limit and what it last reported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limited {
    pub limit: u32,
    pub load: Option<EngineLoad>,
}

/// The limits of all engines that joined.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Limits {
    engines: BTreeMap<EngineId, Limited>,
    /// Sum over the engines that serve.
    allowed: usize,
    serving: usize,
}

impl Limits {
    pub fn get(&self, engine: EngineId) -> Option<&Limited> {
        self.engines.get(&engine)
    }

    /// Rollouts that the engines that serve are trusted with.
    pub fn allowed(&self) -> usize {
        self.allowed
    }

    /// Anew, whatever it was before: it may have been restarted with another size.
    pub fn join(&mut self, engine: EngineId, config: &Admission) -> u32 {
        let limit = config.start_per_engine;
        self.engines.insert(engine, Limited { limit, load: None });
        limit
    }

    /// Takes in a report. Returns the engine's new limit if it changed.
    pub fn report(
        &mut self,
        engine: EngineId,
        load: EngineLoad,
        rollouts: usize,
        config: &Admission,
    ) -> Option<u32> {
        let in_flight = InFlight {
            rollouts,
            allowed: self.allowed,
            engines: self.serving,
        };
        let limited = self.engines.get_mut(&engine)?;
        limited.load = Some(load);
        let limit = next_limit(config, limited.limit, &load, in_flight);
        let changed = (limit != limited.limit).then_some(limit);
        limited.limit = limit;
        changed
    }

    /// Adds up again: engines came, went, proved a version, or got another limit.
    pub fn add_up(&mut self, ledger: &Ledger) {
        let serving = ledger
            .engines()
            .iter()
            .filter(|(_, engine)| engine.proved.is_some() && engine.lost.is_none())
            .filter_map(|(id, _)| self.engines.get(id));
        (self.allowed, self.serving) = (0, 0);
        for limited in serving {
            self.allowed += limited.limit as usize;
            self.serving += 1;
        }
    }
}

/// Rollouts of evaluations that may be in flight during training, of `limit` in all.
pub fn evaluation_limit(config: &Admission, limit: usize) -> usize {
    let share = (limit as f64 * config.evaluation_share) as usize;
    share.max(1).min(limit)
}

/// A, the last step that rollouts may be generated for; `None` before any version is proved.
pub fn last_step(config: &Config, proved: Option<PolicyVersion>) -> Option<Step> {
    proved.map(|version| {
        Step((version.0.saturating_add(1 + config.run.max_async_level)).min(config.run.max_steps))
    })
}

/// For how many rollouts, or tokens, groups may be under way (begun and not cut). A group is begun while there is less.
pub fn allowed(config: &Config, proved: Option<PolicyVersion>, next_step: Step) -> u64 {
    let steps =
        last_step(config, proved).map_or(0, |last| (last.0 + 1).saturating_sub(next_step.0));
    steps.saturating_mul(config.step_size())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunConfig;
    use crate::testing::config;

    fn config_with(max_async_level: u64) -> Config {
        Config {
            run: RunConfig {
                batch_size: 64,
                group_size: 8,
                max_async_level,
                max_off_policy_steps: 8,
                max_steps: 10,
                ..config().run
            },
            ..config()
        }
    }

    #[test]
    fn nothing_before_the_first_proof() {
        assert_eq!(allowed(&config_with(2), None, Step(1)), 0);
    }

    #[test]
    fn synchronous_is_one_batch_at_a_time() {
        let config = config_with(0);
        assert_eq!(allowed(&config, Some(PolicyVersion(0)), Step(1)), 64);
        assert_eq!(allowed(&config, Some(PolicyVersion(0)), Step(2)), 0);
        assert_eq!(allowed(&config, Some(PolicyVersion(1)), Step(2)), 64);
    }

    #[test]
    fn asynchronous_runs_ahead_by_the_level() {
        let config = config_with(2);
        assert_eq!(allowed(&config, Some(PolicyVersion(0)), Step(1)), 192);
        assert_eq!(allowed(&config, Some(PolicyVersion(0)), Step(3)), 64);
        assert_eq!(allowed(&config, Some(PolicyVersion(0)), Step(4)), 0);
    }

    fn load(running: u32, waiting: u32, kv_cache_usage: f64, preemptions: u32) -> EngineLoad {
        EngineLoad {
            running,
            waiting,
            kv_cache_usage,
            preemptions,
        }
    }

    const PRESSED: InFlight = InFlight {
        rollouts: 200,
        allowed: 200,
        engines: 2,
    };

    #[test]
    fn each_sign_of_congestion_lowers_the_limit() {
        let config = crate::testing::admission();
        for full in [
            load(100, 0, 0.95, 0),
            load(100, 20, 0.5, 0),
            load(100, 0, 0.5, 1),
        ] {
            let limit = next_limit(&config, 100, &full, PRESSED);
            assert!((80..=96).contains(&limit), "{full:?}: {limit}");
        }
        assert_eq!(
            next_limit(&config, 100, &load(100, 2, 0.5, 0), PRESSED),
            116
        );
    }

    #[test]
    fn the_limit_rises_only_when_it_holds_back() {
        let config = crate::testing::admission();
        let idle = InFlight {
            rollouts: 150,
            ..PRESSED
        };
        assert_eq!(next_limit(&config, 100, &load(75, 0, 0.3, 0), idle), 100);
        assert_eq!(
            next_limit(&config, 4090, &load(75, 0, 0.3, 0), PRESSED),
            4096
        );
    }

    #[test]
    fn a_decrease_is_taken_from_what_the_engine_has_and_shows_before_the_next() {
        let config = crate::testing::admission();
        let full = load(60, 40, 0.99, 3);
        let limit = next_limit(
            &config,
            4096,
            &full,
            InFlight {
                allowed: 8192,
                ..PRESSED
            },
        );
        assert_eq!(limit, 80);
        let draining = InFlight {
            rollouts: 200,
            allowed: 160,
            engines: 2,
        };
        assert_eq!(next_limit(&config, limit, &full, draining), limit);
        assert_eq!(
            next_limit(&config, 9, &load(0, 9, 1.0, 0), PRESSED),
            8,
            "the least"
        );
    }

    #[test]
    fn a_fixed_limit_stays() {
        let config = Admission {
            limit: LimitRule::Fixed,
            ..crate::testing::admission()
        };
        for load in [load(100, 50, 1.0, 9), load(0, 0, 0.0, 0)] {
            assert_eq!(next_limit(&config, 256, &load, PRESSED), 256);
        }
    }

    /// An engine with room for 64 requests: the limit comes to it from above and below, and stays near.
    #[test]
    fn the_limit_finds_the_engines_capacity() {
        for start in [8, 1024] {
            let config = Admission {
                start_per_engine: start,
                ..crate::testing::admission()
            };
            let (mut limit, mut seen) = (start, Vec::new());
            for _ in 0..200 {
                let rollouts = limit.min(1500);
                let report = load(
                    rollouts.min(64),
                    rollouts.saturating_sub(64),
                    f64::from(rollouts.min(64)) / 64.0 * 0.95,
                    0,
                );
                let in_flight = InFlight {
                    rollouts: rollouts as usize,
                    allowed: limit as usize,
                    engines: 1,
                };
                limit = next_limit(&config, limit, &report, in_flight);
                seen.push(limit);
            }
            let late = &seen[100..];
            assert!(
                late.iter().all(|limit| (40..=90).contains(limit)),
                "{late:?}"
            );
        }
    }

    #[test]
    fn evaluations_have_their_share_and_at_least_one() {
        let config = Admission {
            evaluation_share: 0.25,
            ..crate::testing::admission()
        };
        let limits: Vec<usize> = [0, 1, 3, 8, 100]
            .map(|limit| evaluation_limit(&config, limit))
            .into();
        assert_eq!(limits, [0, 1, 1, 2, 25]);
    }

    #[test]
    fn never_beyond_the_last_step() {
        let config = config_with(2);
        assert_eq!(allowed(&config, Some(PolicyVersion(9)), Step(10)), 64);
        assert_eq!(allowed(&config, Some(PolicyVersion(9)), Step(11)), 0);
    }
}
