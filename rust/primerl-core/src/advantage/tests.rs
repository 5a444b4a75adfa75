//! Length penalty, RAE and hierarchical GRPO against their formulas, written a second time in another way.

use super::*;
use crate::ids::{EnvironmentId, RolloutId};
use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

const SEATS: [&str; 3] = ["proposer", "solver", "judge"];

/// Reward, seat and length of each trace of one rollout.
type Traces = Vec<(f64, usize, [u32; 3])>;

fn group<'a>(algorithm: &'a Algorithm, environment: u32, rollouts: &[Traces]) -> ScoredGroup<'a> {
    let traces = || rollouts.iter().flatten();
    let numbers = rollouts.iter().enumerate();
    ScoredGroup {
        algorithm,
        environment: EnvironmentId(environment),
        rewards: traces().map(|(reward, _, _)| *reward).collect(),
        seats: traces().map(|(_, seat, _)| SEATS[*seat]).collect(),
        rollouts: numbers
            .flat_map(|(number, traces)| vec![RolloutId(number as u64 + 7); traces.len()])
            .collect(),
        lengths: traces()
            .map(|(_, _, [output, input, turns])| TraceLength {
                output_tokens: u64::from(*output),
                input_tokens: u64::from(*input),
                turns: *turns,
            })
            .collect(),
    }
}

fn computed(groups: &[ScoredGroup], baselines: &mut Baselines) -> Vec<Vec<f32>> {
    advantages(groups, baselines, &mut ChaCha8Rng::seed_from_u64(1))
}

fn close(got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!(
            (f64::from(*got) - expected).abs() < 1e-5,
            "{got} {expected}"
        );
    }
}

fn algorithm(kind: AlgorithmKind) -> Algorithm {
    Algorithm {
        kind,
        ..Algorithm::plain()
    }
}

fn penalised(weights: [f64; 3]) -> Algorithm {
    Algorithm {
        length_penalty: Some(LengthPenalty {
            num_output_tokens_weight: weights[0],
            num_input_tokens_weight: weights[1],
            num_turns_weight: weights[2],
        }),
        ..Algorithm::plain()
    }
}

#[test]
fn a_longer_answer_to_a_solved_example_is_worth_less() {
    let one = vec![vec![(1.0, 0, [100, 40, 2])], vec![(1.0, 0, [50, 40, 1])]];
    let algorithm = penalised([0.25, 0.1, 0.1]);
    let got = computed(&[group(&algorithm, 0, &one)], &mut Baselines::default());
    // 1 - (0.25 + 0.1 + 0.1) = 0.55, and 1 - (0.125 + 0.1 + 0.05) = 0.725.
    close(&got[0], &[-0.0875, 0.0875]);
    let failed = vec![vec![(0.0, 0, [100, 40, 2])], vec![(0.0, 0, [50, 40, 1])]];
    let got = computed(&[group(&algorithm, 0, &failed)], &mut Baselines::default());
    assert_eq!(got, [[0.0, 0.0]]);
}

#[test]
fn a_seat_is_measured_against_what_it_got_before() {
    let rae = algorithm(AlgorithmKind::Rae { decay: 0.5 });
    let won = vec![vec![(1.0, 0, [0; 3]), (-1.0, 1, [0; 3])]];
    let mut baselines = Baselines::default();
    let groups = [
        group(&rae, 0, &won),
        group(&rae, 0, &won),
        group(&rae, 1, &won),
    ];
    let got = computed(&groups, &mut baselines);
    assert_eq!(got, [[1.0, -1.0], [0.5, -0.5], [1.0, -1.0]]);
    // The next batch continues, and so does a run that resumes.
    let kept = serde_json::to_string(&baselines).expect("is plain");
    let mut kept: Baselines = serde_json::from_str(&kept).expect("was written");
    let next = computed(&groups[..1], &mut kept);
    assert_eq!(next, [[0.25, -0.25]]);
    assert_eq!(kept.get(EnvironmentId(0), "proposer"), 0.875);
    assert_eq!(baselines.get(EnvironmentId(0), "proposer"), 0.75);
    assert_eq!(baselines.get(EnvironmentId(0), "judge"), 0.0);
}

