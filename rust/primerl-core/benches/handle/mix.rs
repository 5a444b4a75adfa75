//! Every event of a busy run, timed one by one, with 10,000 rollouts in flight.
//!
//! Two environments, 80 workers, 4 engines, groups of 8, batches of 512. A rollout has 1 to 7 turns (mean 4) of 64 prompt
//! and 256 sampled tokens; the next event belongs to a random rollout. Workers send heartbeats and ask for leases as
//! they have room; engines report their load; the trainer takes each batch and publishes the next version.
//!
//! The same seeded run is played three times, and each event counts with its shortest time: what another process on the
//! machine took is not the core's.

use crate::unlimited;
use primerl_core::config::RunConfig;
use primerl_core::event::EngineLoad;
use primerl_core::testing::{config, environment, outcome, turn};
use primerl_core::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::time::Instant;

const IN_FLIGHT: u32 = 10_240;
const WORKERS: u64 = 80;
const BATCH: u32 = 512;
const EVENTS: usize = 1_000_000;
const RUNS: usize = 3;

struct Running {
    rollout: RolloutId,
    worker: WorkerId,
    turns_left: u32,
    turns: u32,
}

struct Mix {
    core: Core,
    rng: ChaCha8Rng,
    now: Time,
    request: u64,
    running: Vec<Running>,
    proved: u64,
    step: u64,
    first_turn: Turn,
    later_turn: Turn,
    /// Kind and nanoseconds of each event; `None` while the run fills up.
    taken: Option<Vec<(&'static str, u64)>>,
}

fn kind(event: &Event) -> &'static str {
    match event {
        Event::SamplingStarted { .. } => "sampling started",
        Event::TurnFinished { .. } => "turn finished",
        Event::RolloutFinished { .. } => "rollout finished",
        Event::LeaseRequested { .. } => "lease requested",
        Event::WorkerSeen { .. } => "worker seen",
        Event::EngineLoad { .. } => "engine load",
        Event::BatchRequested { .. } => "batch requested",
        Event::WeightsPublished { .. } => "weights published",
        Event::EngineProved { .. } => "engine proved",
        _ => "other",
    }
}

impl Mix {
    fn new() -> Mix {
        let steps_in_flight = u64::from(IN_FLIGHT / BATCH);
        let config = Config {
            run: RunConfig {
                max_steps: u64::MAX / 2,
                batch_size: BATCH,
                group_size: 8,
                seq_len: 8192,
                data_ranks: 8,
                max_async_level: 3 * steps_in_flight,
                max_off_policy_steps: 3 * steps_in_flight,
                oversampling_factor: f64::from(IN_FLIGHT) / f64::from(BATCH),
                admission: unlimited(),
                ..config().run
            },
            environments: vec![environment("a"), environment("b")],
            ..config()
        };
        let sampled: Vec<u32> = (0..256).collect();
        let mut mix = Mix {
            core: Core::new(config).expect("a valid config"),
            rng: ChaCha8Rng::seed_from_u64(7),
            now: Time(0),
            request: 0,
            running: Vec::new(),
            proved: 0,
            step: 1,
            first_turn: turn(None, &[1; 64], &sampled, 0),
            later_turn: turn(Some(0), &[1; 64], &sampled, 0),
            taken: None,
        };
        for id in 0..4 {
            let engine = EngineId(id);
            mix.send(Event::EngineJoined {
                engine,
                url: "http://engine".to_owned(),
            });
        }
        for id in 0..2 {
            let environment = EnvironmentId(id);
            let examples = 100_000;
            mix.send(Event::EnvironmentReady {
                environment,
                examples,
                whole_groups: false,
            });
        }
        for id in 0..WORKERS {
            mix.send(Event::WorkerJoined {
                worker: WorkerId(id),
                environment: EnvironmentId(id as u32 % 2),
                name: "worker".to_owned(),
            });
        }
        mix.publish(0);
        for id in 0..WORKERS {
            mix.lease(WorkerId(id), IN_FLIGHT / WORKERS as u32);
        }
        mix
    }

    fn send(&mut self, event: Event) -> Vec<Effect> {
        self.now = self.now + Duration(50);
        let kind = kind(&event);
        let started = Instant::now();
        let effects = self.core.handle(event, self.now);
        let taken = started.elapsed().as_nanos() as u64;
        let cut = effects
            .iter()
            .any(|effect| matches!(effect, Effect::BatchCut { .. }));
        if let Some(times) = &mut self.taken {
            let kind = if cut { "(cuts a batch)" } else { kind };
            times.push((kind, taken));
        }
        effects
    }

    fn publish(&mut self, version: u64) {
        let (manifest, digest) = (String::new(), String::new());
        let version = PolicyVersion(version);
        self.send(Event::WeightsPublished {
            version,
            manifest,
            digest,
        });
        for id in 0..4 {
            let engine = EngineId(id);
            self.send(Event::EngineProved { engine, version });
        }
        self.proved = version.0;
    }

