//! Signals of training on a teacher. They need the teacher's log-probabilities, or its tokens, which a run does not
//! fetch yet: the config refuses `opd` and `sft`.

/// On-policy distillation's advantage of each sampled token: `log p_teacher - log p_student`, nats, both of the token
/// that the student sampled. Its mean over tokens is a sampled estimate of minus the reverse KL divergence
/// KL(student || teacher), so that raising it draws the student to the teacher where the student goes (Gu et al. 2023,
/// arXiv:2306.08543; Agarwal et al. 2023, arXiv:2306.13649). The lists are of equal length.
pub fn reverse_kl_signal(student_logprobs: &[f32], teacher_logprobs: &[f32]) -> Vec<f32> {
    assert_eq!(student_logprobs.len(), teacher_logprobs.len());
    let pairs = student_logprobs.iter().zip(teacher_logprobs);
    pairs.map(|(student, teacher)| teacher - student).collect()
}

/// Weights of single tokens where a batch mixes components, each a loss of its own (policy gradient on the policy's
/// tokens, cross-entropy on a teacher's): component k with weight w_k and T_k trained tokens.
///
/// The trainer divides the sum over all tokens by their number T; with the weight `w_k T / T_k` for the tokens of
/// component k the loss is `sum_k w_k mean_k`, whatever the components' sizes. A component without tokens has weight 0.
pub fn component_weights(components: &[(f64, u64)]) -> Vec<f32> {
    let tokens: u64 = components.iter().map(|(_, tokens)| tokens).sum();
    components
        .iter()
        .map(|(weight, own)| match own {
            0 => 0.0,
            own => (weight * tokens as f64 / *own as f64) as f32,
        })
        .collect()
}
