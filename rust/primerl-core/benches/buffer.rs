//! What the difficulty buffer costs per draw and per finished group.
//!
//! Covers: one draw, and one update (an example is filed, with its history) that moves it to another pool two times out
//! of three, of environments with 1,000,000 and 10,000,000 examples, each after 2,000,000 draws and moves that have
//! spread over all of them; what a start costs; and the size of the state when it is written. At 10,000,000 memory
//! decides: expect twice the time where another process keeps it busy. Run: `cargo bench -p primerl-core --bench buffer`.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use primerl_core::curriculum::{Curriculum, Filing};
use primerl_core::testing::config;
use primerl_core::*;
use std::hint::black_box;

const TRAIN: EnvironmentId = EnvironmentId(0);
const MOVES: u64 = 2_000_000;

struct Bench {
    curriculum: Curriculum,
    config: Config,
    groups: u64,
    drawn: Vec<ExampleIndex>,
}

impl Bench {
    fn new(examples: u32) -> Self {
        let mut config = config();
        config.buffer.online_difficulty_filtering = true;
        config.buffer.easy_fraction = 0.3;
        config.buffer.hard_fraction = 0.3;
        let mut curriculum = Curriculum::new(&config);
        curriculum.set_examples(TRAIN, examples);
        Bench {
            curriculum,
            config,
            groups: 0,
            drawn: Vec::new(),
        }
    }

    fn draw(&mut self) -> ExampleIndex {
        self.curriculum
            .draw(TRAIN, &self.config)
            .expect("there are examples")
            .example
    }

    /// Files an example; its rewards go from easy to normal to hard and back.
    fn update(&mut self, example: ExampleIndex) -> bool {
        self.groups += 1;
        let filing = Filing {
            step: Step(1),
            mean_reward: [0.1, 0.5, 0.9][(self.groups % 3) as usize],
            rollouts: 8,
            has_signal: true,
        };
        self.curriculum.file(TRAIN, example, &filing, &self.config)
    }
}

fn buffer(criterion: &mut Criterion) {
    for examples in [1_000_000, 10_000_000] {
        criterion.bench_function(&format!("start/{examples}_examples"), |bencher| {
            bencher.iter_batched(|| (), |()| Bench::new(examples), BatchSize::PerIteration);
        });
        let mut bench = Bench::new(examples);
        for _ in 0..MOVES {
            let example = bench.draw();
            bench.update(example);
        }
        let report = bench.curriculum.report(&bench.config);
        println!("{examples} examples: {:?}", report.environments[0].pools);
        criterion.bench_function(&format!("draw/{examples}_examples"), |bencher| {
            bencher.iter(|| {
                let example = black_box(bench.draw());
                bench.drawn.push(example);
            });
        });
        // Drawn at random, and too many for a cache: as cold as a finished group finds them.
        let mut drawn = std::mem::take(&mut bench.drawn);
        drawn.truncate(1_000_000);
        let mut next = drawn.iter().cycle();
        criterion.bench_function(&format!("update/{examples}_examples"), |bencher| {
            bencher.iter(|| black_box(bench.update(*next.next().expect("a cycle has no end"))));
        });
        let bytes = rmp_serde::to_vec(&bench.curriculum).expect("it can be written");
        println!("{examples} examples: {} bytes written", bytes.len());
    }
}

criterion_group!(benches, buffer);
criterion_main!(benches);
