//! What the core costs, per rollout and per event, with many rollouts in flight.
//!
//! Covers: a single-turn rollout from its lease to its place in a cut batch (lease, turn of 256 tokens, report, share of
//! the cut); a worker's sign of life; both at 100 and at 10,000 rollouts in flight, whose ratio shows whether any event
//! costs O(rollouts). Then, with a clock of its own (`Instant`, one reading an event): median and p99.9 of each kind of
//! event in a mix (`mix`), and a new policy version that makes rollouts stale (`versions`).
//! Run: `cargo bench -p primerl-core --bench handle`; with `-- mix` or `-- versions` only that part.

mod mix;
mod versions;

use criterion::{BatchSize, Criterion};
use primerl_core::config::{Admission, LimitRule, RunConfig};
use primerl_core::testing::{config, environment, outcome, turn};
use primerl_core::*;
use std::hint::black_box;

/// As in the orchestrator's program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const GROUP: u32 = 8;
const WORKER: WorkerId = WorkerId(0);

/// An engine for as many rollouts as there are.
fn unlimited() -> Admission {
    Admission {
        limit: LimitRule::Fixed,
        start_per_engine: u32::MAX,
        max_per_engine: u32::MAX,
        ..primerl_core::testing::admission()
    }
}

/// An engine, an environment with that many examples, and its worker.
fn joined(examples: u32) -> [Event; 3] {
    let environment = EnvironmentId(0);
    [
        Event::EngineJoined {
            engine: EngineId(0),
            url: "http://engine".to_owned(),
        },
        Event::EnvironmentReady {
            environment,
            examples,
            whole_groups: false,
        },
        Event::WorkerJoined {
            worker: WORKER,
            environment,
            name: "worker".to_owned(),
        },
    ]
}

struct Bench {
    core: Core,
    now: Time,
    request: u64,
    in_flight: std::collections::VecDeque<RolloutId>,
    published: u64,
    turn: Turn,
}

impl Bench {
    fn new(in_flight: u32) -> Self {
        let config = Config {
            run: RunConfig {
                max_steps: u64::MAX / 2,
                batch_size: 64,
                group_size: GROUP,
                seq_len: 8192,
                // As many rollouts in flight as asked for, whatever the batch.
                max_async_level: u64::from(in_flight / 64 + 2),
                max_off_policy_steps: u64::from(in_flight / 64 + 2),
                oversampling_factor: f64::from(in_flight) / 64.0,
                admission: unlimited(),
                ..config().run
            },
            environments: vec![environment("train")],
            ..config()
        };
        let sampled: Vec<u32> = (0..256).collect();
        let mut bench = Bench {
            core: Core::new(config).expect("a valid config"),
            now: Time(0),
            request: 0,
            in_flight: Default::default(),
            published: 0,
            turn: turn(None, &[1; 64], &sampled, 0),
        };
        for event in joined(10_000) {
            bench.send(event);
        }
        bench.publish(0);
        bench.lease(in_flight);
        bench
    }

    fn send(&mut self, event: Event) -> Vec<Effect> {
        self.now = self.now + Duration(10);
        self.core.handle(event, self.now)
    }

    fn publish(&mut self, version: u64) {
        let version = PolicyVersion(version);
        self.send(Event::WeightsPublished {
            version,
            manifest: String::new(),
            digest: String::new(),
        });
        self.send(Event::EngineProved {
            engine: EngineId(0),
            version,
        });
        self.published = version.0;
    }

    fn lease(&mut self, max: u32) {
        self.request += 1;
        for effect in self.send(Event::LeaseRequested {
            request: RequestId(self.request),
            worker: WORKER,
            max,
        }) {
            if let Effect::Lease { rollouts, .. } = effect {
                self.in_flight
                    .extend(rollouts.iter().map(|leased| leased.rollout));
            }
        }
    }

    /// The oldest rollout in flight ends, and another one is leased.
    fn rollout(&mut self) {
        let rollout = self.in_flight.pop_front().expect("rollouts are in flight");
        let mut turn = self.turn.clone();
        turn.versions[0].version = PolicyVersion(self.published);
        self.send(Event::TurnFinished { rollout, turn });
        let effects = self.send(Event::RolloutFinished {
            rollout,
            worker: WORKER,
            outcome: outcome(0.5),
        });
        if effects
            .iter()
            .any(|effect| matches!(effect, Effect::BatchCut { .. }))
        {
            let step = Step(self.published + 1);
            self.request += 1;
            self.send(Event::BatchRequested {
                request: RequestId(self.request),
                step,
                rank: 0,
            });
            self.publish(step.0);
        }
        self.lease(1);
    }
}

fn handle(criterion: &mut Criterion) {
    for in_flight in [128, 10_048] {
        let mut bench = Bench::new(in_flight);
        assert_eq!(bench.in_flight.len(), in_flight as usize);
        criterion.bench_function(&format!("rollout/{in_flight}_in_flight"), |bencher| {
            bencher.iter_batched(|| (), |()| bench.rollout(), BatchSize::SmallInput);
        });
        criterion.bench_function(&format!("worker_seen/{in_flight}_in_flight"), |bencher| {
            bencher.iter(|| black_box(bench.send(Event::WorkerSeen { worker: WORKER })));
        });
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&str> = arguments
        .iter()
        .map(String::as_str)
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    let own = ["mix", "versions"];
    if filters.is_empty() || filters.iter().any(|filter| !own.contains(filter)) {
        let mut criterion = Criterion::default().configure_from_args();
        handle(&mut criterion);
        criterion.final_summary();
    }
    // Cargo says so when it measures, and not when it only tries whether benches run.
    let measures = arguments.iter().any(|argument| argument == "--bench");
    let wanted = |part| measures && (filters.is_empty() || filters.contains(&part));
    if wanted("mix") {
        mix::measure();
    }
    if wanted("versions") {
        versions::measure();
    }
}
