//! Evaluations of a run whose trainer goes back to a checkpoint: of weights that it has, not of those that it left.

use super::evaluations::{evaluate, reports, with_evaluation};
use super::*;
use crate::config::RunConfig;

/// Three batches cut, versions 1 to 3 published, and version 2, which is to be evaluated, at its way to the engine.
fn before_version_2() -> Run {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 2,
            ..with_evaluation(Some(2)).run
        },
        ..with_evaluation(Some(2))
    });
    evaluate(&mut run, 0);
    for _ in 0..3 {
        run.batch(0);
    }
    run.publish(1);
    run.publish(2);
    run.publish(3);
    assert_eq!(updates(&run.prove(0, 1)), [(0, 2)]);
    run
}

/// The same, and 2 of its 6 rollouts have ended, 2 are in flight.
fn evaluates_version_2() -> (Run, Vec<LeasedRollout>) {
    let mut run = before_version_2();
    run.prove(0, 2);
    let rollouts = run.lease(1, 4);
    assert!(rollouts.iter().all(|leased| leased.evaluation));
    for leased in &rollouts[..2] {
        run.turn(leased.rollout, 2);
        run.report(1, leased.rollout, outcome(1.0));
    }
    (run, rollouts[2..].to_vec())
}

fn goes_back_to_1(run: &mut Run) {
    run.send(Event::TrainerResumed { step: Step(1) });
    assert_eq!(said(&run.publish(1)), "");
    run.ask_batch(2, 0);
}

#[test]
fn weights_that_the_trainer_left_are_not_measured() {
    let mut run = before_version_2();
    run.send(Event::TrainerResumed { step: Step(1) });
    assert_eq!(updates(&run.prove(0, 2)), [], "engines stay for it");
    assert_eq!(run.lease(1, 100), []);
    run.ask(1, 100);
    run.send(Event::WorkerSeen {
        worker: WorkerId(1),
    });
    assert_said(
        &run.pass(10.0),
        "the evaluation of version 2 waits for the trainer, which went back and is at version 1, to publish it again",
    );
    goes_back_to_1(&mut run);
    assert_eq!(updates(&run.publish_as(2, "other")), [(0, 2)]);
    assert_eq!(run.lease(1, 100), [], "the engine has the first ones");
    run.prove(0, 2);
    let effects = evaluate(&mut run, 2);
    assert_eq!(reports(&effects)[0].version, PolicyVersion(2));
    assert_eq!(reports(&effects).len(), 1);
}

#[test]
fn a_trainer_that_comes_to_the_same_weights_again_keeps_the_evaluation() {
    let (mut run, left) = evaluates_version_2();
    goes_back_to_1(&mut run);
    let effects = evaluate(&mut run, 2);
    assert_eq!(cancelled(&effects), []);
    assert_eq!(reports(&effects), []);
    let mut effects = Vec::new();
    for leased in left {
        run.turn(leased.rollout, 2);
        effects.extend(run.report(1, leased.rollout, outcome(1.0)));
    }
    assert_eq!(reports(&effects), [], "the trainer is at version 1");
    let waits = run.core.status().waits;
    let update = waits
        .iter()
        .find(|wait| wait.who == "the next weight update");
    let waiting_for = &update.expect("it waits").waiting_for;
    assert!(
        waiting_for.contains("to publish version 2 again"),
        "{waiting_for}"
    );
    // It is complete: no deadline takes it away.
    for _ in 0..61 {
        for worker in 0..2 {
            run.send(Event::WorkerSeen {
                worker: WorkerId(worker),
            });
        }
        run.pass(10.0);
    }
    let effects = run.publish(2);
    assert_eq!(
        (reports(&effects)[0].rollouts, cancelled(&effects)),
        (6, vec![])
    );
    assert_eq!(updates(&effects), [(0, 3)]);
}

#[test]
fn other_weights_of_the_version_that_is_measured_are_measured_from_the_beginning() {
    let (mut run, left) = evaluates_version_2();
    goes_back_to_1(&mut run);
    let effects = run.publish_as(2, "other");
    assert_said(&effects, "the evaluation of version 2 starts over");
    let reason = CancelReason::WeightsReplaced;
    let in_flight: Vec<_> = left.iter().map(|leased| (leased.rollout, reason)).collect();
    assert_eq!(cancelled(&effects), in_flight);
    assert_eq!(updates(&effects), [(0, 2)], "the others, and not version 3");
    assert_eq!(run.lease(1, 100), []);
    run.prove(0, 2);
    let effects = evaluate(&mut run, 2);
    let report = &reports(&effects)[0];
    assert_eq!((report.version, report.rollouts), (PolicyVersion(2), 6));
    assert_eq!(report.mean_reward, 1.0, "of 0, 1 and 2, two of each");
    assert_eq!(updates(&effects), [(0, 3)]);
}

#[test]
fn an_evaluation_begins_when_no_engine_has_the_weights_that_were_replaced() {
    let mut run = before_version_2();
    run.send(Event::EngineJoined {
        engine: EngineId(1),
        url: "http://other".to_owned(),
    });
    run.send(Event::TrainerResumed { step: Step(1) });
    run.prove(0, 2);
    // The second one has begun to load them.
    goes_back_to_1(&mut run);
    assert_eq!(updates(&run.publish_as(2, "other")), [(0, 2)]);
    run.prove(0, 2);
    assert_eq!(run.lease(1, 1), []);
    assert_eq!(updates(&run.prove(1, 2)), [(1, 2)]);
    assert_eq!(run.lease(1, 1), [], "it serves the first ones");
    run.prove(1, 2);
    assert_eq!(run.lease(1, 1).len(), 1);
}

#[test]
fn an_evaluation_of_weights_that_were_left_ends_at_its_deadline_without_a_result() {
    let (mut run, _) = evaluates_version_2();
    goes_back_to_1(&mut run);
    let mut effects = Vec::new();
    for _ in 0..61 {
        for worker in 0..2 {
            run.send(Event::WorkerSeen {
                worker: WorkerId(worker),
            });
        }
        effects.extend(run.pass(10.0));
    }
    assert_said(
        &effects,
        "the evaluation of version 2 was given up after 600 s",
    );
    assert_eq!(reports(&effects), []);
    run.publish(2);
    let effects = evaluate(&mut run, 2);
    assert_eq!(reports(&effects)[0].rollouts, 6);
}
