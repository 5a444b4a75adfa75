//! Environment workers: the wire between them and the orchestrator, and both of its ends.

pub mod client;
pub mod wire;
