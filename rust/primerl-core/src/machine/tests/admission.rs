//! How many may be in flight, and who must not wait for whom.

use super::*;
use crate::config::{Admission, LimitRule, RunConfig};
use crate::event::EngineLoad;

fn limited(start_per_engine: u32, limit: LimitRule) -> Config {
    Config {
        run: RunConfig {
            batch_size: 16,
            max_async_level: 2,
            admission: Admission {
                limit,
                start_per_engine,
                min_per_engine: 1,
                max_per_engine: 100,
                increase: 2,
                ..crate::testing::admission()
            },
            ..config().run
        },
        ..config()
    }
}

fn load(run: &mut Run, engine: u32, running: u32, waiting: u32) -> Vec<Effect> {
    let load = EngineLoad {
        running,
        waiting,
        kv_cache_usage: 0.5,
        preemptions: 0,
    };
    run.send(Event::EngineLoad {
        engine: EngineId(engine),
        load,
    })
}

fn limits(effects: &[Effect]) -> Vec<(u32, u32)> {
    let limits = effects.iter().filter_map(|effect| match effect {
        Effect::LimitEngine { engine, limit } => Some((engine.0, *limit)),
        _ => None,
    });
    limits.collect()
}

#[test]
fn an_engine_that_reports_nothing_has_the_start_limit_and_those_that_serve_add_up() {
    let mut run = Run::started(limited(3, LimitRule::Adaptive));
    assert_eq!(run.lease(0, 100).len(), 3);
    run.ask(0, 100);
    let joined = run.send(Event::EngineJoined {
        engine: EngineId(1),
        url: "http://engine".to_owned(),
    });
    assert_eq!(limits(&joined), [(1, 3)]);
    assert!(leased(&joined).is_empty(), "it serves nothing yet");
    assert_eq!(leased(&run.prove(1, 0)).len(), 3);
    run.ask(0, 1);
    run.send(Event::WorkerSeen {
        worker: WorkerId(0),
    });
    assert_said(
        &run.pass(10.0),
        "6 rollouts are in flight, the most allowed by the limits of the engines that serve",
    );
}

#[test]
fn nothing_starts_while_no_engine_serves() {
    let mut run = Run::started(limited(3, LimitRule::Fixed));
    run.send(Event::EngineLost {
        engine: EngineId(0),
        reason: "it died".to_owned(),
    });
    run.ask(0, 1);
    assert_said(
        &run.pass(10.0),
        "no engine serves: engine 0 is lost (it died)",
    );
    run.ask(0, 1);
    run.send(Event::EngineJoined {
        engine: EngineId(0),
        url: "http://engine".to_owned(),
    });
    assert_eq!(leased(&run.prove(0, 0)).len(), 1);
}

#[test]
fn reports_move_the_limit_and_what_may_start() {
    let mut run = Run::started(limited(4, LimitRule::Adaptive));
    run.lease(0, 100);
    run.ask(0, 100);
    let effects = load(&mut run, 0, 4, 0);
    assert_eq!(
        (limits(&effects), leased(&effects).len()),
        (vec![(0, 6)], 2)
    );
    run.ask(0, 100);
    let effects = load(&mut run, 0, 2, 4);
    assert_eq!(
        (limits(&effects), leased(&effects).len()),
        (vec![(0, 4)], 0)
    );
    assert_eq!(
        limits(&load(&mut run, 0, 2, 4)),
        [],
        "the first has not shown yet"
    );
    assert_eq!(run.core.status().rollouts.limit, 4);
    assert_eq!(
        limits(&load(&mut run, 9, 2, 4)),
        [],
        "unknown engines are ignored"
    );
}

#[test]
fn a_fixed_limit_ignores_reports() {
    let mut run = Run::started(limited(4, LimitRule::Fixed));
    run.lease(0, 100);
    assert_eq!(limits(&load(&mut run, 0, 4, 0)), []);
    assert_eq!(limits(&load(&mut run, 0, 4, 400)), []);
    assert_eq!(run.core.status().rollouts.limit, 4);
}

