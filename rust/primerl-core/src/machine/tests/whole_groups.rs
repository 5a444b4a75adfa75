//! Environments whose rewards come from all rollouts of a group together.

use super::*;
use crate::config::{Admission, LimitRule, OnCancel, RunConfig};
use crate::testing::retried;

/// One batch is one group of four, which one worker runs. One retry is given.
fn whole() -> Config {
    Config {
        run: RunConfig {
            max_steps: 9,
            batch_size: 4,
            group_size: 4,
            max_async_level: 2,
            max_off_policy_steps: 2,
            oversampling_factor: 3.0,
            ..config().run
        },
        environments: vec![retried("train", 1)],
        ..config()
    }
}

/// One engine at version 0, and workers 0 and 1 of the training environment (and one of each other).
fn started(config: Config) -> Run {
    let mut run = Run::new(config);
    run.send(Event::EngineJoined {
        engine: EngineId(0),
        url: "http://engine".to_owned(),
    });
    let environments = run.core.config().environments.len() as u32;
    for environment in 0..environments {
        let environment = EnvironmentId(environment);
        run.send(Event::EnvironmentReady {
            environment,
            examples: 10,
            whole_groups: true,
        });
    }
    for (worker, environment) in [(0, 0), (1, 0)] {
        join(&mut run, worker, environment);
    }
    for environment in 1..environments {
        join(&mut run, 10 + u64::from(environment), environment);
    }
    run.publish(0);
    run.prove(0, 0);
    run
}

fn join(run: &mut Run, worker: u64, environment: u32) {
    run.send(Event::WorkerJoined {
        worker: WorkerId(worker),
        environment: EnvironmentId(environment),
        name: format!("worker {worker}"),
    });
}

fn groups(leased: &[LeasedRollout]) -> Vec<u64> {
    let mut groups: Vec<u64> = leased.iter().map(|leased| leased.group.0).collect();
    groups.dedup();
    groups
}

fn voided(run: &Run, reason: VoidReason) -> u64 {
    run.core
        .discards()
        .voided
        .get(&reason)
        .copied()
        .unwrap_or(0)
}

#[test]
fn an_answer_holds_as_few_whole_groups_as_reach_what_was_asked_for() {
    let mut run = started(whole());
    let one = run.lease(0, 1);
    assert_eq!((one.len(), groups(&one).len()), (4, 1), "more than 1");
    let two = run.lease(1, 5);
    assert_eq!((two.len(), groups(&two).len()), (8, 2));
    assert!(run.lease(0, 1).is_empty(), "three groups are under way");
}

#[test]
fn without_room_for_all_of_a_group_none_of_it_starts_and_nobody_overtakes_it() {
    let mut run = started(Config {
        run: RunConfig {
            oversampling_factor: 1.5,
            ..whole().run
        },
        ..whole()
    });
    let first = run.lease(0, 4);
    assert_eq!(first.len(), 4, "six may be in flight");
    assert!(run.lease(1, 4).is_empty());
    run.succeed(0, first[0].rollout, 0);
    assert!(run.lease(1, 4).is_empty(), "room for three");
    run.succeed(0, first[1].rollout, 0);
    assert_eq!(run.lease(1, 4).len(), 4);
}

#[test]
fn a_group_larger_than_what_engines_are_trusted_with_runs_alone() {
    let admission = Admission {
        limit: LimitRule::Fixed,
        start_per_engine: 3,
        min_per_engine: 1,
        ..crate::testing::admission()
    };
    let mut run = started(Config {
        run: RunConfig {
            admission,
            ..whole().run
        },
        ..whole()
    });
    let first = run.lease(0, 9);
    assert_eq!(first.len(), 4);
    for leased in &first[..3] {
        run.succeed(0, leased.rollout, 0);
    }
    assert!(run.lease(1, 1).is_empty());
    run.succeed(0, first[3].rollout, 0);
    assert_eq!(run.lease(1, 1).len(), 4);
    run.send(Event::EngineLost {
        engine: EngineId(0),
        reason: "it broke".to_owned(),
    });
    assert!(run.lease(0, 1).is_empty(), "no engine serves");
}

#[test]
fn a_failed_rollout_takes_its_group_along_and_all_of_it_is_run_again() {
    let mut run = started(whole());
    let first = run.lease(0, 4);
    run.succeed(0, first[0].rollout, 0);
    let effects = run.fail(0, first[1].rollout);
    let reason = CancelReason::GroupRestarted;
    assert_eq!(
        cancelled(&effects),
        [(first[2].rollout, reason), (first[3].rollout, reason)]
    );
    assert_eq!(voided(&run, VoidReason::GroupIncomplete), 1);
    // A late report changes nothing.
    assert!(cut(&run.succeed(0, first[2].rollout, 0)).is_empty());
    let again = run.lease(1, 1);
    assert_eq!((again.len(), groups(&again)), (4, groups(&first)));
    for leased in &again[..3] {
        assert!(cut(&run.succeed(1, leased.rollout, 0)).is_empty());
    }
    let batches = cut(&run.succeed(1, again[3].rollout, 0));
    assert_eq!(batches[0].metrics["groups/restarted"], 1.0);
    assert_eq!(batches[0].metrics["samples/count"], 4.0);
    let counters = run.core.counters();
    assert_eq!((counters.trained, counters.failed), (4, 1));
    assert_eq!(counters.cancelled, 3, "two in flight, one reported");
}

