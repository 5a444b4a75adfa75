//! Batches, versions, the end.

use super::*;
use crate::config::{Algorithm, Changes, Environment, RunConfig};
use crate::testing::grpo;

#[test]
fn a_batch_is_cut_as_soon_as_it_is_complete() {
    let mut run = Run::started(config());
    let rollouts = run.lease(0, 4);
    for leased in &rollouts[..3] {
        assert!(cut(&run.succeed(0, leased.rollout, 0)).is_empty());
    }
    let effects = run.succeed(0, rollouts[3].rollout, 0);
    let batches = cut(&effects);
    assert_eq!(
        (batches.len(), batches[0].step, batches[0].loss_tokens),
        (1, Step(1), 8)
    );
    assert_eq!(run.core.counters().trained, 4);
}

#[test]
fn samples_share_their_prompt_from_the_start_on_that_allows_it() {
    let with = |shared_prefixes| Config {
        run: RunConfig {
            seq_len: 200,
            shared_prefixes,
            ..config().run
        },
        ..config()
    };
    let batch = |run: &mut Run| {
        let rollouts = run.lease(0, 4);
        let mut effects = Vec::new();
        for leased in rollouts {
            let rollout = leased.rollout;
            let turn = turn(None, &[1; 64], &[3, 4], 0);
            run.send(Event::TurnFinished { rollout, turn });
            effects = run.report(0, rollout, outcome(rollout.0 as f64));
        }
        Arc::clone(&cut(&effects)[0])
    };
    let mut run = Run::started(with(false));
    let before = batch(&mut run);
    assert_eq!(before.ranks[0].len(), 2);
    assert!(before.ranks[0].iter().all(|own| own.shared().is_empty()));
    assert!(!before.metrics.contains_key("perf/shared_tokens"));

    let changes = Changes::between(&with(false), &with(true)).expect("how batches are packed");
    // An earlier version's journal does not name it.
    let mut earlier = serde_json::json!(changes);
    let fields = earlier.as_object_mut().expect("is a map");
    fields.remove("shared_prefixes");
    let earlier: Changes = serde_json::from_value(earlier).expect("can be read");
    run.send(Event::Reconfigured(earlier));
    assert!(!run.core.config().run.shared_prefixes);
    run.send(Event::Reconfigured(changes));
    let after = batch(&mut run);
    assert_eq!(after.ranks[0].len(), 1);
    assert_eq!(after.ranks[0][0].shared(), [0, 64, 64, 64]);
    assert_eq!(after.metrics["perf/shared_tokens"], 72.0 / 264.0);
    assert_eq!(after.metrics["pack/fill"], 72.0 / 200.0);
}

#[test]
fn the_metrics_of_a_batch() {
    let mut run = Run::started(config());
    let rollouts = run.lease(0, 4);
    run.fail(0, rollouts[3].rollout);
    let retry = run.lease(0, 1)[0].rollout;
    let mut effects = Vec::new();
    // Rewards 0, 1 and 2, 4 (a rollout's number).
    for rollout in [
        rollouts[0].rollout,
        rollouts[1].rollout,
        rollouts[2].rollout,
        retry,
    ] {
        effects = run.succeed(0, rollout, 0);
    }
    let metrics = &cut(&effects)[0].metrics;
    let expected = [
        ("reward/all/mean", 1.75),
        ("reward/train/mean", 1.75),
        ("reward/all/std", 2.1875_f64.sqrt()),
        ("advantage/all/std", 0.625_f64.sqrt()),
        ("seq_len/all/mean", 4.0),
        ("num_turns/all/mean", 1.0),
        ("is_truncated/all/mean", 0.0),
        ("staleness/mean", 0.0),
        ("staleness/max", 0.0),
        ("staleness/0", 4.0),
        ("version/min", 0.0),
        ("rollouts/failed", 1.0),
        ("rollouts/stale", 0.0),
        ("rollouts/cancelled", 0.0),
        ("groups/dropped", 0.0),
        ("groups/partial", 0.0),
        ("failed/environment", 1.0),
        ("slots/refilled", 1.0),
        ("slots/lost", 0.0),
        ("cancelled/too_old", 0.0),
        ("cancelled/worker_lost", 0.0),
        ("voided/too_old", 0.0),
        ("pack/micro_batches", 1.0),
        ("pack/fill", 0.25),
        ("samples/count", 4.0),
        ("samples/too_long", 0.0),
        ("samples/cut", 0.0),
        ("samples/masked", 0.0),
        ("errored_rollouts/all/count", 1.0),
        ("errored_rollouts/all/mean", 0.2),
        ("empty_rollouts/all/count", 0.0),
        ("rollouts/truncated", 0.0),
    ];
    for (name, value) in expected {
        assert!(
            (metrics[name] - value).abs() < 1e-6,
            "{name} = {} is not {value}",
            metrics[name]
        );
    }
}

