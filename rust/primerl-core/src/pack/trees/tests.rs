use super::*;
use crate::config::TrajectoryStrategy;
use crate::ids::*;
use crate::pack::{Advantage, pack};
use crate::sample::samples;
use crate::testing::turn;
use proptest::prelude::*;
use std::collections::BTreeSet;

const FLOPS: FlopsModel = FlopsModel {
    linear: 100.0,
    quadratic: 1.0,
};

/// A sample of rollout `id`, of two turns where it is long enough; its last token is sampled.
fn weighted(id: usize, tokens: &[u32]) -> Weighted {
    let (start, last) = tokens.split_at(tokens.len() - 1);
    let turns = match start.len() {
        0..4 => vec![turn(None, start, last, 3)],
        length => {
            let (first, second) = start.split_at(length / 2);
            let (prompt, sampled) = first.split_at(first.len() - 1);
            vec![
                turn(None, prompt, sampled, 3),
                turn(Some(0), second, last, 3),
            ]
        }
    };
    let trace_of = vec![Some(0); turns.len()];
    let rollout = RolloutId(id as u64);
    Weighted {
        sample: samples(TrajectoryStrategy::Interleaved, rollout, turns, &trace_of).remove(0),
        environment: EnvironmentId(0),
        advantage: Advantage::Uniform(id as f32 + 0.5),
        teacher_logprobs: None,
        mode: None,
        echo: None,
    }
}

/// `count` samples that begin with the same tokens, followed by `own` tokens of each, from rollout `first` on.
fn group(first: usize, count: usize, prompt: &[u32], own: usize) -> Vec<Weighted> {
    let of = |id: usize| {
        let tokens = [prompt, &vec![1000 + id as u32; own]].concat();
        weighted(id, &tokens)
    };
    (first..first + count).map(of).collect()
}

fn shared(ranks: &[Vec<MicroBatch>]) -> Vec<Vec<Vec<usize>>> {
    let of = |rank: &Vec<MicroBatch>| {
        let micro_batches = rank.iter();
        micro_batches
            .map(|micro_batch| micro_batch.shared().to_vec())
            .collect()
    };
    ranks.iter().map(of).collect()
}

fn work(rank: &[MicroBatch]) -> f64 {
    let of = |micro_batch: &MicroBatch| {
        let sequences = micro_batch.sequences().iter();
        let all = sequences.map(|weighted| FLOPS.of(weighted.sample.len()));
        let saved = micro_batch.shared().iter().map(|shared| FLOPS.of(*shared));
        all.sum::<f64>() - saved.sum::<f64>()
    };
    rank.iter().map(of).sum()
}

fn most_work(ranks: &[Vec<MicroBatch>]) -> f64 {
    ranks.iter().map(|rank| work(rank)).fold(0.0, f64::max)
}

#[test]
fn a_prompt_is_computed_once_for_its_group() {
    let samples = group(0, 4, &[7; 64], 5);
    let ranks = pack_trees(samples.clone(), &[4], 100, 1, FLOPS);
    assert_eq!(shared(&ranks), [[[0, 64, 64, 64]]]);
    let micro_batch = &ranks[0][0];
    assert_eq!(micro_batch.sequences(), samples);
    assert_eq!((micro_batch.len(), micro_batch.unique_tokens()), (276, 84));
    assert_eq!(
        pack(samples, 100, 1, FLOPS)[0].len(),
        4,
        "a micro-batch each"
    );
}

#[test]
fn beginnings_of_others_and_equal_samples_share_all_they_have() {
    let (short, long) = ([7; 64], [7; 100]);
    let samples = [&long[..], &short, &long, &short]
        .into_iter()
        .enumerate()
        .map(|(id, tokens)| weighted(id, tokens));
    let ranks = pack_trees(samples.collect(), &[4], 200, 1, FLOPS);
    let rollouts = ranks[0][0].columns().rollouts;
    assert_eq!(rollouts, [1, 3, 0, 2].map(RolloutId));
    // 100 is no multiple of a block.
    assert_eq!(shared(&ranks), [[[0, 64, 64, 96]]]);
}