#[test]
fn when_its_retries_are_spent_a_failed_slot_is_given_up_by_itself() {
    let mut run = started(Config {
        run: RunConfig {
            min_group_size: Some(3),
            ..whole().run
        },
        ..whole()
    });
    let first = run.lease(0, 4);
    run.fail(0, first[0].rollout);
    let again = run.lease(0, 4);
    assert_eq!(cancelled(&run.fail(0, again[2].rollout)), []);
    for leased in [&again[0], &again[1]] {
        run.succeed(0, leased.rollout, 0);
    }
    let batches = cut(&run.succeed(0, again[3].rollout, 0));
    assert_eq!(batches[0].metrics["groups/partial"], 1.0);

    let mut run = started(whole());
    let first = run.lease(0, 4);
    run.fail(0, first[0].rollout);
    let again = run.lease(0, 4);
    let effects = run.fail(0, again[0].rollout);
    assert_said(&effects, "was dropped: a rollout failed 2 times");
    assert_eq!(cancelled(&effects).len(), 3);
}

#[test]
fn a_lost_worker_loses_its_groups_as_a_whole_and_no_others() {
    let mut run = started(whole());
    let (lost, kept) = (run.lease(0, 4), run.lease(1, 4));
    run.succeed(0, lost[0].rollout, 0);
    run.turn(lost[1].rollout, 0);
    run.succeed(1, kept[0].rollout, 0);
    let effects = run.send(Event::WorkerLeft {
        worker: WorkerId(0),
        reason: None,
    });
    let taken = lost[1..].iter().map(|leased| leased.rollout);
    let taken: Vec<_> = taken.map(|id| (id, CancelReason::WorkerLost)).collect();
    assert_eq!(cancelled(&effects), taken);
    assert_eq!(voided(&run, VoidReason::GroupIncomplete), 1);
    for leased in &kept[1..3] {
        run.succeed(1, leased.rollout, 0);
    }
    assert_eq!(cut(&run.succeed(1, kept[3].rollout, 0)).len(), 1);
    let again = run.lease(1, 1);
    assert_eq!((again.len(), groups(&again)), (4, groups(&lost)));
    assert!(again.iter().all(|leased| !lost.contains(leased)));
}

#[test]
fn a_group_that_no_worker_survives_is_dropped() {
    let mut run = started(whole());
    let mut said = Vec::new();
    for worker in 20..25 {
        join(&mut run, worker, 0);
        assert_eq!(run.lease(worker, 1).len(), 4);
        said = run.send(Event::WorkerLeft {
            worker: WorkerId(worker),
            reason: None,
        });
    }
    assert_said(
        &said,
        "one of its rollouts was lost with its worker too often",
    );
    assert_eq!(run.core.discards().groups_restarted, 4);
}

#[test]
fn time_is_up_for_all_of_a_group_at_once() {
    let mut run = started(whole());
    let first = run.lease(0, 4);
    run.succeed(0, first[3].rollout, 0);
    let mut effects = Vec::new();
    for _ in 0..12 {
        run.send(Event::WorkerSeen {
            worker: WorkerId(0),
        });
        effects.extend(run.pass(10.0));
    }
    assert_eq!(cancelled(&effects).len(), 3);
    assert_eq!(run.core.discards().failed["timeout"], 1);
    assert_eq!(groups(&run.lease(0, 1)), groups(&first));
}

/// A group of which the first rollout has sampled version 0 and the second was reported, when version 0 gets too old.
fn overtaken(group_on_cancel: OnCancel) -> (Run, Vec<LeasedRollout>, Vec<Effect>) {
    let mut run = started(Config {
        run: RunConfig {
            max_async_level: 1,
            max_off_policy_steps: 1,
            min_group_size: Some(2),
            group_on_cancel,
            ..whole().run
        },
        ..whole()
    });
    let held = run.lease(0, 4);
    run.turn(held[0].rollout, 0);
    run.succeed(0, held[1].rollout, 0);
    let mut effects = Vec::new();
    for step in 1..=2 {
        let rollouts = run.lease(1, 4);
        for leased in &rollouts {
            effects.extend(run.succeed(1, leased.rollout, step - 1));
        }
        run.ask_batch(step, 0);
        run.publish(step);
        run.prove(0, step);
    }
    (run, held, effects)
}

