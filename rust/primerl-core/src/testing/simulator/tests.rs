mod admission;

use super::*;
use crate::config::*;
use crate::counters::VoidReason;
use crate::curriculum::report::Pools;
use crate::effect::CancelReason;
use crate::group::OnCancel;
use crate::testing::{config, environment, evaluation};

/// A scenario drawn from a seed, so that many seeds cover many shapes of runs.
pub(super) fn scenario(seed: u64) -> Scenario {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x5eed);
    let group_size = rng.random_range(2..=5);
    let max_async_level = rng.random_range(0..=3);
    let mut environments: Vec<Environment> = vec![Environment {
        algorithm: algorithm(&mut rng),
        ..environment("train")
    }];
    if rng.random_bool(0.3) {
        environments.push(Environment {
            ratio: 2.5,
            algorithm: algorithm(&mut rng),
            ..environment("second")
        });
    }
    if rng.random_bool(0.5) {
        environments.push(evaluation(
            "evaluation",
            [None, Some(1), Some(2)][rng.random_range(0..3)],
        ));
    }
    let config = Config {
        seed,
        max_steps: rng.random_range(1..=6),
        batch_size: group_size * rng.random_range(1..=4),
        group_size,
        seq_len: [24, 64, 200][rng.random_range(0..3)],
        data_ranks: rng.random_range(1..=3),
        max_async_level,
        max_off_policy_steps: max_async_level + rng.random_range(0..=3),
        oversampling_factor: [1.0, 1.5, 3.0][rng.random_range(0..3)],
        min_group_size: rng
            .random_bool(0.4)
            .then(|| rng.random_range(2..=group_size)),
        group_on_cancel: [OnCancel::Refill, OnCancel::Drop][rng.random_range(0..2)],
        admission: admission(&mut rng),
        trajectory_strategy: [
            TrajectoryStrategy::Interleaved,
            TrajectoryStrategy::Branching,
        ][rng.random_range(0..2)],
        truncated_rollouts: [
            TruncatedRollouts::Train,
            TruncatedRollouts::Mask,
            TruncatedRollouts::Drop,
        ][rng.random_range(0..3)],
        long_samples: [LongSamples::Drop, LongSamples::Truncate][rng.random_range(0..2)],
        environments,
        ..config()
    };
    let mut scenario = Scenario {
        seed,
        config,
        engines: rng.random_range(1..=3),
        workers_per_environment: rng.random_range(1..=3),
        rollouts_per_worker: rng.random_range(1..=8),
        examples: rng.random_range(1..=20),
        rewards: Rewards::Numbers,
        engine_capacity: rng.random_bool(0.7).then(|| rng.random_range(1..=10)),
        faults: Faults::default(),
        kill: None,
        give_up: Time::default() + Duration::from_secs(24 * 3600),
    };
    if rng.random_bool(0.6) {
        scenario.rewards = Rewards::Verdicts;
        // Few examples are soon all easy or hard.
        scenario.examples = scenario.examples.min(rng.random_range(1..=20));
        scenario.config.buffer = Buffer {
            online_difficulty_filtering: rng.random_bool(0.7),
            easy_fraction: [0.0, 0.0, 0.3][rng.random_range(0..3)],
            hard_fraction: [0.0, 0.0, 1.0][rng.random_range(0..3)],
            seed: rng.random_bool(0.3).then_some(seed + 1),
            ..scenario.config.buffer
        };
    }
    scenario
}

/// Engines of a few rollouts each, so that their limits are what holds back, or of more than a batch.
fn admission(rng: &mut ChaCha8Rng) -> Admission {
    let start_per_engine = rng.random_range(1..=12);
    Admission {
        limit: [LimitRule::Adaptive, LimitRule::Fixed][rng.random_range(0..2)],
        start_per_engine,
        min_per_engine: rng.random_range(1..=start_per_engine),
        max_per_engine: start_per_engine + rng.random_range(0..=20),
        increase: rng.random_range(1..=4),
        evaluation_share: rng.random_range(0.05..0.95),
        ..Admission::default()
    }
}

fn algorithm(rng: &mut ChaCha8Rng) -> Algorithm {
    let kinds = [
        AlgorithmKind::Grpo,
        AlgorithmKind::DrGrpo,
        AlgorithmKind::Rloo,
        AlgorithmKind::MaxRl,
        AlgorithmKind::ReinforcePlusPlus,
        AlgorithmKind::Custom {
            path: "rewards:advantages".to_owned(),
            timeout: Duration::from_secs(30),
        },
    ];
    let kind = kinds[rng.random_range(0..kinds.len())].clone();
    let is_custom = matches!(kind, AlgorithmKind::Custom { .. });
    Algorithm {
        normalize_std: kind == AlgorithmKind::Grpo && rng.random_bool(0.5),
        shuffle_advantages: !is_custom && rng.random_bool(0.1),
        length_normalization: [
            LengthNormalization::Token,
            LengthNormalization::Sequence,
            LengthNormalization::Constant,
        ][rng.random_range(0..3)],
        kind,
    }
}

