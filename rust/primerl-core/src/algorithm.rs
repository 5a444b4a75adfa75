//! Rewards to advantages.
//!
//! The unit is a trace, one seat of one rollout, with a reward of its own. A rollout with one seat is one trace.

use crate::config::Algorithm;
use rand::Rng;
use rand::seq::SliceRandom;

/// Advantages of the traces of one batch.
///
/// `rewards[g][i]` is the reward of trace i of group g; the result has the same shape. With the trainer's loss
/// `-advantage * ratio` summed over tokens, a trace's advantage holds for each of its sampled tokens.
///
/// GRPO (Shao et al. 2024, arXiv:2402.03300, equation 3): `A = r - mean(r of the group)`; with `normalize_std` divided
/// by the group's population standard deviation (0 stays 0). Not taken from there: the division by the sequence's
/// length (Dr. GRPO, arXiv:2503.20783, shows its bias).
pub fn advantages(
    algorithm: &Algorithm,
    rewards: &[Vec<f64>],
    rng: &mut impl Rng,
) -> Vec<Vec<f32>> {
    let Algorithm::Grpo {
        normalize_std,
        shuffle_advantages,
    } = *algorithm;
    let mut advantages: Vec<Vec<f32>> = rewards
        .iter()
        .map(|group| group_advantages(group, normalize_std))
        .collect();
    if shuffle_advantages {
        shuffle(&mut advantages, rng);
    }
    advantages
}

fn group_advantages(rewards: &[f64], normalize_std: bool) -> Vec<f32> {
    let mean = mean(rewards.iter().copied());
    let scale = match normalize_std {
        true => standard_deviation(rewards),
        false => 1.0,
    };
    rewards
        .iter()
        .map(|reward| {
            if scale > 0.0 {
                ((reward - mean) / scale) as f32
            } else {
                0.0
            }
        })
        .collect()
}

/// Permutes over all groups: the values stay, their ties to what was sampled are cut.
fn shuffle(advantages: &mut [Vec<f32>], rng: &mut impl Rng) {
    let mut flat: Vec<f32> = advantages.iter().flatten().copied().collect();
    flat.shuffle(rng);
    for (slot, value) in advantages.iter_mut().flatten().zip(flat) {
        *slot = value;
    }
}

/// 0 for no values.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_u64), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// Population standard deviation; 0 for no values. Exactly 0 where all values are equal: a mean that rounds would
/// otherwise make a tiny deviation, and `normalize_std` noise of size 1 from it.
pub(crate) fn standard_deviation(values: &[f64]) -> f64 {
    if values.iter().all(|value| *value == values[0]) {
        return 0.0;
    }
    let center = mean(values.iter().copied());
    mean(values.iter().map(|value| (value - center).powi(2))).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    fn grpo(normalize_std: bool, shuffle_advantages: bool) -> Algorithm {
        Algorithm::Grpo {
            normalize_std,
            shuffle_advantages,
        }
    }

    fn rng() -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(7)
    }

    #[test]
    fn advantage_is_reward_minus_the_groups_mean() {
        let rewards = [vec![1.0, 0.0, 0.5, 0.5], vec![2.0, 4.0]];
        let expected = vec![vec![0.5, -0.5, 0.0, 0.0], vec![-1.0, 1.0]];
        assert_eq!(
            advantages(&grpo(false, false), &rewards, &mut rng()),
            expected
        );
    }

    #[test]
    fn normalised_by_the_groups_deviation() {
        let rewards = [vec![2.0, 4.0, 6.0, 8.0], vec![0.1, 0.1, 0.1]];
        let got = advantages(&grpo(true, false), &rewards, &mut rng());
        let deviation = 5.0_f64.sqrt();
        let expected: Vec<f32> = [-3.0, -1.0, 1.0, 3.0]
            .iter()
            .map(|x| (x / deviation) as f32)
            .collect();
        assert_eq!(got, vec![expected, vec![0.0; 3]]);
    }

    #[test]
    fn shuffling_permutes_over_groups_and_is_seeded() {
        let rewards: Vec<Vec<f64>> = (0..8)
            .map(|group| (0..8).map(|i| f64::from(group * i * i % 13)).collect())
            .collect();
        let plain = advantages(&grpo(false, false), &rewards, &mut rng());
        let shuffled = advantages(&grpo(false, true), &rewards, &mut rng());
        let sorted = |values: &[Vec<f32>]| {
            let mut flat: Vec<f32> = values.iter().flatten().copied().collect();
            flat.sort_by(f32::total_cmp);
            flat
        };
        assert_eq!(sorted(&plain), sorted(&shuffled));
        assert_ne!(plain, shuffled);
        assert!(
            plain
                .iter()
                .zip(&shuffled)
                .any(|(a, b)| sorted(std::slice::from_ref(a)) != sorted(std::slice::from_ref(b)))
        );
        assert_eq!(
            shuffled,
            advantages(&grpo(false, true), &rewards, &mut rng())
        );
    }

    #[test]
    fn nothing_gives_nothing() {
        assert_eq!(
            advantages(&grpo(true, true), &[vec![]], &mut rng()),
            vec![Vec::<f32>::new()]
        );
    }
}
