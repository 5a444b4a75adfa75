use super::*;
use crate::testing::{config, environment, evaluation};

fn message(change: impl FnOnce(&mut Config)) -> String {
    let mut config = config();
    config.environments.push(evaluation("evaluation", None));
    config.validate().expect("the builder makes a valid config");
    change(&mut config);
    config
        .validate()
        .expect_err("the change is wrong")
        .to_string()
}

#[test]
fn each_message_names_the_field_and_the_remedy() {
    let cases: [(String, &[&str]); 19] = [
        (
            message(|c| c.run.max_steps = 0),
            &["max_steps is 0", "at least 1"],
        ),
        (
            message(|c| {
                c.run.max_steps = 0;
                c.environments.clear();
            }),
            &["nothing to evaluate"],
        ),
        (
            message(|c| c.environments = vec![evaluation("evaluation", None)]),
            &["no training environment", "max_steps to 0"],
        ),
        (
            message(|c| c.run.group_size = 1),
            &["group_size = 1", "at least 2"],
        ),
        (
            message(|c| {
                (c.run.group_size, c.buffer.online_difficulty_filtering) = (1, true);
                c.environments[0].algorithm.kind = AlgorithmKind::ReinforcePlusPlus;
            }),
            &["group_size = 1", "online_difficulty_filtering"],
        ),
        (
            message(|c| (c.run.batch_size, c.run.group_size) = (63, 8)),
            &["batch_size = 63", "group_size = 8", "56 or 64"],
        ),
        (
            message(|c| {
                (c.run.batch_size, c.run.group_size) = (4, 2);
                c.environments.insert(0, environment("large"));
                c.environments[0].own.group_size = Some(6);
            }),
            &["batch_size = 4", "group_size = 6", "largest"],
        ),
        (
            message(|c| c.environments[0].own.group_size = Some(1)),
            &["group_size = 1", "at least 2"],
        ),
        (
            message(|c| (c.run.max_off_policy_steps, c.run.max_async_level) = (1, 2)),
            &[
                "max_off_policy_steps = 1",
                "max_async_level = 2",
                "raise the first",
            ],
        ),
        (
            message(|c| c.buffer.hard_threshold = 0.8),
            &[
                "buffer.hard_threshold = 0.8",
                "buffer.easy_threshold = 0.8",
                "lower the first",
            ],
        ),
        (
            message(|c| c.run.min_group_size = Some(3)),
            &["min_group_size = 3", "group_size = 2"],
        ),
        (
            message(|c| c.run.min_group_size = Some(1)),
            &["min_group_size = 1", "at least 2"],
        ),
        (
            message(|c| c.run.admission.min_per_engine = 1000),
            &[
                "admission.min_per_engine = 1000",
                "admission.start_per_engine",
            ],
        ),
        (
            message(|c| c.run.admission.max_per_engine = 9),
            &["admission.max_per_engine = 9", "move one of them"],
        ),
        (
            message(|c| c.environments.retain(|e| e.role != Role::Train)),
            &["no training environment"],
        ),
        (
            message(|c| c.environments[1].name = "train".to_owned()),
            &["\"train\" is used 2 times"],
        ),
        (
            message(|c| c.environments[0].name.clear()),
            &["environments[0].name is empty"],
        ),
        (
            message(|c| c.environments.push(environment("late"))),
            &["environments[2]", "\"late\"", "first"],
        ),
        (
            message(|c| {
                c.flops = FlopsModel {
                    linear: 0.0,
                    quadratic: 0.0,
                }
            }),
            &["flops.linear = 0"],
        ),
    ];
    for (message, parts) in cases {
        for part in parts {
            assert!(message.contains(part), "{message:?} does not say {part:?}");
        }
    }
}

fn penalty(num_turns_weight: f64) -> Option<LengthPenalty> {
    Some(LengthPenalty {
        num_output_tokens_weight: 0.25,
        num_input_tokens_weight: 0.1,
        num_turns_weight,
    })
}

