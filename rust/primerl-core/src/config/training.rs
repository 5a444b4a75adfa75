//! What rollouts become, and what is learnt from them.

use serde::{Deserialize, Serialize};

/// What the policy learns from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainingMode {
    /// The rewards of what it sampled.
    #[default]
    Rl,
    /// A teacher's log-probabilities of what it sampled: [`crate::Effect::ScoreByTeacher`].
    Opd,
    /// What a teacher answered in its place.
    Sft,
    /// Its own log-probabilities of what it sampled, having seen how an expert answers: [`crate::Effect::ScoreByTeacher`].
    Opsd,
}

impl TrainingMode {
    /// The default, and the only one in runs of before there was another.
    pub fn is_rl(&self) -> bool {
        *self == TrainingMode::Rl
    }

    /// Whether every token of a group gets a log-probability that the policy is drawn to.
    pub fn is_scored(&self) -> bool {
        matches!(self, TrainingMode::Opd | TrainingMode::Opsd)
    }
}

/// Which sequences a rollout's turns become; see [`crate::sample`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrajectoryStrategy {
    /// Turns that extend each other are one sample.
    Interleaved,
    /// Each turn is a sample, with all before it as context.
    Branching,
}

/// What becomes of rollouts the environment cut short (too many tokens, or turns).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TruncatedRollouts {
    /// They are trained as all others.
    Train,
    /// Their rewards count in their group's baseline, their tokens are not trained.
    Mask,
    /// They count as failed attempts.
    Drop,
}

/// What becomes of samples longer than `seq_len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LongSamples {
    /// They are dropped.
    Drop,
    /// Their tails are cut off; one with nothing left to train is dropped.
    Truncate,
}

/// What becomes of the slot of a rollout that is cancelled as stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnCancel {
    /// Another rollout takes its place.
    Refill,
    /// The slot is given up.
    Drop,
}
