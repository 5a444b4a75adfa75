//! What becomes of a group that loses rollouts.

use super::*;
use crate::config::{OnCancel, RunConfig};
use crate::testing::retried;

/// One batch is one group of four; three of them may do. A retry is not given.
fn partial(group_on_cancel: OnCancel) -> Config {
    Config {
        run: RunConfig {
            max_steps: 9,
            batch_size: 4,
            group_size: 4,
            min_group_size: Some(3),
            group_on_cancel,
            max_async_level: 1,
            max_off_policy_steps: 1,
            oversampling_factor: 2.0,
            ..config().run
        },
        environments: vec![retried("train", 0)],
        ..config()
    }
}

/// Trains a step from a group of its own, in place of what is held back.
fn train_step(run: &mut Run, step: u64) -> Vec<Effect> {
    let rollouts = run.lease(0, 4);
    assert_eq!(rollouts.len(), 4);
    let mut effects: Vec<Effect> = rollouts
        .iter()
        .flat_map(|leased| run.succeed(0, leased.rollout, step - 1))
        .collect();
    assert_eq!(run.core.status().run.next_step, Step(step + 1));
    run.ask_batch(step, 0);
    run.publish(step);
    effects.extend(run.prove(0, step));
    effects
}

#[test]
fn a_group_goes_on_without_a_slot_that_is_given_up() {
    let mut run = Run::started(partial(OnCancel::Refill));
    let rollouts = run.lease(0, 4);
    run.succeed(0, rollouts[0].rollout, 0);
    assert_eq!(said(&run.fail(0, rollouts[1].rollout)), "");
    run.succeed(0, rollouts[2].rollout, 0);
    let effects = run.succeed(0, rollouts[3].rollout, 0);
    let batch = &cut(&effects)[0];
    // Rewards are the rollouts' numbers, 0, 2 and 3: their own mean is what they are compared with.
    let mut advantages: Vec<f32> = Vec::new();
    for micro_batch in batch.ranks.iter().flatten().map(|it| it.columns()) {
        let trained = micro_batch.advantages.iter().zip(&micro_batch.loss_mask);
        advantages.extend(trained.filter(|(_, mask)| **mask == 1).map(|(a, _)| *a));
    }
    advantages.sort_by(f32::total_cmp);
    advantages.dedup();
    let mean = 5.0 / 3.0;
    let expected = [0.0 - mean, 2.0 - mean, 3.0 - mean];
    assert_eq!(advantages.len(), 3);
    assert!(
        advantages
            .iter()
            .zip(expected)
            .all(|(a, b)| (a - b).abs() < 1e-6)
    );
    assert_eq!(batch.metrics["groups/partial"], 1.0);
    assert_eq!(batch.metrics["slots/lost"], 1.0);
    assert_eq!(run.core.counters().trained, 3);
}

#[test]
fn the_last_slot_to_be_given_up_completes_its_group() {
    let mut run = Run::started(partial(OnCancel::Refill));
    let rollouts = run.lease(0, 4);
    for leased in &rollouts[..3] {
        assert!(cut(&run.succeed(0, leased.rollout, 0)).is_empty());
    }
    assert_eq!(cut(&run.fail(0, rollouts[3].rollout)).len(), 1);
}

#[test]
fn a_group_that_lost_too_many_is_dropped() {
    let mut run = Run::started(partial(OnCancel::Refill));
    let rollouts = run.lease(0, 4);
    run.succeed(0, rollouts[0].rollout, 0);
    run.fail(0, rollouts[1].rollout);
    let effects = run.fail(0, rollouts[2].rollout);
    assert_said(&effects, "was dropped: a rollout failed 1 times");
    assert_eq!(
        cancelled(&effects),
        [(rollouts[3].rollout, CancelReason::GroupDropped)]
    );
    assert_eq!(run.core.discards().voided[&VoidReason::GroupDropped], 1);
    assert_eq!(run.core.discards().slots_lost, 2);
}

#[test]
fn what_is_too_old_for_the_next_step_is_cancelled_in_flight_and_refilled() {
    let mut run = Run::started(partial(OnCancel::Refill));
    let held = run.lease(0, 4);
    run.turn(held[0].rollout, 0);
    run.turn(held[1].rollout, 0);
    train_step(&mut run, 1);
    let effects = train_step(&mut run, 2);
    // At step 3, version 0 would be two steps late.
    assert_eq!(
        cancelled(&effects),
        [
            (held[0].rollout, CancelReason::TooOld),
            (held[1].rollout, CancelReason::TooOld)
        ]
    );
    assert_eq!(run.core.counters().stale, 2);
    let again = run.lease(0, 2);
    assert!(again.iter().all(|leased| leased.group == held[0].group));
    assert_eq!(run.core.discards().slots_refilled, 2);
}

