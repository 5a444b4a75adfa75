use super::*;
use crate::experts::ExpertsShape;

#[test]
fn text_comes_without_columns_and_outlives_the_journal() {
    let text = TextAnswer {
        model: "other".into(),
        message: "{}".into(),
        stop: None,
        prompt_tokens: 5,
        completion_tokens: 3,
    };
    let mut turn = crate::testing::turn(None, &[], &[], 0);
    turn.versions.clear();
    turn.text = Some(Arc::new(text));
    assert!(turn.is_consistent());
    assert_eq!(turn.answer_tokens(), 3);
    let written = rmp_serde::to_vec_named(&turn).expect("writes");
    assert_eq!(
        rmp_serde::from_slice::<Turn>(&written).expect("reads"),
        turn
    );
    // Taught: the policy's ids of it.
    turn.prompt_suffix = [1].into();
    turn.sampled = [2, 3].into();
    assert!(turn.is_consistent());
    turn.logprobs = [-0.5, -0.5].into();
    assert!(!turn.is_consistent());
}

#[test]
fn a_turn_of_before_text_was_known_is_read() {
    let turn = crate::testing::turn(None, &[1], &[2], 0);
    let written = rmp_serde::to_vec_named(&turn).expect("writes");
    // `text` as a key of msgpack: what is absent is not written.
    assert!(!written.windows(5).any(|bytes| bytes == b"\xa4text"));
    assert_eq!(
        rmp_serde::from_slice::<Turn>(&written).expect("reads"),
        turn
    );
}

#[test]
fn what_is_no_finite_number_is_found_anywhere() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in 0..70 {
            let mut numbers = [f32::MAX, f32::MIN, -0.0, f32::MIN_POSITIVE / 2.0, -1.5].repeat(14);
            assert!(are_finite(&numbers));
            numbers[at] = bad;
            assert!(!are_finite(&numbers), "{bad} at {at}");
        }
    }
    assert!(are_finite(&[]));
}

#[test]
fn experts_are_of_the_tokens_that_a_turn_adds() {
    let shape = ExpertsShape {
        layers: 2,
        chosen: 1,
        bytes: 1,
    };
    let with = |parent, before, rows: usize| Turn {
        experts: Experts::new(before, shape, vec![3; 2 * rows]).map(Arc::new),
        ..crate::testing::turn(parent, &[1, 2], &[3, 4], 0)
    };
    let turn = with(Some(0), 1, 4);
    assert!(turn.is_consistent() && turn.experts.is_some());
    let written = rmp_serde::to_vec_named(&turn).expect("writes");
    assert_eq!(
        rmp_serde::from_slice::<Turn>(&written).expect("reads"),
        turn
    );
    assert!(!with(None, 1, 4).is_consistent(), "nothing comes before it");
    assert!(
        !with(Some(0), 0, 5).is_consistent(),
        "more rows than tokens"
    );
    assert!(with(Some(0), 2, 1).experts.is_none());
    assert_eq!(Experts::new(0, shape, vec![3; 5]), None, "half a row");
    // As before, where none are known.
    let plain = rmp_serde::to_vec_named(&with(None, 0, 0)).expect("writes");
    assert!(!String::from_utf8_lossy(&plain).contains("experts"));
}

#[test]
fn a_turn_is_written_as_before_where_nothing_is_truncated() {
    let turn = crate::testing::turn(None, &[1], &[2], 0);
    let bytes = rmp_serde::to_vec_named(&turn).expect("writes");
    assert!(!String::from_utf8_lossy(&bytes).contains("truncation"));
    assert!(!String::from_utf8_lossy(&bytes).contains("grammar"));
    let structured = Turn {
        grammar: Some(Arc::new(Grammar {
            masks: "m".into(),
            spec: "{}".into(),
        })),
        ..turn.clone()
    };
    let written = rmp_serde::to_vec_named(&structured).expect("writes");
    assert_eq!(
        rmp_serde::from_slice::<Turn>(&written).expect("reads"),
        structured
    );
    assert_eq!(rmp_serde::from_slice::<Turn>(&bytes).expect("reads"), turn);
    let truncated = Turn {
        truncation: Truncation {
            top_p: 0.9,
            top_k: 7,
            min_p: 0.1,
        },
        ..turn
    };
    let bytes = rmp_serde::to_vec_named(&truncated).expect("writes");
    assert_eq!(
        rmp_serde::from_slice::<Turn>(&bytes).expect("reads"),
        truncated
    );
}