#[test]
fn batches_wait_for_the_trainer_and_can_be_fetched_again() {
    let mut run = Run::started(Config {
        run: RunConfig {
            data_ranks: 2,
            ..config().run
        },
        ..config()
    });
    run.batch(0);
    run.batch(0);
    for (step, rank) in [(1, 0), (1, 0), (1, 1), (2, 0), (2, 1), (1, 1)] {
        assert_eq!(fetched(&run.ask_batch(step, rank)), Some(Step(step)));
    }
    run.publish(1);
    let forgotten = run.send(Event::CheckpointSaved { step: Step(1) });
    assert!(matches!(
        forgotten[..],
        [Effect::ForgetBatches { before: Step(2) }]
    ));
    let late = run.ask_batch(1, 1);
    assert_said(&late, "batches before step 2 are gone");
    assert!(matches!(late.last(), Some(Effect::NoMoreBatches { .. })));
    assert_eq!(fetched(&run.ask_batch(2, 1)), Some(Step(2)));
}

#[test]
fn a_batch_that_is_not_ready_says_what_it_waits_for() {
    let mut run = Run::started(config());
    let rollouts = run.lease(0, 3);
    run.succeed(0, rollouts[0].rollout, 0);
    run.succeed(0, rollouts[1].rollout, 0);
    run.ask_batch(1, 0);
    assert_said(
        &run.pass(10.0),
        "1 of 2 groups ready for step 1, 1 rollouts in flight, 1 queued",
    );
    run.ask_batch(3, 0);
    assert_said(
        &run.pass(10.0),
        "no engine has proved version 1: engine 0 serves version 0",
    );
}

#[test]
fn the_trainer_waits_over_its_long_polls() {
    let mut run = Run::started(config());
    run.ask_batch(1, 0);
    let since = run.core.status().trainer.waiting_since;
    run.pass(10.0);
    run.ask_batch(1, 0);
    run.pass(1.0);
    assert_eq!(run.core.status().trainer.waiting_since, since);
    assert!(since.is_some());
    run.send(Event::WorkerSeen {
        worker: WorkerId(0),
    });
    run.batch(0);
    assert_eq!(run.core.status().trainer.waiting_since, None);
}

#[test]
fn the_next_batch_is_given_at_once_or_not_at_all() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 2,
            ..config().run
        },
        ..config()
    });
    run.batch(0);
    let effects = run.ask_next_batch(2, 0);
    assert!(
        matches!(effects.last(), Some(Effect::BatchNotReady { waiting_for, .. }) if waiting_for.contains("step 2")),
        "{effects:?}"
    );
    assert_eq!(run.core.status().trainer.waiting_since, None, "it trains");
    run.batch(0);
    assert_eq!(fetched(&run.ask_next_batch(2, 0)), Some(Step(2)));
    let none = run.ask_next_batch(config().run.max_steps + 1, 0);
    assert!(matches!(none.last(), Some(Effect::NoMoreBatches { .. })));
}

