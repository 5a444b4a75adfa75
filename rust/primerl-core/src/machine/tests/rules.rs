//! What of a group is trained, and by which algorithm.

use super::*;
use crate::config::{
    Algorithm, AlgorithmKind, Environment, RunConfig, TrainingMode, TrajectoryStrategy,
    TruncatedRollouts,
};
use crate::testing::grpo;

#[test]
fn a_masked_rollout_counts_in_the_baseline_and_is_not_trained() {
    let mut run = Run::started(Config {
        run: RunConfig {
            truncated_rollouts: TruncatedRollouts::Mask,
            ..config().run
        },
        ..config()
    });
    let rollouts = run.lease(0, 4);
    let mut effects = Vec::new();
    for (leased, reward) in rollouts.iter().zip([3.0, 1.0, 5.0, 7.0]) {
        run.turn(leased.rollout, 0);
        let mut outcome = outcome(reward);
        outcome.traces[0].truncated = reward == 3.0;
        effects = run.report(0, leased.rollout, outcome);
    }
    let batch = cut(&effects).remove(0);
    let columns = batch.ranks[0][0].columns();
    let trained: Vec<RolloutId> = rollouts[1..].iter().map(|leased| leased.rollout).collect();
    assert_eq!(columns.rollouts, trained);
    assert_eq!(
        columns.advantages[2..4],
        [-1.0, -1.0],
        "1 against a mean of 2"
    );
    assert_eq!(batch.metrics["samples/masked"], 1.0);
    assert_eq!(batch.metrics["rollouts/truncated"], 1.0);
    let counters = run.core.counters();
    assert_eq!((counters.trained, counters.filtered), (3, 1));
}

#[test]
fn a_group_of_masked_rollouts_is_dropped_with_the_reason() {
    let mut run = Run::started(Config {
        run: RunConfig {
            truncated_rollouts: TruncatedRollouts::Mask,
            ..config().run
        },
        ..config()
    });
    let rollouts = run.lease(0, 2);
    let mut effects = Vec::new();
    for leased in &rollouts {
        run.turn(leased.rollout, 0);
        let mut outcome = outcome(1.0);
        outcome.traces[0].truncated = true;
        effects = run.report(0, leased.rollout, outcome);
    }
    assert_said(&effects, "truncated_rollouts = \"mask\"");
    assert_eq!(run.core.status().groups.live, 0);
}

/// Two environments: groups of three, and of the run's two.
fn groups_of_three_and_two(max_async_level: u64) -> Run {
    let mut of_three = environment("train");
    of_three.own.group_size = Some(3);
    Run::started(Config {
        run: RunConfig {
            max_async_level,
            batch_size: 4,
            oversampling_factor: 2.0,
            ..config().run
        },
        environments: vec![of_three, environment("second")],
        ..config()
    })
}

#[test]
fn a_batch_takes_groups_of_any_size_until_it_is_full() {
    let mut run = groups_of_three_and_two(2);
    let mut group = |worker, size| {
        let rollouts = run.lease(worker, size);
        let ended = rollouts
            .iter()
            .flat_map(|leased| run.succeed(worker, leased.rollout, 0));
        cut(&ended.collect::<Vec<_>>())
    };
    assert!(group(0, 3).is_empty());
    let batch = group(1, 2).remove(0);
    let columns = batch.ranks[0][0].columns();
    let of_first = columns.environments.iter().filter(|id| id.0 == 0);
    assert_eq!((of_first.count(), columns.environments.len()), (3, 5));
    // What the step had more than four is not taken off the next one.
    assert!(group(0, 3).is_empty());
    assert_eq!(group(1, 2).len(), 1);
}

#[test]
fn a_synchronous_step_takes_all_groups_that_were_begun_for_it() {
    let mut run = groups_of_three_and_two(0);
    let three = run.lease(0, 3);
    let two = run.lease(1, 2);
    assert_eq!((three.len(), two.len()), (3, 2));
    assert!(
        run.lease(0, 1).is_empty(),
        "five rollouts are enough for a step of four"
    );
}

/// A step of ten tokens; a rollout has four, a group eight.
#[test]
fn a_step_of_tokens_is_full_with_the_group_that_reaches_them() {
    for max_async_level in [0, 2] {
        let mut run = Run::started(Config {
            run: RunConfig {
                token_batch_size: Some(10),
                seq_len: 4,
                max_async_level,
                ..config().run
            },
            ..config()
        });
        assert!(cut(&run.rollouts(2, 0)).is_empty(), "8 of 10");
        let batch = cut(&run.rollouts(2, 0)).remove(0);
        assert_eq!(
            batch.ranks[0].iter().map(|own| own.len()).sum::<usize>(),
            16
        );
        // Synchronous, nothing more is begun before the step is trained.
        assert_eq!(run.lease(0, 2).is_empty(), max_async_level == 0);
    }
}

