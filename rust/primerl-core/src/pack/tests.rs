use super::*;
use crate::config::{Echo, TrajectoryStrategy};
use crate::sample::samples;
use crate::testing::turn;
use crate::turn::{MessageRole, Observed, Truncation, Turn};
use proptest::prelude::*;

const FLOPS: FlopsModel = FlopsModel {
    linear: 100.0,
    quadratic: 1.0,
};

/// A sample of rollout `id` with `prompt` and `sampled` tokens.
fn weighted(id: usize, prompt: usize, sampled: usize) -> Weighted {
    let turns = [turn(
        None,
        &vec![id as u32; prompt],
        &vec![id as u32; sampled],
        3,
    )];
    let sample = samples(
        TrajectoryStrategy::Interleaved,
        RolloutId(id as u64),
        turns.to_vec(),
        &[Some(0)],
    )
    .remove(0);
    Weighted {
        sample,
        environment: EnvironmentId(0),
        advantage: Advantage::Uniform(id as f32 + 0.5),
        teacher_logprobs: None,
        mode: None,
        echo: None,
    }
}

fn lengths(lengths: &[usize]) -> Vec<Weighted> {
    lengths
        .iter()
        .enumerate()
        .map(|(id, length)| weighted(id, length - 1, 1))
        .collect()
}

fn cost(rank: &[MicroBatch]) -> f64 {
    rank.iter()
        .flat_map(MicroBatch::sequences)
        .map(|weighted| FLOPS.of(weighted.sample.len()))
        .sum()
}

#[test]
fn columns_are_the_samples_in_order() {
    let ranks = pack(vec![weighted(0, 2, 1), weighted(1, 1, 2)], 8, 1, FLOPS);
    let expected = Columns {
        token_ids: vec![0, 0, 0, 1, 1, 1],
        loss_mask: vec![0, 0, 1, 0, 1, 1],
        logprobs: vec![0.0, 0.0, -1.0, 0.0, -1.0, -1.0],
        advantages: vec![0.0, 0.0, 0.5, 0.0, 1.5, 1.5],
        versions: vec![-1, -1, 3, -1, 3, 3],
        temperatures: vec![1.0; 6],
        rl_weights: Vec::new(),
        ce_weights: Vec::new(),
        ref_kl_weights: Vec::new(),
        teacher_logprobs: Vec::new(),
        sequence_lengths: vec![3, 3],
        rollouts: vec![RolloutId(0), RolloutId(1)],
        environments: vec![EnvironmentId(0); 2],
        truncations: Vec::new(),
        grammars: Vec::new(),
    };
    assert_eq!(ranks.len(), 1);
    assert_eq!(ranks[0].len(), 1);
    assert_eq!(ranks[0][0].columns(), expected);
}

#[test]
fn truncated_tokens_are_named_by_their_places() {
    let narrow = Truncation {
        top_p: 0.9,
        top_k: 5,
        min_p: 0.0,
    };
    let of_two_turns = |first: Truncation, second: Truncation| {
        let mut turns = [
            turn(None, &[1, 2], &[10], 3),
            turn(Some(0), &[3], &[11, 12], 4),
        ];
        turns[0].truncation = first;
        turns[1].truncation = second;
        Weighted {
            sample: samples(
                TrajectoryStrategy::Interleaved,
                RolloutId(0),
                turns.to_vec(),
                &[Some(0); 2],
            )
            .remove(0),
            environment: EnvironmentId(0),
            advantage: Advantage::Uniform(0.5),
            teacher_logprobs: None,
            mode: None,
            echo: None,
        }
    };
    let all = Truncation::default();
    let packed = vec![of_two_turns(all, narrow), of_two_turns(narrow, narrow)];
    let ranks = pack(packed, 16, 1, FLOPS);
    let run = |begin, end| TruncatedRun {
        begin,
        end,
        truncation: narrow,
    };
    assert_eq!(
        ranks[0][0].columns().truncations,
        [run(4, 6), run(8, 9), run(10, 12)]
    );
}

