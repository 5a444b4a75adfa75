//! The journal: how fast events are appended and made durable, and how fast a restart reads and plays them back.
//!
//! `cargo bench -p primerl-record --bench journal [-- --full]`
//!
//! The events are those of a run with 10,240 rollouts in flight: groups of 8, batches of 512, rollouts of 1 to 7 turns
//! (mean 4) of 64 prompt and 256 sampled tokens, leases, results, heartbeats, engine loads, versions. They are appended
//! as the driver does: a worker that reports a rollout waits for the disk, and the disk is asked at most every 10 ms. A
//! restart reads them from the page cache. Prints events a second of wall time and of CPU time, and bytes an event.
//! 400,000 events; with `--full` 2,000,000 (several gigabytes in the folder for temporary files).

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

use primerl_core::config::{Admission, LimitRule, RunConfig};
use primerl_core::event::EngineLoad;
use primerl_core::testing::{config, environment, outcome, turn};
use primerl_core::*;
use primerl_record::journal::{Entry, Identity, Journal, read_from, restore, write_snapshot};
use primerl_service::cpu::process_cpu_seconds;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::path::Path;
use std::time::{Duration, Instant};

// As in the orchestrator's binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const IN_FLIGHT: u32 = 10_240;
const WORKERS: u64 = 80;
const BATCH: u32 = 512;
const VOCABULARY: u32 = 151_936;
/// As in the driver.
const BETWEEN_SYNCS: Duration = Duration::from_millis(10);

struct Running {
    rollout: RolloutId,
    worker: WorkerId,
    turns_left: u32,
    turns: u32,
}

/// A run that writes down its events.
struct Mix {
    core: Core,
    rng: ChaCha8Rng,
    now: Time,
    events: Vec<(Time, Event)>,
    request: u64,
    running: Vec<Running>,
    version: PolicyVersion,
    /// To choose from, so that the events fit into memory; which tokens they are does not matter.
    turns: Vec<Turn>,
}

fn core() -> Core {
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
            admission: Admission {
                limit: LimitRule::Fixed,
                start_per_engine: u32::MAX,
                max_per_engine: u32::MAX,
                ..primerl_core::testing::admission()
            },
            ..config().run
        },
        environments: vec![environment("a"), environment("b")],
        ..config()
    };
    Core::new(config).unwrap()
}

fn random_turn(rng: &mut ChaCha8Rng) -> Turn {
    let mut ids = |n| -> Vec<u32> { (0..n).map(|_| rng.random_range(0..VOCABULARY)).collect() };
    let mut turn = turn(None, &ids(64), &ids(256), 0);
    turn.session = "trace-0".into();
    turn.logprobs = (0..256).map(|_| -rng.random::<f32>()).collect();
    for digest in [
        &mut turn.start_digest,
        &mut turn.context_digest,
        &mut turn.answer.said,
        &mut turn.request_digest,
    ] {
        *digest = rng.random();
    }
    turn
}

impl Mix {
    fn record(events: usize) -> Vec<(Time, Event)> {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let mut mix = Mix {
            core: core(),
            now: Time(0),
            events: Vec::with_capacity(events + 8),
            request: 0,
            running: Vec::new(),
            version: PolicyVersion(0),
            turns: (0..64).map(|_| random_turn(&mut rng)).collect(),
            rng,
        };
        mix.begin();
        while mix.events.len() < events {
            mix.go_on();
        }
        mix.events
    }

    fn send(&mut self, event: Event) -> Vec<Effect> {
        self.now = self.now + primerl_core::Duration(50);
        self.events.push((self.now, event.clone()));
        self.core.handle(event, self.now)
    }

    fn begin(&mut self) {
        for id in 0..4 {
            let (engine, url) = (EngineId(id), "http://engine".to_owned());
            self.send(Event::EngineJoined { engine, url });
        }
        for id in 0..2 {
            let (environment, examples) = (EnvironmentId(id), 100_000);
            self.send(Event::EnvironmentReady {
                environment,
                examples,
                whole_groups: false,
            });
        }
        for id in 0..WORKERS {
            self.send(Event::WorkerJoined {
                worker: WorkerId(id),
                environment: EnvironmentId(id as u32 % 2),
                name: format!("worker-{id}"),
            });
        }
        self.publish(PolicyVersion(0));
        for id in 0..WORKERS {
            self.lease(WorkerId(id), IN_FLIGHT / WORKERS as u32);
        }
    }

