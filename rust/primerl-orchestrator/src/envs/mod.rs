//! Environment workers: the protocol between them and the orchestrator, and both of its ends.

pub mod client;
pub(crate) mod joining;
pub(crate) mod refusals;
pub mod wire;
pub mod workers;
