//! Section `[buffer]`.

use super::ConfigError;
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

impl Default for Buffer {
    /// Nothing is filtered.
    fn default() -> Self {
        Buffer {
            online_difficulty_filtering: false,
            easy_threshold: 0.8,
            hard_threshold: 0.2,
            easy_fraction: 0.0,
            hard_fraction: 0.0,
            seed: None,
        }
    }
}

impl Buffer {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        for (field, value) in [
            ("easy_threshold", self.easy_threshold),
            ("hard_threshold", self.hard_threshold),
        ] {
            if !value.is_finite() {
                return Err(ConfigError::Threshold { field, value });
            }
        }
        let (hard, easy) = (self.hard_threshold, self.easy_threshold);
        if hard >= easy {
            return Err(ConfigError::Thresholds { hard, easy });
        }
        let fractions = [
            ("easy_fraction", self.easy_fraction),
            ("hard_fraction", self.hard_fraction),
        ];
        match fractions
            .into_iter()
            .find(|(_, value)| !(0.0..=1.0).contains(value))
        {
            Some((field, value)) => Err(ConfigError::Fraction { field, value }),
            None => Ok(()),
        }
    }
}
