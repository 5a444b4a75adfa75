//! The endpoints of the run's own processes, of people and of tools. Those of agents are the gateway's.

pub(crate) mod engines;
pub(crate) mod envs;
mod joining;
mod metrics;
mod rollout_waits;
pub(crate) mod status;
pub(crate) mod trainer;

pub(crate) use joining::config;