#[test]
fn a_tree_that_is_too_large_is_cut_and_its_path_repeated() {
    let ranks = pack_trees(group(0, 4, &[7; 64], 16), &[4], 100, 1, FLOPS);
    assert_eq!(shared(&ranks), [[[0, 64], [0, 64]]]);
    let tokens = ranks[0].iter().map(MicroBatch::unique_tokens);
    assert_eq!(tokens.collect::<Vec<_>>(), [96, 96]);
}

#[test]
fn gathered_keys_are_bounded() {
    // 320 + 40 * 33 tokens would fit, but 320 + 40 * 353 keys are more than 8 for each of 1,700.
    let ranks = pack_trees(group(0, 40, &[7; 320], 33), &[40], 1700, 1, FLOPS);
    assert_eq!(ranks[0].len(), 2);
    let ranks = pack_trees(group(0, 40, &[7; 320], 33), &[40], 1805, 1, FLOPS);
    assert_eq!(ranks[0].len(), 1);
}

#[test]
fn ranks_get_a_part_of_a_tree_each_rather_than_nothing() {
    let ranks = pack_trees(group(0, 5, &[7; 64], 8), &[5], 200, 2, FLOPS);
    let parts: Vec<Vec<usize>> = ranks.iter().map(|rank| rank[0].shared().to_vec()).collect();
    let mut sizes: Vec<usize> = parts.iter().map(Vec::len).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [2, 3]);
    assert!(
        parts
            .iter()
            .all(|part| part[0] == 0 && part[1..].iter().all(|shared| *shared == 64))
    );
}

#[test]
fn groups_of_one_micro_batch_share_a_system_prompt() {
    let mut samples = group(0, 3, &[[5; 64], [7; 64]].concat(), 8);
    samples.extend(group(3, 3, &[[5; 64], [6; 64]].concat(), 8));
    let ranks = pack_trees(samples, &[3, 3], 400, 1, FLOPS);
    assert_eq!(shared(&ranks), [[[0, 128, 128, 64, 128, 128]]]);
    let rollouts = ranks[0][0].columns().rollouts;
    assert_eq!(rollouts, [3, 4, 5, 0, 1, 2].map(RolloutId), "sorted");
}

#[test]
fn without_much_in_common_packing_is_as_without_trees() {
    // 32 of 500 tokens; and a rank that would get all of one tree in place of half the samples; a group of one; nothing.
    let inputs = [
        (32, 468, 6, 1),
        (40, 0, 0, 2),
        (31, 5, 6, 3),
        (64, 5, 1, 1),
        (0, 40, 8, 2),
    ];
    for (prompt, own, count, ranks) in inputs {
        let samples = group(0, count, &vec![7; prompt], own);
        assert_eq!(
            pack_trees(samples.clone(), &[count], 2000, ranks, FLOPS),
            pack(samples, 2000, ranks, FLOPS)
        );
    }
}

#[test]
fn samples_too_long_are_left_out_of_their_tree() {
    let mut samples = group(0, 3, &[7; 64], 8);
    samples.extend(group(3, 1, &[7; 64], 200));
    let ranks = pack_trees(samples, &[4], 200, 1, FLOPS);
    assert_eq!(shared(&ranks), [[[0, 64, 64]]]);
}

/// Samples that are paths of a random tree: beginnings of others, equal ones, ones that differ in a token.
fn paths() -> impl Strategy<Value = Vec<Vec<Vec<u32>>>> {
    let piece = (0_u32..3, prop::sample::select(vec![1_usize, 30, 33, 64]));
    let path = prop::collection::vec(piece, 1..6).prop_map(|pieces| {
        let pieces = pieces
            .into_iter()
            .map(|(token, times)| vec![token; times + token as usize]);
        // A first token that nothing trains.
        let mut tokens = vec![9];
        tokens.extend(pieces.flatten());
        tokens
    });
    prop::collection::vec(prop::collection::vec(path, 0..8), 0..6)
}

