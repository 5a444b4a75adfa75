use super::*;
use crate::advantage::{Part, length_scales};
use crate::config::{Algorithm, LengthNormalization};
use crate::testing::grpo as grpo_algorithm;
use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

fn algorithm(kind: AlgorithmKind) -> Algorithm {
    Algorithm {
        kind,
        ..grpo_algorithm()
    }
}

fn rng() -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(7)
}

fn batch(algorithm: &Algorithm, rewards: &[Vec<f64>], rng: &mut ChaCha8Rng) -> Vec<Vec<f32>> {
    let groups: Vec<ScoredGroup> = rewards
        .iter()
        .map(|rewards| ScoredGroup::plain(algorithm, rewards.clone()))
        .collect();
    advantages(&groups, &mut Baselines::default(), rng)
}

#[test]
fn advantage_is_reward_minus_the_groups_mean() {
    let rewards = [vec![1.0, 0.0, 0.5, 0.5], vec![2.0, 4.0]];
    let expected = vec![vec![0.5, -0.5, 0.0, 0.0], vec![-1.0, 1.0]];
    for kind in [AlgorithmKind::Grpo, AlgorithmKind::DrGrpo] {
        assert_eq!(batch(&algorithm(kind), &rewards, &mut rng()), expected);
    }
}

#[test]
fn normalised_by_the_groups_deviation() {
    let deviation = 5.0_f64.sqrt();
    let expected: Vec<f32> = [-3.0, -1.0, 1.0, 3.0]
        .iter()
        .map(|x| (x / deviation) as f32)
        .collect();
    assert_eq!(grpo(&[2.0, 4.0, 6.0, 8.0], true), expected);
    assert_eq!(grpo(&[0.1, 0.1, 0.1], true), [0.0; 3]);
}

#[test]
fn left_out_of_its_own_baseline() {
    assert_eq!(
        rloo(&[1.0, 0.0, 0.0, 5.0]),
        [-2.0 / 3.0, -2.0, -2.0, 14.0 / 3.0]
    );
    assert_eq!(rloo(&[3.0]), [0.0]);
}

#[test]
fn relative_to_the_pass_rate() {
    assert_eq!(max_rl(&[1.0, 0.0, 0.0, 0.0]), [3.0, -1.0, -1.0, -1.0]);
    assert_eq!(max_rl(&[1.0, 1.0]), [0.0, 0.0]);
    assert_eq!(max_rl(&[0.0, 0.0]), [0.0, 0.0]);
}

#[test]
fn normalised_over_the_groups_that_use_it() {
    let global = algorithm(AlgorithmKind::ReinforcePlusPlus);
    let plain = grpo_algorithm();
    let groups = [
        (&global, vec![2.0, 4.0]),
        (&plain, vec![100.0, 300.0]),
        (&global, vec![6.0, 8.0]),
    ];
    let groups = groups.map(|(algorithm, rewards)| ScoredGroup::plain(algorithm, rewards));
    let got = advantages(&groups, &mut Baselines::default(), &mut rng());
    let deviation = 5.0_f64.sqrt();
    let scaled = |x: f64| (x / deviation) as f32;
    assert_eq!(got[0], [scaled(-3.0), scaled(-1.0)]);
    assert_eq!(got[1], [-100.0, 100.0]);
    assert_eq!(got[2], [scaled(1.0), scaled(3.0)]);
    assert_eq!(
        batch(&global, &[vec![0.3], vec![0.3]], &mut rng()),
        [[0.0], [0.0]]
    );
}

#[test]
fn shuffling_permutes_over_groups_and_is_seeded() {
    let rewards: Vec<Vec<f64>> = (0..8)
        .map(|group| (0..8).map(|i| f64::from(group * i * i % 13)).collect())
        .collect();
    let control = Algorithm {
        shuffle_advantages: true,
        ..grpo_algorithm()
    };
    let plain = batch(&grpo_algorithm(), &rewards, &mut rng());
    let shuffled = batch(&control, &rewards, &mut rng());
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
    assert_eq!(shuffled, batch(&control, &rewards, &mut rng()));
}

#[test]
fn only_groups_that_ask_for_it_are_shuffled() {
    let (plain, control) = (
        grpo_algorithm(),
        Algorithm {
            shuffle_advantages: true,
            ..grpo_algorithm()
        },
    );
    let rewards = |group: u32| (0..6).map(|i| f64::from(group * i * i % 13)).collect();
    let groups: Vec<ScoredGroup> = (1..7)
        .map(|group| ScoredGroup::plain(if group == 3 { &plain } else { &control }, rewards(group)))
        .collect();
    assert_eq!(
        advantages(&groups, &mut Baselines::default(), &mut rng())[2],
        grpo(&rewards(3), false)
    );
}

