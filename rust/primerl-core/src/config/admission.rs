//! How many rollouts may be in flight, as far as the engines are concerned.

use super::ConfigError;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitRule {
    /// Follows the engines' load (see [`crate::admission`]).
    #[default]
    Adaptive,
    /// Stays at `start_per_engine`.
    Fixed,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Admission {
    pub limit: LimitRule,
    /// Rollouts in flight an engine is trusted with before it has reported its load; at least 1.
    pub start_per_engine: u32,
    /// The adaptive limit never goes below; 1 to `start_per_engine`.
    pub min_per_engine: u32,
    /// The adaptive limit never goes above; at least `start_per_engine`.
    pub max_per_engine: u32,
    /// Share of an engine's KV cache above which it counts as full; above 0, up to 1.
    pub kv_cache_target: f64,
    /// Rollouts added to an engine's limit by a report that finds room while the limit is what holds back; at least 1.
    pub increase: u32,
    /// What the limit of a full engine is multiplied by; above 0, below 1.
    pub decrease_factor: f64,
    /// Share of the rollouts in flight that evaluations may have, and are kept free for them, during training;
    /// above 0, below 1.
    pub evaluation_share: f64,
}

impl Default for Admission {
    fn default() -> Self {
        Admission {
            limit: LimitRule::Adaptive,
            start_per_engine: 256,
            min_per_engine: 8,
            max_per_engine: 4096,
            kv_cache_target: 0.9,
            increase: 16,
            decrease_factor: 0.8,
            evaluation_share: 0.5,
        }
    }
}

impl Admission {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let (start, min, max) = (
            self.start_per_engine,
            self.min_per_engine,
            self.max_per_engine,
        );
        let is_share = |value: f64| value > 0.0 && value < 1.0;
        let checks = [
            (
                "start_per_engine",
                f64::from(start),
                start >= 1,
                "set it to at least 1",
            ),
            (
                "min_per_engine",
                f64::from(min),
                min >= 1 && min <= start,
                "set it to at least 1 and at most start_per_engine",
            ),
            (
                "max_per_engine",
                f64::from(max),
                max >= start,
                "set it to at least start_per_engine",
            ),
            (
                "kv_cache_target",
                self.kv_cache_target,
                self.kv_cache_target > 0.0 && self.kv_cache_target <= 1.0,
                "set it above 0 and at most to 1",
            ),
            (
                "increase",
                f64::from(self.increase),
                self.increase >= 1,
                "set it to at least 1",
            ),
            (
                "decrease_factor",
                self.decrease_factor,
                is_share(self.decrease_factor),
                "set it above 0 and below 1",
            ),
            (
                "evaluation_share",
                self.evaluation_share,
                is_share(self.evaluation_share),
                "set it above 0 and below 1, so that neither class starves",
            ),
        ];
        match checks.into_iter().find(|(_, _, good, _)| !good) {
            Some((field, value, _, hint)) => Err(ConfigError::Admission { field, value, hint }),
            None => Ok(()),
        }
    }
}
