//! Evaluations: when, at which version, and what they hold up.

use super::*;
use crate::config::{Changes, RunConfig};
use crate::effect::EvaluationReport;

/// Environment 0 trains, environment 1 evaluates 3 examples twice each.
pub(super) fn with_evaluation(interval: Option<u64>) -> Config {
    Config {
        run: RunConfig {
            max_steps: 4,
            ..config().run
        },
        environments: vec![environment("train"), evaluation("evaluation", interval)],
        ..config()
    }
}

pub(super) fn reports(effects: &[Effect]) -> Vec<EvaluationReport> {
    let reports = effects.iter().filter_map(|effect| match effect {
        Effect::Evaluated(report) => Some(report.clone()),
        _ => None,
    });
    reports.collect()
}

/// Runs the evaluation that is due, as worker 1; each rollout's reward is its example's number.
pub(super) fn evaluate(run: &mut Run, version: u64) -> Vec<Effect> {
    let mut effects = Vec::new();
    loop {
        let rollouts = run.lease(1, 100);
        if rollouts.is_empty() {
            return effects;
        }
        for leased in rollouts {
            assert!(leased.evaluation);
            run.turn(leased.rollout, version);
            effects.extend(run.report(1, leased.rollout, outcome(f64::from(leased.example.0))));
        }
    }
}

#[test]
fn version_0_is_evaluated_while_training_goes_on() {
    let mut run = Run::started(with_evaluation(None));
    let effects = run.batch(0);
    assert_eq!(cut(&effects).len(), 1, "training does not wait for it");
    let effects = evaluate(&mut run, 0);
    let expected = EvaluationReport {
        environment: EnvironmentId(1),
        version: PolicyVersion(0),
        rollouts: 6,
        expected: 6,
        unmeasured: 0,
        complete: true,
        measured_again: 0,
        failed: 0,
        errors: Default::default(),
        mean_reward: 1.0,
        metrics: Default::default(),
        scores: reports(&effects)[0].scores.clone(),
        by_example: reports(&effects)[0].by_example.clone(),
    };
    assert_eq!(reports(&effects), [expected]);
    let by_example = &reports(&effects)[0].by_example;
    assert_eq!(by_example.examples, [0, 1, 2].map(ExampleIndex));
    assert_eq!(by_example.scores["avg@2"], [0.0, 1.0, 2.0].map(Some));
    let scores = &reports(&effects)[0].scores;
    assert_eq!(scores["avg@2"], 1.0, "of 0, 1 and 2, two of each");
    assert_eq!(scores["pass@1"], 2.0 / 3.0, "from 1 up");
    assert_eq!(scores.len(), 9, "with their intervals");
    assert_eq!(run.core.counters().evaluated, 6);
}

#[test]
fn evaluations_go_first_up_to_their_share() {
    let mut run = Run::started(with_evaluation(None));
    assert_eq!(
        run.lease(1, 100).len(),
        2,
        "half of the four that may be in flight"
    );
    run.ask(1, 100);
    assert_eq!(run.lease(0, 100).len(), 2, "the rest is training's");
    run.send(Event::WorkerSeen {
        worker: WorkerId(1),
    });
    assert_said(
        &run.pass(10.0),
        "4 rollouts are in flight, the most allowed",
    );
}

#[test]
fn a_waiting_evaluation_gets_its_share_as_training_rollouts_end() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 2,
            ..with_evaluation(None).run
        },
        ..with_evaluation(None)
    });
    let training = run.lease(0, 100);
    assert_eq!(training.len(), 4, "no one asked for evaluations");
    run.ask(1, 1);
    run.ask(1, 1);
    run.ask(0, 4);
    let mut evaluating = Vec::new();
    for rollout in &training[..3] {
        evaluating.extend(leased(&run.succeed(0, rollout.rollout, 0)));
    }
    let evaluations = evaluating.iter().filter(|leased| leased.evaluation).count();
    assert_eq!(
        (evaluations, evaluating.len()),
        (2, 3),
        "its share, then training again"
    );
    assert!(evaluating[0].evaluation && evaluating[1].evaluation);
}

