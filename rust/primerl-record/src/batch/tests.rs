use super::*;
use primerl_core::config::{FlopsModel, TrajectoryStrategy};
use primerl_core::experts::{Experts, ExpertsShape};
use primerl_core::pack::{Advantage, Columns, Weighted, pack, pack_trees};
use primerl_core::sample::{TokenLogprobs, samples};
use primerl_core::testing::{taught_turn, turn};
use primerl_core::{PolicyVersion, Turn, VersionRun};
use serde::Deserialize;
use serde_bytes::ByteBuf;
use std::sync::Arc;

#[derive(Deserialize)]
struct Frame {
    header: ByteBuf,
    columns: ByteBuf,
    #[serde(with = "serde_bytes")]
    xxh3: [u8; CHECKSUM_BYTES],
}

#[derive(Deserialize)]
struct DecodedHeader {
    step: u64,
    rank: u32,
    ranks: u32,
    loss_tokens: u64,
    metrics: BTreeMap<String, f64>,
    micro_batches: Vec<DecodedMicroBatch>,
}

#[derive(Deserialize)]
struct DecodedMicroBatch {
    tokens: usize,
    sequence_lengths: Vec<i32>,
    #[serde(default)]
    shared: Vec<usize>,
    #[serde(default)]
    omitted: Vec<usize>,
    rollouts: Vec<u64>,
    environments: Vec<u32>,
    #[serde(default)]
    truncations: Vec<DecodedTruncation>,
    #[serde(default)]
    grammars: DecodedGrammars,
    #[serde(default)]
    extra_columns: Vec<String>,
    #[serde(default)]
    routed_experts: Option<serde_json::Value>,
}

impl DecodedMicroBatch {
    /// A column with the omitted values.
    fn complete<T: Copy>(&self, written: Vec<T>) -> Vec<T> {
        let (mut rest, mut column) = (&written[..], Vec::new());
        let mut before = 0;
        for (sequence, length) in self.sequence_lengths.iter().enumerate() {
            let start = column.len();
            let omitted = self.omitted.get(sequence).copied().unwrap_or(0);
            column.extend_from_within(before..before + omitted);
            let (own, after) = rest.split_at(*length as usize - omitted);
            column.extend_from_slice(own);
            (rest, before) = (after, start);
        }
        assert!(rest.is_empty());
        column
    }
}

#[derive(Default, Deserialize)]
struct DecodedGrammars {
    kinds: Vec<Grammar>,
    runs: Vec<(usize, usize, usize)>,
}

#[derive(Deserialize)]
struct DecodedTruncation {
    begin: usize,
    end: usize,
    top_p: f32,
    top_k: u32,
    min_p: f32,
}

/// A sample of two turns, the second by two versions at another temperature.
fn weighted(rollout: u64, tokens: u32) -> Weighted {
    let sampled: Vec<u32> = (1000..1000 + tokens).collect();
    let mut second = turn(Some(0), &[7; 3], &sampled, 4);
    second.temperature = 0.7;
    if tokens % 2 == 1 {
        second.truncation.top_p = 0.9;
    }
    if tokens % 4 == 3 {
        second.grammar = Some(Arc::new(Grammar {
            masks: "library/vocabulary".into(),
            spec: "{}".into(),
        }));
    }
    second.logprobs = (0..tokens).map(|at| -0.5 - at as f32).collect();
    let crossing = tokens / 3;
    second.versions = [(4, crossing), (6, tokens - crossing)]
        .map(|(version, n_tokens)| VersionRun {
            version: PolicyVersion(version),
            n_tokens,
        })
        .to_vec()
        .into();
    let turns = [turn(None, &[1, 256], &[3, 4], 2), second];
    let mut samples = samples(
        TrajectoryStrategy::Interleaved,
        RolloutId(rollout),
        turns.into(),
        &[Some(0); 2],
    );
    let sample = samples.remove(0);
    let advantage = match rollout % 2 {
        0 => Advantage::Uniform(1.5 + rollout as f32),
        _ => Advantage::PerToken {
            values: (0..sample.len())
                .map(|at| at as f32)
                .collect::<Arc<[f32]>>(),
            scale: -0.25,
        },
    };
    Weighted {
        sample,
        environment: EnvironmentId(rollout as u32 % 3),
        advantage,
        teacher_logprobs: None,
        mode: None,
        echo: None,
    }
}