pub(super) fn faults() -> Faults {
    Faults {
        rollout_fails: 0.1,
        rollout_empty: 0.03,
        rollout_truncated: 0.1,
        advantages_fail: 0.1,
        rollout_hangs: 0.02,
        rollout_slow: 0.1,
        worker_dies: 0.02,
        engine_fails: 0.1,
        engine_dies: 0.3,
        trainer_forgets: 0.1,
        ..Faults::default()
    }
}

/// Plays a scenario to its end and looks at the whole.
pub(super) fn play(scenario: Scenario) -> Simulator {
    let seed = scenario.seed;
    let mut simulator = Simulator::new(scenario);
    let reason = simulator.run();
    assert!(
        reason.is_some(),
        "seed {seed} did not end: {:#?}",
        simulator.core.status().waits
    );
    let max_steps = simulator.core.config().max_steps;
    assert_eq!(simulator.observer.batches.len() as u64, max_steps);
    simulator.observer.check_all_closed();
    simulator.observer.check_evaluations();
    let status = simulator.core.status();
    assert_eq!(status.run.policy_version, Some(PolicyVersion(max_steps)));
    check_losses(&simulator);
    simulator
}

/// Every loss is counted once, under its reason.
fn check_losses(simulator: &Simulator) {
    let (counters, losses) = (simulator.core.counters(), simulator.core.losses());
    assert_eq!(counters.ended(), counters.dispatched);
    assert_eq!(losses.cancelled, simulator.observer.cancelled);
    let cancelled = |reason| losses.cancelled.get(&reason).copied().unwrap_or(0);
    let voided = |reason| losses.voided.get(&reason).copied().unwrap_or(0);
    assert_eq!(
        counters.stale,
        cancelled(CancelReason::TooManyPolicies)
            + cancelled(CancelReason::TooOld)
            + voided(VoidReason::TooOld)
    );
    assert_eq!(
        counters.filtered,
        voided(VoidReason::GroupDropped)
            + voided(VoidReason::TooLong)
            + voided(VoidReason::Masked)
            + voided(VoidReason::NoSignal)
    );
    // The others are no failures of a rollout.
    let of_rollouts = |kind: &str| kind != "turn" && kind != "advantages";
    let failed = losses.failed.iter().filter(|(kind, _)| of_rollouts(kind));
    assert_eq!(counters.failed, failed.map(|(_, count)| count).sum::<u64>());
    let lost = cancelled(CancelReason::WorkerLost)
        + cancelled(CancelReason::GroupDropped)
        + cancelled(CancelReason::RunFinished)
        + voided(VoidReason::RunFinished);
    let closed_evaluations = counters.cancelled - lost;
    assert!(closed_evaluations <= cancelled(CancelReason::Timeout));
    for (step, batch) in &simulator.observer.batches {
        let staleness = batch.metrics.iter().filter_map(|(name, count)| {
            let steps: u64 = name.strip_prefix("staleness/")?.parse().ok()?;
            Some((steps, *count))
        });
        let counted: f64 = staleness.map(|(_, count)| count).sum();
        assert_eq!(counted, batch.metrics["samples/count"], "step {step}");
    }
}

#[test]
fn runs_without_faults_end_and_keep_every_rule() {
    for seed in 0..150 {
        let simulator = play(scenario(seed));
        let counters = simulator.core.counters();
        assert_eq!(counters.failed, 0, "seed {seed}");
    }
}

#[test]
fn runs_with_faults_end_and_keep_every_rule() {
    let (mut failed, mut stale, mut cancelled, mut filtered) = (0, 0, 0, 0);
    let (mut truncated, mut empty, mut errored, mut unanswered) = (0, 0, 0, 0);
    for seed in 1000..1200 {
        let simulator = play(Scenario {
            faults: faults(),
            ..scenario(seed)
        });
        let counters = simulator.core.counters();
        failed += counters.failed;
        stale += counters.stale;
        cancelled += counters.cancelled;
        filtered += counters.filtered;
        truncated += counters.truncated;
        empty += counters.empty;
        errored += counters.errored;
        let failures = simulator.core.status().failures;
        unanswered += failures.get("advantages").copied().unwrap_or(0);
    }
    // The scenarios are hard enough to end rollouts in every way.
    assert!(
        failed > 100 && stale > 20 && cancelled > 100 && filtered > 20,
        "{failed} {stale} {cancelled} {filtered}"
    );
    assert!(
        truncated > 100 && empty > 50 && errored > 100 && unanswered > 20,
        "{truncated} {empty} {errored} {unanswered}"
    );
}

#[test]
fn runs_go_on_after_restarts_as_if_there_had_been_none() {
    for seed in 2000..2100 {
        play(Scenario {
            faults: Faults {
                trainer_dies: 0.2,
                orchestrator_dies: 0.9,
                ..faults()
            },
            ..scenario(seed)
        });
    }
}