#[test]
fn a_step_needs_more_rollouts_where_they_turn_out_shorter() {
    let mut run = Run::started(Config {
        run: RunConfig {
            token_batch_size: Some(40),
            seq_len: 20,
            max_async_level: 0,
            ..config().run
        },
        ..config()
    });
    // As long as a sample may be, two are enough; of four tokens, ten are.
    let mut trained = 0;
    for rollouts in [2, 2, 2, 2] {
        assert!(cut(&run.rollouts(rollouts, 0)).is_empty());
        trained += rollouts;
    }
    assert_eq!(cut(&run.rollouts(2, 0)).len(), 1);
    assert_eq!(trained, 8);
}

#[test]
fn each_environment_has_its_own_algorithm() {
    let second = Environment {
        algorithm: Algorithm {
            kind: AlgorithmKind::MaxRl,
            ..grpo()
        },
        ..environment("second")
    };
    let mut run = Run::started(Config {
        environments: vec![environment("train"), second],
        ..config()
    });
    let mut batches = Vec::new();
    for worker in [0, 1] {
        let rollouts = run.lease(worker, 2);
        assert_eq!(rollouts.len(), 2);
        for (leased, reward) in rollouts.iter().zip([0.0, 4.0]) {
            run.turn(leased.rollout, 0);
            batches.extend(cut(&run.report(worker, leased.rollout, outcome(reward))));
        }
    }
    let columns = batches[0].ranks[0][0].columns();
    let trained = columns.advantages.iter().zip(&columns.loss_mask);
    let trained: Vec<f32> = trained
        .filter(|(_, mask)| **mask == 1)
        .map(|(advantage, _)| *advantage)
        .collect();
    assert_eq!(trained, [-2.0, -2.0, 2.0, 2.0, -1.0, -1.0, 1.0, 1.0]);
}

#[test]
fn a_good_end_without_a_turn_is_never_trained() {
    for mode in [TrainingMode::Rl, TrainingMode::Opd, TrainingMode::Sft] {
        for strategy in [
            TrajectoryStrategy::Interleaved,
            TrajectoryStrategy::Branching,
        ] {
            let mut run = Run::started(Config {
                run: RunConfig {
                    training_mode: mode,
                    trajectory_strategy: strategy,
                    ..config().run
                },
                ..config()
            });
            let first = run.lease(0, 4);
            for leased in &first {
                assert!(cut(&run.report(0, leased.rollout, outcome(1.0))).is_empty());
            }
            assert_eq!(run.core.discards().failed["no_turns"], 4, "{mode:?}");
            assert_eq!(run.core.counters().failed, 4);
            assert_eq!(run.core.errors().of(crate::ErrorKind::Environment), 4);
            assert_eq!(run.lease(0, 4).len(), 4, "they are tried again");
        }
    }
}

#[test]
fn each_failure_has_one_kind_by_environment() {
    let mut run = Run::started(Config {
        environments: vec![environment("train"), evaluation("evaluation", None)],
        ..config()
    });
    let reported = |kind: &str, exception: Option<&str>, code: Option<&str>| {
        let refusal = code.map(|code| crate::failure::Refusal {
            code: code.to_owned(),
            status: 503,
            overflow: None,
        });
        let error = RolloutError {
            kind: kind.to_owned(),
            exception: exception.map(str::to_owned),
            ..RolloutError::default()
        };
        Outcome {
            error: Some(error),
            refusal,
            ..Outcome::default()
        }
    };
    let leased = run.lease(0, 4);
    let unavailable = Some("engine_unavailable");
    run.report(
        0,
        leased[0].rollout,
        reported("environment", Some("ValueError"), unavailable),
    );
    run.report(
        0,
        leased[1].rollout,
        reported("environment", Some("ToolError"), None),
    );
    run.send(Event::WorkerLeft {
        worker: WorkerId(0),
        reason: None,
    });
    for _ in 0..2 {
        let evaluating = run.lease(1, 1);
        run.report(1, evaluating[0].rollout, reported("timeout", None, None));
    }
    use crate::ErrorKind::*;
    let status = run.core.status();
    let of = |name: &str| {
        let mut environments = status.environments.iter();
        let found = environments.find(|environment| environment.name == name);
        let errors = found.expect("it is known").errors.clone();
        errors.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(of("train"), [(Engine, 1), (Tool, 1), (Infrastructure, 2)]);
    assert_eq!(of("evaluation"), [(Timeout, 2)]);
    assert_eq!(status.errors[&Timeout], 2);
    let mut effects = Vec::new();
    loop {
        let rest = run.lease(1, 4);
        if rest.is_empty() {
            break;
        }
        for leased in rest {
            effects.extend(run.report(1, leased.rollout, outcome(1.0)));
        }
    }
    let report = effects.iter().find_map(|effect| match effect {
        Effect::Evaluated(report) => Some(report.clone()),
        _ => None,
    });
    let report = report.expect("it has ended");
    assert_eq!((report.failed, &report.errors), (1, &[(Timeout, 1)].into()));
}
