use super::*;
use crate::config::{LongSamples, TrajectoryStrategy, TruncatedRollouts};
use crate::event::Trace;
use crate::testing::{config, outcome, trace, turn};
use std::collections::BTreeMap;

fn rollout() -> Box<Rollout> {
    let lease = Lease {
        id: RolloutId(1),
        group: GroupId(2),
        slot: 0,
        environment: EnvironmentId(0),
        example: ExampleIndex(3),
        evaluates: None,
        worker: WorkerId(4),
        deadline: Time(5),
    };
    Box::new(Rollout::leased(lease, &mut Counters::default()))
}

fn rules() -> Rules {
    Rules::of(&config(), EnvironmentId(0))
}

fn with_turns(turns: impl IntoIterator<Item = Turn>) -> Box<Rollout> {
    let mut rollout = rollout();
    turns.into_iter().for_each(|turn| {
        rollout.record(turn);
    });
    rollout
}

fn in_session(session: &str, turn: Turn) -> Turn {
    Turn {
        session: session.into(),
        ..turn
    }
}

fn traces(traces: Vec<Trace>) -> Outcome {
    Outcome {
        ok: true,
        traces,
        error: None,
        refusal: None,
    }
}

fn kind_of(result: Result<(), RolloutError>) -> String {
    result.expect_err("it fails").kind
}

#[test]
fn seats_are_joined_by_session() {
    let turns = [
        in_session("x", turn(None, &[1], &[10], 0)),
        in_session("y", turn(None, &[2], &[11], 0)),
    ];
    let mut rollout = with_turns(turns);
    rollout
        .finish(&traces(vec![trace("y", 0.25), trace("x", 0.75)]), &rules())
        .expect("both seats are trained");
    let rewards: Vec<(u32, f64)> = rollout
        .samples
        .iter()
        .map(|sample| (sample.token_ids()[1], rollout.traces[sample.trace].reward))
        .collect();
    assert_eq!(rewards, [(10, 0.75), (11, 0.25)]);
}

#[test]
fn only_trainable_seats_that_went_well_are_trained() {
    let turns = ["judge", "broken", "good", "unreported"]
        .map(|session| in_session(session, turn(None, &[1], &[10], 0)));
    let mut rollout = with_turns(turns);
    let judge = Trace {
        trainable: false,
        ..trace("judge", 1.0)
    };
    let broken = Trace {
        ok: false,
        ..trace("broken", 1.0)
    };
    rollout
        .finish(&traces(vec![judge, broken, trace("good", 0.5)]), &rules())
        .expect("one seat is trained");
    assert_eq!(rollout.samples.len(), 1);
    assert_eq!(
        rollout
            .traces
            .iter()
            .map(|trace| trace.reward)
            .collect::<Vec<_>>(),
        [0.5]
    );
    assert_eq!(
        rollout.samples[0].trace, 0,
        "traces are numbered from 0 again"
    );
}

#[test]
fn a_client_without_session_names_has_one_trace() {
    let mut rollout = with_turns([turn(None, &[1], &[10], 0), turn(Some(0), &[2], &[11], 0)]);
    rollout
        .finish(
            &traces(vec![trace("a name of the environment's", 1.0)]),
            &rules(),
        )
        .expect("they belong together");
    assert_eq!((rollout.samples.len(), rollout.traces[0].turns), (1, 2));
}

fn two_seats_one_truncated() -> (Box<Rollout>, Outcome) {
    let rollout = with_turns([
        in_session("x", turn(None, &[1, 2], &[10, 11], 0)),
        in_session("y", turn(None, &[1], &[12, 13, 14], 0)),
    ]);
    let truncated = Trace {
        truncated: true,
        ..trace("x", 0.25)
    };
    (rollout, traces(vec![truncated, trace("y", 0.75)]))
}

#[test]
fn truncated_seats_are_trained_masked_or_a_failure() {
    let with = |truncated| Rules {
        truncated,
        ..rules()
    };
    let (mut rollout, outcome) = two_seats_one_truncated();
    rollout
        .finish(&outcome, &with(TruncatedRollouts::Train))
        .expect("both are trained");
    assert_eq!(rollout.samples.len(), 2);
    let (mut rollout, outcome) = two_seats_one_truncated();
    rollout
        .finish(&outcome, &with(TruncatedRollouts::Mask))
        .expect("one is trained");
    let trained: Vec<usize> = rollout.samples.iter().map(|sample| sample.trace).collect();
    assert_eq!((trained, rollout.traces.len()), (vec![1], 2));
    assert_eq!(rollout.left_out.masked, 1);
    let (mut rollout, outcome) = two_seats_one_truncated();
    let refused = rollout.finish(&outcome, &with(TruncatedRollouts::Drop));
    assert_eq!(kind_of(refused), "truncated");
}