#[test]
fn under_the_rule_drop_a_stale_slot_is_given_up_and_then_the_group() {
    let mut run = Run::started(partial(OnCancel::Drop));
    let held = run.lease(0, 4);
    run.turn(held[0].rollout, 0);
    train_step(&mut run, 1);
    let effects = train_step(&mut run, 2);
    assert_eq!(
        cancelled(&effects),
        [(held[0].rollout, CancelReason::TooOld)]
    );
    for leased in &held[1..3] {
        run.succeed(0, leased.rollout, 2);
    }
    let batches = cut(&run.succeed(0, held[3].rollout, 2));
    assert_eq!(
        batches[0].metrics["groups/partial"], 1.0,
        "three are enough"
    );

    let mut run = Run::started(Config {
        run: RunConfig {
            min_group_size: None,
            ..partial(OnCancel::Drop).run
        },
        ..partial(OnCancel::Drop)
    });
    let held = run.lease(0, 4);
    run.turn(held[0].rollout, 0);
    train_step(&mut run, 1);
    let effects = train_step(&mut run, 2);
    assert_said(
        &effects,
        "a rollout became stale (too_old) and is not replaced",
    );
    assert_eq!(cancelled(&effects).len(), 4);
}

#[test]
fn a_finished_rollout_that_became_too_old_is_voided_and_its_group_refilled() {
    let mut run = Run::started(Config {
        run: RunConfig {
            min_group_size: None,
            ..partial(OnCancel::Refill).run
        },
        ..partial(OnCancel::Refill)
    });
    let held = run.lease(0, 4);
    run.succeed(0, held[0].rollout, 0);
    train_step(&mut run, 1);
    train_step(&mut run, 2);
    assert_eq!(run.core.discards().voided[&VoidReason::TooOld], 1);
    for leased in &held[1..] {
        run.succeed(0, leased.rollout, 2);
    }
    let again = run.lease(0, 1)[0].clone();
    assert_eq!(again.group, held[0].group);
    let batches = cut(&run.succeed(0, again.rollout, 2));
    assert_eq!(batches[0].metrics["version/min"], 2.0);
    assert_eq!(batches[0].metrics["voided/too_old"], 1.0);
    assert_eq!(run.core.counters().stale, 1);
}

/// A group of which one rollout is stale in flight, one is finished and stale, and two are fresh.
fn swept(min_group_size: u32) -> (Run, Vec<Effect>) {
    let mut run = Run::started(Config {
        run: RunConfig {
            min_group_size: Some(min_group_size),
            ..partial(OnCancel::Drop).run
        },
        ..partial(OnCancel::Drop)
    });
    let held = run.lease(0, 4);
    run.turn(held[0].rollout, 0);
    run.succeed(0, held[1].rollout, 0);
    train_step(&mut run, 1);
    run.succeed(0, held[2].rollout, 1);
    run.succeed(0, held[3].rollout, 1);
    let rollouts = run.lease(0, 4);
    let effects = rollouts
        .iter()
        .flat_map(|leased| run.succeed(0, leased.rollout, 1))
        .collect();
    (run, effects)
}

#[test]
fn a_complete_group_loses_only_what_is_too_old_if_enough_is_left() {
    // Cutting step 2 gives up the first, which completes the group; then the second is voided.
    let (run, effects) = swept(2);
    let batches = cut(&effects);
    assert_eq!(batches.len(), 2);
    assert_eq!(batches[1].step, Step(3));
    assert_eq!(batches[1].metrics["samples/count"], 2.0);
    assert_eq!(batches[1].metrics["cancelled/too_old"], 1.0);
    assert_eq!(batches[1].metrics["voided/too_old"], 1.0);
    assert_eq!(run.core.counters().stale, 2);

    let (run, effects) = swept(3);
    assert_eq!(cut(&effects).len(), 1);
    assert_said(
        &effects,
        "a sample would be trained at step 3, more than max_off_policy_steps = 1",
    );
    assert_eq!(run.core.discards().voided[&VoidReason::GroupDropped], 2);
}

#[test]
fn a_rollout_that_ends_too_old_is_voided_at_its_end() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_off_policy_steps: 2,
            ..partial(OnCancel::Refill).run
        },
        ..partial(OnCancel::Refill)
    });
    let held = run.lease(0, 4);
    // A second session, newer, keeps it in flight; but it is the first that is trained.
    run.turn(held[0].rollout, 0);
    train_step(&mut run, 1);
    let judge = crate::turn::Turn {
        session: "judge".into(),
        ..turn(None, &[5], &[6], 1)
    };
    run.send(Event::TurnFinished {
        rollout: held[0].rollout,
        turn: judge,
    });
    train_step(&mut run, 2);
    assert_eq!(cancelled(&train_step(&mut run, 3)), []);
    run.report(0, held[0].rollout, outcome(1.0));
    assert_eq!(run.core.discards().voided[&VoidReason::TooOld], 1);
    assert_eq!(run.lease(0, 1)[0].group, held[0].group, "refilled");
}

#[test]
fn a_first_turn_that_takes_too_long_is_cancelled_before_it_ends() {
    let mut run = Run::started(partial(OnCancel::Refill));
    let held = run.lease(0, 4);
    run.send(Event::SamplingStarted {
        rollout: held[0].rollout,
        version: PolicyVersion(0),
    });
    // Another engine has to begin this one again, at the next version.
    for version in [0, 1] {
        run.send(Event::SamplingStarted {
            rollout: held[1].rollout,
            version: PolicyVersion(version),
        });
    }
    train_step(&mut run, 1);
    let effects = train_step(&mut run, 2);
    assert_eq!(
        cancelled(&effects),
        [(held[0].rollout, CancelReason::TooOld)]
    );
    assert_eq!(run.core.counters().stale, 1);
}
