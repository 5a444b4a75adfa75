use super::*;
use crate::experts::{Experts, ExpertsShape};
use crate::ids::TurnIndex;
use crate::testing::turn;
use crate::turn::VersionRun;
use proptest::prelude::*;
use smallvec::smallvec;
use std::collections::BTreeMap;

const ROLLOUT: RolloutId = RolloutId(9);
const STRATEGIES: [TrajectoryStrategy; 2] = [
    TrajectoryStrategy::Interleaved,
    TrajectoryStrategy::Branching,
];

fn trained(sample: &Sample) -> Vec<u32> {
    let trained = sample
        .segments
        .iter()
        .filter(|segment| segment.trained.is_some());
    trained
        .flat_map(|segment| segment.token_ids().to_vec())
        .collect()
}

fn interleave(rollout: RolloutId, turns: &[Turn], trace_of: &[Option<usize>]) -> Vec<Sample> {
    samples(
        TrajectoryStrategy::Interleaved,
        rollout,
        turns.to_vec(),
        trace_of,
    )
}

/// Version of each token, -1 for context.
fn versions(sample: &Sample) -> Vec<i32> {
    let mut column = Vec::new();
    for segment in &sample.segments {
        match &segment.trained {
            None => column.resize(column.len() + segment.len, -1),
            Some(trained) => {
                for run in &trained.versions {
                    column.resize(column.len() + run.n_tokens as usize, run.version.0 as i32);
                }
            }
        }
    }
    column
}

#[test]
fn turns_that_extend_are_one_sample() {
    let mut second = turn(Some(0), &[20, 21], &[30, 31], 4);
    second.versions = smallvec![
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
    second.truncation.top_k = 3;
    let turns = [turn(None, &[1, 2], &[10], 5), second];
    let samples = interleave(ROLLOUT, &turns, &[Some(0), Some(0)]);
    let [sample] = &samples[..] else {
        panic!("{samples:?} is not one sample");
    };
    assert_eq!(sample.token_ids(), [1, 2, 10, 20, 21, 30, 31]);
    assert_eq!(sample.loss_mask(), [0, 0, 1, 0, 0, 1, 1]);
    assert_eq!(sample.logprobs(), [0.0, 0.0, -1.0, 0.0, 0.0, -0.5, -0.25]);
    assert_eq!(versions(sample), [-1, -1, 5, -1, -1, 4, 6]);
    let temperatures: Vec<f32> = sample
        .segments
        .iter()
        .filter_map(|segment| Some(segment.trained.as_ref()?.temperature))
        .collect();
    assert_eq!(temperatures, [1.0, 0.7]);
    let kept: Vec<u32> = sample
        .segments
        .iter()
        .filter_map(|segment| Some(segment.trained.as_ref()?.truncation.top_k))
        .collect();
    assert_eq!(kept, [0, 3]);
    assert_eq!((sample.rollout, sample.trace), (ROLLOUT, 0));
    assert_eq!((sample.loss_tokens, sample.turns), (3, 2));
    assert_eq!(sample.oldest, Some(PolicyVersion(4)));
}

#[test]
fn branching_gives_each_turn_its_own_sample() {
    // The drawing in the module's documentation.
    let turns = [
        turn(None, &[1], &[10], 1),
        turn(Some(0), &[2], &[11], 1),
        turn(Some(1), &[3], &[12], 1),
        turn(Some(0), &[4], &[13], 2),
        turn(None, &[5], &[], 3),
    ];
    let samples = samples(
        TrajectoryStrategy::Branching,
        ROLLOUT,
        turns.to_vec(),
        &[Some(0); 5],
    );
    let shape: Vec<(Vec<u32>, Vec<u32>)> = samples
        .iter()
        .map(|sample| (sample.token_ids(), trained(sample)))
        .collect();
    assert_eq!(
        shape,
        [
            (vec![1, 10], vec![10]),
            (vec![1, 10, 2, 11], vec![11]),
            (vec![1, 10, 2, 11, 3, 12], vec![12]),
            (vec![1, 10, 4, 13], vec![13]),
        ]
    );
}

#[test]
fn a_truncated_sample_is_its_front() {
    let turns = [turn(None, &[1, 2], &[10, 11], 5), {
        let mut second = turn(Some(0), &[3], &[12, 13, 14], 6);
        second.versions = [(4, 1), (6, 2)]
            .map(|(version, n_tokens)| VersionRun {
                version: PolicyVersion(version),
                n_tokens,
            })
            .to_vec()
            .into();
        second
    }];
    let whole = interleave(ROLLOUT, &turns, &[Some(0); 2]).remove(0);
    for len in 0..=whole.len() {
        let mut sample = whole.clone();
        sample.truncate(len);
        assert_eq!(sample.token_ids(), whole.token_ids()[..len]);
        assert_eq!(sample.loss_mask(), whole.loss_mask()[..len]);
        assert_eq!(sample.logprobs(), whole.logprobs()[..len]);
        assert_eq!(versions(&sample), versions(&whole)[..len]);
        assert_eq!(sample.len(), len);
        let sampled: Vec<i32> = versions(&sample)
            .into_iter()
            .filter(|version| *version >= 0)
            .collect();
        assert_eq!(sample.loss_tokens, sampled.len() as u64);
        let oldest = sampled
            .iter()
            .min()
            .map(|version| PolicyVersion(*version as u64));
        assert_eq!(sample.oldest, oldest);
    }
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
        .map(|sample| {
            (
                sample.token_ids(),
                trained(sample),
                sample.oldest.map_or(0, |version| version.0),
            )
        })
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
        for strategy in STRATEGIES {
            let mut times: BTreeMap<u32, u32> = BTreeMap::new();
            for sample in samples(strategy, ROLLOUT, turns.clone(), &trace_of) {
                trained(&sample).into_iter().for_each(|token| *times.entry(token).or_default() += 1);
            }
            for (turn, trace) in turns.iter().zip(&trace_of) {
                for token in turn.sampled.iter() {
                    prop_assert_eq!(times.get(token).copied().unwrap_or(0), u32::from(trace.is_some()));
                }
            }
        }
    }

    #[test]
    fn cut_at_any_turn_a_sample_is_the_engines_prompt(turns in forest()) {
        let trace_of = vec![Some(0); turns.len()];
        for sample in STRATEGIES.into_iter().flat_map(|strategy| samples(strategy, ROLLOUT, turns.clone(), &trace_of)) {
            let (n, token_ids, loss_mask, versions) =
                (sample.len(), sample.token_ids(), sample.loss_mask(), versions(&sample));
            prop_assert_eq!([token_ids.len(), loss_mask.len(), sample.logprobs().len(), versions.len()], [n; 4]);
            prop_assert_eq!(sample.loss_tokens, loss_mask.iter().filter(|mask| **mask == 1).count() as u64);
            let oldest = versions.iter().filter(|version| **version >= 0).min();
            prop_assert_eq!(oldest.copied(), sample.oldest.map(|version| version.0 as i32));
            for (at, mask) in loss_mask.iter().enumerate() {
                // In these forests a turn's number is its version, so it says which turn a trained token is of.
                if *mask == 0 || turns[versions[at] as usize].sampled[0] != token_ids[at] {
                    continue;
                }
                prop_assert_eq!(&token_ids[..at], &prompt(&turns, versions[at] as usize)[..]);
            }
        }
    }
}