#[test]
fn long_samples_are_left_out_or_cut() {
    let with = |long, seq_len| Rules {
        long,
        seq_len,
        ..rules()
    };
    let lengths = |rules: Rules| {
        let (mut rollout, outcome) = two_seats_one_truncated();
        rollout
            .finish(&outcome, &rules)
            .expect("the environment is not to blame");
        let lengths: Vec<usize> = rollout.samples.iter().map(Sample::len).collect();
        let LeftOut { too_long, cut, .. } = rollout.left_out;
        (lengths, too_long, cut)
    };
    assert_eq!(lengths(with(LongSamples::Drop, 4)), (vec![4, 4], 0, 0));
    assert_eq!(lengths(with(LongSamples::Drop, 3)), (vec![], 2, 0));
    assert_eq!(lengths(with(LongSamples::Truncate, 3)), (vec![3, 3], 0, 2));
    // Only the prompt of the first one is left.
    assert_eq!(lengths(with(LongSamples::Truncate, 2)), (vec![2], 1, 1));
}

#[test]
fn a_reward_the_algorithm_has_no_meaning_for_is_refused() {
    let rules = Rules {
        lowest_reward: 0.0,
        ..rules()
    };
    let rollout = || with_turns([turn(None, &[1], &[10], 0)]);
    let error = rollout()
        .finish(&outcome(-0.5), &rules)
        .expect_err("it is negative");
    assert!(error.message.contains("reward = -0.5"), "{}", error.message);
    for reward in [0.0, 0.3 - (0.1 + 0.2)] {
        rollout()
            .finish(&outcome(reward), &rules)
            .expect("it may be 0, also but for rounding");
    }
}

#[test]
fn two_traces_and_one_unknown_session_are_not_guessed() {
    let mut rollout = with_turns([turn(None, &[1], &[10], 0)]);
    assert_eq!(
        kind_of(rollout.finish(&traces(vec![trace("x", 1.0), trace("y", 1.0)]), &rules())),
        "empty"
    );
}

#[test]
fn nothing_sampled_is_empty() {
    assert_eq!(
        kind_of(with_turns([turn(None, &[1], &[], 0)]).finish(&outcome(1.0), &rules())),
        "empty"
    );
}

#[test]
fn a_good_end_without_a_turn_is_trained_by_no_strategy() {
    let refusal = crate::failure::Refusal {
        code: "context_length_exceeded".to_owned(),
        status: 400,
        overflow: None,
    };
    for strategy in [
        TrajectoryStrategy::Interleaved,
        TrajectoryStrategy::Branching,
    ] {
        let rules = Rules {
            strategy,
            ..rules()
        };
        let mut untouched = rollout();
        let error = untouched.finish(&outcome(1.0), &rules).expect_err("failed");
        assert_eq!(error.kind, "no_turns");
        assert_eq!(crate::ErrorKind::of(&error), crate::ErrorKind::Environment);
        assert!(untouched.samples.is_empty() && untouched.traces.is_empty());
        let refused = Outcome {
            refusal: Some(refusal.clone()),
            ..outcome(1.0)
        };
        let error = rollout().finish(&refused, &rules).expect_err("failed");
        assert_eq!(error.kind, "no_turns");
        assert_eq!(
            crate::ErrorKind::of(&error),
            crate::ErrorKind::Model,
            "it met a limit of its rollout"
        );
    }
}

#[test]
fn failures_keep_the_environments_error() {
    let error = RolloutError {
        kind: "environment".to_owned(),
        message: "KeyError".to_owned(),
        ..RolloutError::default()
    };
    let failed = Outcome {
        ok: false,
        traces: vec![],
        error: Some(error.clone()),
        refusal: None,
    };
    assert_eq!(
        with_turns([turn(None, &[1], &[10], 0)]).finish(&failed, &rules()),
        Err(error)
    );
    assert_eq!(
        kind_of(rollout().finish(&Outcome::default(), &rules())),
        "environment"
    );
    for reward in [f64::NAN, f64::INFINITY, 1e39, -1e308] {
        let mut rollout = with_turns([turn(None, &[1], &[10], 0)]);
        assert_eq!(
            kind_of(rollout.finish(&outcome(reward), &rules())),
            "environment"
        );
    }
}

