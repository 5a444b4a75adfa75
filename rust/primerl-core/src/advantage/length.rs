//! Loss normalisation: per token, per sequence, or by a constant.

use super::LengthNormalization;

/// A sample's part in the step.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Number of the sequence (trace) it belongs to, from 0 without gaps. A sequence may have several samples.
    pub sequence: usize,
    /// Its trained tokens, at least 1.
    pub loss_tokens: u64,
    pub normalization: LengthNormalization,
}

/// For each sample, the factor by which its advantages are multiplied, so that the trainer's loss is normalised as asked.
///
/// The trainer sums over all trained tokens t of the batch and divides by their number T:
/// ```text
/// L = (1/T) sum_t  a_t l_t            l_t: the loss of token t for advantage 1
/// ```
/// With S sequences, n_i trained tokens in sequence i, and C = `constant`, the three normalisations and the factors
/// that make L equal to them are
/// ```text
/// token     (1/T) sum_i sum_t A l_t              a = A
/// sequence  (1/S) sum_i (1/n_i) sum_t A l_t      a = A T / (S n_i)     GRPO's 1/|o_i|, arXiv:2402.03300, equation 3
/// constant  (1/S) sum_i (1/C) sum_t A l_t        a = A T / (S C)       Dr. GRPO, arXiv:2503.20783
/// ```
/// Where parts ask for different ones, each sequence is in the sum as it asks, T and S being those of the whole batch.
/// Exact as long as the loss is linear in the advantage, as policy gradients are; terms without an advantage (a
/// penalty on the ratio) stay normalised by tokens.
pub fn length_scales(parts: &[Part], constant: f64) -> Vec<f32> {
    let sequences = parts
        .iter()
        .map(|part| part.sequence + 1)
        .max()
        .unwrap_or(0);
    let mut lengths = vec![0_u64; sequences];
    for part in parts {
        lengths[part.sequence] += part.loss_tokens;
    }
    let tokens: u64 = lengths.iter().sum();
    let mean_length = tokens as f64 / sequences.max(1) as f64;
    parts
        .iter()
        .map(|part| match part.normalization {
            LengthNormalization::Token => 1.0,
            LengthNormalization::Sequence => (mean_length / lengths[part.sequence] as f64) as f32,
            LengthNormalization::Constant => (mean_length / constant) as f32,
        })
        .collect()
}
