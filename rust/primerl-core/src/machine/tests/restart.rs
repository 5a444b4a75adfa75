//! Going on after the shell, or the trainer, was restarted.

use super::*;
use crate::config::{Changes, RunConfig};
use std::collections::BTreeMap;

const ENTRIES: &str = "
    config rng now curriculum sites groups ready next_ready usual_tokens computing scoring rollouts by_age in_flight_evaluation
    workers lease_requests next_place ledger limits round measured evaluated next_step batches trainer signal_at
    baselines counters losses sampled_tokens last_cut next_group next_rollout next_worker deadlines waits ignored finished failed hopeless";

/// Two batches cut, a third one begun.
fn under_way() -> Run {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 2,
            ..config().run
        },
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
fn what_was_sampled_is_counted_since_the_run_began() {
    let mut run = under_way();
    let sampled = run.core.status().run.sampled_tokens;
    assert!(sampled > 2, "{sampled}");
    let bytes = rmp_serde::to_vec_named(&run.core).expect("a core can be written");
    run.core = rmp_serde::from_slice(&bytes).expect("a core can be read");
    run.send(Event::Restarted);
    let [rollout] = run
        .core
        .open_rollouts()
        .map(|open| open.lease.rollout)
        .collect::<Vec<_>>()[..]
    else {
        panic!("one is in flight");
    };
    let finished = |turn| Event::TurnFinished { rollout, turn };
    run.send(finished(turn(Some(0), &[5], &[6, 7, 8], 0)));
    run.send(finished(crate::testing::taught_turn(&[1], &[9, 9])));
    assert_eq!(
        run.core.status().run.sampled_tokens,
        sampled + 3,
        "a teacher writes its text elsewhere"
    );
    let over = RolloutId(999_999);
    run.send(Event::TurnFinished {
        rollout: over,
        turn: turn(None, &[1], &[2, 3], 0),
    });
    assert_eq!(run.core.status().run.sampled_tokens, sampled + 5);
}

/// Snapshots of earlier versions have these entries; a later version may add some, with a default.
#[test]
fn a_snapshot_has_the_entries_that_earlier_versions_wrote() {
    let bytes = rmp_serde::to_vec_named(&under_way().core).expect("a core can be written");
    let written: BTreeMap<String, serde::de::IgnoredAny> =
        rmp_serde::from_slice(&bytes).expect("it is a map by name");
    let entries: Vec<String> = written.into_keys().collect();
    let mut expected: Vec<&str> = ENTRIES.split_whitespace().collect();
    expected.sort_unstable();
    assert_eq!(entries, expected);
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
    run.publish(1);
    run.send(Event::CheckpointSaved { step: Step(1) });
    assert!(refused(&run, 0).contains("batches before step 2 are gone"));
    run.send(Event::TrainerResumed { step: Step(1) });
    assert_eq!(fetched(&run.ask_batch(2, 0)), Some(Step(2)));
}

#[test]
fn checksums_are_kept_for_as_long_as_their_batches() {
    let mut run = under_way();
    for step in 1..=3 {
        let said = run.send(Event::BatchWritten {
            step: Step(step),
            checksums: vec![step, 7],
        });
        assert!(said.is_empty());
    }
    let known = |run: &Run| run.core.batch_checksums().clone();
    assert_eq!(
        known(&run),
        BTreeMap::from([(Step(1), vec![1, 7]), (Step(2), vec![2, 7])]),
        "step 3 was not cut"
    );
    run.ask_batch(1, 0);
    run.publish(1);
    run.send(Event::CheckpointSaved { step: Step(1) });
    assert_eq!(known(&run), BTreeMap::from([(Step(2), vec![2, 7])]));
    let bytes = rmp_serde::to_vec_named(&run.core).expect("it can be written");
    let read: Core = rmp_serde::from_slice(&bytes).expect("it can be read");
    assert_eq!(read.batch_checksums(), run.core.batch_checksums());
}

