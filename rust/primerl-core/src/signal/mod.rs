//! What a complete group waits for before it is ready: the advantages of a custom algorithm, and in distillation the
//! teacher's log-probabilities.

mod awaited;
mod custom;
mod teacher;

pub(crate) use awaited::{Signals, Source};
