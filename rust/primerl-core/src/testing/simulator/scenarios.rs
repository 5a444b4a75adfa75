//! Scenarios drawn from seeds, and what must hold at the end of each, here and in the crates above.

use super::batching::EngineModel;
use super::{DiskFaults, Faults, Rewards, Scenario, Simulator};
use crate::config::OnCancel;
use crate::config::*;
use crate::counters::{CancelReason, VoidReason};
use crate::ids::*;
use crate::testing::{config, environment, evaluation};
use crate::time::{Duration, Time};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A scenario without faults drawn from a seed, so that many seeds cover many shapes of runs.
pub fn scenario(seed: u64) -> Scenario {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x5eed);
    let config = config_of(seed, &mut rng);
    let mut scenario = Scenario {
        seed,
        config,
        engines: rng.random_range(1..=3),
        workers_per_environment: rng.random_range(1..=3),
        rollouts_per_worker: rng.random_range(1..=8),
        examples: rng.random_range(1..=20),
        whole_groups: false,
        rewards: Rewards::Numbers,
        engine_model: EngineModel::Timed {
            capacity: rng.random_bool(0.7).then(|| rng.random_range(1..=10)),
        },
        longest_answer: 8,
        faults: Faults::default(),
        kill: None,
        give_up: Time::default() + Duration::from_secs(24 * 3600),
    };
    add_features(&mut scenario, &mut rng);
    scenario
}

fn config_of(seed: u64, rng: &mut ChaCha8Rng) -> Config {
    let group_size = rng.random_range(2..=5);
    let max_async_level = rng.random_range(0..=3);
    let mut environments = trained_environments(rng);
    let largest = environments
        .iter()
        .filter_map(|environment| environment.own.group_size)
        .max();
    if rng.random_bool(0.5) {
        environments.push(evaluation(
            "evaluation",
            [None, Some(1), Some(2)][rng.random_range(0..3)],
        ));
    }
    let run = RunConfig {
        seed,
        max_steps: rng.random_range(1..=6),
        batch_size: (group_size * rng.random_range(1..=4)).max(largest.unwrap_or(0)),
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
        admission: admission(rng),
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
        ..config().run
    };
    Config {
        run,
        environments,
        ..config()
    }
}

fn trained_environments(rng: &mut ChaCha8Rng) -> Vec<Environment> {
    let mut environments = vec![Environment {
        algorithm: algorithm(rng),
        ..environment("train")
    }];
    if rng.random_bool(0.3) {
        let second = environment("second");
        environments.push(Environment {
            ratio: 2.5,
            algorithm: algorithm(rng),
            own: EnvironmentConfig {
                group_size: rng.random_bool(0.5).then(|| rng.random_range(2..=5)),
                training_mode: rng.random_bool(0.4).then_some(TrainingMode::Opd),
                ..second.own
            },
            ..second
        });
    }
    environments
}

/// Verdicts with a buffer by difficulty, a teacher, batches by tokens, and learning what the environment says: each in some
/// scenarios.
fn add_features(scenario: &mut Scenario, rng: &mut ChaCha8Rng) {
    let seed = scenario.seed;
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
    if !scenario.config.buffer.online_difficulty_filtering && rng.random_bool(0.3) {
        scenario.config.run.training_mode = TrainingMode::Opd;
    }
    if rng.random_bool(0.2) {
        scenario.config.run.token_batch_size = Some(rng.random_range(10..=120));
    }
    if rng.random_bool(0.2) {
        scenario.config.environments[0].algorithm.echo = Some(Echo {
            tool: 0.25,
            ..Echo::default()
        });
    }
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
        ..crate::testing::admission()
    }
}