#[test]
fn after_a_restart_what_was_cut_may_have_been_given() {
    let mut run = under_way();
    let refused = |run: &Run, version: u64| {
        let refused = run.core.refuses_weights(PolicyVersion(version), "d");
        refused.unwrap_or_default()
    };
    assert!(refused(&run, 1).contains("has not fetched the batch of step 1"));
    run.send(Event::Restarted);
    assert_eq!(refused(&run, 1), "", "the request for it may be lost");
    assert!(refused(&run, 3).contains("only 2 steps were cut"));
    run.send(Event::TrainerResumed { step: Step(0) });
    run.publish(0);
    assert!(refused(&run, 1).contains("has not fetched the batch of step 1"));
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
    let refused = run.publish(0);
    assert_said(&refused, "versions only go up");
    run.send(Event::TrainerResumed { step: Step(0) });
    assert_eq!(said(&run.publish(0)), "");
    assert_eq!(said(&run.publish(1)), "", "the same again");
    run.send(Event::TrainerResumed { step: Step(0) });
    run.publish(0);
    run.ask_batch(1, 0);
    let other = run.publish_as(1, "other");
    assert_said(&other, "came to other weights");
    assert_eq!(updates(&other), [(0, 1)]);
    assert_said(&run.publish_as(1, "third"), "with other weights");
    run.send(Event::TrainerResumed { step: Step(1) });
    assert_said(&run.publish(0), "the trainer resumed from version 1");
}

#[test]
fn a_proof_of_weights_that_were_replaced_meanwhile_does_not_count() {
    let mut run = under_way();
    assert_eq!(updates(&run.publish(1)), [(0, 1)]);
    run.send(Event::TrainerResumed { step: Step(0) });
    run.publish(0);
    run.ask_batch(1, 0);
    let other = run.publish_as(1, "other");
    assert_said(&other, "came to other weights");
    assert_eq!(updates(&other), [], "it is loading the first ones");
    let proved = run.prove(0, 1);
    assert_eq!(said(&proved), "");
    assert_eq!(updates(&proved), [(0, 1)]);
    let digests = proved.iter().filter_map(|effect| match effect {
        Effect::UpdateEngine { digest, .. } => Some(digest.as_str()),
        _ => None,
    });
    assert_eq!(digests.collect::<Vec<_>>(), ["other"]);
    let proved_now = |run: &Run| run.core.status().run.policy_version;
    assert_eq!(proved_now(&run), Some(PolicyVersion(0)));
    assert_eq!(updates(&run.prove(0, 1)), []);
    assert_eq!(proved_now(&run), Some(PolicyVersion(1)));
}

#[test]
fn an_engine_that_is_lost_while_its_weights_are_replaced_loads_the_new_ones_once() {
    let mut run = under_way();
    run.publish(1);
    run.send(Event::TrainerResumed { step: Step(0) });
    run.publish(0);
    run.ask_batch(1, 0);
    run.publish_as(1, "other");
    run.send(Event::EngineLost {
        engine: EngineId(0),
        reason: "killed".to_owned(),
    });
    let joined = run.send(Event::EngineJoined {
        engine: EngineId(0),
        url: "http://engine".to_owned(),
    });
    assert_eq!(updates(&joined), [(0, 1)]);
    assert_eq!(updates(&run.prove(0, 1)), []);
}

#[test]
fn versions_leave_no_gap() {
    let mut run = under_way();
    run.ask_batch(2, 0);
    let gap = "version 2 was published, but version 1 is due";
    assert_said(&run.publish(2), gap);
    assert_eq!(
        run.core.status().run.published_version,
        PolicyVersion(0).into()
    );
    run.publish(1);
    assert_eq!(said(&run.publish(1)), "", "its answer may be lost");
    assert_eq!(said(&run.publish(2)), "");
    // A trainer that resumes begins with the version it says.
    run.send(Event::TrainerResumed { step: Step(1) });
    assert_said(&run.publish(2), gap);
    assert_eq!(said(&run.publish(1)), "");
    assert_eq!(said(&run.publish(2)), "");
}