#[test]
fn each_token_has_its_own_advantage_where_the_sample_has_them() {
    let turns = [
        turn(None, &[1, 2], &[10], 3),
        turn(Some(0), &[3], &[11, 12], 4),
    ];
    let sample = samples(
        TrajectoryStrategy::Interleaved,
        RolloutId(0),
        turns.to_vec(),
        &[Some(0); 2],
    )
    .remove(0);
    let advantage = Advantage::PerToken {
        values: (1..=6).map(|value| value as f32).collect(),
        scale: 0.5,
    };
    let weighted = Weighted {
        sample,
        environment: EnvironmentId(0),
        advantage,
        teacher_logprobs: None,
        mode: None,
        echo: None,
    };
    let columns = pack(vec![weighted], 8, 1, FLOPS)[0][0].columns();
    assert_eq!(columns.token_ids, [1, 2, 10, 3, 11, 12]);
    assert_eq!(columns.advantages, [0.0, 0.0, 1.5, 0.0, 2.5, 3.0]);
    assert_eq!(columns.versions, [-1, -1, 3, -1, 4, 4]);
}

#[test]
fn what_the_environment_said_is_learnt_once_with_the_weight_of_who_said_it() {
    let said = |role, begin, end| Observed { role, begin, end };
    let mut turns = [
        turn(None, &[1, 2], &[10], 3),
        turn(Some(0), &[3, 4, 5, 6], &[11], 3),
        turn(Some(1), &[7, 8], &[12], 3),
        turn(Some(1), &[9], &[13], 3),
    ];
    turns[1].observed = vec![said(MessageRole::Tool, 0, 2), said(MessageRole::User, 3, 4)];
    turns[2].observed = vec![said(MessageRole::System, 1, 2)];
    assert!(turns.iter().all(Turn::is_consistent));
    let echo = Echo {
        tool: 0.5,
        user: 0.1,
        ..Echo::default()
    };
    let strategy = TrajectoryStrategy::Interleaved;
    let mut two = samples(strategy, RolloutId(0), turns.to_vec(), &[Some(0); 4]);
    let weights = |sample: &Sample, echo| {
        let weighted = Weighted {
            sample: sample.clone(),
            environment: EnvironmentId(0),
            advantage: Advantage::Uniform(1.0),
            teacher_logprobs: None,
            mode: None,
            echo,
        };
        MicroBatch::new(vec![weighted]).columns().ce_weights
    };
    assert_eq!(
        weights(&two[0], Some(echo)),
        [0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0]
    );
    assert_eq!(
        weights(&two[1], Some(echo)),
        [0.0; 10],
        "it was in the first"
    );
    assert!(weights(&two[0], None).is_empty());
    two[0].truncate(4);
    assert_eq!(weights(&two[0], Some(echo)), [0.0, 0.0, 0.0, 0.5]);
    turns[1].observed[1].end = 5;
    assert!(!turns[1].is_consistent(), "beyond the prompt");
}

#[test]
fn fills_micro_batches_well() {
    // 6+4, 5+5, 3+3+4 of 10: no room is wasted.
    let ranks = pack(lengths(&[3, 6, 5, 4, 3, 5, 4]), 10, 1, FLOPS);
    assert_eq!(ranks[0].len(), 3);
    assert!(ranks[0].iter().all(|micro_batch| micro_batch.len() == 10));
}

#[test]
fn a_rank_gets_half_the_work_rather_than_none() {
    let ranks = pack(lengths(&[4, 4]), 10, 2, FLOPS);
    assert_eq!(
        ranks.iter().map(|rank| rank[0].len()).collect::<Vec<_>>(),
        [4, 4]
    );
}

#[test]
fn ranks_without_samples_get_empty_micro_batches() {
    let ranks = pack(lengths(&[4]), 10, 3, FLOPS);
    assert_eq!(
        ranks
            .iter()
            .map(|rank| (rank.len(), rank[0].len()))
            .collect::<Vec<_>>(),
        [(1, 4), (1, 0), (1, 0)]
    );
    assert_eq!(pack(vec![], 10, 2, FLOPS), [vec![], vec![]]);
}

#[test]
fn longer_samples_than_seq_len_are_left_out() {
    let ranks = pack(lengths(&[11, 10, 3]), 10, 1, FLOPS);
    let mut kept: Vec<RolloutId> = ranks[0]
        .iter()
        .flat_map(|micro_batch| micro_batch.columns().rollouts)
        .collect();
    kept.sort_unstable();
    assert_eq!(kept, [RolloutId(1), RolloutId(2)]);
}