#[test]
fn rounding_is_no_signal_to_any_algorithm() {
    let rewards = [vec![0.3, 0.1 + 0.2, 0.3], vec![0.1 + 0.2, 0.3, 0.3]];
    let near_nothing = [vec![0.0, 0.1 + 0.2 - 0.3]];
    let kinds = [
        AlgorithmKind::Grpo,
        AlgorithmKind::DrGrpo,
        AlgorithmKind::Rloo,
        AlgorithmKind::MaxRl,
        AlgorithmKind::ReinforcePlusPlus,
    ];
    for kind in kinds {
        for normalize_std in [false, kind == AlgorithmKind::Grpo] {
            let algorithm = Algorithm {
                normalize_std,
                ..algorithm(kind.clone())
            };
            let got = batch(&algorithm, &rewards, &mut rng());
            assert_eq!(got, [[0.0; 3]; 2], "{algorithm:?}");
            let got = batch(&algorithm, &near_nothing, &mut rng());
            assert_eq!(got, [[0.0; 2]], "{algorithm:?}");
        }
    }
    assert_ne!(grpo(&[0.3, 0.1 + 0.2, 0.4], true), [0.0; 3]);
}

#[test]
fn seats_are_compared_with_themselves() {
    // One that always wins and one that always loses: what tells their rollouts apart is small.
    let rewards = vec![10.0, 0.0, 12.0, 1.0, 14.0, 2.0];
    for kind in [AlgorithmKind::Grpo, AlgorithmKind::Rloo] {
        let algorithm = Algorithm {
            kind,
            normalize_std: false,
            ..grpo_algorithm()
        };
        let of = |seats: Vec<&'static str>, rewards: &[f64]| {
            let group = ScoredGroup {
                seats,
                ..ScoredGroup::plain(&algorithm, rewards.to_vec())
            };
            advantages(&[group], &mut Baselines::default(), &mut rng()).remove(0)
        };
        let got = of(["asks", "answers"].repeat(3), &rewards);
        let asks = of(Vec::new(), &[10.0, 12.0, 14.0]);
        let answers = of(vec!["answers"; 3], &[0.0, 1.0, 2.0]);
        assert_eq!([got[0], got[2], got[4]], asks[..]);
        assert_eq!([got[1], got[3], got[5]], answers[..]);
        assert!(got[0] < 0.0 && got[5] > 0.0);
    }
}

#[test]
fn nothing_gives_nothing() {
    let control = Algorithm {
        shuffle_advantages: true,
        ..grpo_algorithm()
    };
    assert_eq!(
        batch(&control, &[vec![]], &mut rng()),
        vec![Vec::<f32>::new()]
    );
    assert_eq!(length_scales(&[], 1.0), Vec::<f32>::new());
}

/// Loss of one sequence as its normalisation defines it, without the 1/S (or, by token, the 1/T) before the sum.
fn by_definition(normalization: LengthNormalization, losses: &[f64], constant: f64) -> f64 {
    let sum: f64 = losses.iter().sum();
    match normalization {
        LengthNormalization::Token => sum,
        LengthNormalization::Sequence => sum / losses.len() as f64,
        LengthNormalization::Constant => sum / constant,
    }
}

proptest! {
    /// The trainer's sum over tokens divided by their number, against the definition written out.
    #[test]
    fn the_trainers_loss_is_the_normalised_one(
        sequences in prop::collection::vec((prop::collection::vec(-3.0..3.0_f64, 1..40), 1_usize..40, 0..3), 1..20),
        constant in 1.0..100.0_f64,
    ) {
        use LengthNormalization::*;
        let normalization = |number: i32| [Token, Sequence, Constant][number as usize];
        let tokens: f64 = sequences.iter().map(|(losses, ..)| losses.len() as f64).sum();
        // Each sequence in one sample, or in two.
        let (mut parts, mut losses_of_parts) = (Vec::new(), Vec::new());
        for (sequence, (losses, cut, number)) in sequences.iter().enumerate() {
            let (first, second) = losses.split_at((*cut).min(losses.len()));
            for losses in [first, second].into_iter().filter(|losses| !losses.is_empty()) {
                parts.push(Part { sequence, loss_tokens: losses.len() as u64, normalization: normalization(*number) });
                losses_of_parts.push(losses);
            }
        }
        let scales = length_scales(&parts, constant);
        let trained = scales.iter().zip(&losses_of_parts).map(|(scale, losses)| {
            losses.iter().map(|loss| f64::from(*scale) * loss).sum::<f64>()
        });
        let trained = trained.sum::<f64>() / tokens;
        let defined = sequences.iter().map(|(losses, _, number)| {
            let normalization = normalization(*number);
            let count = if normalization == Token { tokens } else { sequences.len() as f64 };
            by_definition(normalization, losses, constant) / count
        });
        let (defined, size) = (defined.sum::<f64>(), 1.0 + 3.0 * sequences.len() as f64);
        prop_assert!((trained - defined).abs() < 1e-5 * size, "{trained} is not {defined}");
    }
}