    fn publish(&mut self, version: PolicyVersion) {
        self.send(Event::WeightsPublished {
            version,
            manifest: format!("/outputs/run/broadcasts/step_{version}/manifest.json"),
            digest: "0123456789abcdef0123456789abcdef".to_owned(),
        });
        for id in 0..4 {
            let engine = EngineId(id);
            self.send(Event::EngineProved { engine, version });
        }
        self.version = version;
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
                let turns_left = self.rng.random_range(1..=7);
                self.running.push(Running {
                    rollout: leased.rollout,
                    worker,
                    turns_left,
                    turns: 0,
                });
            }
        }
    }

    /// Something happens to a random rollout; now and then, to something else.
    fn go_on(&mut self) {
        match self.rng.random_range(0..1000) {
            0..=4 => {
                let engine = EngineId(self.rng.random_range(0..4));
                let load = EngineLoad {
                    running: self.rng.random_range(100..3000),
                    kv_cache_usage: self.rng.random_range(0.3..0.8),
                    ..EngineLoad::default()
                };
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
        if running.turns_left == 0 {
            self.running.swap_remove(index);
            self.finish(rollout, worker);
            return;
        }
        running.turns_left -= 1;
        let number = running.turns;
        running.turns += 1;
        let chosen = self.rng.random_range(0..self.turns.len());
        let mut turn = self.turns[chosen].clone();
        turn.versions[0].version = self.version;
        if number == 0 {
            let version = self.version;
            self.send(Event::SamplingStarted { rollout, version });
        } else {
            (turn.parent, turn.fork) = (Some(TurnIndex(number - 1)), None);
        }
        self.send(Event::TurnFinished { rollout, turn });
    }

    fn finish(&mut self, rollout: RolloutId, worker: WorkerId) {
        let mut outcome = outcome(self.rng.random_range(0.0..1.0));
        outcome.traces[0].session = "trace-0".to_owned();
        outcome.traces[0].metrics = [("exact".to_owned(), 1.0)].into();
        let effects = self.send(Event::RolloutFinished {
            rollout,
            worker,
            outcome,
        });
        for effect in effects {
            if let Effect::BatchCut { batch } = effect {
                self.train(batch.step);
            }
        }
        self.lease(worker, 1);
    }

    fn train(&mut self, step: Step) {
        for rank in 0..8 {
            self.request += 1;
            let request = RequestId(self.request);
            self.send(Event::BatchRequested {
                request,
                step,
                rank,
            });
        }
        self.publish(PolicyVersion(step.0));
    }
}

/// CPU seconds of the calling thread, or of a part of the kernel's table of processes.
fn cpu_seconds(of: &str) -> f64 {
    let schedule = std::fs::read_to_string(format!("/proc/{of}/schedstat")).unwrap();
    let nanoseconds: f64 = schedule.split_whitespace().next().unwrap().parse().unwrap();
    nanoseconds / 1e9
}

/// CPU seconds of the threads with this name.
fn threads_cpu_seconds(name: &str) -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let ids = threads.map(|thread| thread.unwrap().file_name().into_string().unwrap());
    ids.map(|id| format!("self/task/{id}"))
        .filter(|task| {
            std::fs::read_to_string(format!("/proc/{task}/comm"))
                .unwrap()
                .trim()
                == name
        })
        .map(|task| cpu_seconds(&task))
        .sum()
}

fn line(what: &str, events: usize, wall: f64, cpu: f64) {
    println!(
        "{what:<28} {:>12.0} events/s   {:>6.2} us CPU an event   ({wall:.2} s wall, {cpu:.2} s CPU)",
        events as f64 / wall,
        cpu * 1e6 / events as f64,
    );
}

fn append(folder: &Path, events: &[(Time, Event)]) {
    let mut journal = Journal::create(folder).unwrap();
    let progress = journal.progress();
    let (started, before) = (Instant::now(), cpu_seconds("thread-self"));
    let mut next_sync = started;
    let mut somebody_waits = false;
    for (now, event) in events {
        journal.append(*now, event).unwrap();
        somebody_waits |= matches!(event, Event::RolloutFinished { .. });
        if somebody_waits && Instant::now() >= next_sync {
            journal.request_sync().unwrap();
            somebody_waits = false;
            next_sync = Instant::now() + BETWEEN_SYNCS;
        }
    }
    journal.request_sync().unwrap();
    let appending = cpu_seconds("thread-self") - before;
    while progress.borrow().durable < events.len() as u64 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let wall = started.elapsed().as_secs_f64();
    let writing = threads_cpu_seconds("journal");
    println!(
        "{:.0} bytes an event, {:.0} MB/s to the disk",
        journal.bytes() as f64 / events.len() as f64,
        journal.bytes() as f64 / 1e6 / wall
    );
    line(
        "appended and durable",
        events.len(),
        wall,
        appending + writing,
    );
    println!(
        "    of its CPU: {:.2} us an event in the driver's thread, {:.2} us in the writer's",
        appending * 1e6 / events.len() as f64,
        writing * 1e6 / events.len() as f64
    );
}

/// The least of three. Both threads count: one reads ahead.
fn measure(what: &str, events: usize, mut routine: impl FnMut() -> u64) {
    let mut least = (f64::INFINITY, f64::INFINITY);
    for _ in 0..3 {
        let (started, before) = (Instant::now(), process_cpu_seconds().unwrap());
        assert_eq!(routine(), events as u64);
        let wall = started.elapsed().as_secs_f64();
        let cpu = process_cpu_seconds().unwrap() - before;
        least = (least.0.min(wall), least.1.min(cpu));
    }
    line(what, events, least.0, least.1);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` only has to see that it builds.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let full = arguments.iter().any(|argument| argument == "--full");
    let events = Mix::record(if full { 2_000_000 } else { 400_000 });
    let count = events.len();
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("journal");
    append(&folder, &events);
    write_snapshot(&folder, 0, &Identity::new(), &core()).unwrap();
    measure("read and decoded", count, || {
        read_from(&folder, 0, |_, entry| drop(entry))
            .unwrap()
            .events
    });
    measure("read, decoded and handled", count, || {
        let mut core = core();
        let played = read_from(&folder, 0, |_, Entry(now, event)| {
            core.handle(event, now);
        });
        played.unwrap().events
    });
    // What the core takes of it; the events are given to it as copies, made before.
    for _ in 0..2 {
        let (copies, mut core) = (events.clone(), core());
        let (started, before) = (Instant::now(), cpu_seconds("thread-self"));
        for (now, event) in copies {
            core.handle(event, now);
        }
        let wall = started.elapsed().as_secs_f64();
        let cpu = cpu_seconds("thread-self") - before;
        line("handled only", count, wall, cpu);
    }
    drop(events);
    measure("restored (all of it)", count, || {
        restore(&folder).unwrap().tail.events
    });
}
