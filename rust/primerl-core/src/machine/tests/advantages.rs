//! Groups whose advantages come from outside.

use super::*;
use crate::config::{Algorithm, AlgorithmKind, Environment, LengthNormalization};
use crate::effect::AdvantagesRequest;
use crate::testing::grpo;

fn custom() -> Config {
    let algorithm = Algorithm {
        kind: AlgorithmKind::Custom {
            path: "rewards:advantages".to_owned(),
            timeout: Duration::from_secs(5),
        },
        ..grpo()
    };
    Config {
        environments: vec![Environment {
            algorithm,
            ..environment("train")
        }],
        ..config()
    }
}

fn asked(effects: &[Effect]) -> Vec<Arc<AdvantagesRequest>> {
    let asked = effects.iter().filter_map(|effect| match effect {
        Effect::ComputeAdvantages { request } => Some(Arc::clone(request)),
        _ => None,
    });
    asked.collect()
}

/// One group of two rollouts ends.
fn group(run: &mut Run) -> Arc<AdvantagesRequest> {
    asked(&run.rollouts(2, 0)).remove(0)
}

fn answer(
    run: &mut Run,
    request: &AdvantagesRequest,
    result: Result<Vec<Vec<f32>>, String>,
) -> Vec<Effect> {
    let group = request.group;
    run.send(Event::AdvantagesComputed { group, result })
}

#[test]
fn a_group_waits_for_its_function_and_is_trained_with_its_values() {
    let mut config = custom();
    config.timeouts.long_poll = Duration::from_secs(2);
    let mut run = Run::started(config);
    let first = group(&mut run);
    assert_eq!(first.path, "rewards:advantages");
    assert_eq!(
        first
            .traces
            .iter()
            .map(|trace| trace.reward)
            .collect::<Vec<_>>(),
        [0.0, 1.0]
    );
    assert_eq!(first.rollouts.len(), 2);
    assert_eq!(first.samples[1].0, 1);
    assert_eq!(first.samples[0].1.token_ids(), [1, 2, 3, 4]);
    let waits = run.core.status().waits;
    assert!(
        waits
            .iter()
            .any(|wait| wait.waiting_for == "its custom advantages"),
        "{waits:?}"
    );
    assert_eq!(run.core.unanswered_advantages(), [Arc::clone(&first)]);
    let second = group(&mut run);
    run.ask_batch(1, 0);
    assert_said(&run.pass(2.0), "2 groups wait for their custom advantages");
    // The second group is ready first, and still comes second in the batch: it began later.
    let values = |first: f32| Ok(vec![vec![9.0, 9.0, first, 2.0], vec![9.0, 9.0, 3.0, -4.0]]);
    assert!(cut(&answer(&mut run, &second, values(-1.0))).is_empty());
    let batch = cut(&answer(&mut run, &first, values(1.0))).remove(0);
    let columns = batch.ranks[0][0].columns();
    assert_eq!(
        columns.advantages,
        [
            0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 3.0, -4.0, 0.0, 0.0, -1.0, 2.0, 0.0, 0.0, 3.0, -4.0
        ]
    );
    // Means by trace: 0.5, -0.5, 1.5, -0.5.
    assert!((batch.metrics["advantage/all/std"] - 0.6875_f64.sqrt()).abs() < 1e-6);
    assert_eq!(run.core.unanswered_advantages(), []);
}

#[test]
fn lengths_are_normalised_as_for_any_other_algorithm() {
    let mut config = custom();
    config.environments[0].algorithm.length_normalization = LengthNormalization::Constant;
    let mut run = Run::started(config);
    let requests = [group(&mut run), group(&mut run)];
    let values = || Ok(vec![vec![8.0; 4]; 2]);
    answer(&mut run, &requests[0], values());
    let batch = cut(&answer(&mut run, &requests[1], values())).remove(0);
    // 2 trained tokens a sequence, against seq_len = 64.
    assert_eq!(batch.ranks[0][0].columns().advantages[2], 8.0 * 2.0 / 64.0);
}

#[test]
fn what_cannot_be_trained_drops_the_group_with_the_reason() {
    let mut run = Run::started(custom());
    let cases = [
        (Err("KeyError: 'length'".to_owned()), "KeyError: 'length'"),
        (
            Ok(vec![vec![0.0; 4]]),
            "the group has 2 samples, the function answered for 1",
        ),
        (
            Ok(vec![vec![0.0; 4], vec![0.0; 3]]),
            "sample 1 has 4 tokens, the function gave 3 values",
        ),
        (
            Ok(vec![vec![0.0; 4], vec![0.0, 0.0, 0.0, f32::NAN]]),
            "the value of token 3 of sample 1 is NaN",
        ),
    ];
    for (result, part) in cases {
        let request = group(&mut run);
        let effects = answer(&mut run, &request, result);
        assert_said(&effects, "its custom advantages failed");
        assert_said(&effects, part);
        assert_eq!(run.core.status().groups.live, 0);
    }
    assert_eq!(run.core.status().failures["advantages"], 4);
    assert_eq!(run.core.counters().filtered, 8);
}

#[test]
fn a_function_that_does_not_answer_costs_its_group() {
    let mut run = Run::started(custom());
    let request = group(&mut run);
    run.send(Event::WorkerSeen {
        worker: WorkerId(0),
    });
    assert!(!said(&run.pass(4.9)).contains("dropped"));
    assert_said(
        &run.pass(0.2),
        "its custom advantages failed: no answer within 5 s of the group's end: make the function faster, or raise \
         algorithm.timeout_s",
    );
    let late = answer(&mut run, &request, Ok(vec![vec![0.0; 4]; 2]));
    assert!(cut(&late).is_empty());
    assert_eq!(
        run.core.status().ignored["advantages of a group that is over"],
        1
    );
}

#[test]
fn an_environment_of_which_only_failures_come_ends_the_run() {
    let mut run = Run::started(custom());
    let mut last = Vec::new();
    for _ in 0..8 {
        let request = group(&mut run);
        last = answer(&mut run, &request, Err("ZeroDivisionError".to_owned()));
    }
    assert_said(
        &last,
        "the last 8 groups were dropped and none was completed",
    );
    assert!(matches!(
        last.iter().find(|effect| matches!(effect, Effect::Failed { .. })),
        Some(Effect::Failed { reason }) if reason.contains("ZeroDivisionError")
    ));
}

#[test]
fn the_end_of_the_run_waits_for_no_function() {
    let mut run = Run::started(custom());
    let request = group(&mut run);
    run.send(Event::ShutdownRequested {
        reason: "SIGTERM".to_owned(),
    });
    assert_eq!(run.core.counters().cancelled, 2);
    assert_eq!(run.core.status().waits.len(), 0);
    let late = answer(&mut run, &request, Ok(vec![vec![0.0; 4]; 2]));
    assert!(late.is_empty());
}