/// A row as the trainer builds it from a micro-batch: depths of its tokens, and for each sequence the places in the row of
/// its tokens.
fn row(lengths: &[usize], shared: &[usize]) -> (Vec<usize>, Vec<Vec<usize>>) {
    let (mut depths, mut paths): (Vec<usize>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
    for (length, shared) in lengths.iter().zip(shared) {
        let before = paths.last().map_or(&[][..], |path| &path[..*shared]);
        let mut path = before.to_vec();
        path.extend(depths.len()..depths.len() + length - shared);
        depths.extend(*shared..*length);
        paths.push(path);
    }
    (depths, paths)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn every_sample_is_a_path_of_a_tree(
        groups in paths(),
        seq_len in 60_usize..500,
        data_ranks in 1_usize..4,
    ) {
        let sizes: Vec<usize> = groups.iter().map(Vec::len).collect();
        let samples: Vec<Weighted> =
            groups.iter().flatten().enumerate().map(|(id, tokens)| weighted(id, tokens)).collect();
        let ranks = pack_trees(samples.clone(), &sizes, seq_len, data_ranks, FLOPS);
        prop_assert_eq!(ranks.len(), data_ranks);
        prop_assert!(ranks.iter().all(|rank| rank.len() == ranks[0].len()), "equal numbers of micro-batches");

        let mut seen = Vec::new();
        for micro_batch in ranks.iter().flatten() {
            let sequences = micro_batch.sequences();
            seen.extend(sequences.iter().map(|weighted| weighted.sample.rollout.0));
            for weighted in sequences {
                prop_assert_eq!(weighted, &samples[weighted.sample.rollout.0 as usize]);
            }
            prop_assert!(micro_batch.unique_tokens() <= seq_len);
            if micro_batch.shared().is_empty() {
                continue;
            }
            let tokens: Vec<Vec<u32>> = sequences.iter().map(|weighted| weighted.sample.token_ids()).collect();
            let lengths: Vec<usize> = tokens.iter().map(Vec::len).collect();
            let shared = micro_batch.shared();
            prop_assert_eq!(shared.len(), lengths.len());
            prop_assert_eq!(shared[0], 0);
            for (place, shared) in shared.iter().enumerate().skip(1) {
                prop_assert_eq!(tokens[place].get(..*shared), tokens[place - 1].get(..*shared));
                prop_assert!(tokens[place].get(..*shared).is_some());
            }

            let (depths, paths) = row(&lengths, shared);
            prop_assert_eq!(depths.len(), micro_batch.unique_tokens());
            let mut token_of: Vec<Option<u32>> = vec![None; depths.len()];
            for (path, tokens) in paths.iter().zip(&tokens) {
                for (depth, (place, token)) in path.iter().zip(tokens).enumerate() {
                    prop_assert_eq!(depths[*place], depth);
                    prop_assert_eq!(*token_of[*place].get_or_insert(*token), *token);
                    // What the row's depths let the token see: all before it that nothing as shallow follows.
                    let mut shallowest = usize::MAX;
                    let mut above = Vec::new();
                    for key in (0..=*place).rev() {
                        if depths[key] < shallowest {
                            above.push(key);
                            shallowest = depths[key];
                        }
                    }
                    above.reverse();
                    prop_assert_eq!(&above[..], &path[..=depth], "exactly its sequence's tokens");
                }
            }
            // A node ends where a sequence does, and where another leaves.
            let mut ends: BTreeSet<usize> = BTreeSet::new();
            for (place, path) in paths.iter().enumerate() {
                ends.extend(path.last());
                let leaves = shared.get(place + 1).filter(|shared| **shared > 0);
                ends.extend(leaves.map(|shared| path[shared - 1]));
            }
            let keys: usize = ends.iter().map(|end| depths[*end] + 1).sum();
            prop_assert!(keys <= KEYS_PER_TOKEN * seq_len, "{keys} keys");
        }
        seen.sort_unstable();
        let fitting = (0..samples.len()).filter(|id| samples[*id].sample.len() <= seq_len).map(|id| id as u64);
        prop_assert_eq!(seen, fitting.collect::<Vec<_>>(), "every sample once");
        let plain = pack(samples.clone(), seq_len, data_ranks, FLOPS);
        prop_assert!(most_work(&ranks) <= most_work(&plain) * (1.0 + 1e-9));
        prop_assert_eq!(&ranks, &pack_trees(samples, &sizes, seq_len, data_ranks, FLOPS), "deterministic");
    }
}
