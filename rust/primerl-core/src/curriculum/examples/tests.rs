use super::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

fn rules(easy_fraction: f64, hard_fraction: f64) -> Buffer {
    Buffer {
        online_difficulty_filtering: true,
        easy_fraction,
        hard_fraction,
        ..crate::testing::config().buffer
    }
}

fn off() -> Buffer {
    crate::testing::config().buffer
}

fn filing(mean_reward: f64) -> Filing {
    Filing {
        step: Step(2),
        mean_reward,
        rollouts: 4,
        has_signal: true,
    }
}

struct Drawing {
    examples: Examples,
    rng: ChaCha8Rng,
}

impl Drawing {
    fn new(examples: u32) -> Self {
        Drawing {
            examples: Examples::new(examples),
            rng: ChaCha8Rng::seed_from_u64(1),
        }
    }

    fn draw(&mut self, rules: &Buffer) -> (u32, Option<u64>) {
        let drawn = self.examples.draw(rules, &mut self.rng);
        self.examples.check(rules).expect("the pools are whole");
        drawn.expect("there are examples")
    }

    fn file(&mut self, example: u32, mean_reward: f64, rules: &Buffer) {
        assert!(self.examples.file(example, &filing(mean_reward), rules));
        self.examples.check(rules).expect("the pools are whole");
    }
}

#[test]
fn thresholds_belong_to_their_pools() {
    let classes = [1.0, 0.8, 0.79, 0.21, 0.2, -3.0].map(|mean| class(mean, &rules(0.0, 0.0)));
    assert_eq!(
        classes,
        [
            Pool::Easy,
            Pool::Easy,
            Pool::Normal,
            Pool::Normal,
            Pool::Hard,
            Pool::Hard
        ]
    );
    let whole = Buffer {
        easy_threshold: 1.0,
        hard_threshold: 0.0,
        ..rules(0.0, 0.0)
    };
    let sums = [0.7 + 0.2 + 0.1, 0.1 + 0.2 - 0.3];
    assert_eq!(
        sums.map(|mean| class(mean, &whole)),
        [Pool::Easy, Pool::Hard]
    );
}

#[test]
fn weight_0_is_never_drawn_until_nothing_else_is_left() {
    let (mut drawing, rules) = (Drawing::new(10), rules(0.0, 0.0));
    for example in 0..9 {
        drawing.file(example, f64::from(example % 2), &rules);
    }
    for _ in 0..20 {
        assert_eq!(drawing.draw(&rules), (9, None));
    }
    drawing.file(9, 1.0, &rules);
    let (_, returned) = drawing.draw(&rules);
    assert_eq!(returned, Some(1));
    let (pools, movement) = drawing.examples.end_step();
    assert_eq!((pools.normal, pools.easy, pools.hard), (10, 0, 0));
    assert_eq!(
        movement.into,
        Pools {
            easy: 5,
            normal: 10,
            hard: 5
        }
    );
    assert_eq!(movement.returned, 1);
    assert_eq!(drawing.examples.end_step().1, Movement::default());
}

#[test]
fn pools_are_drawn_by_weight_times_size() {
    let (mut drawing, rules) = (Drawing::new(100), rules(0.5, 0.25));
    for example in 0..60 {
        drawing.file(example, f64::from(u32::from(example < 40)), &rules);
    }
    // 40 easy at 0.5, 20 hard at 0.25, 40 normal: 20 to 5 to 40.
    let mut counts = [0_u32; 3];
    for _ in 0..6500 {
        counts[match drawing.draw(&rules).0 {
            0..40 => 0,
            40..60 => 1,
            _ => 2,
        }] += 1;
    }
    let expected = [2000, 500, 4000];
    for (count, expected) in counts.iter().zip(expected) {
        // Five standard deviations at most.
        assert!(count.abs_diff(expected) < 200, "{counts:?}");
    }
}

