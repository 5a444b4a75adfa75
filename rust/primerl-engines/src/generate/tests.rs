use super::*;

fn check(answer: serde_json::Value) -> Result<Generated, EngineError> {
    serde_json::from_value::<GenerateAnswer>(answer)
        .expect("is shaped like an answer")
        .check(&Bounds {
            max_tokens: 3,
            top_logprobs: 0,
            vocabulary_size: Some(8),
            lowest_logprob: lowest_logprob(1.0, false),
            stop_token_ids: &[7],
            experts: None,
            experts_rows: 0,
        })
}

fn answer(versions: serde_json::Value) -> serde_json::Value {
    serde_json::json!({"choices": [{"index": 0, "finish_reason": "length", "token_ids": [5, 6, 7],
        "weight_versions": versions, "logprobs": {"content": [
            {"token_id": 5, "logprob": -1.0, "rank": 1}, {"token_id": 6, "logprob": -2.0, "rank": 1},
            {"token_id": 7, "logprob": -3.0, "rank": 1}]}}]})
}

#[test]
fn versions_become_runs() {
    let spans = serde_json::json!([{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]);
    let generated = check(answer(spans)).expect("is whole");
    let runs: Vec<_> = generated
        .versions
        .iter()
        .map(|run| (run.version.0, run.n_tokens))
        .collect();
    assert_eq!(runs, [(3, 1), (4, 2)]);
    assert_eq!(generated.logprobs, [-1.0, -2.0, -3.0]);
}

#[test]
fn an_unproved_label_is_refused() {
    let spans = serde_json::json!([{"version": "default", "start": 0, "end": 3}]);
    assert!(
        matches!(check(answer(spans)), Err(EngineError::Unproved { label }) if label == "default")
    );
}

#[test]
fn what_the_model_cannot_have_sampled_is_refused() {
    let versions = |n: usize| serde_json::json!([{"version": "3", "start": 0, "end": n}]);
    let refused = |answer: serde_json::Value| match check(answer) {
        Err(EngineError::Malformed { problem, .. }) => problem,
        other => panic!("{other:?}"),
    };
    let mut above = answer(versions(3));
    above["choices"][0]["logprobs"]["content"][1]["logprob"] = 5.0.into();
    assert!(refused(above).contains("5 is not a log-probability"));
    let mut foreign = answer(versions(3));
    foreign["choices"][0]["token_ids"][2] = 8.into();
    foreign["choices"][0]["logprobs"]["content"][2]["token_id"] = 8.into();
    assert!(refused(foreign).contains("token id 8"));
    let mut long = answer(versions(4));
    let choice = &mut long["choices"][0];
    choice["token_ids"] = serde_json::json!([5, 6, 7, 7]);
    let last = choice["logprobs"]["content"][2].clone();
    choice["logprobs"]["content"]
        .as_array_mut()
        .expect("is a list")
        .push(last);
    assert!(refused(long).contains("at most 3"));
}

#[test]
fn a_log_probability_that_no_sampled_token_has_is_refused() {
    let versions = serde_json::json!([{"version": "3", "start": 0, "end": 3}]);
    let with = |logprob: f64| {
        let mut answer = answer(versions.clone());
        answer["choices"][0]["logprobs"]["content"][1]["logprob"] = logprob.into();
        check(answer)
    };
    for impossible in [-1e30, -9000.0, -119.0] {
        match with(impossible) {
            Err(EngineError::Malformed { problem, .. }) => {
                assert!(problem.contains("none can be sampled below"), "{problem}");
            }
            other => panic!("{impossible}: {other:?}"),
        }
    }
    // The least probability of fp32.
    let least = f64::from(f32::from_bits(1)).ln();
    assert_eq!(with(least).expect("is possible").logprobs[1], least as f32);
    // Sampled at another temperature, or under a grammar.
    assert!(lowest_logprob(2.0, false) < -206.0);
    assert_eq!(lowest_logprob(0.0, false), lowest_logprob(1.0, false));
    assert!(lowest_logprob(1.0, true) < -5000.0);
}

#[test]
fn an_answer_that_ends_itself_ends_with_a_stop_token() {
    let versions = serde_json::json!([{"version": "3", "start": 0, "end": 3}]);
    let mut ended = answer(versions);
    ended["choices"][0]["finish_reason"] = "stop".into();
    assert_eq!(
        check(ended.clone()).expect("ends").finish,
        FinishReason::Stop
    );
    let choice = &mut ended["choices"][0];
    choice["token_ids"][2] = 4.into();
    choice["logprobs"]["content"][2]["token_id"] = 4.into();
    match check(ended) {
        Err(EngineError::Malformed { problem, .. }) => {
            assert!(problem.contains("the last token, 4"), "{problem}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn answers_that_do_not_account_for_every_token_are_refused() {
    let gap = serde_json::json!([{"version": "3", "start": 1, "end": 3}]);
    assert!(matches!(
        check(answer(gap)),
        Err(EngineError::Malformed { .. })
    ));
    assert!(matches!(
        check(answer(serde_json::json!(null))),
        Err(EngineError::Malformed { .. })
    ));
    let whole = serde_json::json!([{"version": "3", "start": 0, "end": 3}]);
    let mut other = answer(whole.clone());
    other["choices"][0]["logprobs"]["content"][1]["token_id"] = 9.into();
    assert!(matches!(check(other), Err(EngineError::Malformed { .. })));
    let mut infinite = answer(whole);
    infinite["choices"][0]["logprobs"]["content"][1]["logprob"] = (-9999.0).into();
    assert!(matches!(
        check(infinite),
        Err(EngineError::Malformed { .. })
    ));
}
