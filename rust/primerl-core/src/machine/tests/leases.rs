//! Who gets what, and what becomes of it when something fails.

use super::*;
use crate::config::RunConfig;
use crate::testing::retried;

#[test]
fn nothing_starts_before_a_version_is_proved_and_the_reason_is_said() {
    let mut run = Run::new(config());
    run.send(Event::WorkerJoined {
        worker: WorkerId(0),
        environment: EnvironmentId(0),
        name: "worker".to_owned(),
    });
    run.ask(0, 4);
    assert_said(&run.pass(10.0), "the trainer has not published version 0");
    run.publish(0);
    run.ask(0, 4);
    assert_said(
        &run.pass(10.0),
        "no engine has proved version 0: no engine has joined",
    );
    run.send(Event::EngineJoined {
        engine: EngineId(0),
        url: "http://engine".to_owned(),
    });
    run.ask(0, 4);
    run.send(Event::WorkerSeen {
        worker: WorkerId(0),
    });
    assert_said(&run.pass(10.0), "engine 0 is loading version 0");
    run.prove(0, 0);
    run.ask(0, 4);
    assert_said(
        &run.pass(10.0),
        "environment \"train\" has no worker that listed its examples",
    );
    run.ask(0, 4);
    let effects = run.send(Event::EnvironmentReady {
        environment: EnvironmentId(0),
        examples: 10,
        whole_groups: false,
    });
    assert_eq!(
        leased(&effects).len(),
        4,
        "a waiting request is answered at once"
    );
}

#[test]
fn a_group_starts_together_on_one_example() {
    let mut run = Run::started(config());
    let rollouts = run.lease(0, 4);
    let of = |index: usize| (rollouts[index].group, rollouts[index].example);
    assert_eq!(of(0), of(1));
    assert_eq!(of(2), of(3));
    assert_ne!(of(0).0, of(2).0);
    assert!(
        rollouts
            .iter()
            .all(|leased| leased.deadline == Duration::from_secs(120) && !leased.evaluation)
    );
}

#[test]
fn at_most_the_oversampled_batch_is_in_flight() {
    let mut run = Run::started(Config {
        run: RunConfig {
            oversampling_factor: 1.5,
            max_async_level: 2,
            ..config().run
        },
        ..config()
    });
    assert_eq!(run.lease(0, 100).len(), 6);
    run.ask(0, 1);
    run.send(Event::WorkerSeen {
        worker: WorkerId(0),
    });
    assert_said(
        &run.pass(10.0),
        "6 rollouts are in flight, the most allowed",
    );
}

#[test]
fn synchronous_training_waits_for_the_next_version() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 0,
            oversampling_factor: 3.0,
            ..config().run
        },
        ..config()
    });
    let effects = run.batch(0);
    assert_eq!(cut(&effects).len(), 1);
    assert_eq!(run.lease(0, 4), []);
    run.ask_batch(1, 0);
    run.publish(1);
    run.ask(0, 4);
    let effects = run.prove(0, 1);
    assert_eq!(leased(&effects).len(), 4);
}

#[test]
fn asynchronous_generation_stops_at_its_level() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 1,
            ..config().run
        },
        ..config()
    });
    run.batch(0);
    run.batch(0);
    run.ask(0, 4);
    run.send(Event::WorkerSeen {
        worker: WorkerId(0),
    });
    assert_said(
        &run.pass(10.0),
        "as many as may be trained before version 1 is proved (up to step 2)",
    );
}

#[test]
fn a_failed_rollout_is_tried_again_in_its_group() {
    let mut run = Run::started(config());
    let first = run.lease(0, 4);
    run.fail(0, first[0].rollout);
    let again = run.lease(0, 4);
    assert_eq!(again.len(), 1);
    assert_ne!(again[0].rollout, first[0].rollout);
    assert_eq!(
        (again[0].group, again[0].example),
        (first[0].group, first[0].example)
    );
    assert_eq!(run.core.counters().failed, 1);
}

