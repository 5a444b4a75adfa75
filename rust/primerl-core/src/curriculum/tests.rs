use super::*;
use crate::config::RunConfig;
use crate::testing::{config, environment};

fn filtering() -> Config {
    let mut config = config();
    config.buffer.online_difficulty_filtering = true;
    config
}

fn drawn(curriculum: &mut Curriculum, config: &Config) -> (EnvironmentId, ExampleIndex) {
    let environment = curriculum.turn(|_| true).expect("all are ready");
    let draw = curriculum.draw(environment, config).expect("it trains");
    (environment, draw.example)
}

#[test]
fn environments_take_turns_by_ratio() {
    let mut config = config();
    config.environments = vec![environment("a"), environment("b"), environment("c")];
    for (environment, ratio) in config.environments.iter_mut().zip([5.0, 1.0, 2.0]) {
        environment.ratio = ratio;
    }
    let mut curriculum = Curriculum::new(&config);
    for index in 0..3 {
        assert_eq!(curriculum.missing(), Some(EnvironmentId(index)));
        assert_eq!(curriculum.turn(|_| true), None);
        curriculum.set_examples(EnvironmentId(index), 10);
    }
    for _ in 0..5 {
        let mut counts = [0; 3];
        for _ in 0..8 {
            let (environment, example) = drawn(&mut curriculum, &config);
            assert!(example.0 < 10);
            counts[environment.0 as usize] += 1;
        }
        assert_eq!(counts, [5, 1, 2]);
    }
}

#[test]
fn the_buffers_seed_wins_over_the_runs() {
    let order = |seed, own| {
        let mut config = Config {
            run: RunConfig {
                seed,
                ..config().run
            },
            ..config()
        };
        config.buffer.seed = own;
        let mut curriculum = Curriculum::new(&config);
        curriculum.set_examples(EnvironmentId(0), 1000);
        (0..1000)
            .map(|_| drawn(&mut curriculum, &config).1)
            .collect::<Vec<_>>()
    };
    assert_eq!(order(1, None), order(1, None));
    assert_ne!(order(1, None), order(2, None));
    assert_eq!(order(1, Some(3)), order(2, Some(3)));
    assert_eq!(order(1, Some(2)), order(2, None));
}

#[test]
fn a_written_curriculum_goes_on_as_before() {
    let config = filtering();
    let mut curriculum = Curriculum::new(&config);
    curriculum.set_examples(EnvironmentId(0), 50);
    let step = |curriculum: &mut Curriculum| {
        let (environment, example) = drawn(curriculum, &config);
        let filing = Filing {
            step: Step(1),
            mean_reward: f64::from(example.0 % 2),
            rollouts: 2,
            has_signal: !example.0.is_multiple_of(4),
        };
        let trains = curriculum.file(environment, example, &filing, &config);
        (example, trains)
    };
    for _ in 0..200 {
        step(&mut curriculum);
    }
    curriculum.end_step(Step(1));
    let bytes = rmp_serde::to_vec(&curriculum).expect("it can be written");
    let mut read: Curriculum = rmp_serde::from_slice(&bytes).expect("and read");
    for _ in 0..200 {
        assert_eq!(step(&mut curriculum), step(&mut read));
    }
    assert_eq!(curriculum.report(&config), read.report(&config));
    assert!(curriculum.report(&config).environments[0].returned > 0);
}

#[test]
fn the_movement_of_the_last_steps_is_remembered() {
    let config = filtering();
    let mut curriculum = Curriculum::new(&config);
    curriculum.set_examples(EnvironmentId(0), 5);
    for step in 1..=1003 {
        curriculum.end_step(Step(step));
    }
    let report = curriculum.report(&config);
    assert_eq!(report.steps.len(), 1000);
    assert_eq!(report.steps[0].step, Step(4));
    assert_eq!(report.steps[999].environments[0].pools.normal, 5);
}

#[test]
fn an_environment_that_gives_its_turns_up_has_nothing_to_catch_up_with() {
    let mut config = config();
    config.environments = vec![environment("a"), environment("b"), environment("c")];
    config.environments[2].ratio = 2.0;
    let mut curriculum = Curriculum::new(&config);
    (0..3).for_each(|index| curriculum.set_examples(EnvironmentId(index), 10));
    let mut counts = |turns, without: Option<u32>| {
        let mut counts = [0; 3];
        for _ in 0..turns {
            let environment = curriculum.turn(|environment| Some(environment.0) != without);
            counts[environment.expect("some may").0 as usize] += 1;
        }
        counts
    };
    assert_eq!(counts(30, Some(1)), [10, 0, 20]);
    assert_eq!(counts(40, None), [10, 10, 20]);
    assert_eq!(curriculum.turn(|_| false), None);
}
