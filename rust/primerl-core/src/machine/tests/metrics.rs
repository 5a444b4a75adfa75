//! Metrics of a batch of two environments.

use super::*;
use crate::config::RunConfig;

/// A batch of a group of each.
fn two_environments() -> Run {
    Run::started(Config {
        environments: vec![environment("first"), environment("second")],
        ..config()
    })
}

#[track_caller]
fn assert_metrics(batch: &PackedBatch, expected: &[(&str, f64)]) {
    for (name, value) in expected {
        let found = batch.metrics.get(*name);
        let is_close = found.is_some_and(|found| (found - value).abs() < 1e-9);
        assert!(is_close, "{name} = {found:?} is not {value}");
    }
}

/// As a restart finds it.
fn written_and_read(run: &Run) -> Run {
    let bytes = rmp_serde::to_vec_named(&run.core).expect("a core can be written");
    Run {
        core: rmp_serde::from_slice(&bytes).expect("a core can be read"),
        ..*run
    }
}

/// From the first environment, a rollout of two turns, and one that was cut short. From the second, one that failed, one that
/// sampled nothing, and two that go well.
fn first_batch(run: &mut Run, from: impl Fn(&Run) -> Run) -> Arc<PackedBatch> {
    let first = run.lease(0, 2);
    run.turn(first[0].rollout, 0);
    run.send(Event::TurnFinished {
        rollout: first[0].rollout,
        turn: turn(Some(0), &[5], &[6, 7, 8], 0),
    });
    run.report(0, first[0].rollout, outcome(1.0));
    run.turn(first[1].rollout, 0);
    let mut cut_short = outcome(3.0);
    cut_short.traces[0].truncated = true;
    run.report(0, first[1].rollout, cut_short);

    let second = run.lease(1, 2);
    run.fail(1, second[0].rollout);
    run.report(1, second[1].rollout, outcome(1.0));
    *run = from(run);
    let again = run.lease(1, 2);
    run.succeed(1, again[0].rollout, 0);
    let effects = run.succeed(1, again[1].rollout, 0);
    cut(&effects).remove(0)
}

#[test]
fn each_environment_has_its_own() {
    let mut run = two_environments();
    let batch = first_batch(&mut run, written_and_read);
    assert_metrics(
        &batch,
        &[
            ("reward/first/mean", 2.0),
            ("seq_len/all/mean", 5.0),
            ("seq_len/all/max", 8.0),
            ("seq_len/all/min", 4.0),
            ("seq_len/first/mean", 6.0),
            ("seq_len/second/max", 4.0),
            ("num_turns/all/mean", 1.25),
            ("num_turns/all/max", 2.0),
            ("num_turns/all/min", 1.0),
            ("num_turns/first/mean", 1.5),
            ("num_turns/second/mean", 1.0),
            ("is_truncated/all/mean", 0.25),
            ("is_truncated/first/mean", 0.5),
            ("is_truncated/second/mean", 0.0),
            ("empty_rollouts/all/count", 1.0),
            ("empty_rollouts/all/mean", 1.0 / 6.0),
            ("empty_rollouts/first/mean", 0.0),
            ("empty_rollouts/second/mean", 0.25),
            // One that failed, and one without a turn.
            ("errors/environment", 2.0 / 6.0),
            ("errors/second/environment", 0.5),
            ("errors/first/environment", 0.0),
            ("errors/model", 0.0),
            ("errors/second/infrastructure", 0.0),
            ("errored_rollouts/all/mean", 1.0 / 6.0),
            ("errored_rollouts/second/count", 1.0),
            ("errored_rollouts/second/mean", 0.25),
            // Two groups of 20 examples.
            ("progress/epoch", 0.1),
        ],
    );
    let unstopped = first_batch(&mut two_environments(), |run| Run {
        core: run.core.clone(),
        ..*run
    });
    assert_eq!(batch.metrics, unstopped.metrics);
}

#[test]
fn shares_are_of_what_ended_since_the_batch_before() {
    let mut run = two_environments();
    first_batch(&mut run, written_and_read);
    run.publish(1);
    run.prove(0, 1);
    let mut effects = Vec::new();
    for worker in [0, 1] {
        for leased in run.lease(worker, 2) {
            effects = run.succeed(worker, leased.rollout, 1);
        }
    }
    let batch = cut(&effects).remove(0);
    assert_metrics(
        &batch,
        &[
            ("empty_rollouts/second/mean", 0.0),
            ("errored_rollouts/second/count", 0.0),
            ("errored_rollouts/all/mean", 0.0),
            ("progress/epoch", 0.2),
        ],
    );
}

#[test]
fn an_environment_of_which_nothing_ended_has_no_share() {
    let mut config = config();
    config.run.max_async_level = 2;
    config.environments = vec![environment("first"), environment("second")];
    config.environments[1].ratio = 1e-9;
    let mut run = Run::started(config);
    let effects = run.batch(0);
    let batch = cut(&effects).remove(0);
    assert_metrics(&batch, &[("errored_rollouts/first/mean", 0.0)]);
    let of_second = batch
        .metrics
        .keys()
        .filter(|name| name.contains("/second/"));
    let of_second: Vec<&String> = of_second.filter(|name| !name.ends_with("count")).collect();
    assert!(of_second.is_empty(), "{of_second:?}");
}

#[test]
fn a_rollout_that_is_left_out_whole_has_no_length() {
    let mut run = Run::started(Config {
        run: RunConfig {
            truncated_rollouts: crate::config::TruncatedRollouts::Mask,
            ..config().run
        },
        ..config()
    });
    let leased = run.lease(0, 4);
    let mut effects = Vec::new();
    for (index, leased) in leased.iter().enumerate() {
        run.turn(leased.rollout, 0);
        let mut outcome = outcome(index as f64);
        outcome.traces[0].truncated = index == 0;
        effects = run.report(0, leased.rollout, outcome);
    }
    assert_metrics(
        &cut(&effects).remove(0),
        &[
            ("is_truncated/train/mean", 0.25),
            ("num_turns/train/min", 1.0),
            ("seq_len/train/min", 4.0),
        ],
    );
}