#[test]
fn solvers_are_compared_on_one_problem_and_proposers_across_them() {
    let hierarchical = algorithm(AlgorithmKind::HierarchicalGrpo {
        episode_agents: vec!["solver".to_owned()],
    });
    let easy = vec![(0.2, 0, [0; 3]), (1.0, 1, [0; 3]), (0.5, 1, [0; 3])];
    let hard = vec![(0.8, 0, [0; 3]), (0.0, 1, [0; 3]), (0.1, 1, [0; 3])];
    let got = computed(
        &[group(&hierarchical, 0, &[easy, hard])],
        &mut Baselines::default(),
    );
    close(&got[0], &[-0.3, 0.25, -0.25, 0.3, -0.05, 0.05]);
}

fn rollouts() -> impl Strategy<Value = Vec<Traces>> {
    let length = [0..500_u32, 0..500_u32, 0..9_u32];
    let trace = (0.0..1.0_f64, 0..SEATS.len(), length);
    proptest::collection::vec(proptest::collection::vec(trace, 1..4), 1..6)
}

proptest! {
    #[test]
    fn the_penalty_is_as_its_formula(rollouts in rollouts(), weights in [0.0..1.0, 0.0..1.0, 0.0..1.0]) {
        let algorithm = penalised(weights);
        let got = computed(&[group(&algorithm, 0, &rollouts)], &mut Baselines::default());
        let traces: Traces = rollouts.concat();
        let expected: Vec<f64> = traces.iter().map(|(reward, seat, length)| {
            let peers: Vec<_> = traces.iter().filter(|other| other.1 == *seat).collect();
            let number = peers.len() as f64;
            let rate = peers.iter().map(|peer| peer.0).sum::<f64>() / number;
            let shaped = |reward: f64, length: &[u32; 3]| {
                let mut left = reward;
                for part in 0..3 {
                    let most = peers.iter().map(|peer| peer.2[part]).max().unwrap_or(0);
                    if most > 0 {
                        left -= rate * weights[part] * f64::from(length[part]) / f64::from(most);
                    }
                }
                left
            };
            let baseline = peers.iter().map(|peer| shaped(peer.0, &peer.2)).sum::<f64>() / number;
            shaped(*reward, length) - baseline
        }).collect();
        close(&got[0], &expected);
    }

    #[test]
    fn a_baseline_is_the_weighted_sum_of_all_rewards_before(
        groups in proptest::collection::vec(rollouts(), 1..4), decay in 0.0..0.99_f64,
    ) {
        let rae = algorithm(AlgorithmKind::Rae { decay });
        let scored: Vec<ScoredGroup> = groups.iter().map(|rollouts| group(&rae, 0, rollouts)).collect();
        let got = computed(&scored, &mut Baselines::default()).concat();
        let traces: Traces = groups.concat().concat();
        let expected: Vec<f64> = (0..traces.len()).map(|place| {
            // b = (1 - d) sum_k d^k r_{n-k}: the newest has weight 1 - d.
            let before = traces[..place].iter().rev().filter(|other| other.1 == traces[place].1);
            let terms = before.enumerate().map(|(age, other)| (1.0 - decay) * decay.powi(age as i32) * other.0);
            traces[place].0 - terms.sum::<f64>()
        }).collect();
        close(&got, &expected);
    }

    #[test]
    fn each_level_has_its_own_mean(rollouts in rollouts()) {
        let hierarchical = algorithm(AlgorithmKind::HierarchicalGrpo {
            episode_agents: vec!["solver".to_owned(), "judge".to_owned()],
        });
        let got = computed(&[group(&hierarchical, 0, &rollouts)], &mut Baselines::default());
        let mut expected = Vec::new();
        for rollout in &rollouts {
            for (reward, seat, _) in rollout {
                let all = rollouts.concat();
                let among = if *seat == 0 { &all } else { rollout };
                let peers: Vec<f64> = among.iter().filter(|other| other.1 == *seat).map(|other| other.0).collect();
                expected.push(reward - peers.iter().sum::<f64>() / peers.len() as f64);
            }
        }
        close(&got[0], &expected);
    }
}