#[test]
fn a_group_is_dropped_when_retries_are_used_up() {
    let mut run = Run::started(config());
    let rollouts = run.lease(0, 4);
    run.succeed(0, rollouts[1].rollout, 0);
    run.fail(0, rollouts[0].rollout);
    let second = run.lease(0, 1)[0].rollout;
    run.fail(0, second);
    let third = run.lease(0, 1)[0].rollout;
    let effects = run.fail(0, third);
    assert_said(
        &effects,
        "was dropped: a rollout failed 3 times, last with environment: it broke",
    );
    let counters = run.core.counters();
    assert_eq!((counters.failed, counters.filtered), (3, 1));
    assert_eq!(run.lease(0, 4).len(), 2, "another group takes its place");
    let status = run.core.status();
    assert_eq!(
        (status.groups.dropped, status.failures["environment"]),
        (1, 3)
    );
}

#[test]
fn a_dropped_group_cancels_what_is_in_flight() {
    let mut run = Run::started(Config {
        environments: vec![retried("train", 0)],
        ..config()
    });
    let rollouts = run.lease(0, 4);
    let effects = run.fail(0, rollouts[0].rollout);
    assert_eq!(
        cancelled(&effects),
        [(rollouts[1].rollout, CancelReason::GroupDropped)]
    );
    let late = run.succeed(0, rollouts[1].rollout, 0);
    assert!(late.is_empty(), "{late:?}");
    assert_eq!(run.core.status().ignored.values().sum::<u64>(), 2);
}

#[test]
fn an_environment_that_only_fails_ends_the_run_and_one_success_starts_the_count_anew() {
    let mut run = Run::started(Config {
        environments: vec![retried("train", 0)],
        ..config()
    });
    let fail_groups = |run: &mut Run, groups: usize| -> Vec<Effect> {
        (0..groups)
            .flat_map(|_| {
                let rollouts = run.lease(0, 2);
                run.fail(0, rollouts[0].rollout)
            })
            .collect()
    };
    let effects = fail_groups(&mut run, 7);
    for leased in run.lease(0, 2) {
        run.succeed(0, leased.rollout, 0);
    }
    assert!(said(&effects).contains("was dropped"));
    let effects = fail_groups(&mut run, 7);
    assert!(!said(&effects).contains("the last 8 groups"));
    let effects = fail_groups(&mut run, 1);
    assert_said(
        &effects,
        "environment \"train\": the last 8 groups were dropped and none was completed; the last because a rollout \
         failed 1 times, last with environment: it broke",
    );
    assert!(matches!(effects.last(), Some(Effect::Failed { .. })));
    assert!(run.core.finished().is_some());
}

#[test]
fn a_lost_workers_leases_are_handed_out_again() {
    let mut run = Run::started(config());
    run.join(1, 0);
    let lost = run.lease(0, 4);
    run.ask(1, 4);
    run.pass(8.0);
    run.send(Event::WorkerSeen {
        worker: WorkerId(1),
    });
    let effects = run.pass(8.0);
    assert!(effects.iter().any(|effect| matches!(
        effect,
        Effect::WorkerLost {
            worker: WorkerId(0),
            ..
        }
    )));
    assert_said(
        &effects,
        "worker worker of environment \"train\" sent nothing for 15 s; its 4 rollouts are handed out",
    );
    let again = run.lease(1, 4);
    let ids = |rollouts: &[LeasedRollout]| {
        rollouts
            .iter()
            .map(|leased| leased.rollout)
            .collect::<Vec<_>>()
    };
    let groups = |rollouts: &[LeasedRollout]| {
        let mut groups: Vec<GroupId> = rollouts.iter().map(|leased| leased.group).collect();
        groups.sort_unstable();
        groups
    };
    assert_eq!(groups(&again), groups(&lost), "the same groups");
    assert!(
        ids(&again).iter().all(|id| !ids(&lost).contains(id)),
        "as new rollouts"
    );
    assert!(
        run.report(0, lost[0].rollout, outcome(1.0)).is_empty(),
        "the dead worker's report has no effect"
    );
    // Losing a lease is no retry: two more failures of a slot are still allowed.
    assert_eq!(run.core.counters().failed, 0);
    assert_eq!(run.core.counters().cancelled, 4);
    assert_said(&run.ask(0, 1), "worker 0 is not registered (any more)");
}

