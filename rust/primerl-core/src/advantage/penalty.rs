//! The length penalty: rewards less what their traces took.

use super::{LengthPenalty, mean};

/// What a trace took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceLength {
    /// Tokens that the policy sampled.
    pub output_tokens: u64,
    /// Tokens that it was given, each once: prompts and results of tools.
    pub input_tokens: u64,
    pub turns: u32,
}

impl TraceLength {
    fn parts(&self) -> [f64; 3] {
        [
            self.output_tokens as f64,
            self.input_tokens as f64,
            f64::from(self.turns),
        ]
    }
}

/// Rewards of traces that are compared with each other, less their penalties. With p the mean of the rewards (0 where it
/// is below), and o, i, t a trace's output tokens, input tokens and turns:
/// ```text
/// r' = r - p (w_o o / max(o) + w_i i / max(i) + w_t t / max(t))
/// ```
/// So a group that never succeeds pays nothing, and one that always does pays most: the gating by success of Arora and
/// Zanette 2025 (arXiv:2502.04463), by the group instead of the single answer, and linear in the length; the
/// terms are those of prime-rl's `linear` penalty. A maximum of 0 leaves its term out.
pub fn penalise(penalty: &LengthPenalty, rewards: &[f64], lengths: &[TraceLength]) -> Vec<f64> {
    let pass_rate = mean(rewards.iter().copied()).max(0.0);
    let mut longest = [0.0_f64; 3];
    for length in lengths {
        for (longest, part) in longest.iter_mut().zip(length.parts()) {
            *longest = longest.max(part);
        }
    }
    let share = |length: &TraceLength| -> f64 {
        let parts = length.parts().into_iter().zip(longest);
        let weighted = parts.zip(penalty.weights());
        weighted
            .map(|((part, longest), weight)| weight * part / longest.max(1.0))
            .sum()
    };
    let pairs = rewards.iter().zip(lengths);
    pairs
        .map(|(reward, length)| reward - pass_rate * share(length))
        .collect()
}
