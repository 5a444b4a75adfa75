//! What a complete group is trained on: its advantages, and in distillation the teacher's log-probabilities.

mod algorithm;
mod awaited;
mod baseline;
mod custom;
mod length;
mod penalty;
mod scored_group;
mod spread;
mod teacher;

pub use algorithm::{AlgorithmKind, advantages, grpo, max_rl, rloo};
pub(crate) use awaited::{Signals, Source};
pub use baseline::Baselines;
pub use length::{Part, length_scales};
pub use penalty::{TraceLength, penalise};
pub use scored_group::ScoredGroup;
pub(crate) use spread::{SMALLEST_DIFFERENCE, differ, mean, standard_deviation};

#[cfg(test)]
mod tests;
