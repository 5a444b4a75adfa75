//! Every fuzz target for a moment: on its seeds, and on what becomes of them.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test may panic"
)]

use primerl_fuzz::{Fuzz, TARGETS, mutate::mutate};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Of one target; a slow machine tries fewer of the same inputs.
const MOST_INPUTS: u64 = 4_000;
const LONGEST: Duration = Duration::from_millis(1_500);

fn seeds(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(name);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    // In an order that does not depend on the disk, so that a number names an input.
    files.sort();
    files
        .iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect()
}

fn check(name: &str, fuzz: Fuzz, which: &str, input: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| fuzz(input))).is_err() {
        let file = std::env::temp_dir().join(format!("primerl-fuzz-{name}"));
        let _ = std::fs::write(&file, input);
        panic!(
            "{name} fails on {which}, which is now in {}: {}",
            file.display(),
            input.escape_ascii()
        );
    }
}

#[test]
fn every_target_takes_its_seeds_and_what_becomes_of_them() {
    for (name, fuzz) in TARGETS {
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name} has no seeds");
        for (number, seed) in seeds.iter().enumerate() {
            check(name, *fuzz, &format!("seed {number}"), seed);
        }
        let begun = Instant::now();
        for number in 0..MOST_INPUTS {
            let input = mutate(&seeds, &mut ChaCha8Rng::seed_from_u64(number));
            check(name, *fuzz, &format!("input {number}"), &input);
            if begun.elapsed() > LONGEST {
                break;
            }
        }
    }
}
