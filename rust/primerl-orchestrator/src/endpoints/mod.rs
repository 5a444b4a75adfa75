//! The endpoints for the run's own processes, for people and for tools. The gateway has those for agents.

pub(crate) mod engines;
pub(crate) mod envs;
mod joining;
mod metrics;
mod rollout_waits;
pub(crate) mod status;
pub(crate) mod trainer;
pub(crate) mod weights;

pub(crate) use joining::config;
