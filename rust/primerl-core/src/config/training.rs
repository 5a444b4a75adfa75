//! What rollouts become: samples, by the rules; advantages, by an algorithm.

use super::ConfigError;
use crate::time::Duration;
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
}

impl TrainingMode {
    /// What it is where nothing was said, and before there was another.
    pub fn is_rl(&self) -> bool {
        *self == TrainingMode::Rl
    }
}

/// How rewards become advantages; the formulas are in [`crate::signal`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Algorithm {
    pub kind: AlgorithmKind,
    /// GRPO only: also divide by the group's standard deviation.
    pub normalize_std: bool,
    pub length_normalization: LengthNormalization,
    /// Negative control: permute advantages over the whole batch, so that nothing can be learnt.
    pub shuffle_advantages: bool,
}

impl Default for Algorithm {
    /// Plain GRPO.
    fn default() -> Self {
        Algorithm {
            kind: AlgorithmKind::Grpo,
            normalize_std: false,
            length_normalization: LengthNormalization::Token,
            shuffle_advantages: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmKind {
    Grpo,
    DrGrpo,
    Rloo,
    MaxRl,
    ReinforcePlusPlus,
    /// A function of the user's, outside of the core: [`crate::Effect::ComputeAdvantages`].
    Custom {
        /// `module:function`, for whoever calls it.
        path: String,
        /// A group whose advantages are not there so long after they were asked for is dropped.
        timeout: Duration,
    },
}

impl AlgorithmKind {
    /// Whether an advantage compares a rollout with the others of its group.
    pub fn is_relative(&self) -> bool {
        match self {
            AlgorithmKind::Grpo
            | AlgorithmKind::DrGrpo
            | AlgorithmKind::Rloo
            | AlgorithmKind::MaxRl => true,
            AlgorithmKind::ReinforcePlusPlus | AlgorithmKind::Custom { .. } => false,
        }
    }
}

/// What weighs the same in a step's loss; [`crate::signal::length_scales`] has the algebra.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthNormalization {
    /// Every token.
    Token,
    /// Every sequence.
    Sequence,
    /// Every token, by a weight that does not depend on how long the batch's sequences are: 1 / `seq_len`.
    Constant,
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
    /// They are left out.
    Drop,
    /// Their tails are cut off; one with nothing left to train is left out.
    Truncate,
}

impl Algorithm {
    /// `name` is the environment's.
    pub(super) fn validate(&self, name: &str) -> Result<(), ConfigError> {
        let refuse = |field, problem| {
            Err(ConfigError::Algorithm {
                name: name.to_owned(),
                field,
                problem,
            })
        };
        if self.normalize_std && self.kind != AlgorithmKind::Grpo {
            return refuse(
                "normalize_std",
                "divides GRPO's advantages and no other type's: leave it false, or set type = \"grpo\"",
            );
        }
        let AlgorithmKind::Custom { path, timeout } = &self.kind else {
            return Ok(());
        };
        match path.split_once(':') {
            Some((module, function)) if !module.is_empty() && !function.is_empty() => {}
            _ => return refuse("path", "must be \"module:function\" for type = \"custom\""),
        }
        if timeout.0 == 0 {
            return refuse("timeout_s", "is 0: set it above 0");
        }
        if self.shuffle_advantages {
            return refuse(
                "shuffle_advantages",
                "cannot exchange advantages of single tokens: shuffle them in your function",
            );
        }
        Ok(())
    }
}
