//! Rewards to advantages: the algorithms, their formulas, and what of them is in a config. No stage of the run is known here.

mod algorithm;
mod baseline;
mod length;
mod penalty;
mod scored_group;
mod settings;
mod spread;

pub use algorithm::{AlgorithmKind, advantages, grpo, max_rl, rloo};
pub use baseline::Baselines;
pub use length::{Part, length_scales};
pub use penalty::{TraceLength, penalise};
pub use scored_group::ScoredGroup;
pub use settings::{Algorithm, AlgorithmProblem, Echo, LengthNormalization, LengthPenalty};
pub(crate) use spread::{SMALLEST_DIFFERENCE, differ, mean, standard_deviation};

#[cfg(test)]
mod tests;