#[test]
fn an_evaluation_may_have_everything_while_no_training_may_start() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 0,
            ..with_evaluation(None).run
        },
        ..with_evaluation(None)
    });
    run.batch(0);
    assert_eq!(run.lease(0, 4), [], "version 1 is awaited");
    assert_eq!(run.lease(1, 100).len(), 4);
}

#[test]
fn weights_wait_until_the_evaluation_has_ended() {
    let mut run = Run::started(with_evaluation(None));
    run.batch(0);
    run.ask_batch(1, 0);
    assert_eq!(updates(&run.publish(1)), []);
    let joined = run.send(Event::EngineJoined {
        engine: EngineId(1),
        url: "http://engine".to_owned(),
    });
    assert_eq!(
        updates(&joined),
        [(1, 0)],
        "a new engine gets the pinned version"
    );
    run.prove(1, 0);
    let effects = evaluate(&mut run, 0);
    assert_eq!(updates(&effects), [(0, 1), (1, 1)]);
    let wait = run.core.status().waits;
    assert!(
        !wait
            .iter()
            .any(|wait| wait.waiting_for.contains("evaluation")),
        "{wait:?}"
    );
}

#[test]
fn a_due_version_is_not_skipped() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 2,
            ..with_evaluation(Some(2)).run
        },
        ..with_evaluation(Some(2))
    });
    evaluate(&mut run, 0);
    run.batch(0);
    run.batch(0);
    run.batch(0);
    assert_eq!(updates(&run.publish(1)), [(0, 1)]);
    run.publish(2);
    run.publish(3);
    assert_eq!(
        updates(&run.prove(0, 1)),
        [(0, 2)],
        "2 is to be evaluated, so 3 waits"
    );
    assert_eq!(updates(&run.prove(0, 2)), []);
    let effects = evaluate(&mut run, 2);
    assert_eq!(reports(&effects)[0].version, PolicyVersion(2));
    assert_eq!(updates(&effects), [(0, 3)]);
}

#[test]
fn the_last_version_is_evaluated_before_the_end() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_steps: 1,
            ..with_evaluation(None).run
        },
        ..with_evaluation(None)
    });
    evaluate(&mut run, 0);
    run.batch(0);
    run.ask_batch(1, 0);
    run.publish(1);
    let effects = run.prove(0, 1);
    assert!(
        !effects
            .iter()
            .any(|effect| matches!(effect, Effect::Finished { .. }))
    );
    let effects = evaluate(&mut run, 1);
    assert!(
        matches!(
            effects[effects.len() - 2..],
            [Effect::Evaluated(_), Effect::Finished { .. }]
        ),
        "{effects:?}"
    );
}

#[test]
fn a_failed_evaluation_rollout_is_tried_once_more_and_then_scores_0() {
    let mut run = Run::started(with_evaluation(None));
    let first = run.lease(1, 1)[0].clone();
    run.fail(1, first.rollout);
    let second = run.lease(1, 1)[0].clone();
    assert_eq!(second.example, first.example);
    assert_said(
        &run.fail(1, second.rollout),
        "failed twice, last with environment: it broke",
    );
    let effects = evaluate(&mut run, 0);
    let report = &reports(&effects)[0];
    assert_eq!(
        (report.rollouts, report.failed, report.mean_reward),
        (6, 1, 1.0)
    );
    assert_eq!(run.core.counters().failed, 2);
}

#[test]
fn an_evaluation_has_a_deadline() {
    let mut run = Run::started(with_evaluation(None));
    run.batch(0);
    run.ask_batch(1, 0);
    run.publish(1);
    let rollouts = run.lease(1, 2);
    run.turn(rollouts[0].rollout, 0);
    run.report(1, rollouts[0].rollout, outcome(0.5));
    let mut effects = Vec::new();
    for _ in 0..61 {
        run.send(Event::WorkerSeen {
            worker: WorkerId(1),
        });
        effects.extend(run.pass(10.0));
    }
    assert_said(
        &effects,
        "was closed after 600 s, with partial results: \"evaluation\" (1 of 6 rollouts) had not ended",
    );
    let report = &reports(&effects)[0];
    assert_eq!((report.rollouts, report.mean_reward), (1, 0.5));
    assert_eq!(
        (report.expected, report.unmeasured, report.complete),
        (6, 5, false)
    );
    let names: Vec<&str> = report.scores.keys().map(String::as_str).collect();
    assert_eq!(names, ["avg@2", "pass@1"], "as of a whole one");
    assert_eq!(updates(&effects), [(0, 1)]);
}