fn batch(samples: Vec<Weighted>, ranks: usize) -> PackedBatch {
    let loss_tokens = samples
        .iter()
        .map(|weighted| weighted.sample.loss_tokens)
        .sum();
    let flops = FlopsModel {
        linear: 1.0,
        quadratic: 0.0,
    };
    PackedBatch {
        step: Step(4),
        ranks: pack(samples, 4000, ranks, flops),
        loss_tokens,
        metrics: BTreeMap::from([("reward/all/mean".into(), 0.5)]),
    }
}

/// Reads the columns from the bytes, value by value.
fn decode(body: &[u8]) -> (DecodedHeader, Vec<Columns>) {
    let frame: Frame = rmp_serde::from_slice(body).expect("is a map");
    let header: DecodedHeader = rmp_serde::from_slice(&frame.header).expect("is a map");
    let end = CHECKSUM_KEY.len() + CHECKSUM_BYTES;
    assert_eq!((body.len() - end - frame.columns.len()) % ALIGNMENT, 0);
    assert_eq!(checksum(body).map(u64::to_le_bytes), Some(frame.xxh3));
    let mut rest = frame.columns.as_slice();
    let columns = header.micro_batches.iter().map(|micro_batch| {
        let mut take = |bytes: usize| {
            let (taken, left) = rest.split_at(bytes);
            rest = left;
            taken
        };
        let word = |bytes: &[u8]| [bytes[0], bytes[1], bytes[2], bytes[3]];
        let n = micro_batch.tokens;
        let written = n - micro_batch.omitted.iter().sum::<usize>();
        let i32s = |bytes: &[u8]| {
            bytes
                .chunks(4)
                .map(|value| i32::from_le_bytes(word(value)))
                .collect()
        };
        let f32s = |bytes: &[u8]| {
            bytes
                .chunks(4)
                .map(|value| f32::from_le_bytes(word(value)))
                .collect()
        };
        let mut columns = Columns {
            token_ids: micro_batch.complete(i32s(take(4 * written))),
            logprobs: micro_batch.complete(f32s(take(4 * written))),
            advantages: micro_batch.complete(f32s(take(4 * written))),
            versions: micro_batch.complete(i32s(take(4 * written))),
            temperatures: micro_batch.complete(f32s(take(4 * written))),
            loss_mask: micro_batch.complete(take(written).to_vec()),
            sequence_lengths: micro_batch.sequence_lengths.clone(),
            rollouts: micro_batch
                .rollouts
                .iter()
                .copied()
                .map(RolloutId)
                .collect(),
            environments: micro_batch
                .environments
                .iter()
                .copied()
                .map(EnvironmentId)
                .collect(),
            truncations: micro_batch
                .truncations
                .iter()
                .map(|run| TruncatedRun {
                    begin: run.begin,
                    end: run.end,
                    truncation: Truncation {
                        top_p: run.top_p,
                        top_k: run.top_k,
                        min_p: run.min_p,
                    },
                })
                .collect(),
            rl_weights: Vec::new(),
            ce_weights: Vec::new(),
            ref_kl_weights: Vec::new(),
            teacher_logprobs: Vec::new(),
            grammars: (micro_batch.grammars.runs.iter())
                .map(|&(begin, end, kind)| GrammarRun {
                    begin,
                    end,
                    grammar: Arc::new(micro_batch.grammars.kinds[kind].clone()),
                })
                .collect(),
        };
        take((21 * written).next_multiple_of(16) - 21 * written);
        for name in &micro_batch.extra_columns {
            let values = f32s(take(4 * n));
            match name.as_str() {
                "teacher_logprobs" => columns.teacher_logprobs = values,
                "rl_weights" => columns.rl_weights = values,
                "ce_weights" => columns.ce_weights = values,
                "ref_kl_weights" => columns.ref_kl_weights = values,
                other => panic!("unknown column {other}"),
            }
            take((4 * n).next_multiple_of(16) - 4 * n);
        }
        columns
    });
    let columns = columns.collect();
    assert!(rest.is_empty(), "{} bytes are left", rest.len());
    (header, columns)
}

