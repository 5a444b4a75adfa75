use super::*;
use crate::inspect::tests::Run;
use crate::page::index::tests::indexed;
use primerl_core::testing::turn;
use std::collections::BTreeMap;

/// A rollout with these turns, `turns_gone` others before them.
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
    // The first that is kept extends turn 0, which is not.
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
    let (records, _) = index.list(&super::super::index::Filter::default(), usize::MAX);
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
    records.iter().map(read).collect()
}

#[test]
fn turns_keep_their_numbers_when_those_before_them_are_gone() {
    let mut cut = 0;
    for keeps in [2, 3, 5] {
        let run = Run::new(1);
        let whole = turns_of(&run);
        run.prune(run.len() * keeps / 8);
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