fn algorithm(rng: &mut ChaCha8Rng) -> Algorithm {
    let custom = AlgorithmKind::Custom {
        path: "rewards:advantages".to_owned(),
        timeout: Duration::from_secs(30),
    };
    // Custom ones twice: only they wait for an answer, which may fail.
    let kinds = [
        custom.clone(),
        custom,
        AlgorithmKind::Grpo,
        AlgorithmKind::DrGrpo,
        AlgorithmKind::Rloo,
        AlgorithmKind::MaxRl,
        AlgorithmKind::ReinforcePlusPlus,
        AlgorithmKind::Rae { decay: 0.9 },
        AlgorithmKind::HierarchicalGrpo {
            episode_agents: vec!["solver".to_owned()],
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
        length_penalty: (matches!(kind, AlgorithmKind::Grpo | AlgorithmKind::DrGrpo)
            && rng.random_bool(0.3))
        .then_some(LengthPenalty {
            num_output_tokens_weight: 0.25,
            num_input_tokens_weight: 0.1,
            num_turns_weight: 0.1,
        }),
        echo: None,
        kind,
    }
}

/// Rollouts, workers, engines and the trainer fail now and then.
pub fn faults() -> Faults {
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

/// Those, and the trainer's and the orchestrator's death, lost, repeated and late messages, and a bad disk.
pub fn every_fault() -> Faults {
    Faults {
        orchestrator_dies: 0.9,
        trainer_dies: 0.2,
        lease_lost: 0.03,
        message_repeated: 0.2,
        report_late: 0.5,
        disk: Some(DiskFaults {
            slow: 0.3,
            fails: 0.003,
            power_fails: 0.5,
            snapshot_damaged: 0.3,
        }),
        ..faults()
    }
}

/// Plays a scenario to its end and looks at the whole.
///
/// # Panics
/// If the run does not end, or breaks a rule.
pub fn play(scenario: Scenario) -> Simulator {
    let seed = scenario.seed;
    let mut simulator = Simulator::new(scenario);
    let reason = simulator.run();
    assert!(
        reason.is_some(),
        "seed {seed} did not end: {:#?}",
        simulator.core.status().waits
    );
    let max_steps = simulator.core.config().run.max_steps;
    assert_eq!(simulator.observer.batches.len() as u64, max_steps);
    simulator.observer.check_all_closed();
    simulator.observer.check_evaluations();
    let status = simulator.core.status();
    assert_eq!(status.run.policy_version, Some(PolicyVersion(max_steps)));
    check_losses(&simulator);
    simulator
}

/// Plays the scenario of a seed with faults.
///
/// # Panics
/// As [`play`].
pub fn play_with(faults: Faults, seed: u64) -> Simulator {
    play(Scenario {
        faults,
        ..scenario(seed)
    })
}

/// Every loss is counted once, under its reason.
fn check_losses(simulator: &Simulator) {
    let (counters, losses) = (simulator.core.counters(), simulator.core.discards());
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
    let of_rollouts = |kind: &str| !["turn", "advantages", "teacher"].contains(&kind);
    let failed = losses.failed.iter().filter(|(kind, _)| of_rollouts(kind));
    assert_eq!(counters.failed, failed.map(|(_, count)| count).sum::<u64>());
    assert_eq!(
        simulator.core.errors().sum(),
        counters.failed + cancelled(CancelReason::WorkerLost),
        "every failure has one kind"
    );
    let lost = cancelled(CancelReason::WorkerLost)
        + cancelled(CancelReason::GroupDropped)
        + cancelled(CancelReason::GroupRestarted)
        + cancelled(CancelReason::RunFinished)
        + voided(VoidReason::GroupIncomplete)
        + voided(VoidReason::RunFinished);
    let closed_evaluations = counters.cancelled - lost;
    assert!(
        closed_evaluations
            <= cancelled(CancelReason::Timeout) + cancelled(CancelReason::WeightsReplaced)
    );
    for (step, batch) in &simulator.observer.batches {
        let staleness = batch.metrics.iter().filter_map(|(name, count)| {
            let steps: u64 = name.strip_prefix("staleness/")?.parse().ok()?;
            Some((steps, *count))
        });
        let counted: f64 = staleness.map(|(_, count)| count).sum();
        assert_eq!(counted, batch.metrics["samples/count"], "step {step}");
    }
}