#[test]
fn a_moved_example_waits_for_its_pools_next_epoch() {
    let (mut drawing, rules) = (Drawing::new(4), rules(1.0, 0.0));
    drawing.file(0, 1.0, &rules);
    drawing.file(1, 1.0, &rules);
    let report = drawing.examples.report(EnvironmentId(0), "train", &rules);
    let easy = &report.decks[0];
    assert_eq!(
        (easy.pool, easy.weight, easy.examples, easy.drawn),
        (Some(Pool::Easy), 1.0, 2, 2)
    );
}

#[test]
fn nothing_is_filtered_when_it_is_off_but_all_is_recorded() {
    let (mut drawing, rules) = (Drawing::new(10), off());
    for _ in 0..3 {
        let mut order: Vec<u32> = (0..10).map(|_| drawing.draw(&rules).0).collect();
        for example in &order {
            let filing = Filing {
                has_signal: false,
                ..filing(f64::from(example % 2))
            };
            assert!(drawing.examples.file(*example, &filing, &rules));
        }
        order.sort_unstable();
        assert_eq!(order, (0..10).collect::<Vec<_>>(), "plain epochs");
    }
    let report = drawing.examples.report(EnvironmentId(0), "train", &rules);
    assert_eq!(
        report.pools,
        Pools {
            easy: 5,
            normal: 0,
            hard: 5
        }
    );
    assert_eq!((report.seen, report.filtered_groups), (10, 0));
    assert_eq!(
        report.decks,
        [DeckReport {
            pool: None,
            weight: 1.0,
            examples: 10,
            drawn: 10,
            epochs: 2
        }]
    );
}

#[test]
fn groups_without_signal_are_counted_until_one_has_some() {
    let (mut drawing, rules) = (Drawing::new(10), rules(0.0, 0.0));
    let silent = Filing {
        has_signal: false,
        ..filing(0.5)
    };
    assert!(!drawing.examples.file(3, &silent, &rules));
    assert!(!drawing.examples.file(4, &silent, &rules));
    assert_eq!(drawing.examples.filtered_in_a_row, 2);
    assert!(drawing.examples.file(4, &filing(0.5), &rules));
    let report = drawing.examples.report(EnvironmentId(0), "train", &rules);
    assert_eq!(
        (
            report.filtered_in_a_row,
            report.filtered_groups,
            report.filtered_rollouts
        ),
        (0, 2, 8)
    );
    assert_eq!(drawing.examples.end_step().1.filtered, 2);
}

#[test]
fn an_examples_history_keeps_the_last_groups() {
    let (mut drawing, rules) = (Drawing::new(10), rules(0.0, 0.0));
    for step in 1..=11 {
        let filing = Filing {
            step: Step(step),
            ..filing([0.5, 1.0][usize::from(step > 9)])
        };
        drawing.examples.file(3, &filing, &rules);
    }
    let history = |example| {
        drawing
            .examples
            .history(EnvironmentId(0), ExampleIndex(example), &rules)
    };
    let known = history(3).expect("it exists");
    assert_eq!(
        (
            known.groups,
            known.moves,
            known.pool,
            known.last_mean_reward
        ),
        (11, 1, Pool::Easy, Some(1.0))
    );
    let steps: Vec<u64> = known.recent.iter().map(|seen| seen.step.0).collect();
    assert_eq!(steps, [8, 9, 10, 11]);
    let untouched = history(4).expect("it exists");
    assert_eq!(
        (untouched.groups, untouched.pool, untouched.last_mean_reward),
        (0, Pool::Normal, None)
    );
    assert_eq!(history(10), None);
}

#[test]
fn a_lost_example_is_noticed() {
    let mut examples = Examples::new(10);
    examples.pools.normal = 9;
    let broken = examples.check(&rules(0.0, 0.0)).expect_err("one is gone");
    assert_eq!(broken, "10 examples are 9 in the pools");
    examples.pools.easy = 1;
    let broken = examples
        .check(&rules(0.0, 0.0))
        .expect_err("it is filed wrongly");
    assert!(broken.contains("differ"), "{broken}");
}
