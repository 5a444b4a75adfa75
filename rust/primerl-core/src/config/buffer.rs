//! Section `[buffer]`.

use serde::{Deserialize, Serialize};

/// How hard examples are, and what follows from it; the rules are those of [`crate::curriculum`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Buffer {
    /// Draw by difficulty, and do not train groups whose advantages would all be 0. Off: all are drawn and trained.
    pub online_difficulty_filtering: bool,
    /// An example is easy when the mean reward of its last group is at least this.
    pub easy_threshold: f64,
    /// An example is hard when the mean reward of its last group is at most this.
    pub hard_threshold: f64,
    /// Weight of an easy example in the draw, where a normal one has 1; 0 is never.
    pub easy_fraction: f64,
    /// Weight of a hard example in the draw, likewise.
    pub hard_fraction: f64,
    /// Seed of the order of examples; `None` is the run's.
    pub seed: Option<u64>,
}

impl Buffer {
    /// Nothing is filtered.
    pub fn off() -> Buffer {
        Buffer {
            online_difficulty_filtering: false,
            easy_threshold: 1.0,
            hard_threshold: 0.0,
            easy_fraction: 0.0,
            hard_fraction: 0.0,
            seed: None,
        }
    }
}
