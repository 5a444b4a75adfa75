//! The trainer's side: batches out, weights in.

pub(crate) mod batch;
pub(crate) mod endpoints;
pub mod manifest;