#[test]
fn the_bytes_are_the_columns() {
    // Longer than a piece, and with every remainder.
    let lengths = [1, 2, 3, 1023, 1024, 1025, 3500, 17];
    let samples = lengths.into_iter().enumerate();
    let samples = samples.map(|(rollout, tokens)| weighted(rollout as u64, tokens));
    let batch = batch(samples.collect(), 2);
    for (rank, micro_batches) in batch.ranks.iter().enumerate() {
        let body = encode(&batch, rank as u32).expect("encodes");
        let (header, columns) = decode(&body);
        assert_eq!(
            (header.step, header.rank, header.ranks),
            (4, rank as u32, 2)
        );
        assert_eq!(header.loss_tokens, batch.loss_tokens);
        assert_eq!(header.metrics["reward/all/mean"], 0.5);
        let expected: Vec<Columns> = micro_batches.iter().map(MicroBatch::columns).collect();
        assert_eq!(columns, expected);
    }
    assert!(matches!(
        encode(&batch, 2),
        Err(EncodeError { step: 4, .. })
    ));
}

#[test]
fn the_header_says_what_sequences_take_over_only_where_they_do() {
    // Seven tokens, and 100 of the 150 sampled: 107 in common, of which multiples of 32 are shared.
    let samples = vec![weighted(0, 150), weighted(2, 100)];
    let plain = batch(samples.clone(), 1);
    let flops = FlopsModel {
        linear: 1.0,
        quadratic: 0.0,
    };
    let tree = PackedBatch {
        ranks: pack_trees(samples, &[2], 4000, 1, flops),
        ..plain.clone()
    };
    let body = encode(&tree, 0).expect("encodes");
    let (header, columns) = decode(&body);
    assert_eq!(header.micro_batches[0].shared, [0, 96]);
    // The first two of these are the prompt; the next were sampled, in each for itself.
    assert_eq!(header.micro_batches[0].omitted, [0, 2]);
    assert_eq!(header.micro_batches[0].rollouts, [2, 0]);
    let expected: Vec<Columns> = tree.ranks[0].iter().map(MicroBatch::columns).collect();
    assert_eq!(columns, expected, "columns of all tokens");
    let body = encode(&plain, 0).expect("encodes");
    let says = |key: &[u8]| body.windows(key.len()).any(|bytes| bytes == key);
    assert!(!says(b"shared") && !says(b"omitted"));
}

/// A sample of one turn, scored by a teacher.
fn scored(rollout: u64, prompt: &[u32], sampled: &[u32]) -> Weighted {
    let own = turn(None, prompt, sampled, 3);
    let id = RolloutId(rollout);
    let sample = samples(TrajectoryStrategy::Interleaved, id, vec![own], &[Some(0)]).remove(0);
    let scores = (0..sample.len()).map(|at| -0.01 * (at as f32 + rollout as f32));
    Weighted {
        teacher_logprobs: Some(TokenLogprobs(scores.collect())),
        advantage: Advantage::Uniform(0.5 - rollout as f32),
        sample,
        ..weighted(rollout, 1)
    }
}

