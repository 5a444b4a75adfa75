//! Samples, advantages, packing: from finished rollouts to the columns of a step's batch.
//!
//! Inputs: sample lengths of `benches/data` (log-normal, mean 2,000, at most 16,384), a quarter of each a prompt; 8 data
//! ranks; FLOPs of the Qwen3-8B shape. Prints, in addition to the times, how well the ranks are filled and balanced,
//! and the memory of the packed columns against what packing allocated at its peak. Run: `cargo bench -p primerl-core
//! --bench pack`.
//!
//! * fill: tokens / (micro-batches * seq_len). Micro-batches are not padded; this is how much room there is in them.
//! * beyond the fewest: micro-batches more than the smallest number that could hold the tokens and divides by the ranks.
//! * imbalance: work of the dearest rank, by estimated FLOPs, against the mean.
//!
//! With trees: the same samples in groups of 8 and 16 that share nothing; and 4,096 samples of 8,192 tokens in groups of
//! 16 that share 6,144. Prints how much longer that takes than packing without trees.

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

use criterion::{BatchSize, Bencher, Criterion, criterion_group, criterion_main};
use mimalloc::MiMalloc;
use primerl_core::advantage::{Baselines, Part, ScoredGroup, advantages, length_scales};
use primerl_core::config::{FlopsModel, LengthNormalization, TrajectoryStrategy};
use primerl_core::pack::{Advantage, Columns, MicroBatch, Weighted, pack, pack_trees};
use primerl_core::sample::{samples, samples as samples_of};
use primerl_core::testing::{grpo, turn};
use primerl_core::{EnvironmentId, RolloutId, Turn};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const RANKS: usize = 8;

/// hidden 4096, 32 / 8 heads of 128, FFN 12288, 36 layers, vocabulary 151936: 6 a parameter and token, and causal
/// attention's 6 * layers * heads * head_dim a pair.
fn qwen3_8b() -> FlopsModel {
    let layer = 4096.0 * (2.0 * 4096.0 + 2.0 * 1024.0 + 3.0 * 12288.0);
    FlopsModel {
        linear: 6.0 * (36.0 * layer + 151_936.0 * 4096.0),
        quadratic: 6.0 * 36.0 * 4096.0,
    }
}

