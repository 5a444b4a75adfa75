//! Groups without signal, pools, and the messages about them.

use super::*;
use crate::config::{AlgorithmKind, LengthPenalty, RunConfig};
use crate::curriculum::Pool;

fn filtering() -> Config {
    let mut config = config();
    config.buffer.online_difficulty_filtering = true;
    config
}

/// Leases one group of 2 and ends it with these rewards.
fn group(run: &mut Run, rewards: [f64; 2]) -> (ExampleIndex, Vec<Effect>) {
    let leased = run.lease(0, 2);
    assert_eq!(leased.len(), 2);
    assert_eq!(leased[0].example, leased[1].example);
    let mut effects = Vec::new();
    for (leased, reward) in leased.iter().zip(rewards) {
        run.turn(leased.rollout, 0);
        effects.extend(run.report(0, leased.rollout, outcome(reward)));
    }
    (leased[0].example, effects)
}

#[test]
fn a_group_without_signal_makes_room_for_another() {
    let mut run = Run::started(Config {
        run: RunConfig {
            max_async_level: 0,
            ..filtering().run
        },
        ..filtering()
    });
    for rewards in [[1.0, 1.0], [0.0, 0.0], [0.3, 0.1 + 0.2]] {
        let (_, effects) = group(&mut run, rewards);
        assert_eq!(said(&effects), "", "no word a group");
        assert_eq!(run.core.status().groups.live, 0);
    }
    assert_eq!(run.core.counters().filtered, 6);
    assert_eq!(run.core.status().groups.dropped, 0, "it is no failure");
    group(&mut run, [0.0, 1.0]);
    let (_, effects) = group(&mut run, [1.0, 0.5]);
    let metrics = &cut(&effects)[0].metrics;
    let expected = [
        ("buffer/filtered/train", 3.0),
        ("buffer/returned/train", 0.0),
        ("buffer/easy/train", 1.0),
        ("buffer/normal/train", 8.0),
        ("buffer/hard/train", 1.0),
        ("buffer/into_easy/train", 1.0),
        ("buffer/into_hard/train", 1.0),
        ("buffer/into_normal/train", 0.0),
        ("rollouts/filtered", 6.0),
        ("reward/all/mean", 0.625),
    ];
    for (name, value) in expected {
        assert_eq!(metrics[name], value, "{name}");
    }
}

#[test]
fn without_filtering_every_group_is_trained() {
    let mut run = Run::started(config());
    let (example, _) = group(&mut run, [1.0, 1.0]);
    let (_, effects) = group(&mut run, [0.0, 0.0]);
    assert_eq!(cut(&effects)[0].metrics["buffer/filtered/train"], 0.0);
    assert_eq!(run.core.counters().trained, 4);
    let history = run.core.example_history(EnvironmentId(0), example);
    assert_eq!(history.expect("it exists").pool, Pool::Easy);
}

/// Whether a group with these rewards is trained, whose second rollout took another turn.
fn is_trained(run: &mut Run, rewards: [f64; 2]) -> bool {
    let before = run.core.counters().filtered;
    let leased = run.lease(0, 2);
    run.turn(leased[1].rollout, 0);
    for (leased, reward) in leased.iter().zip(rewards) {
        run.turn(leased.rollout, 0);
        run.report(0, leased.rollout, outcome(reward));
    }
    run.core.counters().filtered == before
}

#[test]
fn equal_rewards_are_trained_where_lengths_differ() {
    let mut config = filtering();
    config.environments[0].algorithm.length_penalty = Some(LengthPenalty {
        num_output_tokens_weight: 0.0,
        num_input_tokens_weight: 0.0,
        num_turns_weight: 0.1,
    });
    let mut run = Run::started(config);
    assert!(is_trained(&mut run, [1.0, 1.0]));
    assert!(!is_trained(&mut run, [0.0, 0.0]), "failures pay nothing");
}