/// Lets the workers live for so many seconds.
fn live(run: &mut Run, seconds: u64) -> Vec<Effect> {
    let mut effects = Vec::new();
    for _ in 0..seconds / 10 {
        for worker in 0..2 {
            run.send(Event::WorkerSeen {
                worker: WorkerId(worker),
            });
        }
        effects.extend(run.pass(10.0));
    }
    effects
}

/// No bound in all, and one of the time without a measurement.
fn with_progress(config: Config) -> Config {
    Config {
        timeouts: crate::config::Timeouts {
            rollout: Duration::from_secs(400),
            evaluation: Duration::from_secs(1_000_000),
            evaluation_progress: Some(Duration::from_secs(300)),
            ..config.timeouts
        },
        ..config
    }
}

#[test]
fn an_evaluation_may_take_long_as_long_as_something_comes_of_it() {
    let mut run = Run::started(with_progress(with_evaluation(None)));
    run.batch(0);
    run.ask_batch(1, 0);
    run.publish(1);
    let mut effects = Vec::new();
    for _ in 0..3 {
        let leased = run.lease(1, 1)[0].clone();
        effects.extend(live(&mut run, 250));
        run.turn(leased.rollout, 0);
        effects.extend(run.report(1, leased.rollout, outcome(1.0)));
    }
    assert_eq!(reports(&effects), [], "after 750 s");
    let left = run.lease(1, 1)[0].clone();
    effects.extend(live(&mut run, 290));
    run.fail(1, left.rollout);
    assert_eq!(reports(&effects), []);
    let effects = live(&mut run, 20);
    assert_said(
        &effects,
        "the evaluation of version 0 was closed after 300 s in which it measured nothing, with partial \
         results: \"evaluation\" (3 of 6 rollouts) had not ended",
    );
    assert_eq!(reports(&effects)[0].unmeasured, 3);
    assert_eq!(updates(&effects), [(0, 1)], "the next weights wait no more");
}

#[test]
fn where_nobody_waits_for_it_an_evaluation_may_measure_nothing_for_long() {
    let mut run = Run::new(with_progress(without_training()));
    run.send(Event::EngineJoined {
        engine: EngineId(0),
        url: "http://engine".to_owned(),
    });
    run.join(0, 0);
    run.publish(0);
    run.prove(0, 0);
    let effects = live(&mut run, 5000);
    assert_eq!(reports(&effects), []);
    assert_eq!(run.core.finished(), None);
}

#[test]
fn an_evaluation_without_workers_holds_nothing_up_for_ever() {
    let mut run = Run::new(with_evaluation(None));
    run.send(Event::EngineJoined {
        engine: EngineId(0),
        url: "http://engine".to_owned(),
    });
    run.join(0, 0);
    run.publish(0);
    run.prove(0, 0);
    let effects = run.pass(601.0);
    assert_said(
        &effects,
        "environment \"evaluation\" waits for a worker: none is registered",
    );
    assert_said(
        &effects,
        "\"evaluation\" (no worker listed its examples) had not ended",
    );
    assert_said(&effects, "has no result");
}

#[test]
fn lost_evaluation_rollouts_are_handed_out_again() {
    let mut run = Run::started(with_evaluation(None));
    run.lease(1, 2);
    run.send(Event::WorkerLeft {
        worker: WorkerId(1),
        reason: None,
    });
    run.join(1, 1);
    let effects = evaluate(&mut run, 0);
    assert_eq!(
        (reports(&effects)[0].rollouts, reports(&effects)[0].failed),
        (6, 0)
    );
    assert_eq!(run.core.counters().cancelled, 2);
}

/// Environment 0 evaluates, and nothing is trained.
fn without_training() -> Config {
    Config {
        run: RunConfig {
            max_steps: 0,
            ..config().run
        },
        environments: vec![evaluation("evaluation", None)],
        ..config()
    }
}