    fn lease(&mut self, worker: WorkerId, max: u32) {
        self.request += 1;
        let request = RequestId(self.request);
        let effects = self.send(Event::LeaseRequested {
            request,
            worker,
            max,
        });
        for effect in effects {
            let Effect::Lease {
                worker, rollouts, ..
            } = effect
            else {
                continue;
            };
            for leased in rollouts {
                let turns = self.rng.random_range(1..=7);
                self.running.push(Running {
                    rollout: leased.rollout,
                    worker,
                    turns_left: turns,
                    turns: 0,
                });
            }
        }
    }

    /// Something happens to a random rollout; now and then, to something else.
    fn go_on(&mut self) {
        match self.rng.random_range(0..1000) {
            0..=4 => {
                let load = EngineLoad {
                    running: self.rng.random_range(100..3000),
                    kv_cache_usage: self.rng.random_range(0.3..1.0),
                    ..EngineLoad::default()
                };
                let engine = EngineId(self.rng.random_range(0..4));
                self.send(Event::EngineLoad { engine, load });
            }
            5..=54 => {
                let worker = WorkerId(self.rng.random_range(0..WORKERS));
                self.send(Event::WorkerSeen { worker });
            }
            _ => self.advance(),
        }
    }

    fn advance(&mut self) {
        let index = self.rng.random_range(0..self.running.len());
        let running = &mut self.running[index];
        let (rollout, worker) = (running.rollout, running.worker);
        if running.turns_left > 0 {
            running.turns_left -= 1;
            let is_first = running.turns == 0;
            let mut turn = match running.turns {
                0 => self.first_turn.clone(),
                n => Turn {
                    parent: Some(TurnIndex(n - 1)),
                    ..self.later_turn.clone()
                },
            };
            running.turns += 1;
            let version = PolicyVersion(self.proved);
            turn.versions[0].version = version;
            if is_first {
                self.send(Event::SamplingStarted { rollout, version });
            }
            self.send(Event::TurnFinished { rollout, turn });
            return;
        }
        self.running.swap_remove(index);
        let reward = self.rng.random_range(0.0..1.0);
        let effects = self.send(Event::RolloutFinished {
            rollout,
            worker,
            outcome: outcome(reward),
        });
        let cut = effects
            .iter()
            .filter(|effect| matches!(effect, Effect::BatchCut { .. }))
            .count();
        drop(effects);
        (0..cut).for_each(|_| self.train());
        self.lease(worker, 1);
    }

    fn train(&mut self) {
        for rank in 0..8 {
            self.request += 1;
            self.send(Event::BatchRequested {
                request: RequestId(self.request),
                step: Step(self.step),
                rank,
            });
        }
        self.publish(self.step);
        self.step += 1;
    }
}

fn percentile(sorted: &[u64], share: f64) -> f64 {
    let at = ((sorted.len() as f64 * share) as usize).min(sorted.len() - 1);
    sorted[at] as f64 / 1000.0
}

fn line(name: &str, times: &mut [u64]) {
    times.sort_unstable();
    println!(
        "{name:>20} {:>9} {:>9.2} {:>9.2} {:>9.2} {:>10.1}",
        times.len(),
        percentile(times, 0.5),
        percentile(times, 0.99),
        percentile(times, 0.999),
        percentile(times, 1.0),
    );
}

fn play() -> (Mix, Vec<(&'static str, u64)>) {
    let mut mix = Mix::new();
    assert_eq!(mix.running.len(), IN_FLIGHT as usize);
    for _ in 0..EVENTS / 4 {
        mix.go_on();
    }
    mix.taken = Some(Vec::with_capacity(2 * EVENTS));
    for _ in 0..EVENTS {
        mix.go_on();
    }
    let taken = mix.taken.take().expect("it was measured");
    (mix, taken)
}

pub fn measure() {
    let (mix, mut least) = play();
    for _ in 1..RUNS {
        for ((kind, least), (again, taken)) in least.iter_mut().zip(play().1) {
            assert_eq!(*kind, again, "a seed gives one run");
            *least = (*least).min(taken);
        }
    }
    println!(
        "handle: event mix, {IN_FLIGHT} rollouts in flight, {} steps cut, {} now in flight",
        mix.step - 1,
        mix.running.len()
    );
    println!(
        "{:>20} {:>9} {:>9} {:>9} {:>9} {:>10}  (us)",
        "event", "count", "median", "p99", "p99.9", "max"
    );
    let mut all: Vec<u64> = least.iter().map(|(_, taken)| *taken).collect();
    let mut kinds: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for (kind, taken) in least {
        kinds.entry(kind).or_default().push(taken);
    }
    for (kind, times) in &mut kinds {
        line(kind, times);
    }
    line("all", &mut all);
}
