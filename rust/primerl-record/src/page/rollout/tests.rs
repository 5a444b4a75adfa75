use super::*;
use crate::page::index::tests::indexed;
use crate::testing::Run;
use primerl_core::event::Trace;
use primerl_core::testing::{outcome, trace, turn};
use std::collections::BTreeMap;

/// A rollout with these turns, and `turns_gone` others before them.
fn told(turns_gone: usize, turns: Vec<Turn>) -> Told {
    Told {
        rollout: RolloutId(7),
        events: turns.len(),
        turns_gone,
        turns: turns.into_iter().map(|turn| (0.0, turn)).collect(),
        sampling: Vec::new(),
        failures: Vec::new(),
        report: None,
        given: Given::Nothing,
        sequences: Vec::new(),
    }
}

/// Prompt tokens of each turn that is kept.
fn prompts(told: &Told) -> Vec<Option<usize>> {
    let turns = told.turns.iter().enumerate();
    turns
        .map(|(at, (_, turn))| told.prompt_tokens(told.turns_gone + at, turn))
        .collect()
}

#[test]
fn a_turn_that_extends_one_that_is_gone_has_a_prompt_of_unknown_length() {
    // The first kept turn extends turn 0, which is not kept.
    let all = || {
        vec![
            turn(Some(0), &[1, 2], &[3], 0),
            turn(Some(1), &[4], &[5, 6], 0),
            turn(None, &[7, 8], &[9], 0),
            turn(Some(3), &[10], &[11], 0),
        ]
    };
    let told = told(1, all());
    assert_eq!(prompts(&told), [None, None, Some(2), Some(4)]);
    let ids = |number| {
        told.tokens(None, number, 0, 9)
            .map(|told| told["ids"].clone())
    };
    assert_eq!(ids(0), None, "it is gone");
    assert_eq!((ids(1), ids(4)), (Some(json!([3])), Some(json!([11]))));
    assert_eq!(ids(5), None);
}

#[test]
fn a_turn_that_names_itself_or_a_later_one_as_its_parent_ends() {
    let told = told(
        0,
        vec![
            turn(Some(0), &[1], &[2], 0),
            turn(Some(2), &[3], &[4], 0),
            turn(Some(1), &[5], &[6], 0),
            turn(Some(u32::MAX), &[7], &[8], 0),
        ],
    );
    assert_eq!(prompts(&told), [None; 4]);
}

/// The turns of every rollout, by their numbers.
fn turns_of(run: &Run) -> BTreeMap<RolloutId, (u32, BTreeMap<u64, Value>)> {
    let index = indexed(run);
    let all = index.list(&super::super::index::Filter::default(), usize::MAX);
    let read = |record: &&Record| {
        let told = Told::read(run.path(), 2, record, &index.places(record)).expect("reads");
        let summary = told.summary(&index, record);
        let turns = summary["turn_list"].as_array().expect("a list").iter();
        let numbered = turns.map(|turn| (turn["turn"].as_u64().expect("a number"), turn.clone()));
        let numbered: BTreeMap<u64, Value> = numbered.collect();
        for number in numbered.keys() {
            assert!(told.tokens(None, *number as usize, 0, 1).is_some());
        }
        assert_eq!(summary["earlier_turns_are_gone"], record.turns_gone > 0);
        (record.rollout, (record.turns_gone, numbered))
    };
    all.rollouts.iter().map(read).collect()
}

#[test]
fn turns_keep_their_numbers_when_those_before_them_are_gone() {
    let mut cut = 0;
    for keeps in [2, 3, 5] {
        let run = Run::new(1);
        let whole = turns_of(&run);
        run.prune(run.events.len() * keeps / 8);
        for (rollout, (gone, turns)) in turns_of(&run) {
            let (_, all) = &whole[&rollout];
            for (number, turn) in &turns {
                let mut known = all[number].clone();
                if turn["prompt_tokens"].is_null() {
                    assert!(gone > 0 && !turn["parent"].is_null());
                    known["prompt_tokens"] = Value::Null;
                }
                assert_eq!(*turn, known, "rollout {rollout}");
            }
            assert!(turns.keys().all(|number| *number >= u64::from(gone)));
            cut += usize::from(gone > 0 && !turns.is_empty());
        }
    }
    assert!(cut > 0, "no rollout was cut in two");
}

/// A rollout of two seats, `seat/0` trained and `seat/1` not, with a turn of each and one of an unknown session.
fn of_two_seats(given: Given, sequences: Vec<Sequence>) -> Told {
    let of = |session: &str, parent, prompt: &[u32], sampled: &[u32]| Turn {
        session: session.into(),
        ..turn(parent, prompt, sampled, 0)
    };
    let turns = vec![
        of("seat/0", None, &[1, 2], &[3, 4]),
        of("seat/1", None, &[5], &[6, 7]),
        of("seat/0", Some(0), &[8], &[9]),
        of("another", None, &[10], &[11]),
    ];
    let untrained = Trace {
        trainable: false,
        ..trace("seat/1", 0.0)
    };
    let outcome = Outcome {
        traces: vec![trace("seat/0", 1.0), untrained],
        ..outcome(1.0)
    };
    Told {
        report: Some((1.0, outcome)),
        given,
        sequences,
        ..told(0, turns)
    }
}

/// The advantages of each turn, and whether they are gone.
fn advantages(told: &Told) -> Vec<(Value, bool)> {
    let turns = 0..told.turns.len();
    let of = |number| {
        let tokens = told.tokens(None, number, 0, 9).expect("is kept");
        let are_gone = tokens["advantages_are_gone"].as_bool().expect("is shown");
        (tokens["advantages"].clone(), are_gone)
    };
    turns.map(of).collect()
}

#[test]
fn only_turns_of_a_trained_session_have_an_advantage() {
    let nothing = (Value::Null, false);
    let told = of_two_seats(Given::Uniform(0.5), Vec::new());
    let expected = [
        (json!([0.5, 0.5]), false),
        nothing.clone(),
        (json!([0.5]), false),
        nothing.clone(),
    ];
    assert_eq!(advantages(&told), expected);
    let unreported = Told {
        report: None,
        ..told
    };
    assert_eq!(advantages(&unreported), vec![nothing.clone(); 4]);
    // A client without session names has one conversation, whatever its trace is called.
    let mut unnamed = self::told(0, vec![turn(None, &[1], &[2], 0)]);
    unnamed.given = Given::Uniform(-1.0);
    let mut report = outcome(1.0);
    report.traces[0].session = "by the environment".into();
    unnamed.report = Some((1.0, report.clone()));
    assert_eq!(advantages(&unnamed), [(json!([-1.0]), false)]);
    report.traces[0].ok = false;
    unnamed.report = Some((1.0, report));
    assert_eq!(advantages(&unnamed), [nothing]);
}

#[test]
fn advantages_that_went_with_their_batch_are_gone_and_not_untrained() {
    let (nothing, gone) = ((Value::Null, false), (Value::Null, true));
    let told = of_two_seats(Given::PerToken, Vec::new());
    let expected = [gone.clone(), nothing.clone(), gone, nothing.clone()];
    assert_eq!(advantages(&told), expected);
    // In the batch, whose sequence ends before the last turn: that turn was omitted.
    let sequence = Sequence {
        token_ids: vec![1, 2, 3, 4],
        advantages: vec![0.0, 0.0, 0.25, -0.5],
    };
    let told = of_two_seats(Given::PerToken, vec![sequence]);
    let found = (json!([0.25, -0.5]), false);
    let expected = [found, nothing.clone(), nothing.clone(), nothing];
    assert_eq!(advantages(&told), expected);
}