#[test]
fn a_stale_rollout_takes_its_group_along() {
    let (mut run, held, effects) = overtaken(OnCancel::Refill);
    let reasons: Vec<CancelReason> = cancelled(&effects).iter().map(|(_, why)| *why).collect();
    let sibling = CancelReason::GroupRestarted;
    assert_eq!(reasons, [CancelReason::TooOld, sibling, sibling]);
    assert_eq!(voided(&run, VoidReason::GroupIncomplete), 1);
    assert_eq!(groups(&run.lease(0, 1)), groups(&held));

    let (run, _, effects) = overtaken(OnCancel::Drop);
    assert_said(
        &effects,
        "a rollout became stale (too_old) and is not replaced",
    );
    assert_eq!(
        cancelled(&effects).len(),
        3,
        "all of it, though two would do"
    );
    assert_eq!(run.core.discards().groups_restarted, 0);
}

/// Environment 1 evaluates 3 examples twice each, by worker 11.
fn evaluating() -> Run {
    let mut config = whole();
    config.environments.push(evaluation("evaluation", None));
    started(config)
}

fn reports(effects: &[Effect]) -> Vec<(u32, u32, f64)> {
    let report = |effect: &Effect| match effect {
        Effect::Evaluated(report) => Some((report.rollouts, report.failed, report.mean_reward)),
        _ => None,
    };
    effects.iter().filter_map(report).collect()
}

fn evaluate(run: &mut Run) -> Vec<Effect> {
    let mut effects = Vec::new();
    loop {
        let rollouts = run.lease(11, 1);
        if rollouts.is_empty() {
            return effects;
        }
        assert_eq!((rollouts.len(), groups(&rollouts).len()), (2, 1));
        for leased in rollouts {
            effects.extend(run.report(11, leased.rollout, outcome(1.0)));
        }
    }
}

#[test]
fn a_rollout_of_an_evaluation_counts_when_its_whole_group_has_ended() {
    let mut run = evaluating();
    let first = run.lease(11, 1);
    run.report(11, first[0].rollout, outcome(0.0));
    assert_eq!(run.core.counters().evaluated, 0);
    run.send(Event::WorkerLeft {
        worker: WorkerId(11),
        reason: None,
    });
    assert_eq!(voided(&run, VoidReason::GroupIncomplete), 1);
    join(&mut run, 11, 1);
    assert_eq!(reports(&evaluate(&mut run)), [(6, 0, 1.0)]);
    assert_eq!(run.core.counters().evaluated, 6);
}

#[test]
fn a_group_of_an_evaluation_is_tried_once_more_as_a_whole_and_then_scores_0_where_it_fails() {
    let mut run = evaluating();
    let first = run.lease(11, 1);
    run.report(11, first[0].rollout, outcome(1.0));
    run.fail(11, first[1].rollout);
    let again = run.lease(11, 1);
    assert_eq!(groups(&again), groups(&first));
    let said = run.fail(11, again[0].rollout);
    assert_said(&said, "failed twice, last with environment: it broke");
    assert_eq!(cancelled(&said), []);
    run.report(11, again[1].rollout, outcome(1.0));
    assert_eq!(reports(&evaluate(&mut run)), [(6, 1, 5.0 / 6.0)]);
}

#[test]
fn a_group_that_an_evaluations_end_cuts_off_does_not_count() {
    let mut run = evaluating();
    let whole = run.lease(11, 1);
    for leased in &whole {
        run.report(11, leased.rollout, outcome(1.0));
    }
    let half = run.lease(11, 1);
    run.report(11, half[0].rollout, outcome(0.0));
    let mut effects = Vec::new();
    for _ in 0..61 {
        run.send(Event::WorkerSeen {
            worker: WorkerId(11),
        });
        effects.extend(run.pass(10.0));
    }
    assert_eq!(reports(&effects), [(2, 0, 1.0)]);
}

#[test]
fn a_whole_group_in_which_something_failed_is_measured_again_as_a_whole() {
    let mut config = whole();
    config.environments = vec![evaluation("evaluation", None)];
    config.run.max_steps = 0;
    let mut run = started(config);
    for attempt in 0..2 {
        let group = run.lease(0, 1);
        assert_eq!((group.len(), groups(&group)), (2, vec![0]), "{attempt}");
        run.fail(0, group[0].rollout);
        if attempt == 1 {
            run.report(0, group[1].rollout, outcome(0.25));
        }
    }
    let others = |run: &mut Run| {
        let mut effects = Vec::new();
        loop {
            let group = run.lease(0, 1);
            if group.is_empty() {
                return effects;
            }
            for leased in group {
                effects.extend(run.report(0, leased.rollout, outcome(1.0)));
            }
        }
    };
    assert_eq!(reports(&others(&mut run)), [(6, 1, 4.25 / 6.0)]);
    run.send(Event::MeasureAgain);
    assert_eq!(reports(&others(&mut run)), [(6, 0, 1.0)]);
}