#[test]
fn turns_that_cannot_be_trusted_fail_the_rollout() {
    let short = Turn {
        logprobs: vec![].into(),
        ..turn(None, &[1], &[10], 0)
    };
    let infinite = Turn {
        logprobs: [f32::NEG_INFINITY].into(),
        ..turn(None, &[1], &[10], 0)
    };
    let orphan = turn(Some(0), &[1], &[10], 0);
    for bad in [short, infinite, orphan] {
        assert_eq!(
            kind_of(with_turns([bad]).finish(&outcome(1.0), &rules())),
            "engine"
        );
    }
    let turns = [
        in_session("x", turn(None, &[1], &[10], 0)),
        in_session("y", turn(Some(0), &[1], &[10], 0)),
    ];
    assert_eq!(
        kind_of(with_turns(turns).finish(&outcome(1.0), &rules())),
        "engine"
    );
}

#[test]
fn evaluations_score_trainable_traces_of_the_pinned_version() {
    let mut rollout = with_turns([turn(None, &[1], &[10], 7)]);
    rollout.evaluates = Some(PolicyVersion(7));
    let judge = Trace {
        trainable: false,
        ..trace("judge", 100.0)
    };
    let mut good = trace("good", 0.5);
    good.metrics.insert("exact".to_owned(), 1.0);
    let score = rollout
        .score(&traces(vec![judge, good]))
        .expect("it is scored");
    assert_eq!(
        score,
        Score {
            reward: 0.5,
            metrics: BTreeMap::from([("exact".to_owned(), 1.0)])
        }
    );
    rollout.evaluates = Some(PolicyVersion(6));
    assert_eq!(
        rollout
            .score(&outcome(1.0))
            .expect_err("another version sampled it")
            .kind,
        "version"
    );
}

#[test]
#[should_panic(expected = "cannot go from Leased to Trained")]
fn nothing_unfinished_is_trained() {
    rollout().end(Ended::Trained, &mut Counters::default());
}

#[test]
#[should_panic(expected = "cannot go from Finished to Failed")]
fn nothing_finished_fails() {
    let mut rollout = with_turns([turn(None, &[1], &[10], 0)]);
    rollout
        .finish(&outcome(1.0), &rules())
        .expect("it finishes");
    rollout.end(Ended::Failed, &mut Counters::default());
}

#[test]
#[should_panic(expected = "is no evaluation")]
fn only_evaluations_are_evaluated() {
    rollout().end(Ended::Evaluated, &mut Counters::default());
}

fn of_text() -> Turn {
    Turn {
        text: Some(Arc::new(crate::turn::TextAnswer {
            model: "other".into(),
            message: "{}".into(),
            stop: None,
            prompt_tokens: 5,
            completion_tokens: 3,
        })),
        versions: Default::default(),
        ..turn(None, &[], &[], 0)
    }
}

#[test]
fn text_is_measured_and_never_trained() {
    let mut trained = with_turns([of_text()]);
    let refused = trained.finish(&outcome(1.0), &rules());
    assert_eq!(kind_of(refused), "engine");
    let mut measured = rollout();
    measured.evaluates = Some(PolicyVersion(7));
    measured.record(of_text());
    assert_eq!(measured.score(&outcome(1.0)).expect("counts").reward, 1.0);
}

#[test]
fn a_first_prompt_beyond_the_context_has_a_name_of_its_own() {
    let refusal = crate::failure::Refusal {
        code: "context_length_exceeded".to_owned(),
        status: 400,
        overflow: Some(crate::failure::Overflow {
            prompt_tokens: 5009,
            most: 128,
        }),
    };
    let refused = |ok| Outcome {
        ok,
        refusal: Some(refusal.clone()),
        ..outcome(1.0)
    };
    // Some environments end in order at it, others raise.
    for ok in [true, false] {
        let error = rollout()
            .finish(&refused(ok), &rules())
            .expect_err("failed");
        assert_eq!(error.kind, "prompt_too_long");
        assert_eq!(crate::ErrorKind::of(&error), crate::ErrorKind::Model);
        assert_eq!(
            error.message,
            "its first prompt has 5009 tokens, and the context is 128"
        );
    }
    // A later one is the policy's doing.
    let error = with_turns([turn(None, &[1], &[10], 0)])
        .finish(&refused(false), &rules())
        .expect_err("failed");
    assert_eq!(error.kind, "environment");
}