#[test]
fn context_that_a_sequence_shares_with_the_previous_one_is_omitted() {
    let prompt: Vec<u32> = (0..64).collect();
    let answer: Vec<u32> = (100..140).collect();
    let history = [&prompt[..], &answer].concat();
    // What the first sampled is context of the others.
    let samples = vec![
        scored(0, &prompt, &[&answer[..], &[200]].concat()),
        scored(1, &history, &[300, 301]),
        scored(2, &history, &[400]),
        scored(3, &prompt, &[500]),
    ];
    let flops = FlopsModel {
        linear: 1.0,
        quadratic: 0.0,
    };
    let tree = PackedBatch {
        ranks: pack_trees(samples.clone(), &[4], 4000, 1, flops),
        ..batch(samples.clone(), 1)
    };
    let body = encode(&tree, 0).expect("encodes");
    let (header, columns) = decode(&body);
    let [micro_batch] = &header.micro_batches[..] else {
        panic!("one micro-batch");
    };
    assert_eq!(micro_batch.rollouts, [0, 1, 2, 3]);
    assert_eq!(micro_batch.shared, [0, 96, 96, 64]);
    assert_eq!(micro_batch.omitted, [0, 64, 96, 64]);
    let expected: Vec<Columns> = tree.ranks[0].iter().map(MicroBatch::columns).collect();
    assert_eq!(
        columns, expected,
        "also what a teacher said of the shared tokens"
    );
    // Bodies of before omitted nothing, and are the same batch.
    let before = encode_with(&tree, 0, Shared::Written).expect("encodes");
    let (header, complete) = decode(&before);
    assert!(header.micro_batches[0].omitted.is_empty());
    assert_eq!(complete, columns);
    for read in [&body, &before] {
        assert!(is_of(read, &tree, 0).expect("encodes"));
    }
    let mut other = before.to_vec();
    other[before.len() / 2] ^= 1;
    assert!(!is_of(&other, &tree, 0).expect("encodes"));
    let plain = PackedBatch {
        ranks: vec![vec![MicroBatch::new(samples)]],
        ..tree
    };
    let saved = encode(&plain, 0).expect("encodes").len() - body.len();
    assert!(saved.abs_diff(21 * 224) < 100, "{saved} bytes");
}

/// A sample that a teacher wrote.
fn taught(rollout: u64) -> Weighted {
    let answer = taught_turn(&[1, 2, 3], &[4, 5]);
    let id = RolloutId(rollout);
    let mut samples = samples(
        TrajectoryStrategy::Interleaved,
        id,
        vec![answer],
        &[Some(0)],
    );
    Weighted {
        sample: samples.remove(0),
        environment: EnvironmentId(0),
        advantage: Advantage::Uniform(0.0),
        teacher_logprobs: None,
        mode: None,
        echo: None,
    }
}

#[test]
fn a_teachers_scores_are_a_separate_column() {
    let scored = |rollout: u64, tokens: u32| {
        let own = weighted(rollout, tokens);
        let scores = (0..own.sample.len()).map(|at| -(at as f32));
        Weighted {
            teacher_logprobs: Some(TokenLogprobs(scores.collect())),
            mode: None,
            echo: None,
            ..own
        }
    };
    let body = encode(&batch(vec![scored(0, 3), scored(1, 2)], 1), 0).expect("encodes");
    let (header, columns) = decode(&body);
    assert_eq!(header.micro_batches[0].extra_columns, ["teacher_logprobs"]);
    let counted: Vec<f32> = (0..10).chain(0..9).map(|at| -(at as f32)).collect();
    assert_eq!(columns[0].teacher_logprobs, counted);

    let batch = batch(vec![taught(0), taught(1)], 1);
    let (header, columns) = decode(&encode(&batch, 0).expect("encodes"));
    assert_eq!(header.micro_batches[0].extra_columns, ["ce_weights"]);
    assert_eq!(header.loss_tokens, 4);
    assert_eq!(columns[0], batch.ranks[0][0].columns());
    assert_eq!(columns[0].ce_weights, [0.0, 0.0, 0.0, 1.0, 1.0].repeat(2));
    assert_eq!(columns[0].loss_mask, [0; 10]);
    assert_eq!(columns[0].versions, [-1; 10]);
}

#[test]
fn without_truncation_there_are_no_columns_for_it() {
    let said = |tokens| {
        let body = encode(&batch(vec![weighted(0, tokens)], 1), 0).expect("encodes");
        let frame: Frame = rmp_serde::from_slice(&body).expect("is a map");
        String::from_utf8_lossy(&frame.header).contains("truncations")
    };
    assert!(!said(2));
    assert!(said(3));
}