/// A turn whose experts are `first`, `first + 1`, ... from its first token on, or from the previous one.
fn routed(turn: Turn, before: u32, first: u8, rows: usize) -> Turn {
    let shape = ExpertsShape {
        layers: 1,
        chosen: 1,
        bytes: 1,
    };
    let ids = (0..rows as u8).map(|row| first + row).collect();
    Turn {
        experts: Experts::new(before, shape, ids).map(Arc::new),
        ..turn
    }
}

/// The expert of each token, -1 where it is not known.
fn experts(sample: &Sample) -> Vec<i32> {
    let mut column = vec![-1; sample.len()];
    for run in sample.experts() {
        for (at, expert) in (run.begin..run.end).zip(run.ids) {
            column[at] = i32::from(*expert);
        }
    }
    column
}

#[test]
fn experts_follow_their_turns_tokens() {
    let turns = [
        routed(turn(None, &[1, 2], &[3, 4], 0), 0, 10, 3),
        // Its first row is of the token that the turn before sampled last.
        routed(turn(Some(0), &[5], &[6, 7], 0), 1, 20, 3),
        // A branch whose engine reported nothing, and one that forgot the token before.
        turn(Some(0), &[8], &[9], 0),
        routed(turn(Some(1), &[8], &[9, 9], 0), 0, 30, 2),
    ];
    let found = interleave(ROLLOUT, &turns, &[Some(0); 4]);
    let columns: Vec<Vec<i32>> = found.iter().map(experts).collect();
    let whole = [10, 11, 12, 20, 21, 22, -1, 30, 31, -1];
    assert_eq!(columns, [&[10, 11, 12, -1, -1, -1][..], &whole[..]]);
    let mut cut = found[1].clone();
    cut.truncate(5);
    assert_eq!(experts(&cut), whole[..5]);
    let branches = samples(
        TrajectoryStrategy::Branching,
        ROLLOUT,
        turns.to_vec(),
        &[Some(0); 4],
    );
    assert_eq!(experts(&branches[1]), [10, 11, 12, 20, 21, 22, -1]);
}

#[test]
fn the_later_turn_is_believed_where_two_report_a_token() {
    let turns = [
        routed(turn(None, &[1], &[2, 3], 0), 0, 10, 3),
        routed(turn(Some(0), &[4], &[5], 0), 1, 20, 2),
    ];
    let found = interleave(ROLLOUT, &turns, &[Some(0); 2]);
    assert_eq!(experts(&found[0]), [10, 11, 20, 21, -1]);
}

#[test]
fn a_sample_is_kept_as_before_where_no_experts_are_known() {
    let turns = [turn(None, &[1], &[2], 0)];
    let plain = interleave(ROLLOUT, &turns, &[Some(0)]).remove(0);
    let written = rmp_serde::to_vec_named(&plain).expect("writes");
    assert!(!String::from_utf8_lossy(&written).contains("experts"));
    assert_eq!(
        rmp_serde::from_slice::<Sample>(&written).expect("reads"),
        plain
    );
}
