mod admission;
mod whole_groups;

use super::scenarios::*;
use super::*;
use crate::config::*;
use crate::counters::VoidReason;
use crate::curriculum::report::Pools;
use crate::testing::{config, environment};

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
        let simulator = play_with(faults(), seed);
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
        play_with(
            Faults {
                trainer_dies: 0.2,
                orchestrator_dies: 0.9,
                ..faults()
            },
            seed,
        );
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
        run: RunConfig {
            max_steps: 5,
            training_mode: TrainingMode::Rl,
            ..base.config.run
        },
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
        let simulator = play_with(faults(), 77);
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
            run: RunConfig {
                max_steps: 8,
                batch_size: 8,
                max_async_level: level,
                max_off_policy_steps: 8,
                ..config().run
            },
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

/// Kills something for good in mid-run; the run cannot end, and a message names what is missing, within the bound.
fn killed(kill: Kill, expected: &str) {
    for seed in 0..10 {
        let base = scenario(seed);
        let mut config = Config {
            run: RunConfig {
                max_steps: 1000,
                ..base.config.run
            },
            ..base.config
        };
        // Eight groups that all fail for lack of engines rightly end a run: not within the bound.
        for environment in &mut config.environments {
            environment.own.max_retries = 100;
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
    killed(Kill::Workers, "sent nothing for");
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