/// Runs all of environment 0 as worker 0, whose turns are of no version: another server wrote them.
fn measure(run: &mut Run) -> Vec<Effect> {
    let mut effects = Vec::new();
    for leased in run.lease(0, 100) {
        assert!(leased.evaluation);
        effects.extend(run.report(0, leased.rollout, outcome(1.0)));
    }
    effects
}

#[test]
fn a_run_of_other_servers_needs_neither_engine_nor_trainer() {
    let mut run = Run::new(Config {
        without_engines: true,
        ..without_training()
    });
    run.join(0, 0);
    let mut effects = Vec::new();
    while run.core.finished().is_none() {
        let measured = measure(&mut run);
        assert!(!measured.is_empty(), "no rollout is handed out");
        assert!(
            run.core
                .status()
                .waits
                .iter()
                .all(|wait| !wait.waiting_for.contains("engine"))
        );
        effects.extend(measured);
    }
    assert_eq!(
        (reports(&effects)[0].rollouts, reports(&effects).len()),
        (6, 1)
    );
    assert_eq!(run.core.finished(), Some("everything is evaluated"));
}

#[test]
fn a_run_without_training_measures_what_is_published_first() {
    let mut run = Run::new(without_training());
    run.join(0, 0);
    assert_eq!(
        run.lease(0, 100),
        [],
        "no one has reported what there is to measure"
    );
    run.send(Event::EngineJoined {
        engine: EngineId(0),
        url: "http://engine".to_owned(),
    });
    run.publish(0);
    run.prove(0, 0);
    let waits = run.core.status().waits;
    assert!(
        waits
            .iter()
            .any(|wait| wait.who == "the end" && wait.is_end),
        "no update of weights is to come: {waits:?}"
    );
    let mut effects = Vec::new();
    while run.core.finished().is_none() {
        for leased in run.lease(0, 100) {
            run.turn(leased.rollout, 0);
            effects.extend(run.report(0, leased.rollout, outcome(0.5)));
        }
    }
    assert_eq!(reports(&effects)[0].mean_reward, 0.5);
}

/// Runs all that is left of a run without training; of the examples of `failing`, each rollout fails.
fn measure_all(run: &mut Run, failing: &[u32]) -> Vec<Effect> {
    let mut effects = Vec::new();
    loop {
        let rollouts = run.lease(0, 100);
        if rollouts.is_empty() {
            return effects;
        }
        for leased in rollouts {
            effects.extend(match failing.contains(&leased.example.0) {
                true => run.fail(0, leased.rollout),
                false => run.report(0, leased.rollout, outcome(1.0)),
            });
        }
    }
}

fn of_other_servers() -> Run {
    let mut run = Run::new(Config {
        without_engines: true,
        ..without_training()
    });
    run.join(0, 0);
    run
}

#[test]
fn what_failed_is_measured_again_and_takes_its_place() {
    let mut run = of_other_servers();
    let first = &reports(&measure_all(&mut run, &[0, 2]))[0];
    assert_eq!((first.failed, first.mean_reward), (4, 1.0 / 3.0));
    assert_eq!(run.core.finished(), Some("everything is evaluated"));
    let effects = run.send(Event::MeasureAgain);
    assert_eq!(run.core.finished(), None, "{effects:?}");
    let second = &reports(&measure_all(&mut run, &[2]))[0];
    let counted = (second.rollouts, second.failed, second.measured_again);
    assert_eq!(counted, (6, 2, 1));
    assert_eq!(second.errors.values().sum::<u64>(), 2);
    assert_eq!(second.scores["avg@2"], 2.0 / 3.0);
    assert_eq!(run.core.finished(), Some("everything is evaluated"));
    run.send(Event::MeasureAgain);
    let third = &reports(&measure_all(&mut run, &[]))[0];
    assert_eq!((third.failed, third.measured_again), (0, 2));
    assert_eq!(third.scores["avg@2"], 1.0);
    let effects = run.send(Event::MeasureAgain);
    assert_said(&effects, "nothing has failed that could be measured again");
    assert_eq!(run.core.finished(), Some("everything is evaluated"));
}

