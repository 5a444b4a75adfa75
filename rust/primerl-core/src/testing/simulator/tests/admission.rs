//! What keeps engines full and batches coming: surplus, shares, limits.

use super::*;
use crate::config::RunConfig;
use crate::testing::evaluation;

/// One environment, groups of 4, plenty of workers.
fn roomy(config: Config) -> Scenario {
    Scenario {
        config: Config {
            run: RunConfig {
                max_steps: 12,
                batch_size: 16,
                group_size: 4,
                seq_len: 1000,
                max_async_level: 4,
                max_off_policy_steps: 40,
                min_group_size: None,
                ..config.run
            },
            ..config
        },
        engines: 1,
        workers_per_environment: 4,
        rollouts_per_worker: 16,
        engine_model: EngineModel::Timed { capacity: None },
        ..scenario(5)
    }
}

#[test]
fn a_long_tail_holds_no_batch_back_and_what_is_finished_is_kept() {
    // One rollout in ten takes some 15 times as long as the others: nearly half of the groups have one.
    let play = |oversampling_factor| {
        let mut base = roomy(Config {
            run: RunConfig {
                oversampling_factor,
                ..config().run
            },
            ..config()
        });
        base.config.run.max_steps = 40;
        let faults = Faults {
            rollout_slow: 0.1,
            ..Faults::default()
        };
        play(Scenario { faults, ..base })
    };
    let (exact, oversampled) = (play(1.0), play(3.0));
    // Towards the end of a run every group is needed, so the last steps do wait for the tail.
    let at_step_30 = |simulator: &Simulator| simulator.observer.cut_at[29];
    let (slow, fast) = (at_step_30(&exact), at_step_30(&oversampled));
    assert!(fast.0 < slow.0 * 17 / 20, "{fast:?} against {slow:?}");
    // A rollout of the tail takes 44 s in the mean; no batch waits for one.
    let cuts = &oversampled.observer.cut_at[..30];
    let gaps = cuts.windows(2).map(|pair| pair[1].since(pair[0]));
    let longest = gaps.max().expect("there are gaps");
    assert!(longest < Duration::from_secs(22), "{longest:?}");
    for simulator in [&exact, &oversampled] {
        // Nothing that finished was thrown away before the run was over.
        let discards = simulator.core.discards();
        let voided: Vec<VoidReason> = discards.voided.keys().copied().collect();
        assert!(voided.is_empty() || voided == [VoidReason::RunFinished]);
        assert_eq!(discards.slots_refilled + discards.slots_lost, 0);
    }
    // Long rollouts are overtaken, and trained in a later batch.
    let rollouts = |batch: &crate::pack::PackedBatch| -> Vec<RolloutId> {
        let micro_batches = batch.ranks.iter().flatten();
        micro_batches
            .flat_map(|micro_batch| micro_batch.sequences())
            .map(|weighted| weighted.sample.rollout)
            .collect()
    };
    let batches: Vec<Vec<RolloutId>> = oversampled
        .observer
        .batches
        .values()
        .map(rollouts)
        .collect();
    let overtaken = batches
        .windows(2)
        .filter(|pair| pair[1].iter().min() < pair[0].iter().max());
    assert!(overtaken.count() >= 6);
}

#[test]
fn neither_training_nor_evaluation_starves_where_there_is_little_room() {
    for seed in 0..20 {
        let mut evaluated = evaluation("evaluation", Some(2));
        evaluated.role = crate::config::Role::Evaluate(crate::config::Evaluation {
            num_examples: Some(40),
            rollouts_per_example: 2,
            interval: Some(2),
            base_model: true,
            pass_threshold: 1.0,
        });
        let base = roomy(Config {
            run: RunConfig {
                seed,
                oversampling_factor: 3.0,
                admission: Admission {
                    limit: LimitRule::Fixed,
                    start_per_engine: 8,
                    min_per_engine: 1,
                    evaluation_share: [0.1, 0.3, 0.5][seed as usize % 3],
                    ..crate::testing::admission()
                },
                ..config().run
            },
            environments: vec![environment("train"), evaluated],
            ..config()
        });
        let simulator = play(Scenario {
            seed,
            examples: 50,
            ..base
        });
        let observer = &simulator.observer;
        assert_eq!(observer.most_in_flight, 8, "the room is used, and no more");
        // Version 0 stays until its evaluation has ended: steps that may be trained without version 1 are cut meanwhile.
        let first = observer.evaluated_at[0];
        assert!(
            observer.cut_at[0] < first,
            "seed {seed}: training waited for the evaluation"
        );
        // A round is 80 rollouts of about 4 s, at least one at a time (or all at once, when training may not continue).
        let bound = Duration::from_secs(600);
        assert!(first < Time::default() + bound, "seed {seed}: {first:?}");
        assert!(
            observer
                .warnings
                .iter()
                .all(|warning| !warning.contains("was closed after"))
        );
    }
}

#[test]
fn the_adaptive_limit_keeps_an_engine_full_and_not_over_full() {
    let most = |limit| {
        let simulator = play(roomy_with_limit(limit));
        (simulator.core.status().rollouts.limit, simulator.now)
    };
    let (fixed, adaptive) = (most(LimitRule::Fixed), most(LimitRule::Adaptive));
    assert_eq!(fixed.0, 48, "what oversampling asks for");
    assert!(
        (8..=32).contains(&adaptive.0),
        "room for 16 requests: {adaptive:?}"
    );
    // Half of what is in flight waits in no queue, and the run takes about as long.
    assert!(
        adaptive.1.0 < fixed.1.0 * 5 / 4,
        "{adaptive:?} against {fixed:?}"
    );
}

/// An engine with room for 16 requests, trusted with 64 at first.
fn roomy_with_limit(limit: LimitRule) -> Scenario {
    let base = roomy(Config {
        run: RunConfig {
            oversampling_factor: 3.0,
            admission: Admission {
                limit,
                start_per_engine: 64,
                min_per_engine: 2,
                increase: 2,
                ..crate::testing::admission()
            },
            ..config().run
        },
        ..config()
    });
    Scenario {
        engine_model: EngineModel::Timed { capacity: Some(16) },
        ..base
    }
}