#[test]
fn algorithms_are_checked_for_each_environment() {
    let with = |change: fn(&mut Algorithm)| message(|c| change(&mut c.environments[0].algorithm));
    let custom = |path: &str| AlgorithmKind::Custom {
        path: path.to_owned(),
        timeout: Duration(0),
    };
    let cases = [
        (
            with(|a| (a.kind, a.normalize_std) = (AlgorithmKind::Rloo, true)),
            "\"train\": algorithm.normalize_std",
        ),
        (
            message(|c| c.environments[0].algorithm.kind = custom("")),
            "algorithm.path",
        ),
        (
            with(|a| {
                a.shuffle_advantages = true;
                a.kind = AlgorithmKind::Custom {
                    path: "m:f".to_owned(),
                    timeout: Duration(1),
                }
            }),
            "algorithm.shuffle_advantages",
        ),
        (
            with(|a| {
                a.kind = AlgorithmKind::HierarchicalGrpo {
                    episode_agents: Vec::new(),
                }
            }),
            "algorithm.episode_agents",
        ),
        (
            with(|a| (a.kind, a.length_penalty) = (AlgorithmKind::Rloo, penalty(0.1))),
            "set type = \"grpo\"",
        ),
    ];
    for (message, part) in cases {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn a_group_of_one_is_fine_where_nothing_is_compared_within_it() {
    let mut config = config();
    config.run.group_size = 1;
    config.environments[0].algorithm.kind = AlgorithmKind::ReinforcePlusPlus;
    config.validate().expect("it is normalised over the batch");
    config.environments[0].algorithm.kind = AlgorithmKind::Rae { decay: 0.9 };
    config.buffer.online_difficulty_filtering = true;
    config
        .validate()
        .expect("it is compared with what was before");
}

#[test]
fn a_batch_below_one_group_is_told_the_smallest_that_fits() {
    let message = message(|c| (c.run.batch_size, c.run.group_size) = (4, 8));
    assert!(message.contains("8 or 16"), "{message}");
}

#[test]
fn evaluations_are_due_at_the_start_at_intervals_and_at_the_end() {
    let evaluation = |interval, base_model| Evaluation {
        num_examples: None,
        rollouts_per_example: 1,
        interval,
        base_model,
        pass_threshold: 1.0,
    };
    let due = |evaluation: Evaluation| -> Vec<u64> {
        (0..=7)
            .filter(|version| evaluation.is_due(PolicyVersion(*version), 7))
            .collect()
    };
    assert_eq!(due(evaluation(Some(3), true)), [0, 3, 6, 7]);
    assert_eq!(due(evaluation(Some(3), false)), [3, 6, 7]);
    assert_eq!(due(evaluation(None, false)), [7]);
}

#[test]
fn environments_may_have_groups_and_modes_of_their_own() {
    let mut config = config();
    config.environments.insert(1, environment("second"));
    config.environments[0].own.group_size = Some(3);
    config.environments[1].own.group_size = Some(1);
    config.environments[1].own.training_mode = Some(TrainingMode::Opd);
    config.buffer.online_difficulty_filtering = true;
    (config.run.batch_size, config.run.min_group_size) = (4, Some(2));
    config
        .validate()
        .expect("a teacher teaches groups of one, and rewards are still filtered elsewhere");
    let (first, second) = (EnvironmentId(0), EnvironmentId(1));
    assert_eq!(
        (config.min_group_size(first), config.min_group_size(second)),
        (2, 1)
    );
    assert!(config.mixes_modes());
    config.environments[0].own.training_mode = Some(TrainingMode::Opd);
    assert!(!config.mixes_modes());
    let refused = config.validate().expect_err("nothing is left to filter");
    assert!(
        matches!(refused, ConfigError::FilteredTeaching { .. }),
        "{refused}"
    );
}