#[test]
fn what_was_not_measured_in_time_can_be_measured_after_all() {
    let mut run = of_other_servers();
    let rollouts = run.lease(0, 3);
    run.report(0, rollouts[0].rollout, outcome(1.0));
    let mut effects = Vec::new();
    for _ in 0..61 {
        run.send(Event::WorkerSeen {
            worker: WorkerId(0),
        });
        effects.extend(run.pass(10.0));
    }
    assert_eq!(reports(&effects)[0].unmeasured, 5);
    run.send(Event::MeasureAgain);
    let report = &reports(&measure_all(&mut run, &[]))[0];
    assert_eq!((report.rollouts, report.complete), (6, true));
    assert_eq!(report.scores["pass@2"], 1.0);
}

#[test]
fn what_has_failed_so_far_can_be_measured_again_before_the_end() {
    let mut run = of_other_servers();
    for _ in 0..2 {
        let leased = run.lease(0, 1)[0].clone();
        run.fail(0, leased.rollout);
    }
    run.send(Event::MeasureAgain);
    let report = &reports(&measure_all(&mut run, &[]))[0];
    assert_eq!(
        (report.rollouts, report.failed, report.measured_again),
        (6, 0, 0)
    );
}

#[test]
fn a_run_that_trains_measures_nothing_again() {
    let mut run = Run::started(with_evaluation(None));
    evaluate(&mut run, 0);
    let effects = run.send(Event::MeasureAgain);
    assert_said(&effects, "so nothing is measured again");
    assert_eq!(run.lease(1, 100), []);
}

#[test]
fn how_often_is_evaluated_may_change_between_two_starts() {
    let mut run = Run::started(with_evaluation(Some(3)));
    evaluate(&mut run, 0);
    run.batch(0);
    let now = with_evaluation(Some(2));
    let changes = Changes::between(run.core.config(), &now).expect("the interval");
    assert_eq!(Changes::between(&now, &now), None);
    run.send(Event::Reconfigured(changes));
    assert_eq!(Changes::between(run.core.config(), &now), None);
    run.publish(1);
    run.prove(0, 1);
    assert_eq!(run.lease(1, 100), [], "version 1 is none of them");
    run.batch(1);
    run.publish(2);
    run.prove(0, 2);
    let effects = evaluate(&mut run, 2);
    assert_eq!(reports(&effects)[0].version, PolicyVersion(2));
}

#[test]
fn a_run_that_only_evaluates_may_have_another_concurrency_at_its_next_start() {
    let mut run = of_other_servers();
    assert_eq!(run.lease(0, 100).len(), 4);
    let change = |batch_size| Config {
        run: RunConfig {
            batch_size,
            ..without_training().run
        },
        without_engines: true,
        ..without_training()
    };
    let changes = Changes::between(run.core.config(), &change(2)).expect("the concurrency");
    let effects = run.send(Event::Reconfigured(changes));
    assert_eq!(cancelled(&effects).len(), 2, "beyond what may be in flight");
    run.send(Event::Restarted);
    assert_eq!(run.lease(0, 100), []);
    let changes = Changes::between(run.core.config(), &change(8)).expect("the concurrency");
    run.send(Event::Reconfigured(changes));
    assert_eq!(run.lease(0, 100).len(), 4, "all that is left");
    let training = Config {
        run: RunConfig {
            batch_size: 8,
            ..with_evaluation(None).run
        },
        ..with_evaluation(None)
    };
    assert_eq!(
        Changes::between(&with_evaluation(None), &training),
        None,
        "what is trained in one step stays"
    );
}

#[test]
fn the_timeouts_of_the_next_start_count_for_an_evaluation_that_goes_on() {
    let mut run = Run::started(with_evaluation(None));
    let longer = with_progress(with_evaluation(None));
    let changes = Changes::between(run.core.config(), &longer).expect("the timeouts");
    run.send(Event::Reconfigured(changes));
    let effects = live(&mut run, 290);
    assert_eq!(reports(&effects), []);
    assert_said(&live(&mut run, 20), "in which it measured nothing");
}
