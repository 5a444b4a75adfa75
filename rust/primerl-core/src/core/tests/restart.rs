//! Going on after the shell, or the trainer, was restarted.

use super::*;

/// Two batches cut, a third one begun.
fn under_way() -> Run {
    let mut run = Run::started(Config {
        max_async_level: 2,
        ..config()
    });
    run.batch(0);
    run.batch(0);
    let leased = run.lease(0, 2);
    run.succeed(0, leased[0].rollout, 0);
    run.send(Event::TurnFinished {
        rollout: leased[1].rollout,
        turn: turn(None, &[1, 2], &[3, 4], 0),
    });
    run
}

#[test]
fn a_core_that_was_written_and_read_goes_on_alike() {
    let run = under_way();
    let bytes = rmp_serde::to_vec_named(&run.core).expect("a core can be written");
    let read: Core = rmp_serde::from_slice(&bytes).expect("a core can be read");
    assert!(read.fingerprint() == run.core.fingerprint());
}

#[test]
fn after_a_restart_requests_are_gone_and_rollouts_go_on() {
    let mut run = under_way();
    run.ask(0, 4);
    run.ask_batch(7, 0);
    run.send(Event::Restarted);
    let waits = run.core.status().waits;
    assert!(waits.iter().all(|wait| wait.who == "the run"), "{waits:?}");
    assert_said(&run.pass(20.0), "the orchestrator was restarted");
    let workers: Vec<_> = run.core.open_workers().map(|open| open.worker).collect();
    assert_eq!(workers, [], "it did not come back in time");

    let mut run = under_way();
    run.send(Event::Restarted);
    let open: Vec<_> = run.core.open_rollouts().collect();
    let [open] = &open[..] else {
        panic!("one is in flight, not {}", open.len());
    };
    assert_eq!(open.turns.len(), 1);
    let (rollout, deadline) = (open.lease.rollout, open.lease.deadline);
    assert!(deadline <= run.core.config().timeouts.rollout);
    let outcome = outcome(1.0);
    run.send(Event::RolloutFinished {
        rollout,
        worker: WorkerId(0),
        outcome,
    });
    assert_eq!(run.core.status().groups.ready, 1);
}

#[test]
fn a_trainer_goes_back_to_its_checkpoint_and_no_further() {
    let mut run = under_way();
    assert_eq!(fetched(&run.ask_batch(1, 0)), Some(Step(1)));
    assert_eq!(fetched(&run.ask_batch(2, 0)), Some(Step(2)));
    let refused = |run: &Run, step| run.core.refuses_resume(Step(step)).unwrap_or_default();
    assert_eq!(refused(&run, 0), "");
    assert_eq!(refused(&run, 2), "");
    assert!(refused(&run, 3).contains("only 2 steps were cut"));
    run.send(Event::CheckpointSaved { step: Step(1) });
    assert!(refused(&run, 0).contains("batches before step 2 are gone"));
    run.send(Event::TrainerResumed { step: Step(1) });
    assert_eq!(fetched(&run.ask_batch(2, 0)), Some(Step(2)));
}

#[test]
fn a_trainer_that_goes_on_with_other_weights_than_it_was_at_is_refused() {
    let mut run = under_way();
    run.publish(1);
    run.prove(0, 1);
    let resume = |run: &mut Run, version: u64, digest: &str| {
        run.send(Event::TrainerResumed {
            step: Step(version),
        });
        run.send(Event::WeightsPublished {
            version: PolicyVersion(version),
            manifest: "m".to_owned(),
            digest: digest.to_owned(),
        })
    };
    for version in [0, 1] {
        let refused = resume(&mut run, version, "another model");
        assert_said(&refused, "the model or the checkpoint");
        assert_eq!(updates(&refused), []);
    }
    assert_eq!(said(&resume(&mut run, 1, "d1")), "");
}

#[test]
fn weights_that_are_computed_again_may_differ_and_are_loaded_again() {
    let mut run = under_way();
    run.publish(1);
    run.prove(0, 1);
    let republish = |run: &mut Run, version: u64, digest: &str| {
        run.send(Event::WeightsPublished {
            version: PolicyVersion(version),
            manifest: format!("m{version}"),
            digest: digest.to_owned(),
        })
    };
    let refused = republish(&mut run, 0, "d0");
    assert_said(&refused, "versions only go up");
    run.send(Event::TrainerResumed { step: Step(0) });
    assert_eq!(said(&republish(&mut run, 0, "d0")), "");
    assert_eq!(said(&republish(&mut run, 1, "d1")), "", "the same again");
    run.send(Event::TrainerResumed { step: Step(0) });
    let other = republish(&mut run, 1, "other");
    assert_said(&other, "came to other weights");
    assert_eq!(updates(&other), [(0, 1)]);
    assert_said(&republish(&mut run, 1, "third"), "with other weights");
    run.send(Event::TrainerResumed { step: Step(1) });
    assert_said(
        &republish(&mut run, 0, "d0"),
        "the trainer went on from version 1",
    );
}

#[test]
fn batches_for_a_trainer_without_checkpoints_are_bounded() {
    let mut run = Run::started(Config {
        max_steps: 10,
        max_async_level: 5,
        max_off_policy_steps: 8,
        spool_steps: 2,
        ..config()
    });
    for _ in 0..4 {
        run.batch(0);
    }
    assert!(run.core.refuses_resume(Step(1)).is_some());
    assert_eq!(run.core.refuses_resume(Step(2)), None);
    assert_eq!(fetched(&run.ask_batch(3, 0)), Some(Step(3)));
}

#[test]
fn a_jump_of_the_clock_costs_leases_and_not_the_run() {
    let mut run = under_way();
    let jumped = run.pass(3600.0);
    assert_said(&jumped, "was not heard of for 15 s");
    assert!(!cancelled(&jumped).is_empty());
    run.join(1, 0);
    let before = run.core.now();
    // Backwards, too: no time passes until the clock has caught up.
    run.core.handle(Event::Tick, Time(0));
    assert_eq!(run.core.now(), before);
    let leased = run.lease(1, 4);
    for lease in leased {
        run.succeed(1, lease.rollout, 0);
    }
    assert_eq!(run.core.next_step(), Step(4), "the third batch is cut");
}
