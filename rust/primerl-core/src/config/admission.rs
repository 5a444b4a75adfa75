//! How many rollouts may be in flight, as far as the engines are concerned.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitRule {
    /// Follows the engines' load (see [`crate::admission`]).
    Adaptive,
    /// Stays at `start_per_engine`.
    Fixed,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
