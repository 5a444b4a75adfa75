use super::*;
use crate::ids::TurnIndex;
use crate::testing::turn;
use crate::turn::VersionRun;
use proptest::prelude::*;
use std::collections::BTreeMap;

const ROLLOUT: RolloutId = RolloutId(9);

fn trained(sample: &Sample) -> Vec<u32> {
    sample
        .token_ids
        .iter()
        .zip(&sample.loss_mask)
        .filter(|(_, mask)| **mask == 1)
        .map(|(token, _)| *token)
        .collect()
}

#[test]
fn turns_that_extend_are_one_sample() {
    let mut second = turn(Some(0), &[20, 21], &[30, 31], 4);
    second.versions = vec![
        VersionRun {
            version: PolicyVersion(4),
            n_tokens: 1,
        },
        VersionRun {
            version: PolicyVersion(6),
            n_tokens: 1,
        },
    ];
    second.logprobs = [-0.5, -0.25].into();
    second.temperature = 0.7;
    let turns = [turn(None, &[1, 2], &[10], 5), second];
    let samples = interleave(ROLLOUT, &turns, &[Some(0), Some(0)]);
    let expected = Sample {
        rollout: ROLLOUT,
        trace: 0,
        token_ids: vec![1, 2, 10, 20, 21, 30, 31],
        loss_mask: vec![0, 0, 1, 0, 0, 1, 1],
        logprobs: vec![0.0, 0.0, -1.0, 0.0, 0.0, -0.5, -0.25],
        versions: vec![-1, -1, 5, -1, -1, 4, 6],
        temperatures: vec![1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.7],
        loss_tokens: 3,
        oldest: PolicyVersion(4),
        turns: 2,
    };
    assert_eq!(samples, [expected]);
}

#[test]
fn forks_are_samples_of_their_own_and_shared_turns_are_trained_once() {
    // The drawing in the module's documentation.
    let turns = [
        turn(None, &[1], &[10], 1),
        turn(Some(0), &[2], &[11], 1),
        turn(Some(1), &[3], &[12], 1),
        turn(Some(0), &[4], &[13], 2),
        turn(None, &[5], &[14], 3),
    ];
    let samples = interleave(ROLLOUT, &turns, &[Some(0); 5]);
    let shape: Vec<(Vec<u32>, Vec<u32>, u64)> = samples
        .iter()
        .map(|sample| (sample.token_ids.clone(), trained(sample), sample.oldest.0))
        .collect();
    assert_eq!(
        shape,
        [
            (vec![1, 10, 2, 11, 3, 12], vec![10, 11, 12], 1),
            (vec![1, 10, 4, 13], vec![13], 2),
            (vec![5, 14], vec![14], 3),
        ]
    );
}

#[test]
fn untrained_seats_give_no_samples() {
    let turns = [turn(None, &[1], &[10], 0), turn(None, &[2], &[11], 0)];
    let samples = interleave(ROLLOUT, &turns, &[None, Some(3)]);
    assert_eq!(samples.len(), 1);
    assert_eq!((samples[0].trace, trained(&samples[0])), (3, vec![11]));
}

#[test]
fn a_turn_without_tokens_gives_no_sample() {
    assert_eq!(
        interleave(ROLLOUT, &[turn(None, &[1, 2], &[], 0)], &[Some(0)]),
        []
    );
}

/// Forests of turns whose sampled tokens are all different (prompt tokens are 0): parent choice, suffix, sampled length.
fn forest() -> impl Strategy<Value = Vec<Turn>> {
    prop::collection::vec(
        (
            prop::option::weighted(0.8, any::<prop::sample::Index>()),
            0_usize..4,
            0_usize..5,
        ),
        1..20,
    )
    .prop_map(|shape| {
        let mut next = 1;
        let shape = shape.into_iter().enumerate();
        shape
            .map(|(number, (parent, suffix, sampled))| {
                let parent = parent
                    .filter(|_| number > 0)
                    .map(|parent| parent.index(number) as u32);
                let tokens: Vec<u32> = (next..next + sampled as u32).collect();
                next += sampled as u32;
                turn(parent, &vec![0; suffix], &tokens, number as u64)
            })
            .collect()
    })
}

fn prompt(turns: &[Turn], index: usize) -> Vec<u32> {
    let mut tokens = match turns[index].parent {
        Some(TurnIndex(parent)) => {
            let mut before = prompt(turns, parent as usize);
            before.extend_from_slice(&turns[parent as usize].sampled);
            before
        }
        None => Vec::new(),
    };
    tokens.extend_from_slice(&turns[index].prompt_suffix);
    tokens
}

proptest! {
    #[test]
    fn every_sampled_token_is_trained_exactly_once(turns in forest(), seats in prop::collection::vec(any::<bool>(), 20)) {
        // A branch is of one seat: a turn's seat is its root's.
        let mut trace_of: Vec<Option<usize>> = Vec::new();
        for (number, turn) in turns.iter().enumerate() {
            let own = seats[number].then_some(1);
            trace_of.push(turn.parent.map_or(own, |parent| trace_of[parent.0 as usize]));
        }
        let mut times: BTreeMap<u32, u32> = BTreeMap::new();
        for sample in interleave(ROLLOUT, &turns, &trace_of) {
            trained(&sample).into_iter().for_each(|token| *times.entry(token).or_default() += 1);
        }
        for (turn, trace) in turns.iter().zip(&trace_of) {
            for token in turn.sampled.iter() {
                prop_assert_eq!(times.get(token).copied().unwrap_or(0), u32::from(trace.is_some()));
            }
        }
    }

    #[test]
    fn cut_at_any_turn_a_sample_is_the_engines_prompt(turns in forest()) {
        let trace_of = vec![Some(0); turns.len()];
        for sample in interleave(ROLLOUT, &turns, &trace_of) {
            let n = sample.len();
            prop_assert_eq!([sample.loss_mask.len(), sample.logprobs.len(), sample.versions.len(), sample.temperatures.len()], [n; 4]);
            prop_assert_eq!(sample.loss_tokens, sample.loss_mask.iter().filter(|mask| **mask == 1).count() as u64);
            let versions = sample.versions.iter().filter(|version| **version >= 0);
            prop_assert_eq!(versions.min().copied(), Some(sample.oldest.0 as i32));
            for (at, mask) in sample.loss_mask.iter().enumerate() {
                // In these forests a turn's number is its version, so it says which turn a trained token is of.
                let token = sample.token_ids[at];
                if *mask == 0 || turns[sample.versions[at] as usize].sampled[0] != token {
                    continue;
                }
                prop_assert_eq!(&sample.token_ids[..at], &prompt(&turns, sample.versions[at] as usize)[..]);
            }
        }
    }
}