#[test]
fn equal_rewards_are_trained_where_the_seat_got_others_before() {
    let mut config = filtering();
    config.environments[0].algorithm.kind = AlgorithmKind::Rae { decay: 0.0 };
    let mut run = Run::started(config);
    assert!(!is_trained(&mut run, [0.0, 0.0]), "it begins at 0");
    // Two groups are a batch, with which the baseline becomes 1.
    assert!(is_trained(&mut run, [0.0, 1.0]));
    assert!(is_trained(&mut run, [1.0, 1.0]));
    assert!(
        !is_trained(&mut run, [1.0, 1.0]),
        "it is no surprise any more"
    );
    assert!(is_trained(&mut run, [0.0, 0.0]));
}

#[test]
fn solvers_of_two_rollouts_are_not_compared() {
    let mut config = filtering();
    let seat = outcome(1.0).traces[0].seat.clone();
    let hierarchical = |seat: &str| AlgorithmKind::HierarchicalGrpo {
        episode_agents: vec![seat.to_owned()],
    };
    config.environments[0].algorithm.kind = hierarchical(&seat);
    assert!(!is_trained(&mut Run::started(config.clone()), [0.0, 1.0]));
    config.environments[0].algorithm.kind = hierarchical("another");
    assert!(is_trained(&mut Run::started(config), [0.0, 1.0]));
}

#[test]
fn a_batch_that_waits_for_signal_says_so() {
    let mut run = Run::started(filtering());
    run.ask_batch(1, 0);
    let mut effects = Vec::new();
    for _ in 0..128 {
        effects.extend(group(&mut run, [1.0, 1.0]).1);
    }
    let warned: Vec<String> = said(&effects).lines().map(str::to_owned).collect();
    let of = |count| format!("the last {count} groups had no signal");
    for count in [32, 64, 128] {
        let lines = warned.iter().filter(|line| line.contains(&of(count)));
        assert_eq!(lines.count(), 1, "{warned:#?}");
    }
    assert_said(
        &run.pass(10.0),
        "\"train\": the last 128 groups had no signal",
    );
    assert_eq!(run.core.finished(), None);
    group(&mut run, [0.0, 1.0]);
    run.ask_batch(1, 0);
    assert!(!said(&run.pass(10.0)).contains("signal"));
}

#[test]
fn when_no_example_is_left_all_are_normal_again() {
    let mut run = Run::started(filtering());
    let mut drawn: Vec<u32> = (0..10).map(|_| group(&mut run, [1.0, 1.0]).0.0).collect();
    drawn.sort_unstable();
    assert_eq!(drawn, (0..10).collect::<Vec<_>>());
    let pools = run.core.status().buffer[0].pools;
    assert_eq!((pools.easy, pools.normal), (10, 0));
    let effects = run.ask(0, 2);
    assert_said(&effects, "all are normal again (so far 1 times)");
    assert_eq!(leased(&effects).len(), 2, "and the run continues");
    let buffer = &run.core.status().buffer[0];
    assert_eq!((buffer.pools.normal, buffer.returned), (10, 1));
}

#[test]
fn an_example_tells_its_history() {
    let mut run = Run::started(filtering());
    let (example, _) = group(&mut run, [0.25, 0.75]);
    let history = |run: &Run, environment, example| {
        run.core
            .example_history(EnvironmentId(environment), example)
    };
    let known = history(&run, 0, example).expect("it exists");
    assert_eq!(
        (known.groups, known.last_mean_reward, known.pool),
        (1, Some(0.5), Pool::Normal)
    );
    assert_eq!(known.recent[0].step, Step(1));
    assert_eq!(history(&run, 0, ExampleIndex(10)), None);
    assert_eq!(history(&run, 1, example), None);
    assert!(
        !serde_json::to_string(&run.core.buffer_report())
            .expect("a report can be written")
            .is_empty()
    );
}

#[test]
fn a_group_of_too_long_samples_still_fails_where_it_has_no_signal() {
    let mut run = Run::started(Config {
        run: RunConfig {
            seq_len: 3,
            ..filtering().run
        },
        ..filtering()
    });
    let (example, effects) = group(&mut run, [1.0, 1.0]);
    assert_said(&effects, "all of its samples are longer than seq_len = 3");
    let history = run.core.example_history(EnvironmentId(0), example);
    assert_eq!(history.map(|history| history.groups), Some(1));
    assert_eq!(run.core.counters().filtered, 2);
}