#[test]
fn a_grammar_is_named_once() {
    let samples = (0..4).map(|rollout| weighted(rollout, 7)).collect();
    let batch = batch(samples, 1);
    let (header, columns) = decode(&encode(&batch, 0).expect("encodes"));
    let grammars = &header.micro_batches[0].grammars;
    assert_eq!((grammars.kinds.len(), grammars.runs.len()), (1, 4));
    assert_eq!(columns[0], batch.ranks[0][0].columns());
    let plain = encode(&self::batch(vec![weighted(0, 2)], 1), 0).expect("encodes");
    let frame: Frame = rmp_serde::from_slice(&plain).expect("is a map");
    assert!(!String::from_utf8_lossy(&frame.header).contains("grammars"));
}

#[test]
fn columns_are_little_endian_bytes() {
    let body = encode(&batch(vec![weighted(0, 1)], 1), 0).expect("encodes");
    let frame: Frame = rmp_serde::from_slice(&body).expect("is a map");
    let columns = frame.columns.as_slice();
    // 8 tokens: [1 256 | 3 4 | 7 7 7 | 1000].
    assert_eq!(columns[..8], [1, 0, 0, 0, 0, 1, 0, 0]);
    assert_eq!(columns[32 + 28..64], (-0.5_f32).to_le_bytes());
    assert_eq!(columns[96..104], [255; 8]);
    assert_eq!(columns[160..168], [0, 0, 1, 1, 0, 0, 0, 1]);
    assert_eq!(columns.len(), 176);
}

#[test]
fn a_rank_without_samples_has_no_bytes() {
    let (header, columns) = decode(&encode(&batch(vec![weighted(0, 1)], 2), 1).expect("encodes"));
    assert_eq!(header.micro_batches[0].tokens, 0);
    assert_eq!(columns, [Columns::default()]);
}

#[test]
fn experts_are_the_rows_of_known_tokens_behind_the_columns() {
    let shape = ExpertsShape {
        layers: 2,
        chosen: 1,
        bytes: 2,
    };
    let with = |rollout: u64, rows: usize, shape: ExpertsShape| {
        let ids = (0..(rows * shape.row()) as u8).collect();
        let turn = Turn {
            experts: Experts::new(0, shape, ids).map(Arc::new),
            ..turn(None, &[1, 2], &[3], 2)
        };
        let turns = vec![turn];
        let sample = samples(
            TrajectoryStrategy::Interleaved,
            RolloutId(rollout),
            turns,
            &[Some(0)],
        );
        Weighted {
            sample: sample.into_iter().next().expect("is trained"),
            environment: EnvironmentId(0),
            advantage: Advantage::Uniform(1.0),
            teacher_logprobs: None,
            mode: None,
            echo: None,
        }
    };
    let both = batch(
        vec![with(0, 2, shape), with(1, 0, shape), with(2, 1, shape)],
        1,
    );
    let body = encode(&both, 0).expect("encodes");
    let frame: Frame = rmp_serde::from_slice(&body).expect("is a frame");
    let header: DecodedHeader = rmp_serde::from_slice(&frame.header).expect("is a header");
    let expected = serde_json::json!({
        "layers": 2, "chosen": 1, "bytes": 2, "runs": [[0, 2], [6, 7]],
    });
    assert_eq!(header.micro_batches[0].routed_experts, Some(expected));
    let plain = (9 * BYTES_PER_TOKEN).next_multiple_of(ALIGNMENT);
    assert_eq!(frame.columns.len(), plain + 16);
    assert_eq!(
        frame.columns[plain..],
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 0, 0, 0]
    );
    // Where none are known the bytes are those of before.
    let none = encode(&batch(vec![with(1, 0, shape)], 1), 0).expect("encodes");
    assert!(!none.windows(14).any(|bytes| bytes == b"routed_experts"));
    let narrow = ExpertsShape { layers: 3, ..shape };
    let differ = batch(vec![with(0, 2, shape), with(1, 1, narrow)], 1);
    let error = encode(&differ, 0).expect_err("two models");
    assert!(error.to_string().contains("2 layers"), "{error}");
}