fn two_environments() -> Config {
    Config {
        run: RunConfig {
            batch_size: 8,
            max_async_level: 0,
            max_steps: 9,
            ..config().run
        },
        environments: vec![environment("a"), environment("b")],
        ..config()
    }
}

/// Passes time in which environment a's worker asks, as workers do, and b's does not.
fn wait(run: &mut Run, seconds: u32) -> Vec<Effect> {
    let mut effects = Vec::new();
    for _ in 0..seconds {
        for worker in [0, 1] {
            run.send(Event::WorkerSeen {
                worker: WorkerId(worker),
            });
        }
        effects.extend(run.ask(0, 100));
        effects.extend(run.pass(1.0));
    }
    effects
}

#[test]
fn an_environment_whose_workers_do_not_ask_stops_the_others_not_for_good() {
    let mut run = Run::started(two_environments());
    let own = run.lease(0, 100);
    assert_eq!(own.len(), 4, "half of the batch is the other environment's");
    for leased in &own {
        run.succeed(0, leased.rollout, 0);
    }
    let effects = wait(&mut run, 14);
    assert!(leased(&effects).is_empty(), "its turn is kept for a while");
    let effects = wait(&mut run, 3);
    assert_said(&effects, "2 groups of environment \"b\" are set aside");
    let more = leased(&effects);
    assert_eq!(more.len(), 4, "then others take its places");
    run.ask_batch(1, 0);
    let said = run.core.words(run.core.step_wait(Step(1)));
    assert!(
        said.contains("2 groups of environment \"b\" are set aside"),
        "{said}"
    );
    let effects: Vec<Effect> = more
        .iter()
        .flat_map(|leased| run.succeed(0, leased.rollout, 0))
        .collect();
    let batch = &cut(&effects)[0];
    assert_eq!(batch.metrics["groups/set_aside"], 2.0);
    run.publish(1);
    // It comes back: what was set aside continues first, and its ratio holds again.
    run.ask(1, 100);
    run.prove(0, 1);
    let status = run.core.status();
    let in_flight: Vec<usize> = status
        .environments
        .iter()
        .map(|site| site.in_flight)
        .collect();
    assert_eq!(in_flight, [4, 4]);
    assert_eq!(status.groups.set_aside, 0);
}

#[test]
fn busy_workers_are_waited_for_in_the_same_way() {
    let mut run = Run::started(Config {
        timeouts: crate::config::Timeouts {
            rollout: Duration::from_secs(3600),
            ..config().timeouts
        },
        ..two_environments()
    });
    // The other environment's worker runs one slow rollout and asks for no more.
    run.ask(1, 1);
    let own = run.lease(0, 100);
    assert_eq!(own.len(), 4);
    for leased in &own {
        run.succeed(0, leased.rollout, 0);
    }
    let effects = wait(&mut run, 17);
    assert_said(&effects, "1 groups of environment \"b\" are set aside");
    assert_eq!(
        leased(&effects).len(),
        2,
        "the group that runs keeps its place"
    );
}

#[test]
fn a_synchronous_run_stays_on_policy_when_a_group_was_set_aside() {
    let mut run = Run::started(two_environments());
    run.ask(1, 1);
    let own = run.lease(0, 100);
    let begun = run.core.status().environments[1].in_flight;
    assert_eq!((own.len(), begun), (4, 1));
    for leased in &own {
        run.succeed(0, leased.rollout, 0);
    }
    // The other environment's worker finishes one rollout of a group, and asks for no more.
    let first = RolloutId(
        (0..5)
            .find(|id| own.iter().all(|own| own.rollout.0 != *id))
            .expect("one is not ours"),
    );
    run.succeed(1, first, 0);
    let effects = wait(&mut run, 17);
    assert_said(&effects, "2 groups of environment \"b\" are set aside");
    for leased in leased(&effects) {
        run.succeed(0, leased.rollout, 0);
    }
    assert_eq!(run.core.status().run.next_step, Step(2));
    run.ask_batch(1, 0);
    run.publish(1);
    run.ask(1, 100);
    run.prove(0, 1);
    assert_eq!(run.core.discards().voided[&VoidReason::TooOld], 1);
    assert_eq!(
        run.core.status().environments[1].in_flight,
        4,
        "it is made again"
    );
}