/// The allocator of the orchestrator's binary; counts what is allocated, to see the peak.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[expect(
    unsafe_code,
    reason = "an allocator is unsafe by its trait; it only counts and passes on"
)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(now, Relaxed);
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        unsafe { MiMalloc.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn lengths(name: &str) -> Vec<usize> {
    let path = format!("{}/../../benches/data/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// CPU time of this thread, of which others on the machine take nothing. The kernel counts it by its ticks, so a
/// measurement has to last some of them.
fn cpu_time<T>(bencher: &mut Bencher, mut routine: impl FnMut() -> T) {
    let now = || -> u64 {
        let schedule = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        schedule.split_whitespace().next().unwrap().parse().unwrap()
    };
    bencher.iter_custom(|iterations| {
        let start = now();
        for _ in 0..iterations {
            black_box(routine());
        }
        Duration::from_nanos(now() - start)
    });
}

/// A quarter prompt, the rest sampled with log-probabilities of -Exponential(2).
fn weighted(rollout: usize, tokens: usize, rng: &mut ChaCha8Rng) -> Weighted {
    let mut ids = |n: usize| -> Vec<u32> { (0..n).map(|_| rng.random_range(0..151_936)).collect() };
    let (prompt, sampled) = (ids(tokens / 4), ids(tokens - tokens / 4));
    let mut turn = turn(None, &prompt, &sampled, 3);
    turn.logprobs = (0..sampled.len())
        .map(|_| 2.0 * rng.random::<f32>().max(1e-9).ln())
        .collect();
    let rollout = RolloutId(rollout as u64);
    let sample = samples(
        TrajectoryStrategy::Interleaved,
        rollout,
        vec![turn],
        &[Some(0)],
    )
    .remove(0);
    Weighted {
        sample,
        environment: EnvironmentId(0),
        advantage: Advantage::Uniform(rng.random_range(-1.0..1.0)),
        teacher_logprobs: None,
        mode: None,
        echo: None,
    }
}

fn write(ranks: &[Vec<MicroBatch>]) -> Vec<Columns> {
    ranks.iter().flatten().map(MicroBatch::columns).collect()
}

fn bytes(columns: &Columns) -> usize {
    (4 + 1 + 4 + 4 + 4 + 4) * columns.token_ids.len() + 16 * columns.sequence_lengths.len()
}

fn describe(name: &str, samples: &[Weighted], seq_len: usize) {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let ranks = pack(samples.to_vec(), seq_len, RANKS, qwen3_8b());
    let columns = write(&ranks);
    let extra = PEAK.load(Relaxed) - before;
    let columns: usize = columns.iter().map(bytes).sum();
    let tokens: usize = ranks.iter().flatten().map(MicroBatch::len).sum();
    let micro_batches = ranks.iter().map(Vec::len).sum::<usize>();
    let fewest = tokens.div_ceil(seq_len).div_ceil(RANKS) * RANKS;
    let work = ranks.iter().map(|rank| {
        let sequences = rank.iter().flat_map(MicroBatch::sequences);
        sequences
            .map(|weighted| qwen3_8b().of(weighted.sample.len()))
            .sum::<f64>()
    });
    let work: Vec<f64> = work.collect();
    let mean = work.iter().sum::<f64>() / RANKS as f64;
    println!(
        "{name}: {tokens} tokens in {micro_batches} micro-batches, fill {:.2} %, {} beyond the fewest, imbalance {:.3} %, \
         extra memory {:.3} x the columns ({:.1} bytes a token)",
        100.0 * tokens as f64 / (micro_batches * seq_len) as f64,
        micro_batches - fewest,
        100.0 * (work.iter().copied().fold(0.0, f64::max) / mean - 1.0),
        extra as f64 / columns as f64,
        columns as f64 / tokens as f64,
    );
}

fn packing(criterion: &mut Criterion) {
    let inputs = [
        ("512", lengths("lengths_512.json"), 16_384),
        ("4096", lengths("lengths_4096.json"), 16_384),
        ("256_of_32k", vec![32_768; 256], 32_768),
    ];
    for (name, lengths, seq_len) in inputs {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let lengths = lengths.iter().enumerate();
        let samples: Vec<Weighted> = lengths
            .map(|(rollout, tokens)| weighted(rollout, *tokens, &mut rng))
            .collect();
        describe(name, &samples, seq_len);
        criterion.bench_function(&format!("pack/{name}/with_columns"), |bencher| {
            cpu_time(bencher, || {
                write(&pack(
                    black_box(&samples).to_vec(),
                    seq_len,
                    RANKS,
                    qwen3_8b(),
                ))
            });
        });
        criterion.bench_function(&format!("pack/{name}/without_columns"), |bencher| {
            cpu_time(bencher, || {
                pack(black_box(&samples).to_vec(), seq_len, RANKS, qwen3_8b())
            });
        });
    }
}

/// `groups` groups of 16 samples of 8,192 tokens, of which the first 6,144 are the group's; samples of a group hold
/// tokens of their own, as those of different rollouts do.
fn sharing(groups: usize, rng: &mut ChaCha8Rng) -> Vec<Weighted> {
    let mut samples = Vec::new();
    for group in 0..groups {
        let prompt: Vec<u32> = (0..6144).map(|_| rng.random_range(0..151_936)).collect();
        for place in 0..16 {
            let answer: Vec<u32> = (0..2048).map(|_| rng.random_range(0..151_936)).collect();
            let turn = turn(None, &prompt, &answer, 3);
            let strategy = TrajectoryStrategy::Interleaved;
            let rollout = RolloutId((16 * group + place) as u64);
            samples.push(Weighted {
                sample: samples_of(strategy, rollout, vec![turn], &[Some(0)]).remove(0),
                environment: EnvironmentId(0),
                advantage: Advantage::Uniform(0.5),
                teacher_logprobs: None,
                mode: None,
                echo: None,
            });
        }
    }
    samples
}

/// Times of packing alone, of samples that nothing else needs, and what comes of it not dropped: with trees against
/// without, in turns, so that both have the same machine. Prints the fastest of many rounds of each, since others on the
/// machine only make one slower.
fn against_plain(name: &str, samples: &[Weighted], groups: &[usize], seq_len: usize) {
    let mut fastest = [Duration::MAX; 4];
    for _ in 0..40 {
        for (place, fastest) in fastest.iter_mut().enumerate() {
            let samples = samples.to_vec();
            let started = Instant::now();
            let packed = match place % 2 {
                0 => pack(samples, seq_len, RANKS, qwen3_8b()),
                _ => pack_trees(samples, groups, seq_len, RANKS, qwen3_8b()),
            };
            let columns = (place > 1).then(|| write(&packed));
            *fastest = started.elapsed().min(*fastest);
            black_box((packed, columns));
        }
    }
    let [plain, trees, plain_columns, trees_columns] = fastest.map(|time| time.as_secs_f64() * 1e6);
    println!(
        "trees/{name}: packing alone {plain:.0} us, with trees {trees:.0} us ({:.2} x); with columns {plain_columns:.0} \
         and {trees_columns:.0} us ({:.2} x)",
        trees / plain,
        trees_columns / plain_columns,
    );
}

/// Packing with trees: of samples that share nothing, and of groups that share their prompts.
fn trees(criterion: &mut Criterion) {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let of_lengths = |name: &str, rng: &mut ChaCha8Rng| -> Vec<Weighted> {
        let lengths = lengths(name).into_iter().enumerate();
        lengths
            .map(|(rollout, tokens)| weighted(rollout, tokens, rng))
            .collect()
    };
    let inputs = [
        ("512", of_lengths("lengths_512.json", &mut rng), 8, 16_384),
        (
            "4096",
            of_lengths("lengths_4096.json", &mut rng),
            16,
            16_384,
        ),
        ("4096_of_8k_sharing", sharing(256, &mut rng), 16, 32_768),
    ];
    for (name, samples, group, seq_len) in inputs {
        let groups = vec![group; samples.len() / group];
        let flops = qwen3_8b();
        let packed = pack_trees(samples.clone(), &groups, seq_len, RANKS, flops);
        let of =
            |count: fn(&MicroBatch) -> usize| packed.iter().flatten().map(count).sum::<usize>();
        println!(
            "trees/{name}: {} of {} tokens are computed, in {} micro-batches",
            of(MicroBatch::unique_tokens),
            of(MicroBatch::len),
            packed.iter().map(Vec::len).sum::<usize>(),
        );
        against_plain(name, &samples, &groups, seq_len);
        criterion.bench_function(&format!("pack/{name}/with_trees"), |bencher| {
            cpu_time(bencher, || {
                pack_trees(black_box(&samples).to_vec(), &groups, seq_len, RANKS, flops)
            });
        });
    }
}

fn sampling(criterion: &mut Criterion) {
    for turns in [8_u32, 32, 100] {
        let half = 64 * 1024 / turns / 2;
        let turns: Vec<Turn> = (0..turns)
            .map(|index| {
                let tokens: Vec<u32> = (0..half).collect();
                // The first 4 tokens of an assistant's turn are scaffold.
                let prompt: Vec<u32> = (0..half + 4).collect();
                turn(
                    index.checked_sub(1),
                    &prompt,
                    &tokens[4..],
                    u64::from(index),
                )
            })
            .collect();
        let trace_of = vec![Some(0); turns.len()];
        for strategy in [
            TrajectoryStrategy::Interleaved,
            TrajectoryStrategy::Branching,
        ] {
            let name = format!("samples/{}_turns/{strategy:?}", turns.len());
            criterion.bench_function(&name, |bencher| {
                let samples = |turns| samples(strategy, RolloutId(0), turns, &trace_of);
                bencher.iter_batched(|| turns.clone(), samples, BatchSize::SmallInput);
            });
        }
        // What a sample leaves to packing: the columns written, by one rank, of this sample alone.
        let one: Vec<Weighted> = samples(
            TrajectoryStrategy::Interleaved,
            RolloutId(0),
            turns.clone(),
            &trace_of,
        )
        .into_iter()
        .map(|sample| Weighted {
            sample,
            environment: EnvironmentId(0),
            advantage: Advantage::Uniform(1.0),
            teacher_logprobs: None,
            mode: None,
            echo: None,
        })
        .collect();
        criterion.bench_function(
            &format!("samples_and_columns/{}_turns", turns.len()),
            |bencher| {
                let both = |turns| {
                    let strategy = TrajectoryStrategy::Interleaved;
                    black_box(samples(strategy, RolloutId(0), turns, &trace_of));
                    MicroBatch::new(one.clone()).columns()
                };
                bencher.iter_batched(|| turns.clone(), both, BatchSize::SmallInput);
            },
        );
    }
}

/// 64 groups of 8 rollouts, of 2,000 tokens each: GRPO's advantages with their scales by length, and written for every
/// token (which packing does with the other columns).
fn grpo_advantages(criterion: &mut Criterion) {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let algorithm = grpo();
    let groups: Vec<ScoredGroup> = (0..64)
        .map(|_| {
            ScoredGroup::plain(
                &algorithm,
                (0..8).map(|_| rng.random_range(0.0..1.0)).collect(),
            )
        })
        .collect();
    let parts: Vec<Part> = (0..512)
        .map(|sequence| Part {
            sequence,
            loss_tokens: 1500,
            normalization: LengthNormalization::Sequence,
        })
        .collect();
    criterion.bench_function("grpo/512_rollouts_x_2k", |bencher| {
        bencher.iter(|| {
            let advantages = advantages(black_box(&groups), &mut Baselines::default(), &mut rng);
            let scales = length_scales(black_box(&parts), 16_384.0);
            let scaled = advantages.iter().flatten().zip(scales);
            scaled
                .map(|(advantage, scale)| advantage * scale)
                .collect::<Vec<f32>>()
        });
    });
    let mut columns = vec![0.0_f32; 512 * 2000];
    criterion.bench_function("grpo/512_rollouts_x_2k_by_token", |bencher| {
        bencher.iter(|| {
            let advantages = advantages(black_box(&groups), &mut Baselines::default(), &mut rng);
            let scales = length_scales(black_box(&parts), 16_384.0);
            let scaled = advantages.iter().flatten().zip(scales);
            for ((advantage, scale), column) in scaled.zip(columns.chunks_exact_mut(2000)) {
                column[500..].fill(advantage * scale);
            }
            black_box(&columns);
        });
    });
}

criterion_group!(benches, packing, trees, sampling, grpo_advantages);
criterion_main!(benches);