#[test]
fn an_example_that_kills_every_worker_is_given_up() {
    let mut run = Run::started(config());
    let group = run.lease(0, 1)[0].group;
    let mut said_so = false;
    for worker in 1..10 {
        let effects = run.send(Event::WorkerLeft {
            worker: WorkerId(worker - 1),
            reason: None,
        });
        said_so |= said(&effects).contains("was lost with its worker too often");
        if said_so {
            break;
        }
        run.join(worker, 0);
        assert_eq!(run.lease(worker, 1)[0].group, group);
    }
    assert!(said_so);
}

#[test]
fn a_rollout_that_does_not_end_is_cancelled_and_tried_again() {
    let mut run = Run::started(config());
    let rollout = run.lease(0, 1)[0].rollout;
    let mut effects = Vec::new();
    for _ in 0..13 {
        run.send(Event::WorkerSeen {
            worker: WorkerId(0),
        });
        effects.extend(run.pass(10.0));
    }
    assert_eq!(cancelled(&effects), [(rollout, CancelReason::Timeout)]);
    assert_eq!(run.core.status().failures["timeout"], 1);
    assert_eq!(run.lease(0, 1).len(), 1);
}

#[test]
fn environments_of_other_sizes_are_reported_and_the_first_counts() {
    let mut run = Run::started(config());
    let ready = |examples| Event::EnvironmentReady {
        environment: EnvironmentId(0),
        examples,
        whole_groups: false,
    };
    assert!(run.send(ready(10)).is_empty());
    assert_said(
        &run.send(ready(11)),
        "lists 11 examples where the first one listed 10",
    );
    assert_eq!(run.core.status().environments[0].examples, Some(10));
}

#[test]
fn several_environments_share_a_batch_by_ratio() {
    let environments = vec![
        environment("a"),
        crate::config::Environment {
            ratio: 3.0,
            ..environment("b")
        },
    ];
    let mut run = Run::started(Config {
        run: RunConfig {
            batch_size: 16,
            max_async_level: 0,
            ..config().run
        },
        environments,
        ..config()
    });
    run.ask(0, 16);
    let all = leased(&run.ask(1, 16));
    assert_eq!(
        all.len(),
        12,
        "the first one to ask gets no more than its share"
    );
    let status = run.core.status();
    assert_eq!(
        status
            .environments
            .iter()
            .map(|site| site.in_flight + site.queued)
            .collect::<Vec<_>>(),
        [4, 12]
    );
}

#[test]
fn a_dead_environment_is_waited_for_by_name() {
    let mut run = Run::started(Config {
        environments: vec![environment("a"), environment("b")],
        ..config()
    });
    run.send(Event::WorkerLeft {
        worker: WorkerId(1),
        reason: None,
    });
    run.lease(0, 4);
    let effects = run.pass(14.0);
    assert!(!said(&effects).contains("waits for"), "{effects:?}");
    assert_said(
        &run.pass(2.0),
        "environment \"b\" waits for a worker: none is registered, since 15 s",
    );
    let wait = run
        .core
        .status()
        .waits
        .into_iter()
        .find(|wait| wait.who.contains("\"b\""))
        .expect("it is listed");
    assert!(wait.deadline > run.now);
}

#[test]
fn rollouts_are_dealt_out_in_turn_among_the_workers_that_wait() {
    let mut run = Run::new(Config {
        run: RunConfig {
            batch_size: 8,
            group_size: 4,
            ..config().run
        },
        ..config()
    });
    run.join(0, 0);
    run.join(1, 0);
    run.ask(0, 100);
    run.ask(1, 100);
    run.send(Event::EngineJoined {
        engine: EngineId(0),
        url: "http://engine".to_owned(),
    });
    run.publish(0);
    let effects = run.prove(0, 0);
    let given: Vec<usize> = effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Lease { rollouts, .. } => Some(rollouts.len()),
            _ => None,
        })
        .collect();
    assert_eq!(given, [4, 4]);
}