proptest! {
    #[test]
    fn packing_keeps_its_promises(
        sizes in prop::collection::vec((0_usize..40, 1_usize..40), 0..60),
        seq_len in 40_usize..200,
        data_ranks in 1_usize..6,
    ) {
        let samples: Vec<Weighted> =
            sizes.iter().enumerate().map(|(id, (prompt, sampled))| weighted(id, *prompt, *sampled)).collect();
        let ranks = pack(samples.clone(), seq_len, data_ranks, FLOPS);
        prop_assert_eq!(ranks.len(), data_ranks);
        prop_assert!(ranks.iter().all(|rank| rank.len() == ranks[0].len()), "equal numbers of micro-batches");

        let mut seen: Vec<u64> = Vec::new();
        for micro_batch in ranks.iter().flatten() {
            let n = micro_batch.len();
            let micro_batch = micro_batch.columns();
            prop_assert_eq!(micro_batch.token_ids.len(), n);
            prop_assert!(n <= seq_len);
            let columns = [
                micro_batch.loss_mask.len(), micro_batch.logprobs.len(), micro_batch.advantages.len(),
                micro_batch.versions.len(), micro_batch.temperatures.len(),
                micro_batch.sequence_lengths.iter().sum::<i32>() as usize,
            ];
            prop_assert_eq!(columns, [n; 6]);
            prop_assert_eq!(micro_batch.rollouts.len(), micro_batch.sequence_lengths.len());
            let mut start = 0;
            for (rollout, length) in micro_batch.rollouts.iter().zip(&micro_batch.sequence_lengths) {
                let sample = &samples[rollout.0 as usize].sample;
                let end = start + *length as usize;
                prop_assert_eq!(&micro_batch.loss_mask[start..end], &sample.loss_mask()[..]);
                prop_assert!(micro_batch.token_ids[start..end].iter().all(|token| *token as u64 == rollout.0));
                seen.push(rollout.0);
                start = end;
            }
        }
        seen.sort_unstable();
        let fitting = (0..samples.len()).filter(|id| samples[*id].sample.len() <= seq_len).map(|id| id as u64);
        prop_assert_eq!(seen, fitting.collect::<Vec<_>>(), "every sample once");
        prop_assert_eq!(&ranks, &pack(samples.clone(), seq_len, data_ranks, FLOPS), "deterministic");
    }

    /// The tree finds what looking at one bin after the other finds.
    #[test]
    fn every_sample_is_in_the_first_micro_batch_it_fits_in(
        lengths in prop::collection::vec(1_usize..30, 0..80),
        seq_len in 30_usize..60,
    ) {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|index| (std::cmp::Reverse(lengths[*index]), *index));
        let mut expected: Vec<Vec<usize>> = Vec::new();
        for index in order {
            let used = |bin: &Vec<usize>| bin.iter().map(|member| lengths[*member]).sum::<usize>();
            match expected.iter().position(|bin| used(bin) + lengths[index] <= seq_len) {
                Some(bin) => expected[bin].push(index),
                None => expected.push(vec![index]),
            }
        }
        let sizes: Vec<Size> = lengths.iter().map(|tokens| Size { tokens: *tokens, flops: FLOPS.of(*tokens) }).collect();
        let bins: Vec<Vec<usize>> =
            first_fit_decreasing(&sizes, seq_len).into_iter().map(|bin| bin.members).collect();
        prop_assert_eq!(bins, expected);
    }

    #[test]
    fn ranks_are_balanced(sizes in prop::collection::vec(1_usize..100, 40..80), data_ranks in 2_usize..5) {
        let samples: Vec<Weighted> = sizes.iter().enumerate().map(|(id, size)| weighted(id, *size, 1)).collect();
        let costs: Vec<f64> = pack(samples, 101, data_ranks, FLOPS).iter().map(|rank| cost(rank)).collect();
        let most = costs.iter().copied().fold(0.0, f64::max);
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        // Dearest first leaves the ranks at most about one micro-batch apart.
        prop_assert!(most - least <= FLOPS.of(101) * 1.5, "{costs:?}");
    }
}
