use super::*;
use crate::config::{Algorithm, Environment};
use crate::testing::{config, environment, evaluation};

/// A scenario drawn from a seed, so that many seeds cover many shapes of runs.
pub(super) fn scenario(seed: u64) -> Scenario {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x5eed);
    let group_size = rng.random_range(2..=5);
    let max_async_level = rng.random_range(0..=3);
    let mut environments: Vec<Environment> = vec![environment("train")];
    if rng.random_bool(0.3) {
        environments.push(Environment {
            ratio: 2.5,
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
        algorithm: Algorithm::Grpo {
            normalize_std: rng.random_bool(0.5),
            shuffle_advantages: rng.random_bool(0.1),
        },
        environments,
        ..config()
    };
    Scenario {
        seed,
        config,
        engines: rng.random_range(1..=3),
        workers_per_environment: rng.random_range(1..=3),
        rollouts_per_worker: rng.random_range(1..=8),
        examples: rng.random_range(1..=20),
        faults: Faults::default(),
        kill: None,
        give_up: Time::default() + Duration::from_secs(24 * 3600),
    }
}

pub(super) fn faults() -> Faults {
    Faults {
        rollout_fails: 0.1,
        rollout_empty: 0.03,
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
    assert_eq!(
        status.rollouts.counters.ended(),
        status.rollouts.counters.dispatched
    );
    simulator
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
    }
    // The scenarios are hard enough to end rollouts in every way.
    assert!(
        failed > 100 && stale > 20 && cancelled > 100 && filtered > 20,
        "{failed} {stale} {cancelled} {filtered}"
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
        let config = Config {
            max_steps: 1000,
            ..base.config
        };
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
