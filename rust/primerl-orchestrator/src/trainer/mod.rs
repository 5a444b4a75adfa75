//! The trainer's side: batches out, weights in.

pub mod batch;
pub(crate) mod endpoints;
pub(crate) mod holder;
pub mod manifest;
mod process;