#[test]
fn the_first_version_is_the_one_the_run_begins_with() {
    let mut run = Run::new(config());
    let early = run.publish_as(1, "d1");
    assert_said(&early, "only 0 steps were cut");
    let mut run = under_way();
    run.send(Event::TrainerResumed { step: Step(0) });
    assert_said(
        &run.publish(1),
        "version 0 is due: a trainer first publishes",
    );
}

#[test]
fn a_version_of_a_batch_that_nobody_fetched_is_refused() {
    let mut run = under_way();
    let refused = run.publish_as(1, "d1");
    assert_said(&refused, "has not fetched the batch of step 1");
    assert_eq!(updates(&refused), []);
    run.ask_batch(1, 0);
    assert_eq!(said(&run.publish_as(1, "d1")), "");
    // The trainer before fetched it; this one resumes from its own batches.
    run.send(Event::TrainerResumed { step: Step(0) });
    run.publish(0);
    let refused = run.publish_as(1, "d1");
    assert_said(&refused, "has not fetched the batch of step 1");
}

#[test]
fn a_checkpoint_covers_only_what_its_trainer_has_published() {
    let mut run = under_way();
    let saved = |run: &mut Run, step| said(&run.send(Event::CheckpointSaved { step: Step(step) }));
    let refused = "a checkpoint of step 1 was reported, but version 0 is the newest";
    run.ask_batch(1, 0);
    assert!(saved(&mut run, 1).contains(refused));
    assert!(saved(&mut run, u64::MAX).contains("a checkpoint of step 18446744073709551615"));
    assert_eq!(fetched(&run.ask_batch(1, 0)), Some(Step(1)), "it is kept");
    run.publish(1);
    run.publish(2);
    // A trainer that went back needs what is after its checkpoint, whatever was published before.
    run.send(Event::TrainerResumed { step: Step(0) });
    assert!(saved(&mut run, 1).contains(refused));
    run.send(Event::TrainerResumed { step: Step(1) });
    assert_eq!(saved(&mut run, 1), "", "it continues from there");
    assert!(saved(&mut run, 2).contains("version 1 is the newest"));
    assert_eq!(fetched(&run.ask_batch(2, 0)), Some(Step(2)));
}

/// Two steps are cut of 9, and up to 4 groups may be under way: 2 are ready or under way beyond step 3, 4 beyond step 2.
#[test]
fn groups_beyond_a_smaller_max_steps_are_dropped() {
    for (max_steps, kept) in [(9, 4), (3, 2), (2, 0), (1, 0)] {
        let mut run = Run::started(Config {
            run: RunConfig {
                max_steps: 9,
                max_async_level: 3,
                max_off_policy_steps: 3,
                oversampling_factor: 2.0,
                ..config().run
            },
            ..config()
        });
        run.batch(0);
        run.batch(0);
        // The oldest group is under way, the second is complete, of the third one rollout is leased.
        let leased = run.lease(0, 5);
        assert_eq!(leased.len(), 5);
        run.succeed(0, leased[2].rollout, 0);
        run.succeed(0, leased[3].rollout, 0);
        let rest = run.lease(0, 3);
        assert_eq!(rest.len(), 3, "four groups are under way");
        let changes = Changes {
            max_steps,
            timeouts: run.core.config().timeouts.clone(),
            intervals: BTreeMap::new(),
            batch_size: None,
            shared_prefixes: None,
        };
        let effects = run.send(Event::Reconfigured(changes));
        run.core.check().expect("every invariant holds");
        let status = run.core.status();
        assert_eq!(status.groups.live, kept, "max_steps = {max_steps}");
        assert_eq!(status.groups.ready, usize::from(kept > 0));
        assert_eq!(status.groups.dropped, 4 - kept as u64);
        match kept {
            4 => assert_eq!(said(&effects), ""),
            _ => assert_said(&effects, "which leaves no step to train them"),
        }
        let done = run.lease(0, 1);
        assert!(done.is_empty(), "nothing more is begun");
    }
}

#[test]
fn batches_for_a_trainer_without_checkpoints_are_bounded() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_steps: 10,
            max_async_level: 5,
            max_off_policy_steps: 8,
            ..config().run
        },
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
    assert_said(&jumped, "sent nothing for 15 s");
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
