//! What a complete group is trained on: its advantages, and in distillation the teacher's log-probabilities.

mod algorithm;
mod awaited;
mod custom;
mod length;
mod spread;
mod teacher;

pub use algorithm::{ScoredGroup, advantages, grpo, max_rl, rloo};
pub(crate) use awaited::{Signals, Source};
pub use length::{Part, length_scales};
pub(crate) use spread::{SMALLEST_DIFFERENCE, differ, mean, standard_deviation};
