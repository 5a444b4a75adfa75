//! `[admission]`: how many rollouts may be in flight, as far as the engines are concerned.

use primerl_core::config::{Admission, LimitRule};
use serde::Deserialize;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitConfig {
    Adaptive,
    Fixed,
}

/// Bounds are the core's (`Config::validate`).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdmissionConfig {
    pub limit: LimitConfig,
    pub start_per_engine: u32,
    pub min_per_engine: u32,
    pub max_per_engine: u32,
    pub kv_cache_target: f64,
    pub increase: u32,
    pub decrease_factor: f64,
    pub evaluation_share: f64,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        let core = Admission::default();
        AdmissionConfig {
            limit: match core.limit {
                LimitRule::Adaptive => LimitConfig::Adaptive,
                LimitRule::Fixed => LimitConfig::Fixed,
            },
            start_per_engine: core.start_per_engine,
            min_per_engine: core.min_per_engine,
            max_per_engine: core.max_per_engine,
            kv_cache_target: core.kv_cache_target,
            increase: core.increase,
            decrease_factor: core.decrease_factor,
            evaluation_share: core.evaluation_share,
        }
    }
}

impl AdmissionConfig {
    pub fn to_core(&self) -> Admission {
        Admission {
            limit: match self.limit {
                LimitConfig::Adaptive => LimitRule::Adaptive,
                LimitConfig::Fixed => LimitRule::Fixed,
            },
            start_per_engine: self.start_per_engine,
            min_per_engine: self.min_per_engine,
            max_per_engine: self.max_per_engine,
            kv_cache_target: self.kv_cache_target,
            increase: self.increase,
            decrease_factor: self.decrease_factor,
            evaluation_share: self.evaluation_share,
        }
    }
}