#[test]
fn runs_filter_and_move_examples_and_return_them() {
    let (mut moved, mut filtered, mut returned) = (Pools::default(), 0, 0);
    for seed in 2000..2060 {
        let simulator = play(scenario(seed));
        let filtering = simulator.core.config().buffer.online_difficulty_filtering;
        let report = simulator.core.buffer_report();
        assert_eq!(report.steps.len(), simulator.observer.batches.len());
        for step in report.steps.iter().flat_map(|step| &step.environments) {
            moved.easy += step.movement.into.easy;
            moved.normal += step.movement.into.normal;
            moved.hard += step.movement.into.hard;
            assert!(filtering || step.movement.filtered + step.movement.returned == 0);
        }
        for environment in &report.environments {
            filtered += environment.filtered_groups;
            returned += environment.returned;
            assert_eq!(environment.pools.sum(), u64::from(environment.examples));
        }
    }
    assert!(
        moved.easy > 50 && moved.normal > 50 && moved.hard > 50 && filtered > 100 && returned > 10,
        "{moved:?} {filtered} {returned}"
    );
}

#[test]
fn a_run_in_which_no_group_has_a_signal_says_so_and_does_not_stop() {
    let base = scenario(3);
    let mut config = Config {
        max_steps: 5,
        environments: vec![environment("train")],
        ..base.config
    };
    config.buffer.online_difficulty_filtering = true;
    let mut simulator = Simulator::new(Scenario {
        config,
        rewards: Rewards::Ones,
        give_up: Time::default() + Duration::from_secs(3600),
        ..base
    });
    assert_eq!(simulator.run(), None);
    let warnings = simulator.observer.warnings.join("\n");
    assert!(warnings.contains("groups had no signal"), "{warnings}");
    assert!(
        warnings.contains("no example that may be drawn was left"),
        "{warnings}"
    );
    assert!(warnings.lines().count() < 30, "{warnings}");
    let status = simulator.core.status();
    let words = &status
        .waits
        .iter()
        .find(|wait| wait.who.starts_with("trainer"))
        .expect("the trainer waits")
        .waiting_for;
    assert!(words.contains("groups had no signal"), "{words}");
    assert!(
        status.buffer[0].filtered_in_a_row > 100,
        "{:?}",
        status.buffer
    );
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = || {
        let simulator = play(Scenario {
            faults: faults(),
            ..scenario(77)
        });
        (
            simulator.events,
            simulator.now,
            simulator.observer.batches.clone(),
            simulator.core.counters(),
        )
    };
    assert_eq!(run(), run());
}

#[test]
fn more_asynchrony_takes_less_time_for_the_same_work() {
    let time = |level| {
        let config = Config {
            max_steps: 8,
            batch_size: 8,
            max_async_level: level,
            max_off_policy_steps: 8,
            ..config()
        };
        let scenario = Scenario {
            config,
            rollouts_per_worker: 8,
            workers_per_environment: 2,
            engines: 1,
            ..scenario(5)
        };
        play(scenario).now
    };
    let (synchronous, asynchronous) = (time(0), time(2));
    assert!(
        asynchronous < synchronous,
        "{asynchronous:?} against {synchronous:?}"
    );
}

/// Kills something for good in mid-run; the run cannot end, and somebody is told what is missing, within the bound.
fn killed(kill: Kill, expected: &str) {
    for seed in 0..10 {
        let base = scenario(seed);
        let mut config = Config {
            max_steps: 1000,
            ..base.config
        };
        // Eight groups that all fail for want of engines rightly end a run: not within the bound.
        for environment in &mut config.environments {
            environment.max_retries = 100;
        }
        let at = Time::default() + Duration::from_secs(60);
        let bound = [
            config.timeouts.weights,
            config.timeouts.evaluation,
            config.timeouts.rollout,
            config.timeouts.worker,
        ];
        let bound = Duration(bound.iter().map(|span| span.0).sum());
        let mut simulator = Simulator::new(Scenario {
            config,
            kill: Some((at, kill)),
            give_up: at + bound,
            ..base
        });
        assert_eq!(simulator.run(), None);
        let warnings = &simulator.observer.warnings;
        assert!(
            warnings.iter().any(|warning| warning.contains(expected)),
            "seed {seed}: {warnings:#?}"
        );
        assert!(!simulator.core.status().waits.is_empty());
    }
}

#[test]
fn dead_workers_are_named() {
    killed(Kill::Workers, "was not heard of");
    killed(Kill::Workers, "waits for a worker: none is registered");
}

#[test]
fn dead_engines_are_named() {
    killed(
        Kill::Engines,
        "waits for an inference engine: engine 0 is lost (connection refused)",
    );
}

#[test]
fn a_dead_trainer_is_named() {
    killed(Kill::Trainer, "waits for the trainer to");
}