#[test]
fn newest_weights_win_and_late_engines_catch_up() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 2,
            ..config().run
        },
        ..config()
    });
    run.batch(0);
    run.batch(0);
    assert_eq!(updates(&run.publish(1)), [(0, 1)]);
    assert_eq!(updates(&run.publish(2)), [], "it is loading");
    assert_eq!(updates(&run.prove(0, 1)), [(0, 2)]);
    assert_eq!(
        updates(&run.send(Event::EngineJoined {
            engine: EngineId(1),
            url: "http://engine".to_owned()
        })),
        [(1, 2)]
    );
    let reason = "hash differs".to_owned();
    let effects = run.send(Event::EngineLost {
        engine: EngineId(1),
        reason,
    });
    assert_said(&effects, "engine 1 is out of rotation: hash differs");
    assert_eq!(updates(&effects), [], "until it comes back");
    assert_eq!(
        updates(&run.send(Event::EngineJoined {
            engine: EngineId(1),
            url: "http://engine".to_owned()
        })),
        [(1, 2)]
    );
    assert_eq!(updates(&run.prove(0, 2)), []);
    assert_eq!(updates(&run.publish(2)), [], "repeating is harmless");
}

#[test]
fn weights_of_a_step_that_was_not_cut_are_refused() {
    let mut run = Run::started(config());
    assert_said(
        &run.publish(1),
        "version 1 was published, but only 0 steps were cut",
    );
    assert_said(&run.prove(0, 1), "engine 0 proved version 1, but");
    assert_eq!(run.core.status().run.policy_version, Some(PolicyVersion(0)));
}

#[test]
fn a_version_is_published_once() {
    let mut run = Run::started(config());
    assert_eq!(run.core.refuses_weights(PolicyVersion(0), "d0"), None);
    let other = Event::WeightsPublished {
        version: PolicyVersion(0),
        manifest: "m0".into(),
        digest: "other".into(),
    };
    assert_said(&run.send(other), "published before, with other weights");
    assert_eq!(updates(&run.publish(0)), [], "repeating is harmless");
}

#[test]
fn a_rollout_of_too_many_policies_is_cancelled() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_steps: 9,
            ..config().run
        },
        ..config()
    });
    let rollout = run.lease(0, 1)[0].rollout;
    assert_eq!(run.turn(rollout, 0).len(), 0);
    assert_eq!(run.turn(rollout, 1).len(), 0);
    let effects = run.turn(rollout, 2);
    assert_eq!(
        cancelled(&effects),
        [(rollout, CancelReason::TooManyPolicies)],
        "three, where two are allowed"
    );
    assert_eq!(run.core.counters().stale, 1);
    assert_eq!(run.lease(0, 1).len(), 1, "its group is refilled");
}

#[test]
fn one_policy_is_never_too_many() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_off_policy_steps: 0,
            max_async_level: 0,
            ..config().run
        },
        ..config()
    });
    let effects = run.batch(0);
    assert_eq!(cut(&effects).len(), 1);
}

#[test]
fn groups_of_too_long_samples_are_dropped_with_a_reason() {
    let mut run = Run::started(Config {
        run: RunConfig {
            seq_len: 3,
            ..config().run
        },
        ..config()
    });
    let rollouts = run.lease(0, 2);
    run.succeed(0, rollouts[0].rollout, 0);
    let effects = run.succeed(0, rollouts[1].rollout, 0);
    assert_said(&effects, "all of its samples are longer than seq_len = 3");
    assert_eq!(run.core.counters().filtered, 2);
}

#[test]
fn the_run_ends_when_the_last_version_is_proved() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_steps: 1,
            ..config().run
        },
        ..config()
    });
    run.batch(0);
    run.ask(0, 1);
    assert_said(&run.pass(10.0), "all 1 steps are cut");
    run.ask_batch(1, 0);
    assert!(matches!(
        run.ask_batch(2, 0)[..],
        [Effect::NoMoreBatches { .. }]
    ));
    run.ask(0, 1);
    run.publish(1);
    let effects = run.prove(0, 1);
    assert_said(&effects, "all 1 steps are trained, and version 1 is proved");
    assert!(
        effects
            .iter()
            .any(|effect| matches!(effect, Effect::NoLease { finished: true, .. }))
    );
    assert_eq!(
        run.core.next_deadline().is_some(),
        run.core.status().workers.len() == 1
    );
    assert!(matches!(
        run.ask(0, 1)[..],
        [Effect::NoLease { finished: true, .. }]
    ));
}

