//! Environments of which nothing comes, and examples that do not fit.

use super::*;
use crate::config::RunConfig;
use crate::failure::{Overflow, Refusal};

fn two_environments() -> Config {
    Config {
        run: RunConfig {
            max_steps: 100,
            max_async_level: 100,
            max_off_policy_steps: 100,
            ..config().run
        },
        environments: vec![environment("good"), environment("bad")],
        ..config()
    }
}

fn too_long() -> Outcome {
    Outcome {
        refusal: Some(Refusal {
            code: "context_length_exceeded".to_owned(),
            status: 400,
            overflow: Some(Overflow {
                prompt_tokens: 5009,
                most: 128,
            }),
        }),
        ..outcome(0.0)
    }
}

fn failed() -> Outcome {
    Outcome {
        error: Some(RolloutError {
            kind: "environment".to_owned(),
            message: "the judge is away".to_owned(),
            ..RolloutError::default()
        }),
        ..Outcome::default()
    }
}

/// Ends rollouts of an environment by this, until it gets no more; returns how many, and the messages.
fn end_all(run: &mut Run, environment: u64, with: &Outcome) -> (usize, String) {
    let (mut count, mut words) = (0, String::new());
    while let Some(leased) = run.lease(environment, 1).first() {
        count += 1;
        words.push_str(&said(&run.report(
            environment,
            leased.rollout,
            with.clone(),
        )));
    }
    (count, words)
}

/// Its workers live on meanwhile.
fn wait(run: &mut Run, seconds: u64) {
    for _ in 0..seconds {
        run.pass(1.0);
        for worker in 0..2 {
            run.send(Event::WorkerSeen {
                worker: WorkerId(worker),
            });
        }
    }
}

fn good_group(run: &mut Run, environment: u64) {
    for leased in run.lease(environment, 2) {
        run.turn(leased.rollout, 0);
        run.report(
            environment,
            leased.rollout,
            outcome(f64::from(leased.rollout.0 as u32 % 2)),
        );
    }
}

#[test]
fn an_environment_that_always_fails_rests_while_others_go_on() {
    let mut run = Run::started(two_environments());
    let (tried, words) = end_all(&mut run, 1, &failed());
    assert!(tried >= 8, "{tried}");
    assert!(
        words.contains("environment \"bad\" rests for 60 s, and the others continue without it: the last 8 groups were dropped"),
        "{words}"
    );
    assert_eq!(run.core.finished(), None);
    let rests = |run: &Run| run.core.status().environments[1].rests.clone();
    assert!(rests(&run).is_some_and(|why| why.contains("the judge is away")));
    for _ in 0..4 {
        good_group(&mut run, 0);
    }
    assert_eq!(run.core.finished(), None);
    // One group at a time, after longer and longer rests.
    wait(&mut run, 60);
    let (tried, words) = end_all(&mut run, 1, &failed());
    assert!((1..=8).contains(&tried), "{tried}");
    assert!(
        words.contains("environment \"bad\" rests for 120 s"),
        "{words}"
    );
    wait(&mut run, 60);
    assert_eq!(end_all(&mut run, 1, &failed()).0, 0, "it rests still");
    wait(&mut run, 60);
    good_group(&mut run, 1);
    assert_eq!(rests(&run), None, "a group of it was completed");
    good_group(&mut run, 1);
}

#[test]
fn the_run_ends_when_no_environment_is_left() {
    let mut run = Run::started(two_environments());
    end_all(&mut run, 1, &failed());
    assert_eq!(run.core.finished(), None);
    end_all(&mut run, 0, &failed());
    let reason = run.core.finished().expect("none is left");
    for name in [
        "environment \"good\": the last 8",
        "; environment \"bad\": the last 8",
    ] {
        assert!(reason.contains(name), "{reason}");
    }
    run.send(Event::Restarted);
    assert_eq!(run.core.finished(), None);
    assert_eq!(run.core.status().environments[1].rests, None);
}

