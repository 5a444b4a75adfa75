//! What rollouts become: samples, by the rules; advantages, by an algorithm.

use super::ConfigError;
use crate::turn::MessageRole;
use serde::{Deserialize, Serialize};

pub use crate::signal::AlgorithmKind;

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
    /// What it is where nothing was said, and before there was another.
    pub fn is_rl(&self) -> bool {
        *self == TrainingMode::Rl
    }

    /// Whether every token of a group gets a log-probability that the policy is drawn to.
    pub fn is_scored(&self) -> bool {
        matches!(self, TrainingMode::Opd | TrainingMode::Opsd)
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
    /// GRPO and Dr. GRPO only: what a trace took is subtracted from its reward first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length_penalty: Option<LengthPenalty>,
    /// What the environment says to what the policy does is learnt, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub echo: Option<Echo>,
}

/// Weights of the cross-entropy of what the environment says, by who says it: 0 or more, not all 0. ECHO (Shrivastava et
/// al. 2026, arXiv:2605.24517): `L = L_RL + lambda * mean over those tokens of -log p`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Echo {
    pub system: f64,
    pub user: f64,
    pub assistant: f64,
    pub tool: f64,
}

impl Echo {
    pub fn weight(&self, role: MessageRole) -> f64 {
        match role {
            MessageRole::System => self.system,
            MessageRole::User => self.user,
            MessageRole::Assistant => self.assistant,
            MessageRole::Tool => self.tool,
        }
    }

    fn weights(&self) -> [f64; 4] {
        MessageRole::ALL.map(|role| self.weight(role))
    }
}

/// What a trace pays for its length, as a share of its group's mean reward; [`crate::signal::penalise`] has the formula.
/// Each weight is finite and at least 0, and is paid in full by the trace that has most of the group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LengthPenalty {
    /// Of tokens that the policy sampled.
    pub num_output_tokens_weight: f64,
    /// Of tokens that it was given: prompts and results of tools, each once.
    pub num_input_tokens_weight: f64,
    /// Of its turns.
    pub num_turns_weight: f64,
}

impl Algorithm {
    /// GRPO without any addition.
    pub fn plain() -> Algorithm {
        Algorithm {
            kind: AlgorithmKind::Grpo,
            normalize_std: false,
            length_normalization: LengthNormalization::Token,
            shuffle_advantages: false,
            length_penalty: None,
            echo: None,
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
        let is_grpo = matches!(self.kind, AlgorithmKind::Grpo | AlgorithmKind::DrGrpo);
        if self.length_penalty.is_some() && !is_grpo {
            return refuse(
                "length_penalty",
                "is subtracted before GRPO's baseline and no other type's: leave it out, or set type = \"grpo\" or \
                 \"dr_grpo\"",
            );
        }
        let learns_nothing = |echo: &Echo| echo.weights().iter().all(|weight| *weight == 0.0);
        if self.echo.as_ref().is_some_and(learns_nothing) {
            return refuse(
                "echo",
                "has no weight above 0: give one of system, user, assistant and tool",
            );
        }
        if let Some((field, problem)) = self.kind.problem() {
            return refuse(field, problem);
        }
        if self.shuffle_advantages && !self.kind.is_of_traces() {
            return refuse(
                "shuffle_advantages",
                "cannot exchange advantages of single tokens: shuffle them in your function",
            );
        }
        Ok(())
    }
}

impl LengthPenalty {
    /// Of output tokens, input tokens, turns.
    pub fn weights(&self) -> [f64; 3] {
        [
            self.num_output_tokens_weight,
            self.num_input_tokens_weight,
            self.num_turns_weight,
        ]
    }
}
