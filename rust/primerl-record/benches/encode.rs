//! Encoding a step's batch for its data ranks.
//!
//! `cargo bench -p primerl-record --bench encode [-- --write FOLDER]`
//!
//! Inputs: sample lengths of `benches/data` (log-normal, mean 2,000, at most 16,384), a quarter of each a prompt; 8 data
//! ranks. Prints milliseconds of CPU for packing and for encoding all ranks (which writes the columns), and bytes a
//! token; then the same of groups of 16 samples that share 6,144 tokens and have 2,048 of their own, packed as trees and
//! without. With `--write`, the bodies of 512 samples go to `FOLDER/rank_<r>.msgpack`, for `benches/batch_decode.py`,
//! those of the groups to `FOLDER/plain` and `FOLDER/trees`.

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

use primerl_core::config::{FlopsModel, TrajectoryStrategy};
use primerl_core::pack::{Advantage, MicroBatch, PackedBatch, Weighted, pack, pack_trees};
use primerl_core::sample::samples;
use primerl_core::testing::turn;
use primerl_core::{EnvironmentId, RolloutId, Step};
use primerl_record::batch::encode;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::{Path, PathBuf};

// As in the orchestrator's binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const RANKS: usize = 8;
const SEQ_LEN: usize = 16_384;
/// The kernel counts CPU time by its ticks, so a measurement has to last many of them.
const LEAST_MS: f64 = 500.0;

/// CPU time of this thread, of which others on the machine take nothing.
fn cpu_ms() -> f64 {
    let schedule = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanoseconds: f64 = schedule.split_whitespace().next().unwrap().parse().unwrap();
    nanoseconds / 1e6
}

/// CPU milliseconds of one call: the least of five measurements.
fn measure<T>(mut routine: impl FnMut() -> T) -> f64 {
    let mut once = || {
        let (start, mut calls) = (cpu_ms(), 0);
        loop {
            black_box(routine());
            calls += 1;
            let spent = cpu_ms() - start;
            if spent >= LEAST_MS {
                return spent / f64::from(calls);
            }
        }
    };
    (0..5).map(|_| once()).fold(f64::INFINITY, f64::min)
}

fn lengths(name: &str) -> Vec<usize> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/data");
    serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap()
}

/// Numbers that differ from token to token; which ones does not matter.
fn ids(seed: usize, n: usize) -> Vec<u32> {
    (0..n)
        .map(|at| ((at * 7919 + seed * 104_729) % 151_936) as u32)
        .collect()
}

fn weighted(rollout: usize, tokens: usize) -> Weighted {
    sampled_after(&ids(rollout, tokens / 4), rollout, tokens - tokens / 4)
}

fn sampled_after(prompt: &[u32], rollout: usize, tokens: usize) -> Weighted {
    let sampled = ids(rollout, tokens);
    let mut turn = turn(None, prompt, &sampled, 3);
    turn.logprobs = sampled.iter().map(|id| -1e-4 * *id as f32).collect();
    let rollout_id = RolloutId(rollout as u64);
    let sample = samples(
        TrajectoryStrategy::Interleaved,
        rollout_id,
        vec![turn],
        &[Some(0)],
    )
    .remove(0);
    Weighted {
        sample,
        environment: EnvironmentId(0),
        advantage: Advantage::Uniform(rollout as f32 / 512.0 - 0.5),
        teacher_logprobs: None,
        mode: None,
        echo: None,
    }
}

/// FLOPs of Qwen3-8B.
const FLOPS: FlopsModel = FlopsModel {
    linear: 4.5e10,
    quadratic: 884_736.0,
};

fn batch(samples: Vec<Weighted>) -> PackedBatch {
    let loss_tokens = samples
        .iter()
        .map(|weighted| weighted.sample.loss_tokens)
        .sum();
    PackedBatch {
        step: Step(5),
        ranks: pack(samples, SEQ_LEN, RANKS, FLOPS),
        loss_tokens,
        metrics: BTreeMap::from([("reward/all/mean".to_owned(), 0.5)]),
    }
}

fn write(batch: &PackedBatch, folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    for rank in 0..RANKS as u32 {
        let path = folder.join(format!("rank_{rank}.msgpack"));
        std::fs::write(path, encode(batch, rank).unwrap()).unwrap();
    }
}

/// Figures of encoding all ranks' bodies, which are kept, as for ranks that have not asked yet.
fn encoded(batch: &PackedBatch) -> String {
    let tokens: usize = batch.ranks.iter().flatten().map(MicroBatch::len).sum();
    let all = || (0..RANKS as u32).map(|rank| encode(batch, rank).unwrap());
    let bytes: usize = all().map(|body| body.len()).sum();
    let encoding = measure(|| all().collect::<Vec<_>>());
    format!(
        "{tokens} tokens, encoding {encoding:.2} ms, {:.2} bytes a token",
        bytes as f64 / tokens as f64
    )
}

/// 32 groups of 16 samples that begin with the same 6,144 tokens.
fn groups(folder: Option<&Path>) {
    let samples: Vec<Weighted> = (0..512)
        .map(|rollout| sampled_after(&ids(1000 + rollout / 16, 6144), rollout, 2048))
        .collect();
    let plain = batch(samples.clone());
    let tree = PackedBatch {
        ranks: pack_trees(samples, &[16; 32], 2 * SEQ_LEN, RANKS, FLOPS),
        ..plain.clone()
    };
    for (name, batch) in [("plain", plain), ("trees", tree)] {
        let micro_batches = batch.ranks.iter().flatten();
        let unique: usize = micro_batches.map(MicroBatch::unique_tokens).sum();
        println!("groups, {name}: {unique} unique, {}", encoded(&batch));
        if let Some(folder) = folder {
            write(&batch, &folder.join(name));
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let folder = arguments
        .iter()
        .position(|argument| argument == "--write")
        .map(|at| PathBuf::from(&arguments[at + 1]));
    for name in ["lengths_512.json", "lengths_4096.json"] {
        let samples: Vec<Weighted> = lengths(name)
            .into_iter()
            .enumerate()
            .map(|(rollout, tokens)| weighted(rollout, tokens))
            .collect();
        let packing = measure(|| batch(samples.clone()));
        let batch = batch(samples);
        println!("{name}: packing {packing:.2} ms, {}", encoded(&batch));
        if let Some(folder) = folder.as_ref().filter(|_| name == "lengths_512.json") {
            write(&batch, folder);
        }
    }
    groups(folder.as_deref());
}
