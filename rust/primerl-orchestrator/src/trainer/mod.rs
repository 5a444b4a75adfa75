//! Which trainer has the run.

pub(crate) mod holder;
mod process;
