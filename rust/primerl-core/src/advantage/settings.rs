//! How rewards become advantages, as a config has it.

use super::AlgorithmKind;
use crate::turn::MessageRole;
use serde::{Deserialize, Serialize};

/// How rewards become advantages; the formulas are next to [`AlgorithmKind`].
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

/// What a trace pays for its length, as a share of its group's mean reward; [`crate::advantage::penalise`] has the formula.
/// Each weight is finite and at least 0, and is paid in full by the trace that has most of the group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LengthPenalty {
    /// Weight of the tokens that the policy sampled.
    pub num_output_tokens_weight: f64,
    /// Weight of the tokens that it was given: prompts and results of tools, each once.
    pub num_input_tokens_weight: f64,
    /// Weight of its turns.
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

    /// Which of its keys do not go together.
    pub fn problem(&self) -> Option<AlgorithmProblem> {
        let refuse = |key, problem, remedy| {
            Some(AlgorithmProblem {
                key,
                problem,
                remedy,
            })
        };
        if self.normalize_std && self.kind != AlgorithmKind::Grpo {
            return refuse(
                "normalize_std",
                "divides GRPO's advantages and no other type's",
                "leave it false, or set type = \"grpo\"",
            );
        }
        let is_grpo = matches!(self.kind, AlgorithmKind::Grpo | AlgorithmKind::DrGrpo);
        if self.length_penalty.is_some() && !is_grpo {
            return refuse(
                "length_penalty",
                "is subtracted before GRPO's baseline and no other type's",
                "omit it, or set type = \"grpo\" or \"dr_grpo\"",
            );
        }
        let learns_nothing = |echo: &Echo| echo.weights().iter().all(|weight| *weight == 0.0);
        if self.echo.as_ref().is_some_and(learns_nothing) {
            return refuse(
                "echo",
                "has no weight above 0",
                "give one of system, user, assistant and tool",
            );
        }
        let own = self.kind.problem();
        if own.is_some() {
            return own;
        }
        if self.shuffle_advantages && !self.kind.is_of_traces() {
            return refuse(
                "shuffle_advantages",
                "cannot exchange advantages of single tokens",
                "shuffle them in your function",
            );
        }
        None
    }
}

/// What weighs the same in a step's loss; [`crate::advantage::length_scales`] has the algebra.
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

impl LengthPenalty {
    /// The weights of output tokens, input tokens, turns.
    pub fn weights(&self) -> [f64; 3] {
        [
            self.num_output_tokens_weight,
            self.num_input_tokens_weight,
            self.num_turns_weight,
        ]
    }
}

/// What an algorithm cannot be, by the key to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} {problem}: {remedy}")]
pub struct AlgorithmProblem {
    pub key: &'static str,
    pub problem: &'static str,
    pub remedy: &'static str,
}