#[test]
fn an_example_whose_prompt_is_too_long_is_tried_once() {
    let mut run = Run::started(two_environments());
    let leased = run.lease(1, 1).remove(0);
    let effects = run.report(1, leased.rollout, too_long());
    assert_said(
        &effects,
        "is no longer drawn (examples dropped so far: 1): its first prompt has 5009 tokens, and the context is 128",
    );
    let discards = run.core.discards();
    assert_eq!(discards.failed["prompt_too_long"], 1);
    assert_eq!((discards.groups_dropped, discards.slots_refilled), (1, 0));
    assert_eq!(run.core.errors().of(crate::ErrorKind::Model), 1);
    // All but that one are drawn.
    let mut drawn = std::collections::BTreeSet::new();
    for _ in 0..20 {
        let group = run.lease(1, 2);
        drawn.insert(group[0].example);
        for leased in group {
            run.turn(leased.rollout, 0);
            run.report(1, leased.rollout, outcome(1.0));
        }
    }
    assert_eq!(drawn.len(), 9);
    assert!(!drawn.contains(&leased.example));
    let buffer = &run.core.status().buffer[1];
    assert_eq!((buffer.examples, buffer.resting), (10, 1));
    run.send(Event::Restarted);
    assert_eq!(
        run.core.status().buffer[1].resting,
        0,
        "the context may be longer now"
    );
}

#[test]
fn an_environment_without_a_prompt_that_fits_ends_a_run_without_others() {
    let mut run = Run::started(Config {
        environments: vec![environment("long")],
        ..two_environments()
    });
    let (tried, _) = end_all(&mut run, 0, &too_long());
    assert_eq!(tried, 10, "each example once");
    let reason = run.core.finished().expect("it cannot continue");
    assert!(
        reason.contains("the first prompt of every example is longer than the context; raise inference.max_model_len"),
        "{reason}"
    );
    let mut run = Run::started(two_environments());
    assert_eq!(end_all(&mut run, 1, &too_long()).0, 10);
    assert_eq!(run.core.finished(), None);
    good_group(&mut run, 0);
}

#[test]
fn an_evaluation_tries_a_prompt_that_is_too_long_once() {
    let mut run = Run::started(Config {
        environments: vec![environment("train"), evaluation("evaluation", None)],
        ..config()
    });
    let leased = run.lease(1, 1).remove(0);
    let refused = Outcome {
        ok: false,
        ..too_long()
    };
    let effects = run.report(1, leased.rollout, refused);
    assert_said(
        &effects,
        "of \"evaluation\" failed with prompt_too_long: its first prompt has 5009 tokens",
    );
}

#[test]
fn how_long_no_group_has_had_a_signal_is_known() {
    let mut config = two_environments();
    config.buffer.online_difficulty_filtering = true;
    let mut run = Run::started(config);
    let without = |run: &Run| run.core.status().groups.without_signal_since;
    run.ask_batch(1, 0);
    let equal = |run: &mut Run, environment: u64, groups: usize| {
        for leased in (0..groups)
            .flat_map(|_| run.lease(environment, 2))
            .collect::<Vec<_>>()
        {
            run.turn(leased.rollout, 0);
            run.report(environment, leased.rollout, outcome(0.3));
        }
    };
    (0..40).for_each(|_| equal(&mut run, 0, 1));
    assert_eq!(without(&run), None, "the other environment may have one");
    (0..40).for_each(|_| equal(&mut run, 1, 1));
    let since = without(&run).expect("neither has");
    run.ask_batch(1, 0);
    assert!(run.now >= since);
    for leased in run.lease(1, 2) {
        run.turn(leased.rollout, 0);
        let reward = f64::from(leased.rollout.0 as u32 % 2);
        run.report(1, leased.rollout, outcome(reward));
    }
    assert_eq!(without(&run), None, "it has one");
}