#[test]
fn a_shutdown_cancels_everything_and_answers_everyone() {
    let environments = vec![environment("train"), evaluation("evaluation", None)];
    let mut run = Run::started(Config {
        environments,
        ..config()
    });
    run.lease(1, 2);
    let rollouts = run.lease(0, 4);
    run.succeed(0, rollouts[0].rollout, 0);
    assert_eq!(run.lease(0, 1).len(), 1);
    run.ask(0, 1);
    run.ask_batch(1, 0);
    let effects = run.send(Event::ShutdownRequested {
        reason: "SIGTERM".to_owned(),
    });
    assert!(
        cancelled(&effects)
            .iter()
            .all(|(_, reason)| *reason == CancelReason::RunFinished)
    );
    assert_eq!(cancelled(&effects).len(), 4);
    assert!(
        effects
            .iter()
            .any(|effect| matches!(effect, Effect::NoLease { finished: true, .. }))
    );
    assert!(
        effects
            .iter()
            .any(|effect| matches!(effect, Effect::NoMoreBatches { .. }))
    );
    let finished = effects
        .iter()
        .filter(|effect| matches!(effect, Effect::Finished { .. }))
        .count();
    assert_eq!(finished, 1);
    assert!(
        run.send(Event::ShutdownRequested {
            reason: "again".to_owned()
        })
        .is_empty()
    );
    assert_eq!(run.core.counters().cancelled, 5);
    assert_eq!(run.core.discards().voided[&VoidReason::RunFinished], 1);
}

#[test]
fn a_silent_trainer_is_named_again_and_again() {
    let mut run = Run::new(config());
    run.send(Event::EngineJoined {
        engine: EngineId(0),
        url: "http://engine".to_owned(),
    });
    for _ in 0..2 {
        assert_said(
            &run.pass(301.0),
            "waits for the trainer to publish the weights of version 0",
        );
    }
    run.publish(0);
    assert!(!said(&run.pass(200.0)).contains("trainer"));
    assert_said(
        &run.pass(110.0),
        "waits for the trainer to ask for the batch of step 1",
    );
}

#[test]
fn a_trainer_that_holds_the_next_batch_is_silent_about_the_one_it_trains() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 1,
            ..config().run
        },
        ..config()
    });
    run.batch(0);
    run.ask_batch(1, 0);
    run.batch(0);
    assert_eq!(fetched(&run.ask_next_batch(2, 0)), Some(Step(2)));
    assert_said(
        &run.pass(301.0),
        "waits for the trainer to publish the weights of version 1",
    );
}

#[test]
fn a_trainer_that_went_back_is_silent_about_the_step_that_it_trains_again() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 2,
            ..config().run
        },
        ..config()
    });
    run.batch(0);
    run.batch(0);
    run.ask_batch(1, 0);
    run.publish(1);
    run.ask_batch(2, 0);
    run.publish(2);
    run.send(Event::TrainerResumed { step: Step(0) });
    assert_said(
        &run.pass(301.0),
        "waits for the trainer to ask for the batch of step 1",
    );
    run.ask_batch(1, 0);
    assert_said(
        &run.pass(301.0),
        "waits for the trainer to publish the weights of version 1",
    );
}

#[test]
fn replaying_the_events_gives_the_same_effects() {
    let script = |run: &mut Run| -> String {
        let mut effects = run.batch(0);
        effects.extend(run.batch(0));
        effects.extend(run.ask_batch(1, 0));
        effects.extend(run.publish(1));
        effects.extend(run.prove(0, 1));
        effects.extend(run.batch(1));
        format!("{effects:?}")
    };
    let shuffled = Algorithm {
        normalize_std: true,
        shuffle_advantages: true,
        ..grpo()
    };
    let config = Config {
        environments: vec![Environment {
            algorithm: shuffled,
            ..environment("train")
        }],
        ..config()
    };
    assert_eq!(
        script(&mut Run::started(config.clone())),
        script(&mut Run::started(config.clone()))
    );
    assert_ne!(
        script(&mut Run::started(config.clone())),
        script(&mut Run::started(Config {
            run: RunConfig {
                seed: 1,
                ..config.run
            },
            ..config
        }))
    );
}
