//! Runs that learn from a teacher: it scores what the policy sampled, or answers in its place.

use super::*;
use crate::config::{RunConfig, TrainingMode};
use crate::effect::TeacherRequest;
use crate::sample::TokenLogprobs;
use crate::testing::taught_turn;

fn mode(training_mode: TrainingMode) -> Config {
    Config {
        run: RunConfig {
            training_mode,
            ..config().run
        },
        ..config()
    }
}

fn asked(effects: &[Effect]) -> Vec<Arc<TeacherRequest>> {
    let asked = effects.iter().filter_map(|effect| match effect {
        Effect::ScoreByTeacher { request } => Some(Arc::clone(request)),
        _ => None,
    });
    asked.collect()
}

/// One group of two rollouts ends.
fn group(run: &mut Run) -> Arc<TeacherRequest> {
    asked(&run.rollouts(2, 0)).remove(0)
}

fn answer(
    run: &mut Run,
    request: &TeacherRequest,
    result: Result<Vec<TokenLogprobs>, String>,
) -> Vec<Effect> {
    let group = request.group;
    run.send(Event::TeacherScored { group, result })
}

fn scores(values: [[f32; 4]; 2]) -> Result<Vec<TokenLogprobs>, String> {
    let column = |values: [f32; 4]| TokenLogprobs(values.into());
    Ok(values.map(column).into())
}

#[test]
fn a_group_is_trained_with_its_teachers_log_probabilities() {
    let mut run = Run::started(mode(TrainingMode::Opd));
    let requests = [group(&mut run), group(&mut run)];
    assert_eq!(requests[0].samples[0].token_ids(), [1, 2, 3, 4]);
    assert_eq!(run.core.unanswered_scores(), requests);
    let waits = run.core.status().waits;
    assert!(
        waits
            .iter()
            .any(|wait| wait.waiting_for == "its teacher's log-probabilities"),
        "{waits:?}"
    );
    let first = scores([[0.0, -1.0, -2.0, -3.0], [0.0, -4.0, -5.0, -6.0]]);
    assert!(cut(&answer(&mut run, &requests[0], first)).is_empty());
    let second = scores([[0.0, -0.1, -0.2, -0.3]; 2]);
    let batch = cut(&answer(&mut run, &requests[1], second)).remove(0);
    let columns = batch.ranks[0][0].columns();
    assert_eq!(
        columns.teacher_logprobs,
        [
            0.0, -1.0, -2.0, -3.0, 0.0, -4.0, -5.0, -6.0, 0.0, -0.1, -0.2, -0.3, 0.0, -0.1, -0.2,
            -0.3
        ]
    );
    assert_eq!(columns.loss_mask[..4], [0, 0, 1, 1]);
    assert!(columns.ce_weights.is_empty());
    assert_eq!(run.core.unanswered_scores(), []);
}

#[test]
fn what_a_teacher_cannot_score_drops_its_group_with_the_reason() {
    let mut run = Run::started(mode(TrainingMode::Opd));
    let short = TokenLogprobs([0.0; 3].into());
    let cases = [
        (
            Err("the prompt is too long".to_owned()),
            "the prompt is too long",
        ),
        (
            Ok(vec![short.clone()]),
            "the group has 2 samples, it answered for 1",
        ),
        (
            Ok(vec![short.clone(), short]),
            "sample 0 has 4 tokens, it gave 3 values",
        ),
        (
            scores([[0.0; 4], [0.0, -1.0, f32::NAN, -1.0]]),
            "its log-probability of token 2 of sample 1 is NaN",
        ),
        (
            scores([[0.0; 4], [0.0, 0.5, -1.0, -1.0]]),
            "its log-probability of token 1 of sample 1 is 0.5",
        ),
    ];
    for (result, part) in cases {
        let request = group(&mut run);
        let effects = answer(&mut run, &request, result);
        assert_said(&effects, "its teacher did not score it");
        assert_said(&effects, part);
        assert_eq!(run.core.status().groups.live, 0);
    }
    assert_eq!(run.core.status().failures["teacher"], 5);
}

#[test]
fn a_teacher_that_does_not_answer_costs_the_group() {
    let mut run = Run::started(mode(TrainingMode::Opd));
    let request = group(&mut run);
    // The worker still shows that it lives.
    for _ in 0..3 {
        run.send(Event::WorkerSeen {
            worker: WorkerId(0),
        });
        assert!(!said(&run.pass(9.9)).contains("dropped"));
    }
    assert_said(
        &run.pass(0.4),
        "its teacher did not score it: no answer within 30 s of the group's end",
    );
    assert!(cut(&answer(&mut run, &request, scores([[0.0; 4]; 2]))).is_empty());
    let ignored = run.core.status().ignored;
    assert_eq!(ignored["teacher's scores of a group that is over"], 1);
}

#[test]
fn equal_rewards_and_groups_of_one_are_no_obstacle() {
    let config = Config {
        run: RunConfig {
            group_size: 1,
            batch_size: 1,
            ..mode(TrainingMode::Opd).run
        },
        ..mode(TrainingMode::Opd)
    };
    let mut run = Run::started(config);
    let rollout = run.lease(0, 1)[0].rollout;
    let request = asked(&run.succeed(0, rollout, 0)).remove(0);
    let value = Ok(vec![TokenLogprobs([0.0, -1.0, -1.0, -1.0].into())]);
    assert_eq!(cut(&answer(&mut run, &request, value)).len(), 1);

    let mut filtered = mode(TrainingMode::Sft);
    filtered.buffer.online_difficulty_filtering = true;
    let refused = filtered.validate().expect_err("is refused").to_string();
    assert!(refused.contains("online_difficulty_filtering"), "{refused}");
}

#[test]
fn what_a_teacher_answered_is_learnt_and_never_stale() {
    let mut run = Run::started(mode(TrainingMode::Sft));
    let mut effects = Vec::new();
    for leased in run.lease(0, 4) {
        let rollout = leased.rollout;
        run.send(Event::TurnFinished {
            rollout,
            turn: taught_turn(&[1, 2], &[3, 4]),
        });
        effects.extend(run.report(0, rollout, outcome(1.0)));
    }
    let batch = cut(&effects).remove(0);
    let columns = batch.ranks[0][0].columns();
    assert_eq!(batch.loss_tokens, 8);
    assert_eq!(columns.ce_weights, [0.0, 0.0, 1.0, 1.0].repeat(4));
    assert_eq!(columns.loss_mask, [0; 16]);
    assert_eq!(columns.versions, [-1; 16]);
    assert_eq!(columns.advantages, [0.0; 16]);
    assert!(columns.teacher_logprobs.is_empty());
    assert!(!batch.metrics.contains_key("version/min"));
}

#[test]
fn text_without_ids_is_not_trained() {
    let mut run = Run::started(mode(TrainingMode::Sft));
    let rollout = run.lease(0, 2)[0].rollout;
    run.send(Event::TurnFinished {
        rollout,
        turn: taught_turn(&[], &[]),
    });
    run.report(0, rollout, outcome(1.0));
    assert_eq!(run.core.status().failures["engine"], 1);
}
